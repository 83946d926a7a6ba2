"""The verb eval: a subcommand per task, whose flags are its options, and `suite`. No torch at import."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from tyro.conf import Positional, arg

from kiloword.config.execution import REQUIRED
from kiloword.evaluation import TASKS, command, find
from kiloword.evaluation.command import Execution
from kiloword.evaluation.suite import Output, names
from kiloword.evaluation.task import Task

EXAMPLE = "kiloword eval retrieval runs/first/model --data scenes:test"
SUITE = "Evaluate on all data sets of a suite in one table: eval suite SUITE MODEL --data ROOT."


def main(argv: Sequence[str]) -> None:
    """Evaluate models by a task: kiloword eval TASK MODEL --data SRC (`kiloword eval --help` lists the tasks)."""
    if {"-h", "--help"} & set(argv[:1]):
        _overview()
    if argv[:1] == ["suite"]:
        _suite(argv[1:])
        return
    task = _task_of(argv)
    words: Any = tyro.cli(flags(task), args=argv[1:], prog=f"kiloword eval {task.name}", description=task.help)
    if not words.models:
        raise ValueError(f"eval {task.name} needs a model: kiloword eval {task.name} MODEL --data SRC.")
    command.main(task, words.models, words.data, words.options, words.execution, words.json, words.html)


def flags(task: Task) -> type:
    """The words of a task's command line: models and data, the task's options, and those that all tasks share."""
    models = Annotated[Positional[tuple[str, ...]], arg(metavar="MODEL [MODEL ...]", help=task.models), REQUIRED]
    parts: list[tuple[str, Any, Any]] = [
        ("models", models, field()),
        ("data", Annotated[str, arg(metavar="SRC", help=f"test data: {task.data}")], field()),
        ("options", Annotated[task.options, arg(name="")], field(default_factory=task.options)),
        ("json", Annotated[Path | None, arg(help="write the metrics to this file")], field(default=None)),
        ("html", Annotated[Path | None, arg(help="write a page with plots")], field(default=None)),
        ("execution", Annotated[Execution, arg(name="")], field(default_factory=Execution)),
    ]
    return make_dataclass("Words", parts)


@dataclass(frozen=True, kw_only=True)
class SuiteWords:
    """The words of `eval suite`."""

    suite: Annotated[Positional[str], arg(metavar="SUITE", help="its name, or a TOML file"), REQUIRED]
    models: Annotated[Positional[tuple[str, ...]], arg(metavar="MODEL [MODEL ...]", help="model folders"), REQUIRED]
    data: Annotated[Path, arg(metavar="ROOT")]  # the folder that holds the data sets
    only: tuple[str, ...] = ()  # names of data sets or groups; default: all
    dry_run: bool = False  # say which data sets are there, and evaluate nothing
    output: Annotated[Output, arg(name="")] = field(default_factory=Output)
    execution: Annotated[Execution, arg(name="")] = field(default_factory=Execution)


def _suite(argv: Sequence[str]) -> None:
    """Evaluate models on the data sets of a suite."""
    about = f"{SUITE} Suites: {', '.join(names())}, or a TOML file (docs/suites.md)."
    words = tyro.cli(SuiteWords, args=argv, prog="kiloword eval suite", description=about)
    if not words.models:
        raise ValueError("eval suite needs a model: kiloword eval suite SUITE MODEL --data ROOT.")
    from kiloword.evaluation.suite.command import main

    main(words.suite, words.models, words.data, words.only, words.output, words.execution, words.dry_run)


def _overview() -> None:
    """Print the tasks with a line each, and exit."""
    tasks = tyro.extras.SubcommandApp()
    for task in TASKS.values():
        tasks.command(name=task.name, help=task.help)(lambda: None)
    tasks.command(name="suite", help=SUITE)(lambda: None)
    about = f"Evaluate models by a task: {EXAMPLE}. Flags of a task: kiloword eval TASK --help."
    tasks.cli(args=["--help"], prog="kiloword eval", description=about)


def _task_of(argv: Sequence[str]) -> Task:
    """The task that is named first. Raises: ValueError where there is none, or where it stands behind the model."""
    if not argv or argv[0].startswith("-"):
        raise ValueError(f"eval needs a task first, e.g. {EXAMPLE} (`kiloword eval --help`).")
    later = next((word for word in argv[1:] if word in TASKS), None)
    if argv[0] not in TASKS and later is not None:
        raise ValueError(f"the task comes before the model: kiloword eval {later} {argv[0]} --data SRC.")
    return find(argv[0])
