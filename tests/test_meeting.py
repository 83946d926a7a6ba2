"""Ranks that meet: each once, and none whose torchrun was killed, which would join the run that comes next."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
from torch.distributed import PrefixStore, TCPStore

from kiloword import launch, meeting


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    port = launch.free_port()
    for name, value in {**launch.announced(1, 2, port), "TORCHELASTIC_RUN_ID": "none"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(meeting, "CALL_S", 0.2)
    return port


def served(port: int) -> TCPStore:
    return TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)


def test_a_rank_meets_the_others_and_waits_for_answers_as_long_as_it_is_told(port: int) -> None:
    server = served(port)
    store = meeting.meet(1, False, 33)
    assert store.timeout == timedelta(seconds=33)
    store.set("x", "y")
    assert server.get("x") == b"y"


@pytest.mark.parametrize("answers", [True, False])
def test_a_rank_whose_torchrun_was_killed_joins_nobody(
    port: int, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    kept = served(port) if answers else None
    monkeypatch.setattr(launch, "_PARENT", -1)
    with pytest.raises(ValueError, match="torchrun was killed before rank 1 had met the others"):
        meeting.meet(1, False, 600)
    del kept
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")  # a shell that starts ranks and leaves does nothing wrong
    assert not launch.orphaned()


def test_nobody_comes(port: int) -> None:
    begin = time.monotonic()
    with pytest.raises(ValueError, match="rank 1 found nobody at 127"):
        meeting.meet(1, False, 0.5)
    assert time.monotonic() - begin >= 0.5


def test_a_rank_is_there_once(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    store = PrefixStore("kiloword/none/0", served(port))
    meeting.claim(store, 1)
    meeting.claim(store, 1)
    monkeypatch.setattr("os.getpid", lambda: 7)
    meeting.claim(store, 0)
    with pytest.raises(ValueError, match=r"process \d+ on .+ is rank 1 already, perhaps of a torchrun that was killed"):
        meeting.claim(store, 1)
