"""`scenes:SPLIT?OPTION=VALUE&...`: the options of scenes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from kiloword.data.query import Readers, read_options
from kiloword.data.scenes.world import GROUP, SPLITS, TASKS

Levels = tuple[float, float, float, float]
N = TypeVar("N", int, float)

TRAIN_LEVELS: Levels = (0, 1, 2, 3)  # weights of captions at levels 0 to 3
FULL_LEVELS: Levels = (0, 0, 0, 1)  # of val and test: full descriptions
LARGEST = 1_000_000  # scenes of one data set
VQA = "vqa"  # the task of questions and answers


@dataclass(frozen=True)
class SceneSettings:
    """A data set of scenes."""

    split: str = "train"
    n: int = 20000
    seed: int = 0
    objects: tuple[int, ...] = (1, 2, 3)  # numbers of things, equally often
    hard: bool = False  # groups of eight scenes that share all but shapes
    captions: int = 5  # per image
    levels: Levels = TRAIN_LEVELS
    size: int = 64  # height and width in pixels
    task: str | None = None  # meaning of labels; vqa: questions and answers in place of captions
    inner: bool = False  # things within the centre half; captions of things only

    def identity(self) -> str:
        """Text that fingerprints are made of: all but the size of images, as the size of photos does not count.

        Data of one `VERSION` keep their fingerprints, so the text is as the first version of this class wrote it.
        """
        return (
            f"Settings(selection=Selection(split={self.split!r}, n={self.n}, seed={self.seed}, objects={self.objects}, "
            f"near=0.0, heldout=False, hard={self.hard}), captions={self.captions}, levels={self.levels}, wrong=0.0, "
            f"size=0, task={self.task!r})" + "inner" * self.inner
        )


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
    options = read_options("scenes", query, _READERS)
    train, task = split in ("", "train"), TASKS.get(options.get("task", ""))
    objects = options.get("objects", task.objects if task else (1, 2, 3))
    defaults = {
        "n": default_rows(objects) if train else 1000,
        "captions": 5 if train else 1,
        "levels": TRAIN_LEVELS if train and "hard" not in options else FULL_LEVELS,
        "size": size,
        "objects": objects,
    }
    settings = SceneSettings(split or "train", **{**defaults, **options})
    unread = [name for name in ("captions", "inner", "levels") if name in options]
    if settings.task == VQA and unread:
        raise ValueError(f"scenes: task=vqa has questions and answers in place of captions; omit {unread[0]}=")
    if task and not set(objects) <= set(task.objects):
        raise ValueError(f"scenes: task={settings.task} has images of one object; omit objects=")
    if settings.hard and settings.inner:
        raise ValueError("scenes: inner=1 states no places, by which captions of hard=shape differ; choose one of them")
    if settings.hard and settings.n % GROUP:
        raise ValueError(f"scenes: hard=shape makes groups of {GROUP}; n={settings.n} is not a multiple of that")
    return settings


def default_rows(objects: tuple[int, ...]) -> int:
    """Default number of scenes of a train split; of single things there are only some 16,000."""
    return 10_000 if objects == (1,) else 20_000


def _number(kind: type[N], least: float, most: float) -> Callable[[str], N]:
    def read(value: str) -> N:
        number = kind(value)
        if not least <= number <= most:
            raise ValueError(value)
        return number

    return read


def _levels(value: str) -> Levels:
    weights: list[float] = [0.0] * 4
    for item in value.split(","):
        level, colon, weight = item.partition(":")
        weights[_number(int, 0, 3)(level)] = _number(float, 1e-9, 1e6)(weight) if colon else 1.0
    return (weights[0], weights[1], weights[2], weights[3])


def _one_of(**values: Any) -> tuple[Callable[[str], Any], str]:
    return values.__getitem__, "one of " + ", ".join(values)


_READERS: Readers = {
    "captions": (_number(int, 1, 100), "captions an image, 1 to 100"),
    "hard": _one_of(shape=True),
    "inner": ({"0": False, "1": True}.__getitem__, "0 or 1"),
    "levels": (_levels, "levels 0 to 3 with or without weights, as 2,3 or 1:1,2:2,3:4"),
    "n": (_number(int, 1, LARGEST), f"a number of images, 1 to {LARGEST}"),
    "objects": (
        lambda value: tuple(sorted({_number(int, 1, 3)(v) for v in value.split(",")})),
        "numbers of objects from 1 to 3, as 1 or 2,3",
    ),
    "seed": (_number(int, 0, 2**31 - 1), "a whole number from 0 up"),
    "size": (_number(int, 24, 2048), "pixels a side, 24 to 2048"),
    "task": _one_of(**{task: task for task in (*TASKS, VQA)}),
}
