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
    """What answers there are, and how one is chosen."""

    answers: Path | None = None  # the closed list, an answer a line; without: those of --train, or the data's own
    most: int = 3128  # number of the most frequent answers of --train
    decode: Literal["list", "rank", "free"] = "list"  # word by word within the list; every answer tried; any words
    beams: int = 5  # list and free: unfinished answers that are kept; 1: greedy
    length_penalty: float = 0.0  # an answer's score is its log probability / tokens^this

    def check(self) -> None:
        """Raises: ValueError for numbers that make no sense, and for what is not read."""
        for name in ("most", "beams"):
            if getattr(self, name) < 1:
                raise ValueError(f"--vqa.{name} is {getattr(self, name)}. Expected at least 1.")
        if not math.isfinite(self.length_penalty):
            raise ValueError(f"--vqa.length-penalty is {self.length_penalty}. Expected a finite number, such as 0.")
        if self.decode == "rank" and self.beams != VqaOptions.beams:
            raise ValueError("--vqa.beams is not read by --vqa.decode rank: leave it away.")


@dataclass(frozen=True, kw_only=True)
class VqaTaskOptions:
    """Which answers there are, and how one is chosen."""

    train: Data | None = None  # data whose answers are the closed list; None: the list of the data itself
    vqa: VqaOptions = field(default_factory=VqaOptions)


TASK = Task(
    name="vqa",
    help="Answer questions about images: VQA accuracy.",
    data="images with questions and answers, or scenes:test?task=vqa",
    options=VqaTaskOptions,
    run=Deferred("kiloword.evaluation.vqa.task:run"),
)
