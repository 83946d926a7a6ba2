"""The task `compositional`: whether a true caption scores above a false one that shares most of its words."""

from __future__ import annotations

from dataclasses import dataclass

from kiloword.evaluation.task import Deferred, Task


@dataclass(frozen=True, kw_only=True)
class CompositionalTaskOptions:
    """Which captions are compared."""

    # json or jsonl of SugarCrepe, SugarCrepe++, Winoground, ARO or VALSE, as distributed, or a folder of such files
    pairs: str | None = None


TASK = Task(
    name="compositional",
    help="Compare scores of true captions with those of false ones: SugarCrepe, Winoground, ARO, VALSE.",
    data="the images that --pairs names, by key or file name",
    options=CompositionalTaskOptions,
    run=Deferred("kiloword.evaluation.compositional.task:run"),
    page=Deferred("kiloword.evaluation.compositional.page:report"),
    hidden=r"_(chance|items)@",
)
