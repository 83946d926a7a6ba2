"""A run: its plan, and what carries it out."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from kiloword.data.reading import BadRows
from kiloword.files import Lock
from kiloword.training.log import Log
from kiloword.training.optimizer import Average, Optimizer
from kiloword.training.resolve import Plan
from kiloword.training.step import Learner
from kiloword.training.tuning import Unfreezing


@dataclass(kw_only=True)
class Run(Plan):
    """A prepared run, fresh or resumed."""

    learner: Learner
    reducer: nn.Module  # see `engine.replicated`
    optimizer: Optimizer
    average: Average
    unfreezing: Unfreezing
    bad: BadRows
    log: Log
    lock: Lock | None  # on rank 0
    step: int = 0  # number of steps done
    truncated: int = 0  # number of captions truncated so far
    skipped_steps: int = 0  # steps without an update, see `meter.Meter`
    skipped_in_a_row: int = 0
    reports: list[dict[str, float]] = field(default_factory=list)  # of the steps since the last row
    captions: int = 0  # of this rank since the last row

    @property
    def finished(self) -> bool:
        """Whether no step is left."""
        return self.step >= self.recipe.steps or self.best.stalled
