"""The bootstrap that decides claims, and the verdicts of its intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kiloword.evaluation.retrieval import retrieval
from kiloword.model.heads import unit
from research.evidence import Claim, Correlation, Effect, Gain, decided, effect, packed, recall_by_image, unpacked


def test_the_interval_covers_the_difference_as_often_as_it_says() -> None:
    """Of outcomes whose means differ by 0.05 in truth; images and seeds vary, and are shared by both arms."""
    covered = 0
    for trial in range(60):
        rng = np.random.default_rng(trial)
        shared = rng.normal(size=(1, 200)) + 0.05 * rng.normal(size=(8, 1))
        arm, rival = (shared + mean + 0.5 * rng.normal(size=(8, 200)) for mean in (0.05, 0.0))
        found = effect(arm, rival, seed=trial)
        covered += found.low <= 0.05 <= found.high
    assert 50 <= covered <= 60


def test_pairing_removes_what_both_arms_share() -> None:
    rng = np.random.default_rng(0)
    shared = 10 * rng.normal(size=(3, 500))
    found = effect(shared + 0.1, shared)
    assert (found.value, found.low, found.high) == pytest.approx((0.1, 0.1, 0.1))
    share = effect(np.full((3, 9), 0.22), np.full((3, 9), 0.2), relative=True)
    assert share.value == pytest.approx(0.1)
    with pytest.raises(ValueError, match="at least 3 seeds, not by 2"):
        effect(shared[:2], shared[:2])
    with pytest.raises(ValueError, match="expected the same seeds and images"):
        effect(shared, shared[:, :9])


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (Effect(0.03, 0.01, 0.05), "shown"),
        (Effect(0.005, 0.001, 0.009), "refuted"),  # there, but smaller than claimed
        (Effect(-0.02, -0.04, 0.0), "refuted"),
        (Effect(0.005, 0.001, 0.02), "undecided"),
        (Effect(0.02, -0.01, 0.05), "undecided"),
    ],
)
def test_a_verdict_needs_the_effect_and_the_interval(found: Effect, verdict: str) -> None:
    assert found.verdict(0.01) == verdict


def test_a_loss_that_is_allowed_must_hold_the_whole_interval() -> None:
    assert Effect(-0.002, -0.008, 0.004).verdict(-0.01) == "shown"
    assert Effect(-0.002, -0.012, 0.008).verdict(-0.01) == "undecided"
    assert Effect(-0.03, -0.04, -0.02).verdict(-0.01) == "refuted"


def test_a_gain_is_the_difference_of_two_differences() -> None:
    def rows(mean: float) -> list[dict[str, Any]]:
        shared = [np.random.default_rng(s).normal(size=200) for s in range(3)]
        return [{"seed": s, "metrics": {"outcomes": packed(mean + shared[s])}} for s in range(3)]

    runs = {"a": rows(0.5), "b": rows(0.3), "c": rows(0.45), "d": rows(0.4)}
    gain = Gain(says="it is more", arm="a", rival="b", other="c", other_rival="d")
    assert str(decided(gain, runs)).startswith("it is more: a over b, less c over d +0.15")
    assert str(decided(gain, runs)).endswith("shown.")
    assert "d []" in str(decided(gain, {name: runs[name] for name in "abc"}))


def test_a_claim_is_decided_against_the_best_rival_on_the_same_seeds() -> None:
    def rows(mean: float, seeds: Sequence[int] = (0, 1, 2)) -> list[dict[str, Any]]:
        values = {s: mean + 0.05 * np.random.default_rng(s).normal(size=200) for s in seeds}
        return [{"seed": s, "metrics": {"outcomes": packed(values[s])}} for s in seeds]

    claim = Claim(says="it helps", arm="new", rivals=("weak", "strong"), least=0.1)
    runs = {"new": rows(0.4), "weak": rows(0.2), "strong": rows(0.3)}
    assert str(decided(claim, runs)).startswith("it helps: new over strong +0.100 (")
    assert str(decided(replace(claim, least=0.05), runs)).endswith("least 0.05: shown.")
    assert str(decided(replace(claim, relative=True), runs)).startswith("it helps: new over strong +0.33")
    other = {**runs, "weak": rows(0.2, (0, 1, 3))}
    assert decided(claim, other) == (
        "it helps: not decided yet (seeds finished: new [0, 1, 2], weak [0, 1, 3], strong [0, 1, 2])."
    )
    assert "strong []" in str(decided(claim, {name: runs[name] for name in ("new", "weak")}))


def test_outcomes_of_images_have_the_recall_as_their_mean() -> None:
    generator = torch.Generator().manual_seed(0)
    images, texts = ({"vec": unit(torch.randn(n, 8, generator=generator))} for n in (40, 80))
    owner = torch.arange(40).repeat_interleave(2)
    texts["vec"] = unit(texts["vec"] + images["vec"][owner])

    class Cosines:
        def score(self, images: dict[str, torch.Tensor], texts: dict[str, torch.Tensor]) -> torch.Tensor:
            return images["vec"] @ texts["vec"].T

    outcomes = recall_by_image(Cosines(), images, texts, owner.tolist())  # type: ignore[arg-type]
    known = dict(retrieval(Cosines().score, images, texts, owner))
    mean = (known["text_retrieval_recall@1"] + known["image_retrieval_recall@1"]) / 2
    assert outcomes.mean() == pytest.approx(mean)
    assert 0.2 < mean < 0.95
    np.testing.assert_allclose(unpacked(packed(outcomes)), outcomes, atol=1 / 500)


def test_a_correlation_needs_its_mean_and_its_interval() -> None:
    """Of 60 texts, whose uncertainties follow the number of images that they are true of, up to noise."""

    def rows(noise: float) -> dict[str, list[dict[str, Any]]]:
        rng, counts = np.random.default_rng(0), np.repeat(np.arange(20.0), 3)
        values = [np.stack([counts + noise * rng.normal(size=60), counts], 1).tolist() for _ in range(3)]
        return {"new": [{"seed": s, "metrics": {"generality": values[s]}} for s in range(3)]}

    claim = Correlation(says="it follows", arm="new", least=0.8, above=0.7)
    assert str(decided(claim, rows(1.0))).endswith("least 0.8: shown.")
    assert str(decided(claim, rows(20.0))).endswith("least 0.8: refuted.")
    assert str(decided(claim, rows(4.8))).endswith("least 0.8: undecided.")
    assert decided(claim, {}) == "it follows: not decided yet (seeds finished: new [])."
