"""Methods on frozen towers of other libraries: small tops trained on stored tokens (`kiloword embed --tokens`).

`python -m research.frozen --data flickr8k_224/train --val flickr8k_224/dev --images tokens/train tokens/dev --texts
tokens/train tokens/dev --out runs/frozen`; without `--texts` words are learned from scratch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import tyro

from kiloword import evaluation
from kiloword.api import Matcher
from kiloword.apps.quickstart.photos import small_top
from kiloword.config.recipes import Recipe
from kiloword.data.open import open_source
from kiloword.evaluation.features import seen
from kiloword.evaluation.retrieval import retrieval
from kiloword.evaluation.task import Inputs
from kiloword.methods.defaults import default_recipe
from kiloword.model.encoding import join
from kiloword.stores.runs import on_stores, reading_tokens, towers_of
from kiloword.training.start import with_towers
from kiloword.types import Features, Source
from research.arms import Arm, Experiment, Options, main
from research.evidence import recall_by_image
from research.scenes_judge import RECALL

ANNOTATED = {"positives": "annotated"}  # mining would need a teacher
ARMS: dict[str, dict[str, Any]] = {
    "clip": {},
    "siglip": {},
    "llip": {},
    "prolip": {},
    "fff": ANNOTATED,
    "llip+fff": {"fff": ANNOTATED},
    "flair": {},
    "siglip+matryoshka": {},
}


@dataclass(frozen=True, kw_only=True)
class FrozenOptions(Options):
    data: str = tyro.MISSING  # training photos with captions
    val: str = tyro.MISSING  # photos to evaluate on
    images: tuple[str, ...] = tyro.MISSING  # tokens of both, as for `kiloword train --image-features`
    texts: tuple[str, ...] = ()  # tokens of the captions of both; without, words are learned from scratch
    size: str = "top"
    small: bool = False  # the tops of `kiloword quickstart photos`, which train in half the time or less


def arms(options: FrozenOptions) -> list[Arm]:
    """Every method by the defaults of `kiloword train`, or with small tops."""
    return [
        Arm(name=name, recipe=replace(base(options, name), settings=settings), judge=partial(judge_tokens, options))
        for name, settings in ARMS.items()
    ]


def judge_tokens(options: FrozenOptions, matcher: Matcher) -> dict[str, float]:
    """Retrieval on the stored tokens of the photos to evaluate on."""
    reader, source = reading(options, matcher)
    return evaluation.evaluate(reader, "retrieval", source)


@dataclass(frozen=True)
class EncodedPhotos:
    """I photos and their T captions, from stored tokens."""

    captions: list[list[str]]  # [I]
    images: Features  # [I, ...]
    texts: Features  # [T, ...]

    @property
    def image_of_text(self) -> list[int]:
        """[T] the photo of each caption."""
        return [photo for photo, of_photo in enumerate(self.captions) for _ in of_photo]


def encode(options: FrozenOptions, matcher: Matcher) -> EncodedPhotos:
    """All photos to evaluate on, and their captions."""
    reader, source = reading(options, matcher)
    parts = list(seen(Inputs(reader, source)))
    captions = [list(captions) for part in parts for captions in part.captions]
    texts = reader.encode_text([caption for of_photo in captions for caption in of_photo])
    return EncodedPhotos(captions, join([part.images for part in parts]), texts)


def judge_photos(matcher: Matcher, encoded: EncodedPhotos) -> dict[str, Any]:
    """Recalls of retrieval, and the mean R@1 of every photo: outcomes [I], and their mean as mR@1."""
    images, texts, owner = encoded.images, encoded.texts, encoded.image_of_text
    outcomes = recall_by_image(matcher, images, texts, owner)
    recalls = dict(retrieval(matcher.score, images, texts, torch.tensor(owner)))
    return {**recalls, "mr1": float(outcomes.mean()), "outcomes": outcomes}


def judge_dev(options: FrozenOptions, matcher: Matcher) -> dict[str, Any]:
    """`judge_photos` of the photos to evaluate on, from their stored tokens."""
    return judge_photos(matcher, encode(options, matcher))


def reading(options: FrozenOptions, matcher: Matcher) -> tuple[Matcher, Source]:
    """The model and the photos to evaluate on, which read stored tokens."""
    model, source = matcher.model, open_source(options.val)
    source, tokenizer = reading_tokens(model, matcher.tokenizer, source, options.images, options.texts)
    return Matcher(model, tokenizer, matcher.method), source


def base(options: FrozenOptions, method: str) -> Recipe:
    """What the flags `--image-features` and `--text-features` make of the defaults."""
    towers = towers_of(options.images, options.texts)
    recipe = with_towers(default_recipe(method, options.size, (options.data,)), *towers)
    recipe = on_stores(recipe, (), options.images, options.texts)
    return small_top(recipe) if options.small else recipe


EXPERIMENT = Experiment(
    module="research.frozen",
    title="Methods on frozen towers",
    options=FrozenOptions,
    arms=arms,
    columns=RECALL,
)

if __name__ == "__main__":
    main(EXPERIMENT)
