"""The four readers that meet strangers' bytes, each as a function of bytes: it returns, or what it raises is a finding.

The first byte of an input chooses among what the reader can read, the rest is read. Where a checksum would turn every
change of a byte into the same early refusal, one choice puts the checksums right first.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from seeds import (
    STATE,
    caption_seeds,
    image,
    image_seeds,
    settings_seeds,
    tar_seeds,
    tokenizer,
)

from kiloword.config.recipes import AugmentConfig, ModelFile, TextConfig
from kiloword.config.settings import read_config
from kiloword.data.images.augmentation import EvalTransform, TrainTransform
from kiloword.data.images.decode import decode, image_size
from kiloword.data.joins import CaptionTable
from kiloword.data.open import open_source
from kiloword.data.reading import read
from kiloword.data.sample import parse_beside
from kiloword.data.sampler import choose_captions
from kiloword.data.stored import StoreFile
from kiloword.data.tar import open_tars
from kiloword.data.text.eda import drop_words
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.models.states import newest
from kiloword.randomness import Draw
from kiloword.training.run_folder import RunFile
from kiloword.types import BadSample, Source

DRAW = Draw(0, 0, 0)
ROWS = 20  # read of a source
DECODERS = ("pillow", "simplejpeg")


class Broken(Exception):
    """A reader returned what it should not."""


@dataclass(frozen=True)
class Reader:
    """Args: read: for any bytes, in a folder that it may fill; seeds: inputs that it understands."""

    read: Callable[[bytes, Path], None]
    seeds: Callable[[], list[bytes]]


def result_of(call: Callable[[], Any]) -> Any:
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
        record = result_of(lambda row=row: read(source, row))
        captions = result_of(lambda row=row: source.captions(row))  # type: ignore[attr-defined]
        if record is not None and (record.key, record.captions) != (key, captions):
            raise Broken("key or captions differ from the record's")


# Tars


def read_tar(data: bytes, folder: Path) -> None:
    choice, body = data[:1], data[1:]
    tar = folder / "x.tar"
    tar.write_bytes(_with_sums(body) if choice == b"\1" else body)
    read_source(result_of(lambda: open_tars("x", [tar])))


def _with_sums(tar: bytes) -> bytes:
    """The checksum of whatever might be a header put right."""
    blocks = [bytearray(tar[start : start + 512]) for start in range(0, len(tar), 512)]
    for block in blocks:
        if len(block) == 512 and block[257:262] == b"ustar":
            block[148:156] = b" " * 8
            block[148:156] = b"%06o\0 " % sum(block)
    return b"".join(blocks)


# Images


def read_image(data: bytes, folder: Path) -> None:
    choice, body = (data[0] if data else 0), data[1:]
    if choice & 1:
        body = _with_crcs(body)
    size = result_of(lambda: image_size(body))
    found = [result_of(lambda decoder=decoder: decode(body, decoder)) for decoder in DECODERS]
    for pixels in found:
        if (pixels is None) != (found[0] is None):
            raise Broken("the decoders disagree on whether this is an image")
        if pixels is not None and (pixels.dtype != np.uint8 or pixels.shape != (size[1], size[0], 3)):
            raise Broken(f"{pixels.dtype} {pixels.shape}, the header says {size}")
    augment = AugmentConfig(crop=0.5, flip=0.5)
    for make in (lambda: EvalTransform(32)(body), lambda: TrainTransform(32, augment)(body, DRAW)):
        tensor = result_of(make)
        if tensor is not None and tuple(tensor.shape) != (3, 32, 32):
            raise Broken(f"an image of {tuple(tensor.shape)}")


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


# Captions


def read_caption(data: bytes, folder: Path) -> None:
    choice, body = (data[0] if data else 0) % 8, data[1:]
    if choice < 4:
        text, meta, cls = [(body, None, None), (None, body, None), (b"x", body, None), (b"x", None, body)][choice]
        row = result_of(lambda: parse_beside(text, meta, cls))
        if row is not None and row["captions"]:
            few = choose_captions(row["captions"], 2, DRAW)
            tokenizer().encode(drop_words(few, 0.5, DRAW), TextConfig(vocab=512))
        return
    path = folder / ("x.csv", "x.tsv", "x.parquet", "x.parquet")[choice - 4]
    path.write_bytes(body)
    (folder / "a.png").write_bytes(image("PNG"))
    if choice == 7:
        table = result_of(lambda: CaptionTable(path))
        if table is not None:
            result_of(lambda: table.captions("a"))
    else:
        read_source(result_of(lambda: open_source(str(path))))


# Configs


def read_settings(data: bytes, folder: Path) -> None:
    choice, body = (data[0] if data else 0) % 5, data[1:]
    path = folder / "tokenizer.json"
    path.write_bytes(body)
    if choice < 3:
        result_of(lambda: read_config(path, (RunFile, ModelFile, StoreFile)[choice]))
    elif choice == 3:
        found = result_of(lambda: Tokenizer.load(folder))
        if found is not None:
            texts = result_of(lambda: found.encode(["a dog", "", "😀\0"], TextConfig(vocab=1 << 40)))
            result_of(lambda: texts and found.decode(texts.ids.tolist()))
    else:
        path.rename(folder / "step-000000001.json")
        (folder / "step-000000001.safetensors").write_bytes(STATE)
        result_of(lambda: newest(folder, lambda _: None))


READERS = {
    "tars": Reader(read_tar, tar_seeds),
    "images": Reader(read_image, image_seeds),
    "captions": Reader(read_caption, caption_seeds),
    "configs": Reader(read_settings, settings_seeds),
}
