"""JSON from strangers: reading a file, and values of its objects, with a message that names the key."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from kiloword.data.files import key_bytes
from kiloword.data.sources.sample import check_regular
from kiloword.errors import article
from kiloword.terminal import shown

MAX_JSON = 1 << 31  # bytes; parsing takes about ten times as much memory
_LARGEST = 1 << 63
Id = int | str
Objects = Sequence[dict[str, Any]]
_WORDS = {int: "whole number", str: "text", list: "list", dict: "object"}


def read_all(path: Path) -> bytes:
    """The bytes of a file. Errors: ValueError for what is no file, or has more than MAX_JSON bytes."""
    check_regular(path)
    size = path.stat().st_size
    if size > MAX_JSON:
        raise ValueError(f"{path} has {size:,} bytes, more than {MAX_JSON:,}. Write it as parquet.")
    return path.read_bytes()


def load_json(path: Path, hook: Callable[[dict[str, Any]], Any] | None = None) -> Any:
    """The value of a file. Args: hook: `object_hook` of `json.loads`. Errors: ValueError for what is no JSON."""
    raw = read_all(path)
    if path.suffix.lower() == ".jsonl":  # an object in each line
        raw = b"[" + b",\n".join(line for line in raw.splitlines() if line.strip()) + b"]"
    try:
        return json.loads(raw, object_hook=hook)
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8. Expected JSON.") from None
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply. Expected JSON of a known layout.") from None
    except ValueError as error:  # its message has line and column, and nothing of the file
        raise ValueError(f"{path} is no JSON: {error}.") from None


def objects(path: Path, data: dict[str, Any], name: str) -> Objects:
    """The list of objects at a key. Errors: ValueError where there is none."""
    rows = value(path, data, name, (list,), "the file")
    if not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path}: {name} holds something other than objects.")
    return list(rows)


def value(path: Path, row: dict[str, Any], key: str, kinds: tuple[type, ...], where: str) -> Any:
    """The value of a key. Errors: ValueError when it is missing or of another type."""
    if key not in row:
        raise ValueError(f"{path}: {where} has no key `{key}`; it has {keys_of(row)}.")
    one = row[key]
    if not isinstance(one, kinds) or isinstance(one, bool):
        expected = " or ".join(_WORDS[kind] for kind in kinds)
        raise ValueError(f"{path}: `{key}` of {where} is {article(type(one).__name__)}. Expected {expected}.")
    return one


def values(path: Path, rows: Objects, name: str, key: str, *kinds: type) -> list[Any]:
    """The value of a key in each object of the list `name`. Errors: as of `value`, with the number of the object."""
    return [value(path, row, key, kinds, f"{name}[{n}]") for n, row in enumerate(rows)]


def keys_of(row: dict[str, Any]) -> str:
    """The keys of an object, for messages."""
    return shown(", ".join(row)[:200]) or "none"


def column(values: Sequence[Any]) -> pa.Array:
    """Numbers, texts or lists of either as a column. Texts are bytes: one that is not UTF-8 is one bad sample."""
    if values and all(isinstance(one, int) and abs(one) < _LARGEST for one in values):
        return pa.array(values, pa.int64())
    if any(isinstance(one, list) for one in values):
        lists = [one if one is None or isinstance(one, list) else [one] for one in values]
        inner = [item for one in lists for item in one or []]
        if inner and all(isinstance(item, int) and abs(item) < _LARGEST for item in inner):
            return pa.array(lists, pa.large_list(pa.int64()))
        raw = [None if one is None else [key_bytes(str(item)) for item in one] for one in lists]
        return pa.array(raw, pa.large_list(pa.large_binary()))
    return pa.array([None if one is None else key_bytes(str(one)) for one in values], pa.large_binary())
