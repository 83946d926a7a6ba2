"""The items of compositional benchmarks, read from their files as they are distributed.

SugarCrepe (arXiv:2306.14610), SugarCrepe++ (arXiv:2406.11171), Winoground (arXiv:2204.03162), ARO (arXiv:2210.01936)
and VALSE (arXiv:2112.07566). The keys of an entry tell which it is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from kiloword.data.sample import check_regular, clean, decode_text, read_whole
from kiloword.terminal import shown
from kiloword.types import BadSample

LARGEST = 1 << 28  # bytes of a file
AGREEING = 2  # of VALSE's three annotators: fewer chose the caption alone, and the foil is not valid
BOX = ("bbox_x", "bbox_y", "bbox_w", "bbox_h")


class Cut(NamedTuple):
    """An image, or a part of one."""

    image: str  # name of its file, or its key
    box: tuple[float, float, float, float] | None = None  # x, y, width and height of the part in pixels


@dataclass(frozen=True)
class Item:
    """Captions of one image, or two images each with its caption (Winoground)."""

    category: str
    images: tuple[Cut, ...]
    positives: tuple[str, ...]  # of two images the first is true of the first, the second of the second
    negatives: tuple[str, ...] = ()


@dataclass(frozen=True)
class Benchmark:
    """How a benchmark stores an item, and how it counts."""

    name: str
    make: Callable[[_Stored], Item | None]  # None: the benchmark does not count this entry
    ties_win: bool = False  # a true caption that ties with a false one counts as right
    least: int = 1  # items below which a category is not part of the mean over categories
    omitted: str = ""  # file with the categories that are not part of it, a line each

    def counts(self, category: str, items: int) -> bool:
        """Whether a category with this number of items is part of the mean over categories."""
        return items >= self.least and category not in _lines(self.omitted)


@cache
def _lines(file: str) -> frozenset[str]:
    return frozenset(Path(__file__).with_name(file).read_text(encoding="utf-8").splitlines()) if file else frozenset()


@dataclass(frozen=True)
class Items:
    """All items of one benchmark."""

    benchmark: Benchmark
    items: list[Item]


def read(path: str | Path | None) -> Items:
    """The items of a file, or of all .json and .jsonl files of a folder.

    Raises: ValueError when there is none, and for a file of no known benchmark, with the key that is missing.
    """
    if path is None:
        raise ValueError("--pairs is missing: name the json file of the true and false captions, or its folder.")
    benchmarks: dict[str, Benchmark] = {}
    items: list[Item] = []
    for file in _files(Path(path).expanduser()):
        for entry in _entries(file):
            benchmark = benchmarks.setdefault(entry.benchmark.name, entry.benchmark)
            item = benchmark.make(entry)
            items += [] if item is None else [item]
    if len(benchmarks) > 1:
        raise ValueError(f"{path} holds files of {' and '.join(benchmarks)}: give each benchmark its own --pairs.")
    if not items:
        raise ValueError(f"{path} holds no items.")
    return Items(next(iter(benchmarks.values())), items)


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        if not path.exists():
            raise ValueError(f"--pairs {path}: no such file or folder.")
        check_regular(path)
        return [path]
    files = sorted(file for file in path.iterdir() if file.suffix in (".json", ".jsonl"))
    if not files:
        raise ValueError(f"--pairs {path}: the folder holds no .json or .jsonl file.")
    return files


@dataclass(frozen=True)
class _Stored:
    """An entry of a file, with what messages say of it."""

    values: dict[str, Any]
    place: str  # "swap_obj.json, item 12"
    category: str  # of its list, or the name of its file
    benchmark: Benchmark

    def text(self, *keys: str) -> str:
        """The text under the first of the keys that is there. Raises: ValueError without one."""
        for key in keys:
            if isinstance(self.values.get(key), str):
                return self.caption(self.values[key], key)
        wrong = next((f"{key} that is no text" for key in keys if key in self.values), f"no {' or '.join(keys)}")
        raise self.wrong(wrong)

    def caption(self, value: Any, key: str) -> str:
        """A text as captions are read. Raises: ValueError for anything else, also for an empty one."""
        try:
            return clean([value])[0] if isinstance(value, str) else ""[0]
        except (BadSample, IndexError):
            raise self.wrong(f"{key} that is no text") from None

    def wrong(self, what: str) -> ValueError:
        """The error for an entry that has `what`."""
        keys = ", ".join(self.values) or "none"
        return ValueError(shown(f"{self.place} has {what}; its keys are {keys}. {self.benchmark.name} needs it."))


def _entries(file: Path) -> Iterator[_Stored]:
    """The entries of a file. Raises: ValueError for a file that is not json of objects, or of no known benchmark."""
    named = list(_named(file, _parsed(file)))
    benchmark = None if not named else _benchmark_of(file, named[0][2])
    for category, name, values in named:
        if not isinstance(values, dict) or benchmark is None:
            raise ValueError(f"{file.name}, item {name}: expected an object with captions, got {type(values).__name__}")
        yield _Stored(values, f"{file.name}, item {name}", category, benchmark)


def _parsed(file: Path) -> Any:
    try:
        text = decode_text(read_whole(file, file.name, LARGEST))
        if file.suffix == ".jsonl":
            return [json.loads(line) for line in text.splitlines() if line.strip()]
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"{file} is not json: expected a list of items, or an object with them.") from None
    except BadSample as error:
        raise ValueError(f"{file}: {error}") from None


def _named(file: Path, parsed: Any) -> Iterator[tuple[str, str, Any]]:
    """Category, name and values of every entry: of a list, of an object, or of an object of lists by category."""
    if isinstance(parsed, list):
        yield from ((file.stem, str(n), values) for n, values in enumerate(parsed))
    elif isinstance(parsed, dict):
        for name, values in parsed.items():
            if isinstance(values, list):
                yield from ((name, f"{n} of {name}", each) for n, each in enumerate(values))
            else:
                yield file.stem, name, values
    else:
        raise ValueError(f"{file} holds one {type(parsed).__name__}: expected a list of items, or an object with them.")


def _benchmark_of(file: Path, values: Any) -> Benchmark:
    """The benchmark that the keys of the first entry tell."""
    keys = list(values) if isinstance(values, dict) else []
    marked = next((benchmark for mark, benchmark in BENCHMARKS.items() if mark in keys), None)
    if marked is None:
        known = ", ".join(f"{mark} ({benchmark.name})" for mark, benchmark in BENCHMARKS.items())
        raise ValueError(
            shown(f"{file}: the first item has the keys {', '.join(keys) or 'of nothing'}, none of: {known}.")
        )
    return marked


def _sugarcrepe(entry: _Stored) -> Item:
    return Item(
        entry.category,
        (Cut(entry.text("filename", "key")),),
        (entry.text("caption"),),
        (entry.text("negative_caption"),),
    )


def _sugarcrepe_pp(entry: _Stored) -> Item:
    one = _sugarcrepe(entry)
    return Item(one.category, one.images, (*one.positives, entry.text("caption2")), one.negatives)


def _winoground(entry: _Stored) -> Item:
    """By the kind of the words that are swapped, as in table 2 of the paper."""
    images = tuple(Cut(entry.text(f"image_{n}")) for n in range(2))
    captions = tuple(entry.text(f"caption_{n}") for n in range(2))
    return Item(str(entry.values.get("collapsed_tag") or entry.category), images, captions)


def _aro(entry: _Stored) -> Item:
    """A relation or a pair of attributes in a box of an image."""
    attributes = entry.values.get("attributes")
    pair = "_".join(map(str, attributes)) if isinstance(attributes, list) else entry.category
    category = str(entry.values.get("relation_name") or pair)
    cut = Cut(entry.text("image_path", "image"), _box(entry))
    return Item(category, (cut,), (entry.text("true_caption"),), (entry.text("false_caption"),))


def _aro_order(entry: _Stored) -> Item:
    """A caption, and its words in wrong orders."""
    options = entry.values["caption_options"]
    if not isinstance(options, list) or len(options) < 2:
        raise entry.wrong("caption_options that are no list of at least two captions")
    first, *others = (entry.caption(option, "caption_options") for option in options)
    return Item(entry.category, (Cut(entry.text("image", "image_path")),), (first,), tuple(others))


def _box(entry: _Stored) -> tuple[float, float, float, float] | None:
    values = [entry.values.get(key) for key in BOX]
    if all(value is None for value in values):
        return None
    x, y, w, h = (float(v) if isinstance(v, int | float) and abs(v) < 1e6 else -1e9 for v in values)
    if min(x, y, w, h) < -1e6 or w <= 0 or h <= 0:
        raise entry.wrong(f"{', '.join(BOX)} that are no box")
    return x, y, w, h


def _valse(entry: _Stored) -> Item | None:
    """By linguistic phenomenon; without foils that annotators did not tell from the caption."""
    votes = entry.values.get("mturk")
    if isinstance(votes, dict) and isinstance(votes.get("caption"), int) and votes["caption"] < AGREEING:
        return None
    category = str(entry.values.get("linguistic_phenomena") or entry.category)
    return Item(category, (Cut(entry.text("image_file")),), (entry.text("caption"),), (entry.text("foil"),))


BENCHMARKS = {  # by the key that no earlier benchmark has
    "caption_0": Benchmark("Winoground", _winoground),
    "foil": Benchmark("VALSE", _valse),
    "attributes": Benchmark("ARO attribution", _aro, least=25),
    "true_caption": Benchmark("ARO relation", _aro, omitted="symmetric_relations.txt"),
    "caption_options": Benchmark("ARO order", _aro_order, ties_win=True),
    "caption2": Benchmark("SugarCrepe++", _sugarcrepe_pp),
    "negative_caption": Benchmark("SugarCrepe", _sugarcrepe),
}
