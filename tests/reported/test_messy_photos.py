"""`quickstart photos` on photos as people have them: a few are broken, and captions are missing or too long."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from safetensors.torch import save_file
from users import Run

from folders import write_encoder
from kiloword.model.trunks.lite import EfficientNetLite
from tars import draw

GOOD = 40
LONG = "a red circle left of the large blue square and " * 40  # more than any tower reads


@pytest.fixture(scope="module")
def towers(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags of towers with random weights."""
    folder = tmp_path_factory.mktemp("towers")
    write_encoder(folder / "minilm")
    save_file(EfficientNetLite("efficientnet-lite0").state_dict(), folder / "lite0.safetensors")
    image, text = f"efficientnet-lite0:{folder / 'lite0.safetensors'}", f"minilm:{folder / 'minilm'}"
    return ["--image-tower", image, "--text-tower", text, "--steps", "2"]


def messy(folder: Path) -> Path:
    """Good photos, and one of each kind of trouble."""
    for n in range(GOOD):
        draw(folder / f"{n:02}.jpg", n)
        (folder / f"{n:02}.txt").write_text(f"the {['red', 'green', 'blue'][n % 3]} circle {n}\nsmall {n}\n")
    whole = (folder / "00.jpg").read_bytes()
    broken = {
        "cut.jpg": whole[: len(whole) // 2],
        "empty.png": b"",
        "text.jpg": b"this is no image",
        "phone.heic": b"\0\0\0\x18ftypheic\0\0\0\0mif1heic",
        "page.webp": b"RIFF\0\0\0\0WEBPVP8 ",
    }
    for name, content in broken.items():
        (folder / name).write_bytes(content)
        (folder / Path(name).with_suffix(".txt")).write_text("a red square")
    for name, caption in {"blank": b" \n", "latin": b"caf\xe9", "huge": b"x" * 2_000_000, "none": None}.items():
        draw(folder / f"{name}.jpg", 70)
        if caption is not None:
            (folder / f"{name}.txt").write_bytes(caption)
    for n in range(3):
        draw(folder / f"long{n}.jpg", 80 + n)
        (folder / f"long{n}.txt").write_text(f"{n} {LONG}")
    os.symlink("nowhere.jpg", folder / "lost.jpg")
    draw(folder / "@eaDir" / "00.jpg" / "SYNOPHOTO_THUMB_XL.jpg", 3)
    return folder


def skipped(folder: Path) -> int:
    """Bad rows that a run counted."""
    return max(json.loads(line).get("skipped", 0) for line in (folder / "metrics.jsonl").read_text().splitlines())


@pytest.mark.slow
def test_messy_photos_run_to_the_end(tmp_path: Path, towers: list[str], run: Run) -> None:
    """Each trouble is named; all methods learn from equal data."""
    data, out = messy(tmp_path / "photos"), tmp_path / "out"
    words = ["quickstart", "photos", "--data", data, *towers, "--views", 1]
    code, said = run(*words, "--out", out)
    assert code == 0
    for name in ("cut", "empty", "text", "page", "blank", "latin", "huge", "none", "lost.jpg", "@eaDir", "phone.heic"):
        assert name in said
    methods = json.loads((out / "results.json").read_text())["figures"]["methods"]
    assert [one["name"] for one in methods] == ["clip", "siglip", "llip", "prolip", "fff"]
    assert len({skipped(out / one["name"]) for one in methods}) == 1


@pytest.mark.slow
def test_messy_photos_with_a_keep_list(tmp_path: Path, model: Path, towers: list[str], run: Run) -> None:
    data, out = messy(tmp_path / "photos"), tmp_path / "out"
    audited = ["audit", data, "--model", model, "--out", tmp_path / "audit"]
    assert run(*audited, "--device", "cpu")[0] == 0
    keep = tmp_path / "audit" / "keep.parquet"
    words = ["quickstart", "photos", "--data", data, *towers, "--out", out, "--keep", keep]
    assert run(*words)[0] == 0
    assert str(keep) in (out / "report.html").read_text()
    recipe = json.loads((out / "prolip" / "config.json").read_text())["recipe"]
    assert recipe["data"]["keep"] == [str(keep)]


@pytest.mark.parametrize("method", ["prolip", "siglip", "pcme++", "llip"])
def test_long_captions_are_equal_for_all_methods(tmp_path: Path, towers: list[str], method: str, run: Run) -> None:
    """A method's own tokens take no place of a caption: its rows are those of every other method."""
    data = tmp_path / "photos"
    for n in range(16):
        draw(data / f"{n:02}.jpg", n)
        (data / f"{n:02}.txt").write_text(f"{n} {LONG if n % 2 else 'a red circle'}")
    text = towers[3]
    code, _ = run("embed", text, "--data", data, "--out", tmp_path / "tokens", "--tokens", "--device", "cpu")
    assert code == 0
    words = ["--text-tower", text, "--text-features", tmp_path / "tokens", "--workers", 0, "--device", "cpu"]
    small = ["--batch", 8, "--steps", 2, "--size", "debug", "--bad-share", 0]
    code, said = run("train", method, "--data", data, "--out", tmp_path / "run", *words, *small)
    assert code == 0, said
    assert skipped(tmp_path / "run") == 0
