"""What ranks tell each other beside their collectives: that they live, where they stand, and why one has ended.

Every rank writes a sign of life each second into the store by which the ranks have met. So a collective that breaks or
takes too long can name the rank that is at fault, and the sentence of a rank that failed alone ends all.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from kiloword import launch
from kiloword.sentences import sentence_of

BEAT_S = 1.0  # between signs of life
SILENT_S = 4.0  # without one: the process is gone or stopped
GONE = "it is gone, and with it the store by which the ranks met"
LEAVE_S = 15.0  # that a rank has for leaving by itself when another one has ended
BROKEN = (
    "gloo",
    "NCCL",
    "Connection closed by peer",
    "Connection reset",
    "Timed out waiting",
    "wait timeout",
    "Broken pipe",
)


class RanksEnded(ValueError):
    """The run ended on all ranks. `code`: for the shell; `quiet`: rank 0 says it."""

    def __init__(self, sentence: str, code: int, quiet: bool) -> None:
        super().__init__(sentence)
        self.code, self.quiet = code, quiet


@dataclass(frozen=True)
class _End:
    rank: int  # that ended first
    sentence: str
    by: int  # rank that tells it
    code: int = 2


class Peers:
    """One rank's side. A thread gives the signs of life and listens for an end; all else is called by the main thread.

    Args: timeout_s: a rank waits so long for another one.
    """

    def __init__(self, timeout_s: float) -> None:
        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.timeout_s = timeout_s
        self.abrupt = False  # collectives do not break by themselves (NCCL): this thread ends the process
        self._at, self._since = "at its start", time.monotonic()
        self._end: _End | None = None
        self._leaving = threading.Event()
        self._root = self._meet()
        attempt = f"{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self.group_store = PrefixStore(f"kiloword/{attempt}/group", self._root)
        self._store, self._mine = (PrefixStore(f"kiloword/{attempt}", self._root.clone()) for _ in range(2))  # type: ignore[attr-defined]
        self._thread = threading.Thread(target=self._live, name="peers", daemon=True)
        self._thread.start()

    def _meet(self) -> TCPStore:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._hosts = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        patience = timedelta(seconds=self.timeout_s)
        try:
            return TCPStore(host, port, None, self._hosts, patience, wait_for_workers=False)
        except (dist.DistError, RuntimeError) as e:
            if self._hosts:
                taken = "it is taken" if "EADDRINUSE" in str(e) else str(e).splitlines()[0]
                raise ValueError(
                    f"the ranks cannot meet at port {port} of {host}: {taken}. Set MASTER_PORT to another port, the "
                    "same for all ranks."
                ) from None
            raise ValueError(
                f"rank {self.rank} found nobody at {host}:{port} within {self.timeout_s:.0f} s: rank 0 has not come, "
                "or a firewall lies between."
            ) from None

    def at(self, where: str) -> None:
        """Say where this rank stands, in words that fit behind "rank 3 is"."""
        self._at, self._since = where, time.monotonic()

    def gather(self, timeout_s: float) -> None:
        """Wait until every rank has come. Raises: ValueError that names those who have not."""
        self.timeout_s = timeout_s
        end = time.monotonic() + timeout_s
        names = {r: f"beat/{r}" for r in range(self.ranks)}
        while missing := [r for r, name in names.items() if not self._mine.check([name])]:
            self._heed()
            if time.monotonic() > end:
                raise ValueError(f"{_named(missing)} of {self.ranks} did not come within {self.timeout_s:.0f} s.")
            time.sleep(0.05)

    def leave(self) -> None:
        """At the end of a run that went well. Rank 0 goes last where it is the one who keeps the store."""
        self._leaving.set()
        with suppress(RuntimeError):
            self._mine.add("left", 1)
            end = time.monotonic() + self.timeout_s
            come = sum(self._mine.check([f"beat/{r}"]) for r in range(self.ranks))
            while self._hosts and self._mine.add("left", 0) < come and time.monotonic() < end and self._end is None:
                time.sleep(0.02)
        self._thread.join(LEAVE_S)

    def ended(self, error: BaseException) -> BaseException:
        """What this rank ends with: its own error, told to all, or the one that another rank told first."""
        if isinstance(error, RanksEnded):
            return error
        said = sentence_of(error)
        broken = said is None and _is_broken(error)
        with suppress(RuntimeError):
            if broken and self._end is None:
                self._await_end()
            if self._end is None or not broken:
                self._tell(self._diagnosis(error) if broken else _of(self.rank, error))
        self._leaving.set()
        heard = self._wait_for_listeners()
        end = self._end
        if end is None:  # the store is gone, and rank 0 or torchrun with it
            end = _End(0, GONE, by=1)
        if not broken and said is None:
            return error  # a bug: its traceback is wanted
        quiet = self.rank > 0 and (heard or end.by != self.rank)
        if said is not None and (self.rank == 0 or end.rank == self.rank):
            return RanksEnded(said if self.rank == 0 else _sentence(end), getattr(error, "code", 2), quiet)
        return RanksEnded(_sentence(end), end.code, quiet)

    def interrupted(self) -> None:
        """Ctrl-C, or the command line refused its words: no one need wait for this rank."""
        with suppress(RuntimeError):
            self._tell(_End(self.rank, "interrupted", self.rank))
        self._leaving.set()

    def _live(self) -> None:
        beats = 0
        try:
            while not self._leaving.is_set():
                beats += 1
                about = {"beat": beats, "at": self._at, "for": time.monotonic() - self._since}
                self._store.set(f"beat/{self.rank}", json.dumps(about))
                if self._store.check(["end"]):
                    self._hear()
                    return
                if self.abrupt and time.monotonic() - self._since > self.timeout_s and self._at.startswith("in step"):
                    self._tell(self._diagnosis(TimeoutError()), self._store)
                self._leaving.wait(BEAT_S)
        except RuntimeError:  # the store is gone
            if not self._leaving.wait(LEAVE_S):
                self._end = self._end or _End(0, GONE, by=1)
                self._exit()

    def _hear(self) -> None:
        """Another rank has ended, or this one: the main thread leaves by itself, or is made to."""
        self._end = _End(**json.loads(self._store.get("end")))
        self._store.set(f"heard/{self.rank}", "")
        if not self._leaving.wait(LEAVE_S):
            self._exit()

    def _exit(self) -> None:
        """Without the main thread, which waits in a collective that will never come."""
        assert self._end is not None
        if self.rank in (0, self._end.by):
            print(f"kiloword: {_sentence(self._end)}", file=sys.stderr, flush=True)
        os._exit(self._end.code)

    def _tell(self, end: _End, store: Store | None = None) -> None:
        """The first one who tells is the one whose sentence counts."""
        found = (store or self._mine).compare_set("end", "", json.dumps(asdict(end)))
        self._end = _End(**json.loads(found))

    def _heed(self) -> None:
        if self._end is not None:
            raise RuntimeError("the store says that another rank has ended")

    def _await_end(self) -> None:
        """A rank that failed tells why before its connections close, or at about the same time."""
        for _ in range(20):
            if self._mine.check(["end"]):
                self._end = _End(**json.loads(self._mine.get("end")))
                return
            time.sleep(0.05)

    def _wait_for_listeners(self) -> bool:
        """Whether rank 0 knows; who keeps the store stays until all do."""
        wanted = [f"heard/{r}" for r in range(self.ranks) if r != self.rank] if self._hosts else ["heard/0"]
        end = time.monotonic() + SILENT_S
        with suppress(RuntimeError):
            self._mine.set(f"heard/{self.rank}", "")
            while time.monotonic() < end:
                if self._mine.check(wanted):
                    return True
                time.sleep(0.05)
        return False

    def _diagnosis(self, error: BaseException) -> _End:
        """Who is at fault when a collective broke: a rank that gives no sign of life, or stands elsewhere."""
        before = self._beats()
        time.sleep(SILENT_S)
        after = self._beats()
        others = [r for r in range(self.ranks) if r != self.rank]
        silent = [r for r in others if before.get(r, {}).get("beat") == after.get(r, {}).get("beat")]
        if self._mine.check(["end"]):
            return _End(**json.loads(self._mine.get("end")))
        if silent:
            where = before.get(silent[0], {}).get("at", "at its start")
            return _End(
                silent[0],
                f"no sign of life; it was last {where}. It was killed, or its machine stands still",
                self.rank,
            )
        elsewhere = [r for r in others if after[r]["at"] != self._at]
        if elsewhere:
            slow = max(elsewhere, key=lambda r: float(str(after[r]["for"])))
            about = after[slow]
            return _End(
                slow, f"it has been {about['at']} for {about['for']:.0f} s; the others wait no longer", self.rank
            )
        said = str(error).splitlines()[0] if str(error) else "no answer"
        return _End(self.rank, f"the connection to another rank broke, though all live: {said[:200]}", self.rank)

    def _beats(self) -> dict[int, dict[str, object]]:
        names = {r: f"beat/{r}" for r in range(self.ranks)}
        return {r: json.loads(self._mine.get(name)) for r, name in names.items() if self._mine.check([name])}


_current: Peers | None = None


def current() -> Peers | None:
    return _current


def at(where: str) -> None:
    """Say where this rank stands, should another wait for it in vain."""
    if _current is not None:
        _current.at(where)


@contextmanager
def met(timeout_s: float = 600) -> Iterator[Peers | None]:
    """The ranks have met, as torchrun or SLURM announced them; None with a single one.

    An error inside ends all of them: a rank's own ValueError with its sentence, a collective that broke with the name
    of the rank at fault. Raises: RanksEnded, or the error when it is a bug.
    """
    global _current
    if _current is not None or launch.adopt() == 1:
        yield _current
        return
    peers = _current = Peers(timeout_s)
    try:
        yield peers
    except (SystemExit, KeyboardInterrupt):
        peers.interrupted()
        raise
    except Exception as e:
        raise peers.ended(e) from e
    else:
        peers.leave()
    finally:
        _current = None


def _of(rank: int, error: BaseException) -> _End:
    said = sentence_of(error) or f"{type(error).__name__}: {error}"
    return _End(rank, said, rank, getattr(error, "code", 2))


def _is_broken(error: BaseException) -> bool:
    """A collective that came to no end, because of another rank or of what lies between."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in BROKEN)


def _sentence(end: _End) -> str:
    return f"rank {end.rank}: {end.sentence}"


def _named(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
