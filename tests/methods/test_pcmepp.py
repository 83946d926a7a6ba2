"""The preset pcme++ and its components; variances from a second path through the towers, written out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kiloword.config.recipes import ModelFile, sizes
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.methods.defaults import MUON, default_recipe
from kiloword.methods.registry import preset
from kiloword.models.build import build
from kiloword.models.model_folder import save_model
from kiloword.training import start
from kiloword.training.optimizer import groups
from kiloword.verify.batch import batch
from kiloword.verify.checks import EXACT
from kiloword.verify.suite import Way, gradients, gradients_over_ranks
from literal import CAPTIONS, captions_of, linear, made, norm, pairs, self_block, small
from parts import learner, losses, model

DEBUG = sizes()["debug"]


def test_thresholds_and_counts_are_those_of_all_ranks() -> None:
    reference, found = (
        gradients("pcme+++deterministic"),
        gradients_over_ranks("pcme+++deterministic", 2, [Way(micro=2)])[Way(micro=2)],
    )
    largest = max(float(g.abs().max()) for g in reference.values())
    assert found.keys() == reference.keys()
    assert max(float((found[name] - g).abs().max()) for name, g in reference.items()) < EXACT * largest


def logit_of(name: str, settings: dict[str, Any] | None = None) -> tuple[float, float]:
    """The logits of the scores 0 and 1."""
    head = model(name, settings).head
    low, high = head.logits(torch.tensor([0.0, 1.0], dtype=torch.float64)).tolist()
    return low, high


def test_settings_reach_their_places() -> None:
    settings = {"scale": 3.0, "bias": 2.0, "pseudo": 0.0, "reduction": "images", "vib": 0.0}
    assert logit_of("pcme++", settings) == pytest.approx((2 - 3 * 2, 2))  # of a distance 2 - 2 score
    some, made = batch(method="pcme++"), learner("pcme++", settings)
    with_pseudo = learner("pcme++", settings | {"pseudo": 0.1})
    assert losses(made, some)["pair"] != losses(with_pseudo, some)["pair"]
    by_pairs = losses(learner("pcme++", settings | {"reduction": "pairs"}), some)["pair"]
    torch.testing.assert_close(losses(made, some)["pair"], by_pairs * len(some.texts))
    assert not made.terms
    weights = {name: weight for name, (weight, _) in preset("pcme++").terms.items()}
    assert weights == {"vib_image": 1e-4, "vib_text": 1e-4}
    for both in (True, False):
        assert preset("pcme++", {"bidirectional": both}).shape(DEBUG).text.causal != both


@pytest.mark.parametrize("name", ["pcme+++ppcl", "prolip+ppcl", "clip+gaussian+ppcl", "clip+ppcl+gaussian"])
def test_ppcl_scales_scores(name: str) -> None:
    assert logit_of(name) == pytest.approx((-10, 0), abs=1e-5)
    assert model(name).head.uncertainty is not None


def test_a_deterministic_head_has_its_own_scale_and_limit() -> None:
    head = model("prolip+deterministic", {"deterministic": {"max_scale": 50.0}}).head
    inner = head.get_submodule("deterministic")
    assert inner.bias is None
    for one in (inner, head):
        one.log_scale.data.fill_(9.0)
    head.clamp_()
    assert inner.log_scale.exp().item() == pytest.approx(50.0)
    assert head.log_scale.item() == 9.0
    sigmoid = model("prolip+deterministic", {"deterministic": {"loss": "sigmoid", "bias": -7.0}}).head.deterministic
    assert (sigmoid.log_scale.exp().item(), sigmoid.bias.item()) == (pytest.approx(10.0), -7.0)
    scales = [name for name, _ in groups(learner("prolip+deterministic"), MUON)["scale"]]
    assert scales == [f"model.head.{name}" for name in ("log_scale", "bias", "deterministic.log_scale")]


def test_the_weight_of_the_deterministic_loss() -> None:
    def loss(name: str, settings: dict[str, Any] | None = None) -> float:
        return losses(learner(name, settings), batch(method=name))["pair"].item()

    plain, once = loss("pcme++"), loss("pcme+++deterministic")
    twice = loss("pcme+++deterministic", {"deterministic": {"weight": 2.0}})
    assert once - plain > 0.1
    assert twice - plain == pytest.approx(2 * (once - plain), rel=1e-12)


def test_a_scale_of_scores_is_none_of_distances(tmp_path: Path) -> None:
    """Starting from another method's weights, only a scale of the same kind is taken over."""
    old = build(DEBUG, preset("siglip"), 3)
    file = ModelFile(method="siglip", settings={}, model=old.config, size="debug")
    save_model(tmp_path, old, Tokenizer.train(["a small red star"], 300), file)
    recipe = replace(default_recipe("pcme++", "debug"), init=str(tmp_path))
    for name, taken in (("pcme++", False), ("prolip", True)):
        fresh = build(DEBUG, preset(name), 0)
        start.load(fresh, replace(recipe, method=name))
        assert fresh.head.log_scale.exp().item() == pytest.approx(10.0 if taken else 5.0)
        weight = "text_tower.blocks.0.attention.qkv.weight"
        assert torch.equal(fresh.state_dict()[weight], old.state_dict()[weight])


