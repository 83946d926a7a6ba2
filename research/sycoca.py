"""SyCoCa on scenes: what captions, masked images and attentive masks add, against ground truth.

`python -m research.sycoca --out runs/sycoca --jobs 2`; the arms are the rows of arXiv:2401.02137, table 5,
at equal steps: its claims are that captions help retrieval, attentive masks help both, and that text-guided images
help where plain masked images do not. With random masks of the image decoder, captions see whole images.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kiloword import evaluation
from kiloword.api import Matcher
from research.arms import Arm, Experiment, Options, main
from research.scenes_judge import SCENES, judge_scenes
from research.towers import ImagePool, tokens

STEPS = 600
JUDGED = "scenes:test?n=500&captions=5"  # of full captions, as those of retrieval
RANDOM = {"caption_mask": "none", "mim_mask": "random"}
CAPTIONS = {  # columns of a table: heading -> metric; vague captions are easily true, elsewhere too
    "statements": "statements",
    "true": "caption_statements_true",
    "elsewhere": "caption_statements_true_elsewhere",
    **{kind: f"statements_true@{kind}" for kind in ("colour", "fill", "size", "row", "column", "shape")},
    "objects mentioned": "objects_mentioned",
    "wholly true": "wholly_true",
    "CIDEr": "cider",
    "distinct": "distinct",
}


@dataclass(frozen=True, kw_only=True)
class SycocaOptions(Options):
    n: int = 20_000  # scenes to train on
    pool: ImagePool = "max"


def arms(options: SycocaOptions) -> list[Arm]:
    """The rows of table 5, and random masks for captions alone, which show what attention adds to masking."""

    def arm(name: str, method: str, settings: Mapping[str, Any]) -> Arm:
        recipe = tokens(method, options.size, (f"scenes?captions=3&n={options.n}",), options.pool)
        return Arm(name=name, recipe=replace(recipe, steps=STEPS, settings=dict(settings)), judge=judge)

    return [
        arm("itc", "clip", {}),
        arm("coca", "coca", {}),
        arm("coca-attentive", "coca", {"caption_mask": "attentive"}),
        arm("coca-random", "coca", {"caption_mask": "random"}),
        arm("mim-random", "sycoca", {"guide": "none", **RANDOM}),
        arm("mim-attentive", "sycoca", {"guide": "none"}),
        arm("tg-mim-random", "sycoca", RANDOM),
        arm("sycoca", "sycoca", {}),
    ]


def judge(matcher: Matcher) -> dict[str, float]:
    """Metrics of `judge_scenes`; for models with decoders also those of `eval caption` and `eval reconstruction`."""
    metrics = judge_scenes(matcher)
    if "text_decoder" in matcher.model.more:
        metrics |= evaluation.evaluate(matcher, "caption", JUDGED)
    if "image_decoder" in matcher.model.more:
        metrics |= evaluation.evaluate(matcher, "reconstruction", JUDGED)
    return metrics


EXPERIMENT = Experiment(
    module="research.sycoca",
    title="SyCoCa on scenes: captions, masked images, attentive masks",
    options=SycocaOptions,
    arms=arms,
    columns={
        **{name: SCENES[name] for name in ("R@1 text", "R@1 image", "mAP", "mAP level 1", "mAP level 2", "fill")},
        **CAPTIONS,
    },
)

if __name__ == "__main__":
    main(EXPERIMENT)
