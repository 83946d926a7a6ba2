"""Scenes as sources, `scenes:SPLIT?OPTION=VALUE&...`: with captions, with one question each, or as chains of images."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any

import numpy as np

from kiloword.data.query import Readers, levels_of, read_options, within
from kiloword.data.scenes import questions
from kiloword.data.scenes.captions import chain, describe, parse, render
from kiloword.data.scenes.query import Bools, truth_table
from kiloword.data.scenes.raster import BACKGROUND_RGB, Pixels, draw
from kiloword.data.scenes.world import (
    GROUP,
    SPLITS,
    TASKS,
    VERSION,
    Scene,
    SceneRows,
    Thing,
    draw_scenes,
    label,
    to_scene,
)
from kiloword.errors import refuse
from kiloword.randomness import generator, key
from kiloword.types import Record

Levels = tuple[float, ...]  # weights of captions at levels 0 to 3
MEASURED = 96  # height and width of the images in which areas are measured
LARGEST = 1_000_000  # scenes of one data set
VQA = "vqa"  # the task of questions and answers


@dataclass(frozen=True)
class SceneSettings:
    """A data set of scenes."""

    split: str
    n: int
    objects: tuple[int, ...]  # numbers of things, equally often
    captions: int  # per image
    levels: Levels
    size: int  # height and width in pixels
    seed: int = 0
    hard: bool = False  # groups of eight scenes that share all but shapes
    task: str = ""  # meaning of labels; vqa: questions and answers in place of captions
    inner: bool = False  # things within the centre half; captions of things only

    def identity(self) -> str:
        """Text that fingerprints are made of: all but the size of images, as the size of photos does not count.

        Data of one `VERSION` keep their fingerprints, so the text is as the first version of this class wrote it.
        """
        return (
            f"Settings(selection=Selection(split={self.split!r}, n={self.n}, seed={self.seed}, objects={self.objects}, "
            f"near=0.0, heldout=False, hard={self.hard}), captions={self.captions}, levels={self.levels}, wrong=0.0, "
            f"size=0, task={self.task or None!r})" + "inner" * self.inner
        )


def open_scenes(src: str, size: int = 64) -> ScenesSource | SceneQuestions:
    """The data set of `scenes`, `scenes:test`, `scenes:test?levels=2,3&captions=3`; with `task=vqa` of questions.

    `inner=1` draws the scenes at half the size in the middle of the image, from 1/4 to 3/4 of both sides, and captions
    state neither places, relations, counts nor backgrounds: they stay true of either half of the image around its
    centre, wherever it is pasted. From 48 pixels.

    Args: size: height and width of images in pixels.
    Errors: ValueError names what is allowed.
    """
    head, _, query = src.partition("?")
    name, colon, split = head.partition(":")
    if name != "scenes" or (colon and split not in SPLITS):
        raise ValueError(f"'{src}' is no data set of scenes: expected scenes, or scenes:SPLIT with {', '.join(SPLITS)}")
    options = read_options("scenes", query, _READERS)
    train, hard, task = split in ("", "train"), "hard" in options, options.get("task", "")
    known = TASKS[task].objects if task in TASKS else (1, 2, 3)
    objects = options.get("objects", known)
    defaults = {
        "n": _train_rows(objects) if train else 1000,
        "objects": objects,
        "captions": 5 if train else 1,
        "levels": (0, 1, 2, 3) if train and not hard else (0, 0, 0, 1),
    }
    settings = SceneSettings(split or "train", size=size, **{**defaults, **options})
    unread = {"captions", "inner", "levels"} & options.keys() if task == VQA else set()
    refuse(
        {
            f"task=vqa has questions and answers in place of captions; omit {', '.join(sorted(unread))}=": unread,
            f"task={task} has images of one object; omit objects=": not set(objects) <= set(known),
            "inner=1 states no places, and hard=shape needs captions with places; choose one": hard and settings.inner,
            f"hard=shape makes groups of {GROUP}; n={settings.n} is not a multiple of that": hard
            and settings.n % GROUP,
        }
    )
    return (SceneQuestions if task == VQA else ScenesSource)(settings, src)


def parse_scenes(src: str, size: int = 64) -> ScenesSource:
    """As `open_scenes`, of captions."""
    source = open_scenes(src, size)
    assert isinstance(source, ScenesSource)
    return source


def _train_rows(objects: tuple[int, ...]) -> int:
    """Default number of scenes of a train split; of single things there are only some 16,000."""
    return 10_000 if objects == (1,) else 20_000


def _levels(value: str) -> Levels:
    weights = levels_of(value)
    if max(weights) > 3:
        raise ValueError(value)
    return tuple(weights.get(level, 0.0) for level in range(4))


_READERS: Readers = {
    "captions": (within(range(1, 101)), "captions an image, 1 to 100"),
    "hard": ({"shape": True}.__getitem__, "shape"),
    "inner": ({"0": False, "1": True}.__getitem__, "0 or 1"),
    "levels": (_levels, "levels 0 to 3 with or without weights, as 2,3 or 1:1,2:2,3:4"),
    "n": (within(range(1, LARGEST + 1)), f"a number of images, 1 to {LARGEST}"),
    "objects": (
        lambda value: tuple(sorted({within(range(1, 4))(v) for v in value.split(",")})),
        "numbers of objects from 1 to 3, as 1 or 2,3",
    ),
    "seed": (within(range(2**31)), "a whole number from 0 up"),
    "task": ({task: task for task in (*TASKS, VQA)}.__getitem__, f"one of {', '.join((*TASKS, VQA))}"),
}


class _Scenes:
    """The scenes of a selection; pickles as its settings. Implements `kiloword.types.Source`.

    Images must be neither cropped nor mirrored (`natural` is False): captions and questions speak of places.
    """

    natural = False
    version = VERSION

    def __init__(self, settings: SceneSettings, name: str) -> None:
        self.settings, self.name = settings, name
        self.fingerprint = f"{self.version}-{key(settings.identity()):016x}"
        task = TASKS.get(settings.task)
        self.classnames = list(task.classnames) if task else None
        self.templates = list(task.templates) if task else []  # `{c}` stands for the class name

    def __reduce__(self) -> Any:
        return type(self), (self.settings, self.name)

    def __len__(self) -> int:
        return self.settings.n

    def key(self, row: int) -> str:
        """The name of a row, without drawing its image."""
        split = self.settings.split
        return f"{split}-g{row // GROUP:05d}-{row % GROUP}" if self.settings.hard else f"{split}-{row:06d}"

    @cached_property
    def rows(self) -> SceneRows:
        """All scenes as numbers [N, 16]."""
        s = self.settings
        return draw_scenes(s.split, s.n, s.seed, s.objects, s.hard)

    def scene(self, row: int) -> Scene:
        """The scene of a row."""
        return to_scene(self.rows[row])

    def captions(self, row: int) -> list[str]:
        """Captions or the answer of a row, without drawing its image."""
        return self.content(self.scene(row), row)[0]

    def record(self, row: int) -> Record:
        """Image, captions or answer, label, and what is known of a row."""
        scene = self.scene(row)
        found = label(self.settings.task, scene) if self.classnames else None
        captions, info = self.content(scene, row)
        return Record(self.key(row), self.draw(scene), captions, found, info)

    def content(self, scene: Scene, row: int) -> tuple[list[str], dict[str, Any]]:
        """Captions or answer of a row, and its `Record.info`."""
        raise NotImplementedError

    def draw(self, scene: Scene) -> Pixels:
        """The image of a scene, uint8 [size, size, 3]."""
        return draw(scene, self.settings.size, self.settings.inner)

    def _rng(self, row: int, purpose: str) -> np.random.Generator:
        return generator(self.version, self.settings.seed, self.settings.split, row, purpose)


class ScenesSource(_Scenes):
    """Scenes with captions, labels, and the ground truth of all of them."""

    def relevance(self, captions: Sequence[str], rows: Sequence[int]) -> Bools:
        """Which captions are true of which rows' images, bool [T, I]; ValueError outside the language."""
        queries = {caption: query for caption in captions if (query := parse(caption)) is not None}
        if unknown := [caption for caption in captions if caption not in queries]:
            raise ValueError(f"not a caption of the scenes language: '{unknown[0][:100]}'")
        return truth_table([queries[caption] for caption in captions], self.rows[np.asarray(rows, np.int64)])

    def hierarchies(self, row: int) -> list[list[str]]:
        """One chain of captions of a row, from general (level 0) to specific (3), each entailed by the next."""
        choices, *styles = self._rng(row, "hierarchy").integers(2**63, size=5).tolist()
        return [list(map(render, chain(self.scene(row), choices, self.settings.inner), styles))]

    def image_levels(self) -> SceneParts:
        """The scenes' images from their largest thing alone to the whole."""
        return SceneParts(self)

    def content(self, scene: Scene, row: int) -> tuple[list[str], dict[str, Any]]:
        """Captions, of which the first do not depend on how many there are, and their levels."""
        s = self.settings
        numbers = self._rng(row, "captions").integers(2**63, size=(s.captions, 3)).tolist()
        edges = [edge / sum(s.levels) for edge in accumulate(s.levels)]
        captions, levels = list[str](), list[int]()
        for first, choices, style in numbers:
            levels.append(min(bisect_right(edges, first / 2.0**63), 3))
            for again in range(8):  # a simple scene at a general level has few captions: then some repeat
                caption = render(describe(scene, levels[-1], choices, s.inner), style)
                if caption not in captions:
                    break
                choices, style = key(choices, again), key(style, again)
            captions.append(caption)
        info = {"levels": levels, "scene": scene.describe()}
        return captions, info | ({"group": row // GROUP} if s.hard else {})


class SceneQuestions(_Scenes):
    """Scenes with a question each, whose answer is the caption; `answers` is the closed list."""

    version = questions.VERSION
    answers = questions.ANSWERS

    def asked(self, row: int) -> questions.Question:
        """Question and answer of a row."""
        return questions.ask(self.scene(row), int(self._rng(row, "question").integers(2**63)))

    def info(self, row: int) -> dict[str, Any]:
        """`Record.info` of a row, without drawing its image."""
        return self.content(self.scene(row), row)[1]

    def content(self, scene: Scene, row: int) -> tuple[list[str], dict[str, Any]]:
        """The answer; the question and its type."""
        asked = self.asked(row)
        group = {"yes/no": "yes/no", "count": "number"}.get(asked.kind, "other")  # as VQA groups answers
        types = {"question_type": asked.kind, "answer_type": group, "scene": scene.describe()}
        return [asked.answer], {"question": asked.words, "answers": [asked.answer], **types}

    def majority(self) -> Mapping[str | None, str]:
        """The most frequent answer to each kind of question of the train split, over all kinds under None."""
        return _majority(replace(self.settings, split="train", n=_train_rows(self.settings.objects)))


@lru_cache(maxsize=8)
def _majority(settings: SceneSettings) -> Mapping[str | None, str]:
    train = SceneQuestions(settings, "scenes")
    counts: dict[str | None, Counter[str]] = {None: Counter()}
    for asked in map(train.asked, range(len(train))):
        for kind in (None, asked.kind):
            counts.setdefault(kind, Counter())[asked.answer] += 1
    return {kind: max(sorted(answers), key=answers.__getitem__) for kind, answers in counts.items()}


class SceneParts:
    """A `Source` of the scenes with the most things, as chains of images: the largest thing, the two largest, all.

    `Record.info` has `level`, `levels`, `group` and `parent` (the key of the more general image) as in HierarImgs.
    Largest by drawn pixels; the background is that of the scene at every level.
    """

    natural = False

    def __init__(self, source: ScenesSource) -> None:
        self.source = source
        self.name = source.name
        self.fingerprint = f"{source.fingerprint}-parts"
        things = (source.rows[:, 1::5] >= 0).sum(1)
        self.levels = int(things.max())
        self.scenes = np.flatnonzero(things == self.levels)

    def __len__(self) -> int:
        return self.levels * len(self.scenes)

    def record(self, row: int) -> Record:
        """The image and its place in the chain, without captions."""
        which, level = divmod(row, self.levels)
        whole = int(self.scenes[which])
        group, scene = self.source.key(whole), self.source.scene(whole)
        largest = sorted(scene.things, key=lambda thing: -area(thing))[: level + 1]
        part = replace(scene, things=tuple(t for t in scene.things if t in largest))
        parent = f"{group}-{level - 1}" if level else None
        info = {"level": level, "levels": self.levels, "group": group, "parent": parent}
        return Record(f"{group}-{level}", self.source.draw(part), [], None, info)


@lru_cache(maxsize=3456)  # all things
def area(thing: Thing) -> int:
    """Pixels that a thing covers when it is drawn, of MEASURED^2."""
    alone = draw(Scene(0, (thing,)), MEASURED)
    return int((alone != np.array(BACKGROUND_RGB[0], np.uint8)).any(-1).sum())
