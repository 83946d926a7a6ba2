"""Failure diagnosis: find the rank that broke or delayed a collective, from the heartbeats of all ranks."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

SILENT_S = 4.0  # seconds without a heartbeat after which a process counts as killed or stopped
KEPT = "The last state is kept."
BROKEN = ("gloo", "NCCL", "Connection closed by peer", "Connection reset", "Timed out waiting", "wait timeout")


@dataclass(frozen=True)
class End:
    """Why all ranks end."""

    rank: int  # at fault; -1: none
    message: str
    by: int  # the rank that reports it
    code: int = 2

    def __str__(self) -> str:
        return self.message if self.rank < 0 else f"rank {self.rank}: {self.message}"


def is_broken(error: BaseException) -> bool:
    """Whether the error is of a collective that failed because of another rank or the network."""
    message = str(error)
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in message for word in BROKEN)
    )


def diagnose(store: PrefixStore, rank: int, ranks: int, at: str, error: BaseException) -> End:
    """Name a rank without a heartbeat, or one that is at another place than this rank, or no rank.

    Args: rank: this rank; at: its place, such as "in step 3"; error: the error of its collective.
    """
    before = _beats(store, ranks)
    within(SILENT_S, lambda: store.check(["end"]))
    after = _beats(store, ranks)
    others = [r for r in range(ranks) if r != rank]
    silent = [r for r in others if r not in before or before[r]["beat"] == after[r]["beat"]]
    if silent:
        last = before.get(silent[0], {"at": "at its start"})["at"]
        message = f"no heartbeat; it was last {last}. It was killed, or its machine hangs"
        return End(silent[0], f"{message}. {KEPT}", rank)
    behind = [r for r in others if after[r]["at"] != at]
    if behind:
        slow = max(behind, key=lambda r: float(after[r]["for"]))
        message = f"it has been {after[slow]['at']} for {after[slow]['for']:.0f} s; the others stopped waiting"
        return End(slow, f"{message}. {KEPT}", rank)
    message = str(error).splitlines()[0].split("] ")[-1][:200] if str(error) else "no answer"
    return End(-1, f"all ranks are alive and {at}, but cannot continue together ({message}). {KEPT}", rank)


def _beats(store: PrefixStore, ranks: int) -> dict[int, dict[str, Any]]:
    names = {r: f"beat/{r}" for r in range(ranks)}
    return {r: json.loads(store.get(name)) for r, name in names.items() if store.check([name])}


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    """Poll a condition for that long; whether it became true."""
    end = time.monotonic() + seconds
    while not (result := condition()) and time.monotonic() < end:
        time.sleep(0.05)
    return result
