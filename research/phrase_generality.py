"""ProLIP on photos: is a phrase's variance the number of photos that it is true of? (research/README.md)

`python -m research.phrase_generality --data flickr8k_224/train --val flickr8k_224/dev --images tokens/train tokens/dev
--texts tokens/train tokens/dev --out runs/phrase-generality`; `research.generality` asks the same of classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from kiloword.api import Matcher
from research.arms import Arm, Experiment, main
from research.evidence import Claim, Correlation
from research.frozen import FrozenOptions, base, encode, judge_photos
from research.generality import ARMS, GAUSSIANS
from research.phrases import phrases

STEPS, BATCH = 150, 256
LENGTH, LEAST = 2, 2  # words of every phrase, so that length tells nothing; photos that it is true of
RATES: dict[str, float] = {}  # times the default learning rate, where seed 100 was better with another


def arms(options: FrozenOptions) -> list[Arm]:
    """The baseline, ProLIP as its preset, and with words dropped and variances spread out; equal tops."""
    top = base(replace(options, small=True), "prolip")

    def arm(name: str, method: str, settings: Mapping[str, Any]) -> Arm:
        recipe = replace(top, method=method, settings=dict(settings), steps=STEPS, batch=BATCH)
        return Arm(name=name, recipe=recipe, judge=partial(judge, options), rate=RATES.get(name, 1.0))

    return [arm(name, *choice) for name, choice in ARMS.items()]


def judge(options: FrozenOptions, matcher: Matcher) -> dict[str, Any]:
    """Recalls; of Gaussians also each phrase's uncertainty and the number of photos that it is true of, [P, 2]."""
    encoded = encode(options, matcher)
    recalls = judge_photos(matcher, encoded)
    if matcher.model.head.uncertainty is None:
        return recalls
    made = phrases(encoded.captions)
    counts = {text: len(photos) for text, photos in zip(made.texts, made.photos, strict=True)}
    texts = [text for text, count in counts.items() if count >= LEAST and len(text.split()) == LENGTH]
    uncertainty = matcher.uncertainty(matcher.encode_text(texts)).tolist()
    return recalls | {"generality": [(float(u), counts[text]) for text, u in zip(texts, uncertainty, strict=True)]}


EXPERIMENT = Experiment(
    module="research.phrase_generality",
    title="Variances of phrases and the photos that they are true of",
    options=FrozenOptions,
    arms=arms,
    columns={"mR@1": "mr1", "R@1 text": "text_retrieval_recall@1", "R@1 image": "image_retrieval_recall@1"},
    claims=(
        *(Correlation(says="variance is generality", arm=arm, least=0.4, above=0.3) for arm in GAUSSIANS),
        *(Claim(says="mR@1 is not 0.01 below siglip's", arm=arm, rivals=("siglip",), least=-0.01) for arm in GAUSSIANS),
    ),
)

if __name__ == "__main__":
    main(EXPERIMENT)
