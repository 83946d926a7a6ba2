"""The colour baseline learns what colours tell, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kiloword.apps.quickstart import baseline
from kiloword.data.open import open_source


def test_histogram_by_hand() -> None:
    image = np.zeros((3, 2, 2), np.uint8)
    image[:, 0, 0] = (255, 0, 60)  # cell (4, 0, 1); the other three pixels are black, cell (0, 0, 0)
    found = baseline.histogram(torch.from_numpy(image)[None])
    expected = torch.zeros(1, 125, dtype=torch.float64)
    expected[0, 0], expected[0, 4 * 25 + 1] = 0.75**0.5, 0.25**0.5
    torch.testing.assert_close(found, expected)


def test_ridge_finds_the_weights() -> None:
    g = torch.Generator().manual_seed(0)
    inputs, true = torch.randn(500, 4, generator=g).double(), torch.randn(4, 3, generator=g).double()
    torch.testing.assert_close(baseline.ridge(inputs, inputs @ true), true, atol=0.01, rtol=0)


def test_data_without_what_it_needs_get_a_sentence() -> None:
    plain = open_source("scenes:test?n=8")
    with pytest.raises(ValueError, match="no class labels"):
        list(baseline.classify(plain, plain))


@pytest.mark.slow
def test_colours_alone_tell_colour_but_not_shape() -> None:
    def accuracy(task: str) -> float:
        train, test = open_source(f"scenes?n=600&task={task}"), open_source(f"scenes:test?n=200&task={task}")
        return dict(baseline.classify(train, test))["acc1"]

    assert accuracy("colour") > 0.8
    assert accuracy("shape") < 0.3
    train, test = open_source("scenes?n=300&levels=3&captions=1"), open_source("scenes:test?n=100")
    values = dict(baseline.retrieve(train, test))
    assert values == dict(baseline.retrieve(train, test))
    assert 0.3 < values["image_retrieval_recall@1"] < 0.9  # chance: 0.01; the background and the colours tell much
