"""What one GPU computes at once: how many images, texts and tokens, in which kernels and precision.

Letters as in `types.py`: I images, T texts, S tokens of all texts, L the longest, W width, N tokens of a sequence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from kiloword.config.recipes import TextConfig
from kiloword.model.text import ROWS
from kiloword.types import Texts


@dataclass(frozen=True)
class Kernels:
    """How numbers are kept and attention is computed."""

    stream: int = 4  # bytes of a number between blocks, of norms' inputs and of weights
    half: bool = False  # autocast: products and what they read and write have 2 bytes
    padded: bool = False  # attention pads texts to the longest (CPU, and fp32 on a GPU)
    plain: bool = False  # attention keeps its weights (half precision on a CPU)

    @property
    def product(self) -> int:
        """Bytes of a number that a matrix product reads or writes."""
        return 2 if self.half else self.stream

    @staticmethod
    def of(precision: str, cuda: bool) -> Kernels:
        """Those that training uses: `model/attention.py`."""
        half = precision == "bf16"
        return Kernels(8 if precision == "fp64" else 4, half, padded=not (cuda and half), plain=half and not cuda)


@dataclass(frozen=True)
class Sequences:
    """Tokens that a layer computes, and what attention makes of them.

    Sequences of a dense image: tokens = slots = I N, pairs = I N^2. Packed texts: S tokens; attention that knows
    where they begin computes sum n^2 pairs, one that pads sees T L slots and T L^2 pairs. Hidden keys count, as in
    FlopCounterMode: a causal mask takes nothing off.
    """

    tokens: float
    slots: float  # tokens as attention sees them
    pairs: float  # of a query and a key
    copied: bool = False  # attention pads and unpads

    @staticmethod
    def dense(count: float, length: float) -> Sequences:
        return Sequences(count * length, count * length, count * length**2)


@dataclass(frozen=True)
class Lengths:
    """Lengths of T texts: sums and the longest are all that costs depend on."""

    texts: float  # T
    tokens: float  # S
    squares: float  # sum of squared lengths
    longest: float  # L
    together: float  # the longest of all texts of one image taken together

    @staticmethod
    def equal(texts: float, length: float, captions: float = 1) -> Lengths:
        """T texts of one (mean) length; the variance of lengths is neglected: attention over texts is a small part."""
        return Lengths(texts, texts * length, texts * length**2, length, length * captions)

    @staticmethod
    def of(texts: Texts, together: int = 0) -> Lengths:
        """Of real texts; together: tokens of the image that has most, the longest text's when 0."""
        n = texts.starts.diff().double()
        longest = float(texts.longest)
        return Lengths(len(texts), float(n.sum()), float(n.square().sum()), longest, float(together or longest))

    def longer(self, by: float, captions: float = 1) -> Lengths:
        """Every text gets b more tokens: sum (n + b)^2 = sum n^2 + 2 b sum n + T b^2."""
        squares = self.squares + 2 * by * self.tokens + self.texts * by**2
        return Lengths(
            self.texts,
            self.tokens + by * self.texts,
            squares,
            self.longest + by,
            self.together + by * captions,
        )

    def share(self, part: float) -> Lengths:
        """A part of the texts, as long as the others."""
        return replace(self, texts=self.texts * part, tokens=self.tokens * part, squares=self.squares * part)

    def scaled(self, factor: float) -> Lengths:
        """As many texts with `factor` times their tokens; attention that pads still pads to the longest before."""
        return replace(self, tokens=self.tokens * factor, squares=self.squares * factor**2)

    def sequences(self, kernels: Kernels) -> Sequences:
        """As attention within texts sees them."""
        if not kernels.padded:
            return Sequences(self.tokens, self.tokens, self.squares)
        rows = math.ceil(self.tokens / ROWS) * ROWS if kernels.plain else self.tokens  # `model/text.py` rounds up there
        full = self.texts * self.longest == self.tokens == rows
        return Sequences(rows, self.texts * self.longest, self.texts * self.longest**2, copied=not full)


@dataclass(frozen=True)
class Load:
    """What one GPU computes at once: its whole share, or one micro-batch of it."""

    images: float  # I
    texts: Lengths  # all tokens: start, end and the method's own included
    kernels: Kernels
    captions: float = 1  # an image
    questions: Lengths | None = None

    @property
    def seq(self) -> Sequences:
        return self.texts.sequences(self.kernels)


def text_length(mean: float, config: TextConfig) -> float:
    """Tokens that the tower sees of a caption of `mean` tokens, start and end included.

    A tower with visible pads sees its context always; tokens that the method adds come behind the end.
    """
    if config.pad_to_context:
        return config.context
    return min(mean + len(config.extra_tokens), config.context)
