"""Gaussian features against the paper's equations, written out in loops (arXiv:2410.18857), and their numerics."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kiloword.losses.pairs import Blocks, sigmoid_loss
from kiloword.methods.method import annotated
from kiloword.methods.prolip import gaussian
from kiloword.methods.prolip.gaussian import Form, Gaussian, GaussianSettings
from kiloword.methods.registry import preset
from kiloword.model.heads import Head
from kiloword.models.build import build
from kiloword.types import Features, Texts
from kiloword.verify.batch import config

FORMS: tuple[Form, ...] = ("paper", "exact")
REDUCTIONS: tuple[Literal["per_dimension", "joint"], ...] = ("per_dimension", "joint")
EPS = (0.0, -1.5, -10.0)


def gaussians(n: int, dim: int = 6, seed: int = 0, trained: bool = False) -> Features:
    """n Gaussians with unit means and log variances from -6 to 2, double precision."""
    generator = torch.Generator().manual_seed(seed)
    vec = F.normalize(torch.randn(n, dim, generator=generator, dtype=torch.float64), dim=1)
    log_var = torch.rand(n, dim, generator=generator, dtype=torch.float64) * 8 - 6
    return {"vec": vec.requires_grad_(trained), "log_var": log_var.requires_grad_(trained)}


def same(found: Tensor, expected: Tensor, inputs: list[Tensor]) -> None:
    """Values, and gradients of their squares' sum by all inputs, agree to 1e-10 of the largest; none is zero."""
    pairs = [(found.detach(), expected.detach())]
    by_both = (torch.autograd.grad(x.square().sum(), inputs, retain_graph=True) for x in (found, expected))
    for got, want in [*pairs, *zip(*by_both, strict=True)]:
        assert got.shape == want.shape
        assert float(want.abs().max()) > 1e-6
        assert float((got - want).abs().max()) < 1e-10 * max(1.0, float(want.abs().max()))


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
    a, b = gaussians(3, trained=True), gaussians(3, seed=1, trained=True)
    same(gaussian.csd(a, b), torch.stack([eq1(a, b, i, i) for i in range(3)]), values(a, b))


def test_distance_of_all_pairs() -> None:
    a, b = gaussians(3, trained=True), gaussians(4, seed=1, trained=True)
    expected = torch.stack([torch.stack([eq1(a, b, i, j) for j in range(4)]) for i in range(3)])
    same(gaussian.csd_matrix(a, b), expected, values(a, b))


def test_distance_is_the_mean_over_draws() -> None:
    """Monte Carlo: the mean squared distance of a draw of each."""
    a, b = gaussians(4), gaussians(4, seed=1)
    generator = torch.Generator().manual_seed(7)
    noise = torch.randn(2, 40_000, 4, 6, generator=generator, dtype=torch.float64)
    draws = [x["vec"] + (0.5 * x["log_var"]).exp() * z for x, z in zip((a, b), noise, strict=True)]
    squares = (draws[0] - draws[1]).square().sum(2)  # [draws, 4]
    error = squares.std(0) / math.sqrt(len(squares))
    assert float(((squares.mean(0) - gaussian.csd(a, b)).abs() / error).max()) < 4
    assert float((error / gaussian.csd(a, b)).max()) < 0.01


