"""Text generation: search over next tokens, captions of images, answers to questions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kiloword.generation.options import GenerationOptions

if TYPE_CHECKING:
    from kiloword.generation.captioner import Caption, Captioner

__all__ = ["Caption", "Captioner", "GenerationOptions"]


def __getattr__(name: str) -> Any:
    """Import modules that need torch lazily, so that help texts are instant."""
    if name in ("Caption", "Captioner"):
        from kiloword.generation import captioner

        return getattr(captioner, name)
    raise AttributeError(name)
