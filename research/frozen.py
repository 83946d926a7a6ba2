"""Methods on frozen towers of other libraries: small tops trained on stored tokens (`kiloword embed --tokens`).

`python -m research.frozen --data flickr8k_224/train --val flickr8k_224/dev --images tokens/train tokens/dev --texts
tokens/train tokens/dev --out runs/frozen`; without `--texts` words are learned from scratch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import tyro

from kiloword import evaluation
from kiloword.api import Matcher
from kiloword.config.recipes import Recipe
from kiloword.data.sources.open import open_source
from kiloword.features.token_runs import on_tokens, reading_tokens, towers_of
from kiloword.methods.defaults import default_recipe
from kiloword.quickstart.photos.run import small_top
from kiloword.training.start import with_towers
from research.arms import Arm, Experiment, Options, main
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
    model, source = matcher.model, open_source(options.val)
    source, tokenizer = reading_tokens(model, matcher.tokenizer, source, options.images, options.texts)
    return evaluation.evaluate(Matcher(model, tokenizer, matcher.method), "retrieval", source)


def base(options: FrozenOptions, method: str) -> Recipe:
    """What the flags `--image-features` and `--text-features` make of the defaults."""
    towers = towers_of(options.images, options.texts)
    recipe = with_towers(default_recipe(method, options.size, (options.data,)), *towers)
    recipe = on_tokens(recipe, options.images, options.texts)
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
