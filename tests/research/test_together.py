"""The mean of several models' scores as one model."""

from __future__ import annotations

import torch

from kiloword.api import Matcher
from kiloword.config.recipes import sizes
from kiloword.data.reading import eval_batches
from kiloword.data.sources.open import open_source
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.methods.registry import preset
from kiloword.model.model import build
from research.together import together, vectors


def test_its_cosines_are_the_means_of_theirs() -> None:
    source = open_source("scenes?n=5&captions=2")
    (batch,) = eval_batches(source, sizes()["debug"].image.size)
    captions = [text for texts in batch.captions for text in texts]
    tokenizer = Tokenizer.train(captions, vocab=300)
    models = [Matcher(build(sizes()["debug"], preset("clip"), seed), tokenizer) for seed in (0, 1)]
    both = together([vectors(matcher, source) for matcher in models])
    scores = torch.stack([matcher.score(list(batch.images), captions) for matcher in models])
    torch.testing.assert_close(both.images @ both.texts.T, scores.mean(0))
    assert both.image_of_text.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert (scores[0] - scores[1]).abs().max() > 0.01


def test_a_mirror_image_has_the_vector_of_its_image() -> None:
    source = open_source("scenes?n=2")
    matcher = Matcher(build(sizes()["debug"], preset("clip"), 0), Tokenizer.train(["a red dot"], vocab=300))
    seen = vectors(matcher, source, mirrored=True).images
    pixels = next(eval_batches(source, matcher.model.config.image.size)).images
    own, mirror = (matcher.encode_image(list(view))["vec"] for view in (pixels, pixels.flip(-1)))
    torch.testing.assert_close(seen, torch.nn.functional.normalize(own + mirror, dim=-1))
    assert not torch.equal(seen, own)
