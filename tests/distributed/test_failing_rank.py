"""A rank that dies, fails or hangs ends the others, and ranks that do not meet end."""

from __future__ import annotations

import os
import re
import signal
import socket
from multiprocessing import get_context
from pathlib import Path

import pytest

from kiloword.distributed import collectives, launch


def one_of_two(rank: int, port: int, fault: int, folder: Path) -> None:
    os.environ |= launch.announced(rank, 2, port)
    try:
        with collectives.process_group(timeout_s=3):
            assert collectives.add_up(rank) == 1
            if rank == 1 and not fault:
                raise ValueError("0007.tar cannot be read.")
            if rank == 1:
                os.kill(os.getpid(), fault)
            collectives.wait(patient=fault == signal.SIGKILL)  # without timeout
    except ValueError as error:
        (folder / str(rank)).write_text(str(error))


ENDED = "another rank has ended.*Connection"


@pytest.mark.parametrize(("fault", "why"), [(signal.SIGKILL, ENDED), (0, ENDED), (signal.SIGSTOP, "3 s")])
def test_a_rank_that_fails_ends_the_others(tmp_path: Path, fault: int, why: str) -> None:
    spawn, port = get_context("forkserver"), launch.free_port()
    spawn.set_forkserver_preload(["kiloword.distributed.collectives"])
    first, second = (spawn.Process(target=one_of_two, args=(rank, port, fault, tmp_path)) for rank in (0, 1))
    first.start()
    second.start()
    first.join(60)
    second.kill()
    assert first.exitcode == 0
    assert re.search(why, (tmp_path / "0").read_text())
    if not fault:
        assert (tmp_path / "1").read_text() == "0007.tar cannot be read."


@pytest.mark.parametrize(("taken", "why"), [(False, "1/2 clients joined"), (True, "address already in use")])
def test_ranks_that_do_not_meet(monkeypatch: pytest.MonkeyPatch, taken: bool, why: str) -> None:
    waited = list[float]()  # for torchrun to find the rank that failed first
    monkeypatch.setattr("time.sleep", waited.append)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1] if taken else launch.free_port()
        for name, value in {**launch.announced(0, 2, port), "TORCHELASTIC_ERROR_FILE": "error.json"}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(ValueError, match=why), collectives.process_group(timeout_s=1):
            pass
    assert waited
