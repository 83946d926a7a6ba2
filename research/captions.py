"""FFF: all captions of a photo in one batch, against one of them, on frozen towers (research/README.md).

`python -m research.captions --data flickr8k_224/train --val flickr8k_224/dev --images tokens/train tokens/dev --texts
tokens/train tokens/dev --out runs/captions`; the claim is arXiv:2405.10286, section 3.2: many captions an image help.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from research.arms import Arm, Experiment, main
from research.evidence import Claim
from research.frozen import FrozenOptions, base, judge_dev
from research.scenes_judge import RECALL

STEPS, BATCH = 300, 256
ALL = "all five"
ARMS: dict[str, dict[str, Any]] = {
    "one": {"captions": 1, "first_captions": True},
    "one redrawn": {"captions": "one"},
    ALL: {"captions": "all"},
    "one redrawn, as long": {"captions": "one"},
}
LONGER = 1.57  # processor time of a step with all captions over one's: 137 s over 87.5 s of seed 100
RATES = {"one": 0.5, "one redrawn": 2.0, "one redrawn, as long": 2.0, ALL: 2.0}  # the best of seed 100
CLAIMS = (
    Claim(says="at equal steps", arm=ALL, rivals=("one redrawn",), least=0.02),
    Claim(says="at equal processor time", arm=ALL, rivals=("one redrawn, as long",), least=0.0),
)


def arms(options: FrozenOptions) -> list[Arm]:
    """Siglip on the first caption of every photo, one drawn each epoch, or all five."""

    def arm(name: str, captions: dict[str, Any]) -> Arm:
        recipe = base(replace(options, small=True), "siglip")
        steps = round(LONGER * STEPS) if name.endswith("long") else STEPS
        recipe = replace(recipe, steps=steps, batch=BATCH, data=replace(recipe.data, **captions))
        return Arm(name=name, recipe=recipe, judge=partial(judge_dev, options), rate=RATES.get(name, 1.0))

    return [arm(name, captions) for name, captions in ARMS.items()]


EXPERIMENT = Experiment(
    module="research.captions",
    title="All captions of a photo, or one",
    options=FrozenOptions,
    arms=arms,
    columns={"mR@1": "mr1", **RECALL},
    claims=CLAIMS,
)

if __name__ == "__main__":
    main(EXPERIMENT)
