"""What a person at a prompt or in a notebook does with a Matcher: show, move, halve, save."""

from __future__ import annotations

import io
import pickle
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import kiloword
from kiloword.api import Matcher, batches
from kiloword.config.recipes import ModelFile, sizes
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.distributed.device import choose
from kiloword.methods.registry import preset
from kiloword.models.build import build
from kiloword.models.model_folder import save_model
from kiloword.terminal import progress

CAPTIONS = ["a red circle", "two blue squares", "<b>bold</b> & \x1b[31m"]
TOKENIZER = Tokenizer.train(CAPTIONS, 300)


def matcher(method: str = "siglip") -> Matcher:
    return Matcher(build(sizes()["debug"], preset(method), seed=0), TOKENIZER, preset(method))


def saved(folder: Path, method: str = "siglip") -> Path:
    model = matcher(method).model
    save_model(folder, model, TOKENIZER, ModelFile(method=method, settings={}, model=model.config, data="scenes"))
    return folder


def photos(count: int) -> list[Image.Image]:
    drawn = np.random.default_rng(0).integers(0, 256, (count, 40, 50, 3), dtype=np.uint8)
    return [Image.fromarray(pixels) for pixels in drawn]


def test_bytes_and_floats_are_images(tmp_path: Path) -> None:
    image, model = photos(1)[0], matcher()
    image.save(file := io.BytesIO(), "PNG")
    expected = model.encode_image(image)["vec"]
    floats = np.asarray(image) / 255
    for one in (file.getvalue(), bytearray(file.getvalue()), floats, floats.astype(np.float32), floats[::1, :, :]):
        assert torch.equal(model.encode_image(one)["vec"], expected)
    both = model.encode_image([file.getvalue(), image])["vec"]
    assert torch.equal(both[0], both[1])


@pytest.mark.parametrize("method", ["siglip", "llip", "prolip"])
def test_a_model_pickles_for_other_processes(method: str, tmp_path: Path) -> None:
    model = kiloword.load(saved(tmp_path / "model", method))
    again = pickle.loads(pickle.dumps(model))
    assert (again.method.name, again.file, again.card) == (method, model.file, model.card)
    assert torch.equal(again.score(photos(2), CAPTIONS), model.score(photos(2), CAPTIONS))


def test_a_saved_model_is_the_same_with_its_card(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    (folder / "README.md").write_text("# A card\n")
    model = kiloword.load(folder)
    assert model.card == "# A card\n"
    again = kiloword.load(model.save(tmp_path / "out" / "again"))
    assert again.card == model.card
    assert again.file == replace(model.file, model=model.model.config)  # type: ignore[type-var]
    assert again.file is not None
    assert again.file.data == "scenes"
    assert torch.equal(again.score(photos(2), CAPTIONS), model.score(photos(2), CAPTIONS))
    with pytest.raises(ValueError, match="exists and is not an empty folder"):
        model.save(tmp_path / "model")
    with pytest.raises(ValueError, match="was not loaded from a model folder"):
        matcher().save(tmp_path / "other")
    assert kiloword.load(saved(tmp_path / "plain")).card == ""


@pytest.mark.parametrize("method", ["siglip", "llip", "prolip", "siglip+matryoshka"])
def test_a_model_that_was_changed_gets_a_card_of_its_own(tmp_path: Path, method: str) -> None:
    folder = saved(tmp_path / "model", method)
    (folder / "README.md").write_text("Images of 32 pixels\n")
    assert kiloword.load(kiloword.load(folder).save(tmp_path / "same")).card == "Images of 32 pixels\n"
    dim = 8 if "siglip" in method else None
    model = kiloword.load(folder, dim=dim, size=64, context=30)
    card = kiloword.load(model.save(tmp_path / "out")).card
    assert "Images of 64 pixels, texts of at most 30 tokens" in card
    assert f"features of {dim or model.model.config.head.dim} numbers" in card
    assert "image.size is 64 instead of 32; " in card
    assert ("head.dim is 8 instead of" in card) == (dim is not None)
    (folder / "README.md").unlink()
    assert kiloword.load(kiloword.load(folder, size=64).save(tmp_path / "plain")).card == ""


@pytest.mark.parametrize("method", ["clip", "siglip", "llip", "prolip", "sycoca"])
def test_half_precision_stays_near(method: str, tmp_path: Path) -> None:
    model, images = kiloword.load(saved(tmp_path / "model", method)), photos(3)
    expected, bytes_before = model.score(images, CAPTIONS), _bytes(model)
    assert model.half() is model
    assert _bytes(model) == bytes_before / 2
    assert model.score(images, CAPTIONS).dtype == torch.float32
    torch.testing.assert_close(model.score(images, CAPTIONS), expected, atol=0.01, rtol=0)
    again = kiloword.load(model.save(tmp_path / "half"))
    torch.testing.assert_close(again.score(images, CAPTIONS), expected, atol=0.01, rtol=0)


def _bytes(model: Matcher) -> int:
    return sum(p.numel() * p.element_size() for p in model.model.parameters())


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    model = matcher()
    assert model.to("cpu") is model
    with pytest.raises(ValueError, match="expected auto, cpu, mps, cuda or cuda:N"):
        model.to("tpu")
    for there, cuda, expected in ((False, False, "cpu"), (True, False, "mps"), (True, True, "cuda")):
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda there=there: there)
        monkeypatch.setattr(torch.cuda, "is_available", lambda cuda=cuda: cuda)
        assert choose("auto", mps=True) == expected
        assert choose("auto") == ("cuda" if cuda else "cpu")  # of training, which nobody tried there
    assert choose("mps", mps=True) == "mps"
    with pytest.raises(ValueError, match="'mps': expected auto, cpu, cuda or cuda:N"):
        choose("mps")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ValueError, match="sees 0 MPS devices"):
        choose("mps", mps=True)


