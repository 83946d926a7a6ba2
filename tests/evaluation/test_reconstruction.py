"""Reconstructing masked patches: which pixels change, and the metrics against image-by-image arithmetic."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kiloword.api import Matcher
from kiloword.cli.main import main
from kiloword.config.recipes import ImageConfig, ModelFile, sizes
from kiloword.data.scenes.source import parse_scenes
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.evaluation import evaluate
from kiloword.evaluation.reconstruction.page import report
from kiloword.evaluation.reconstruction.task import Judge, values, wrong_captions
from kiloword.explain.reconstruct import caption_similarity, fill, mask_settings, mean_colour, mim_settings, reconstruct
from kiloword.explain.strips import possible
from kiloword.methods.coca import masking
from kiloword.methods.coca import sycoca as masked_images
from kiloword.methods.coca.masking import MaskSettings
from kiloword.methods.registry import preset
from kiloword.model.image import unfold
from kiloword.models.build import build
from kiloword.models.model_folder import save_model
from kiloword.report.overlay import covered
from kiloword.types import Record, Skipped, Texts
from kiloword.verify.batch import config
from noise import noise

CAPTIONS = ["a red circle", "two blue squares", "a green star left of a circle"]
IMAGE = ImageConfig(size=32, patch=8, width=32, depth=1, heads=2, mlp=64)  # 16 patches


def matcher(method: str = "sycoca", **settings: Any) -> Matcher:
    made = preset(method, settings)
    model = build(replace(sizes()["debug"], image=IMAGE), made, seed=1)
    return Matcher(model, Tokenizer.train([c for c in CAPTIONS for _ in range(3)], 300), made)


def pixels(n: int = 3) -> Tensor:
    return noise(n, 32)


def packed(model: Matcher, captions: list[str]) -> Texts:
    return model.tokenizer.encode(captions, model.model.config.text)


@pytest.mark.parametrize("op", ["token", "drop"])
def test_only_hidden_patches_are_painted(op: str) -> None:
    model = matcher(mim_op=op).model
    hidden = torch.tensor([[0, 5, 15], [1, 2, 3], [4, 8, 12]])
    painted = torch.full((3, 3, 192), 0.0)
    out = fill(model, pixels(), hidden, painted)
    mean = [round(255 * m) for m in model.config.preprocess.mean]
    for n in range(3):
        for p in range(16):
            y, x = p // 4 * 8, p % 4 * 8
            patch = out[n, :, y : y + 8, x : x + 8]
            if p in hidden[n].tolist():
                assert [patch[c].unique().tolist() for c in range(3)] == [[m] for m in mean]
            else:
                assert torch.equal(patch, pixels()[n, :, y : y + 8, x : x + 8])
    assert out.dtype == torch.uint8


def test_true_pixels_paint_the_image_itself_and_wild_ones_stay_in_range() -> None:
    model = matcher().model
    hidden = masking.select(torch.rand(3, 16, generator=torch.Generator().manual_seed(0)), 0.5, most=True)
    true = masked_images.pixels(model, pixels(), hidden, norm_pix=False)
    assert torch.equal(fill(model, pixels(), hidden, true), pixels())
    wild = fill(model, pixels(), hidden, torch.full_like(true, 100.0))
    assert unfold(wild, 8).gather(1, hidden[..., None].expand(-1, -1, 192)).unique().tolist() == [255]


@pytest.mark.parametrize("norm_pix", [False, True])
@pytest.mark.parametrize("op", ["token", "drop"])
def test_what_is_painted_is_what_the_term_compares(op: Any, norm_pix: bool) -> None:
    """Alone and in a batch; with norm_pix the loss of the term is that of the same pixels over the deviation."""
    model = matcher(mim_op=op, norm_pix=norm_pix)
    settings, m = mim_settings(model), model.model
    hidden = torch.tensor([[0, 5, 15], [1, 2, 3], [4, 8, 12]])
    with torch.no_grad():
        texts = packed(model, CAPTIONS)
        right, none = reconstruct(m, pixels(), hidden, [texts, packed(model, [""] * 3)], settings)
        assert not torch.allclose(right, none)
        for n in range(3):
            one = slice(n, n + 1)
            alone = reconstruct(m, pixels()[one], hidden[one], [texts.cut(n, n + 1)], settings)[0]
            torch.testing.assert_close(alone[0], right[n], atol=1e-5, rtol=1e-4)
        tokens = masking.visible(m, pixels(), hidden, op)
        found = m.more["image_decoder"](tokens, hidden, m.text_tower(texts), m.text_tower.packing(texts))
        target = masked_images.pixels(m, pixels(), hidden, norm_pix)
        true = masked_images.pixels(m, pixels(), hidden, norm_pix=False)
        deviation = (true.var(-1) + 1e-6).sqrt() if norm_pix else 1.0
    term = masked_images.distance(found, target)
    torch.testing.assert_close(masked_images.distance(right, true), term * deviation, atol=1e-5, rtol=1e-4)


def test_hidden_pixels_do_not_leak() -> None:
    model = matcher()
    hidden = torch.tensor([[0, 5, 15]])
    blank = pixels(1).clone()
    for p in (0, 5, 15):
        blank[..., p // 4 * 8 : p // 4 * 8 + 8, p % 4 * 8 : p % 4 * 8 + 8] = 0
    with torch.no_grad():
        texts = packed(model, CAPTIONS[:1])
        (one,), (two,) = (reconstruct(model.model, x, hidden, [texts], mim_settings(model)) for x in (pixels(1), blank))
    torch.testing.assert_close(one, two)


def test_caption_similarity_is_the_greatest_similarity() -> None:
    model = matcher()
    m = model.model
    with torch.no_grad():
        found = caption_similarity(m, pixels(), packed(model, CAPTIONS), MaskSettings())
        for n, caption in enumerate(CAPTIONS):
            texts = packed(model, [caption])
            words = m.head.pooling.project_text_tokens(m.text_tower(texts))[: -len(m.config.text.extra_tokens)]
            patches = m.head.pooling.project_image_tokens(m.image_tokens(pixels()[n : n + 1])[0, 1:])
            literal = [max(float(torch.cosine_similarity(p, w, dim=0)) for w in words) for p in patches]
            torch.testing.assert_close(found[n], torch.tensor(literal), atol=1e-5, rtol=1e-4)


def test_mean_colour_is_that_of_what_is_seen() -> None:
    images = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    hidden = torch.tensor([[0, 5], [3, 15]])
    found = mean_colour(images, hidden, 8)
    assert found.shape == (2, 2, 192)
    for n in range(2):
        for c in range(3):
            seen = [
                float(images[n, c, y, x])
                for y in range(32)
                for x in range(32)
                if y // 8 * 4 + x // 8 not in hidden[n].tolist()
            ]
            torch.testing.assert_close(found[n, :, c * 64 : c * 64 + 64], torch.full((2, 64), sum(seen) / len(seen)))


def test_covered_patches_are_striped_and_others_untouched() -> None:
    image = np.random.default_rng(0).integers(0, 255, (37, 50, 3), dtype=np.uint8)
    hidden = np.zeros((4, 4), bool)
    hidden[0, 3] = hidden[2, 1] = True
    out = covered(image, hidden)
    changed = (out != image).any(-1)
    for y, x in np.ndindex(37, 50):
        if not hidden[y * 4 // 37, x * 4 // 50]:
            assert not changed[y, x]
        else:
            assert out[y, x, 0] == out[y, x, 1] == out[y, x, 2]
    assert len(np.unique(out[0, 45:])) == 2


def test_metrics_are_arithmetic_over_images() -> None:
    losses = {"right": [1.0, 2.0, 3.0, 4.0], "wrong": [1.5, 1.0, 3.0, 6.0], "none": [2.0] * 4, "mean_colour": [0.5] * 4}
    found = dict(values(losses, "random"))
    differences = [0.5, -1.0, 0.0, 2.0]
    mean = sum(differences) / 4
    spread = math.sqrt(sum((d - mean) ** 2 for d in differences) / 3)
    assert found == pytest.approx(
        {
            "reconstruction_l1_right@random": 2.5,
            "reconstruction_l1_wrong@random": 2.875,
            "reconstruction_l1_none@random": 2.0,
            "reconstruction_l1_mean_colour@random": 0.5,
            "right_beats_wrong@random": 2.5 / 4,
            "wrong_minus_right@random": mean,
            "wrong_minus_right_se@random": spread / 2,
            "right_beats_none@random": 1.5 / 4,
            "none_minus_right@random": -0.5,
            "none_minus_right_se@random": math.sqrt(5 / 3) / 2,
        }
    )


@pytest.mark.parametrize("settings", [{}, {"norm_pix": True, "mim_op": "drop", "mim_share": 0.25}])
def test_task_against_a_loop_over_images(settings: dict[str, Any]) -> None:
    """Each image alone, its hidden patches by their definition, pixels compared one by one."""
    model, source = matcher(**settings), parse_scenes("scenes:test?n=7", 32)
    found = evaluate(model, "reconstruction", source, batch=3)
    records = [source.record(row) for row in range(7)]
    wrong = wrong_captions(source, {row: record.captions for row, record in enumerate(records)})
    images = torch.stack([torch.from_numpy(np.array(r.image)).permute(2, 0, 1) for r in records])
    m, mim = model.model, mim_settings(model)
    share = 16 * mim.mim_share
    whole = ((images.double().mean(0) / 255 - m.mean) / m.std)[None]
    losses: dict[str, list[float]] = {}
    with torch.no_grad():
        for row, record in enumerate(records):
            image, right = images[row : row + 1], record.captions[0]
            scored = caption_similarity(m, image, packed(model, [right]), mim)[0].tolist()
            hidden = torch.tensor([sorted(sorted(range(16), key=lambda p: -scored[p])[: int(share)])])
            true = unfold(m.normalise(image), 8)[0, hidden[0]]
            for name, caption in {"right": right, "wrong": wrong[row], "none": ""}.items():
                (painted,) = reconstruct(m, image, hidden, [packed(model, [caption])], mim)
                losses.setdefault(name, []).append(float((painted[0] - true).abs().mean()))
            visible = [p for p in range(16) if p not in hidden[0].tolist()]
            colour = unfold(m.normalise(image), 8)[0, visible].unflatten(-1, (3, 64)).mean((0, 2))
            guess = colour.repeat_interleave(64)
            losses.setdefault("mean_colour", []).append(float((guess - true).abs().mean()))
            mean = unfold(whole, 8)[0, hidden[0]]
            losses.setdefault("mean_image", []).append(float((mean - true).abs().mean()))
    for name, each in losses.items():
        assert found[f"reconstruction_l1_{name}@attentive"] == pytest.approx(sum(each) / 7, rel=1e-4), name
    assert found["right_beats_wrong@attentive"] == pytest.approx(
        sum(r < w for r, w in zip(losses["right"], losses["wrong"], strict=True)) / 7
    )
    assert found["images"] == 7
    assert ("reconstruction_l1_own_mean@random" in found) is mim.norm_pix
    again = evaluate(model, "reconstruction", source, batch=7)
    assert again == pytest.approx(found, rel=1e-4, abs=1e-7)


def test_the_same_patches_are_hidden_for_all_guides(monkeypatch: pytest.MonkeyPatch) -> None:
    model, source = matcher(), parse_scenes("scenes:test?n=6", 32)
    seen: list[Tensor] = []
    real = Judge.paint

    def watch(self: Judge, *args: Any) -> Any:
        done = real(self, *args)
        assert set(done.pixels) == {"right", "wrong", "none"}
        assert all(one.shape == (*done.hidden.shape, 192) for one in done.pixels.values())
        seen.append(done.hidden)
        return done

    monkeypatch.setattr(Judge, "paint", watch)
    evaluate(model, "reconstruction", source)
    attentive, random = seen
    assert attentive.shape == random.shape == (6, 8)
    assert not torch.equal(attentive, random)
    assert len({tuple(row) for row in random.tolist()}) > 3


def test_a_model_that_reads_nothing_has_one_number() -> None:
    found = evaluate(matcher(guide="none"), "reconstruction", parse_scenes("scenes:test?n=4", 32))
    kinds = {name.split("@")[0] for name in found}
    names = {"none", "mean_colour", "mean_image"}
    assert kinds == {"images", "skipped", *(f"reconstruction_l1_{name}" for name in names)}


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
    others = [own[0] for own in captions[1:] if own[0] not in captions[0]]
    assert source.relevance(others, [10]).any()
    assert found == wrong_captions(source, by_row)


class Few:
    """Three images, of which two have one caption; one more has none."""

    name, fingerprint = "few", "few-1"

    def __len__(self) -> int:
        return 4

    def record(self, row: int) -> Record:
        captions = [["a dog"], ["a dog"], ["a cat", "a dog"], []][row]
        return Record(f"k{row}", np.full((40, 30, 3), 60 * row, np.uint8), captions)


def test_images_without_a_wrong_caption_are_skipped_and_named() -> None:
    skipped: list[Skipped] = []
    found = evaluate(matcher(), "reconstruction", Few(), skipped=skipped)
    assert found["images"] == 2
    assert {s.key: s.reason for s in skipped} == {
        "k3": "no caption",
        "k2": "no caption of another image is wrong for it",
    }
    assert found["skipped"] == 2
    with pytest.raises(ValueError, match="expected at least two images with different captions"):
        evaluate(matcher(), "reconstruction", parse_scenes("scenes:test?n=1", 32))


def test_models_that_do_not_paint_are_refused() -> None:
    with pytest.raises(ValueError, match="no image decoder"):
        evaluate(matcher("coca"), "reconstruction", Few())
    painter = matcher()
    painter.method = None
    with pytest.raises(ValueError, match=r"load it by kiloword\.load"):
        mim_settings(painter)


def test_models_that_predict_tokens_are_refused() -> None:
    """Of tokens there is nothing to show but where masks lie."""
    made = preset("sycoca", {"mim_target": "tokens"})
    tokenizer = Tokenizer.train([c for c in CAPTIONS for _ in range(3)], 300)
    model = Matcher(build(config("frozen", "sycoca"), made), tokenizer, made)
    with pytest.raises(ValueError, match="predicts tokens of its trunk"):
        evaluate(model, "reconstruction", parse_scenes("scenes:test?n=4", 64))
    assert possible(model) == ("words", "gradcam", "masks")
    assert "reconstruction" in possible(matcher())


def test_settings_come_from_the_method() -> None:
    found = mask_settings(matcher(similar_to="words", mim_share=0.25, caption_share=0.75))
    assert found[0].similar_to == "words"
    assert found[1:] == (0.25, 0.75)
    assert mask_settings(matcher("clip"))[1:] == (0.5, 0.5)


def test_verb_writes_numbers_and_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = matcher()
    file = ModelFile(method="sycoca", settings={}, model=model.model.config)
    save_model(tmp_path / "model", model.model, model.tokenizer, file)
    out = ["--json", str(tmp_path / "r.json"), "--html", str(tmp_path / "r.html")]
    main(["eval", "reconstruction", str(tmp_path / "model"), "--data", "scenes:test?n=4", *out])
    said = capsys.readouterr().out
    found = json.loads((tmp_path / "r.json").read_text())
    assert all(name in said for name in found)
    page = (tmp_path / "r.html").read_text()
    assert page.count('<figure class="card">') == 8
    assert page.count("<img") == 8 * 5
    assert "a wrong caption" in page
    assert "true patch" not in page


NOTES = {
    "norm_pix": "both are taken from the true patch",
    "apart": "Each model masks the patches that it finds most similar to the caption",
    "unread": "Trained without text",
    "flat": "no better than by one flat colour",
}


def page_of(models: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Its sections by heading. Args: by model: what it is (read, norm_pix, l1)."""
    found, shown = {}, {}
    for model, is_ in models.items():
        losses = {"none": [is_.get("l1", 0.5)] * 2, "mean_colour": [0.8, 0.8]}
        if is_.get("read", True):
            losses |= {"right": [is_.get("l1", 0.5)] * 2, "wrong": [0.7, 0.9]}
        if is_.get("norm_pix"):
            losses["own_mean"] = [0.6, 0.6]
        found[model] = {k: v for mask in ("attentive", "random") for k, v in values(losses, mask)}
        shown[model] = {"examples": [], "norm_pix": is_.get("norm_pix", False), "truth": False}
    parts = re.split(r"<h2[^>]*>(.*?)</h2>", report(found, "photos", shown))
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def places(sections: dict[str, str], note: str) -> list[str]:
    return [heading for heading, html in sections.items() if NOTES[note] in html]


