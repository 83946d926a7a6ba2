"""The values of a log row: means since the last row, rates and counts; and the count of skipped steps."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kiloword.distributed import collectives
from kiloword.training.log import SinceRow
from kiloword.training.optimizer import schedule
from kiloword.training.run import Run
from kiloword.training.saving import what_is_left


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


class Meter:
    """Collects the values of a log row without waiting for the device between rows."""

    def __init__(self, run: Run, guard: Guard) -> None:
        self.run, self.guard = run, guard
        self._waited, self._began = 0.0, math.inf  # data wait of the process since its first batch, and when that came
        self._restart()

    def _restart(self) -> None:
        """Reset the rates."""
        self._pairs, self._wait, self._save, self._start = 0, 0.0, 0.0, time.perf_counter()
        self._read, self._made = 0, 0.0  # pairs from the loader, worker seconds spent on them

    def timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Pass the batches on; the time spent waiting for them counts as data wait."""
        while True:
            start = time.perf_counter()
            batch = next(batches, None)
            now = time.perf_counter()
            self._wait += now - start
            self._waited += now - start if self._began < now else 0.0  # workers start with the first batch
            self._began = min(self._began, now)
            if batch is None:
                return
            self.run.since_row.captions += len(batch.texts)
            self._read, self._made = self._read + len(batch), self._made + batch.made_s
            yield batch

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside there is no training (validation): rates exclude it."""
        start = time.perf_counter()
        yield
        paused = time.perf_counter() - start
        self._start, self._began = self._start + paused, self._began + paused

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Inside, training waits for a save; rates count it."""
        start = time.perf_counter()
        yield
        self._save += time.perf_counter() - start

    def add(self, report: dict[str, Tensor], pairs: int) -> None:
        self.run.since_row.reports.append({k: v.detach() for k, v in report.items()})
        self._pairs += pairs
        self.guard.add(self.run.step, report)

    def data_wait(self) -> float:
        """Share of the time since this process's first batch spent waiting for data; the maximum over ranks."""
        mine = self._waited / max(time.perf_counter() - self._began, 1e-9)
        return max(collectives.all_lists([mine]))

    def row(self) -> dict[str, Any]:
        """Means since the last row, and current values. Raises: ValueError as `Guard.look`."""
        self.guard.look()
        run, head = self.run, self.run.learner.model.head
        every = on_host(run.since_row.reports)
        reports = [r for r in every if not is_bad(r)] or every
        # the newest report, as earlier ones may come from a saved state
        names = [name for name in reports[-1] if name != "skipped_step"]
        means = {name: float(torch.stack([r[name] for r in reports if name in r]).nanmean()) for name in names}
        seconds = time.perf_counter() - self._start
        row: dict[str, Any] = {
            "step": run.step,
            "epoch": run.step / run.loader.order.steps_per_epoch,
            **{k: v for k, v in means.items() if math.isfinite(v)},
        }
        row["scale"] = float(head.log_scale.detach().exp())
        if head.bias is not None:
            row["bias"] = float(head.bias.detach())
        row["lr"] = run.recipe.optim.lr * schedule(run.step - 1, run.recipe.steps, run.recipe.optim)
        row["pairs_per_s"] = self._pairs * collectives.ranks() / seconds
        row["data_wait"] = self._wait / seconds
        workers = max(run.loader.workers, 1) * collectives.ranks()
        row["loader_pairs_per_s"] = self._read * workers / max(self._made, 1e-9)  # that the loaders could produce
        row |= self._over_ranks(seconds)
        row |= {"skipped": len(run.bad), "truncated": run.truncated, "skipped_steps": run.skipped_steps}
        run.since_row = SinceRow()
        self._restart()
        return row

    def _over_ranks(self, seconds: float) -> dict[str, Any]:
        """Captions since the last row, summed over ranks; peak memory and seconds of saving, maxima over ranks.

        With several ranks also the data wait of the slowest rank, for which the others wait in collectives.
        """
        mine = [self.run.since_row.captions, self._wait / seconds, peak_memory(self.run.device), self._save]
        table = torch.zeros(collectives.ranks(), len(mine), dtype=torch.float64)  # [ranks, 4]
        table[collectives.rank()] = torch.tensor(mine, dtype=torch.float64)
        table = collectives.sum_over_ranks(table)
        wait, memory, save = table[:, 1:].amax(0).tolist()
        row = {"captions": int(table[:, 0].sum()), "memory": round(memory, 1), "save_s": round(save, 3)}
        return row if collectives.ranks() == 1 else row | {"slowest_data_wait": wait}


def on_host(reports: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """The same scalars on the CPU, copied with one synchronization of the device instead of one per scalar.

    Scalars that are on the CPU already are passed on.
    """
    away = [x.double() for report in reports for x in report.values() if x.device.type != "cpu"]
    numbers = iter(torch.stack(away).cpu() if away else ())

    def here(x: Tensor) -> Tensor:
        return x if x.device.type == "cpu" else next(numbers).to(x.dtype)

    return [{name: here(x) for name, x in report.items()} for report in reports]


def peak_memory(device: torch.device) -> float:
    """Peak memory of this process so far in MB (10^6 bytes): allocated on the GPU, or resident on a CPU.

    On Linux without pages of mapped files, such as stored tokens: the system takes those back when it needs memory.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    unit = 1 if sys.platform == "darwin" else 1024
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - _file_pages()) * unit / 1e6


def _file_pages() -> int:
    """Resident pages of mapped files in kB; 0 where the system does not tell."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in status.splitlines() if line.startswith("RssFile:")), 0)