def test_tables_escape_what_they_show() -> None:
    model, images = matcher(), photos(2)
    table = model.show(images, CAPTIONS)
    html, text = table._repr_html_(), repr(table)
    assert html.count('<img src="data:image/png;base64,') == 2
    assert html.count("<b>") == 2  # the best of each image, nothing of a caption
    assert "&lt;b&gt;bold&lt;/b&gt; &amp; \\x1b[31m" in html
    for shown in (html, text):
        assert "\x1b" not in shown
        assert "image 1" in shown
        assert f"{table.scores[1, 2]:.3f}" in shown
    torch.testing.assert_close(table.scores, model.score(images, CAPTIONS))
    shares = model.classify(images, CAPTIONS)
    assert f"{shares[0, 0]:.3f}" in repr(model.show(images, CAPTIONS, shares))
    with pytest.raises(ValueError, match=r"scores are \[2, 3\]: expected \[2, 1\]"):
        model.show(images, "one text", shares)
    long = model.show(photos(23), [f"text {n}" for n in range(12)])
    assert long._repr_html_().count("<img") == 20
    assert "and 3 more images and 2 more texts" in long._repr_html_()
    assert repr(long).endswith("and 3 more images and 2 more texts")
    assert "siglip" in model._repr_html_()


def test_features_show_themselves_and_are_dicts() -> None:
    features = matcher("prolip").encode_image(photos(2))
    assert repr(features) == "Features(vec: float32 [2, 16] on cpu, log_var: float32 [2, 16] on cpu)"
    assert "float32 [2, 16] on cpu" in features._repr_html_()  # type: ignore[attr-defined]
    torch.save(features, file := io.BytesIO())
    file.seek(0)
    torch.testing.assert_close(dict(torch.load(file, weights_only=True)), dict(features))
    assert list(pickle.loads(pickle.dumps(features))) == list(features)


def test_classes_are_encoded_once() -> None:
    model, names = matcher(), ["circle", "square"]
    classes = model.class_features(names, ["a {c}", "one {c}"])
    expected = model.classify(photos(3), names, ["a {c}", "one {c}"])
    assert torch.equal(model.classify(photos(3), classes), expected)
    for wrong in ("circle", []):
        with pytest.raises(ValueError, match="expected a list of at least one name"):
            model.class_features(wrong)


def test_batches_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model = matcher().model
    each = batches.bytes_of_image(model)
    for free, expected in ((1, 1), (4 * 5 * each, 5), (1 << 50, batches.ON_CPU)):
        monkeypatch.setattr(batches, "free_bytes", lambda device, free=free: free)
        assert batches.image_batch(model) == expected
    assert batches.text_batch(model) == batches.TEXTS_ON_CPU
    monkeypatch.undo()
    assert 1 << 20 < batches.free_bytes(torch.device("cpu")) < 1 << 50


def test_a_gpu_that_is_full_gets_half_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    model, images, tried = matcher(), photos(7), []
    expected, encode = model.encode_image(images)["vec"], model.model.encode_image

    def full(pixels: torch.Tensor) -> Any:
        tried.append(len(pixels))
        if len(pixels) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return encode(pixels)

    monkeypatch.setattr(model.model, "encode_image", full)
    torch.testing.assert_close(model.encode_image(images)["vec"], expected)
    assert tried == [7, 3, 3, 1]
    with pytest.raises(torch.OutOfMemoryError):
        model.encode_image(images, batch=7)  # as asked for


def test_progress_is_one_line_of_a_notebook(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def drawn(**progress: bool) -> list[str]:
        """The states of the line."""
        model.encode_image(images, batch=1, **progress)
        return [state.rstrip() for state in capsys.readouterr().err.split("\r")[1:]]

    monkeypatch.setattr(progress, "LIVE_EVERY_S", 0.0)
    model, images = matcher(), photos(3)
    assert drawn() == []
    shell = SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    states = drawn()
    assert [state[:11] for state in states] == ["images  33%", "images  67%", "images 100%"]
    assert states[-1].endswith("=]")
    assert drawn(progress=False) == []
    del shell.kernel  # IPython in a terminal
    assert drawn() == []
    monkeypatch.setattr(progress, "PLAIN_EVERY_S", 0.0)
    model.encode_image(images, batch=1, progress=True)
    assert "images 100%" in capsys.readouterr().err


def test_devices_and_scores_of_other_types_are_taken() -> None:
    model = matcher().to(torch.device("cpu"))
    for scores in (np.full((1, 1), 0.5), [[0.5]]):
        assert "0.500" in repr(model.show(photos(1), ["a"], scores))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="device is 'None'"):
        model.to(None)  # type: ignore[arg-type]


def test_a_batch_of_none_is_refused() -> None:
    with pytest.raises(ValueError, match="batch size is 0"):
        matcher().encode_image(photos(1), batch=0)


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ({}, '"vec" of features is a NoneType'),
        ({"vec": np.ones((2, 16))}, r"is a ndarray \[2, 16\]"),
        ({"vec": torch.ones(2, 2, 16)}, r"is a Tensor \[2, 2, 16\]"),
        ({"vec": torch.ones(2, 7)}, "features of 7 and of 16 dimensions"),
    ],
)
def test_features_of_nothing_else(features: Any, message: str) -> None:
    for nearest in (None, "cosine"):
        with pytest.raises(ValueError, match=message):
            matcher().score(features, CAPTIONS, nearest)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        matcher().classify(features, CAPTIONS)


def test_classes_must_be_named() -> None:
    with pytest.raises(ValueError, match="class names are None"):
        matcher().class_features(None)  # type: ignore[arg-type]
