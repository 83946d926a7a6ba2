"""Several models as one: the mean of their scores (docs/towers.md, "Figures").

`python -m research.together runs/0/model runs/1/model runs/2/model --data flickr8k_224/dev` prints the recalls of each
and of all together; for models whose score is the cosine of one vector each, of the same image size.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor

from kiloword.api import Matcher, load
from kiloword.data.reading import eval_batches
from kiloword.data.sources.open import open_source
from kiloword.evaluation.baseline import dot
from kiloword.evaluation.retrieval.task import retrieval
from kiloword.terminal import say
from kiloword.types import Features, Source

KS = (1, 5, 10)


class Vectors(NamedTuple):
    """Images and captions of a source, as a model sees them: rows of norm 1."""

    images: Tensor  # [I, D]
    texts: Tensor  # [T, D]
    image_of_text: Tensor  # [T] int64


def vectors(matcher: Matcher, source: Source, mirrored: bool = False) -> Vectors:
    """Encode a source. Args: mirrored: an image's vector is the mean of its own and its mirror image's."""
    images, captions, image = list[Tensor](), list[str](), list[int]()
    for batch in eval_batches(source, matcher.model.config.image.size):
        views = [batch.images, batch.images.flip(-1)] if mirrored else [batch.images]
        image += [len(images) + place for place, texts in enumerate(batch.captions) for _ in texts]
        captions += [text for texts in batch.captions for text in texts]
        images += F.normalize(torch.stack([matcher.encode_image(list(view))["vec"] for view in views]).sum(0), dim=-1)
    return Vectors(torch.stack(images), matcher.encode_text(captions)["vec"], torch.tensor(image))


def together(models: Sequence[Vectors]) -> Vectors:
    """One model [N, K D], whose cosines are the means of the K models' cosines."""
    images, texts = (
        torch.cat(parts, -1) / len(models) ** 0.5
        for parts in ([one.images for one in models], [one.texts for one in models])
    )
    return Vectors(images, texts, models[0].image_of_text)


def _recalls(name: str, of: Vectors) -> str:
    images: Features = {"vec": of.images}
    values = dict(retrieval(dot, images, {"vec": of.texts}, of.image_of_text, KS))
    both = (" / ".join(f"{values[f'{side}_retrieval_recall@{k}']:.3f}" for side in ("text", "image")) for k in KS)
    return f"{name}: R@1, R@5, R@10, text / image: " + ", ".join(both)


def main(models: tyro.conf.Positional[tuple[Path, ...]], *, data: str, mirrored: bool = False) -> None:
    """Print the recalls of each model, and of the mean of their scores.

    Args: models: folders; data: SRC with captions; mirrored: images are seen as they are and mirrored.
    """
    seen = list[Vectors]()
    for folder in models:
        seen.append(vectors(load(folder), open_source(data), mirrored))
        say(_recalls(str(folder), seen[-1]))
    say(_recalls("together", together(seen)))


if __name__ == "__main__":
    tyro.cli(main, prog="python -m research.together")
