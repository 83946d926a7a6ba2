"""How captions are judged: what `kiloword eval MODEL caption` may be told. No torch: help is instant."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from kiloword.config.recipes import BaseSettings


@dataclass(frozen=True, kw_only=True)
class CaptionOptions(BaseSettings):
    """How captions are compared with those that people wrote."""

    tokenizer: Literal["own", "ptb"] = "own"  # own; ptb: pycocoevalcap's, in Java; on COCO figures differ by 0.0003
    meteor: bool = True  # METEOR through pycocoevalcap; where it or Java is missing, it is left out and that is said
    spice: bool = False  # SPICE through pycocoevalcap and Stanford's models, which have to be there
    limit: float = 600  # seconds that each of these Java programs may take

    def check(self) -> None:
        """Raises: ValueError for a limit that is none."""
        if not 0 < self.limit < math.inf:
            raise ValueError(f"--judge.limit is {self.limit:g}. Expected seconds above 0.")
