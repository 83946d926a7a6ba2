"""`kiloword audit`: pairs that do not match, duplicates, generic captions, wrong labels, unreadable files; a keep-list.

No torch at import, so that help is instant.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["mismatch", "unreadable", "duplicate-image", "duplicate-caption", "generic", "label"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, kw_only=True)
class AuditOptions:
    """What is found, and what the keep-list omits."""

    target_precision: float = 0.8  # estimated share of right ones among the pairs that are said not to match
    drop: tuple[Kind, ...] = ("mismatch", "unreadable")  # findings that the keep-list omits
    gallery: int = 24  # examples of each finding on the page; 0: none
    chunk: int = 1024  # images and captions in a block of scores
    seed: int = 0  # of the random pairs that the others are compared with

    def check(self) -> None:
        """Raises: ValueError for a value out of range."""
        if not 0 < self.target_precision <= 1:
            raise ValueError(f"--target-precision is {self.target_precision:g}: expected a share above 0, at most 1.")
        if self.gallery < 0 or self.chunk < 1:
            raise ValueError("--gallery and --chunk count: expected at least 0, and at least 1.")
