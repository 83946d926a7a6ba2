"""Llip on scenes: does conditioning on the text help, compared with poolings that do not use it?

`python -m research.llip --out runs/llip --jobs 2`; the claim is arXiv:2405.00740, table 5.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from research.arms import Arm, Experiment, Options, main
from research.scenes_judge import SCENES, judge_scenes
from research.towers import tokens

STEPS = 1200


@dataclass(frozen=True, kw_only=True)
class LlipOptions(Options):
    data: str = "scenes?levels=3"  # one caption per image, redrawn in each epoch
    k: int = 8  # mixture tokens; of every arm but the first two
    heads: int = 8  # of the contextual and the learned pooling
    temperature: float = 5.0


def arms(options: LlipOptions) -> list[Arm]:
    """SigLIP by its class token, and K tokens read in four ways; max pooling is the reference."""
    data = (options.data,)

    def pooled(pool: str, **more: Any) -> Arm:
        recipe = tokens("llip", options.size, data)
        settings = {"k": options.k, "heads": options.heads, "temperature": options.temperature, "pool": pool}
        return _arm(f"llip-{pool}" if not more else f"llip-{'-'.join(more)}", recipe, settings={**settings, **more})

    return [
        _arm("siglip-max", tokens("siglip", options.size, data, "max")),
        _arm("siglip", tokens("siglip", options.size, data)),
        pooled("first"),
        pooled("average"),
        pooled("learned_average"),
        pooled("contextual"),
        pooled("contextual", temperature=1.0),
        pooled("contextual", k=32),
    ]


def _arm(name: str, recipe: Any, **changes: Any) -> Arm:
    return Arm(name=name, recipe=replace(recipe, steps=STEPS, **changes), judge=judge_scenes)


EXPERIMENT = Experiment(
    module="research.llip",
    title="Llip against SigLIP, registers, average and learned average on scenes",
    options=LlipOptions,
    arms=arms,
    columns=SCENES,
)

if __name__ == "__main__":
    main(EXPERIMENT)
