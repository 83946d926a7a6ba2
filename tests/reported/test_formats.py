"""Images of every common format are read by every verb, or counted and named with what is missing."""

from __future__ import annotations

import io
import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, features
from users import Run, write_table

import kiloword
from kiloword.data.images.decode import decode
from kiloword.data.open import open_source
from tars import noise, write_tar

PIXELS = noise(30, 40, 5)
LOSSLESS = {"png": "PNG", "webp": "WEBP", "bmp": "BMP", "gif": "GIF", "tif": "TIFF", "tiff": "TIFF"}
LOSSLESS |= {"jp2": "JPEG2000", "j2k": "JPEG2000", "ppm": "PPM", "pnm": "PPM", "pgm": "PPM", "pbm": "PPM"}
FORMATS = {"jpg": "JPEG", "jpeg": "JPEG", "jfif": "JPEG", **LOSSLESS}
MODES = {"gif": "L", "pgm": "L", "pbm": "1"}  # of the formats that have no exact colours


def encoded(suffix: str) -> bytes:
    out = io.BytesIO()
    image = Image.fromarray(PIXELS).convert(MODES.get(suffix, "RGB"))
    image.save(out, FORMATS[suffix], **({"lossless": True} if suffix == "webp" else {"quality": 95}))
    return out.getvalue()


def wanted(suffix: str) -> np.ndarray:
    return np.asarray(Image.fromarray(PIXELS).convert(MODES.get(suffix, "RGB")).convert("RGB"))


def everything(folder: Path) -> list[str]:
    """A captioned image of each format. Returns: the names, of which some have capital letters."""
    folder.mkdir()
    names = [f"{suffix}.{suffix.upper() if n % 2 else suffix}" for n, suffix in enumerate(FORMATS)]
    for name, suffix in zip(names, FORMATS, strict=True):
        (folder / name).write_bytes(encoded(suffix))
        (folder / f"{suffix}.txt").write_text(f"an image of kind {suffix}")
    return names


def test_verbs_read_every_format(tmp_path: Path, model: Path, run: Run) -> None:
    names = everything(tmp_path / "d")
    code, said = run("index", tmp_path / "d", "--model", model, "--out", tmp_path / "lib", "--device", "cpu")
    assert (code, "lib: 15 photos" in said, "skipped" in said) == (0, True, False)
    words = ["--classes", "dog", "cat", "--json", tmp_path / "c.json"]
    code, said = run("classify", model, "--images", tmp_path / "d", *words)
    shown = [Path(one["image"]).name for one in json.loads((tmp_path / "c.json").read_text())["images"]]
    assert (code, sorted(shown), "skipped" in said) == (0, sorted(names), False)
    code, said = run("data", "check", tmp_path / "d")
    assert (code, "15" in said, "skipped" in said) == (0, True, False)
    matcher = kiloword.load(str(model))
    vectors = matcher.encode_image([tmp_path / "d" / name for name in names])["vec"]
    exact = matcher.encode_image([PIXELS] * len(names))["vec"]
    same = [n for n, name in enumerate(names) if name.rsplit(".")[1].lower() not in MODES]
    assert (vectors[same] - exact[same]).abs().max() < 0.05


@pytest.mark.parametrize("suffix", LOSSLESS)
@pytest.mark.parametrize("kind", ["folder", "classes", "tar", "parquet", "csv"])
def test_sources_read_every_format(tmp_path: Path, kind: str, suffix: str) -> None:
    """The pixels are exact: the suffix alone decides that a file is an image, and its content how it is read."""
    src, image = tmp_path / "d", encoded(suffix)
    src.mkdir()
    if kind == "tar":
        src = write_tar(src / "0.tar", {f"\u5317\u4eac.{suffix}": image, "\u5317\u4eac.txt": b"a tower"})
    elif kind == "parquet":
        src = write_table(src / "x.parquet", [{"image": {"bytes": image, "path": None}, "caption": "a tower"}])
    elif kind == "csv":
        (src / f"\u0635\u0648\u0631\u0629.{suffix}").write_bytes(image)
        src = write_table(src / "x.csv", [{"image": "\u0635\u0648\u0631\u0629", "caption": "a tower"}])
    else:
        for inner in ("cat", "dog") if kind == "classes" else ("",):
            (src / inner).mkdir(exist_ok=True)
            (src / inner / f"a.{suffix.upper()}").write_bytes(image)
            (src / inner / "a.txt").write_text("a tower")
    source = open_source(str(src))
    record = source.record(0)
    assert record.captions == ["a tower"]
    np.testing.assert_array_equal(decode(record.image), wanted(suffix))


@pytest.mark.parametrize("suffix", ["heic", "HEIF", "avif"])
def test_what_needs_a_package_is_read_or_named_with_it(tmp_path: Path, model: Path, suffix: str, run: Run) -> None:
    photos = tmp_path / "d"
    photos.mkdir()
    Image.fromarray(PIXELS).save(photos / "a.png")
    there = features.check("avif") if suffix == "avif" else find_spec("pillow_heif") is not None
    if there and suffix != "avif":
        import pillow_heif

        pillow_heif.register_heif_opener()
    if there:
        Image.fromarray(PIXELS).save(photos / f"b.{suffix}", "AVIF" if suffix == "avif" else "HEIF")
    else:
        (photos / f"b.{suffix}").write_bytes(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic")
    code, said = run("index", photos, "--model", model, "--out", tmp_path / "lib", "--device", "cpu")
    assert code == 0
    classified, of_classify = run("classify", model, "--images", photos, "--classes", "dog", "cat")
    assert classified == 0
    for output in (said, of_classify):
        assert there or (f"b.{suffix}" in output and "pip install" in output)
    assert ("lib: 2 photos" if there else "lib: 1 photo,") in said
    assert len(open_source(str(photos))) == 1 + there


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("plain.ppm", b"P3 4000 3000 255 " + b"7 " * 9),
        ("sixteen.pgm", b"P5 4000 3000 65535 " + b"\0" * 9),
        ("bomb.jp2", encoded("jp2").replace((40).to_bytes(4, "big"), (1 << 30).to_bytes(4, "big"))),
        ("cut.tiff", encoded("tiff")[:700]),
    ],
)
def test_damage_in_these_formats_is_counted(tmp_path: Path, model: Path, name: str, content: bytes, run: Run) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / name).write_bytes(content)
    Image.fromarray(PIXELS).save(tmp_path / "d" / "z.png")
    code, said = run("classify", model, "--images", tmp_path / "d", "--classes", "dog", "cat")
    assert code == 0
    assert "1 image skipped" in said
    assert name in said.partition("skipped")[2]
