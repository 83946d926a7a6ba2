"""kiloword: image-text models that take many-to-many matching of images and captions seriously."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kiloword.__version__ import __version__

if TYPE_CHECKING:
    from kiloword.api import Matcher, load
    from kiloword.training.python import train

__all__ = ["Matcher", "__version__", "load", "train"]


def __dir__() -> list[str]:
    return [*globals(), *__all__]


def __getattr__(name: str) -> Any:  # torch is imported at first use, not by `import kiloword`
    if name in ("Matcher", "load"):
        from kiloword import api

        return getattr(api, name)
    if name == "train":
        from kiloword.training.python import train

        return train
    raise AttributeError(f"module 'kiloword' has no attribute {name!r}")
