"""Variances from a second path through the towers, PCME++'s "multi-head": against its public code, written out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kiloword.methods.method import Method
from kiloword.methods.pcmepp.preset import Settings
from kiloword.methods.pcmepp.preset import preset as pcmepp
from kiloword.methods.registry import preset
from kiloword.model.model import Model
from kiloword.models.build import build
from kiloword.verify import suite
from kiloword.verify.checks import compare
from literal import CAPTIONS, captions_of, linear, made, norm, pairs, self_block, small

CAUSAL = {"variance_blocks": 1, "bidirectional": False}


def image_path(image: Tensor, model: Model, blocks: int) -> tuple[Tensor, Tensor]:
    """The class token of the tower, normed, and that of the second path, which is not.

    naver-ai/pcmepp, hf_models/transformer.py, VisionTransformer: both paths share all blocks but the last ones.
    """
    tower: Any = model.image_tower
    kernel, patch = tower.patches.weight, model.config.image.patch
    rows = [tower.class_token + tower.positions[0]]
    side = model.config.image.size // patch
    for n in range(side**2):
        r, c = divmod(n, side)
        pixels = image[:, r * patch : (r + 1) * patch, c * patch : (c + 1) * patch]
        rows.append(kernel @ pixels.flatten() + tower.positions[1 + n])
    x = torch.stack(rows)
    x = norm(x, tower.pre_norm) if tower.pre_norm is not None else x
    shared = len(tower.blocks) - blocks
    for block in tower.blocks[:shared]:
        x = self_block(x, block, causal=False)
    mean = beside = x
    for own, other in zip(tower.blocks[shared:], tower.uncertainty_blocks, strict=True):
        mean, beside = self_block(mean, own, causal=False), self_block(beside, other, causal=False)
    return norm(mean, tower.norm)[0], beside[0]


def text_path(words: list[int], model: Model, blocks: int, causal: bool, place: int) -> tuple[Tensor, Tensor]:
    """The same of the token at `place` of a text (hf_models/hf_clip.py, encode_text); `words` without [UNC]."""
    tower: Any = model.text_tower
    x = torch.stack([tower.tokens[i] + tower.positions[n] for n, i in enumerate(words)])
    shared = len(tower.blocks) - blocks
    for block in tower.blocks[:shared]:
        x = self_block(x, block, causal)
    mean = beside = x
    for own, other in zip(tower.blocks[shared:], tower.uncertainty_blocks, strict=True):
        mean, beside = self_block(mean, own, causal), self_block(beside, other, causal)
    return norm(mean, tower.norm)[place], beside[place]


@pytest.mark.parametrize("blocks", [1, 2])
def test_both_paths_written_out(blocks: int) -> None:
    base = small()
    shape = replace(base, image=replace(base.image, depth=2), text=replace(base.text, depth=2))
    learner = made("pcme++", {**CAUSAL, "variance_blocks": blocks}, shape)
    model, batch = learner.model, pairs(learner.model, CAPTIONS)
    pooling, gaussian = model.head.pooling, model.head.uncertainty
    assert isinstance(gaussian, torch.nn.Module)
    _, images = model.encode_image(batch.images)
    for n, image in enumerate(model.normalise(batch.images)):
        mean, beside = image_path(image, model, blocks)
        projected = mean @ pooling.image_projection.weight.T  # type: ignore[union-attr]
        torch.testing.assert_close(images["vec"][n], projected / projected.norm(), rtol=1e-10, atol=1e-12)
        expected = linear(beside, gaussian.image_log_var)  # type: ignore[arg-type]
        torch.testing.assert_close(images["log_var"][n], expected, rtol=1e-10, atol=1e-12)
    _, texts = model.encode_text(batch.texts)
    for n, ids in enumerate(captions_of(batch.texts)):
        assert ids[-1] == model.config.text.special["unc"]
        mean, beside = text_path(ids[:-1], model, blocks, True, len(ids) - 2)
        projected = mean @ pooling.text_projection.weight.T  # type: ignore[union-attr]
        torch.testing.assert_close(texts["vec"][n], projected / projected.norm(), rtol=1e-10, atol=1e-12)
        expected = linear(beside, gaussian.text_log_var)  # type: ignore[arg-type]
        torch.testing.assert_close(texts["log_var"][n], expected, rtol=1e-10, atol=1e-12)


def test_the_means_are_those_of_a_model_without_variances() -> None:
    """No token of a tower attends to [UNC], in a bidirectional one neither."""
    for bidirectional in (False, True):
        settings = {**CAUSAL, "bidirectional": bidirectional}
        model = made("pcme++", settings).model
        batch = pairs(model, CAPTIONS)
        before = model.encode_text(batch.texts)[1], model.encode_image(batch.images)[1]
        with torch.no_grad():
            model.text_tower.tokens[model.config.text.special["unc"]] += 1.0
            for name, p in model.named_parameters():
                if "uncertainty_blocks" in name:
                    p += 1.0
        after = model.encode_text(batch.texts)[1], model.encode_image(batch.images)[1]
        for old, new in zip(before, after, strict=True):
            assert torch.equal(old["vec"], new["vec"])
            assert not torch.equal(old["log_var"], new["log_var"])


def multi_head() -> Method:
    return pcmepp(Settings(variance_blocks=1))


def test_micro_batches_and_checkpointing() -> None:
    method = "test_multi_head:multi_head"
    reference = suite.gradients(method)
    names = [name for name in reference if "uncertainty_blocks" in name]
    assert len(names) > 20
    assert all(float(reference[name].abs().max()) > 0 for name in names if "qkv.bias" not in name)
    measured = suite.gradients(method, suite.Way(micro=4, checkpointing="whole"))
    assert compare("", measured, reference).passed


@pytest.mark.slow
def test_every_check_of_the_suite() -> None:
    assert not [check for check in suite.verify("test_multi_head:multi_head", (1, 2)) if not check.passed]


def test_with_clips_loss() -> None:
    """The row "PCME++ + CLIP, multi-head" of ProLIP's table C.3."""
    learner = made("pcme+++deterministic", CAUSAL)
    batch = pairs(learner.model, CAPTIONS)
    learner(batch, learner.counts([batch]))["loss"].backward()
    parts = dict(learner.model.named_parameters())
    for name in ("head.deterministic.log_scale", "head.log_scale", "image_tower.uncertainty_blocks.0.mlp.fc.weight"):
        gradient = parts[name].grad
        assert gradient is not None
        assert float(gradient.abs().max()) > 0, name


def test_more_blocks_than_the_tower_has() -> None:
    with pytest.raises(ValueError, match="3 blocks for the variance beside a tower of 1"):
        build(small(), preset("pcme++", {"variance_blocks": 3}))
