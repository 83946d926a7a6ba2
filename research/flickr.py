"""The presets on photos with five captions each: equal towers, equal numbers of images seen.

`python -m research.flickr --data flickr8k/train --val flickr8k/dev --out runs/flickr --seeds 0 1`
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import tyro

from kiloword import evaluation
from kiloword.api import Matcher
from kiloword.config.recipes import Recipe
from kiloword.methods.defaults import default_recipe
from research import teacher
from research.arms import Arm, Experiment, Options, main
from research.scenes_judge import RECALL


@dataclass(frozen=True, kw_only=True)
class FlickrOptions(Options):
    data: str = tyro.MISSING  # training photos with captions
    val: str = tyro.MISSING  # photos to evaluate on


@dataclass(frozen=True, kw_only=True)
class PresetOptions(FlickrOptions):
    mined: bool = False  # train a teacher first, and two more arms with positives that it mines
    teacher_steps: int = 1500


def arms(options: PresetOptions) -> list[Arm]:
    """Every preset of the three papers and their baselines; fff has all captions of an image in a batch."""

    def judge(matcher: Matcher) -> dict[str, float]:
        return evaluation.evaluate(matcher, "retrieval", options.val)

    def arm(name: str, method: str, settings: dict[str, Any] | None = None) -> Arm:
        recipe = teacher.settled(base(options, method), settings or {}, options.out, name.endswith("mined"))
        return Arm(name=name, recipe=recipe, judge=judge)

    annotated = {"positives": "annotated"}
    mined = {**teacher.thresholds(options.out), "positives": "mined"}
    of_teacher = [arm("fff-mined", "fff", mined), arm("llip+fff-mined", "llip+fff", {"fff": mined})]
    return [
        arm("siglip", "siglip"),
        arm("llip", "llip"),
        arm("clip", "clip"),
        arm("clip-c", "clip-c"),
        arm("fff", "fff", annotated),
        arm("llip+fff", "llip+fff", {"fff": annotated}),
        *(of_teacher if options.mined else ()),
    ]


def base(options: FlickrOptions, method: str) -> Recipe:
    """The defaults for few photos, with patches of 16 at `tiny`, so that all arms take minutes."""
    recipe = default_recipe(method, options.size, (options.data,))
    if options.size != "tiny":
        return recipe
    return replace(recipe, model=replace(recipe.model, image=replace(recipe.model.image, patch=16)))


def first(options: PresetOptions) -> None:
    """The teacher, if --mined."""
    if options.mined:
        recipe = replace(base(options, "siglip"), steps=options.teacher_steps)
        teacher.make(recipe, options.out, options.device, options.workers)


EXPERIMENT = Experiment(
    module="research.flickr",
    title="Presets on photos",
    options=PresetOptions,
    arms=arms,
    first=first,
    columns=RECALL,
    notes=teacher.notes,
)

if __name__ == "__main__":
    main(EXPERIMENT)
