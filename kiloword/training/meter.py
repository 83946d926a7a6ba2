"""The values of a log row: means since the last row, rates and counts; and the count of skipped steps."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kiloword.distributed import collectives
from kiloword.models.saving import STOPS
from kiloword.training.optimizer import schedule
from kiloword.training.resolve import Run


class Meter:
    """Collects the values of a log row and counts skipped steps, without waiting for the device between rows.

    The counts are `run.skipped_steps` and `run.skipped_in_a_row`, the same on all ranks; a CPU counts steps at once.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self._new: list[tuple[int, dict[str, Tensor]]] = []  # steps that `look` has not seen, and their reports
        self._restart()

    def _restart(self) -> None:
        self._pairs, self._wait, self._save, self._start = 0, 0.0, 0.0, time.perf_counter()
        self._read, self._made = 0, 0.0  # pairs from the loader, worker seconds spent on them

    def timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Pass the batches on; the time spent waiting for them counts as data wait."""
        while True:
            start = time.perf_counter()
            batch = next(batches, None)
            self._wait += time.perf_counter() - start
            if batch is None:
                return
            self.run.captions += len(batch.texts)
            self._read, self._made = self._read + len(batch), self._made + batch.made_s
            yield batch

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside there is no training (validation): rates exclude it."""
        start = time.perf_counter()
        yield
        self._start += time.perf_counter() - start

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Inside, training waits for a save; rates count it."""
        start = time.perf_counter()
        yield
        self._save += time.perf_counter() - start

    def add(self, report: Mapping[str, Tensor], pairs: int) -> None:
        """Add a step. Args: report: its scalars; pairs: number of images on this rank. Raises: ValueError as `look`."""
        self._pairs += pairs
        self._new.append((self.run.step, {name: x.detach() for name, x in report.items()}))
        if self.run.device.type == "cpu":
            self.look()

    def look(self) -> None:
        """Count the skipped ones of the steps since the last call. Raises: ValueError for too many in a row."""
        run, new, self._new = self.run, self._new, []
        values = iter(on_host([x for _, report in new for x in report.values()]))
        for step, scalars in new:
            report = {name: float(next(values)) for name in scalars}
            run.reports.append(report)
            if not is_bad(report):
                run.skipped_in_a_row = 0
                continue
            run.skipped_steps, run.skipped_in_a_row = run.skipped_steps + 1, run.skipped_in_a_row + 1
            norms, weight = run.optimizer.usual.tolist()
            why = f"step {step}: loss {report['loss']:.3g}, gradient norm {report['gradient_norm']:.3g}"
            why += f", usually {norms / weight:.3g}" if weight else ""
            run.log.say(f"{why}: the step was skipped ({run.skipped_steps} so far)")
            if run.skipped_in_a_row >= run.options.max_skipped_steps:
                raise ValueError(f"{why}: bad step {run.skipped_in_a_row} in a row (--max-skipped-steps). {STOPS}")

    def row(self) -> dict[str, Any]:
        """Means since the last row, and current values. Raises: ValueError as `look`."""
        self.look()
        run, head, seconds = self.run, self.run.learner.model.head, time.perf_counter() - self._start
        good = [report for report in run.reports if not is_bad(report)] or run.reports
        # the newest report, as earlier ones may come from a saved state
        means = {name: _mean([r[name] for r in good if name in r]) for name in good[-1] if name != "skipped_step"}
        row: dict[str, Any] = {
            "step": run.step,
            "epoch": run.step / run.loader.order.steps_per_epoch,
            **{k: v for k, v in means.items() if math.isfinite(v)},
            "scale": float(head.log_scale.detach().exp()),
            **({} if head.bias is None else {"bias": float(head.bias.detach())}),
            "lr": run.recipe.optim.lr * schedule(run.step - 1, run.recipe.steps, run.recipe.optim),
            "pairs_per_s": self._pairs * collectives.ranks() / seconds,
            "data_wait": self._wait / seconds,
            "loader_pairs_per_s": self._read * max(run.loader.workers, 1) * collectives.ranks() / max(self._made, 1e-9),
            **self._over_ranks(seconds),
            "skipped": len(run.bad),
            "truncated": run.truncated,
            "skipped_steps": run.skipped_steps,
        }
        run.reports, run.captions = [], 0
        self._restart()
        return row

    def _over_ranks(self, seconds: float) -> dict[str, Any]:
        """Captions since the last row, summed over ranks; peak memory and seconds of saving, maxima over ranks.

        With several ranks also the data wait of the slowest rank, for which the others wait in collectives.
        """
        mine = [[self.run.captions, self._wait / seconds, peak_memory(self.run.device), self._save]]
        captions, waits, memory, saves = zip(*collectives.all_lists(mine), strict=True)
        row = {"captions": sum(captions), "memory": round(max(memory), 1), "save_s": round(max(saves), 3)}
        return row if collectives.ranks() == 1 else row | {"slowest_data_wait": max(waits)}


def is_bad(report: Mapping[str, float]) -> bool:
    """Whether means omit a step: it was skipped, or its loss is NaN or infinite."""
    return not math.isfinite(report["loss"]) or report.get("skipped_step", 0.0) > 0


def _mean(values: Sequence[float]) -> float:
    """The mean of the values that are not NaN."""
    known = [x for x in values if x == x]
    return sum(known) / len(known) if known else math.nan


def on_host(scalars: Sequence[Tensor]) -> list[Tensor]:
    """The same scalars on the CPU, copied with one synchronization of the device instead of one per scalar."""
    away = [x.double() for x in scalars if x.device.type != "cpu"]
    copies = iter(torch.stack(away).cpu() if away else ())
    return [x if x.device.type == "cpu" else next(copies) for x in scalars]


def peak_memory(device: torch.device) -> float:
    """Peak memory of this process so far in MB (10^6 bytes): allocated on the GPU, or resident on a CPU.

    On Linux without pages of mapped files, such as stored tokens: the system takes those back when it needs memory.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform == "darwin":
        return peak / 1e6
    status = Path("/proc/self/status").read_text("ascii").splitlines()
    files = next((int(line.split()[1]) for line in status if line.startswith("RssFile:")), 0)
    return (peak - files) * 1024 / 1e6
