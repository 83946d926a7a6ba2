"""How ranks find the store by which they talk, and that none of them is there twice."""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, TCPStore

from kiloword.distributed import launch

CALL_S = 10.0  # between looks at whether this rank is still wanted, while nobody answers


def meet(rank: int, hosts: bool, timeout_s: float) -> TCPStore:
    """The store at MASTER_ADDR and MASTER_PORT.

    Args: hosts: this rank keeps it, not torchrun; timeout_s: how long to wait for it, and then for answers of it.
    Raises: ValueError when there is none, or when the torchrun of this rank was killed: one that is started again has
    its own ranks at the same place.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    call, end = timedelta(seconds=min(CALL_S, timeout_s)), time.monotonic() + timeout_s
    while True:
        try:
            store = TCPStore(host, port, None, hosts, call, wait_for_workers=False)
        except RuntimeError as e:
            store, error = None, str(e)
        if launch.orphaned():
            raise ValueError(f"torchrun was killed before rank {rank} had met the others.")
        if store is not None:
            store.set_timeout(timedelta(seconds=timeout_s))
            return store
        if hosts:
            why = "another process has it" if "EADDRINUSE" in error else error.splitlines()[0]
            raise ValueError(
                f"the ranks cannot meet at port {port} of {host}: {why}. Set MASTER_PORT to another, for all ranks."
            )
        if time.monotonic() > end:
            raise ValueError(
                f"rank {rank} found nobody at {host}:{port}: rank 0 has not come, or a firewall is between."
            )


def claim(store: PrefixStore, rank: int) -> None:
    """Be this rank. Raises: ValueError when another process is it already: each would get half of what is sent."""
    me = f"process {os.getpid()} on {socket.gethostname()}"
    holder = store.compare_set(f"is/{rank}", "", me).decode()
    if holder != me:
        raise ValueError(f"{holder} is rank {rank} already, perhaps of a torchrun that was killed: start again.")
