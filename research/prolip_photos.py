"""ProLIP on photos: are general captions more uncertain, and do variances help to climb from a photo to the general?

`python -m research.prolip_photos --data flickr8k/train --val flickr8k/dev --chains coco_hier/dev --out
runs/prolip-photos`; chains are photos with HierarCaps' four captions each, general to specific. The claims are those of
arXiv:2410.18857, figures 7 and 8 and table 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import tyro

from kiloword import evaluation
from kiloword.api import Matcher
from research.arms import Arm, Experiment, main
from research.flickr import FlickrOptions, base
from research.prolip import HERE, SPREAD

COLUMNS = {  # of a table: heading -> metric
    "R@10 text": "text_retrieval_recall@10",
    "R@10 image": "image_retrieval_recall@10",
    **{f"HierarCaps {name}": f"hierarcaps_{name}" for name in ("precision", "recall", "order")},
    "traversal precision": "traversal_empty_precision",
    "recall": "traversal_empty_recall",
    "inclusive precision": "traversal_inclusive_precision",
    "inclusive recall": "traversal_inclusive_recall",
    **{f"variance {k}": f"text_uncertainty_level@{k}" for k in range(4)},
    "rho level": "text_uncertainty_level_spearman",
    "rho words": "text_uncertainty_words_spearman",
    "in general": "inclusion_chain",
}


@dataclass(frozen=True, kw_only=True)
class PhotoOptions(FlickrOptions):
    chains: str = tyro.MISSING  # photos with chains of captions


def arms(options: PhotoOptions) -> list[Arm]:
    """The baseline, ProLIP with the weights of its preset, and with those that show at this scale."""

    def judge(matcher: Matcher) -> dict[str, float]:
        metrics = evaluation.evaluate(matcher, "retrieval", options.val)
        metrics |= evaluation.evaluate(matcher, "hierarchy", options.chains)
        if matcher.model.head.uncertainty is None:
            return metrics
        return metrics | evaluation.evaluate(matcher, "uncertainty", options.chains)

    def arm(name: str, method: str, settings: Mapping[str, Any]) -> Arm:
        return Arm(name=name, recipe=replace(base(options, method), settings=dict(settings)), judge=judge)

    return [
        arm("siglip", "siglip", {}),
        arm("as-preset", "prolip", {}),
        arm("prolip", "prolip", HERE),
        arm("mask-token", "prolip", {**HERE, "hide_words": "mask"}),
        arm("spread", "prolip", {**HERE, **SPREAD}),
    ]


EXPERIMENT = Experiment(
    module="research.prolip_photos",
    title="ProLIP on photos: uncertainty and hierarchy",
    options=PhotoOptions,
    arms=arms,
    columns=COLUMNS,
)

if __name__ == "__main__":
    main(EXPERIMENT)
