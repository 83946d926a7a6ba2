"""How captions are cleaned before they are split into tokens: our own way, CLIP's and SigLIP's."""

from __future__ import annotations

import html
import string
from collections.abc import Callable
from typing import Literal

Clean = Literal["plain", "clip", "siglip"]

PUNCTUATION = str.maketrans("", "", string.punctuation)


def cleaner(clean: Clean) -> Callable[[str], str]:
    """The function that cleans one caption."""
    return {"plain": plain, "clip": clip, "siglip": siglip}[clean]


def plain(caption: str) -> str:
    """One space between words; half characters (lone surrogates) become question marks, as no encoder takes them."""
    if not caption.isascii():
        caption = caption.encode("utf-8", "replace").decode()
    return " ".join(caption.split())


def _web(caption: str) -> str:
    """Broken encodings and entities repaired as CLIP and SigLIP do (`ftfy`, then html twice)."""
    if caption.isascii() and caption.isprintable() and "&" not in caption:
        return " ".join(caption.split())  # ftfy and html change nothing here, and cost ten times the encoding
    try:
        import ftfy
    except ImportError as error:
        raise ValueError(
            f"caption {caption[:40]!r} needs the package ftfy to be read as CLIP reads it: pip install ftfy"
        ) from error
    return " ".join(html.unescape(html.unescape(ftfy.fix_text(caption))).split())


def clip(caption: str) -> str:
    """Repaired, one space between words, lower case (open_clip's "lower")."""
    return _web(caption).lower()


def siglip(caption: str) -> str:
    """Repaired, lower case, no ascii punctuation, underscores are spaces (open_clip's "canonicalize")."""
    return " ".join(_web(caption).replace("_", " ").translate(PUNCTUATION).lower().split())
