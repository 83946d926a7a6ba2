"""A text that is longer than the context of a model is counted and named, whatever reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from users import Run

import kiloword
from kiloword.evaluation import evaluate
from tars import encode, noise, write_tar

LONG = "a red circle on the left of a blue star " * 8
TEXTS = {
    "english": [LONG + "dog", LONG + "cat"],
    "hindi": ["एक लड़का और एक लड़की घर के सामने खेल रहे हैं " * 6 + end for end in ("कुत्ता", "बिल्ली")],
    "thai": ["แมวสีดำนอนอยู่บนโต๊ะไม้ในห้องครัว" * 6 + end for end in ("หมา", "แมว")],
    "emoji": ["🐈 sleeps on 🛋️ " * 30 + end for end in ("🐕", "🐈")],
}
every_script = pytest.mark.parametrize("texts", TEXTS.values(), ids=TEXTS)


@pytest.fixture(scope="module")
def matcher(model: Path) -> Any:
    return kiloword.load(str(model))


def photos(path: Path, captions: list[str]) -> str:
    members = {}
    for row, caption in enumerate(captions):
        members |= {f"{row}.png": encode(noise(32, 32, row)), f"{row}.txt": caption.encode(), f"{row}.cls": b"0"}
    return str(write_tar(path, members))


def said(caplog: pytest.LogCaptureFixture) -> str:
    """The only warning of a truncated text."""
    lines = [line for line in caplog.messages if "truncated" in line]
    assert len(lines) == 1, lines
    caplog.clear()
    return lines[0]


@every_script
def test_python_names_them_once_a_call(matcher: Any, caplog: pytest.LogCaptureFixture, texts: list[str]) -> None:
    image = Image.new("RGB", (32, 32))
    for call in (
        lambda: matcher.encode_text([*texts, "a dog"], batch=1),
        lambda: matcher.score(image, ["a dog", *texts]),
        lambda: matcher.class_features([*texts, "dog"], ["{c}"]),
        lambda: matcher.classify(image, [*texts, "dog"], ["{c}"]),
        lambda: matcher.show(image, texts),
    ):
        call()
        line = said(caplog)
        assert line.startswith("2 texts")
        assert texts[0][:20] in line
        assert texts[1][-3:] in line  # where they differ
    matcher.encode_text(texts[0])
    assert said(caplog).startswith("1 text ")


def test_texts_that_fit_are_not_named(matcher: Any, caplog: pytest.LogCaptureFixture) -> None:
    matcher.classify(Image.new("RGB", (32, 32)), ["dog", "cat"])
    matcher.encode_text(["a dog"] * 100)
    assert "truncated" not in caplog.text


def test_the_first_of_many_are_named_with_the_number_of_the_others(
    matcher: Any, caplog: pytest.LogCaptureFixture
) -> None:
    matcher.encode_text([f"{n} {LONG}" for n in range(1200)] + ["9 " + LONG, "a dog"])
    line = said(caplog)
    assert line.startswith("1,200 texts")
    assert "1,197 more" in line


@every_script
@pytest.mark.parametrize("verb", ["classify", "score", "search", "retrieval", "zeroshot", "embed", "audit"])
def test_verbs(
    tmp_path: Path, model: Path, run: Run, caplog: pytest.LogCaptureFixture, verb: str, texts: list[str]
) -> None:
    data = photos(tmp_path / "a.tar", [*texts, texts[0], *(f"photo {n}" for n in range(12))])
    album, out, names = tmp_path / "album", ["--out", tmp_path / "out"], tmp_path / "classnames.txt"
    album.mkdir()
    (album / "a.png").write_bytes(encode(noise(32, 32)))
    if verb == "zeroshot":
        names.write_text("\n".join(texts), encoding="utf-8")
    if verb == "search":
        run("index", album, "--model", model, "--out", tmp_path / "library")
    words: dict[str, list[object]] = {
        "classify": ["classify", model, "--images", album, "--classes", *texts, "dog"],
        "score": ["score", model, "--images", album, "--texts", *texts, "dog"],
        "search": ["search", tmp_path / "library", texts[0]],
        "retrieval": ["eval", "retrieval", model, "--data", data, "--batch", 2],
        "zeroshot": ["eval", "zeroshot", model, "--data", data, "--batch", 2, "--templates", "{c}"],
        "embed": ["embed", model, "--data", data, "--batch", 2, *out],
        "audit": ["audit", data, "--model", model, "--batch", 2, *out],
    }
    assert run(*words[verb])[0] == 0
    line = said(caplog)
    assert line.startswith("1 text " if verb == "search" else "2 texts ")
    assert texts[0][:15] in line


def test_evaluate_in_python(matcher: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    evaluate(matcher, "retrieval", photos(tmp_path / "a.tar", [*TEXTS["english"], "a dog"]), batch=1)
    assert said(caplog).startswith("2 texts ")


def test_score_with_figures_names_them_once(
    tmp_path: Path, model: Path, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.png").write_bytes(encode(noise(32, 32)))
    words = ["--images", tmp_path / "a.png", "--texts", *TEXTS["english"], "--explain", tmp_path / "maps"]
    assert run("score", model, *words)[0] == 0
    assert said(caplog).startswith("2 texts ")
