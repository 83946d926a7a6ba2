"""`scenes:SPLIT?OPTION=VALUE&...`: the options of scenes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from kiloword.data.scenes.raster import Pixels, draw, draw_inner
from kiloword.data.scenes.sample import GROUP, Selection
from kiloword.data.scenes.world import SPLITS, TASKS, Scene
from kiloword.data.sources.query import Readers, read_options

Levels = tuple[float, float, float, float]
N = TypeVar("N", int, float)

TRAIN_LEVELS: Levels = (0, 1, 2, 3)  # weights of captions at levels 0 to 3
FULL_LEVELS: Levels = (0, 0, 0, 1)  # of val and test: full descriptions
LARGEST = 1_000_000  # scenes of one data set
VQA = "vqa"  # the task of questions and answers


@dataclass(frozen=True)
class SceneSettings:
    """A data set of scenes."""

    selection: Selection = field(default_factory=Selection)
    captions: int = 5  # per image
    levels: Levels = TRAIN_LEVELS
    wrong: float = 0.0  # share of captions that are false of their image
    size: int = 64  # height and width in pixels
    task: str | None = None  # meaning of labels; vqa: questions and answers in place of captions
    inner: bool = field(default=False, repr=False)  # things within the centre half; captions of things only

    def identity(self) -> str:
        """Text that fingerprints are made of: all but the size of images, as the size of photos does not count.

        Data of one `VERSION` keep their fingerprints, so the text begins with the former name of this class.
        """
        return repr(replace(self, size=0)).replace(type(self).__name__, "Settings", 1) + "inner" * self.inner

    def draw(self, scene: Scene) -> Pixels:
        """The image of a scene, uint8 [size, size, 3]."""
        return (draw_inner if self.inner else draw)(scene, self.size)


def parse_settings(src: str, size: int = 64) -> SceneSettings:
    """Settings from `scenes`, `scenes:test`, `scenes:test?levels=2,3&captions=3`.

    `inner=1` draws the scenes at half the size in the middle of the image, from 1/4 to 3/4 of both sides, and captions
    state neither places, relations, counts nor backgrounds: they stay true of either half of the image around its
    centre, wherever it is pasted. From 48 pixels.

    Args: size: height and width in pixels if `src` does not say `size=`. Errors: ValueError names what is allowed.
    """
    head, _, query = src.partition("?")
    name, colon, split = head.partition(":")
    if name != "scenes" or (colon and split not in SPLITS):
        raise ValueError(f"'{src}' is no data set of scenes: expected scenes, or scenes:SPLIT with {', '.join(SPLITS)}")
    return _settings(split or "train", {"size": size, **read_options("scenes", query, _READERS)})


def _settings(split: str, options: dict[str, Any]) -> SceneSettings:
    train, task = split == "train", TASKS.get(options.get("task", ""))
    objects = options.get("objects", task.objects if task else (1, 2, 3))
    values = {
        "n": default_rows(objects) if train else 1000,
        "captions": 5 if train else 1,
        "levels": TRAIN_LEVELS if train and "hard" not in options else FULL_LEVELS,
        **options,
        "objects": objects,
    }
    of_selection = {name.name for name in fields(Selection)} & values.keys()
    selection = Selection(split, **{name: values.pop(name) for name in of_selection})
    _check(selection, options)
    return SceneSettings(selection, **values)


def default_rows(objects: tuple[int, ...]) -> int:
    """Default number of scenes of a train split; of single things there are only some 16,000."""
    return 10_000 if objects == (1,) else 20_000


def _check(s: Selection, options: dict[str, Any]) -> None:
    task = options.get("task")
    unread = [name for name in ("captions", "inner", "levels", "wrong") if name in options]
    if task == VQA and unread:
        raise ValueError(f"scenes: task=vqa has questions and answers in place of captions; omit {unread[0]}=")
    if task in TASKS and not set(s.objects) <= set(TASKS[task].objects):
        raise ValueError(f"scenes: task={task} has images of one object; omit objects=")
    if s.hard and (s.near > 0 or s.heldout):
        raise ValueError("scenes: hard=shape goes with neither near= nor heldout=")
    if s.hard and options.get("inner"):
        raise ValueError("scenes: inner=1 states no places, by which captions of hard=shape differ; choose one of them")
    if s.hard and s.n % GROUP:
        raise ValueError(f"scenes: hard=shape makes groups of {GROUP}; n={s.n} is not a multiple of that")
    if options.get("wrong", 0.0) > 0 and s.n < 2:
        raise ValueError("scenes: wrong= takes captions of other images; n=1 has none")


def _number(kind: type[N], least: float, most: float) -> Callable[[str], N]:
    def read(value: str) -> N:
        number = kind(value)
        if not least <= number <= most:
            raise ValueError(value)
        return number

    return read


def _objects(value: str) -> tuple[int, ...]:
    return tuple(sorted({_number(int, 1, 3)(v) for v in value.split(",")}))


def _levels(value: str) -> Levels:
    weights = [0.0, 0.0, 0.0, 0.0]
    for item in value.split(","):
        level, colon, weight = item.partition(":")
        number = float(weight) if colon else 1.0
        if not 0 < number < 1e6:
            raise ValueError(value)
        weights[_number(int, 0, 3)(level)] = number
    return (weights[0], weights[1], weights[2], weights[3])


_FLAG = ({"0": False, "1": True}.__getitem__, "0 or 1")
_SHARE = (_number(float, 0, 1), "a share from 0 to 1")
_TASKS = (*TASKS, VQA)
_READERS: Readers = {
    "captions": (_number(int, 1, 100), "captions an image, 1 to 100"),
    "hard": ({"shape": True}.__getitem__, "shape"),
    "heldout": _FLAG,
    "inner": _FLAG,
    "levels": (_levels, "levels 0 to 3 with or without weights, as 2,3 or 1:1,2:2,3:4"),
    "n": (_number(int, 1, LARGEST), f"a number of images, 1 to {LARGEST}"),
    "near": _SHARE,
    "objects": (_objects, "numbers of objects from 1 to 3, as 1 or 2,3"),
    "seed": (_number(int, 0, 2**31 - 1), "a whole number from 0 up"),
    "size": (_number(int, 24, 2048), "pixels a side, 24 to 2048"),
    "task": (dict(zip(_TASKS, _TASKS, strict=True)).__getitem__, "one of " + ", ".join(_TASKS)),
    "wrong": _SHARE,
}
