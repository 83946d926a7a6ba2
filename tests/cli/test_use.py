"""`kiloword score` and `classify`: what the Matcher says, for files and folders; bad images are named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

import kiloword
from commands import refused, said
from folders import model_folder
from kiloword.cli.main import main

NAMES = ["circle", "square", "star"]
BAD = "bad\x1b.png"
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, a folder of photos with subfolders and what is no photo, and a bad image."""
    place = tmp_path_factory.mktemp("use")
    for method in ("clip", "prolip"):
        model_folder(place / method, method)
    for n, name in enumerate(("a.png", "b.jpg", "2024/c.png", "2025/c.png", ".hidden/d.png")):
        (place / "photos" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 30), (60 * n, 10, 99)).save(place / "photos" / name)
    (place / "photos" / "a.txt").write_text("a red circle")
    (place / "photos" / "gone.png").symlink_to("nothing")
    (place / BAD).write_bytes(b"nothing")
    return place


def test_scores_are_the_matchers_and_a_folder_stands_for_its_images(place: Path, capsys: Capture) -> None:
    photos = place / "photos"
    each = [photos / name for name in ("2024/c.png", "2025/c.png", "a.png", "b.jpg")]
    whole = said(capsys, "score", place / "clip", "--images", photos, "--texts", *NAMES)
    assert whole == said(capsys, "score", place / "clip", "--images", *each, "--texts", *NAMES)
    lines = whole.splitlines()[1:]
    scores = kiloword.load(place / "clip").score(each, NAMES)
    for path, line, row in zip(each, lines, scores.tolist(), strict=True):
        assert line.split() == [str(path), *(f"{score:.3f}" for score in row)]
    texts = [f"a photo of {n} unbelievably red circles, [red]not cut[/red]" for n in range(13)]
    long = said(capsys, "score", place / "clip", "--images", photos / "a.png", "--texts", *texts).splitlines()[1:]
    scores = kiloword.load(place / "clip").score([photos / "a.png"], texts)
    for text, line, score in zip(texts, long, scores[0].tolist(), strict=True):
        assert line.split() == [f"{score:.3f}", "a.png", *text.split()]
    huge = said(capsys, "score", place / "clip", "--images", photos / "a.png", "--texts", "x" * 1_000_000)
    assert len(huge) < 50_000


def test_scores_by_distance_need_gaussians(place: Path, capsys: Capture) -> None:
    words = ["--images", place / "photos" / "a.png", "--texts", "a red circle"]
    own = said(capsys, "score", place / "prolip", *words)
    csd, cosine = (said(capsys, "score", place / "prolip", *words, "--nearest", by) for by in ("csd", "cosine"))
    assert own == csd
    expected = kiloword.load(place / "prolip").score([place / "photos" / "a.png"], ["a red circle"], "cosine")
    assert f"{float(expected):.3f}" in cosine
    assert "not Gaussian" in refused(capsys, "score", place / "clip", *words, "--nearest", "csd")


def test_classes_are_the_matchers(place: Path, capsys: Capture) -> None:
    out, photos = place / "classes.json", [place / "photos" / name for name in ("a.png", "b.jpg")]
    words = ["classify", place / "clip", "--images", *photos, place / BAD, "--classes", *NAMES]
    main([*map(str, words), "--precision", "bf16", "--top", "2", "--batch", "2", "--json", str(out)])
    printed, warned = capsys.readouterr()
    matcher, written = kiloword.load(place / "clip", precision="bf16"), json.loads(out.read_text())
    assert [one["image"] for one in written["images"]] == list(map(str, photos))
    for one, row in zip(written["images"], matcher.classify(photos, NAMES).tolist(), strict=True):
        best = sorted(zip(NAMES, row, strict=True), key=lambda pair: -pair[1])[:2]
        assert [c["name"] for c in one["classes"]] == [name for name, _ in best]
        assert [c["probability"] for c in one["classes"]] == pytest.approx([p for _, p in best], abs=1e-6)
        assert f"{best[0][1]:.3f}" in printed
    assert list(written["skipped"]) == [str(place / BAD)]
    assert "1 image skipped, cannot be used: not an image" in warned
    assert "\x1b" not in printed + warned
    words = ["classify", place / "clip", "--images", place / "photos"]
    (place / "names.txt").write_text("\n".join(NAMES))
    (place / "templates.txt").write_text("a {c}\none {}\n")
    named = said(capsys, *words, "--classes", *NAMES, "--templates", "a {c}", "one {c}")
    files = ["--classes", place / "names.txt", "--templates", place / "templates.txt"]
    assert named == said(capsys, *words, *files)
    assert "airplane" in said(capsys, *words, "--classes", "cifar10", "--top", "10")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("score --texts a --explain-what maps", "--explain"),
        ("score --texts a --explain out --explain-what words", "no text decoder"),
        ("score --texts a --explain out --explain-what reconstruction", "no image decoder"),
        ("score --texts a --beside gone", "--plane"),
        ("score --texts a --beside gone --plane plane.html", "gone"),
        ("score --texts a --images EMPTY", "holds no images"),
        ("score --texts a --images none.png", "none.png"),
        ("score --texts a --images BAD", "not an image"),
        ("classify --classes circle", "--classes"),
        ("classify --classes circle star circle", "different names"),
        ("classify --classes circle star --top 0", "--top"),
        ("classify --classes circle star --templates plain", "{c}"),
        ("classify --classes circle star --device tpu", "cuda"),
        ("classify --classes circle star --images BAD", "none of 1 images"),
    ],
)
def test_refused_before_anything_is_printed(
    words: str, says: str, place: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    verb, *flags = words.split()
    flags = [{"EMPTY": "empty", "BAD": str(place / BAD)}.get(flag, flag) for flag in flags]
    images = [] if "--images" in flags else ["--images", place / "photos"]
    with pytest.raises(SystemExit) as end:
        main([verb, str(place / "clip"), *map(str, images), *flags])
    output = capsys.readouterr()
    assert (end.value.code, output.out) == (2, "")
    assert says in output.err
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]
