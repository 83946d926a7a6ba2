"""What signals ask of a run, and where they end it at once."""

from __future__ import annotations

import signal

import pytest

from kiloword.training.signals import ENDING, Stop, Stopped, stop_signals


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)


def test_a_second_ctrl_c_ends_at_once_except_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun repeats each Ctrl-C of the terminal: this must not cut the saving. The first signal gives the code."""
    stop = Stop()
    assert (stop(), stop.stopped("why").code) == (False, 2)
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        stop.handle(number, None)
    assert (stop(), stop.stopped("why").code) == (True, 128 + signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        stop.handle(signal.SIGINT, None)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    stop.handle(signal.SIGINT, None)


def test_a_signal_ends_what_needs_no_saving_where_it_stands() -> None:
    stop, reached = Stop(), list[str]()

    def work() -> None:
        with stop.at_once("nothing to save."):
            try:
                stop.handle(signal.SIGTERM, None)
            except Exception:  # as code of sources and methods does
                reached.append("caught")
            reached.append("after")

    with pytest.raises(Stopped, match=r"^nothing to save\.$") as end:
        work()
    assert end.value.code == 143
    with pytest.raises(Stopped), stop.at_once("not begun."):
        reached.append("inside")
    assert reached == []
    other = Stop()
    with pytest.raises(KeyError), other.at_once("no signal came."):
        raise KeyError
    other.handle(signal.SIGTERM, None)  # behind it a signal waits for the end of the step


def test_signals_are_handled_and_left_as_they_were() -> None:
    before = {s: signal.getsignal(s) for s in (*ENDING, signal.SIGUSR1)}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a shell's background job, which still is stopped by SIGINT
        with stop_signals() as stop:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
                signal.raise_signal(number)
            assert stop.asked == [signal.SIGINT, signal.SIGTERM]
            assert stop.state_asked()
        assert signal.getsignal(signal.SIGINT) == signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) == before[signal.SIGTERM]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
