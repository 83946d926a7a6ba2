"""SyCoCa on photos: do captions and masked images help retrieval, and what does the decoder write?

`python -m research.sycoca_photos --data flickr8k/train --val flickr8k/dev --out runs/sycoca-photos`; the
claims are those of arXiv:2401.02137, tables 1 and 2: SyCoCa finds and describes better than CoCa.
"""

from __future__ import annotations

from dataclasses import replace

from kiloword import evaluation
from kiloword.api import Matcher
from research.arms import Arm, Experiment, main
from research.flickr import FlickrOptions, base
from research.scenes_judge import RECALL

STEPS = 2000
COLUMNS = {  # of a table: heading -> metric
    **{name: RECALL[name] for name in ("R@1 text", "R@1 image", "R@10 text", "R@10 image")},
    "BLEU-4": "bleu_4",
    "ROUGE-L": "rouge_l",
    "CIDEr": "cider",
    "distinct": "distinct",
}


def arms(options: FlickrOptions) -> list[Arm]:
    """Contrast alone, with captions, and with masked images."""

    def judge(matcher: Matcher) -> dict[str, float]:
        metrics = evaluation.evaluate(matcher, "retrieval", options.val)
        if "text_decoder" not in matcher.model.more:
            return metrics
        return metrics | evaluation.evaluate(matcher, "caption", options.val)

    def arm(method: str) -> Arm:
        recipe = base(options, method)
        whole = replace(recipe.data.augment, drop_words=0.0)  # for all: captions are learned word by word
        return Arm(
            name=method,
            recipe=replace(recipe, steps=STEPS, data=replace(recipe.data, augment=whole)),
            judge=judge,
        )

    return [arm("clip"), arm("coca"), arm("sycoca")]


EXPERIMENT = Experiment(
    module="research.sycoca_photos",
    title="SyCoCa on photos: retrieval and captions",
    options=FlickrOptions,
    arms=arms,
    columns=COLUMNS,
)

if __name__ == "__main__":
    main(EXPERIMENT)
