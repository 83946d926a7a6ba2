"""CLIP-C with little data: photos from scratch, captions by the tree of their classes (research/README.md).

`python -m research.little_data --data tiny/train --val tiny/dev --out runs/little_data`; the claim is arXiv:2407.01408,
table 4: composing helps, and more where there is less data. `--rate 0.5 --seeds 100 --arms "clip, 5000"` and the like
choose `CLIP_RATE` and `MIXED_RATE`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from research.arms import Arm, Experiment, main
from research.classes import ClassOptions, base, classified, part
from research.evidence import Claim, Gain

STEPS, BATCH = 1000, 128
CLIP, BETTER = "clip", "rho 0.15"  # BETTER: the better rho by seed 100
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    CLIP: ("clip", {}),
    "rho 0.15": ("clip-c", {"rho": 0.15}),
    "rho 0.3": ("clip-c", {"rho": 0.3}),
    "cutmix 0.3": ("clip+cutmix", {"cutmix": {"rho": 0.3}}),
    "stylistic 0.3": ("clip+stylistic", {"stylistic": {"rho": 0.3}}),
}
LEAST, MIDDLE, MOST = 5_000, 15_000, 40_000  # photos of the training data, the first
ARMS = [(method, LEAST) for method in METHODS] + [(method, n) for n in (MIDDLE, MOST) for method in (CLIP, BETTER)]
CLIP_RATE, MIXED_RATE = 2.0, 2.0  # times the default learning rate: the best of seed 100 of clip, of rho 0.3


def named(method: str, photos: int) -> str:
    """The arm of a method and a number of photos."""
    return f"{method}, {photos}"


def arms(options: ClassOptions) -> list[Arm]:
    """Plain CLIP, two shares of composed pairs, another way to mix two photos, and one photo mixed with itself."""

    def arm(name: str, photos: int) -> Arm:
        method, settings = METHODS[name]
        recipe = base(options, method, f"levels={options.level}", STEPS, BATCH)
        return Arm(
            name=named(name, photos),
            recipe=replace(recipe, settings=settings, precision="bf16"),
            judge=partial(classified, options),
            source=part(slice(photos)),
            rate=CLIP_RATE if name == CLIP else MIXED_RATE,
        )

    return [arm(*choice) for choice in ARMS]


EXPERIMENT = Experiment(
    module="research.little_data",
    title="CLIP-C with little data",
    options=ClassOptions,
    arms=arms,
    columns={"top-1": "top1"},
    claims=(
        Claim(says="composing helps", arm=named(BETTER, LEAST), rivals=(named(CLIP, LEAST),), least=0.01),
        Gain(
            says="and more with less data",
            arm=named(BETTER, LEAST),
            rival=named(CLIP, LEAST),
            other=named(BETTER, MOST),
            other_rival=named(CLIP, MOST),
        ),
    ),
)

if __name__ == "__main__":
    main(EXPERIMENT)
