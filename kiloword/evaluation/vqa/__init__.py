"""The task `vqa`: answers to questions about images."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from kiloword.config.settings import BaseSettings
from kiloword.evaluation.task import Data, Deferred, Task


@dataclass(frozen=True, kw_only=True)
class VqaOptions(BaseSettings):
    """The possible answers, and how one is chosen."""

    answers: Path | None = None  # file with one possible answer per line; None: the answers of --train, or of the data
    most: int = 3128  # number of the most frequent answers of --train
    decode: Literal["list", "rank", "free"] = "list"  # word by word within the list; score each answer; any words
    beams: int = 5  # list and free: number of unfinished answers to keep; 1: greedy
    length_penalty: float = 0.0  # score of an answer = log probability / tokens^length_penalty

    def check(self) -> None:
        """Raises: ValueError for numbers that make no sense, and for what is not read."""
        for name in ("most", "beams"):
            if getattr(self, name) < 1:
                raise ValueError(f"--vqa.{name} is {getattr(self, name)}. Expected at least 1.")
        if not math.isfinite(self.length_penalty):
            raise ValueError(f"--vqa.length-penalty is {self.length_penalty}. Expected a finite number, such as 0.")
        if self.decode == "rank" and self.beams != VqaOptions.beams:
            raise ValueError("--vqa.beams is not read by --vqa.decode rank: omit it.")


@dataclass(frozen=True, kw_only=True)
class VqaTaskOptions:
    """Which answers there are, and how one is chosen."""

    train: Data | None = None  # data whose answers are the possible ones; None: those of the test data
    results: Path | None = None  # write the answers as VQA's server takes them; questions may lack answers
    vqa: VqaOptions = field(default_factory=VqaOptions)


TASK = Task(
    name="vqa",
    help="Answer questions about images: VQA accuracy.",
    data="images with questions and answers, or scenes:test?task=vqa",
    options=VqaTaskOptions,
    run=Deferred("kiloword.evaluation.vqa.task:run"),
)
