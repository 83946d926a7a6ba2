"""Code that a model folder may run: none, except a module that the user names. No torch here, so that help is instant.

`config.json` names the method that trained the model. A built-in method is code of kiloword; "module:preset" is code of
the author of the folder, and is imported only if the user allows it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Suppress

from kiloword.terminal import warn

if TYPE_CHECKING:
    from kiloword.config.recipes import ModelFile
    from kiloword.methods.method import Method


@dataclass(frozen=True, kw_only=True)
class Trust:
    """The user's decision about code that a model folder needs."""

    # method to use in place of the one in config.json: a preset, or your own module:preset
    method: str | None = None
    trust_code: bool = False  # import the module named in config.json; only for models that you trust
    named: Annotated[str | None, Suppress] = None  # by the user for another purpose; its module may be imported too


NONE = Trust()


def method_of(file: ModelFile, folder: Path | str, trust: Trust = NONE) -> Method:
    """The method of a model folder; a module is imported only if `trust` allows it.

    Raises: ValueError when the folder needs code that the user did not name, or an unknown method.
    """
    from kiloword.methods.registry import base_of, modules_of, preset

    stored, allowed = file.method, trust.method or trust.named
    covered = allowed is not None and modules_of(stored) <= modules_of(allowed)
    if trust.method is not None and not (covered and trust.method in (stored, base_of(stored))):
        warn(f"{folder} asks for the method {stored[:200]!r}: {allowed!r} is used, as --method says.")
        try:
            return preset(trust.method, _shared(file, trust.method))
        except ValueError as e:
            raise ValueError(f"{allowed} does not fit {folder}, which was trained by {stored[:200]}: {e}") from e
    named = allowed is not None and covered and base_of(allowed) == base_of(stored)  # "mine:a" allows "mine:a+compose"
    if ":" in stored and not (named or trust.trust_code):
        raise ValueError(
            f"{folder} was trained by the method {stored[:200]!r}, which is code that its config.json names and "
            "that is not run unasked. If you know this code, name the method: --method MODULE:PRESET (caption: "
            "--model-method; train: as its METHOD; kiloword.load: method=). To import the module that the model names: "
            "--trust-code (trust_code=True)."
        )
    try:
        return preset(stored, file.settings)
    except ValueError as e:
        hint = " Without its file, name a method with this head: --method." * isinstance(e.__cause__, ImportError)
        raise ValueError(f"{Path(folder) / 'config.json'} cannot be used: {e}{hint}") from e


def _shared(file: ModelFile, method: str) -> dict[str, Any]:
    """The settings of a model that another method has, too; a warning names the others."""
    from kiloword.methods.registry import find

    known = {field.name for field in fields(find(method)[1])}
    if left := file.settings.keys() - known:
        warn(f"{method} has no setting {', '.join(sorted(left))[:200]}: what the model says of it is not used.")
    return {name: value for name, value in file.settings.items() if name in known}
