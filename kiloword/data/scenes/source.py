"""Scenes as sources: with captions, or with a question and its one right answer per image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Self

import numpy as np
import numpy.typing as npt

from kiloword.data.scenes import questions
from kiloword.data.scenes.captions import describe, describe_things
from kiloword.data.scenes.grammar import parse, render
from kiloword.data.scenes.hierarchy import SceneParts, chain
from kiloword.data.scenes.query import Bools, Query, matches, truth_table
from kiloword.data.scenes.sample import GROUP, Drawn, draw_scenes
from kiloword.data.scenes.settings import VQA, SceneSettings, default_rows, parse_settings
from kiloword.data.scenes.world import TASKS, VERSION, Scene, SceneRows, label, to_rows, to_scene
from kiloword.data.sources.optional import majority
from kiloword.randomness import generator, key
from kiloword.types import Record


def open_scenes(src: str, size: int | None = None) -> ScenesSource | SceneQuestions:
    """The data set that a SRC string names, of captions or, with `task=vqa`, of questions.

    Args: size: height and width of images in pixels if SRC does not say `size=`; default 64.
    Errors: ValueError names the options.
    """
    settings = parse_settings(src, size or 64)
    return (SceneQuestions if settings.task == VQA else ScenesSource)(settings, src)


def parse_scenes(src: str, size: int | None = None) -> ScenesSource:
    """As `open_scenes`, only of captions."""
    return ScenesSource(parse_settings(src, size or 64), src)


def relevance(captions: Sequence[Query | str], scenes: Sequence[Scene] | SceneRows) -> Bools:
    """Which captions are true of which scenes.

    Args: T queries or captions; I scenes, or rows of numbers [I, 16].
    Returns: bool [T, I].  Raises ValueError for a caption outside the language.
    """
    queries = [_query(c) if isinstance(c, str) else c for c in captions]
    return truth_table(queries, scenes if isinstance(scenes, np.ndarray) else to_rows(scenes))


def _query(caption: str) -> Query:
    query = parse(caption)
    if query is None:
        raise ValueError(f"not a caption of the scenes language: '{caption[:100]}'")
    return query


class _Scenes:
    """The scenes of a selection; pickles as its settings. Implements `kiloword.types.Source`.

    Images must be neither cropped nor mirrored (`natural` is False): captions and questions speak of places.
    """

    natural = False
    version = VERSION

    def __init__(self, settings: SceneSettings | None = None, name: str = "scenes") -> None:
        self.settings, self.name = settings or SceneSettings(), name
        self.fingerprint = f"{self.version}-{key(self.settings.identity()):016x}"

    def __reduce__(self) -> tuple[type[Self], tuple[SceneSettings, str]]:
        return type(self), (self.settings, self.name)

    def __len__(self) -> int:
        return self.settings.selection.n

    def resolution(self, size: int) -> Self:
        """The same data drawn `size` pixels high and wide."""
        return type(self)(replace(self.settings, size=size), self.name)

    def key(self, row: int) -> str:
        """The name of a row, without drawing its image."""
        s = self.settings.selection
        return f"{s.split}-g{row // GROUP:05d}-{row % GROUP}" if s.hard else f"{s.split}-{row:06d}"

    @cached_property
    def _drawn(self) -> Drawn:
        return draw_scenes(self.settings.selection)

    def _scene(self, row: int) -> Scene:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)} scenes")
        return to_scene(self._drawn.rows[row])

    def _rng(self, row: int, purpose: str) -> np.random.Generator:
        s = self.settings.selection
        return generator(self.version, s.seed, s.split, row, purpose)


class ScenesSource(_Scenes):
    """Scenes with captions, labels, and the ground truth of all of them."""

    def __init__(self, settings: SceneSettings | None = None, name: str = "scenes") -> None:
        super().__init__(settings, name)
        if self.settings.task == VQA:
            raise ValueError(f"{name} has questions in place of captions: open it with kiloword.data.sources.open")

    @property
    def rows(self) -> SceneRows:
        """All scenes as numbers [N, 16]."""
        return self._drawn.rows

    @property
    def classnames(self) -> list[str] | None:
        """Names of the classes of the task; None without a task."""
        return list(TASKS[self.settings.task].classnames) if self.settings.task else None

    @property
    def templates(self) -> list[str]:
        """Prompts of the task; `{c}` stands for the class name."""
        return list(TASKS[self.settings.task].templates) if self.settings.task else []

    def scene(self, row: int) -> Scene:
        """The scene of a row."""
        return self._scene(row)

    def relevance(self, captions: Sequence[str], rows: Sequence[int]) -> Bools:
        """Which captions are true of which rows' images, bool [T, I]; ValueError outside the language."""
        return relevance(captions, self.rows[np.asarray(rows, np.int64)])

    def hierarchies(self, row: int) -> list[list[str]]:
        """One chain of captions of a row, from general (level 0) to specific (3), each entailed by the next."""
        choices, *styles = self._rng(row, "hierarchy").integers(2**63, size=5).tolist()
        return [list(map(render, chain(self.scene(row), choices, self._describe), styles))]

    def image_levels(self) -> SceneParts:
        """The scenes' images from their largest thing alone to the whole."""
        return SceneParts(self)

    def captions(self, row: int) -> list[str]:
        """Captions of a row, without drawing its image."""
        return self._captions(row, self.scene(row))[0]

    def record(self, row: int) -> Record:
        """Image, captions, label and scene of a row."""
        scene, task = self.scene(row), self.settings.task
        captions, levels, wrong = self._captions(row, scene)
        info = {"levels": levels, "wrong": wrong, "scene": scene.describe()}
        twin = int(self._drawn.twin[row])
        if twin >= 0:
            info["near"] = self.key(twin)
        if self.settings.selection.hard:
            info["group"] = row // GROUP
        return Record(self.key(row), self.settings.draw(scene), captions, label(task, scene) if task else None, info)

    def _captions(self, row: int, scene: Scene) -> tuple[list[str], list[int], list[bool]]:
        """Captions, their levels, and which are false; the first ones do not depend on how many there are."""
        s = self.settings
        numbers = self._rng(row, "captions").integers(2**63, size=(s.captions, 3)).tolist()
        levels = _levels([n[0] for n in numbers], s.levels)
        wrong = [False] * s.captions
        if s.wrong > 0:
            wrong = (self._rng(row, "wrong").random(s.captions) < s.wrong).tolist()
            levels = [max(v, int(w)) for v, w in zip(levels, wrong, strict=True)]  # level 0 is never false
        captions: list[str] = []
        for (_, choices, style), level, false in zip(numbers, levels, wrong, strict=True):
            for again in range(8):  # a simple scene at a general level has few captions: then some repeat
                query = self._false(row, scene, level, choices) if false else self._describe(scene, level, choices)
                caption = render(query, style)
                if caption not in captions:
                    break
                choices, style = key(choices, again), key(style, again)
            captions.append(caption)
        return captions, levels, wrong

    def _describe(self, scene: Scene, level: int, choices: int) -> Query:
        return (describe_things if self.settings.inner else describe)(scene, level, choices)

    def _false(self, row: int, scene: Scene, level: int, choices: int) -> Query:
        """A query that is true of another row and false of this one."""
        for attempt in range(1000):
            number = key(choices, "wrong", attempt)
            other = self.scene((row + 1 + number % (len(self) - 1)) % len(self))
            query = self._describe(other, level, number)
            if not matches(query, scene):
                return query
        raise ValueError(f"scenes: nothing false can be said of row {row}; ask for a larger n or wrong=0")


