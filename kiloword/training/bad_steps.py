"""Steps whose gradient is NaN, infinite or exploding: the optimizer skips them, the guard counts and reports them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from kiloword.checkpoint.states import states
from kiloword.training.setup import Run


class _Seen(NamedTuple):
    step: int  # from 1
    bad: Tensor  # bool
    loss: Tensor
    norm: Tensor


def is_bad(report: dict[str, Tensor]) -> Tensor:
    """Whether means omit a step: it was skipped, or its loss is NaN or infinite. Returns: bool tensor on the device."""
    lost = ~report["loss"].isfinite()
    return lost | (report["skipped_step"] > 0) if "skipped_step" in report else lost


class Guard:
    """Counts skipped steps in `run.skipped_steps` and `run.skipped_in_a_row`, the same on all ranks.

    On CPU a step is checked at once; on other devices when `look` is called, so that steps do not wait for the device.

    Args: most: number of steps in a row that may be skipped.
    """

    def __init__(self, run: Run, most: int) -> None:
        self.run, self.most = run, most
        self._seen: list[_Seen] = []

    def add(self, step: int, report: dict[str, Tensor]) -> None:
        """Args: step, from 1. Raises: ValueError, see `look`."""
        self._seen.append(_Seen(step, is_bad(report), report["loss"].detach(), report["gradient_norm"].detach()))
        if self.run.device.type == "cpu":
            self.look()

    def look(self) -> None:
        """Check the steps added since the last call. Raises: ValueError after `most` bad steps in a row."""
        pending, self._seen = self._seen, []
        if not pending:
            return
        columns = [torch.stack([getattr(step, name).double() for step in pending]) for name in ("bad", "loss", "norm")]
        for step, (bad, loss, norm) in zip(pending, torch.stack(columns, 1).tolist(), strict=True):
            if bad:
                self._count(step.step, loss, norm)
            else:
                self.run.skipped_in_a_row = 0

    def _count(self, step: int, loss: float, norm: float) -> None:
        run = self.run
        run.skipped_steps += 1
        run.skipped_in_a_row += 1
        run.log.say(f"step {step}: {self._why(loss, norm)}: the step was skipped ({run.skipped_steps} so far)")
        if run.skipped_in_a_row >= self.most:
            raise ValueError(
                f"step {step}: {self._why(loss, norm)}; bad steps in a row: {run.skipped_in_a_row}. The run stops"
                f"{what_is_left(run.out)}; --max-skipped-steps allows more."
            )

    def _why(self, loss: float, norm: float) -> str:
        if not math.isfinite(norm):
            return f"loss is {loss:.3g} and gradient norm {norm}"
        if not math.isfinite(loss):
            return f"loss is {loss}"
        usual = self.run.optimizer.usual_norm
        return f"gradient norm {norm:.2g}" + (f" is {norm / usual:.0f} times the usual" if usual else " explodes")


def what_is_left(out: Path) -> str:
    """The end of the message about a diverged run, after "The run stops": the state that remains, what to do."""
    again = "Start again in another --out with a smaller --optim.lr"
    if not states(out / "state"):
        return f" before its first state. {again}"
    kept = f"{out / 'state'} keeps the last state, which is finite"
    return f"; {kept}. {again}, from {out / 'model'} by --init if you like"
