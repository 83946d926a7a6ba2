"""Slips of the pen: a flag given twice, files that would be replaced, flags that change nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from kiloword.cli.main import app, main
from kiloword.cli.words import settled
from kiloword.config.recipes import ModelFile, sizes
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.explain import sheets
from kiloword.methods.registry import preset
from kiloword.models.build import build
from kiloword.models.model_folder import save_model

ASCII_LOCALE = "caf\udcc3\udca9"  # as Python decodes "café" in a locale of ASCII


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and photos."""
    place = tmp_path_factory.mktemp("slips")
    model = build(sizes()["debug"], preset("clip"), seed=1)
    file = ModelFile(method="clip", settings={}, model=model.config)
    save_model(place / "model", model, Tokenizer.train(["dog", "cat"], 300), file)
    return place


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for n, name in enumerate(("dog.jpg", "dog.png", "b.png")):
        Image.new("RGB", (40, 30), (60 * n, 10, 99)).save(tmp_path / name)
    return tmp_path


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """What is said on stderr, when nothing was printed on stdout."""
    with pytest.raises(SystemExit) as end:
        main([str(word) for word in words])
    output = capsys.readouterr()
    assert end.value.code == 2
    assert not output.out
    return output.err


@pytest.mark.parametrize(
    "words",
    [
        "score m --images a.jpg --images b.jpg --texts x",
        "score m --images a.jpg --texts x --texts=y",
        "score m --images a.jpg --texts x --plane p.html --beside b --beside c",
        "score m --images a.jpg --texts x --explain e --explain-what maps --explain_what words",
        "classify m --images a --classes dog --classes cat bird",
        "classify m --images a --classes dog cat --templates {c} --templates one",
        "embed m --data A --out o --data B",
        "caption m --data A --out o --data B",
        "eval suite small m --data d --only a --only b",
        "watch runs --curves loss --curves val/",
        "verify clip --ranks 1 --ranks 2",
        "audit d --model m --extra-captions a --extra-captions b",
        "train clip --data A --data B --out o",
        "sweep clip --vary batch=1,2 --data A --data B --out o",
    ],
)
def test_a_flag_of_several_values_is_given_once(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [word.partition("=")[0].replace("_", "-") for word in words.split() if word.startswith("--")]
    twice = next(flag for flag in flags if flags.count(flag) > 1)
    assert refused(capsys, *words.split()).startswith(f"kiloword: {twice} is given twice: give it once;")


def test_figures_of_an_interrupted_call_are_replaced(
    place: Path, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = [f"{photos / name}" for name in ("dog.jpg", "b.png")]
    words = ["score", f"{place / 'model'}", "--images", *images, "--texts", "a dog", "--explain", f"{photos / 'out'}"]
    draw = sheets.figure

    def drawn(image: Any, name: str, *more: Any) -> Any:
        if name == "b.png":
            raise KeyboardInterrupt
        return draw(image, name, *more)

    monkeypatch.setattr(sheets, "figure", drawn)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        main(words)
    monkeypatch.setattr(sheets, "figure", draw)
    assert (photos / "out" / "dog.png").is_file()
    main(words)
    assert (photos / "out" / "b.png").is_file()


def test_figures_replace_no_photo(place: Path, photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """dog.png is a photo of the user beside dog.jpg, whose figure would have its name."""
    before = (photos / "dog.png").read_bytes()
    shown = ["score", place / "model", "--images", photos / "dog.jpg", "--texts", "a dog"]
    said = refused(capsys, *shown, "--explain", photos)
    assert f"--explain would replace {photos / 'dog.png'}, which it did not write: choose another folder." in said
    assert (photos / "dog.png").read_bytes() == before
    for _ in range(2):  # its own figures are replaced
        main([*map(str, shown), "--explain", str(photos / "out")])
    assert "1 figure and weights.json" in capsys.readouterr().out
    for image in ("b.png", "dog.jpg", "b.png"):  # also those of a call before the last
        main([*map(str, shown[:3]), f"{photos / image}", "--texts", "a dog", "--explain", str(photos / "out")])
    capsys.readouterr()
    (photos / "out" / "b.png").unlink()
    (photos / "out" / "weights.json").write_text(json.dumps({"layers": []}))
    assert "weights.json, which it did not write" in refused(
        capsys, *shown[:3], photos / "b.png", *shown[4:], "--explain", photos / "out"
    )


@pytest.mark.parametrize("flag", ["--plane", "--json", "--html"])
def test_a_page_replaces_no_photo(flag: str, photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (photos / "b.png").read_bytes()
    said = refused(capsys, "score", "m", "--images", photos, "--texts", "a", flag, photos / "b.png")
    assert f"{flag} {photos / 'b.png'} has the name of an image. Expected a file such as" in said
    assert (photos / "b.png").read_bytes() == before


def test_two_outputs_are_two_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "search", "library", "a dog", "--json", tmp_path / "both", f"--page={tmp_path}/./both")
    assert f"--json and --page are both {tmp_path}/./both: give each a file of its own." in said


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--explain", "out", "--explain-what", "words", "--maps", "rollout"], "--maps selects the attention of maps"),
        (["--explain", "out", "--explain-what", "words"], "no text decoder"),
        (["--explain", "out", "--explain-what", "reconstruction"], "no image decoder"),
        (["--plane", "p.html", "--beside", "MODEL"], "one model is named twice"),
    ],
)
def test_what_score_cannot_draw_is_refused_before_it_scores(
    flags: list[str],
    message: str,
    place: Path,
    photos: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(photos)
    flags = [str(place / "model") if flag == "MODEL" else flag for flag in flags]
    assert message in refused(capsys, "score", place / "model", "--images", "b.png", "--texts", "a", *flags)
    assert not (photos / "out").exists()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["classify", "m", "--images", ASCII_LOCALE, "--classes", "dog", ASCII_LOCALE], 6),
        (["classify", "m", "--classes", "a", "b", "--templates", ASCII_LOCALE], 6),
        (["search", ASCII_LOCALE, ASCII_LOCALE], 2),
        (["search", "--top", ASCII_LOCALE, "--open", ASCII_LOCALE, "--like=x", ASCII_LOCALE], 6),
        (["search", ASCII_LOCALE, "--like", ASCII_LOCALE], -1),
    ],
)
def test_texts_are_utf8_in_any_locale(words: list[str], text: int) -> None:
    expected = ["caf\u00e9" if n == text else word for n, word in enumerate(words)]
    assert settled(words, app._subcommands) == expected


