"""The task spectrum: against numpy, and on spectra that are known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from kiloword.api import Matcher
from kiloword.config.recipes import sizes
from kiloword.data.open import open_source
from kiloword.evaluation import evaluate, find
from kiloword.evaluation.spectrum import covariance, effective_rank, tower_output
from kiloword.methods.registry import preset
from kiloword.models.build import build
from kiloword.report import Block, Page, write_page


def test_covariance_in_parts_is_numpys_far_from_zero_too() -> None:
    x = np.random.default_rng(0).normal(size=(23, 5)) * [1, 2, 3, 1e-3, 0] + 1e6
    count, spread = covariance(torch.from_numpy(x).split(7))
    assert count == 23
    np.testing.assert_allclose(spread.numpy(), np.cov(x.T), atol=1e-8)


@pytest.mark.parametrize(
    ("values", "rank"), [([3.0, 3.0, 3.0, 0.0], 3.0), ([5.0, 0.0], 1.0), ([0.0, 0.0], 0.0), ([2.0, 1.0, 1.0], 2**1.5)]
)
def test_effective_rank_of_known_spectra(values: list[float], rank: float) -> None:
    assert effective_rank(torch.tensor(values, dtype=torch.float64)) == pytest.approx(rank)


def test_values_are_those_of_the_covariance_of_the_towers_outputs(matcher: Matcher, tmp_path: Path) -> None:
    """The screen shows powers of two."""
    source, blocks = open_source("scenes:test?n=13", 32), list[Block]()
    found = evaluate(matcher, "spectrum", source, batch=5, blocks=blocks)
    pixels = torch.stack([torch.from_numpy(np.array(source.record(row).image)).permute(2, 0, 1) for row in range(13)])
    with torch.inference_mode():
        pooled = matcher.model.head.pooling.image_pool(matcher.model.image_tokens(pixels))
    values = [found[f"singular_value@{k}"] for k in range(1, 33)]
    np.testing.assert_allclose(values, np.linalg.eigvalsh(np.cov(pooled.double().numpy().T))[::-1].clip(0), atol=1e-6)
    assert (found["vectors"], found["dimensions"], found["skipped"]) == (13, 32, 0)
    assert 1 <= found["effective_rank"] <= 12
    assert [k for k in range(1, 10) if find("spectrum").prints(f"singular_value@{k}")] == [1, 2, 4, 8]
    write_page(tmp_path / "s.html", Page("Spectrum", "", {"a": blocks}))
    assert "singular value" in (tmp_path / "s.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(("pool", "tokens"), [("contextual", 3), ("learned_average", 3), ("average", 3), ("first", 1)])
def test_mixture_tokens_are_vectors_of_their_own(matcher: Matcher, pool: str, tokens: int) -> None:
    method = preset("llip", {"k": 3, "heads": 4, "pool": pool})
    model = Matcher(build(sizes()["debug"], method), matcher.tokenizer)
    given = torch.arange(2.0 * 7 * 4).view(2, 7, 4)  # 3 mixture tokens, 4 patches
    torch.testing.assert_close(tower_output(model.model, given), given[:, :tokens])
    gaussian = build(sizes()["debug"], preset("llip+gaussian", {"k": 3, "heads": 4}))
    assert gaussian.config.image.uncertainty_token  # is no vector of its own
    torch.testing.assert_close(tower_output(gaussian, given), given[:, :3])
    assert evaluate(model, "spectrum", "scenes:test?n=5")["vectors"] == 5 * tokens


def test_one_image_has_no_covariance(matcher: Matcher) -> None:
    with pytest.raises(ValueError, match="2 or more"):
        evaluate(matcher, "spectrum", "scenes:test?n=1")
