"""Several models as one: the mean of their scores (research/bench.md, "Tops on frozen towers").

`python -m research.together runs/0/model runs/1/model runs/2/model --data flickr8k_224/dev` prints the recalls of each
and of all together. They may be of any methods; scores of different scales have different weights in the mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from torch import Tensor

from kiloword.api import Matcher, load
from kiloword.data.open import open_source
from kiloword.evaluation.features import captioned
from kiloword.evaluation.retrieval import Score, retrieval
from kiloword.evaluation.task import Inputs
from kiloword.terminal import say, warn
from kiloword.types import Features, Source
from research.arms import in_one_message

KS = (1, 5, 10)
PROGRAM = "python -m research.together"


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """What a model makes of a source's images and captions."""

    matcher: Matcher
    views: Sequence[Features]  # of the images as they are, and mirrored if asked for: each [I, ...]
    texts: Features  # [T, ...]
    image_of_text: Tensor  # [T] int64
    skipped: int  # rows that cannot be read or have no caption


def encoded(matcher: Matcher, source: Source, mirrored: bool = False) -> Encoded:
    """Encode a source. Args: mirrored: mirror images are a second view. Raises: ValueError where it has no captions."""

    def encode(images: Tensor) -> Features:
        views = (images, images.flip(-1)) if mirrored else (images,)
        return _numbered([matcher.encode_image(view) for view in views])

    inputs = Inputs(matcher, source)
    data = captioned(inputs, encode)
    return Encoded(
        matcher=matcher,
        views=[_own(data.images, view) for view in range(1 + mirrored)],
        texts=matcher.encode_text(data.texts),
        image_of_text=torch.tensor(data.image_of_text),
        skipped=len(inputs.skipped),
    )


def together(models: Sequence[Encoded]) -> tuple[Score, Features, Features]:
    """The mean of the scores of all models and views [i, t], and what it takes: features [I, ...] and [T, ...].

    Args: models: encoded from the same source. Raises: ValueError, when called, for scores that are NaN or infinite.
    """
    members = [(one, view) for one in models for view in one.views]

    def score(images: Features, texts: Features) -> Tensor:
        scores = [one.matcher.score(_own(images, k), _own(texts, k)) for k, (one, _) in enumerate(members)]
        return torch.stack(scores).mean(0)

    return score, _numbered([view for _, view in members]), _numbered([one.texts for one, _ in members])


def _numbered(parts: Sequence[Features]) -> Features:
    """The features of all members as those of one, each name with the number of its member before it."""
    every = {f"{k} {name}": value for k, part in enumerate(parts) for name, value in part.items()}
    return {"vec": parts[0]["vec"]} | every  # `retrieval` counts rows of "vec"


def _own(features: Features, k: int) -> Features:
    """The features of member k."""
    return {name.partition(" ")[2]: value for name, value in features.items() if name.startswith(f"{k} ")}


def recalls(name: str, models: Sequence[Encoded]) -> str:
    """A line of the recalls of models together."""
    values = dict(retrieval(*together(models), models[0].image_of_text, KS))
    both = (" / ".join(f"{values[f'{side}_retrieval_recall@{k}']:.3f}" for side in ("text", "image")) for k in KS)
    return f"{name}: R@1, R@5, R@10, text / image: " + ", ".join(both)


@in_one_message(PROGRAM)
def main(models: tyro.conf.Positional[tuple[Path, ...]], *, data: str, mirrored: bool = False) -> None:
    """Print the recalls of each model, and of the mean of their scores. User errors are one message and exit code 2.

    Args: models: folders; data: SRC with captions; mirrored: images are seen as they are and mirrored.
    """
    if not models:
        raise ValueError("no model: expected folders of models.")
    seen = list[Encoded]()
    for folder in models:
        matcher = load(folder)
        source = open_source(data, matcher.model.config.image.size)
        seen.append(encoded(matcher, source, mirrored))
        say(recalls(str(folder), seen[-1:]))
    if seen[0].skipped:
        warn(f"skipped {seen[0].skipped} of {len(source)} rows, which cannot be read or have no caption")
    say(recalls("together", seen))


if __name__ == "__main__":
    tyro.cli(main, prog=PROGRAM)
