"""How a setting is declared, checked and read: default, help text, limits and flag stand in one place, its field.

No torch here, so that help is instant.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, field, fields, is_dataclass
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

from kiloword.addresses import without_credentials

UNLIMITED = math.inf
ABOVE_0 = math.nextafter(0.0, 1.0)
BELOW_1 = math.nextafter(1.0, 0.0)
DEFAULT_LIMITS = (-1e6, 1e6)  # limits of floats that declare none
LARGEST = 1 << 26  # largest file of settings in bytes

T = TypeVar("T")


class BaseSettings:
    """Base of all settings: pydantic validates those read from disk; unknown keys are errors."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}


@dataclass(frozen=True, kw_only=True)
class Nothing(BaseSettings):
    """No settings."""


def setting(default: T, text: str, low: float | None = None, high: float = UNLIMITED, **more: str) -> T:
    """A field of settings with a default; other arguments as of `about`."""
    declared: T = field(default=default, metadata=about(text, low, high, **more))
    return declared


def about(
    text: str = "", low: float | None = None, high: float = UNLIMITED, *, flag: str | None = None, **more: str
) -> Mapping[str, Any]:
    """Metadata of a field of settings.

    Args: text: help of the flag; low, high: limits of each of its numbers, included; flag: its name where that is not
    the field's; "": none, or of nested settings no prefix; more: hint: end of the error message, what to do; needs: the
    setting beside it without which it has no effect, "name=muon" or "rank!=0"; initial: the weight whose initial value
    it is, "head.bias".
    """
    if unknown := more.keys() - {"hint", "needs", "initial"}:
        raise TypeError(f"a setting has no {', '.join(unknown)}: expected flag, hint, needs or initial.")
    limits = {} if low is None else {"limits": (low, high)}
    return {"help": text, **limits, **({} if flag is None else {"flag": flag}), **more}


class Leaf(NamedTuple):
    """A setting inside nested settings."""

    owner: type
    field: Field[Any]
    value: Any
    path: str  # as in a file, "data.tokenizer_vocab"
    flag: str  # as on the command line, "vocab"
    beside: Any  # the settings that have it


def leaves(settings: Any, path: str = "", flag: str = "") -> Iterator[Leaf]:
    """Every setting of a dataclass, those of nested ones included."""
    for f in fields(settings):
        value, declared = getattr(settings, f.name), f.metadata.get("flag")
        name = f.name.replace("_", "-")
        if is_dataclass(value) and not isinstance(value, type):
            yield from leaves(value, f"{path}{f.name}.", flag if declared == "" else f"{flag}{declared or name}.")
        else:
            yield Leaf(type(settings), f, value, path + f.name, flag + (declared or name), settings)


def unread(settings: Any, usual: Any, prefix: str = "--", missing: Mapping[str, str] | None = None) -> Iterator[str]:
    """Messages about settings that differ from the usual ones and have no effect, as what they need is not set.

    Args: prefix: of flags; missing: what a flag lacks beside what its field declares.
    """
    theirs = {leaf.path: leaf.value for leaf in leaves(usual)}
    for leaf in leaves(settings):
        if leaf.value != theirs.get(leaf.path) and (other := (missing or {}).get(leaf.flag) or lacks(leaf, prefix)):
            yield f"{prefix}{leaf.flag} is {leaf.value}, which has an effect only with {other}"


def lacks(leaf: Leaf, prefix: str = "--") -> str:
    """The flag that a setting needs and that is not set so; "" for none."""
    name, _, value = leaf.field.metadata.get("needs", "").partition("=")
    other = name.removesuffix("!")
    if not name or (str(getattr(leaf.beside, other)) == value) == (name == other):
        return ""
    above = leaf.flag[: leaf.flag.rfind(".") + 1]
    return f"{prefix}{above}{other.replace('_', '-')} {'' if name == other else 'other than '}{value}"