class SceneQuestions(_Scenes):
    """Scenes with a question each, whose answer is the caption; `answers` is the closed list."""

    version = questions.VERSION
    answers = questions.ANSWERS

    def asked(self, row: int) -> questions.Question:
        """Question and answer of a row."""
        return questions.ask(self._scene(row), int(self._rng(row, "question").integers(2**63)))

    def captions(self, row: int) -> list[str]:
        """The answer, without drawing the image."""
        return [self.asked(row).answer]

    def question(self, row: int) -> str:
        """The question, without drawing the image."""
        return self.asked(row).words

    def record(self, row: int) -> Record:
        """Image, question, answer and scene of a row."""
        asked, scene = self.asked(row), self._scene(row)
        info = {
            "question": asked.words,
            "answers": [asked.answer],
            "question_type": asked.kind,
            "answer_type": asked.answer_type,
            "scene": scene.describe(),
        }
        return Record(self.key(row), self.settings.draw(scene), [asked.answer], info=info)

    def majority(self) -> Mapping[str | None, str]:
        """The most frequent answer to each kind of question of the train split, over all kinds under None."""
        selection = replace(self.settings.selection, split="train", n=default_rows(self.settings.selection.objects))
        return _majority(replace(self.settings, selection=selection))


@lru_cache(maxsize=8)
def _majority(settings: SceneSettings) -> Mapping[str | None, str]:
    train = SceneQuestions(settings)
    asked = (train.asked(row) for row in range(len(train)))
    return majority((question.kind, question.answer) for question in asked)


def _levels(numbers: Sequence[int], weights: Sequence[float]) -> list[int]:
    """A level for every 63-bit number, with frequencies given by the weights."""
    edges: npt.NDArray[np.float64] = np.cumsum(weights) / sum(weights)
    return [int(v) for v in np.searchsorted(edges, np.array(numbers) / 2.0**63, side="right").clip(max=3)]
