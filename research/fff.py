"""FFF on scenes: several captions per image, and false negatives mined by a teacher, against ground truth.

`python -m research.fff --out runs/fff --jobs 2`; `--levels 3` or `--levels 0:1,1:1,2:2,3:2` (another
folder each) for other mixes of general and full captions. A teacher is trained first, on the same scenes. The claims
are arXiv:2405.10286, tables 4 and 5: all captions beat one, mined positives beat annotated ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from kiloword.config.recipes import Recipe
from research import teacher
from research.arms import Arm, Experiment, Options, main
from research.scenes_judge import SCENES, judge_scenes
from research.towers import ImagePool, tokens

STEPS = 1000
CAPTIONS = 5


@dataclass(frozen=True, kw_only=True)
class FffOptions(Options):
    levels: str = "1:1,2:2,3:3"  # of the captions, with weights; each image has five
    n: int = 20_000  # scenes to train on
    pool: ImagePool = "max"
    teacher_steps: int = 1500


def arms(options: FffOptions) -> list[Arm]:
    """From one caption to all; positives annotated, mined by the teacher, or exactly true, balanced or not."""
    annotated = {"positives": "annotated"}
    mined = {**teacher.thresholds(options.out), "positives": "mined"}

    def arm(name: str, method: str, settings: dict[str, Any] | None = None, captions: int = CAPTIONS) -> Arm:
        recipe = _base(options, method, captions)
        recipe = teacher.settled(recipe, settings or {}, options.out, name.startswith("mined"))
        return Arm(name=name, recipe=recipe, judge=judge_scenes)

    return [
        arm("one", "siglip", captions=1),
        arm("one-of-5", "siglip"),
        arm("all", "fff", annotated),
        arm("mined", "fff", mined),
        arm("mined-balanced", "fff", {**mined, "balance": True}),
        arm("exact", "fff+exact", annotated),
        arm("exact-balanced", "fff+exact", {**annotated, "exact": {"balance": True}}),
        arm("clip-all", "clip+many"),
    ]


def _base(options: FffOptions, method: str, captions: int = CAPTIONS) -> Recipe:
    """The towers and the length that all arms share; captions: number per image, the first of five."""
    base = tokens(method, options.size, (_data(options, captions),), options.pool)
    return replace(base, steps=STEPS)


def _data(options: FffOptions, captions: int = CAPTIONS) -> str:
    return f"scenes?levels={options.levels}&captions={captions}&n={options.n}"


def first(options: FffOptions) -> None:
    """The teacher: CLIP, one of the five captions at a time."""
    recipe = replace(_base(options, "clip"), steps=options.teacher_steps)
    teacher.make(recipe, options.out, options.device, options.workers)


EXPERIMENT = Experiment(
    module="research.fff",
    title="FFF on scenes: captions per image, and positives",
    options=FffOptions,
    arms=arms,
    first=first,
    columns=SCENES,
    notes=teacher.notes,
)

if __name__ == "__main__":
    main(EXPERIMENT)
