"""`kiloword classify`: a table and JSON, as the Matcher says; bad images are named and skipped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

import kiloword
from kiloword.cli.main import main
from kiloword.config.recipes import ModelFile, sizes
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.methods.registry import preset
from kiloword.models.build import build
from kiloword.models.model_folder import save_model

NAMES = ["circle", "square", "star"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("classify")
    model = build(sizes()["debug"], preset("clip"), seed=1)
    file = ModelFile(method="clip", settings={}, model=model.config)
    save_model(place / "model", model, Tokenizer.train(NAMES, 300), file)
    (place / "photos").mkdir()
    for n, name in enumerate(("a.png", "b.jpg", "c.png")):
        Image.new("RGB", (40, 30), (60 * n, 10, 99)).save(place / "photos" / name)
    (place / "photos" / "bad\x1b.png").write_bytes(b"nothing")
    return place


def classified(place: Path, *words: str) -> None:
    main(["classify", str(place / "model"), "--images", str(place / "photos"), *words])


def test_as_the_matcher_says(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = place / "classes.json"
    classified(place, "--classes", *NAMES, "--top", "2", "--batch", "2", "--json", str(out))
    printed, warned = capsys.readouterr()
    photos = [place / "photos" / name for name in ("a.png", "b.jpg", "c.png")]
    shares = kiloword.load(place / "model").classify(photos, NAMES)
    written = json.loads(out.read_text())
    assert [one["image"] for one in written["images"]] == [str(photo) for photo in photos]
    for one, row in zip(written["images"], shares.tolist(), strict=True):
        best = sorted(zip(NAMES, row, strict=True), key=lambda pair: -pair[1])[:2]
        assert [c["name"] for c in one["classes"]] == [name for name, _ in best]
        assert [c["probability"] for c in one["classes"]] == pytest.approx([p for _, p in best], abs=1e-6)
        assert f"{best[0][1]:.3f}" in printed
    assert "b.jpg" in printed
    assert list(written["skipped"]) == [str(place / "photos" / "bad\x1b.png")]
    assert "1 image skipped, cannot be used: not an image" in warned
    assert "bad\\x1b.png" in warned
    assert "\x1b" not in printed + warned


def test_classes_of_a_file_and_of_a_data_set(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    classified(place, "--classes", *NAMES, "--templates", "a {c}", "one {c}")
    words = capsys.readouterr().out
    (place / "names.txt").write_text("\n".join(NAMES))
    (place / "templates.txt").write_text("a {c}\none {}\n")
    classified(place, "--classes", str(place / "names.txt"), "--templates", str(place / "templates.txt"))
    assert capsys.readouterr().out == words
    classified(place, "--classes", "cifar10", "--top", "10")
    assert "airplane" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--classes", "circle"], "--classes is circle: expected two names or more"),
        (["--classes", "circle", " "], "a name of --classes is empty"),
        (["--classes", *NAMES, "--top", "0"], "--top is 0: expected at least 1"),
        (["--classes", *NAMES, "--templates", "plain"], "has {c} or {} for the class name"),
        (["--classes", *NAMES, "--device", "tpu"], "expected auto, cpu, mps, cuda or cuda:N"),
    ],
)
def test_wrong_words(place: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        classified(place, *words)
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_no_image_is_left(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["classify", str(place / "model"), "--images", str(place / "photos" / "bad\x1b.png"), "--classes", *NAMES])
    assert end.value.code == 2
    assert "none of 1 images can be used" in capsys.readouterr().err


def test_a_class_named_twice_is_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        classified(place, "--classes", "circle", "star", "circle")
    assert "names circle twice" in capsys.readouterr().err


def test_long_paths_and_names_of_classes_are_not_cut(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photo = place / "photos" / f"{'holiday' * 15}.png"
    Image.new("RGB", (40, 30), (60, 10, 99)).save(photo)
    names = [f"{name}-{'unbelievable' * 4}" for name in NAMES]
    main(["classify", str(place / "model"), "--images", str(photo), "--classes", *names])
    shares = kiloword.load(place / "model").classify([photo], names)[0].tolist()
    lines = {f"{share:.3f}  {photo.name}  {name}" for share, name in zip(shares, names, strict=True)}
    assert set(capsys.readouterr().out.splitlines()) == lines
    photo.unlink()
