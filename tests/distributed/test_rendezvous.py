"""Ranks that meet: each once, and none whose torchrun was killed, which would join the run that comes next."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
from torch.distributed import PrefixStore, TCPStore

from kiloword.distributed import heartbeat, launch


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    port = launch.free_port()
    for name, value in {**launch.announced(1, 2, port), "TORCHELASTIC_RUN_ID": "none"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(heartbeat, "CALL_S", 0.2)
    return port


def served(port: int) -> TCPStore:
    return TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)


def test_a_rank_meets_the_others_and_waits_for_answers_as_long_as_set(port: int) -> None:
    server = served(port)
    store = heartbeat.connect(1, False, 33)
    assert store.timeout == timedelta(seconds=33)
    store.set("x", "y")
    assert server.get("x") == b"y"


@pytest.mark.parametrize("answers", [True, False])
def test_a_rank_whose_torchrun_was_killed_joins_nobody(
    port: int, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    kept = served(port) if answers else None
    monkeypatch.setattr(launch, "_PARENT", -1)
    with pytest.raises(ValueError, match="torchrun was killed before rank 1 had joined the others"):
        heartbeat.connect(1, False, 600)
    del kept
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")  # a shell that starts ranks and leaves does nothing wrong
    assert not launch.orphaned()


def test_nobody_comes(port: int) -> None:
    begin = time.monotonic()
    with pytest.raises(ValueError, match="rank 1 got no answer from 127"):
        heartbeat.connect(1, False, 0.5)
    assert time.monotonic() - begin >= 0.5


def test_a_rank_is_there_once(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    store = PrefixStore("kiloword/none/0", served(port))
    heartbeat.claim(store, 1)
    heartbeat.claim(store, 1)
    monkeypatch.setattr("os.getpid", lambda: 7)
    heartbeat.claim(store, 0)
    with pytest.raises(ValueError, match=r"process \d+ on .+ is rank 1 already, perhaps of a torchrun that was killed"):
        heartbeat.claim(store, 1)


class Calls:
    """In place of TCPStore: what each call was for; the last one answers."""

    def __init__(self, errors: list[str], clock: list[float]) -> None:
        self.errors, self.clock, self.given = errors, clock, list[tuple[object, ...]]()

    def __call__(self, *given: object, **named: object) -> object:
        self.given.append(given)
        assert named == {"wait_for_workers": False}
        self.clock[0] += 10
        if self.errors:
            raise RuntimeError(self.errors.pop(0))
        return self

    def set_timeout(self, timeout: timedelta) -> None:
        self.given.append((timeout,))


@pytest.mark.parametrize(("timeout_s", "call_s"), [(600, 10), (3, 3)])
def test_a_rank_calls_again_until_somebody_answers(
    port: int, monkeypatch: pytest.MonkeyPatch, timeout_s: float, call_s: float
) -> None:
    clock, count = [0.0], 3 if timeout_s > 10 else 0
    calls = Calls(["nobody"] * count, clock)
    monkeypatch.setattr(heartbeat, "CALL_S", 10.0)
    monkeypatch.setattr(heartbeat, "TCPStore", calls)
    monkeypatch.setattr(heartbeat, "time", type("Clock", (), {"monotonic": staticmethod(lambda: clock[0])}))
    assert heartbeat.connect(1, False, timeout_s) is calls
    one = ("127.0.0.1", port, None, False, timedelta(seconds=call_s))
    assert calls.given == [one] * (count + 1) + [(timedelta(seconds=timeout_s),)]
    calls.errors = ["nobody"] * 100
    before = clock[0]
    with pytest.raises(ValueError, match="got no answer"):
        heartbeat.connect(1, False, timeout_s)
    assert clock[0] - before == (610 if timeout_s > 10 else 10)


@pytest.mark.parametrize(
    ("error", "why"),
    [("bind: EADDRINUSE here", "another process has it"), ("Permission denied\nstack", "Permission denied")],
)
def test_the_rank_that_keeps_the_store_calls_once(
    port: int, monkeypatch: pytest.MonkeyPatch, error: str, why: str
) -> None:
    monkeypatch.setattr(heartbeat, "TCPStore", Calls([error], [0.0]))
    with pytest.raises(ValueError) as caught:
        heartbeat.connect(0, True, 600)
    assert str(caught.value) == (
        f"the rendezvous at port {port} of 127.0.0.1 failed: {why}. Set another MASTER_PORT for all ranks."
    )
