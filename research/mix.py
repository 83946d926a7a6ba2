"""Does a mix of all methods beat each of them? On photos and frozen towers (research/README.md).

`python -m research.mix --data flickr8k_224/train --val flickr8k_224/dev --images tokens/train tokens/dev --texts
tokens/words tokens/words-dev --out runs/mix`; `--rate 0.5 --seeds 100` and the like choose the rates. Stored tokens of
whole captions cannot be composed: `research.little_data` is about that part.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from research import teacher
from research.arms import Arm, Experiment, main
from research.evidence import Claim
from research.frozen import FrozenOptions, base, judge_dev
from research.scenes_judge import RECALL

STEPS, BATCH = 150, 256


@dataclass(frozen=True)
class Part:
    """What an arm trains: a method, and how many captions of a photo a batch has."""

    method: str
    captions: Literal["one", "all"] = "one"


TOGETHER, TAUGHT = "together", "together, reinforced"
ARMS = {
    "one caption": Part("siglip"),
    "all captions": Part("siglip", "all"),
    "contextual": Part("siglip+contextual"),
    "gaussians": Part("prolip"),
    "reinforced": Part("siglip+reinforced"),
    TOGETHER: Part("prolip+contextual", "all"),
    TAUGHT: Part("prolip+reinforced", "all"),  # contextual images have no vector that a teacher could have
}
PARTS = tuple(name for name in ARMS if name not in (TOGETHER, TAUGHT))
RATES = {"contextual": 0.5, TAUGHT: 2.0}  # times the default learning rate, of {0.5, 1, 2}: the best mR@1 of seed 100


def arms(options: FrozenOptions) -> list[Arm]:
    """SigLIP with each part, and with all of them that go together; equal tops."""
    top = replace(base(replace(options, small=True), "prolip"), steps=STEPS, batch=BATCH)

    def arm(name: str, part: Part) -> Arm:
        recipe = replace(top, method=part.method, data=replace(top.data, captions=part.captions))
        if "reinforced" in part.method:
            recipe = teacher.joined(recipe, options.out)
        return Arm(name=name, recipe=recipe, judge=partial(judge_dev, options), rate=RATES.get(name, 1.0))

    return [arm(name, part) for name, part in ARMS.items()]


def first(options: FrozenOptions) -> None:
    """The teacher: SigLIP as the first arm, of the seed that chooses learning rates; its features of whole photos."""
    recipe = next(arm.recipe for arm in arms(options) if arm.name == "one caption")
    teacher.make(recipe, options.out, options.device, options.workers)


EXPERIMENT = Experiment(
    module="research.mix",
    title="The mix and its parts",
    options=FrozenOptions,
    arms=arms,
    first=first,
    columns={"mR@1": "mr1", **RECALL},
    claims=tuple(
        Claim(says="the mix beats every part", arm=arm, rivals=PARTS, least=0.1, relative=True)
        for arm in (TOGETHER, TAUGHT)
    ),
)

if __name__ == "__main__":
    main(EXPERIMENT)
