"""The verb eval: a task, whose flags are its options, or a suite. No torch at import: help is instant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from tyro.conf import Positional, arg

from kiloword.config.execution import REQUIRED, Flat, Some
from kiloword.evaluation import TASKS, find
from kiloword.evaluation.command import Execution, Output
from kiloword.evaluation.suite import names
from kiloword.evaluation.task import Task
from kiloword.terminal import say

MODELS = "MODEL [MODEL ...]"


class Evaluate:
    """The words of `eval TASK`, read; the fields are those of `flags`."""

    task: Task

    def run(self) -> None:
        """Evaluate, print, and write what is asked for."""
        from kiloword.evaluation.command import main

        words: Any = self
        main(self.task, words.models, words.data, words.options, words.execution, words.json, words.html)


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


@dataclass(frozen=True, kw_only=True)
class EvaluateSuite:
    """Evaluate on all data sets of a suite in one table: eval suite SUITE MODEL --data ROOT."""

    suite: Annotated[Positional[str], arg(metavar="SUITE")]  # its name, or a TOML file
    models: Annotated[Some[str], arg(metavar=MODELS)]  # model folders
    data: Annotated[Path, arg(metavar="ROOT")]  # the folder that holds the data sets
    only: tuple[str, ...] = ()  # names of data sets or groups; default: all
    dry_run: bool = False  # say what would be evaluated, and what --out has already
    output: Flat[Output] = field(default_factory=Output)
    execution: Flat[Execution] = field(default_factory=Execution)

    def run(self) -> None:
        """Evaluate, print, and write what is asked for."""
        from kiloword.evaluation.command import run_suite

        run_suite(self.suite, self.models, self.data, self.only, self.output, self.execution, self.dry_run)


def read(argv: Sequence[str]) -> Any:
    """Read the words of a command line. Raises: ValueError for a task that is unknown, or behind the model."""
    first = argv[0] if argv else ""
    if first == "suite":
        about = f"{EvaluateSuite.__doc__} Suites: {', '.join(names())}, or a TOML file (docs/suites.md)."
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
