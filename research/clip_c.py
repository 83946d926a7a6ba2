"""CLIP-C on scenes: does composing examples help, at which share, and is composition or the change of style the cause?

`python -m research.clip_c --out runs/clip-c --jobs 2`, and again with `--scenes inner` in another folder:
half of a plain scene may lack what its caption says, half of an inner one never does. The claim is arXiv:2407.01408,
tables 1 and 6: it helps, most at rho 0.15 to 0.3, hurts above 0.5, and change of style does not explain it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from kiloword.config.recipes import Recipe
from research.arms import Arm, Experiment, Options, main
from research.scenes_judge import SCENES, judge_scenes
from research.towers import ImagePool, tokens

STEPS = 1000
CONTEXT = 96  # tokens: two full captions are up to twice as long as one


@dataclass(frozen=True, kw_only=True)
class ClipCOptions(Options):
    scenes: Literal["plain", "inner"] = "plain"  # inner: halves stay describable
    levels: str = "3"  # of the captions
    pool: ImagePool = "max"
    patch: int = 8  # inner things are half as large


def arms(options: ClipCOptions) -> list[Arm]:
    """Plain CLIP, four shares of composed examples, squeezed in place of cut, and the stylistic control."""
    base = _base(options)

    def arm(name: str, method: str = "clip-c", **settings: Any) -> Arm:
        recipe = replace(base, method=method, settings=settings)
        return Arm(name=name, recipe=recipe, judge=partial(judge_scenes, inner=options.scenes == "inner"))

    return [
        arm("clip", "clip"),
        *(arm(f"clip-c-{rho:g}", rho=rho) for rho in (0.15, 0.3, 0.5, 1.0)),
        arm("clip-c-0.3-squash", rho=0.3, crop="squash"),
        arm("stylistic-0.3", "clip+stylistic", stylistic={"rho": 0.3}),
    ]


def _base(options: ClipCOptions) -> Recipe:
    inner = "&inner=1" if options.scenes == "inner" else ""
    base = tokens("clip", options.size, (f"scenes?levels={options.levels}{inner}",), options.pool)
    model = replace(base.model, text=replace(base.model.text, context=CONTEXT))
    if options.size == "tiny":
        model = replace(model, image=replace(model.image, patch=options.patch))
    return replace(base, model=model, steps=STEPS)


EXPERIMENT = Experiment(
    module="research.clip_c",
    title="CLIP-C against CLIP and a stylistic control on scenes",
    options=ClipCOptions,
    arms=arms,
    columns=SCENES,
)

if __name__ == "__main__":
    main(EXPERIMENT)