def check(settings: Any, prefix: str = "--") -> None:
    """Check all numbers of a dataclass of settings, such as a recipe, but for a method's, which `preset` checks.

    Args: prefix: of the flags that messages name; "": they name keys of a file.
    Raises: ValueError naming numbers that are NaN, infinite or out of their limits.
    """
    wrong = []
    for leaf in leaves(settings):
        low, high = leaf.field.metadata.get("limits") or DEFAULT_LIMITS
        listed = leaf.value if isinstance(leaf.value, list | tuple) else (leaf.value,)
        for value in chain.from_iterable(one if isinstance(one, tuple) else (one,) for one in listed):
            checked = isinstance(value, float) or (isinstance(value, int) and "limits" in leaf.field.metadata)
            if checked and not (low <= value <= high and abs(value) < UNLIMITED):  # not true of NaN
                name, hint = prefix + leaf.flag if prefix else leaf.path, leaf.field.metadata.get("hint", "")
                wrong.append(f"{name} is {value}: expected {_range(low, high)}{hint}")
    if wrong:
        raise ValueError("; ".join(wrong[:3]) + ".")


def _range(low: float, high: float) -> str:
    most = "below 1" if high == BELOW_1 else str(high) if isinstance(high, int) else f"{high:g}"
    if low == ABOVE_0:
        return "above 0" + ("" if high == UNLIMITED else f" and {most}" if high == BELOW_1 else f", at most {most}")
    return f"at least {low:g}" if high == UNLIMITED else f"{low:g} to {most}"


def read_config(path: Path, kind: type[T]) -> T:
    """Read and validate a JSON file as a settings dataclass. Raises: ValueError naming the file and the bad keys."""
    try:
        if path.stat().st_size > LARGEST:
            raise ValueError(f"it has more than {LARGEST:,} bytes.")
        settings = parse(json.loads(path.read_text("utf-8")), kind)
        check(settings, prefix="")
        return settings
    except (ValueError, RecursionError) as e:  # RecursionError: thousands of nested brackets
        raise ValueError(f"{path} cannot be used: {e} It was damaged, or written by another version.") from e


def parse(value: Any, kind: type[T]) -> T:
    """Validate plain data as a settings dataclass.

    Raises: ValueError for unknown keys and wrong types, such as "3" and true for numbers.
    """
    from pydantic import PydanticUserError, TypeAdapter, ValidationError

    value = without_credentials(value)
    try:
        return TypeAdapter(kind).validate_json(json.dumps(value, default=str), strict=True)
    except PydanticUserError as e:  # of a user-defined method
        raise ValueError(f"{kind.__name__} is not a class of settings: expected fields of plain data.") from e
    except ValidationError as e:
        problems = [f"{'.'.join(map(str, x['loc'])) or 'it'}: {x['msg'].lower()}" for x in e.errors()]
        raise ValueError("; ".join(problems[:3]) + ".") from e


def shown(value: Any) -> str:
    """A value as tables and notes show it."""
    if isinstance(value, list | tuple):
        return ",".join(map(shown, value)) or "none"
    if value in (None, "", {}):
        return "none"
    if isinstance(value, int) and not isinstance(value, bool) and value >= 10_000:
        return f"{value:_}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def differing(a: Any, b: Any, at: str = "") -> dict[str, tuple[Any, Any]]:
    """Differences of two plain values: dotted path -> both values."""
    if isinstance(a, dict) and isinstance(b, dict):
        out: dict[str, tuple[Any, Any]] = {}
        for k in [*a, *(k for k in b if k not in a)]:
            out |= differing(a.get(k), b.get(k), f"{at}.{k}" if at else k)
        return out
    return {} if a == b else {at: (a, b)}


def leaves_of(settings: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Plain values of nested settings by dotted paths."""
    if isinstance(settings, dict) and settings:
        for name, inner in settings.items():
            yield from leaves_of(inner, f"{path}.{name}" if path else name)
    else:
        yield path, settings
