"""What the numbers of a recipe may be: a sentence at once, rather than an error from the depths or a strange run."""

from __future__ import annotations

import math
from functools import reduce

from kiloword.recipes import Recipe

_ANY = math.inf
_TOWER = dict.fromkeys(("width", "depth", "heads", "mlp"), (1, _ANY))
RANGES: dict[str, tuple[float, float]] = {
    "steps": (1, _ANY),
    "batch": (1, _ANY),
    "micro": (0, _ANY),
    "chunk": (0, _ANY),
    **{f"model.{tower}.{name}": limits for tower in ("image", "text") for name, limits in _TOWER.items()},
    "model.image.size": (1, _ANY),
    "model.image.patch": (1, _ANY),
    "model.image.extra_tokens": (0, _ANY),
    "model.text.context": (3, _ANY),
    "model.head.dim": (1, _ANY),
    **{f"optim.{name}": (0, _ANY) for name in ("lr", "muon_lr", "weight_decay", "muon_weight_decay", "eps", "warmup")},
    **{f"optim.{name}": (0, _ANY) for name in ("clip", "explode", "scale_lr", "text_lr", "final_lr")},
    **{f"optim.{name}": (0, 1) for name in ("beta1", "beta2", "momentum", "ema")},
    "data.bad_share": (0, 1),
    "data.together": (1, _ANY),
    "data.augment.crop": (0.001, 1),
    "data.augment.ratio": (1, 100),
    **{f"data.augment.{name}": (0, 1) for name in ("flip", "jitter", "grayscale", "blur", "drop_words")},
}


def check(recipe: Recipe) -> None:
    """Raises: ValueError naming the settings that are out of their range, as the command line writes them."""
    problems = []
    for name, (least, most) in RANGES.items():
        value = reduce(getattr, name.split("."), recipe)
        if not (isinstance(value, int | float) and least <= value <= most):  # False for NaN
            limits = f"at least {least:g}" if most == _ANY else f"{least:g} to {most:g}"
            problems.append(f"--{_flag(name)} is {value}: expected {limits}")
    if problems:
        raise ValueError("; ".join(problems[:3]) + ".")


def _flag(name: str) -> str:
    return name.removeprefix("data.").replace("_", "-")
