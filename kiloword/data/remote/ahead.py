"""Remote data fetched before it is needed: the order of rows is known, so the loader need not wait for the network."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from kiloword.data.remote.config import remote_config
from kiloword.data.remote.errors import Unreachable
from kiloword.data.remote.file import Piece
from kiloword.data.sources.mixture import MixtureSource
from kiloword.types import Source

_SHARE = 0.5  # of the cache that may be filled ahead: the rest is in use now


def ahead_of(
    source: Source, rows_of: Callable[[int], tuple[Source, Iterable[int]]], batch: int, stop: int | None = None
) -> Ahead | None:
    """For a source that is remote, or has a part that is. Args: see `Ahead`; batch: rows a step."""
    parts = source.sources if isinstance(source, MixtureSource) else [source]
    if not any(getattr(part, "remote", False) for part in parts):
        return None
    return Ahead(rows_of, -(-remote_config().ahead // batch), stop)


def _pieces(source: Source, row: int) -> Iterable[Piece]:
    """What a row needs from the network."""
    while isinstance(source, MixtureSource):
        source, row = source.locate(row)
    find: Callable[[int], Iterable[Piece]] | None = getattr(source, "pieces", None)
    return () if find is None else find(row)


@dataclass
class Ahead:
    """Fetches what the next steps need, in threads of this process.

    Failures are nobody's here: who needs a piece fetches it itself, and says why that does not work.
    Args: rows_of: the rows of a step; most: steps to look ahead; stop: the step before which reading ends.
    """

    rows_of: Callable[[int], tuple[Source, Iterable[int]]]
    most: int
    stop: int | None = None
    _waited: dict[Piece, int] = field(default_factory=dict)  # piece -> the last step that needs it
    _next: int = 0
    _owner: int = 0
    _queue: queue.SimpleQueue[Piece] = field(default_factory=queue.SimpleQueue)

    def at(self, step: int) -> None:
        """Ask for what this step and those after it need. In any process: behind a fork there are no threads yet."""
        if not self.most:
            return
        if self._owner != os.getpid():
            self._start()
        self._waited = {piece: last for piece, last in self._waited.items() if last >= step}
        self._next = max(self._next, step)
        while self._next <= step + self.most and self._next != self.stop and self._has_room():
            source, rows = self.rows_of(self._next)
            for row in rows:
                for piece in _pieces(source, row):
                    if piece not in self._waited:
                        self._queue.put(piece)
                    self._waited[piece] = self._next
            self._next += 1

    def __getstate__(self) -> dict[str, Any]:
        return {"rows_of": self.rows_of, "most": self.most, "stop": self.stop}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def _has_room(self) -> bool:
        some = next(iter(self._waited), None)
        return some is None or len(self._waited) * some[0].piece < _SHARE * some[0].config.limit

    def _start(self) -> None:
        self._owner, self._next, self._waited, self._queue = os.getpid(), 0, {}, queue.SimpleQueue()
        for _ in range(int(remote_config().threads)):
            threading.Thread(target=_work, args=(self._queue,), daemon=True).start()


def _work(pieces: queue.SimpleQueue[Piece]) -> None:
    while True:
        tar, n = pieces.get()
        try:
            tar.fetch(n)
        except Unreachable:
            continue
