"""Further methods against siglip and llip on frozen towers: retrieval of photos, and captions with changed words.

`python -m research.further --data flickr8k_224/train --val flickr8k_224/dev --images tokens/train tokens/val --texts
tokens/train tokens/val --out runs/further --small --steps 75`. Equal pairs seen, the small tops of `quickstart photos`.
With `--features` the arm of distillation, from stores of teachers (`kiloword embed MODEL --name NAME`); with `--pairs`
and `--photos` the accuracy on each category of a compositional benchmark.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kiloword import evaluation
from kiloword.api import Matcher
from kiloword.config.recipes import Recipe
from kiloword.stores.features import FeatureStore
from research.arms import Arm, Experiment, main
from research.frozen import FrozenOptions, base, judge_tokens
from research.scenes_judge import RECALL

ARMS = {  # and which stored tokens they read: others change captions, or compose images
    "siglip": ("images", "texts"),
    "llip": ("images", "texts"),
    "flair": ("images", "texts"),
    "filip": ("images", "texts"),
    "siglip+maxsim": ("images", "texts"),
    "siglip+matryoshka": ("images", "texts"),
    "siglip+negatives": ("images",),
    "siglip+clic": (),
}
SETTINGS: dict[str, dict[str, Any]] = {"siglip+maxsim": {"maxsim": {"whole": 0.5}}}
DISTILLED = "siglip+reinforced"
CATEGORIES = {  # columns of the table: heading -> metric
    name.replace("_", " "): f"accuracy@{name}"
    for name in ("replace_obj", "replace_att", "replace_rel", "swap_obj", "swap_att", "add_obj", "add_att")
}


@dataclass(frozen=True, kw_only=True)
class FurtherOptions(FrozenOptions):
    features: tuple[str, ...] = ()  # stores of the teachers' features of the training photos
    pairs: str | None = None  # captions with changed words, as for `kiloword eval compositional --pairs`
    photos: str | None = None  # of the pairs


def arms(options: FurtherOptions) -> list[Arm]:
    """Every method by the defaults of `kiloword train`, or with small tops.

    Raises: ValueError for pairs without photos, or the reverse.
    """
    if (options.pairs is None) != (options.photos is None):
        raise ValueError("--pairs and --photos go together: expected both or neither.")

    def judge(matcher: Matcher) -> dict[str, float]:
        metrics = judge_tokens(options, matcher)
        if options.pairs is None or options.photos is None:
            return metrics
        return metrics | evaluation.evaluate(matcher, "compositional", options.photos, pairs=options.pairs)

    recipes = {name: reading_only(base(options, name), stored) for name, stored in ARMS.items()}
    made = [
        Arm(name=name, recipe=replace(recipe, settings=SETTINGS.get(name, {})), judge=judge)
        for name, recipe in recipes.items()
    ]
    if not options.features:
        return made
    teachers = tuple(FeatureStore(folder).name for folder in options.features)
    recipe = base(options, DISTILLED)
    settings: dict[str, Any] = {"reinforced": {"teachers": teachers}}
    recipe = replace(recipe, settings=settings, data=replace(recipe.data, features=options.features))
    return [*made, Arm(name=DISTILLED, recipe=recipe, judge=judge)]


def reading_only(recipe: Recipe, stored: Sequence[str]) -> Recipe:
    """The recipe on some of its stored tokens; the frozen tower of others runs in every step, on equal augmentation."""
    unread: dict[str, Any] = {f"{side[:-1]}_features": () for side in ("images", "texts") if side not in stored}
    return replace(recipe, data=replace(recipe.data, **unread))


EXPERIMENT = Experiment(
    module="research.further",
    title="Further methods on frozen towers",
    options=FurtherOptions,
    arms=arms,
    columns={**RECALL, **CATEGORIES},
)

if __name__ == "__main__":
    main(EXPERIMENT)
