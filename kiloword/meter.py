"""What a row of the log says: means since the last row, rates, counts."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

import torch

from kiloword import parallel
from kiloword.prepare import Run


class Meter:
    """Collects what a log row says, without waiting for the device between rows."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._reset()

    def _reset(self) -> None:
        self._reports: list[dict[str, torch.Tensor]] = []
        self._pairs, self._wait, self._start = 0, 0.0, time.perf_counter()

    def timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The same batches; the time spent waiting for them is data wait."""
        while True:
            asked = time.perf_counter()
            batch = next(batches, None)
            self._wait += time.perf_counter() - asked
            if batch is None:
                return
            yield batch

    def add(self, report: dict[str, torch.Tensor], pairs: int) -> None:
        self._reports.append({k: v.detach() for k, v in report.items()})
        self._pairs += pairs
        if self.run.device.type == "cpu":
            self.check_finite()

    def row(self) -> dict[str, Any]:
        """Means since the last row, and where things stand. Raises: ValueError on a loss that is no number."""
        self.check_finite()
        run, head = self.run, self.run.learner.model.head
        means = {k: float(torch.stack([r[k] for r in self._reports]).nanmean()) for k in self._reports[0]}
        seconds = time.perf_counter() - self._start
        row: dict[str, Any] = {
            "step": run.step,
            "epoch": run.step * run.recipe.batch / run.order.rows,
            **{k: v for k, v in means.items() if not math.isnan(v)},
        }
        row["scale"] = float(head.log_scale.detach().exp())
        if head.bias is not None:
            row["bias"] = float(head.bias.detach())
        row["pairs_per_s"] = self._pairs * parallel.ranks() / seconds
        row["data_wait"] = self._wait / seconds
        row |= {"skipped": len(run.bad), "truncated": run.truncated}
        self._reset()
        return row

    def check_finite(self) -> None:
        for n, report in enumerate(reversed(self._reports[-1:] if self.run.device.type == "cpu" else self._reports)):
            loss, norm = float(report["loss"]), float(report["gradient_norm"])
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise ValueError(
                    f"step {self.run.step - n}: loss is {loss} and gradient norm {norm}. The last good state in "
                    f"{self.run.out / 'state'} is kept; start again with "
                    "a smaller --optim.lr or --optim.clip 1, in another --out."
                )
