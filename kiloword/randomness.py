"""Keyed randomness: every random choice is a pure function of (seed, epoch, row, purpose), independent of order.

So the choices of a run do not depend on the number of workers, ranks and micro-batches, or on resuming.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

_MASK = (1 << 63) - 1


def key(*parts: int | str) -> int:
    """A non-negative 63-bit number from any parts; stable across machines and Python versions."""
    text = "\x1f".join(f"{type(p).__name__[0]}{p}" for p in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") & _MASK


def generator(*parts: int | str) -> np.random.Generator:
    """A fresh generator keyed by any parts: a second call gives the same numbers."""
    return np.random.Generator(np.random.Philox(key(*parts)))


def permutation(n: int, *parts: int | str) -> NDArray[np.integer[Any]]:
    """A permutation of n numbers keyed by any parts: that of `generator(*parts).permutation(n)`, in half its bytes."""
    numbers: NDArray[np.integer[Any]] = np.arange(n, dtype=np.int32 if n < 1 << 31 else np.int64)
    generator(*parts).shuffle(numbers)  # equal for both dtypes
    return numbers


def some(n: int, most: int, *parts: int | str) -> NDArray[np.int64]:
    """At most `most` of n numbers, ascending, drawn by `generator(*parts)`."""
    return np.arange(n) if n <= most else np.sort(generator(*parts).choice(n, most, replace=False))


@dataclass(frozen=True)
class Draw:
    """The random choices of one row in one epoch."""

    seed: int
    epoch: int
    row: int

    def rng(self, purpose: str) -> np.random.Generator:
        """A fresh generator for one purpose ("crop", "flip", ...): a second call gives the same numbers."""
        return generator(self.seed, self.epoch, self.row, purpose)

    def other(self, purpose: str) -> Draw:
        """Other choices of the same row and epoch, such as for a second view of its image."""
        return Draw(key(self.seed, purpose), self.epoch, self.row)

    @property
    def sample_seed(self) -> int:
        """The value in `Batch.seeds` for this row."""
        return key(self.seed, self.epoch, self.row, "sample")


def uniform(seeds: Tensor, purpose: str, n: int) -> Tensor:
    """Counter-based uniforms on the device of `seeds`.

    Args: seeds: [I] int64; purpose: name of the choice; n: numbers per row.
    Returns: [I, n] float32 in [0, 1); those of a row do not depend on other rows.
    """
    import torch

    counter = torch.arange(n, device=seeds.device)
    x = seeds[:, None] ^ _mix(counter[None] + (key(purpose) & 0x7FFFFFFF))
    bits = (_mix(_mix(x)) >> 16) & 0xFFFFFF
    return bits.to(torch.float32) / float(1 << 24)


def _mix(x: Tensor) -> Tensor:
    """A 64-bit finaliser (shifts, odd multipliers) in wrapping int64 arithmetic."""
    x = x ^ ((x >> 30) & 0x3FFFFFFFF)
    x = x * -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
    x = x ^ ((x >> 27) & 0x1FFFFFFFFF)
    x = x * -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB
    return x ^ ((x >> 31) & 0x1FFFFFFFF)
