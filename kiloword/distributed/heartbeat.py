"""Heartbeats: ranks report that they are alive, where they are, and why one has ended.

They find each other in a store (`connect`), and none may join twice (`claim`).

Every rank writes a heartbeat each second into the store of the rendezvous. So the error of a collective that breaks or
times out can name the rank at fault, and the error message of one rank that failed ends all of them.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from kiloword.distributed import launch
from kiloword.distributed.diagnosis import SILENT_S, End, diagnose, is_broken, within
from kiloword.errors import sentence_of
from kiloword.terminal import warn

BEAT_S = 1.0  # seconds between heartbeats
LEAVE_S = 15.0  # seconds at most for a rank to leave by itself after another one has ended


class RanksEnded(ValueError):
    """The run ended on all ranks. `code`: exit status; `quiet`: another rank prints the message."""

    def __init__(self, message: str, code: int, quiet: bool) -> None:
        super().__init__(message)
        self.code, self.quiet = code, quiet


class Peers:
    """One rank's heartbeat and its view of the other ranks.

    One thread writes the heartbeat and listens for an end; another thread ends the process when the main thread cannot,
    because it waits in a collective or in the store.

    Args: timeout_s: how long a rank waits for another one.
    """

    def __init__(self, timeout_s: float) -> None:
        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.timeout_s = timeout_s
        self.abrupt = False  # collectives do not fail by themselves (NCCL)
        self._at, self._since = "at its start", time.monotonic()
        self._end: End | None = None
        self._leaving, self._left = threading.Event(), threading.Event()
        self._saying, self._said = threading.Lock(), False
        self._deadline, self._answered = math.inf, time.monotonic()
        self._hosts = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self._root = connect(self.rank, self._hosts, timeout_s)
        attempt = f"{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self.group_store = PrefixStore(f"kiloword/{attempt}/group", self._root)
        clones = [self._root.clone() for _ in range(2)]  # type: ignore[attr-defined]  # one per thread
        self._store, self._mine = (PrefixStore(f"kiloword/{attempt}", clone) for clone in clones)
        claim(self._mine, self.rank)
        self._threads = [threading.Thread(target=work, name="peers", daemon=True) for work in (self._live, self._watch)]
        for thread in self._threads:
            thread.start()

    @property
    def _patience(self) -> float:
        return min(LEAVE_S, max(self.timeout_s, SILENT_S))

    def at(self, where: str) -> None:
        """Set where this rank is, in words that fit after "it has been"."""
        self._at, self._since = where, time.monotonic()

    def gather(self, timeout_s: float) -> None:
        """Wait until every rank has joined. Raises: ValueError naming the ranks that have not."""
        self.timeout_s = timeout_s
        end = time.monotonic() + timeout_s
        while missing := [r for r in range(self.ranks) if not self._mine.check([f"beat/{r}"])]:
            if self._end is not None:
                raise dist.DistError(str(self._end))
            if time.monotonic() > end:
                named = ("rank " if len(missing) == 1 else "ranks ") + ", ".join(map(str, missing))
                raise ValueError(f"{named} of {self.ranks} did not join within {timeout_s:.0f} s.")
            time.sleep(0.05)

    def wait(self, where: str) -> None:
        """Wait until every rank has reached the place, without timeout. Raises: DistError when one ended before."""
        self._mine.set(f"{where}/{self.rank}", "")
        while not self._mine.check([f"{where}/{rank}" for rank in range(self.ranks)]):
            if self._end is not None:
                raise dist.DistError(str(self._end))
            time.sleep(BEAT_S / 4)

    def leave(self) -> None:
        """Leave at the end of a successful run. Rank 0 leaves last where it hosts the store."""
        self._leaving.set()
        self._deadline = time.monotonic() + self.timeout_s + LEAVE_S
        with suppress(RuntimeError):
            self._mine.add("left", 1)
            come = sum(self._mine.check([f"beat/{r}"]) for r in range(self.ranks))
            while self._hosts and self._mine.add("left", 0) < come and not self._mine.check(["end"]):
                time.sleep(0.02)

    def over(self) -> None:
        """End the threads: a thread inside the store at the interpreter's exit would abort the process."""
        self._leaving.set()
        self._left.set()
        for thread in self._threads:
            thread.join(SILENT_S)

    def interrupted(self) -> None:
        """Leave after Ctrl-C or a refused command line, so that no rank waits for this one."""
        self._leaving.set()
        self._deadline = time.monotonic() + LEAVE_S
        with suppress(RuntimeError):
            self._tell(End(self.rank, "interrupted", self.rank))

    def ended(self, error: BaseException) -> BaseException:
        """The error this rank ends with: its own, reported to all, or the one that another rank reported first."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it when another rank is gone
        if isinstance(error, RanksEnded):
            return error
        self._deadline = min(self._deadline, time.monotonic() + 2 * LEAVE_S)
        message, heard = sentence_of(error), False
        broken = message is None and is_broken(error)
        with suppress(RuntimeError):
            if not broken:
                code = int(getattr(error, "code", 2))
                self._tell(End(self.rank, message or f"{type(error).__name__}: {error}", self.rank, code))
            elif within(BEAT_S, lambda: self._mine.check(["end"])):  # reported at about the time connections close
                self._end = self._read(self._mine)
            elif self._end is None:
                self._tell(self._diagnose(error, self._mine))
            heard = self._heard()
        self._leaving.set()
        if not broken and message is None:
            return error  # a bug: keep its traceback
        end = self._end or self._lost()
        if self.rank == 0 and end.by:
            self._say(end)
        quiet = self._said or (self.rank > 0 and (heard or end.by != self.rank))
        keep_own = message is not None and self.rank == 0 and end.by == 0
        return RanksEnded(message if keep_own and message else str(end), end.code, quiet)

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
                self._answered = time.monotonic()
                stuck = self.abrupt and self._at.startswith("in step")
                if stuck and time.monotonic() - self._since > self.timeout_s:
                    self._tell(self._diagnose(TimeoutError(), self._store), self._store)
                self._leaving.wait(BEAT_S)
        except RuntimeError:  # the store is gone, or the process exits
            if not self._leaving.is_set():
                self._end, self._deadline = self._end or self._lost(), time.monotonic() + self._patience

    def _watch(self) -> None:
        while not self._left.wait(BEAT_S):
            now = time.monotonic()
            mute = (
                self._end is None
                and not self._leaving.is_set()
                and now - self._answered > self.timeout_s + self._patience
            )
            if mute or now > self._deadline:
                self._exit()

    def _hear(self) -> None:
        """A rank has ended: the main thread leaves by itself, or is ended after the deadline."""
        self._end = self._read(self._store)
        self._deadline = min(self._deadline, time.monotonic() + self._patience)
        if self.rank == 0 and self._end.by:
            self._say(self._end)
        self._store.set(f"heard/{self.rank}", "")

    def _exit(self) -> None:
        """End the process without the main thread."""
        end = self._end or self._lost()
        if self.rank in (0, end.by):
            self._say(end)
        os._exit(end.code)

    def _say(self, end: End) -> None:
        """Print the message once and at once: torchrun ends this rank as soon as another one is gone."""
        with self._saying:
            if not self._said:
                warn(f"kiloword: {end}")
                launch.explain(str(end))
            self._said = True

    def _lost(self) -> End:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        message = f"no answer from {where}, the rendezvous of the ranks: rank 0 or its torchrun was killed, or hangs."
        return End(-1, message, by=1)

    def _tell(self, end: End, store: PrefixStore | None = None) -> None:
        """Report an end; only the first report counts."""
        store = store or self._mine
        store.compare_set("end", "", json.dumps(asdict(end)))
        self._end = self._read(store)

    def _read(self, store: PrefixStore) -> End:
        return End(**json.loads(store.get("end")))

    def _diagnose(self, error: BaseException, store: PrefixStore) -> End:
        return diagnose(store, self.rank, self.ranks, self._at, error)

    def _heard(self) -> bool:
        """Whether rank 0 has read the end; the host of the store waits for all ranks, for at most SILENT_S."""
        wanted = [f"heard/{r}" for r in range(self.ranks) if r != self.rank] if self._hosts else ["heard/0"]
        self._mine.set(f"heard/{self.rank}", "")
        return within(SILENT_S, lambda: self._mine.check(wanted))


_current: Peers | None = None


def at(where: str) -> None:
    """Set where this rank is, for messages of ranks that wait for it."""
    if _current is not None:
        _current.at(where)


def wait(where: str) -> None:
    """Wait until every rank is here, without timeout. Raises: DistError when one ended before."""
    if _current is not None:
        _current.at(where)
        _current.wait(where)


@contextmanager
def monitored(timeout_s: float = 600) -> Iterator[Peers | None]:
    """Rendezvous of the ranks that torchrun or SLURM announced, and heartbeats inside; None with a single rank.

    An error inside ends all ranks: a ValueError of a rank with its message, a broken collective with the name of the
    rank at fault. Raises: RanksEnded, or the error itself when it is a bug.
    """
    global _current
    if _current is not None or launch.adopt() == 1:
        yield _current
        return
    peers = _current = Peers(timeout_s)
    try:
        yield peers
        peers.leave()
    except (SystemExit, KeyboardInterrupt) as e:
        peers.leave() if getattr(e, "code", 1) in (0, None) else peers.interrupted()
        raise
    except Exception as e:
        raise peers.ended(e) from e
    finally:
        peers.over()
        _current = None


CALL_S = 10.0  # seconds between checks that torchrun still runs, while the store does not answer


def connect(rank: int, hosts: bool, timeout_s: float) -> TCPStore:
    """Connect to the store at MASTER_ADDR and MASTER_PORT.

    Args: hosts: this rank hosts the store, not torchrun; timeout_s: limit for connecting, and then for its answers.
    Raises: ValueError when there is no store, or when the torchrun of this rank was killed: a new torchrun has its own
    ranks at the same address.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    call, end = timedelta(seconds=min(CALL_S, timeout_s)), time.monotonic() + timeout_s
    while True:
        try:
            store = TCPStore(host, port, None, hosts, call, wait_for_workers=False)
        except RuntimeError as e:
            store, error = None, str(e)
        if launch.orphaned():
            raise ValueError(f"torchrun was killed before rank {rank} had joined the others.")
        if store is not None:
            store.set_timeout(timedelta(seconds=timeout_s))
            return store
        if hosts:
            why = "another process has it" if "EADDRINUSE" in error else error.splitlines()[0]
            raise ValueError(
                f"the rendezvous at port {port} of {host} failed: {why}. Set another MASTER_PORT for all ranks."
            )
        if time.monotonic() > end:
            raise ValueError(
                f"rank {rank} got no answer from {host}:{port}: rank 0 has not started, or a firewall blocks the port."
            )


def claim(store: PrefixStore, rank: int) -> None:
    """Claim this rank. Raises: ValueError when another process has it: each would get half of the messages."""
    me = f"process {os.getpid()} on {socket.gethostname()}"
    holder = store.compare_set(f"is/{rank}", "", me).decode()
    if holder != me:
        raise ValueError(f"{holder} is rank {rank} already, perhaps of a torchrun that was killed: start again.")
