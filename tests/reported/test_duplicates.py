"""`audit` finds images and captions that are the same, and none that differ in a colour, a mark or a symbol."""

from __future__ import annotations

import io
import unicodedata
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image, ImageDraw

from kiloword.cli.main import main
from tars import encode, noise

WHITE = np.full((96, 128, 3), 255, np.uint8)


def found(model: Path, folder: Path, images: Sequence[bytes], captions: Sequence[str], kind: str) -> set[str]:
    """Numbers of the images that `audit` finds, each with the first image of its group: "1=0"."""
    (folder / "data").mkdir()
    for number, (image, caption) in enumerate(zip(images, captions, strict=True)):
        (folder / "data" / f"{number:02}.png").write_bytes(image)  # the content decides the format
        (folder / "data" / f"{number:02}.txt").write_text(caption, encoding="utf-8")
    main(["audit", str(folder / "data"), "--model", str(model), "--out", str(folder / "out")])
    rows = pq.read_table(folder / "out" / "findings.parquet").to_pylist()
    return {f"{int(row['key'])}={int(row['other'])}" for row in rows if row["kind"] == kind}


def same_images(model: Path, folder: Path, *images: bytes | np.ndarray) -> set[str]:
    """`found` among these images and others."""
    others = [noise(64, 64, seed) for seed in range(100, 108)]
    encoded = [image if isinstance(image, bytes) else encode(image) for image in (*images, *others)]
    return found(model, folder, encoded, [f"image {n}" for n in range(len(encoded))], "duplicate-image")


def same_captions(model: Path, folder: Path, *captions: str) -> set[str]:
    """`found` among these captions and others."""
    others = [*captions, *map(str, range(100, 105))]
    return found(model, folder, [encode(noise(32, 32, n)) for n in range(len(others))], others, "duplicate-caption")


def logo(colour: str, background: str = "white", mark: str = "ellipse") -> np.ndarray:
    image = Image.new("RGB", (96, 96), background)
    draw = ImageDraw.Draw(image)
    getattr(draw, mark)((20, 30, 70, 80), fill=colour)
    draw.rectangle((60, 10, 80, 40), fill=colour)
    return np.asarray(image)


def faint(seed: int) -> np.ndarray:
    """A page whose colours vary by two of 255."""
    return (WHITE - np.random.default_rng(seed).integers(0, 3, WHITE.shape)).astype(np.uint8)


@pytest.mark.parametrize(
    "images",
    [
        (WHITE, WHITE),
        (faint(0), faint(0), faint(1)),
        (np.zeros_like(WHITE), encode(np.zeros_like(WHITE), "BMP"), WHITE),
        (encode(faint(0)), encode(faint(0), "WEBP", lossless=True), encode(faint(0), "TIFF")),
        (*[WHITE] * 8, WHITE - 1),
    ],
    ids=["white", "faint", "black", "formats", "many"],
)
def test_equal_pixels_are_always_found(tmp_path: Path, model: Path, images: Sequence[bytes | np.ndarray]) -> None:
    pixels = [x if isinstance(x, np.ndarray) else np.asarray(Image.open(io.BytesIO(x))) for x in images]
    equal = {f"{n}=0" for n in range(1, len(images)) if np.array_equal(pixels[n], pixels[0])}
    assert equal
    assert same_images(model, tmp_path, *images) == equal


def test_images_of_other_colours_are_none(tmp_path: Path, model: Path) -> None:
    images = [
        *(logo("red"), logo("blue")),
        *(logo("black"), logo("navy")),
        *(logo("green"), logo("limegreen")),
        *(logo("white", "red"), logo("white", "green")),
        *(logo("black", "yellow"), logo("black", "lightblue")),
        *(logo("red", "black", "rectangle"), logo("orange", "black", "rectangle")),
        *(np.full((64, 64, 3), 250, np.uint8), WHITE),
    ]
    assert same_images(model, tmp_path, *images) == set()


def test_copies_are_found(tmp_path: Path, model: Path) -> None:
    picture = logo("red")
    mirrored = np.ascontiguousarray(picture[:, ::-1])
    brighter = np.clip(picture.astype(int) // 2 + 90, 0, 255).astype(np.uint8)
    smaller = np.asarray(Image.fromarray(picture).resize((64, 64)))
    copies = [encode(picture, "JPEG", quality=40), mirrored, brighter, smaller]
    assert same_images(model, tmp_path, picture, *copies) >= {"1=0", "2=0", "4=0"}


def test_captions_that_differ_are_no_repetitions(tmp_path: Path, model: Path) -> None:
    captions = [
        *("लड़का दौड़ रहा है", "लड़की दौड़ रही है", "लड़के दौड़ रहे हैं"),
        *("C++ code on a screen", "C# code on a screen", "C code on a screen"),
        *("ไก่อยู่บนโต๊ะ", "ไข่อยู่บนโต๊ะ", "ไข้อยู่บนโต๊ะ"),
        *("ஒரு கல்", "ஒரு கால்", "ஒரு கூல்"),
        *("عِلْم", "عَلَم", "عُلِمَ"),
        *("I ❤️ rain", "I 💔 rain", "I rain"),
        *("-5 °C outside", "5 °C outside", "+5 °C outside"),
        *("$5", "€5", "5%"),
        *("let's eat, grandma", "lets eat grandma", "let's eat grandma"),
    ]
    assert same_captions(model, tmp_path, *captions) == set()


def test_captions_that_are_the_same_repeat(tmp_path: Path, model: Path) -> None:
    captions = [
        *("A dog runs.", "a  DOG runs", "a dog runs ."),
        *("Café", unicodedata.normalize("NFD", "café"), "CAFE\u0301"),
        *("한국어 간판", unicodedata.normalize("NFD", "한국어 간판"), "한국어　간판"),
        *("Straße", "STRASSE", "strasse"),
    ]
    equal = {f"{n}={n // 3 * 3}" for n in range(12) if n % 3}
    assert same_captions(model, tmp_path, *captions) == equal
