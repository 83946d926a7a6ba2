"""Ranks that are threads of one process: collectives that cost no process, by the group of torch's own tests."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import _set_thread_isolation_mode
from torch.testing._internal.distributed.multi_threaded_pg import (
    ProcessLocalGroup,
    _install_threaded_pg,
    _uninstall_threaded_pg,
)

Result = TypeVar("Result")


def over_threads(ranks: int, work: Callable[[], Result]) -> list[Result]:
    """What `work()` returns on each rank. An error of one rank ends the others; the first is raised."""
    store = dist.HashStore()

    def run(rank: int) -> Result:
        dist.init_process_group("threaded", rank=rank, world_size=ranks, store=store)
        try:
            return work()
        except BaseException as error:
            ProcessLocalGroup.exception_handle(error)
            raise
        finally:
            dist.destroy_process_group()

    _set_thread_isolation_mode(True)
    _install_threaded_pg()
    try:
        with ThreadPoolExecutor(ranks) as pool:
            return [future.result() for future in [pool.submit(run, rank) for rank in range(ranks)]]
    finally:
        ProcessLocalGroup.reset()
        _uninstall_threaded_pg()
        _set_thread_isolation_mode(False)