@pytest.mark.parametrize("method", ["prolip", "llip+gaussian"])
def test_score_is_one_less_half_the_distance(method: str) -> None:
    """Eq. A.1, where the pooling has one vector a side; one image alone or among others."""
    head = build(config(), preset(method)).double().head
    dim, images = 16, torch.randn(3, 70, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    texts = Texts.pack([[0] * n for n in (4, 6, 5)])
    words = torch.randn(15, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    a, b = head.image(images), head.text(words, texts)
    assert a["log_var"].shape == b["log_var"].shape == (3, dim)
    if method == "prolip":
        torch.testing.assert_close(head.score(a, b), 1 - gaussian.csd_matrix(a, b) / 2)
        torch.testing.assert_close(head.score_pairs(a, b), 1 - gaussian.csd(a, b) / 2)
    assert head.uncertainty is not None
    loss = [head.pooling.score(a, b)[i, j] - head.score(a, b)[i, j] for i in range(3) for j in range(3)]
    trace = [(row(a, i)[1].sum() + row(b, j)[1].sum()) / 2 for i in range(3) for j in range(3)]
    torch.testing.assert_close(torch.stack(loss), torch.stack(trace))


# PPCL


def literal_head(head: Head, images: Tensor, words: list[Tensor]) -> tuple[Features, Features]:
    """Tokens [CLS, UNC, patches] and [words, UNC, CLS] -> Gaussians, section 3.1."""
    uncertainty, pooling = head.uncertainty, head.pooling
    assert isinstance(uncertainty, Gaussian)
    features: list[Features] = []
    sides = (
        (images, 0, 1, pooling.image_projection, uncertainty.image_log_var),
        (words, -1, -2, pooling.text_projection, uncertainty.text_log_var),
    )
    for side, cls, unc, projection, layer in sides:
        means = [projection.weight @ tokens[cls] for tokens in side]
        log_vars = [layer.weight @ tokens[unc] + layer.bias for tokens in side]
        features.append({"vec": torch.stack([m / m.norm() for m in means]), "log_var": torch.stack(log_vars)})
    return features[0], features[1]


def eq2(head: Head, images: Features, texts: Features, own: list[int]) -> Tensor:
    """The probabilistic pairwise contrastive loss over all pairs; the printed sign of the bias is a typo."""
    total = torch.zeros((), dtype=torch.float64)
    assert head.bias is not None
    for i in range(len(images["vec"])):
        for j in range(len(own)):
            (mu_v, var_v), (mu_t, var_t) = row(images, i), row(texts, j)
            z = head.log_scale.exp() * (mu_v @ mu_t - (var_v.sum() + var_t.sum()) / 2) + head.bias
            y = 1.0 if own[j] == i else -1.0
            total = total + torch.log(1 + torch.exp(-y * z)).squeeze()
    return total


@pytest.mark.parametrize("chunk", [0, 2])
def test_pair_loss_is_the_paper_s(chunk: int) -> None:
    """Through the real head and blocks, with gradients by tokens of both towers and every parameter of the head."""
    head = build(config(), preset("prolip", {"bias": -2.0, "log_var": -2.0})).double().head
    lengths, own = [4, 6, 3, 3, 5], [0, 0, 1, 2, 2]
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(3, 6, 32, generator=generator, dtype=torch.float64, requires_grad=True)
    words = torch.randn(sum(lengths), 32, generator=generator, dtype=torch.float64, requires_grad=True)
    inputs = [images, words, *head.parameters()]
    a, b = head.image(images), head.text(words, Texts.pack([[0] * n for n in lengths]))
    blocks = Blocks(head, a | {"position": torch.arange(3)}, b | {"position": torch.tensor(own)}, chunk=chunk)
    total = sigmoid_loss(blocks, annotated)
    expected = eq2(head, *literal_head(head, images, list(words.split(lengths))), own)
    assert float(total.count) == 3  # images
    same(total.sum, expected, inputs)


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
    a, b = gaussians(3, trained=True), gaussians(3, seed=1, trained=True)
    inc = [[eq3(*z, eps, form) for z in zip(*row(a, n), *row(b, n), strict=True)] for n in range(3)]
    same(gaussian.log_inclusion(a, b, eps, form), torch.stack([torch.stack(x) for x in inc]), values(a, b))
    same(gaussian.inclusion(a, b, eps, form), torch.stack([eq4(a, b, n, n, eps, form) for n in range(3)]), values(a, b))


@pytest.mark.parametrize("form", FORMS)
def test_h_of_all_pairs(form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    """Summed over dimensions, in blocks of one to all pairs."""
    a, b = gaussians(5), gaussians(4, seed=1)
    expected = torch.stack([torch.stack([eq4(a, b, n, m, 0.0, form).sum() for m in range(4)]) for n in range(5)])
    for cells in (1, 30, 2**18):
        monkeypatch.setattr(gaussian, "CELLS", cells)
        torch.testing.assert_close(gaussian.inclusion_matrix(a, b, form=form), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("eps", [0.0, -1.5])
def test_exact_form_is_the_integral(eps: float) -> None:
    """log of the integral of p_1^2 p_2, numerically, but for its constants.

    With eps the integrand is that of both variances e^-eps times as large, under the normalisers of the true ones.
    """
    a, b = gaussians(3), gaussians(3, seed=1)
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


def test_paper_form_takes_the_normalisers_twice() -> None:
    """H_paper = H_exact + (log var_b - log var_a) / 2, so the two may differ in sign over several dimensions."""
    a, b = gaussians(3), gaussians(3, seed=1)
    difference = gaussian.inclusion(a, b) - gaussian.inclusion(a, b, form="exact")
    torch.testing.assert_close(difference, (b["log_var"] - a["log_var"]) / 2)
    narrow = {"vec": torch.zeros(1, 2), "log_var": torch.tensor([[-1.0, 1.0]])}
    wide = {"vec": torch.tensor([[0.0, 7.0]]), "log_var": torch.tensor([[4.0, 0.0]])}
    sums = [float(gaussian.inclusion(narrow, wide, form=form).sum()) for form in FORMS]
    assert sums[0] > 0 > sums[1]


def test_h_knows_no_distance() -> None:
    """In one dimension its sign is that of the widths, and a narrow Gaussian far outside scores higher still."""
    wide = {"vec": torch.zeros(3, 1), "log_var": torch.zeros(3, 1)}
    narrow = {"vec": torch.tensor([[0.0], [1.0], [10.0]]), "log_var": torch.full((3, 1), -2.0)}
    for form in FORMS:
        h = gaussian.inclusion(narrow, wide, form=form)[:, 0]
        assert 0 < h[0] < h[1] < h[2]
        torch.testing.assert_close(gaussian.inclusion(wide, narrow, form=form)[:, 0], -h)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("form", FORMS)
def test_inclusion_loss_is_the_paper_s(form: Form, reduction: Literal["per_dimension", "joint"]) -> None:
    """Eq. 5: -log sigmoid(c H), a sigmoid a dimension or one of the sum."""
    a, b = gaussians(3, trained=True), gaussians(3, seed=1, trained=True)
    eps, c, expected = -1.5, 0.7, []
    for n in range(3):
        h = eq4(a, b, n, n, eps, form)
        if reduction == "joint":
            expected.append(-torch.log(1 / (1 + torch.exp(-c * h.sum()))))
        else:
            expected.append(torch.stack([-torch.log(1 / (1 + torch.exp(-c * x))) for x in h]).mean())
    same(gaussian.inclusion_loss(a, b, eps, c, form, reduction), torch.stack(expected), values(a, b))


# Bottleneck


def test_textbook_bottleneck_is_the_divergence() -> None:
    x = gaussians(4, trained=True)
    ours = torch.distributions.Normal(x["vec"], (0.5 * x["log_var"]).exp())
    divergence = torch.distributions.kl_divergence(ours, torch.distributions.Normal(0.0, 1.0))
    same(gaussian.vib(x), divergence.mean(1), values(x))


def test_released_bottleneck_has_log_sigma_for_log_variance() -> None:
    """As in the authors' code, -(1 + log sigma - mu^2 - exp(log sigma)) / 2."""
    x = gaussians(4, trained=True)
    expected = []
    for mu, log_var in zip(x["vec"], x["log_var"], strict=True):
        log_sigma = log_var / 2
        parts = [1 + log_sigma[d] - mu[d] ** 2 - log_sigma[d].exp() for d in range(len(mu))]
        expected.append(-torch.stack(parts).mean() / 2)
    same(gaussian.vib(x, "released"), torch.stack(expected), values(x))


# Ensembles


def gaussian_axis(**given: Any) -> Gaussian:
    return Gaussian(gaussian.tokens(config()), GaussianSettings(**given)).double()


ENSEMBLES = [
    (form, weighted, factor)
    for form, factor in (("mean", lambda p: p), ("of_average", lambda p: p * p))
    for weighted in (False, True)
]


@pytest.mark.parametrize(("form", "weighted", "factor"), ENSEMBLES)
def test_variance_of_a_class(form: str, weighted: bool, factor: Any) -> None:
    """1/N or 1/N^2 of the sum (section 4.2); with weights p, which need not sum to 1, sum p^2 var or sum p var."""
    texts, group = gaussians(6, trained=True), torch.tensor([1, 0, 1, 1, 0, 2])
    weights = torch.tensor([0.5, 0.2, 0.5, 0.3, 2.0, 3.0], dtype=torch.float64) if weighted else None
    found = gaussian_axis(ensemble=form).ensemble(texts, group, 3, weights)["log_var"]
    expected = []
    for k in range(3):
        members = [n for n in range(6) if group[n] == k]
        p = torch.ones(6, dtype=torch.float64) if weights is None else weights
        p = p / torch.stack([p[n] for n in members]).sum()
        expected.append(torch.stack([factor(p[n]) * row(texts, n)[1] for n in members]).sum(0).log())
    same(found, torch.stack(expected), [texts["log_var"]])


def test_the_head_ensembles_means_and_variances() -> None:
    head = build(config(), preset("prolip")).double().head
    texts, group = gaussians(4, dim=16), torch.tensor([0, 0, 1, 1])
    found = head.ensemble(texts, group, 2)
    mean = torch.stack([texts["vec"][:2].mean(0), texts["vec"][2:].mean(0)])
    torch.testing.assert_close(found["vec"], mean / mean.norm(dim=1, keepdim=True))
    variances = texts["log_var"].exp()
    expected = torch.stack([variances[:2].mean(0), variances[2:].mean(0)])
    torch.testing.assert_close(found["log_var"].exp(), expected)


@pytest.mark.parametrize("form", ["mean", "of_average"])
def test_tiny_and_huge_variances_ensemble(form: str) -> None:
    """Single precision cannot hold e^-120 or e^100; their mean's logarithm it can. A prompt of weight 0 is out."""
    texts = {"vec": torch.zeros(4, 1), "log_var": torch.tensor([[-120.0], [-120.0], [100.0], [90.0]])}
    axis = gaussian_axis(ensemble=form).float()
    for weights in (None, torch.tensor([1.0, 1.0, 1.0, 0.0])):
        found = axis.ensemble(texts, torch.tensor([0, 0, 1, 1]), 2, weights)["log_var"]
        wide = {"vec": texts["vec"].double(), "log_var": texts["log_var"].double()}
        expected = axis.ensemble(wide, torch.tensor([0, 0, 1, 1]), 2, weights)["log_var"]
        assert found.isfinite().all()
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)


# Numerics

LOG_VARS = st.floats(-30, 5, width=32)
BEYOND = st.floats(-80, 40, width=32)
NEAR = st.floats(-2, 2, width=32)  # beyond what unit vectors have
MEANS = st.one_of(st.just(0.0), NEAR, st.floats(-100, 100, width=32))
DIMS = 4


def sides(log_vars: st.SearchStrategy[float], means: st.SearchStrategy[float] = MEANS) -> st.SearchStrategy[Features]:
    numbers = st.lists(means, min_size=DIMS, max_size=DIMS), st.lists(log_vars, min_size=DIMS, max_size=DIMS)
    return st.tuples(*numbers).map(lambda x: {"vec": torch.tensor([x[0]]), "log_var": torch.tensor([x[1]])})


def other(a: Features, b: Features, equal: bool) -> Features:
    """b, or b with the means of a."""
    return {**b, "vec": a["vec"].clone()} if equal else b


def double(features: Features) -> Features:
    return {name: value.double() for name, value in features.items()}


def off(found: Tensor, expected: Tensor) -> float:
    """The largest relative error."""
    return float(((found.double() - expected).abs() / expected.abs().clamp_min(1e-30)).max())


@pytest.mark.slow
@settings(max_examples=150, deadline=None, derandomize=True)
@given(a=sides(LOG_VARS), b=sides(LOG_VARS), equal=st.booleans(), eps=st.sampled_from([0.0, -10.0, -20.0]))
def test_single_precision_h(a: Features, b: Features, equal: bool, eps: float) -> None:
    """Every dimension's H to 1e-5 of itself (not only of 1), and so is a distance."""
    b = other(a, b, equal)
    for form in FORMS:
        found = gaussian.inclusion(a, b, eps, form)
        expected = gaussian.inclusion(double(a), double(b), eps, form)
        assert off(found, expected) < 1e-5
    assert off(gaussian.csd(a, b), gaussian.csd(double(a), double(b))) < 1e-5


@pytest.mark.slow
@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    a=sides(LOG_VARS), b=sides(LOG_VARS), equal=st.booleans(), strength=st.sampled_from([(-10.0, 10.0), (-20.0, 1e3)])
)
def test_single_precision_inclusion_loss(a: Features, b: Features, equal: bool, strength: tuple[float, float]) -> None:
    """To 1e-5 of the larger of 1 and itself; of "joint" of c times the sum of |H|, for its sum may cancel."""
    b = other(a, b, equal)
    for form in FORMS:
        found = gaussian.inclusion_loss(a, b, *strength, form)
        expected = gaussian.inclusion_loss(double(a), double(b), *strength, form)
        assert off(found, expected) < 1e-5 or float((found - expected).abs()) < 1e-5
        found = gaussian.inclusion_loss(a, b, *strength, form, "joint")
        expected = gaussian.inclusion_loss(double(a), double(b), *strength, form, "joint")
        size = strength[1] * float(gaussian.inclusion(double(a), double(b), strength[0], form).abs().sum())
        assert float((found.double() - expected).abs()) < 1e-5 * max(1.0, size)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(a=sides(BEYOND, NEAR), b=sides(BEYOND, NEAR), equal=st.booleans(), eps=st.sampled_from([0.0, -10.0]))
def test_gradients_are_finite(a: Features, b: Features, equal: bool, eps: float) -> None:
    """Far beyond what training meets, in single precision: values and gradients of all that is trained or asked."""
    b = other(a, b, equal)
    inputs = [x.requires_grad_() for x in values(a, b)]
    losses = [gaussian.inclusion(a, b, eps, form).sum() for form in FORMS]
    losses += [gaussian.inclusion_loss(a, b, eps, 10.0, form, how).sum() for form in FORMS for how in REDUCTIONS]
    losses += [gaussian.csd(a, b).sum(), gaussian.csd_matrix(a, b).sum(), gaussian.vib(a).sum() + gaussian.vib(b).sum()]
    for loss in losses:
        assert loss.isfinite()
        found = torch.autograd.grad(loss, inputs, retain_graph=True, allow_unused=True)
        assert all(g.isfinite().all() for g in found if g is not None)


def test_equal_gaussians_have_gradients_as_in_double_precision() -> None:
    """Where a formula by |u| would have none: equal variances and equal means."""
    a, b = ({"vec": torch.full((1, 2), 0.5), "log_var": torch.full((1, 2), -3.0)} for _ in range(2))
    for form in FORMS:
        inputs = [x.requires_grad_() for x in values(a, b)]
        found = torch.autograd.grad(gaussian.inclusion(a, b, 0.0, form).sum(), inputs)
        slope = (1.0 if form == "paper" else 0.5) - 1 / 6  # dH / du at u = 0
        for got, expected in zip(found, (0.0, -slope, 0.0, slope), strict=True):
            torch.testing.assert_close(got, torch.full((1, 2), expected))


def test_the_textbook_cancellation() -> None:
    """Where B^2 / 4A - C of eq. 3 loses every digit in single precision, H keeps them."""
    a = {"vec": torch.tensor([[0.7]]), "log_var": torch.tensor([[-29.0]])}
    b = {"vec": torch.tensor([[0.70001]]), "log_var": torch.tensor([[-28.0]])}
    found = [
        eq4({k: v.to(t) for k, v in a.items()}, {k: v.to(t) for k, v in b.items()}, 0, 0, 0.0, "paper")
        for t in (torch.float32, torch.float64)
    ]
    assert float((found[0] - found[1]).abs()) > 100
    torch.testing.assert_close(gaussian.inclusion(a, b)[0].double(), found[1], rtol=1e-4, atol=0)
    inc = eq3(*row(double(a), 0), *row(double(b), 0), 0.0, "paper")
    torch.testing.assert_close(gaussian.log_inclusion(a, b)[0].double(), inc, rtol=1e-4, atol=0)


PAIRED = (
    gaussian.csd, gaussian.csd_matrix, gaussian.inclusion, gaussian.inclusion_matrix, gaussian.inclusion_loss
)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_accepted(dtype: torch.dtype) -> None:
    """Computed in single precision, with gradients in the features' own."""
    a, b = ({k: v.to(dtype).requires_grad_() for k, v in gaussians(3, seed=s).items()} for s in (0, 1))
    wide = [{k: v.detach().double() for k, v in x.items()} for x in (a, b)]
    for function in PAIRED:
        found = function(a, b)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), function(*wide), rtol=1e-5, atol=1e-5)
        assert all(g.dtype == dtype and g.isfinite().all() for g in torch.autograd.grad(found.sum(), values(a, b)))
    assert gaussian.vib(a).dtype == gaussian.variance_sum(a).dtype == torch.float32


