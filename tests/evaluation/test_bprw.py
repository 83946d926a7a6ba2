"""Bayesian prompt re-weighting against algorithm 1 as printed, on mixtures with known answers, and at its edges."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kiloword.evaluation.zeroshot import PromptOptions, bprw
from kiloword.evaluation.zeroshot.bprw import (
    fit,
    initial,
    log_density,
    maximised,
    objective,
    observations,
    prior,
    reweigh,
)
from kiloword.types import Features

EXACT = PromptOptions(steps=60, tolerance=0.0)


def literal(seen: Tensor, mean: Tensor, var: Tensor, alpha: float, eps: float, steps: int) -> list[float]:
    """Algorithm 1 (arXiv:2410.18857, appendix A.5) for one class, line by line: seen [J, D]; mean, var [N, D]."""
    count, n, d = len(seen), len(mean), mean.shape[1]
    trace = [sum(float(var[k, i]) for i in range(d)) for k in range(n)]
    pi = [(1 / trace[k]) / sum(1 / t for t in trace) for k in range(n)]  # line 5
    sigma = [[float(var[k, i]) + eps for i in range(d)] for k in range(n)]  # line 6
    for _ in range(steps):
        gamma = []
        for j in range(count):
            f = []
            for k in range(n):
                product = 1.0
                for i in range(d):
                    z = float(seen[j, i]) - float(mean[k, i])
                    product *= math.exp(-z * z / (2 * sigma[k][i])) / math.sqrt(2 * math.pi * sigma[k][i])
                f.append(product)
            total = sum(pi[k] * f[k] for k in range(n))
            gamma.append([pi[k] * f[k] / total for k in range(n)])  # line 12
        explained = [sum(gamma[j][k] for j in range(count)) for k in range(n)]  # line 17
        pi = [(explained[k] + alpha - 1) / (count + n * (alpha - 1)) for k in range(n)]  # line 18
    return pi


def mixture(seed: int, c: int = 2, n: int = 4, j: int = 7, d: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    """Observations [C, J, D], and means and log variances of components [C, N, D]."""
    g = torch.Generator().manual_seed(seed)
    mean, seen = (torch.randn(c, k, d, generator=g, dtype=torch.float64) * 0.3 for k in (n, j))
    return seen, mean, torch.randn(c, n, d, generator=g, dtype=torch.float64) - 2


def everyone(mean: Tensor) -> Tensor:
    return torch.ones(mean.shape[:2], dtype=torch.bool)


@pytest.mark.parametrize(("alpha", "eps"), [(5.0, 0.02), (2.0, 0.02), (1.0, 0.0), (1.3, 0.1)])
def test_equals_the_printed_algorithm(alpha: float, eps: float) -> None:
    seen, mean, log_var = mixture(int(10 * alpha))
    options = replace(EXACT, alpha=alpha, eps=eps, steps=12)
    found, _ = fit(seen, mean, log_var, everyone(mean), options)
    for c in range(len(seen)):
        expected = literal(seen[c], mean[c], log_var[c].exp(), alpha, eps, 12)
        torch.testing.assert_close(found[c], torch.tensor(expected, dtype=torch.float64), atol=1e-10, rtol=0)


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    alpha=st.sampled_from([1.0, 1.01, 2.0, 5.0]),
    kind=st.sampled_from(["symmetric", "uncertainty"]),
)
def test_no_step_makes_the_posterior_less_likely(seed: int, alpha: float, kind: str) -> None:
    seen, mean, log_var = mixture(seed, j=30)
    density = log_density(seen, mean, log_var.exp() + 0.02)
    weights = initial(log_var, everyone(mean))
    pseudo = prior(weights, everyone(mean), alpha, kind)  # type: ignore[arg-type]
    values = [objective(density, weights, pseudo)]
    for _ in range(40):
        weights = maximised(density, weights, pseudo)
        values.append(objective(density, weights, pseudo))
    assert (torch.stack(values).diff(dim=0) >= -1e-10).all()
    assert (values[-1] > values[0]).all()


@pytest.mark.parametrize("alpha", [1.0, 3.0])
def test_the_end_is_a_maximum(alpha: float) -> None:
    """No weights nearby have a greater posterior: it is concave, so there is no other."""
    seen, mean, log_var = mixture(3, c=1, j=30)
    options = PromptOptions(alpha=alpha, steps=20000, tolerance=1e-13)
    best, _ = fit(seen, mean, log_var, everyone(mean), options)
    density = log_density(seen, mean, log_var.exp() + options.eps)
    pseudo = prior(best, everyone(mean), alpha, "symmetric")
    top = objective(density, best, pseudo)
    for n in range(4):
        for step in (1e-3, 0.1):
            other = torch.lerp(best, torch.nn.functional.one_hot(torch.tensor([n]), 4).double(), step)
            assert (objective(density, other, pseudo) <= top + 1e-9).all()


def test_log_density_is_that_of_normals() -> None:
    """Also where means lie far from zero and variances are tiny, so that the expanded square would cancel."""
    seen, mean, log_var = mixture(1, d=64)
    for shift, narrow in ((0.0, 0.0), (100.0, 0.0), (0.0, 12.0)):
        var = (log_var - narrow).exp()
        normal = torch.distributions.Normal(mean[:, None] + shift, var.sqrt()[:, None])
        expected = normal.log_prob(seen[:, :, None] + shift).sum(-1)
        torch.testing.assert_close(log_density(seen + shift, mean + shift, var), expected, rtol=1e-11, atol=1e-9)


def test_draws_of_a_mixture_give_its_weights_back() -> None:
    g = torch.Generator().manual_seed(0)
    true = torch.tensor([0.6, 0.3, 0.1, 0.0], dtype=torch.float64)
    mean = torch.randn(1, 4, 8, generator=g, dtype=torch.float64)
    log_var = torch.full_like(mean, -2.0)
    which = true.multinomial(4000, replacement=True, generator=g)
    noise = torch.randn(1, 4000, 8, generator=g, dtype=torch.float64)
    seen = mean[:, which] + noise * math.exp(-1.0)
    found, _ = fit(seen, mean, log_var, everyone(mean), PromptOptions(alpha=1.0, eps=0.0))
    torch.testing.assert_close(found[0], true, atol=0.03, rtol=0)


def test_one_prompt_has_all_the_weight() -> None:
    seen, mean, log_var = mixture(0, n=1)
    assert fit(seen, mean, log_var, everyone(mean), PromptOptions())[0].tolist() == [[1.0], [1.0]]


def test_weights_that_go_to_zero_stay_numbers() -> None:
    """Without a prior a prompt far from every image ends at exactly 0, and nothing becomes NaN."""
    seen, mean, log_var = mixture(5, d=64)
    mean[:, 0] += 1000
    options = PromptOptions(alpha=1.0)
    found, _ = fit(seen, mean, log_var, everyone(mean), options)
    assert (found[:, 0] == 0).all()
    assert found.isfinite().all()
    torch.testing.assert_close(found.sum(1), torch.ones(2, dtype=torch.float64))
    density = log_density(seen, mean, log_var.exp() + options.eps)
    assert objective(density, found, prior(found, everyone(mean), 1.0, "symmetric")).isfinite().all()


@pytest.mark.parametrize("alpha", [0.1, 0.9])
def test_below_one_weights_are_sparse_and_sum_to_one(alpha: float) -> None:
    seen, mean, log_var = mixture(7, n=30, j=5)  # fewer observations than prompts: every numerator is negative once
    found, _ = fit(seen, mean, log_var, everyone(mean), PromptOptions(alpha=alpha))
    torch.testing.assert_close(found.sum(1), torch.ones(2, dtype=torch.float64))
    assert (found >= 0).all()
    assert (found == 0).any()


def test_an_uncertain_prompt_has_a_smaller_prior() -> None:
    _, mean, log_var = mixture(9)
    start = initial(log_var, everyone(mean))
    torch.testing.assert_close(start, torch.nn.functional.normalize(1 / log_var.exp().sum(-1), p=1, dim=1))
    pseudo = prior(start, everyone(mean), 5.0, "uncertainty")
    torch.testing.assert_close(
        pseudo.sum(1), torch.full((2,), 16.0, dtype=torch.float64)
    )  # N (alpha - 1), as symmetric
    uninformed = torch.zeros(2, 7, 4, dtype=torch.float64)  # every prompt explains everything alike: the prior decides
    weights = start
    for _ in range(500):
        weights = maximised(uninformed, weights, pseudo)
    torch.testing.assert_close(weights, start)
    for _ in range(500):
        weights = maximised(uninformed, weights, prior(start, everyone(mean), 5.0, "symmetric"))
    torch.testing.assert_close(weights, torch.full_like(weights, 0.25))


def gaussians(n: int, seed: int, d: int = 6) -> Features:
    g = torch.Generator().manual_seed(seed)
    vec = torch.nn.functional.normalize(torch.randn(n, d, generator=g), dim=1)
    return {"vec": vec, "log_var": torch.randn(n, d, generator=g) - 4}


def test_classes_of_different_size_and_in_parts_weigh_as_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    texts, images, names = gaussians(9, 0), gaussians(12, 1), [f"row {i}" for i in range(12)]
    group = torch.tensor([0, 2, 1, 0, 2, 2, 0, 2, 2])  # 3, 1 and 5 prompts, mixed
    chosen = torch.arange(12).view(3, 4)
    weights, steps = reweigh(texts, group, 3, images, names, chosen, PromptOptions())
    for c in range(3):
        own = {name: value[group == c] for name, value in texts.items()}
        alone, _ = reweigh(
            own, torch.zeros(len(own["vec"]), dtype=torch.int64), 1, images, names, chosen[[c]], PromptOptions()
        )
        torch.testing.assert_close(weights[group == c], alone, rtol=0, atol=1e-12)
    assert weights[2] == 1
    monkeypatch.setattr(bprw, "HELD", 1)  # one class at a time
    parts, steps_of_parts = reweigh(texts, group, 3, images, names, chosen, PromptOptions())
    torch.testing.assert_close(parts, weights, rtol=0, atol=1e-12)
    assert steps_of_parts == steps


def test_draws_are_keyed_and_of_the_right_width() -> None:
    images, names = gaussians(5, 1), [f"row {i}" for i in range(5)]
    options = PromptOptions(samples=20000)
    seen = observations(images, names, torch.tensor([3, 1]), options).view(2, 20000, -1)
    torch.testing.assert_close(seen.mean(1).float(), images["vec"][[3, 1]], atol=0.01, rtol=0)
    torch.testing.assert_close(seen.var(1).float(), images["log_var"][[3, 1]].exp(), atol=0, rtol=0.05)
    torch.testing.assert_close(observations(images, names, torch.tensor([1]), options), seen[1], rtol=0, atol=0)
    other = observations(images, names, torch.tensor([1]), replace(options, seed=1))
    assert not torch.equal(other, seen[1])
    assert not torch.equal(seen[0] - seen[0].mean(0), seen[1] - seen[1].mean(0))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (PromptOptions(alpha=0.0), "alpha is 0"),
        (PromptOptions(eps=-0.1), "eps is -0.1"),
        (PromptOptions(shots=-1), "shots is -1"),
        (PromptOptions(neighbours=0), "neighbours is 0"),
        (PromptOptions(alpha=0.5, prior="uncertainty"), "no mode with alpha 0.5"),
        (PromptOptions(k=3), "--prompts.k is used by --prompts topk"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(options: PromptOptions, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        options.check("bprw")


def test_constants_of_the_paper() -> None:
    """Appendix C.5: alpha 5 and 10 draws without shots; alpha 2 and 100 / K draws with K."""
    assert (PromptOptions().resolved().alpha, PromptOptions().resolved().samples) == (5, 10)
    for shots, samples in ((5, 20), (9, 11)):
        given = PromptOptions(shots=shots).resolved()
        assert (given.alpha, given.samples) == (2, samples)
    assert PromptOptions(shots=5, alpha=7.0, samples=3).resolved().alpha == 7