# A second path, "multi-head"

CAUSAL = {"variance_blocks": 1, "bidirectional": False}


def image_path(image: Tensor, model: Any, blocks: int) -> tuple[Tensor, Tensor]:
    """The class token of the tower, normed, and that of the second path, which is not.

    naver-ai/pcmepp, hf_models/transformer.py, VisionTransformer: both paths share all blocks but the last ones.
    """
    tower, patch = model.image_tower, model.config.image.patch
    rows = [tower.class_token + tower.positions[0]]
    side = model.config.image.size // patch
    for n in range(side**2):
        r, c = divmod(n, side)
        pixels = image[:, r * patch : (r + 1) * patch, c * patch : (c + 1) * patch]
        rows.append(tower.patches.weight @ pixels.flatten() + tower.positions[1 + n])
    x = torch.stack(rows)
    x = norm(x, tower.pre_norm) if tower.pre_norm is not None else x
    return two_paths(x, tower, blocks, False, 0)


def text_path(words: list[int], model: Any, blocks: int, causal: bool) -> tuple[Tensor, Tensor]:
    """The same of the last token of a text (hf_models/hf_clip.py, encode_text); `words` without [UNC]."""
    tower = model.text_tower
    x = torch.stack([tower.tokens[i] + tower.positions[n] for n, i in enumerate(words)])
    return two_paths(x, tower, blocks, causal, len(words) - 1)


def two_paths(x: Tensor, tower: Any, blocks: int, causal: bool, place: int) -> tuple[Tensor, Tensor]:
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
    model: Any = made("pcme++", {**CAUSAL, "variance_blocks": blocks}, shape).model
    some, pooling, gaussian = pairs(model, CAPTIONS), model.head.pooling, model.head.uncertainty
    ids = captions_of(some.texts)
    assert all(own[-1] == model.config.text.special["unc"] for own in ids)
    images = [image_path(image, model, blocks) for image in model.normalise(some.images)]
    texts = [text_path(own[:-1], model, blocks, True) for own in ids]
    for found, paths, projection, layer in (
        (model.encode_image(some.images)[1], images, pooling.image_projection, gaussian.image_log_var),
        (model.encode_text(some.texts)[1], texts, pooling.text_projection, gaussian.text_log_var),
    ):
        for n, (mean, beside) in enumerate(paths):
            projected = mean @ projection.weight.T
            torch.testing.assert_close(found["vec"][n], projected / projected.norm(), rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(found["log_var"][n], linear(beside, layer), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_the_means_are_those_of_a_model_without_variances(bidirectional: bool) -> None:
    """No token of a tower attends to [UNC], in a bidirectional one neither."""
    model: Any = made("pcme++", {**CAUSAL, "bidirectional": bidirectional}).model
    some = pairs(model, CAPTIONS)
    before = model.encode_text(some.texts)[1], model.encode_image(some.images)[1]
    with torch.no_grad():
        model.text_tower.tokens[model.config.text.special["unc"]] += 1.0
        for name, p in model.named_parameters():
            if "uncertainty_blocks" in name:
                p += 1.0
    after = model.encode_text(some.texts)[1], model.encode_image(some.images)[1]
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old["vec"], new["vec"])
        assert not torch.equal(old["log_var"], new["log_var"])