def test_notes_stand_where_they_hold() -> None:
    attentive, random = "The patches most similar to the right caption are masked", "Random patches are masked"
    one = page_of({"a": {}})
    assert not [note for note in NOTES if places(one, note)]
    two = page_of({"a": {"norm_pix": True}, "b": {"read": False}})
    assert places(two, "apart") == [attentive]  # its patches differ from model to model, the random ones do not
    assert [heading for heading in two if "– a" in heading] == places(two, "norm_pix")
    assert not places(two, "unread")  # one of them reads
    assert places(page_of({"b": {"read": False}}), "unread") == [attentive, random]


def test_a_reconstruction_worse_than_one_colour_is_remarked() -> None:
    both = ["The patches most similar to the right caption are masked", "Random patches are masked"]
    assert places(page_of({"a": {"l1": 0.9}}), "flat") == both
    assert places(page_of({"a": {"l1": 0.9, "read": False}}), "flat") == both
    given = page_of({"a": {"l1": 0.7, "norm_pix": True}, "b": {"l1": 0.7}})  # a knows each patch's true mean
    assert places(given, "flat") == both
    for html in (given[heading] for heading in both):
        assert re.findall(r"(\w): from its caption.*true mean \(L1 0.7000, against 0.6000\)", html) == ["a"]


def test_the_verb_warns_of_it(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate(matcher(), "reconstruction", parse_scenes("scenes:test?n=4", 32))  # random weights
    said = [message for message in caplog.messages if "truncated" not in message]
    assert [message.split()[0] for message in said] == ["attentive", "random"]
    assert all(NOTES["flat"] in message for message in said)
    caplog.clear()

    def perfect(model: Any, images: Tensor, hidden: Tensor, guides: list[Texts], settings: Any) -> list[Tensor]:
        return [masked_images.pixels(model, images, hidden, norm_pix=False)] * len(guides)

    monkeypatch.setattr("kiloword.evaluation.reconstruction.task.reconstruct", perfect)
    evaluate(matcher(), "reconstruction", parse_scenes("scenes:test?n=4", 32))
    assert all("truncated" in message for message in caplog.messages)
