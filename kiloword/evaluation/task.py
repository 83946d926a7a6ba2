"""What an evaluation task is. All are declared in `tasks.py`, with their options; the loop is in `command.py`.

`run(inputs, options)` of `evaluation/NAME.py` yields metrics, `(name, value)`, and where `inputs.page` is true also
blocks for the page (`kiloword.report.blocks`). The page shows a table of all models' metrics, then each model's blocks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import tyro

from kiloword.config.settings import Nothing
from kiloword.errors import suggestion
from kiloword.report.blocks import Block

if TYPE_CHECKING:
    from kiloword.api import Matcher
    from kiloword.data.classes import Templates
    from kiloword.types import Skipped, Source

    Data = Source | str
    ClassNames = Sequence[str] | str
    Prompts = Templates | str
else:
    Data = ClassNames = Prompts = str  # what a flag can name
"""Data that an option names as the command line does; from Python also an open source."""

IMAGES = 64  # encoded at a time

T = TypeVar("T")

PythonOnly = Annotated[T, tyro.conf.Fixed, tyro.conf.Suppress]
"""Type of an option that has no flag: `ks: PythonOnly[tuple[int, ...]] = (1, 5, 10)`."""

Values = Iterator[tuple[str, float]]
"""Metrics by name, in the order in which they are printed."""

Findings = Iterator[tuple[str, float] | Block]
"""What `run` of a task yields: metrics, and blocks for the page."""


@dataclass(frozen=True)
class Inputs:
    """What every task gets beside its own options."""

    model: Matcher | None  # None: what is evaluated is in the options (captions of a table)
    source: Source
    batch: int = IMAGES  # images encoded at a time
    workers: int = 0  # loader processes
    skipped: list[Skipped] = field(default_factory=list)  # the task appends the rows that it cannot use
    page: bool = False  # whether to yield blocks for a page

    @property
    def matcher(self) -> Matcher:
        """The model. Raises: ValueError where there is none."""
        if self.model is None:
            raise ValueError("this task needs a model, but matcher is None.")
        return self.model


@dataclass(frozen=True)
class Task:
    """A task, as Python and the command line know it."""

    name: str  # and of its file, evaluation/NAME.py, which has _ for -
    about: str  # a line of help
    data: str  # what --data takes, for its help
    models: str = "model folder (OUT/model of a run); several are evaluated on the same data and shown side by side"
    options: type[Any] = Nothing  # frozen dataclass; each field has a type, a default, and its help as a comment
    hidden: str = ""  # pattern (`re.search`) of the names of metrics that are not printed; "": all are printed
    higher: str = ""  # pattern of the metrics that are better when higher, for `train --keep-best`
    lower: str = ""  # pattern of the metrics that are better when lower
    reads: str = ""  # captions, classes or training data: what `train --val` looks for before it starts
    encodes: bool = False  # encodes, and no more: stored tokens can replace pixels, and ranks can share a sharded model

    def run(self, inputs: Inputs, options: Any) -> Findings:
        """Metrics, and blocks for a page, by `run` of the task's file."""
        found: Findings = import_module(f"kiloword.evaluation.{self.name.replace('-', '_')}").run(inputs, options)
        return found

    def prints(self, name: str) -> bool:
        """Whether to print a metric; the JSON has all."""
        return not (self.hidden and re.search(self.hidden, name))

    def options_from(self, chosen: Mapping[str, Any]) -> Any:
        """The options with some of them chosen by name. Raises: ValueError for a name that the task does not have."""
        known = [f.name for f in fields(self.options)]
        unknown = next((name for name in chosen if name not in known), None)
        if unknown is not None:
            listed, hint = ", ".join([*known, "batch", "workers"]), suggestion(unknown, known)
            raise ValueError(f"the task {self.name} has no option {unknown}; it has: {listed}.{hint}")
        return self.options(**chosen)
