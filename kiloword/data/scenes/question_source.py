"""Visual question answering on scenes as a `Source`: a row is an image, a question and its one right answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

import numpy as np

from kiloword.data.scenes.questions import ANSWERS, VERSION, Question, ask
from kiloword.data.scenes.raster import draw
from kiloword.data.scenes.settings import VQA, SceneSettings, default_rows, parse_settings
from kiloword.data.scenes.source import ScenesSource
from kiloword.data.sources.optional import majority
from kiloword.randomness import key
from kiloword.types import Record


def open_scenes(src: str, size: int | None = None) -> ScenesSource | SceneQuestions:
    """The data set that a SRC string names, of captions or, with `task=vqa`, of questions.

    Args: size, pixels a side of images whose SRC does not say `size=`; default 64.
    Errors: ValueError says which options there are.
    """
    settings = parse_settings(src, size or 64)
    return (SceneQuestions if settings.task == VQA else ScenesSource)(settings, src)


class SceneQuestions:
    """Scenes with a question each; pickles as its settings. Implements `kiloword.types.Source`.

    `answers` is the closed list. Images must be neither cropped nor mirrored: questions speak of places.
    """

    natural = False
    answers = ANSWERS

    def __init__(self, settings: SceneSettings, name: str = "scenes:train?task=vqa") -> None:
        self.settings, self.name = settings, name
        self.fingerprint = f"{VERSION}-{key(settings.identity()):016x}"
        self._scenes = ScenesSource(replace(settings, task=None), name)

    def __reduce__(self) -> tuple[type[SceneQuestions], tuple[SceneSettings, str]]:
        return SceneQuestions, (self.settings, self.name)

    def __len__(self) -> int:
        return len(self._scenes)

    def resolution(self, size: int) -> SceneQuestions:
        """The same scenes and questions drawn `size` pixels a side."""
        return SceneQuestions(replace(self.settings, size=size), self.name)

    def key(self, row: int) -> str:
        """The name of a row, without drawing its image."""
        return self._scenes.key(row)

    def asked(self, row: int) -> Question:
        """Question and answer of a row, the same whenever and wherever it is asked for."""
        s = self.settings.selection
        rng = np.random.Generator(np.random.Philox(key(VERSION, s.seed, s.split, row, "question")))
        return ask(self._scenes.scene(row), int(rng.integers(2**63)))

    def captions(self, row: int) -> list[str]:
        """The answer, without drawing the image."""
        return [self.asked(row).answer]

    def question(self, row: int) -> str:
        """The question, without drawing the image."""
        return self.asked(row).words

    def record(self, row: int) -> Record:
        """Image, question, answer and truth of a row."""
        asked, scene = self.asked(row), self._scenes.scene(row)
        info = {
            "question": asked.words,
            "answers": [asked.answer],
            "question_type": asked.kind,
            "answer_type": asked.answer_type,
            "scene": scene.describe(),
        }
        return Record(self.key(row), draw(scene, self.settings.size), [asked.answer], info=info)

    def majority(self) -> Mapping[str | None, str]:
        """The most frequent answer to each kind of question of the train split, over all kinds under None."""
        selection = replace(self.settings.selection, split="train", n=default_rows(self.settings.selection.objects))
        return _majority(replace(self.settings, selection=selection))


@lru_cache(maxsize=8)
def _majority(settings: SceneSettings) -> Mapping[str | None, str]:
    train = SceneQuestions(settings)
    asked = (train.asked(row) for row in range(len(train)))
    return majority((question.kind, question.answer) for question in asked)
