"""Gaussian features against the paper's equations, written out in loops (arXiv:2410.18857), and their numerics."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from kiloword.methods.prolip import gaussian
from kiloword.methods.prolip.gaussian import Form
from kiloword.types import Features
from parts import agree, drawn, model, units

FORMS: tuple[Form, ...] = ("paper", "exact")
REDUCTIONS: tuple[Literal["per_dimension", "joint"], ...] = ("per_dimension", "joint")
EPS = (0.0, -1.5, -10.0)


def gaussians(n: int, dim: int = 6, seed: int = 0) -> Features:
    """n Gaussians with unit means and log variances from -6 to 2, double precision, with gradients."""
    generator = torch.Generator().manual_seed(seed)
    log_var = torch.rand(n, dim, generator=generator, dtype=torch.float64) * 8 - 6
    return {"vec": units(n, dim, seed=seed).requires_grad_(), "log_var": log_var.requires_grad_()}


def same(found: Tensor, expected: Tensor, *sides: Features) -> None:
    """Values, and gradients of their squares' sum by all features, agree to 1e-10 of the largest."""
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10 * float(expected.detach().abs().max()))
    agree(found.square().sum(), expected.square().sum(), values(*sides), atol=1e-9)


def values(*sides: Features) -> list[Tensor]:
    return [side[name] for side in sides for name in ("vec", "log_var")]


def row(features: Features, n: int) -> tuple[Tensor, Tensor]:
    """Mean [D] and variance [D] of one."""
    return features["vec"][n], features["log_var"][n].exp()


# Distance


def eq1(a: Features, b: Features, i: int, j: int) -> Tensor:
    """d_CSD = |mu_1 - mu_2|^2 + tr(Sigma_1 + Sigma_2)."""
    (mu_1, var_1), (mu_2, var_2) = row(a, i), row(b, j)
    terms = [(mu_1[d] - mu_2[d]) ** 2 + var_1[d] + var_2[d] for d in range(len(mu_1))]
    return torch.stack(terms).sum()


def test_distance_is_the_paper_s() -> None:
    a, b = gaussians(3), gaussians(4, seed=1)
    expected = torch.stack([torch.stack([eq1(a, b, i, j) for j in range(4)]) for i in range(3)])
    same(gaussian.csd_matrix(a, b), expected, a, b)
    few = {name: value[:3] for name, value in b.items()}
    same(gaussian.csd(a, few), expected.diagonal(), a, b)


# Inclusion


def eq3(mu_1: Tensor, var_1: Tensor, mu_2: Tensor, var_2: Tensor, eps: float, form: Form) -> Tensor:
    """inc(Z_1, Z_2) of one dimension; 1 / var in A, B and C is multiplied by e^eps."""
    inv_1, inv_2 = math.exp(eps) / var_1, math.exp(eps) / var_2
    A = inv_1 + inv_2 / 2
    B = 2 * mu_1 * inv_1 + mu_2 * inv_2
    C = mu_1**2 * inv_1 + mu_2**2 * inv_2 / 2
    normalisers = -2 * var_1.log() - var_2.log() if form == "paper" else -var_1.log() - var_2.log() / 2
    return normalisers - A.log() / 2 + B**2 / (4 * A) - C


def eq4(a: Features, b: Features, n: int, m: int, eps: float, form: Form) -> Tensor:
    """H(Z_1 in Z_2) = inc(Z_1, Z_2) - inc(Z_2, Z_1), [D]."""
    found = []
    for mu_1, var_1, mu_2, var_2 in zip(*row(a, n), *row(b, m), strict=True):
        found.append(eq3(mu_1, var_1, mu_2, var_2, eps, form) - eq3(mu_2, var_2, mu_1, var_1, eps, form))
    return torch.stack(found)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("eps", EPS)
