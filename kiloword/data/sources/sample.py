"""From the raw members of one sample (image, .txt, .json, .cls) to a Record. Every kind of source ends here."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

from kiloword.data.sources.questions import parse_answers
from kiloword.types import BadSample, NoCaption, Record

IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp", "bmp")
MAX_IMAGE = 1 << 28  # bytes of an encoded image
MAX_TEXT = 1 << 23  # bytes of a .txt, .json or .cls
MAX_CAPTIONS = 10_000  # of one image
MAX_CAPTION = 1_000_000  # characters; a tokenizer takes some hundred bytes of memory for each


def check_size(what: str, size: int, most: int) -> None:
    """Raises BadSample for more bytes than anybody should read; called before they are read."""
    if size > most:
        raise BadSample(f"{what} has {size:,} bytes, more than {most:,}")


def check_regular(path: Path) -> None:
    """Raises ValueError for a pipe, which blocks who opens it, a device, which has no end, and what else is no file."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no regular file: expected a file, no folder, pipe, socket or device.")


def read_whole(path: Path, what: str, most: int) -> bytes:
    """A file of at most `most` bytes. Raises BadSample, also for devices and pipes, which have no end; OSError."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise BadSample(f"{what} is no regular file")
    check_size(what, found.st_size, most)
    return path.read_bytes()


def make_record(key: str, image: bytes, text: bytes | None, meta: bytes | None, cls: bytes | None) -> Record:
    """A Record from the members of a sample; None is a member that is not there. Raises BadSample with the reason."""
    if not image:
        raise BadSample("the image has zero bytes")
    captions, info = parse_captions(text, meta)
    label = parse_label(cls)
    if not captions and label is None:
        raise NoCaption(Record(key, image, [], None, info))
    return Record(key, image, captions, label, info)


def parse_captions(text: bytes | None, meta: bytes | None) -> tuple[list[str], dict[str, Any]]:
    """Captions, and what else the json holds.

    The json's `captions` (list) or `caption` (img2dataset) wins over the text, which holds one caption a line. Where it
    holds a `question`, its answers stand in place of captions (see `parse_answers`). Empty captions are dropped.
    """
    info = {} if meta is None else _parse_json(meta)
    named = parse_answers(info)
    named = _json_captions(info) if named is None else named
    if named is None:
        named = [] if text is None else decode_text(text).split("\n")
    return clean(named), info


def clean(captions: list[str]) -> list[str]:
    """Without outer white space and without empty ones.

    Raises: BadSample for text that UTF-8 cannot hold, or of more than MAX_CAPTION characters; for more than
    MAX_CAPTIONS.
    """
    for caption in captions:
        if len(caption) > MAX_CAPTION:
            raise BadSample(f"caption has {len(caption):,} characters, more than {MAX_CAPTION:,}")
        try:
            caption.encode()
        except UnicodeEncodeError:  # a lone surrogate, which json can smuggle in
            raise BadSample("caption is not UTF-8") from None
    stripped = [c for c in (caption.strip() for caption in captions) if c]
    if len(stripped) > MAX_CAPTIONS:
        raise BadSample(f"{len(stripped):,} captions, more than {MAX_CAPTIONS:,}")
    return stripped


def decode_text(raw: bytes) -> str:
    """UTF-8, with or without a byte order mark. Raises BadSample for anything else."""
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise BadSample("caption is not UTF-8") from None


def parse_label(cls: bytes | None) -> int | None:
    """The class index of a .cls member. Raises BadSample unless it is a non-negative integer."""
    if cls is None:
        return None
    digits = cls.strip()
    if not digits.isdigit() or len(digits) > 18:
        raise BadSample(f"class index is not a whole number: {digits[:20]!r}")
    return int(digits)


def _parse_json(meta: bytes) -> dict[str, Any]:
    try:
        info = json.loads(decode_text(meta))
    except (ValueError, RecursionError):  # the second: thousands of nested brackets
        raise BadSample("the json cannot be parsed") from None
    if not isinstance(info, dict):
        raise BadSample("the json is not an object with `captions` or `caption`")
    return info


def _json_captions(info: dict[str, Any]) -> list[str] | None:
    """Takes the captions out of `info`; None when it names none, so that the text speaks."""
    several, one = info.pop("captions", None), info.pop("caption", None)
    if several is None:
        several = None if one is None else [one]
    if several is not None and not (isinstance(several, list) and all(isinstance(c, str) for c in several)):
        raise BadSample("the captions of the json are not strings")
    return several
