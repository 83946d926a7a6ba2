"""Text from images: search over a decoder's next tokens, captions of a model, answers from a closed list."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kiloword.generation.options import GenerationOptions

if TYPE_CHECKING:
    from kiloword.generation.captioner import Caption, Captioner

__all__ = ["Caption", "Captioner", "GenerationOptions"]


def __getattr__(name: str) -> Any:
    """What needs torch comes when it is asked for: help texts are instant."""
    if name in ("Caption", "Captioner"):
        from kiloword.generation import captioner

        return getattr(captioner, name)
    raise AttributeError(name)
