"""CLIP-C with little data: photos from scratch, captions by the tree of their classes (research/README.md).

`python -m research.little_data --data tiny/train --val tiny/dev --photos 5000 --out runs/little`;
the claim is arXiv:2407.01408, table 4: composing helps, and more where there is less data. `--rate 0.5 --seeds 100` and
the like choose the learning rates that `RATES` holds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from kiloword.api import Matcher
from research.arms import Arm, Experiment, main
from research.classes import ClassOptions, base, classified, part

STEPS, BATCH = 1000, 128
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "clip": ("clip", {}),
    "rho 0.15": ("clip-c", {"rho": 0.15}),
    "rho 0.3": ("clip-c", {"rho": 0.3}),
    "cutmix 0.3": ("clip+cutmix", {"cutmix": {"rho": 0.3}}),
    "stylistic 0.3": ("clip+stylistic", {"stylistic": {"rho": 0.3}}),
}
RATES: dict[str, float] = {}  # times the default learning rate, where seed 100 was better with another


@dataclass(frozen=True, kw_only=True)
class LittleOptions(ClassOptions):
    photos: int = 5_000  # of the training data, the first


def arms(options: LittleOptions) -> list[Arm]:
    """Plain CLIP, two shares of composed pairs, another way to mix two photos, and one photo mixed with itself."""

    def arm(name: str, method: str, settings: dict[str, Any]) -> Arm:
        recipe = replace(base(options, method, f"levels={options.level}", STEPS, BATCH), settings=settings)
        few = part(slice(options.photos))
        return Arm(name=name, recipe=recipe, judge=judge, source=few, rate=RATES.get(name, 1.0))

    def judge(matcher: Matcher) -> dict[str, Any]:
        return classified(matcher, options.val, options.level)

    return [arm(name, *choice) for name, choice in METHODS.items()]


EXPERIMENT = Experiment(
    module="research.little_data",
    title="CLIP-C with little data",
    options=LittleOptions,
    arms=arms,
    columns={"top-1": "top1"},
)

if __name__ == "__main__":
    main(EXPERIMENT)
