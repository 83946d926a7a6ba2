"""Llip on photos: does a feature that depends on the text beat features that do not? (research/README.md)

`python -m research.conditioning --data flickr8k_224/train --val flickr8k_224/dev --images tokens/train tokens/dev
--texts tokens/train tokens/dev --out runs/conditioning`; the claim is arXiv:2405.00740, table 5. With `--dim 64` and a
folder of its own: a narrow embedding. Queries are the human captions, and phrases of them, which say part of a photo.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from kiloword.api import Matcher
from kiloword.config.recipes import Recipe
from research.arms import Arm, Experiment, main
from research.evidence import Claim, Outcomes
from research.frozen import EncodedPhotos, FrozenOptions, base, encode, judge_photos
from research.phrases import Phrases, phrases

STEPS, BATCH = 150, 256
TOKENS, HEADS = 16, 8  # mixture tokens of every arm but the class token, and heads of the poolings that learn
MOST_PHOTOS = 10  # that a phrase is true of
POOLS = ("first", "average", "learned_average", "contextual")
COOL = "contextual, temperature 1"
FLAIR = "flair"
# times the default learning rate, of {0.5, 1, 2}: the best mR@1 of seed 100
RATES = {"class token": 0.5, "contextual": 0.5, COOL: 0.5}
RIVALS = ("first", "average", "learned_average")


@dataclass(frozen=True, kw_only=True)
class ConditioningOptions(FrozenOptions):
    dim: int = 256  # of the embedding


def arms(options: ConditioningOptions) -> list[Arm]:
    """One class token; K tokens of equal towers pooled in five ways, one at two temperatures; FLAIR, of the patches."""

    def arm(name: str, recipe: Recipe, settings: dict[str, Any]) -> Arm:
        head = replace(recipe.model.head, dim=options.dim)
        recipe = replace(recipe, settings=settings, model=replace(recipe.model, head=head), steps=STEPS, batch=BATCH)
        return Arm(name=name, recipe=recipe, judge=partial(judge, options), rate=RATES.get(name, 1.0))

    llip = base(replace(options, small=True), "llip")
    token = replace(llip, method="siglip", model=replace(llip.model, head=replace(llip.model.head, image_pool="cls")))
    shared = {"k": TOKENS, "heads": HEADS}
    pooled = [arm(pool, llip, {**shared, "pool": pool, "temperature": 5.0}) for pool in POOLS]
    cool = arm(COOL, llip, {**shared, "pool": "contextual", "temperature": 1.0})
    flair = arm(FLAIR, replace(llip, method="flair"), {"heads": HEADS})
    return [arm("class token", token, {}), *pooled, cool, flair]


def judge(options: ConditioningOptions, matcher: Matcher) -> dict[str, Any]:
    """Retrieval by whole captions, and R@1 of photos by phrases: of every photo, and of every phrase."""
    encoded = encode(options, matcher)
    of_phrases = by_phrase(matcher, encoded, phrases(encoded.captions).of_at_most(MOST_PHOTOS))
    return {**judge_photos(matcher, encoded), "phrases": of_phrases, "phrase_r1": float(of_phrases.mean())}


def by_phrase(matcher: Matcher, encoded: EncodedPhotos, chosen: Phrases) -> Outcomes:
    """[P] whether a photo that a phrase is true of is first of all photos."""
    scores = matcher.score(encoded.images, matcher.encode_text(chosen.texts))  # [I, P]
    best = scores.argmax(0).tolist()
    hits = [photo in true for photo, true in zip(best, chosen.photos, strict=True)]
    return np.array(hits, dtype=np.float64)


EXPERIMENT = Experiment(
    module="research.conditioning",
    title="Poolings of K tokens on photos",
    options=ConditioningOptions,
    arms=arms,
    columns={
        "mR@1": "mr1",
        "phrases R@1": "phrase_r1",
        "R@1 text": "text_retrieval_recall@1",
        "R@1 image": "image_retrieval_recall@1",
    },
    claims=(
        Claim(says="on captions", arm="contextual", rivals=RIVALS, least=0.01),
        Claim(says="on phrases", arm="contextual", rivals=RIVALS, least=0.01, outcome="phrases"),
        Claim(says="FLAIR on captions", arm=FLAIR, rivals=RIVALS, least=0.01),
        Claim(says="FLAIR on phrases", arm=FLAIR, rivals=RIVALS, least=0.01, outcome="phrases"),
    ),
)

if __name__ == "__main__":
    main(EXPERIMENT)