def test_a_file_of_classes_stays_a_path(tmp_path: Path) -> None:
    file = tmp_path / ASCII_LOCALE
    file.write_text("dog\ncat\n")
    words = ["classify", "m", "--classes", str(file), "--templates", str(file)]
    assert settled(words, app._subcommands) == words


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("data check scenes --png x.png", "--png changes nothing in data check: expected kiloword data stats SRC"),
        ("data names --png x.png", "--png changes nothing in data names"),
        ("data stats scenes --size b32", "--size changes nothing in data stats: expected kiloword data stats SRC --as"),
        ("data stats scenes?n=2 --as sigli --png x.png", "Did you mean siglip?"),
        ("quickstart --image-tower x", "--image-tower is of kiloword quickstart photos"),
        ("quickstart --text-tower minilm", "--text-tower is of kiloword quickstart photos"),
        ("quickstart --views 1", "--views is of kiloword quickstart photos"),
        ("quickstart scenes --val d", "--val is of kiloword quickstart photos"),
        ("bench siglip --size debug --batch 2 --data nonexistent", "nonexistent"),
        ("verify clip --ranks 0", "--ranks is 0: expected one or several of 1, 2, 4"),
        ("verify clip --ranks -1", "--ranks is -1: expected"),
        ("verify clip --ranks", "--ranks is empty: expected"),
        ("verify clip --ranks 1 3", "--ranks is 1 3: expected"),
        ("verify clip --ranks 8", "each process takes 4 micro-batches of the 16 images"),
        ("plan clip --samples 1e9 --gpu custom --flops 9 --memory 9 --gpus 16", "of 16 GPUs needs --bandwidth"),
        ("mine scenes --features f --out o --false-rate 0.1", "--false-rate is of --calibrate, which is missing"),
        ("mine scenes --features f --out .", "--out . holds b.png, and no mine.json of an earlier call: choose a new"),
    ],
)
def test_what_changes_nothing_or_cannot_be_is_refused_at_once(
    words: str, message: str, photos: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(photos)
    assert message in refused(capsys, *words.split())
    assert {path.name for path in photos.iterdir()} == {"dog.jpg", "dog.png", "b.png"}
