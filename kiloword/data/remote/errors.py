"""Errors of remote files: a Fault is retried; Unreachable is raised when retries did not help or cannot."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from kiloword.addresses import Address, scrubbed
from kiloword.data.remote.config import RemoteConfig
from kiloword.randomness import key
from kiloword.terminal import shown

_LONGEST = 60.0  # seconds between attempts, unless the server asks for more
_ASKED = 120.0  # seconds that a server can ask for; evaluation waits 300 for a batch, training --timeout
_LONG = 300  # characters
PROGRESS = 1 << 16  # bytes after which an attempt counts as progress
T = TypeVar("T")


class Unreachable(ValueError):
    """Remote data that cannot be read: it makes no sample bad, but ends the run."""


class TooLarge(Unreachable):
    """A file that should be small is not."""


class Fault(Exception):
    """An error that may pass. Args: what: happened; wait: seconds that the server asks for."""

    def __init__(self, what: str, wait: float = 0.0) -> None:
        super().__init__(foreign(what))
        self.wait = wait


@dataclass
class Patience:
    """Waits between attempts at one operation, and gives up after the last."""

    address: Address
    config: RemoteConfig
    tried: int = field(default=0, init=False)

    def again(self, fault: Fault) -> None:
        """Wait before another attempt: exponentially longer, and not at the same time as other processes.

        Raises: Unreachable after the last one.
        """
        self.tried += 1
        if self.tried > self.config.retries:
            times = "once" if self.tried == 1 else f"{self.tried} times"
            raise Unreachable(
                f"{self.address}: {fault} (tried {times}). Check the network and the server, then start the same "
                "command again. More patience: KILOWORD_REMOTE='retries=8 timeout=60'."
            )
        share = 0.5 + key(self.address.url, self.tried, os.getpid()) / 2**64
        wait = min(self.config.backoff * 2 ** (self.tried - 1), _LONGEST) * share
        time.sleep(max(wait, min(fault.wait, _ASKED)))

    def progress(self, count: int) -> None:
        """Count the bytes that arrived since the last fault: a download that advances is never given up."""
        if count >= PROGRESS:
            self.tried = 0


def retried(address: Address, config: RemoteConfig, ask: Callable[[], T]) -> T:
    """The result of `ask`, which is repeated after a Fault. Raises: Unreachable."""
    patience = Patience(address, config)
    while True:
        try:
            return ask()
        except Fault as fault:
            patience.again(fault)


def foreign(text: str) -> str:
    """A text of a server or a library for messages: without credentials and control characters, and not long."""
    return shown(scrubbed(text[: 100 * _LONG]))[:_LONG]
