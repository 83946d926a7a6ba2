"""`kiloword audit`: pairs that do not match, duplicates, generic captions, wrong labels; a keep-list."""

from typing import Literal

Kind = Literal["mismatch", "unreadable", "duplicate-image", "duplicate-caption", "generic", "label"]
"""Kinds of findings."""
