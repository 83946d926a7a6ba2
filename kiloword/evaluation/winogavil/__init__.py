"""The task `winogavil`: the images that people associate with a cue (arXiv:2207.12576)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kiloword.evaluation.task import Deferred, Task


@dataclass(frozen=True, kw_only=True)
class WinogavilTaskOptions:
    """Which associations are asked for."""

    pairs: Path | None = None  # winogavil_dataset.csv: columns `cue`, `candidates` and `associations`


TASK = Task(
    name="winogavil",
    help="Choose the images that people associate with a cue among several: Jaccard index, as DataComp.",
    data="the images that --pairs names, by key or file name",
    options=WinogavilTaskOptions,
    run=Deferred("kiloword.evaluation.winogavil.task:run"),
)
