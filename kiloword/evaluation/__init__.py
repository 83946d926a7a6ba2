"""Tasks that judge a model: one module each, with `run(matcher, source, **options)` that yields (name, value)."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kiloword.api import Matcher
    from kiloword.types import Skipped, Source

TASKS = {
    "caption": "kiloword.evaluation.caption.task",
    "hierarchy": "kiloword.evaluation.hierarchy.task",
    "probe": "kiloword.evaluation.probe.task",
    "reconstruction": "kiloword.evaluation.reconstruction.task",
    "retrieval": "kiloword.evaluation.retrieval.task",
    "spectrum": "kiloword.evaluation.spectrum",
    "uncertainty": "kiloword.evaluation.uncertainty.task",
    "vqa": "kiloword.evaluation.vqa.task",
    "zeroshot": "kiloword.evaluation.zeroshot.task",
}


def evaluate(
    matcher: Matcher | None, task: str, source: Source | str, *, skipped: list[Skipped] | None = None, **options: Any
) -> dict[str, float]:
    """Judge a model by one task on one data set.

    Args: matcher, None for what needs no model (captions of a table); task one of TASKS; source as on the command line,
    or opened; options of the task's `run` (batch, workers, ks, shortlist, classnames, templates, of, samples, train,
    val, captions, generate, judge). Bad rows are left out, named in the list `skipped` if given.
    Returns: metrics by name, and how many rows were left out as "skipped". Of ranks that share the work (see
    `distributed/sharing.py`) all know those of most tasks; what cannot be shared (caption's scores, probe's fits) is
    made and known by the first alone.
    """
    check(task, options)
    if isinstance(source, str):
        from kiloword.data.sources.open import open_source

        source = open_source(source, None if matcher is None else matcher.model.config.image.size)
    bad = [] if skipped is None else skipped
    before = len(bad)
    values = dict(import_module(TASKS[task]).run(matcher, source, skipped=bad, **options))
    return {**values, "skipped": float(len(bad) - before)}


def check(task: str, options: Iterable[str]) -> None:
    """Refuse an unknown task, and options that the task does not have."""
    if task not in TASKS:
        close = difflib.get_close_matches(task, TASKS, n=1)
        hint = f" Did you mean {close[0]}?" if close else ""
        raise ValueError(f"unknown task {task!r}; known: {', '.join(TASKS)}.{hint}")
    parameters = inspect.signature(import_module(TASKS[task]).run).parameters
    known = [name for name in parameters if name not in ("matcher", "source", "skipped", "shown")]
    strange = [name for name in options if name not in (*known, "shown")]
    if strange:
        raise ValueError(f"the task {task} has no option {strange[0]}; it has: {', '.join(known)}.")
