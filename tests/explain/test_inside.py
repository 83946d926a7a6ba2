"""Sheets of what decoders do: what is on them, in which files, for every kind of model and caption."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from kiloword.api import Matcher
from kiloword.cli.main import main
from kiloword.config.recipes import HeadConfig, ImageConfig, ModelFile, sizes
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.explain import strips
from kiloword.explain.reconstruct import fill, mim_settings, reconstruct
from kiloword.explain.sheets import _cut, _large, write
from kiloword.explain.strips import LARGE, WORD, possible
from kiloword.methods.coca import sycoca as masked_images
from kiloword.methods.registry import preset
from kiloword.models.build import build
from kiloword.models.model_folder import save_model
from kiloword.report.overlay import PLAIN, font_for, overlay, square, wrap
from kiloword.report.sheet import WIDTH, CaptionStrips, Panel, Strip, sheet
from noise import noise_file
from sheets import holds

CAPTIONS = ["a red circle", "two blue squares", ""]
IMAGE = ImageConfig(size=48, patch=16, width=32, depth=1, heads=2, mlp=64)  # 9 patches


def matcher(method: str = "sycoca", head: dict[str, Any] | None = None, **settings: Any) -> Matcher:
    made = preset(method, settings)
    config = replace(sizes()["debug"], image=IMAGE, head=replace(HeadConfig(dim=16, pool_heads=2), **(head or {})))
    return Matcher(build(config, made, seed=1), Tokenizer.train(CAPTIONS[:2] * 3, 300), made)


def test_what_models_can_show() -> None:
    assert possible(matcher()) == ("words", "gradcam", "masks", "reconstruction")
    assert possible(matcher("coca")) == ("words", "gradcam", "masks")
    assert possible(matcher("clip+mim")) == ("gradcam", "masks", "reconstruction")
    assert possible(matcher("clip")) == ()
    narrow = matcher("coca", {"image_pool": "attentional", "pool_queries": 3, "pool_width": 16})
    assert possible(narrow) == ("words", "gradcam")


def test_numbers_and_files(tmp_path: Path) -> None:
    model = matcher()
    images = [noise_file(tmp_path / "a.jpg"), noise_file(tmp_path / "b" / "a.png", 7, 300)]
    lines = write(tmp_path / "out", model, images, CAPTIONS)
    assert lines[-1] == f"2 sheets (words, gradcam, masks, reconstruction) and inside.json: {tmp_path / 'out'}"
    names = {"a.png", "a-2.png", "a-inside.png", "a-inside-2.png", "weights.json", "inside.json"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    document = json.loads((tmp_path / "out" / "inside.json").read_text())
    for path, shown in zip(images, document["images"], strict=True):
        assert shown["image"] == str(path)
        pixels = model.pixels([path])
        for text, found in zip(CAPTIONS, shown["texts"], strict=True):
            assert [word["word"] for word in found["words"]] == [*text.split(), "(end)"]
            assert sum(found["words"][0]["map"]) == pytest.approx(1, rel=1e-5)
            assert set(found["gradcam"]) == {"for the score", "for writing the caption"}
            masks = found["masks"]
            order = sorted(range(9), key=lambda p: -masks["similarity"][p])
            assert masks["most"] == sorted(order[:4]) == found["reconstruction"]["hidden"]
            assert masks["least"] == sorted(sorted(range(9), key=lambda p: masks["similarity"][p])[:4])
            losses = found["reconstruction"]["l1"]
            assert list(losses)[0 if text else -1] == ("from this caption" if text else "from no caption")
            with torch.no_grad():
                none = model.tokenizer.encode([""], model.model.config.text)
                hidden = torch.tensor([masks["most"]])
                (painted,) = reconstruct(model.model, pixels, hidden, [none], mim_settings(model))
                true = masked_images.pixels(model.model, pixels, hidden, norm_pix=False)
            assert losses["from no caption"] == pytest.approx(float((painted - true).abs().mean()), rel=1e-4)


def test_sheets_hold_the_image_and_what_decoders_do_with_it(tmp_path: Path) -> None:
    model, path = matcher(), noise_file(tmp_path / "a.jpg", 300, 300)
    write(tmp_path / "out", model, [path], CAPTIONS[:1], what=["words", "gradcam", "masks", "reconstruction"])
    with Image.open(tmp_path / "out" / "a-inside.png") as png:
        sheet = png.convert("RGB")
    large = _large(model, path)
    assert holds(sheet, square(large, PLAIN))
    for found in json.loads((tmp_path / "out" / "inside.json").read_text())["images"][0]["texts"]:
        spoken = np.array(found["masks"]["similarity"])
        maps = [*found["gradcam"].values(), spoken - spoken.min()]
        for looks in maps:
            assert holds(sheet, overlay(large, np.reshape(looks, (3, 3)), LARGE))
        for word in found["words"][:-1]:  # the end is not drawn
            assert holds(sheet, overlay(large, np.reshape(word["map"], (3, 3)), WORD))
        hidden = torch.tensor([found["reconstruction"]["hidden"]])
        image, settings = model.pixels([path]), mim_settings(model)
        with torch.no_grad():
            guide = model.tokenizer.encode([found["text"]], model.model.config.text)
            (painted,) = reconstruct(model.model, image, hidden, [guide], settings)
            filled = fill(model.model, image, hidden, painted)[0].permute(1, 2, 0).numpy()
        for panel in (filled, image[0].permute(1, 2, 0).numpy()):
            assert holds(sheet, Image.fromarray(panel).resize((LARGE, LARGE), Image.Resampling.NEAREST))


@pytest.mark.parametrize("side", [LARGE - 1, LARGE, 2 * LARGE])
def test_images_as_large_as_their_place_are_not_made_coarse(side: int) -> None:
    image = np.random.default_rng(0).integers(256, size=(side, side, 3), dtype=np.uint8)
    how = Image.Resampling.NEAREST if side < LARGE else Image.Resampling.BICUBIC
    expected = Image.fromarray(image).resize((LARGE, LARGE), how)
    assert np.array_equal(np.asarray(strips._enlarged(image)), np.asarray(expected))


def test_a_painting_worse_than_one_colour_is_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    panel = strips.Panel

    def noted(shown: Image.Image, name: str, note: str = "") -> Panel:
        notes.append(note)
        return panel(shown, name, note)

    monkeypatch.setattr(strips, "Panel", noted)
    path = noise_file(tmp_path / "a.jpg")
    write(tmp_path, matcher(), [path], ["red"], what=["reconstruction"])
    assert sum(bool(re.match(r"L1 [\d.]+, a flat colour [\d.]+$", note)) for note in notes) == 2  # random weights
    notes.clear()

    def perfect(model: Any, images: torch.Tensor, hidden: torch.Tensor, guides: list[Any], settings: Any) -> list[Any]:
        return [masked_images.pixels(model, images, hidden, norm_pix=False)] * len(guides)

    monkeypatch.setattr(strips, "reconstruct", perfect)
    write(tmp_path, matcher(), [path], ["red"], what=["reconstruction"])
    assert notes.count("L1 0.000") == 2


def test_only_what_is_asked_for(tmp_path: Path) -> None:
    model, image = matcher(), noise_file(tmp_path / "a.jpg")
    write(tmp_path / "words", model, [image], ["red"], what=["words"])
    assert {path.name for path in (tmp_path / "words").iterdir()} == {"a-inside.png", "inside.json"}
    (found,) = json.loads((tmp_path / "words" / "inside.json").read_text())["images"][0]["texts"]
    assert set(found) == {"text", "score", "words"}
    write(tmp_path / "maps", model, [image], ["red"], what=["maps"])
    assert {path.name for path in (tmp_path / "maps").iterdir()} == {"a.png", "weights.json"}
    write(tmp_path / "plain", matcher("clip"), [image], ["red"])
    assert {path.name for path in (tmp_path / "plain").iterdir()} == {"a.png", "weights.json"}
    write(tmp_path / "cam", matcher("clip"), [image], ["red"], what=["gradcam"])
    with pytest.raises(ValueError, match="no text decoder"):
        write(tmp_path / "none", matcher("clip"), [image], ["red"], what=["words"])
    with pytest.raises(ValueError, match="no image decoder"):
        write(tmp_path / "none", matcher("coca"), [image], ["red"], what=["reconstruction"])
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("settings", [{"guide": "none"}, {"norm_pix": True, "mim_op": "drop"}, {"mim_mask": "random"}])
def test_every_way_of_painting(settings: dict[str, Any], tmp_path: Path) -> None:
    image = noise_file(tmp_path / "a.jpg")
    write(tmp_path, matcher(**settings), [image], CAPTIONS, what=["reconstruction"])
    texts = json.loads((tmp_path / "inside.json").read_text())["images"][0]["texts"]
    if settings.get("guide") == "none":
        assert all(list(found["reconstruction"]["l1"]) == ["without text"] for found in texts)
    else:
        names = ["from this caption", "from “two blue squares”", "from no caption"]
        assert list(texts[0]["reconstruction"]["l1"]) == names
    if settings.get("mim_mask") == "random":
        assert len({tuple(found["reconstruction"]["hidden"]) for found in texts}) == 1


def test_sheet_wraps_and_has_room_for_all() -> None:
    grey = np.full((64, 64, 3), 120, np.uint8)
    panel = Panel(Image.new("RGB", (94, 94)), "word " * 9, "50%")
    few = sheet(grey, "a.png", "about", [CaptionStrips("a dog", "score", [Strip("Words", "about", [panel] * 3)])])
    many = sheet(grey, "a.png", "about", [CaptionStrips("a dog", "score", [Strip("Words", "about", [panel] * 33)])])
    assert few.width == many.width == WIDTH
    assert many.height > few.height + 3 * 94
    beside = sheet(
        grey, "a.png", "", [CaptionStrips("a dog", "score", [Strip("A", "", [panel] * 3), Strip("B", "", [panel])])]
    )
    assert beside.height < few.height + 20
    black = (np.asarray(many) == 0).all(-1)
    assert black.sum() >= 33 * 94 * 94
    nothing = sheet(grey, "a.png", "", [])
    assert nothing.height < few.height


def test_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = matcher()
    file = ModelFile(method="sycoca", settings={}, model=model.model.config)
    save_model(tmp_path / "model", model.model, model.tokenizer, file)
    shown = [
        "score",
        str(tmp_path / "model"),
        "--images",
        str(noise_file(tmp_path / "a.jpg")),
        "--texts",
        "a zebra",
        "a",
    ]
    main([*shown, "--explain", str(tmp_path / "out"), "--explain-what", "words", "masks"])
    assert "1 sheet (words, masks) and inside.json" in capsys.readouterr().out
    with Image.open(tmp_path / "out" / "a-inside.png") as png:
        assert png.width == WIDTH
    with pytest.raises(SystemExit):
        main([*shown, "--explain-what", "words"])
    printed = capsys.readouterr()
    assert "name a folder by --explain" in printed.err
    assert not printed.out  # refused before anything is scored


def test_texts_that_are_cut_say_so(tmp_path: Path) -> None:
    font = font_for("plain", 14)
    assert wrap("w" * 90 + " word", font, 80, 3)[0].endswith("w...")
    assert wrap("one two", font, 80, 3) == ["one two"]
    assert all(font.getlength(line) <= 80 for line in wrap("one two three " * 20, font, 80, 3))
    assert wrap("one two three " * 20, font, 80, 2)[-1].endswith("...")
    assert font_for("“plain” – text…", 14).getname() == font.getname()
    assert _cut(matcher(), "a red circle") == ""
    long = "zebra " * 40
    plain = matcher()
    tokens = plain.tokenizer.cut([long], replace(plain.model.config.text, context=10))[0][0]
    assert f"the model reads 29 of its {tokens} tokens" in _cut(plain, long)
    assert tokens >= 40
