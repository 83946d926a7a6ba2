"""Which rank is at fault when a collective broke or took too long, by the signs of life that all of them give."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

SILENT_S = 4.0  # without a sign of life: the process is gone or stopped
KEPT = "The last state is kept."
BROKEN = ("gloo", "NCCL", "Connection closed by peer", "Connection reset", "Timed out waiting", "wait timeout")


@dataclass(frozen=True)
class End:
    """Why all ranks end."""

    rank: int  # at fault; -1: none of them
    sentence: str
    by: int  # the rank that tells it
    code: int = 2

    def __str__(self) -> str:
        return self.sentence if self.rank < 0 else f"rank {self.rank}: {self.sentence}"


def is_broken(error: BaseException) -> bool:
    """A collective that came to no end, because of another rank or of what lies between."""
    said = str(error)
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in said for word in BROKEN)
    )


def blame(store: PrefixStore, rank: int, ranks: int, at: str, error: BaseException) -> End:
    """A rank that gives no sign of life, or one that stands elsewhere than this one, or none.

    Args: rank: this one, which stands `at`; error: what it got of its collective.
    """
    before = _beats(store, ranks)
    within(SILENT_S, lambda: store.check(["end"]))
    after = _beats(store, ranks)
    others = [r for r in range(ranks) if r != rank]
    silent = [r for r in others if r not in before or before[r]["beat"] == after[r]["beat"]]
    if silent:
        last = before.get(silent[0], {"at": "at its start"})["at"]
        said = f"no sign of life; it was last {last}. It was killed, or its machine stands still"
        return End(silent[0], f"{said}. {KEPT}", rank)
    elsewhere = [r for r in others if after[r]["at"] != at]
    if elsewhere:
        slow = max(elsewhere, key=lambda r: float(after[r]["for"]))
        said = f"it has been {after[slow]['at']} for {after[slow]['for']:.0f} s; the others wait no longer"
        return End(slow, f"{said}. {KEPT}", rank)
    said = str(error).splitlines()[0].split("] ")[-1][:200] if str(error) else "no answer"
    return End(-1, f"all ranks live and are {at}, but cannot go on together ({said}). {KEPT}", rank)


def _beats(store: PrefixStore, ranks: int) -> dict[int, dict[str, Any]]:
    names = {r: f"beat/{r}" for r in range(ranks)}
    return {r: json.loads(store.get(name)) for r, name in names.items() if store.check([name])}


def within(seconds: float, true: Callable[[], bool]) -> bool:
    """Whether it becomes true in that time."""
    end = time.monotonic() + seconds
    while not (found := true()) and time.monotonic() < end:
        time.sleep(0.05)
    return found