def test_inc_and_h_are_the_paper_s(form: Form, eps: float) -> None:
    a, b = gaussians(3), gaussians(3, seed=1)
    inc = [[eq3(*z, eps, form) for z in zip(*row(a, n), *row(b, n), strict=True)] for n in range(3)]
    same(gaussian.log_inclusion(a, b, eps, form), torch.stack([torch.stack(x) for x in inc]), a, b)
    same(gaussian.inclusion(a, b, eps, form), torch.stack([eq4(a, b, n, n, eps, form) for n in range(3)]), a, b)


@pytest.mark.parametrize("form", FORMS)
def test_h_of_all_pairs(form: Form) -> None:
    """Summed over dimensions; of so many pairs that they are cut into blocks."""
    a, b = gaussians(230), gaussians(215, seed=1)
    assert a["vec"].numel() * len(b["vec"]) > gaussian.CELLS
    rows, columns = ({name: x.unsqueeze(axis) for name, x in side.items()} for side, axis in ((a, 1), (b, 0)))
    expected = gaussian.inclusion(rows, columns, form=form).sum(-1)
    torch.testing.assert_close(gaussian.inclusion_matrix(a, b, form=form), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("eps", [0.0, -1.5])
def test_exact_form_is_the_integral(eps: float) -> None:
    """log of the integral of p_1^2 p_2, numerically, but for its constants.

    With eps the integrand is that of both variances e^-eps times as large, under the normalisers of the true ones.
    """
    a, b = ({k: v.detach() for k, v in gaussians(3, seed=n).items()} for n in (0, 1))
    found = gaussian.log_inclusion(a, b, eps, "exact")
    for n in range(3):
        for d, z in enumerate(zip(*row(a, n), *row(b, n), strict=True)):
            constants = -0.5 * math.log(math.pi) + 1.5 * math.log(2 * math.pi)
            assert abs(float(found[n, d]) - log_integral(*(float(x) for x in z), eps) - constants) < 1e-10


def log_integral(mu_1: float, var_1: float, mu_2: float, var_2: float, eps: float) -> float:
    """log of the integral of p_1^2 p_2 by a fine trapezoid around the peak of the integrand; of exponents, no sums."""
    wide_1, wide_2 = var_1 * math.exp(-eps), var_2 * math.exp(-eps)
    peak = (2 * mu_1 / wide_1 + mu_2 / wide_2) / (2 / wide_1 + 1 / wide_2)
    width = (2 / wide_1 + 1 / wide_2) ** -0.5
    x = torch.linspace(peak - 15 * width, peak + 15 * width, 20_001, dtype=torch.float64)
    log_p = -((x - mu_1) ** 2) / wide_1 - (x - mu_2) ** 2 / (2 * wide_2)
    normalisers = math.log(2 * math.pi * var_1) + 0.5 * math.log(2 * math.pi * var_2)
    largest = float(log_p.max())
    return largest + math.log(float(torch.trapezoid((log_p - largest).exp(), x))) - normalisers


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("form", FORMS)
def test_inclusion_loss_is_the_paper_s(form: Form, reduction: Literal["per_dimension", "joint"]) -> None:
    """Eq. 5: -log sigmoid(c H), a sigmoid a dimension or one of the sum."""
    a, b = gaussians(3), gaussians(3, seed=1)
    eps, c, expected = -1.5, 0.7, []
    for n in range(3):
        h = eq4(a, b, n, n, eps, form)
        h = h.sum()[None] if reduction == "joint" else h
        expected.append(torch.stack([-torch.log(1 / (1 + torch.exp(-c * x))) for x in h]).mean())
    same(gaussian.inclusion_loss(a, b, eps, c, form, reduction), torch.stack(expected), a, b)


# Bottleneck and ensembles


@pytest.mark.parametrize(("form", "share"), [("textbook", 0.5), ("released", 0.25)])
def test_bottleneck_is_the_divergence(form: Any, share: float) -> None:
    """In the authors' code with log sigma for the log variance: -(1 + log sigma - mu^2 - exp(log sigma)) / 2."""
    x = gaussians(4)
    ours = torch.distributions.Normal(x["vec"], (share * x["log_var"]).exp())
    divergence = torch.distributions.kl_divergence(ours, torch.distributions.Normal(0.0, 1.0))
    same(gaussian.vib(x, form), divergence.mean(1), x)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("form", "power"), [("mean", 1), ("of_average", 2)])