def test_autocast_changes_nothing_trained() -> None:
    """Under bf16 autocast a matmul rounds: `csd_matrix` does not."""
    a, b = ({k: v.float() for k, v in gaussians(3, seed=s).items()} for s in (0, 1))
    expected = gaussian.csd_matrix(a, b)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(gaussian.csd_matrix(a, b), expected)
        torch.testing.assert_close(gaussian.inclusion_loss(a, b), gaussian.inclusion_loss(a, b))


# Shape


def test_log_variances_start_at_the_bias() -> None:
    """Section 3.1: the linear layer's bias starts at -10, or where the user says."""
    for said, expected in (({}, -10.0), ({"log_var": -4.0}, -4.0)):
        axis = build(config(), preset("prolip", said)).head.uncertainty
        assert isinstance(axis, Gaussian)
        for layer in (axis.image_log_var, axis.text_log_var):
            assert (layer.bias == expected).all()
            assert float(layer.weight.detach().std()) > 0


def test_towers_without_a_token_are_refused() -> None:
    shaped = gaussian.tokens(config())
    for wrong in (replace(shaped, image=config().image), replace(shaped, text=config().text)):
        with pytest.raises(ValueError, match="configure them by"):
            Gaussian(wrong, GaussianSettings())


def test_half_precision_towers_do_not_round_log_variances() -> None:
    """bfloat16 near -10 has steps of 1/16, more than two captions may differ by: the bias is added in single."""
    made = build(config(), preset("prolip"))
    axis = made.head.uncertainty
    assert isinstance(axis, Gaussian)
    tokens = 0.02 * torch.randn(50, 6, 32, generator=torch.Generator().manual_seed(0))
    expected = made.head.image(tokens)["log_var"]
    with torch.autocast("cpu", torch.bfloat16):
        found = made.head.image(tokens)["log_var"]
    assert float((found - expected).detach().abs().max()) < 1e-3
    assert float(expected.detach().std()) > 1e-2
