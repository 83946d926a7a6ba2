"""What torch really allocates in a call: counted by its profiler on a CPU, by its allocator on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import torch


def peak(run: Callable[[], object], device: str = "cpu") -> int:
    """The most bytes that a call held at once, beyond what was there before."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    return max(accumulate(_changes(run), initial=0))


def kept(run: Callable[[], object]) -> int:
    """Bytes that a call on a CPU allocates and that wait with its result: of a forward pass, for the backward pass."""
    return sum(_changes(run))


def _changes(run: Callable[[], object]) -> list[int]:
    """Bytes allocated, and freed (negative), in order; of the result, which lives on, none are freed."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
        out = run()
    found = seen.profiler.kineto_results.events()
    del out
    return [e.nbytes() for e in sorted((e for e in found if e.name() == "[memory]"), key=lambda e: e.start_ns())]
