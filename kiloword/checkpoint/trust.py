"""Which code a model folder may run: none, but for a module that the user names. No torch here: help is instant.

`config.json` names the method that a model was trained by. A built-in method is our code; "module:preset" is code of
whoever made the folder, and is imported only on the user's word.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Suppress

from kiloword.terminal import warn

if TYPE_CHECKING:
    from kiloword.config.recipes import ModelFile
    from kiloword.methods.method import Method


@dataclass(frozen=True, kw_only=True)
class Trust:
    """What the user says about the code that a model folder asks for."""

    method: str | None = None  # of the model, in place of what its config.json names; may be your own module:preset
    trust_code: bool = False  # import the module that config.json names; for models of people you trust
    named: Annotated[str | None, Suppress] = None  # by the user for something else: its module may be imported here too


NONE = Trust()


def method_of(file: ModelFile, folder: Path | str, trust: Trust = NONE) -> Method:
    """The method of a model folder; a module is imported only when `trust` says so.

    Raises: ValueError when the folder asks for code that the user did not name, or for a method that is not known.
    """
    from kiloword.methods.registry import base_of, preset

    asks, word = file.method, trust.method or trust.named
    named = word is not None and word in (asks, base_of(asks))  # of "mine:preset+compose" too by "mine:preset"
    if trust.method is not None and not named:
        warn(f"{folder} asks for the method {asks[:200]!r}: {word!r} is used, as --method says.")
        try:
            return preset(trust.method, file.settings)
        except ValueError as e:
            raise ValueError(f"{word} does not fit {folder}, which was trained by {asks[:200]}: {e}") from e
    named = named or (word is not None and base_of(word) == base_of(asks))
    if ":" in asks and not (named or trust.trust_code):
        raise ValueError(
            f"{folder} was trained by the method {asks[:200]!r}, which is code that its config.json names and that is "
            "not run unasked. If you know this code, name the method: --method MODULE:PRESET (caption: --model-method; "
            "train: as its METHOD; kiloword.load: method=). To import the module that the model names: --trust-code "
            "(trust_code=True)."
        )
    try:
        return preset(asks, file.settings)
    except ValueError as e:
        raise ValueError(f"{Path(folder) / 'config.json'} cannot be used: {e}") from e
