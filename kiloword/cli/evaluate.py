"""The verb eval: a task, whose flags are its options, or a suite. No torch at import: help is instant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field, make_dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from tyro.conf import Positional, arg

from kiloword.config.execution import REQUIRED
from kiloword.evaluation import TASKS, find
from kiloword.evaluation.command import MODELS, Evaluate, EvaluateSuite, Execution
from kiloword.evaluation.suite import names
from kiloword.evaluation.task import Task
from kiloword.terminal import say


def flags(task: Task) -> type:
    """The words of a task's command line: models and data, the task's options, and those that all tasks share."""
    models = Annotated[Positional[tuple[str, ...]], arg(metavar=MODELS, help=task.models), REQUIRED]
    parts: list[tuple[str, Any, Any]] = [
        ("models", models, field()),
        ("data", Annotated[str, arg(metavar="SRC", help=f"test data: {task.data}")], field()),
        ("options", Annotated[task.options, arg(name="")], field(default_factory=task.options)),
        ("json", Annotated[Path | None, arg(help="write the metrics to this file")], field(default=None)),
        ("html", Annotated[Path | None, arg(help="write a page with plots")], field(default=None)),
        ("execution", Annotated[Execution, arg(name="")], field(default_factory=Execution)),
    ]
    return make_dataclass("Words", parts, bases=(Evaluate,), namespace={"task": task})


def read(argv: Sequence[str]) -> Any:
    """Read the words of a command line. Raises: ValueError for a task that is unknown, or behind the model."""
    first = argv[0] if argv else ""
    if first == "suite":
        about = f"{EvaluateSuite.__doc__} Suites: {', '.join(names())}, or a TOML file (docs/evaluation.md)."
        return tyro.cli(EvaluateSuite, args=argv[1:], prog="kiloword eval suite", description=about)
    if first in TASKS:
        task = TASKS[first]
        return tyro.cli(flags(task), args=argv[1:], prog=f"kiloword eval {task.name}", description=task.about)
    if first in ("-h", "--help"):
        say("usage: kiloword eval TASK MODEL --data SRC, and kiloword eval TASK --help", "")
        say(*(f"  {name:14} {task.about}" for name, task in TASKS.items()), f"  {'suite':14} {EvaluateSuite.__doc__}")
        raise SystemExit(0)
    if any(word in TASKS for word in argv) or not first or first.startswith("-"):
        raise ValueError("a task comes first: kiloword eval retrieval runs/first/model --data scenes:test.")
    return find(first)  # which raises
