"""The four readers that meet strangers' bytes, each as a function of bytes: it returns, or what it raises is a finding.

The first byte of an input chooses among what the reader can read, the rest is read. Where a checksum would turn every
change of a byte into the same early refusal, one choice puts the checksums right first.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import struct
import tarfile
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import torch
from PIL import Image
from safetensors.torch import save

from kiloword.data.captions import choose, drop_words
from kiloword.data.decode import decode, picture_size
from kiloword.data.extra_captions import CaptionTable
from kiloword.data.index import SUFFIX, Header, _digest, open_index, parse_index
from kiloword.data.reading import read
from kiloword.data.sample import make_record
from kiloword.data.shards import Shards
from kiloword.data.side import TableFile
from kiloword.data.sources import open_source
from kiloword.data.tokenizer import Tokenizer
from kiloword.data.transforms import EvalTransform, TrainTransform
from kiloword.draw import Draw
from kiloword.recipes import AugmentConfig, ModelFile, TextConfig, default, read_config
from kiloword.run_folder import RunFile
from kiloword.state.folder import newest, write_numbers
from kiloword.types import BadSample, Source

DRAW = Draw(0, 0, 0)
ROWS = 20  # read of a source
STATE = save({"a": torch.zeros(2)})  # what a state names
DECODERS = ("pillow", "opencv", "simplejpeg")


class Broken(Exception):
    """A reader returned what it should not."""


@dataclass(frozen=True)
class Reader:
    """Args: read: for any bytes, in a folder that it may fill; seeds: inputs that it understands."""

    read: Callable[[bytes, Path], None]
    seeds: Callable[[], list[bytes]]


def said(call: Callable[[], Any]) -> Any:
    """What a reader returns; None where it raises what is documented."""
    try:
        return call()
    except (ValueError, BadSample) as error:
        if isinstance(error, UnicodeError) or "\n" in str(error).strip() or not str(error).strip():
            raise Broken(f"no sentence: {error!r}") from error
        return None


def read_source(source: Source | None) -> None:
    if source is None:
        return
    for row in range(min(len(source), ROWS)):
        key = source.key(row)  # type: ignore[attr-defined]
        record = said(lambda row=row: read(source, row))
        captions = said(lambda row=row: source.captions(row))  # type: ignore[attr-defined]
        if record is not None and (record.key, record.captions) != (key, captions):
            raise Broken("key or captions differ from the record's")


# Tar index


def read_tar(data: bytes, folder: Path) -> None:
    choice, body = data[:1], data[1:]
    tar = folder / "x.tar"
    if choice in b"\2\3":
        tar.write_bytes(small_tar())
        os.utime(tar, ns=(1, 1))
        body = body if choice == b"\2" else _with_digest(body, tar)
        (folder / f"x.tar{SUFFIX}").write_bytes(body)
        if said(lambda: open_index(tar)) is None:
            raise Broken("a damaged index stops a good tar")
    else:
        tar.write_bytes(_with_sums(body) if choice == b"\1" else body)
    read_source(said(lambda: Shards("x", [tar])))


def _with_sums(tar: bytes) -> bytes:
    """The checksum of whatever might be a header put right."""
    blocks = [bytearray(tar[start : start + 512]) for start in range(0, len(tar), 512)]
    for block in blocks:
        if len(block) == 512 and block[257:262] == b"ustar":
            block[148:156] = b" " * 8
            block[148:156] = b"%06o\0 " % sum(block)
    return b"".join(blocks)


def _with_digest(body: bytes, tar: Path) -> bytes:
    """An index whose header fits, whatever the table says."""
    samples = max(1, min(body[0] if body else 1, (len(body) - 1) // 72))
    table, keys = np.frombuffer(body[1 : 1 + 72 * samples].ljust(72 * samples, b"\0"), "<i8"), body[1 + 72 * samples :]
    digest = _digest(table.astype(np.int64).reshape(samples, 9), keys)
    header = Header(size=tar.stat().st_size, mtime_ns=1, samples=samples, digest=digest)
    return header.model_dump_json().encode() + b"\n" + table.tobytes() + keys


def small_tar(kind: int = tarfile.PAX_FORMAT, name: str = "a") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=kind) as tar:
        for member, body in (
            (f"{name}.png", picture("PNG")),
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
    places = np.array([512, 90, 2048, 5, -1, -1, -1, -1, 1, 0, 5, 512, 9, -1, -1, 0, 0, 2], "<i8").tobytes()
    index = _index_of(small_tar())
    return [kind + tar for kind in (b"\0", b"\1") for tar in whole] + [b"\2" + index, b"\3\2" + places + b"ab"]


def _index_of(tar: bytes) -> bytes:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.tar"
        path.write_bytes(tar)
        os.utime(path, ns=(1, 1))
        open_index(path)
        return path.with_name(f"x.tar{SUFFIX}").read_bytes()


# Pictures


def read_picture(data: bytes, folder: Path) -> None:
    choice, body = (data[0] if data else 0), data[1:]
    if choice & 1:
        body = _with_crcs(body)
    size = said(lambda: picture_size(body))
    found = [said(lambda decoder=decoder: decode(body, decoder)) for decoder in DECODERS]
    for pixels in found:
        if (pixels is None) != (found[0] is None):
            raise Broken("the decoders disagree on whether this is a picture")
        if pixels is not None and (pixels.dtype != np.uint8 or pixels.shape != (size[1], size[0], 3)):
            raise Broken(f"{pixels.dtype} {pixels.shape}, the header says {size}")
    decoder = DECODERS[choice // 2 % 3]
    augment = AugmentConfig(crop=0.5, flip=0.5)
    for make in (lambda: EvalTransform(32, decoder=decoder)(body), lambda: TrainTransform(32, augment)(body, DRAW)):
        tensor = said(make)
        if tensor is not None and tuple(tensor.shape) != (3, 32, 32):
            raise Broken(f"a picture of {tuple(tensor.shape)}")


def _with_crcs(image: bytes) -> bytes:
    """The checksums of a PNG put right."""
    if image[:4] != b"\x89PNG":
        return image
    out, at = [image[:8]], 8
    while at + 12 <= len(image):
        length = min(int.from_bytes(image[at : at + 4], "big"), len(image) - at - 12)
        body = image[at + 4 : at + 8 + length]
        out.append(struct.pack(">I", length) + body + struct.pack(">I", zlib.crc32(body)))
        at += 12 + length
    return b"".join(out)


def picture(kind: str, mode: str = "RGB", **options: Any) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 256, (4, 4, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).resize((20, 12)).convert(mode).save(out, kind, **options)
    return out.getvalue()


def picture_seeds() -> list[bytes]:
    exif = Image.Exif()
    exif[0x0112], exif[0x010E] = 6, "x"
    more: dict[str, Any] = {"save_all": True, "append_images": [Image.new("RGB", (20, 12))]}
    modes = {"PNG": ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"), "JPEG": ("L", "RGB", "CMYK"), "GIF": ("P",)}
    modes |= {"WEBP": ("RGB", "RGBA"), "BMP": ("1", "P", "RGB"), "TIFF": ("1", "L", "RGB", "CMYK", "F", "I;16", "P")}
    plain = [picture(kind, mode) for kind, all_ in modes.items() for mode in all_]
    special = [picture(kind, exif=exif) for kind in ("PNG", "JPEG", "WEBP", "TIFF")]
    special += [picture(kind, **more) for kind in ("PNG", "GIF", "WEBP", "TIFF", "MPO")]
    special += [picture("JPEG", progressive=True), picture("WEBP", lossless=True), picture("JPEG", quality=5)]
    special += [picture("TIFF", compression=name) for name in ("tiff_lzw", "jpeg", "packbits", "tiff_adobe_deflate")]
    return [bytes([n % 6]) + image for n, image in enumerate(plain + special)]


# Captions


def read_caption(data: bytes, folder: Path) -> None:
    choice, body = (data[0] if data else 0) % 8, data[1:]
    if choice < 4:
        text, meta, cls = [(body, None, None), (None, body, None), (b"x", body, None), (b"x", None, body)][choice]
        record = said(lambda: make_record("x", b"x", text, meta, cls))
        if record is not None and record.captions:
            few = choose(record.captions, 2, DRAW)
            tokenizer().encode(drop_words(few, 0.5, DRAW), TextConfig(vocab=512))
        return
    path = folder / ("x.csv", "x.tsv", "x.parquet", "x.parquet")[choice - 4]
    path.write_bytes(body)
    (folder / "a.png").write_bytes(picture("PNG"))
    if choice == 7:
        table = said(lambda: CaptionTable(path))
        if table is not None:
            said(lambda: table.captions("a"))
    else:
        read_source(said(lambda: open_source(str(path))))


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


# Configs


def read_settings(data: bytes, folder: Path) -> None:
    choice, body = (data[0] if data else 0) % 7, data[1:]
    path = folder / "tokenizer.json"
    path.write_bytes(body)
    if choice < 3:
        said(lambda: read_config(path, (RunFile, ModelFile, TableFile)[choice]))
    elif choice == 3:
        found = said(lambda: Tokenizer.load(folder))
        if found is not None:
            texts = said(lambda: found.encode(["a dog", "", "😀\0"], TextConfig(vocab=1 << 40)))
            said(lambda: texts and found.decode(texts.ids.tolist()))
    elif choice == 4:
        parse_index(body)
    else:
        path.rename(folder / "step-000000001.json")
        (folder / "step-000000001.safetensors").write_bytes(STATE)
        if choice == 6:
            _right_digest(folder / "step-000000001.json")
        said(lambda: newest(folder, lambda _: None))


def _right_digest(path: Path) -> None:
    """The checksum of a state's numbers put right, where they are numbers."""
    try:
        numbers = json.loads(path.read_text())
        files, numbers = numbers.pop("files", {}), {k: v for k, v in numbers.items() if k not in ("step", "sha256")}
        write_numbers(path.parent, 1, files, numbers)
    except (ValueError, AttributeError, TypeError, RecursionError):
        return


