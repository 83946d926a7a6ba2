"""Muon against AdamW at equal processor time, on photos and frozen towers (research/README.md).

`python -m research.muon --data flickr8k_224/train --val flickr8k_224/dev --images tokens/train tokens/dev --texts
tokens/train tokens/dev --out runs/muon`; `--rate 0.25 --seeds 100` and the like choose the rates.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from research.arms import Arm, Experiment, main
from research.evidence import Claim
from research.frozen import FrozenOptions, base, judge_dev
from research.scenes_judge import RECALL

STEPS, BATCH = 150, 256
LENGTHS = {"muon": 1.0, "adamw": 1.23}  # processor time of a step of Muon over that of the arm: 43 s, 35 s of seed 100
RATES = {"muon": 2.0, "adamw": 2.0}  # times 6e-2 (Muon) and 2e-3 (AdamW), of {1/4, 1/2, 1, 2, 4}: the best of seed 100


def arms(options: FrozenOptions) -> list[Arm]:
    """CLIP with small tops; one optimizer each."""

    def arm(name: str, changes: dict[str, Any]) -> Arm:
        recipe = base(replace(options, small=True), "clip")
        optim, steps = replace(recipe.optim, **changes), round(LENGTHS[name] * STEPS)
        recipe = replace(recipe, optim=optim, steps=steps, batch=BATCH)
        return Arm(name=name, recipe=recipe, judge=partial(judge_dev, options), rate=RATES.get(name, 1.0))

    return [arm("muon", {}), arm("adamw", {"name": "adamw", "lr": 2e-3})]


EXPERIMENT = Experiment(
    module="research.muon",
    title="Muon against AdamW on frozen towers",
    options=FrozenOptions,
    arms=arms,
    columns={"mR@1": "mr1", **RECALL},
    claims=(Claim(says="at equal processor time", arm="muon", rivals=("adamw",), least=0.01),),
)

if __name__ == "__main__":
    main(EXPERIMENT)
