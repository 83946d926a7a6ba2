"""Does a model that is conditioned on the text win without looking at the image? It must stay at chance.

`python -m research.shortcut --out runs/shortcut`, or on photos with `--data` and `--val`. Llip trained and
judged on one constant image, Llip trained on images that are shuffled against their captions, and image towers that
stay as they were drawn: those carry information, so they are a baseline and no control.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from kiloword import evaluation
from kiloword.api import Matcher
from kiloword.config.recipes import Recipe
from kiloword.data.open import open_source
from kiloword.randomness import key
from kiloword.training.resolve import open_sources
from kiloword.types import Record, Source
from research.arms import Arm, Experiment, main
from research.flickr import FlickrOptions, base
from research.scenes_judge import RECALL
from research.towers import tokens


class Captioned:
    """A source whose rows have other images: the captions of row r, the image of row `image(r)`.

    What a caption is true of is not known any more, so there is no `relevance`.
    """

    def __init__(self, source: Source, word: str, image: Callable[[int], int]) -> None:
        self.source, self.image = source, image
        self.name = f"{source.name}, {word}"
        self.fingerprint = f"{source.fingerprint}-{word}"
        self.natural = getattr(source, "natural", True)

    def __len__(self) -> int:
        return len(self.source)

    def record(self, row: int) -> Record:
        """The row's key and captions beside another image. Raises BadSample when either cannot be read."""
        return replace(self.source.record(row), image=self.source.record(self.image(row)).image)


def constant(source: Source) -> Source:
    """Every row has the image of row 0."""
    return Captioned(source, "constant images", _First())


def shuffled(source: Source) -> Source:
    """Every row has another row's image, each image once, by a permutation keyed by the data."""
    return Captioned(source, "shuffled images", _Permuted(source.fingerprint, len(source)))


class _First:
    def __call__(self, row: int) -> int:
        return 0


class _Permuted:
    """One cycle through all rows, so that none keeps its image."""

    def __init__(self, fingerprint: str, rows: int) -> None:
        order = np.random.Generator(np.random.Philox(key(fingerprint, "shuffled"))).permutation(rows)
        self.other = np.empty(rows, np.int64)
        self.other[order] = np.roll(order, 1)

    def __call__(self, row: int) -> int:
        return int(self.other[row])


STEPS = 600


@dataclass(frozen=True, kw_only=True)
class ShortcutOptions(FlickrOptions):
    data: str = "scenes?levels=3"
    val: str = "scenes:test?n=500"


def arms(options: ShortcutOptions) -> list[Arm]:
    """Llip as it is and its two controls; Llip and SigLIP with an image tower that never learns."""
    llip = _base(options, "llip")
    frozen = _base(options, "siglip")

    def arm(name: str, recipe: Recipe, change: Callable[[Source], Source] | None = None, both: bool = False) -> Arm:
        def judge(matcher: Matcher) -> dict[str, float]:
            val = open_source(options.val, matcher.model.config.image.size)
            return evaluation.evaluate(matcher, "retrieval", change(val) if change and both else val)

        def source(recipe: Recipe) -> Source:
            assert change is not None
            return change(open_sources(recipe))

        return Arm(name=name, recipe=recipe, judge=judge, source=source if change else None)

    return [
        arm("llip", llip),
        arm("llip-constant", llip, constant, both=True),
        arm("llip-shuffled", llip, shuffled),
        arm("llip-frozen", replace(llip, freeze=("image",))),
        arm("siglip-frozen", replace(frozen, freeze=("image",))),
    ]


def _base(options: ShortcutOptions, method: str) -> Recipe:
    if options.data.startswith("scenes"):
        return replace(tokens(method, options.size, (options.data,)), steps=STEPS)
    return base(options, method)


def notes(options: ShortcutOptions) -> list[str]:
    """What chance is."""
    n = len(open_source(options.val))
    return ["", f"Chance, with one caption an image: R@k is k / {n}: {1 / n:.4f}, {5 / n:.4f}, {10 / n:.4f}."]


EXPERIMENT = Experiment(
    module="research.shortcut",
    title="Shortcut control: what a text-conditioned model knows without images",
    options=ShortcutOptions,
    arms=arms,
    columns=RECALL,
    notes=notes,
)

if __name__ == "__main__":
    main(EXPERIMENT)
