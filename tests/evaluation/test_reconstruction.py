"""Reconstructing masked patches: which pixels change, and the metrics against image-by-image arithmetic."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kiloword.api import Matcher
from kiloword.config.recipes import ImageConfig, sizes
from kiloword.data.scenes.source import parse_scenes
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.evaluation import evaluate
from kiloword.evaluation.reconstruction import values, wrong_captions
from kiloword.explain.reconstruct import fill, mim_settings, reconstruct
from kiloword.methods.coca import masking, sycoca as masked_images
from kiloword.methods.registry import preset
from kiloword.model.image import unfold
from kiloword.models.build import build
from kiloword.types import Skipped, Texts
from tars import draw, noise_batch

CAPTIONS = ["a red circle", "two blue squares", "a green star left of a circle"]
IMAGE = ImageConfig(size=32, patch=8, width=32, depth=1, heads=2, mlp=64)  # 16 patches
PIXELS = noise_batch(3, 32)
HIDDEN = torch.tensor([[0, 5, 15], [1, 2, 3], [4, 8, 12]])


def matcher(**settings: Any) -> Matcher:
    made = preset("sycoca", settings)
    model = build(replace(sizes()["debug"], image=IMAGE), made, seed=1)
    return Matcher(model, Tokenizer.train([c for c in CAPTIONS for _ in range(3)], 300), made)


def packed(model: Matcher, captions: list[str]) -> Texts:
    return model.tokenizer.encode(captions, model.model.config.text)


def test_only_hidden_patches_are_painted() -> None:
    model = matcher().model
    out = fill(model, PIXELS, HIDDEN, torch.full((3, 3, 192), 0.0))
    mean = torch.tensor([round(255 * m) for m in model.config.preprocess.mean], dtype=torch.uint8)
    for n in range(3):
        for p in range(16):
            patch = (slice(None), slice(p // 4 * 8, p // 4 * 8 + 8), slice(p % 4 * 8, p % 4 * 8 + 8))
            expected = mean[:, None, None].expand(3, 8, 8) if p in HIDDEN[n] else PIXELS[n][patch]
            assert torch.equal(out[n][patch], expected)
    true = masked_images.pixels(model, PIXELS, HIDDEN, norm_pix=False)
    assert torch.equal(fill(model, PIXELS, HIDDEN, true), PIXELS)
    wild = fill(model, PIXELS, HIDDEN, torch.full_like(true, 100.0))
    assert unfold(wild, 8).gather(1, HIDDEN[..., None].expand(-1, -1, 192)).unique().tolist() == [255]


@pytest.mark.parametrize("norm_pix", [False, True])
@pytest.mark.parametrize("op", ["token", "drop"])
def test_what_is_painted_is_what_the_term_compares(op: Any, norm_pix: bool) -> None:
    """Alone and in a batch; with norm_pix the loss of the term is that of the same pixels over the deviation."""
    model = matcher(mim_op=op, norm_pix=norm_pix)
    settings, m = mim_settings(model), model.model
    with torch.no_grad():
        texts = packed(model, CAPTIONS)
        right, none = reconstruct(m, PIXELS, HIDDEN, [texts, packed(model, [""] * 3)], settings)
        assert not torch.allclose(right, none)
        for n in range(3):
            one = slice(n, n + 1)
            alone = reconstruct(m, PIXELS[one], HIDDEN[one], [texts.cut(n, n + 1)], settings)[0]
            torch.testing.assert_close(alone[0], right[n], atol=1e-5, rtol=1e-4)
        blank = fill(m, PIXELS, HIDDEN, torch.zeros(3, 3, 192))  # hidden pixels do not leak
        torch.testing.assert_close(masking.visible(m, blank, HIDDEN, op), masking.visible(m, PIXELS, HIDDEN, op))
        tokens = masking.visible(m, PIXELS, HIDDEN, op)
        found = m.more["image_decoder"](tokens, HIDDEN, m.text_tower(texts), m.text_tower.packing(texts))
        target = masked_images.pixels(m, PIXELS, HIDDEN, norm_pix)
        true = masked_images.pixels(m, PIXELS, HIDDEN, norm_pix=False)
        deviation = (true.var(-1) + 1e-6).sqrt() if norm_pix else 1.0
    term = masked_images.distance(found, target)
    torch.testing.assert_close(masked_images.distance(right, true), term * deviation, atol=1e-5, rtol=1e-4)


def test_metrics_are_arithmetic_over_images() -> None:
    losses = {"right": [1.0, 2.0, 3.0, 4.0], "wrong": [1.5, 1.0, 3.0, 6.0], "none": [2.0] * 4, "mean_colour": [0.5] * 4}
    given = {name: torch.tensor(each, dtype=torch.float64) for name, each in losses.items()}
    l1 = {"right": 2.5, "wrong": 2.875, "none": 2.0, "mean_colour": 0.5}
    expected = {f"reconstruction_l1_{name}@random": value for name, value in l1.items()}
    expected |= {"right_beats_wrong@random": 2.5 / 4, "wrong_minus_right@random": 0.375}
    expected |= {"wrong_minus_right_se@random": math.sqrt((0.125**2 + 1.375**2 + 0.375**2 + 1.625**2) / 3) / 2}
    expected |= {"right_beats_none@random": 1.5 / 4, "none_minus_right@random": -0.5}
    expected |= {"none_minus_right_se@random": math.sqrt(5 / 3) / 2}
    assert dict(values(given, "random")) == pytest.approx(expected)


@pytest.mark.parametrize("settings", [{}, {"norm_pix": True, "mim_op": "drop", "mim_share": 0.25}])
def test_task_against_a_loop_over_images(settings: dict[str, Any]) -> None:
    """Each image alone, its hidden patches by their definition, pixels compared one by one."""
    model, source = matcher(**settings), parse_scenes("scenes:test?n=7", 32)
    found = evaluate(model, "reconstruction", source, batch=3)
    records = [source.record(row) for row in range(7)]
    wrong = wrong_captions(source, {row: record.captions for row, record in enumerate(records)})
    images = torch.stack([torch.from_numpy(np.array(r.image)).permute(2, 0, 1) for r in records])
    m, mim = model.model, mim_settings(model)
    whole = ((images.double().mean(0) / 255 - m.mean) / m.std)[None]
    losses: dict[str, list[float]] = {}
    with torch.no_grad():
        for row, record in enumerate(records):
            image, right = images[row : row + 1], record.captions[0]
            tokens = m.text_tower(packed(model, [right]))
            words = m.head.pooling.project_text_tokens(tokens)[: -len(m.config.text.extra_tokens)]
            patches = m.head.pooling.project_image_tokens(m.image_tokens(image)[0, 1:])
            scored = torch.cosine_similarity(patches[:, None], words, dim=2).amax(1).tolist()
            hidden = torch.tensor([sorted(sorted(range(16), key=lambda p: -scored[p])[: int(16 * mim.mim_share)])])
            true = unfold(m.normalise(image), 8)[0, hidden[0]]
            for name, caption in {"right": right, "wrong": wrong[row], "none": ""}.items():
                (painted,) = reconstruct(m, image, hidden, [packed(model, [caption])], mim)
                losses.setdefault(name, []).append(float((painted[0] - true).abs().mean()))
            visible = [p for p in range(16) if p not in hidden[0].tolist()]
            colour = unfold(m.normalise(image), 8)[0, visible].unflatten(-1, (3, 64)).mean((0, 2))
            guesses = {"mean_colour": colour.repeat_interleave(64), "mean_image": unfold(whole, 8)[0, hidden[0]]}
            for name, guess in guesses.items():
                losses.setdefault(name, []).append(float((guess - true).abs().mean()))
    for name, each in losses.items():
        assert found[f"reconstruction_l1_{name}@attentive"] == pytest.approx(sum(each) / 7, rel=1e-4), name
    beats = sum(r < w for r, w in zip(losses["right"], losses["wrong"], strict=True)) / 7
    assert found["right_beats_wrong@attentive"] == pytest.approx(beats)
    assert found["images"] == 7
    assert ("reconstruction_l1_own_mean@random" in found) is mim.norm_pix
    assert evaluate(model, "reconstruction", source, batch=7) == pytest.approx(found, rel=1e-4, abs=1e-7)


def test_wrong_captions_are_others_and_false() -> None:
    source = parse_scenes("scenes:test?n=60&captions=2&levels=1", 32)  # general: true of many others
    rows, captions = list(range(10, 60)), [source.captions(row) for row in range(10, 60)]
    by_row = dict(zip(rows, captions, strict=True))
    found = wrong_captions(source, by_row)
    assert sorted(found) == rows
    for row, own in zip(rows, captions, strict=True):
        assert found[row] not in own
        assert found[row] in {other[0] for other in captions}
        assert not source.relevance([found[row]], [row])[0, 0]
    assert len(set(found.values())) > 10


def test_unusable_images_are_named(tmp_path: Path) -> None:
    captions = {"a": ["a dog"], "b": ["a dog"], "c": ["a cat", "a dog"], "d": []}
    lines = [json.dumps({"image": f"{name}.png", "captions": texts}) for name, texts in captions.items()]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    for name in captions:
        draw(tmp_path / f"{name}.png", ord(name))
    skipped = list[Skipped]()
    found = evaluate(matcher(), "reconstruction", str(tmp_path / "data.jsonl"), skipped=skipped)
    assert (found["images"], found["skipped"]) == (2, 2)
    assert {one.key[0]: "wrong" in one.reason for one in skipped} == {"d": False, "c": True}


def test_models_that_read_no_text_or_do_not_paint(matcher_of: Callable[[str], Matcher]) -> None:
    found = evaluate(matcher(guide="none"), "reconstruction", "scenes:test?n=4")
    names = {f"reconstruction_l1_{name}" for name in ("none", "mean_colour", "mean_image")}
    assert {name.split("@")[0] for name in found} == {"images", "skipped", *names}
    unknown = matcher()
    unknown.method = None
    refused = ((matcher(), 1, "different captions"), (matcher_of("coca"), 4, "image decoder"), (unknown, 4, "load"))
    for model, n, word in refused:
        with pytest.raises(ValueError, match=word):
            evaluate(model, "reconstruction", f"scenes:test?n={n}")
