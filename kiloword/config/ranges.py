"""Ranges of numeric settings, for command lines and files: an immediate message instead of a later error or NaN."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

Limits = tuple[float, float]
_ANY = math.inf
_BELOW_1 = math.nextafter(1.0, 0.0)
DEPTH = 1024  # largest number of layers of a tower or a decoder
_TOWER: dict[str, Limits] = {
    "width": (1, 1 << 16),
    "depth": (1, DEPTH),
    "heads": (1, 1 << 10),
    "mlp": (1, 1 << 20),
    "norm_eps": (1e-20, 1),
    "init_std": (0, 100),
}
OTHER = (-1e6, 1e6)  # floats without their own range, such as a method's settings
RANGES: dict[str, dict[str, Limits]] = {  # class of settings -> field -> limits; those of a tuple apply to each number
    "Recipe": {"steps": (1, _ANY), "batch": (1, _ANY), "micro": (0, _ANY), "chunk": (0, _ANY)},
    "ImageConfig": {**_TOWER, "size": (1, 1 << 13), "patch": (1, 1 << 10), "extra_tokens": (0, 1 << 12)},
    "TextConfig": {**_TOWER, "context": (3, 1 << 16), "vocab": (1, 1 << 22)},
    "HeadConfig": {
        **dict.fromkeys(("dim", "pool_queries"), (1, 1 << 16)),
        "pool_width": (0, 1 << 16),
        "pool_heads": (1, 1 << 10),
    },
    "Preprocess": {"mean": (-1000, 1000), "std": (1e-6, 1000)},
    "OptimConfig": {
        **dict.fromkeys(("lr", "muon_lr", "weight_decay", "muon_weight_decay", "final_lr"), (0, 100)),
        **dict.fromkeys(("beta1", "beta2", "momentum"), (0, _BELOW_1)),
        "eps": (1e-20, 1),  # with 0, a zero gradient gives 0/0
        **dict.fromkeys(("scale_lr", "text_lr"), (0, 1e4)),
        **dict.fromkeys(("clip", "explode", "warmup"), (0, 1e12)),
        "ema": (0, 1),
    },
    "TableFile": {"dim": (1, 1e6), "rows": (1, 1e12), "part": (1, 1e9)},
    "DataConfig": {"bad_share": (0, 1), "together": (1, _ANY), "tokenizer_vocab": (262, 1 << 22)},
    "AugmentConfig": {
        **dict.fromkeys(("flip", "jitter", "grayscale", "blur", "drop_words"), (0, 1)),
        "crop": (0.001, 1),
        "ratio": (1, 100),
        "jitter_strength": (0, 100),
        "blur_sigma": (0, 1000),
    },
}


def check(settings: Any, prefix: str = "--") -> None:
    """Check all numbers of a dataclass of settings, such as a recipe.

    Args: prefix: "--" names settings as on the command line, "" as in a file.
    Raises: ValueError naming numbers that are NaN, infinite or out of range.
    """
    wrong = []
    for name, value, (least, most) in _numbers(settings, "", None):
        if isinstance(value, int | float) and least <= value <= most and abs(value) < _ANY:  # False for NaN
            continue
        upper = "below 1" if most == _BELOW_1 else str(most) if isinstance(most, int) else f"{most:g}"
        limits = f"at least {least:g}" if most == _ANY else f"{least:g} to {upper}"
        wrong.append(f"{_flag(name) if prefix else name} is {value}: expected {limits}")
    if wrong:
        raise ValueError("; ".join(prefix + problem for problem in wrong[:3]) + ".")


def _numbers(value: Any, name: str, limits: Limits | None) -> Iterator[tuple[str, Any, Limits]]:
    """The numbers inside a value that have limits or are floats: dotted name, value, limits."""
    if is_dataclass(value):
        limits_of = RANGES.get(type(value).__name__, {})
        for f in fields(value):
            yield from _numbers(getattr(value, f.name), f"{name}.{f.name}" if name else f.name, limits_of.get(f.name))
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _numbers(inner, f"{name}.{key}" if name else str(key), limits)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _numbers(inner, name, limits)
    elif limits or isinstance(value, float):
        yield name, value, limits or OTHER


def _flag(name: str) -> str:
    return name.removeprefix("data.").removeprefix("tokenizer_").replace("_", "-")