def settings_seeds() -> list[bytes]:
    recipe = default("siglip", "debug")
    run = asdict(RunFile(recipe=recipe, data_fingerprint="0" * 32))
    model = asdict(ModelFile(method="siglip", settings={}, model=recipe.model))
    table = {"name": "t", "dim": 4, "teacher": "m", "teacher_fingerprint": "0", "precision": "fp32", "dtype": "fp16"}
    table |= {"data": "d", "fingerprint": "0", "contents": ["a"], "rows": 3, "part": 2}
    header = Header(size=1, mtime_ns=2, samples=3, digest="x")
    plain = tokenizer()._backend.to_str()
    words = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    return [
        *(bytes([n]) + json.dumps(value).encode() for n, value in enumerate((run, model, table))),
        b"\0" + b"[" * 2000,
        b"\3" + plain.encode(),
        b"\3" + json.dumps(json.loads(plain) | {"model": words}).encode(),
        b"\4" + header.model_dump_json().encode(),
        b'\5{"step": 1, "checksum": "' + hashlib.blake2b(STATE, digest_size=16).hexdigest().encode() + b'"}',
        b'\6{"bad": [], "seconds": 1.5, "files": {"a": "' + b"0" * 64 + b'", "../step-000000001.safetensors": ""}}',
        b'\6{"files": {}, "bad": [[1, "a", "b"]]}',
        b'\6{"checksum": ""}',
    ]  # fmt: skip


READERS = {
    "tar index": Reader(read_tar, tar_seeds),
    "pictures": Reader(read_picture, picture_seeds),
    "captions": Reader(read_caption, caption_seeds),
    "configs": Reader(read_settings, settings_seeds),
}
