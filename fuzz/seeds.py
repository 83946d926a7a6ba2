"""Small inputs that the readers understand, to be changed."""

from __future__ import annotations

import io
import json
import struct
import tarfile
from dataclasses import asdict
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import torch
from PIL import Image
from safetensors.torch import save

from kiloword.config.recipes import ModelFile
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.methods.defaults import default_recipe
from kiloword.training.run_folder import RunFile

STATE = save({"a": torch.zeros(2)})  # what a state names


def small_tar(kind: int = tarfile.PAX_FORMAT, name: str = "a") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=kind) as tar:
        for member, body in (
            (f"{name}.png", image("PNG")),
            (f"{name}.txt", b"a dog"),
            ("b.jpg", b""),
            ("b.cls", b"3"),
        ):
            info = tarfile.TarInfo(member)
            info.size = len(body)
            tar.addfile(info, io.BytesIO(body))
    return out.getvalue()[:8192]


def tar_seeds() -> list[bytes]:
    whole = [small_tar(kind, name) for kind in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT) for name in ("a", "é" * 120)]
    return [kind + tar for kind in (b"\0", b"\1") for tar in whole]


def image(kind: str, mode: str = "RGB", **options: Any) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 256, (4, 4, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).resize((20, 12)).convert(mode).save(out, kind, **options)
    return out.getvalue()


def scans(count: int) -> bytes:
    """A progressive JPEG, its last scan over and over."""
    jpeg = image("JPEG", "L", progressive=True)
    last = jpeg[jpeg.rindex(b"\xff\xda") : -2]
    return jpeg[:-2] + last * (count - jpeg.count(b"\xff\xda")) + b"\xff\xd9"


def with_segments() -> bytes:
    """A JPEG with many segments, fill bytes and a scan inside a segment."""
    jpeg, film = image("JPEG"), b"\xff\xda\0\x08" * 60
    inside = b"\xff\xe1" + struct.pack(">H", len(film) + 2) + film
    return jpeg[:20] + b"\xff\xfe\0\3x" * 50 + b"\xff" * 50 + inside + jpeg[20:] + film


def image_seeds() -> list[bytes]:
    exif = Image.Exif()
    exif[0x0112], exif[0x010E] = 6, "x"
    more: dict[str, Any] = {"save_all": True, "append_images": [Image.new("RGB", (20, 12))]}
    modes = {"PNG": ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"), "JPEG": ("L", "RGB", "CMYK"), "GIF": ("P",)}
    modes |= {"WEBP": ("RGB", "RGBA"), "BMP": ("1", "P", "RGB"), "TIFF": ("1", "L", "RGB", "CMYK", "F", "I;16", "P")}
    plain = [image(kind, mode) for kind, all_ in modes.items() for mode in all_]
    special = [image(kind, exif=exif) for kind in ("PNG", "JPEG", "WEBP", "TIFF")]
    special += [image(kind, **more) for kind in ("PNG", "GIF", "WEBP", "TIFF", "MPO")]
    special += [
        scans(12),
        scans(90),
        scans(110),
        with_segments(),
        image("WEBP", lossless=True),
        image("JPEG", quality=5),
    ]
    special += [image("TIFF", compression=name) for name in ("tiff_lzw", "jpeg", "packbits", "tiff_adobe_deflate")]
    return [bytes([n % 6]) + encoded for n, encoded in enumerate(plain + special)]


def tokenizer() -> Tokenizer:
    global _TOKENIZER
    if _TOKENIZER is None:
        _TOKENIZER = Tokenizer.train(["a dog on the grass", "two cats and a dog"] * 20, 400)
    return _TOKENIZER


_TOKENIZER: Tokenizer | None = None


def caption_seeds() -> list[bytes]:
    meta = {"captions": ["a dog", "ein Hund 😀"], "url": "u", "n": [1, 2.5, None, True]}
    asked = {"question": "what?", "answers": [{"answer": "a dog"}, {"answer": "no"}]}
    tables: list[dict[str, Any]] = [
        {"image": ["a.png", "a.png"], "caption": ["a dog", "x"]},
        {"image": ["a.png"], "captions": [["a dog", None]]},
        {"image": [b"\x89PNG", b""], "caption": [b"a", None]},
        {"image": [{"bytes": b"\x89PNG", "path": "a"}], "caption": ["a"]},
        {"image": ["a.png"], "question": ["what?"], "answers": [["a", "b"]]},
    ]
    return [
        "\0a dog\n\n ein Hund 😀 \r\n".encode(),
        b"\0\xef\xbb\xbfmark\0nul",
        b"\1" + json.dumps(meta).encode(),
        b"\2" + json.dumps(asked).encode(),
        b'\1{"caption": "\\ud800\\u0000", "a": NaN, "b": 1e999, "c": [[[[{}]]]]}',
        b"\00312",
        b'\4image,caption\na.png,"a ""dog"",\nx"\na.png,b\nonly\n',
        b"\4image,question,answers,question_type\na.png,what?,\"[\"\"a\"\"]\",x\n",
        b'\5filepath\ttitle\na.png\ta dog\n',
        b'\5image\tcaptions\na.png\t["a", "b"]\n',
        *(b"\6" + parquet(table) for table in tables),
        b"\7" + parquet({"key": ["a", "b"], "captions": [["x", None], []]}),
        b"\7" + parquet({"key": ["a", "a"], "caption": ["x", None]}),
    ]  # fmt: skip


def parquet(columns: dict[str, Any]) -> bytes:
    out = io.BytesIO()
    pa.parquet.write_table(pa.table(columns), out)
    return out.getvalue()


def settings_seeds() -> list[bytes]:
    recipe = default_recipe("siglip", "debug")
    run = asdict(RunFile(recipe=recipe, data_fingerprint="0" * 32))
    model = asdict(ModelFile(method="siglip", settings={}, model=recipe.model))
    table = {"kind": "features", "name": "t", "width": 4, "model": "m", "weights": "0", "precision": "fp32"}
    table |= {"dtype": "fp16", "data": "d", "fingerprint": "0", "rows": 3, "part": 2, "sources": [], "captions": ["a"]}
    plain = tokenizer()._backend.to_str()
    words = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    return [
        *(bytes([n]) + json.dumps(value).encode() for n, value in enumerate((run, model, table))),
        b"\0" + b"[" * 2000,
        b"\3" + plain.encode(),
        b"\3" + json.dumps(json.loads(plain) | {"model": words}).encode(),
        b'\6{"bad": [], "seconds": 1.5, "files": {"a": "' + b"0" * 64 + b'", "../step-000000001.safetensors": ""}}',
        b'\6{"files": {}, "bad": [[1, "a", "b"]]}',
        b'\6{"checksum": ""}',
    ]  # fmt: skip
