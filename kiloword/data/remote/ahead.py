"""Fetches remote blocks before they are needed: the order of rows is known, so the loader need not wait for them."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from kiloword.data.edits import MixtureSource
from kiloword.data.remote.config import remote_config
from kiloword.data.remote.errors import Unreachable
from kiloword.data.remote.file import RemoteBlock
from kiloword.types import Source

_SHARE = 0.5  # of the cache that may be filled ahead: the rest is in use now


def ahead_of(
    source: Source, rows_of: Callable[[int], tuple[Source, Iterable[int]]], batch: int, stop: int | None = None
) -> Ahead | None:
    """For a source of which at least a part is remote, else None. Args: see `Ahead`; batch: rows per step."""
    parts = source.sources if isinstance(source, MixtureSource) else [source]
    if not any(getattr(part, "remote", False) for part in parts):
        return None
    return Ahead(rows_of, -(-remote_config().ahead // batch), stop)


def _blocks_of(source: Source, row: int) -> Iterable[RemoteBlock]:
    while isinstance(source, MixtureSource):
        source, row = source.locate(row)
    find: Callable[[int], Iterable[RemoteBlock]] | None = getattr(source, "remote_blocks", None)
    return () if find is None else find(row)


@dataclass
class Ahead:
    """Fetches the blocks of the next steps, in threads of this process.

    Its failures are ignored: the reader of a block fetches it again and reports the error.
    Args: rows_of: the rows of a step; most: steps to look ahead; stop: the step before which reading ends.
    """

    rows_of: Callable[[int], tuple[Source, Iterable[int]]]
    most: int
    stop: int | None = None
    _waited: dict[RemoteBlock, int] = field(default_factory=dict)  # block -> the last step that needs it
    _next: int = 0
    _owner: int = 0
    _queue: queue.SimpleQueue[RemoteBlock] = field(default_factory=queue.SimpleQueue)

    def at(self, step: int) -> None:
        """Request the blocks of this step and the next ones. Works in any process: a fork copies no threads."""
        if not self.most:
            return
        if self._owner != os.getpid():
            self._start()
        self._waited = {block: last for block, last in self._waited.items() if last >= step}
        self._next = max(self._next, step)
        while self._next <= step + self.most and self._next != self.stop and self._has_room():
            source, rows = self.rows_of(self._next)
            for row in rows:
                for block in _blocks_of(source, row):
                    if block not in self._waited:
                        self._queue.put(block)
                    self._waited[block] = self._next
            self._next += 1

    def __getstate__(self) -> dict[str, Any]:
        return {"rows_of": self.rows_of, "most": self.most, "stop": self.stop}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def _has_room(self) -> bool:
        if not self._waited:
            return True
        file, _ = next(iter(self._waited))
        return len(self._waited) * file.block_size < _SHARE * file.config.limit

    def _start(self) -> None:
        self.__setstate__(self.__getstate__())
        self._owner = os.getpid()
        for _ in range(int(remote_config().threads)):
            threading.Thread(target=_work, args=(self._queue,), daemon=True).start()


def _work(blocks: queue.SimpleQueue[RemoteBlock]) -> None:
    while True:
        file, n = blocks.get()
        try:
            file.fetch(n)
        except Unreachable:
            continue
