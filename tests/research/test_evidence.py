"""The bootstrap that decides claims, the verdicts of its intervals, and measures of the toy figure of inclusion."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kiloword.evaluation.retrieval import retrieval
from kiloword.model.heads import unit
from research.evidence import Claim, Effect, decided, effect, packed, recall_by_image, unpacked
from research.prolip_toy import NAMED, main, measured


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
    ("found", "least", "verdict"),
    [
        (Effect(0.03, 0.01, 0.05), 0.01, "shown"),
        (Effect(0.005, 0.001, 0.009), 0.01, "refuted"),  # there, but smaller than claimed
        (Effect(-0.02, -0.04, 0.0), 0.01, "refuted"),
        (Effect(0.005, 0.001, 0.02), 0.01, "undecided"),
        (Effect(0.02, -0.01, 0.05), 0.01, "undecided"),
        (Effect(-0.002, -0.008, 0.004), -0.01, "shown"),  # a loss that is allowed must hold the whole interval
        (Effect(-0.002, -0.012, 0.008), -0.01, "undecided"),
        (Effect(-0.03, -0.04, -0.02), -0.01, "refuted"),
    ],
)
def test_a_verdict_needs_the_effect_and_the_interval(found: Effect, least: float, verdict: str) -> None:
    assert found.verdict(least) == verdict


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


# The toy figure of inclusion


def printed_inc(mean_1: float, std_1: float, mean_2: float, std_2: float) -> float:
    """Eq. 3 as it is printed."""
    v1, v2 = std_1**2, std_2**2
    a, b, c = 1 / v1 + 1 / (2 * v2), 2 * mean_1 / v1 + mean_2 / v2, mean_1**2 / v1 + mean_2**2 / (2 * v2)
    return -2 * math.log(v1) - math.log(v2) - 0.5 * math.log(a) + b**2 / (4 * a) - c


@pytest.mark.parametrize("pair", [*NAMED.values(), (0.3, 0.7, -1.1, 2.0)])
def test_measures_are_those_of_the_paper(pair: tuple[float, float, float, float]) -> None:
    values = measured(*pair)
    assert values.inc == pytest.approx(printed_inc(*pair))
    assert values.h == pytest.approx(printed_inc(*pair) - printed_inc(*pair[2:], *pair[:2]), abs=1e-9)
    x = np.linspace(-30, 30, 60_001)
    p1, p2 = (np.exp(-0.5 * ((x - m) / s) ** 2) / (s * math.sqrt(2 * math.pi)) for m, s in (pair[:2], pair[2:]))
    constant = 0.5 * math.log(math.pi) - 1.5 * math.log(2 * math.pi)
    assert values.inc_exact + constant == pytest.approx(math.log(np.trapezoid(p1**2 * p2, x)))
    logs = [-0.5 * ((x - m) / s) ** 2 - math.log(s) for m, s in (pair[:2], pair[2:])]
    assert values.kl == pytest.approx(float(np.trapezoid(p1 * (logs[0] - logs[1]), x)))


def test_page(tmp_path: Path) -> None:
    main(tmp_path / "toy.html", ((0.0, 1.0, 1.0, 2.0),))
    html = (tmp_path / "toy.html").read_text()
    assert "pair 1" in html
    assert 'role="img"' in html
