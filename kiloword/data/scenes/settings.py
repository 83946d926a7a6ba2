"""`scenes:SPLIT?OPTION=VALUE&...`: what a user may ask of scenes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from kiloword.data.scenes.sample import GROUP, Selection
from kiloword.data.scenes.world import SPLITS, TASKS

Levels = tuple[float, float, float, float]

TRAIN_LEVELS: Levels = (0, 1, 2, 3)  # weights of captions at levels 0 to 3
FULL_LEVELS: Levels = (0, 0, 0, 1)  # of val and test: full descriptions
LARGEST = 1_000_000  # scenes of one data set
VQA = "vqa"  # the task of questions and answers


@dataclass(frozen=True)
class SceneSettings:
    """A data set of scenes."""

    selection: Selection = field(default_factory=Selection)
    captions: int = 5  # an image
    levels: Levels = TRAIN_LEVELS
    wrong: float = 0.0  # share of captions that are false of their image
    size: int = 64  # pixels a side
    task: str | None = None  # what labels tell; vqa: questions and answers in place of captions
    inner: bool = field(default=False, repr=False)  # things within the centre half; captions of them alone

    def identity(self) -> str:
        """Text that fingerprints are made of: all but the size of the drawing, as a photo's size does not count.

        Data of one `VERSION` keep their fingerprints, so the text begins with the former name of this class.
        """
        return repr(replace(self, size=0)).replace(type(self).__name__, "Settings", 1) + "inner" * self.inner


def parse_settings(src: str, size: int = 64) -> SceneSettings:
    """Settings from `scenes`, `scenes:test`, `scenes:test?levels=2,3&captions=3`; ValueError says what is allowed.

    `inner=1` draws the same scenes at half the size in the middle of the image, from 1/4 to 3/4 of both sides, and
    says neither places, relations, counts nor backgrounds: whatever half is cut out of the centre, along width or
    height, and wherever it is pasted, its captions stay true. From 48 pixels on.

    Args: size, pixels a side where `src` says none.
    """
    head, _, query = src.partition("?")
    name, colon, split = head.partition(":")
    if name != "scenes" or (colon and split not in SPLITS):
        raise ValueError(f"'{src}' is no data set of scenes: expected scenes, or scenes:SPLIT with {', '.join(SPLITS)}")
    return _settings(split or "train", {"size": size, **_options(query)})


def _options(query: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for item in query.split("&") if query else []:
        name, _, value = item.partition("=")
        if name not in _READERS:
            raise ValueError(f"scenes has no option '{name}'; options: {', '.join(sorted(_READERS))}")
        if name in options:
            raise ValueError(f"scenes: option '{name}' is given twice")
        read, allowed = _READERS[name]
        try:
            options[name] = read(value)
        except ValueError as e:
            raise ValueError(f"scenes: {name}={value}: expected {allowed}") from e
    return options


def _settings(split: str, given: dict[str, Any]) -> SceneSettings:
    train = split == "train"
    task = TASKS.get(given.get("task", ""))
    hard = "hard" in given
    objects = given.get("objects", task.objects if task else (1, 2, 3))
    selection = Selection(
        split=split,
        n=given.get("n", default_rows(objects) if train else 1000),
        seed=given.get("seed", 0),
        objects=objects,
        near=given.get("near", 0.0),
        heldout=given.get("heldout", False),
        hard=hard,
    )
    _check(selection, given)
    return SceneSettings(
        selection,
        captions=given.get("captions", 5 if train else 1),
        levels=given.get("levels", TRAIN_LEVELS if train and not hard else FULL_LEVELS),
        wrong=given.get("wrong", 0.0),
        size=given["size"],
        task=given.get("task"),
        inner=given.get("inner", False),
    )


def default_rows(objects: tuple[int, ...]) -> int:
    """Scenes of a train split whose number is not said: there are some 16,000 single things in train."""
    return 10_000 if objects == (1,) else 20_000


def _check(s: Selection, given: dict[str, Any]) -> None:
    task = given.get("task")
    unread = [name for name in ("captions", "inner", "levels", "wrong") if name in given]
    if task == VQA and unread:
        raise ValueError(f"scenes: task=vqa has questions and answers in place of captions; leave out {unread[0]}=")
    if task in TASKS and not set(s.objects) <= set(TASKS[task].objects):
        raise ValueError(f"scenes: task={task} has images of one object; leave out objects=")
    if s.hard and (s.near > 0 or s.heldout):
        raise ValueError("scenes: hard=shape goes with neither near= nor heldout=")
    if s.hard and given.get("inner"):
        raise ValueError("scenes: inner=1 says no places, by which captions of hard=shape differ; choose one of them")
    if s.hard and s.n % GROUP:
        raise ValueError(f"scenes: hard=shape makes groups of {GROUP}; n={s.n} is not a multiple of that")
    if given.get("wrong", 0.0) > 0 and s.n < 2:
        raise ValueError("scenes: wrong= takes captions of other images; n=1 has none")


def _whole(least: int, most: int) -> Callable[[str], int]:
    def read(value: str) -> int:
        number = int(value)
        if not least <= number <= most:
            raise ValueError(value)
        return number

    return read


def _share(value: str) -> float:
    share = float(value)
    if not 0 <= share <= 1:
        raise ValueError(value)
    return share


def _one_of(*names: str) -> Callable[[str], str]:
    def read(value: str) -> str:
        if value not in names:
            raise ValueError(value)
        return value

    return read


def _flag(value: str) -> bool:
    return _one_of("0", "1")(value) == "1"


def _objects(value: str) -> tuple[int, ...]:
    return tuple(sorted({_whole(1, 3)(v) for v in value.split(",")}))


def _levels(value: str) -> Levels:
    weights = [0.0, 0.0, 0.0, 0.0]
    for item in value.split(","):
        level, colon, weight = item.partition(":")
        number = float(weight) if colon else 1.0
        if not 0 < number < 1e6:
            raise ValueError(value)
        weights[_whole(0, 3)(level)] = number
    return (weights[0], weights[1], weights[2], weights[3])


_SHARE = "a share from 0 to 1"
_READERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "captions": (_whole(1, 100), "captions an image, 1 to 100"),
    "hard": (_one_of("shape"), "shape"),
    "heldout": (_flag, "0 or 1"),
    "inner": (_flag, "0 or 1"),
    "levels": (_levels, "levels 0 to 3 with or without weights, as 2,3 or 1:1,2:2,3:4"),
    "n": (_whole(1, LARGEST), f"a number of images, 1 to {LARGEST}"),
    "near": (_share, _SHARE),
    "objects": (_objects, "numbers of objects from 1 to 3, as 1 or 2,3"),
    "seed": (_whole(0, 2**31 - 1), "a whole number from 0 up"),
    "size": (_whole(24, 2048), "pixels a side, 24 to 2048"),
    "task": (_one_of(*TASKS, VQA), "one of " + ", ".join((*TASKS, VQA))),
    "wrong": (_share, _SHARE),
}