def test_mean_and_variance_of_a_class(form: str, power: int, weighted: bool) -> None:
    """1/N or 1/N^2 of the sum (section 4.2); with weights p, which need not sum to 1, sum p^2 var or sum p var."""
    head = model("prolip", {"ensemble": form}).head
    texts, group = gaussians(6, 16), torch.tensor([1, 0, 1, 1, 0, 2])
    weights = torch.tensor([0.5, 0.2, 0.5, 0.3, 2.0, 3.0], dtype=torch.float64) if weighted else None
    found, expected = head.ensemble(texts, group, 3, weights), []
    for k in range(3):
        members = [n for n in range(6) if group[n] == k]
        p = torch.ones(6, dtype=torch.float64) if weights is None else weights
        p = p / torch.stack([p[n] for n in members]).sum()
        expected.append(torch.stack([p[n] ** power * row(texts, n)[1] for n in members]).sum(0).log())
        mean = torch.stack([p[n] * texts["vec"][n] for n in members]).sum(0)
        torch.testing.assert_close(found["vec"][k], mean / mean.norm())
    agree(found["log_var"], torch.stack(expected), [texts["log_var"]])


def test_tiny_and_huge_variances_ensemble() -> None:
    """Single precision cannot hold e^-120 or e^100; their mean's logarithm it can. A prompt of weight 0 is out."""
    texts = {"vec": torch.zeros(4, 1), "log_var": torch.tensor([[-120.0], [-120.0], [100.0], [90.0]])}
    head, group = model("prolip").head, torch.tensor([0, 0, 1, 1])
    found = head.ensemble(texts, group, 2, torch.tensor([1.0, 1.0, 1.0, 0.0]))["log_var"]
    torch.testing.assert_close(found[:, 0], torch.tensor([-120.0, 100.0]))


# Numerics

LOG_VARS = st.floats(-30, 5, width=32)
BEYOND = st.floats(-80, 40, width=32)
NEAR = st.floats(-2, 2, width=32)  # beyond what unit vectors have
MEANS = st.one_of(st.just(0.0), NEAR, st.floats(-100, 100, width=32))
DIMS = 4


def sides(log_vars: st.SearchStrategy[float], means: st.SearchStrategy[float] = MEANS) -> st.SearchStrategy[Any]:
    """Two Gaussians, of which every second pair has equal means."""
    one = st.tuples(*(st.lists(x, min_size=DIMS, max_size=DIMS) for x in (means, log_vars, means, log_vars)))

    def made(x: tuple[list[float], ...], equal: bool) -> list[Features]:
        vec = (x[0], x[0] if equal else x[2])
        return [{"vec": torch.tensor([v]), "log_var": torch.tensor([w])} for v, w in zip(vec, x[1::2], strict=True)]

    return st.builds(made, one, st.booleans())


def off(found: Tensor, expected: Tensor) -> float:
    """The largest relative error."""
    return float(((found.double() - expected).abs() / expected.abs().clamp_min(1e-30)).max())


