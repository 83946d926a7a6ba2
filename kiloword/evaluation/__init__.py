"""Evaluation of a model by tasks (see `task.py`), each a subcommand of `kiloword eval`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kiloword.config.settings import check
from kiloword.errors import naming_truncated, suggestion
from kiloword.evaluation.task import IMAGES, Inputs, Task
from kiloword.evaluation.tasks import TASKS as TASKS
from kiloword.report.blocks import Block

if TYPE_CHECKING:
    from kiloword.api import Matcher
    from kiloword.types import Skipped


def evaluate(
    matcher: Matcher | None,
    task: str,
    source: Any,
    *,
    batch: int = IMAGES,
    workers: int = 0,
    skipped: list[Skipped] | None = None,
    blocks: list[Block] | None = None,
    **options: Any,
) -> dict[str, float]:
    """Evaluate a model by one task on one data set: evaluate(matcher, "retrieval", "scenes:test?n=20", shortlist=5)

    Args: matcher, None for captions of a table; task one of TASKS; source as on the command line, or an opened or
    Python data set; batch: images encoded at a time; workers: loader processes; skipped: receives the rows that cannot
    be used; blocks: receives what the page shows beside the metrics; options: fields of the task's `options`.
    Returns: metrics by name, and the number of skipped rows as "skipped". Where ranks share
    the work, all of them get the metrics, but only the first gets the metrics of captions.
    Raises: ValueError for an unknown task or option, and for data that the task cannot use.
    """
    declared = find(task)
    chosen = declared.options_from(options)
    from kiloword.data.open import open_source

    source = open_source(source, None if matcher is None else matcher.model.config.image.size)
    noted = [] if skipped is None else skipped
    return run(declared, Inputs(matcher, source, batch, workers, noted, blocks is not None), chosen, blocks)


@naming_truncated()
def run(task: Task, inputs: Inputs, options: Any, blocks: list[Block] | None = None) -> dict[str, float]:
    """What `evaluate` returns, of options that are made and a source that is open. Args: blocks: receives blocks."""
    check(options)
    before, values = len(inputs.skipped), dict[str, float]()
    for found in task.run(inputs, options):
        if isinstance(found, tuple):
            values[found[0]] = float(found[1])
        elif blocks is not None:
            blocks.append(found)
    return {**values, "skipped": float(len(inputs.skipped) - before)}


def find(name: str) -> Task:
    """A task by its name. Raises: ValueError for an unknown one, with a close name."""
    if name not in TASKS:
        raise ValueError(f"unknown task {name!r}; known: {', '.join(sorted(TASKS))}.{suggestion(name, TASKS)}")
    return TASKS[name]
