"""What ranks tell each other beside their collectives: that they live, where they stand, and why one has ended.

They find each other in a store (`meet`), where none of them may be there twice (`claim`).

Every rank writes a sign of life each second into the store by which the ranks have met. So a collective that breaks or
takes too long can name the rank that is at fault, and the sentence of a rank that failed alone ends all.
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
from kiloword.distributed.diagnosis import SILENT_S, End, blame, is_broken, within
from kiloword.errors import sentence_of
from kiloword.terminal import warn

BEAT_S = 1.0  # between signs of life
LEAVE_S = 15.0  # at most, that a rank has for leaving by itself when another one has ended


class RanksEnded(ValueError):
    """The run ended on all ranks. `code`: for the shell; `quiet`: another rank says it."""

    def __init__(self, sentence: str, code: int, quiet: bool) -> None:
        super().__init__(sentence)
        self.code, self.quiet = code, quiet


class Peers:
    """One rank's side. One thread gives the signs of life and listens for an end, another one ends the process when
    the main thread cannot: it may wait for ever in a collective, or in the store.

    Args: timeout_s: a rank waits so long for another one.
    """

    def __init__(self, timeout_s: float) -> None:
        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.timeout_s = timeout_s
        self.abrupt = False  # collectives do not break by themselves (NCCL)
        self._at, self._since = "at its start", time.monotonic()
        self._end: End | None = None
        self._leaving, self._left = threading.Event(), threading.Event()
        self._saying, self._said = threading.Lock(), False
        self._deadline, self._answered = math.inf, time.monotonic()
        self._hosts = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self._root = meet(self.rank, self._hosts, timeout_s)
        attempt = f"{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self.group_store = PrefixStore(f"kiloword/{attempt}/group", self._root)
        clones = [self._root.clone() for _ in range(2)]  # type: ignore[attr-defined]  # one a thread
        self._store, self._mine = (PrefixStore(f"kiloword/{attempt}", clone) for clone in clones)
        claim(self._mine, self.rank)
        self._threads = [threading.Thread(target=work, name="peers", daemon=True) for work in (self._live, self._watch)]
        for thread in self._threads:
            thread.start()

    @property
    def _patience(self) -> float:
        return min(LEAVE_S, max(self.timeout_s, SILENT_S))

    def at(self, where: str) -> None:
        """Say where this rank stands, in words that fit behind "it has been"."""
        self._at, self._since = where, time.monotonic()

    def gather(self, timeout_s: float) -> None:
        """Wait until every rank has come. Raises: ValueError that names those who have not."""
        self.timeout_s = timeout_s
        end = time.monotonic() + timeout_s
        while missing := [r for r in range(self.ranks) if not self._mine.check([f"beat/{r}"])]:
            if self._end is not None:
                raise dist.DistError(str(self._end))
            if time.monotonic() > end:
                named = ("rank " if len(missing) == 1 else "ranks ") + ", ".join(map(str, missing))
                raise ValueError(f"{named} of {self.ranks} did not come within {timeout_s:.0f} s.")
            time.sleep(0.05)

    def wait(self, where: str) -> None:
        """Until every rank has come to the place, however long it takes. Raises: DistError when one ended before."""
        self._mine.set(f"{where}/{self.rank}", "")
        while not self._mine.check([f"{where}/{rank}" for rank in range(self.ranks)]):
            if self._end is not None:
                raise dist.DistError(str(self._end))
            time.sleep(BEAT_S / 4)

    def leave(self) -> None:
        """At the end of a run that went well. Rank 0 goes last where it keeps the store."""
        self._leaving.set()
        self._deadline = time.monotonic() + self.timeout_s + LEAVE_S
        with suppress(RuntimeError):
            self._mine.add("left", 1)
            come = sum(self._mine.check([f"beat/{r}"]) for r in range(self.ranks))
            while self._hosts and self._mine.add("left", 0) < come and not self._mine.check(["end"]):
                time.sleep(0.02)

    def over(self) -> None:
        """The threads end: one that Python's end meets inside the store would abort the process."""
        self._leaving.set()
        self._left.set()
        for thread in self._threads:
            thread.join(SILENT_S)

    def interrupted(self) -> None:
        """Ctrl-C, or the command line refused its words: no one need wait for this rank."""
        self._leaving.set()
        self._deadline = time.monotonic() + LEAVE_S
        with suppress(RuntimeError):
            self._tell(End(self.rank, "interrupted", self.rank))

    def ended(self, error: BaseException) -> BaseException:
        """What this rank ends with: its own error, told to all, or the one that another rank told first."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, as soon as another rank is gone: this one ends
        if isinstance(error, RanksEnded):
            return error
        self._deadline = min(self._deadline, time.monotonic() + 2 * LEAVE_S)
        said, heard = sentence_of(error), False
        broken = said is None and is_broken(error)
        with suppress(RuntimeError):
            if not broken:
                self._tell(End(self.rank, said or f"{type(error).__name__}: {error}", self.rank, _code(error)))
            elif not self._someone_told():
                self._tell(self._blame(error, self._mine))
            heard = self._heard()
        self._leaving.set()
        if not broken and said is None:
            return error  # a bug: its traceback is wanted
        end = self._end or self._lost()
        if self.rank == 0 and end.by:
            self._say(end)
        quiet = self._said or (self.rank > 0 and (heard or end.by != self.rank))
        own = said is not None and self.rank == 0 and end.by == 0
        return RanksEnded(said if own and said else str(end), end.code, quiet)

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
                    self._tell(self._blame(TimeoutError(), self._store), self._store)
                self._leaving.wait(BEAT_S)
        except RuntimeError:  # the store is gone, or the process leaves
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
        """Another rank has ended, or this one: the main thread leaves by itself, or is made to."""
        self._end = self._read(self._store)
        self._deadline = min(self._deadline, time.monotonic() + self._patience)
        if self.rank == 0 and self._end.by:
            self._say(self._end)
        self._store.set(f"heard/{self.rank}", "")

    def _exit(self) -> None:
        """Without the main thread."""
        end = self._end or self._lost()
        if self.rank in (0, end.by):
            self._say(end)
        os._exit(end.code)

    def _say(self, end: End) -> None:
        """Once, and at once: torchrun ends this rank as soon as another one is gone."""
        with self._saying:
            if not self._said:
                warn(f"kiloword: {end}")
                launch.explain(str(end))
            self._said = True

    def _lost(self) -> End:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        said = f"nothing answers at {where}, where the ranks met: rank 0 or its torchrun was killed, or stands still."
        return End(-1, said, by=1)

    def _tell(self, end: End, store: PrefixStore | None = None) -> None:
        """The first one who tells is the one whose sentence counts."""
        store = store or self._mine
        store.compare_set("end", "", json.dumps(asdict(end)))
        self._end = self._read(store)

    def _read(self, store: PrefixStore) -> End:
        return End(**json.loads(store.get("end")))

    def _someone_told(self) -> bool:
        """A rank that failed tells why before its connections close, or at about the same time."""
        if within(BEAT_S, lambda: self._mine.check(["end"])):
            self._end = self._read(self._mine)
        return self._end is not None

    def _blame(self, error: BaseException, store: PrefixStore) -> End:
        return blame(store, self.rank, self.ranks, self._at, error)

    def _heard(self) -> bool:
        """Whether rank 0 knows; who keeps the store stays until all do, or a while."""
        wanted = [f"heard/{r}" for r in range(self.ranks) if r != self.rank] if self._hosts else ["heard/0"]
        self._mine.set(f"heard/{self.rank}", "")
        return within(SILENT_S, lambda: self._mine.check(wanted))


_current: Peers | None = None


def at(where: str) -> None:
    """Say where this rank stands, should another wait for it in vain."""
    if _current is not None:
        _current.at(where)


def wait(where: str) -> None:
    """Until every rank has come here, however long it takes. Raises: DistError when one ended before."""
    if _current is not None:
        _current.at(where)
        _current.wait(where)


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
        peers.leave()
    except (SystemExit, KeyboardInterrupt) as e:
        peers.leave() if getattr(e, "code", 1) in (0, None) else peers.interrupted()
        raise
    except Exception as e:
        raise peers.ended(e) from e
    finally:
        peers.over()
        _current = None


def _code(error: BaseException) -> int:
    return int(getattr(error, "code", 2))


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