@pytest.mark.slow
@settings(max_examples=150, deadline=None, derandomize=True)
@given(both=sides(LOG_VARS), strength=st.sampled_from([(0.0, 1.0), (-10.0, 10.0), (-20.0, 1e3)]))
def test_single_precision(both: list[Features], strength: tuple[float, float]) -> None:
    """Every dimension's H and a distance to 1e-5 of themselves (not only of 1); losses to 1e-5 of the larger of 1 and
    themselves, of "joint" of c times the sum of |H|, for its sum may cancel."""
    wide = [{name: value.double() for name, value in x.items()} for x in both]
    assert off(gaussian.csd(*both), gaussian.csd(*wide)) < 1e-5
    for form in FORMS:
        h = gaussian.inclusion(*wide, strength[0], form)
        assert off(gaussian.inclusion(*both, strength[0], form), h) < 1e-5
        for how in REDUCTIONS:
            found, expected = (gaussian.inclusion_loss(*x, *strength, form, how) for x in (both, wide))
            scale = strength[1] * float(h.abs().sum()) if how == "joint" else float(expected.max())
            assert float((found.double() - expected).abs()) < 1e-5 * max(1.0, scale)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(both=sides(BEYOND, NEAR), eps=st.sampled_from([0.0, -10.0]))
def test_gradients_are_finite(both: list[Features], eps: float) -> None:
    """Far beyond what training meets, in single precision: values and gradients of all that is trained or asked."""
    inputs = [x.requires_grad_() for x in values(*both)]
    losses = [gaussian.inclusion(*both, eps, form).sum() for form in FORMS]
    losses += [gaussian.inclusion_loss(*both, eps, 10.0, form, how).sum() for form in FORMS for how in REDUCTIONS]
    losses += [gaussian.csd(*both).sum(), gaussian.csd_matrix(*both).sum(), sum(gaussian.vib(x).sum() for x in both)]
    for loss in losses:
        assert loss.isfinite()
        found = torch.autograd.grad(loss, inputs, retain_graph=True, allow_unused=True)
        assert all(g.isfinite().all() for g in found if g is not None)


def test_gradients_of_equal_gaussians() -> None:
    """Where a formula by |u| would have none."""
    a, b = ({"vec": torch.full((1, 2), 0.5), "log_var": torch.full((1, 2), -3.0)} for _ in range(2))
    for form in FORMS:
        inputs = [x.requires_grad_() for x in values(a, b)]
        found = torch.autograd.grad(gaussian.inclusion(a, b, 0.0, form).sum(), inputs)
        slope = (1.0 if form == "paper" else 0.5) - 1 / 6  # dH / du at u = 0
        for got, expected in zip(found, (0.0, -slope, 0.0, slope), strict=True):
            torch.testing.assert_close(got, torch.full((1, 2), expected))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_accepted(dtype: torch.dtype) -> None:
    """Computed in single precision, with gradients in the features' own; autocast changes nothing."""
    a, b = ({k: v.detach().to(dtype).requires_grad_() for k, v in gaussians(3, seed=s).items()} for s in (0, 1))
    wide = [{k: v.detach().double() for k, v in x.items()} for x in (a, b)]
    functions = (gaussian.csd, gaussian.csd_matrix, gaussian.inclusion, gaussian.inclusion_matrix)
    loss = partial(gaussian.inclusion_loss, eps=-10.0, c=10.0, form="paper", reduction="per_dimension")
    for function in (*functions, loss):
        with torch.autocast("cpu", torch.bfloat16):
            found = function(a, b)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), function(*wide), rtol=1e-5, atol=1e-5)
        assert all(g.dtype == dtype and g.isfinite().all() for g in torch.autograd.grad(found.sum(), values(a, b)))
    assert gaussian.vib(a).dtype == gaussian.variance_sum(a).dtype == torch.float32


def test_half_precision_towers_do_not_round_log_variances() -> None:
    """bfloat16 near -10 has steps of 1/16, more than two captions may differ by: the bias is added in single."""
    head, tokens = model("prolip").float().head, 0.02 * drawn(50, 6, 32).float()
    expected = head.image(tokens)["log_var"].detach()
    with torch.autocast("cpu", torch.bfloat16):
        found = head.image(tokens)["log_var"].detach()
    assert float((found - expected).abs().max()) < 1e-3
    assert float(expected.std()) > 1e-2
