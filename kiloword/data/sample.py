"""The stored parts of one sample (.txt, .json, .cls, .npy), and their limits."""

from __future__ import annotations

import codecs
import io
import json
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kiloword.types import BadSample, LabelSet

IMAGE_SUFFIXES = (  # which `decode` reads; heic and heif by the extra `heif`
    *("jpg", "jpeg", "png", "webp", "bmp", "jfif", "gif", "tif", "tiff", "jp2", "j2k", "pbm", "pgm", "ppm", "pnm"),
    *("avif", "heic", "heif"),
)
MAX_IMAGE = 1 << 28  # bytes of an encoded image
MAX_TEXT = 1 << 23  # bytes of a .txt, .json or .cls
QUESTION, ANSWERS = "question", "answers"  # keys of `Record.info`
_NUMPY = b"\x93NUMPY"  # how a .npy begins
GROUPS = "npy"  # key of `Record.info`: the numbers of a .npy that is no label
_MOST_GROUPS = 64  # of these numbers; a longer array is an embedding
_DIGITS = 18  # of a class index
MAX_CAPTION = 1_000_000  # characters; a tokenizer takes some hundred bytes of memory for each


def check_size(what: str, size: int, most: int) -> None:
    """Raises BadSample for more bytes than `most`; called before they are read."""
    if size > most:
        raise BadSample(f"{what} has {size:,} bytes, more than {most:,}")


def check_regular(path: Path) -> None:
    """Raises ValueError for anything but a file: opening a pipe can block, and a device has no end."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no regular file: expected a file, no folder, pipe, socket or device.")


def read_whole(path: Path, what: str, most: int) -> bytes:
    """A file of at most `most` bytes. Raises BadSample; OSError."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise BadSample(f"{what} is no regular file")
    check_size(what, status.st_size, most)
    return path.read_bytes()


def parse_beside(text: bytes | None, meta: bytes | None, cls: bytes | None) -> dict[str, Any]:
    """What is known of an image, as columns of `kiloword.data.rows`. Raises BadSample."""
    captions, info = parse_captions(text, meta)
    label = parse_label(cls)
    labels = {"labels": label.indices, "of": label.classes} if isinstance(label, LabelSet) else {"label": label}
    return {"captions": captions, "info": json.dumps(info) if info else None, **labels}


def parse_captions(text: bytes | None, meta: bytes | None) -> tuple[list[str], dict[str, Any]]:
    """Captions, and the other fields of the json. Empty captions are dropped.

    The `captions` (list) or `caption` (img2dataset) of the json have precedence over the text, which has one caption
    per line. Answers to a `question` take the place of captions (see `parse_answers`).
    """
    info = {} if meta is None else _parse_json(meta)
    named = parse_answers(info)
    if named is None:
        several, one = info.pop("captions", None), info.pop("caption", None)
        named = [one] if several is None and one is not None else several
    if named is None:
        named = [] if text is None else decode_text(text).split("\n")
    if not (isinstance(named, list) and all(isinstance(caption, str) for caption in named)):
        raise BadSample("the captions of the json are not strings")
    return clean(named), info


def parse_answers(info: dict[str, Any]) -> list[str] | None:
    """The answers of a sample's JSON, one per annotator, which become `info["answers"]`; None without answers.

    They are in `answers`, a list of strings or of objects with `answer` (as VQAv2's annotations), or in `answer`, a
    string. In a sample with captions a question without answers is ignored.
    Raises: BadSample when a question or an answer is not text, or a question has no answer.
    """
    if info.get(QUESTION) is None:
        return None
    named = next((info.pop(name) for name in (ANSWERS, "answer") if info.get(name) is not None), None)
    if named is None and (info.get("captions") or info.get("caption")):
        return None
    question, listed = info[QUESTION], named if isinstance(named, list) else [named or ""]
    texts = [one.get("answer") if isinstance(one, dict) else one for one in listed]
    answers = [text for text in texts if isinstance(text, str)]
    if not isinstance(question, str) or not question.strip():
        raise BadSample("the question is not text")
    if len(answers) < len(texts):
        raise BadSample('the answers are not strings (write "3" for 3)')
    if not any(answer.strip() for answer in answers):
        raise BadSample("a question without an answer")
    info[QUESTION], info[ANSWERS] = question.strip(), answers
    return answers


def question_in(info: Mapping[str, Any]) -> str | None:
    """The question of a `Record.info`; None where it has no question, or no answers to it."""
    return info.get(QUESTION) if ANSWERS in info else None


def clean(captions: list[str]) -> list[str]:
    """Remove outer white space and empty captions.

    Raises: BadSample for text that UTF-8 cannot hold, or of more than MAX_CAPTION characters.
    """
    for caption in captions:
        if len(caption) > MAX_CAPTION:
            raise BadSample(f"caption has {len(caption):,} characters, more than {MAX_CAPTION:,}")
        try:
            caption.encode()
        except UnicodeEncodeError:  # a lone surrogate, which json can smuggle in
            raise BadSample("caption is not UTF-8") from None
    return [c for c in (caption.strip() for caption in captions) if c]


def decode_text(raw: bytes) -> str:
    """UTF-8, with or without a byte order mark. Raises BadSample for anything else."""
    try:
        return raw.removeprefix(codecs.BOM_UTF8).decode()
    except UnicodeDecodeError:
        raise BadSample("caption is not UTF-8") from None


def parse_label(cls: bytes | None) -> int | LabelSet | None:
    """The class index of a .cls member, or the indices of a JSON list.

    It may also be an array of NumPy with a 0 or 1 for each class; another array is no label.
    Raises: BadSample for anything else but non-negative integers.
    """
    if cls is None:
        return None
    if cls.startswith(_NUMPY):
        vector = _vector(cls)
        if vector is None or not np.isin(vector, (0, 1)).all():
            return None
        return LabelSet(tuple(np.flatnonzero(vector).tolist()), len(vector))
    try:
        value = int(cls) if cls.strip().isdigit() else json.loads(cls)
    except (ValueError, RecursionError):
        value = cls
    return label_set(value) if isinstance(value, list) else label_set([value]).indices[0]


def label_set(values: list[Any]) -> LabelSet:
    """The classes of an image by their indices. Raises: BadSample unless they are non-negative integers."""
    for value in values:
        if type(value) is not int or not 0 <= value < 10**_DIGITS:
            raise BadSample(f"class index is not a whole number: {str(value)[:20]!r}")
    return LabelSet(tuple(sorted(set(values))))


def _vector(raw: bytes) -> NDArray[Any] | None:
    """The numbers [n] of a .npy; None for another array."""
    try:
        array = np.load(io.BytesIO(raw), allow_pickle=False)
    except (ValueError, EOFError):
        return None
    return array if array.ndim == 1 and array.dtype.kind in "biuf" else None


def _parse_json(meta: bytes) -> dict[str, Any]:
    if meta.startswith(_NUMPY):  # such as the metadata of DataComp's data sets
        vector = _vector(meta)
        numbers = [] if vector is None or len(vector) > _MOST_GROUPS else vector.tolist()
        whole = [int(one) if isinstance(one, float) and one.is_integer() else one for one in numbers]
        return {GROUPS: whole} if whole else {}
    try:
        info = json.loads(decode_text(meta))
    except (ValueError, RecursionError):  # the second: thousands of nested brackets
        raise BadSample("the json cannot be parsed") from None
    if not isinstance(info, dict):
        raise BadSample("the json is not an object with `captions` or `caption`")
    return info
