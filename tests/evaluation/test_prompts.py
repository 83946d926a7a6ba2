"""Prompts of classes: kept by their uncertainty or re-weighted, against algorithm 1 as printed and known answers."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kiloword.api import Matcher
from kiloword.config.recipes import sizes
from kiloword.data.open import open_source
from kiloword.data.reading import eval_batches
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.evaluation import evaluate
from kiloword.evaluation.prompts import (
    Images,
    PromptOptions,
    Prompts,
    Way,
    choose,
    combined,
    filtered,
    fit,
    initial,
    labelled,
    least,
    log_density,
    maximised,
    nearest,
    observations,
    prior,
    reweigh,
)
from kiloword.evaluation.zeroshot import classifier
from kiloword.methods.prolip.gaussian import variance_sum
from kiloword.methods.registry import preset
from kiloword.model.heads import Head
from kiloword.models.build import build
from kiloword.types import Features

SCENES = "scenes:test?task=fill&n=48"
TEMPLATES = ["something {c}", "a {c} thing", "there is something {c}", "a red {c} thing", "{c}"]
WEIGHING: tuple[Way, ...] = ("filter", "topk", "bprw")


@cache
def matcher(method: str = "prolip") -> Matcher:
    tokenizer = Tokenizer.train(["a solid red object", "a striped blue thing", "there is something hollow"], vocab=300)
    made = preset(method)
    return Matcher(build(made.shape(sizes()["debug"]), made, 0), tokenizer)


def zeroshot(way: Way, method: str = "prolip", source: str = SCENES, **options: object) -> dict[str, float]:
    given = PromptOptions(**options)  # type: ignore[arg-type]
    return evaluate(matcher(method), "zeroshot", source, prompts=way, prompt_options=given, templates=TEMPLATES)


def weights(found: dict[str, float]) -> dict[str, list[float]]:
    """Of each class by its number."""
    own: dict[str, list[float]] = {}
    for name, value in found.items():
        if name.startswith("weight@"):
            own.setdefault(name.removeprefix("weight@").split(".")[0], []).append(value)
    return own


@settings(max_examples=50, deadline=None)
@given(
    uncertainty=st.lists(st.sampled_from([0.1, 0.2, 0.2, 0.7, 1.5, 3.0]), min_size=1, max_size=12),
    coeff=st.sampled_from([-2.0, -0.5, 0.0, 1.0, 5.0]),
    k=st.integers(0, 4),
)
def test_filter_and_top_k_are_what_they_say(uncertainty: list[float], coeff: float, k: int) -> None:
    group = [n % 3 for n in range(len(uncertainty))] if len(uncertainty) > 2 else [0] * len(uncertainty)
    by_sigma = filtered(torch.tensor(uncertainty).double(), torch.tensor(group), coeff).tolist()
    by_rank = least(torch.tensor(uncertainty).double(), torch.tensor(group), k).tolist()
    for c in set(group):
        own = [n for n in range(len(uncertainty)) if group[n] == c]
        mean = sum(uncertainty[n] for n in own) / len(own)
        spread = (sum((uncertainty[n] - mean) ** 2 for n in own) / len(own)) ** 0.5
        for n in own:
            bound = mean + coeff * spread
            if abs(uncertainty[n] - bound) > 1e-6:
                assert by_sigma[n] == (uncertainty[n] <= max(bound, min(uncertainty[m] for m in own)))
        ranked = sorted(own, key=lambda n: uncertainty[n])[: k or (len(own) + 1) // 2]
        assert [n for n in own if by_rank[n]] == sorted(ranked)
        assert any(by_sigma[n] for n in own)


def score(images: Features, texts: Features) -> Tensor:
    return images["vec"] @ texts["vec"].T


def unit(*shape: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.nn.functional.normalize(torch.randn(*shape, generator=g), dim=-1)


def test_nearest_images_of_each_class() -> None:
    images, classes = {"vec": unit(30, 8)}, {"vec": unit(4, 8, seed=1)}
    expected = score(images, classes).argsort(0, descending=True)[:10].T
    assert nearest(score, images, classes, 10).tolist() == expected.tolist()
    few = nearest(score, {"vec": unit(3, 8)}, classes, 10)
    assert few.shape == (4, 3)
    assert all(sorted(own) == [0, 1, 2] for own in few.tolist())


def photos(labels: Tensor) -> Images:
    rows = list(range(100, 100 + len(labels)))
    return Images({"vec": unit(len(labels), 8), "log_var": torch.full((len(labels), 8), -8.0)}, labels, rows, "data")


def test_labelled_images_are_of_their_class_and_drawn_by_row() -> None:
    labels = torch.arange(40) % 4
    names = ["a", "b", "c", "d"]
    some = labelled(photos(labels), names, PromptOptions(shots=3))
    assert some.shape == (4, 3)
    assert (labels[some] == torch.arange(4)[:, None]).all()
    assert len(set(some.flatten().tolist())) == 12
    assert labelled(photos(labels), names, PromptOptions(shots=3)).tolist() == some.tolist()
    assert labelled(photos(labels), names, PromptOptions(shots=3, seed=1)).tolist() != some.tolist()
    assert labelled(photos(labels), names, PromptOptions(shots=2)).tolist() == some[:, :2].tolist()
    with pytest.raises(ValueError, match="has 10 labelled images"):
        labelled(photos(labels), names, PromptOptions(shots=10))  # none would be left to score
    with pytest.raises(ValueError, match="these images have several"):
        labelled(photos(torch.eye(4)), names, PromptOptions(shots=1))


def test_wrong_prompts_lose_their_weight() -> None:
    """Two classes, each with two prompts near its images and two near the other's: five labels a class tell."""
    centre = unit(2, 8)
    labels = torch.arange(40) % 2
    seen = photos(labels)
    seen.images["vec"] = torch.nn.functional.normalize(centre[labels] + 0.1 * unit(40, 8, seed=2), dim=1)
    about = torch.tensor([0, 0, 1, 1, 1, 1, 0, 0])
    vec = torch.nn.functional.normalize(centre[about] + 0.1 * unit(8, 8, seed=3), dim=1)
    texts = {"vec": vec, "log_var": torch.full((8, 8), -6.0)}
    asked = Prompts(texts, torch.arange(8) // 4, 2, ["left", "right"])
    head = matcher().model.head
    found = choose("bprw", head, score, asked, seen, PromptOptions(shots=5))
    right = (about == asked.group).view(2, 4)
    own = found.weights.view(2, 4)
    assert (own[right].view(2, 2).sum(1) > 0.9).all()
    torch.testing.assert_close(own.sum(1), torch.ones(2, dtype=torch.float64))
    rest = seen.without(found.taken)
    assert len(rest.rows) == 30
    assert not set(rest.rows) & {seen.rows[i] for i in found.taken.tolist()}
    assert (score(rest.images, found.classes).argmax(1) == rest.labels).all()


def test_weighed_gaussians() -> None:
    """Z = sum of weight times Z_i, and the settings on how its length and its variance are taken."""
    texts = {"vec": unit(4, 8), "log_var": torch.randn(4, 8, generator=torch.Generator().manual_seed(0)) - 6}
    group, weight = torch.tensor([0, 1, 0, 0]), torch.tensor([0.5, 1.0, 0.5, 0.0], dtype=torch.float64)
    head: Head = matcher().model.head
    mean = torch.stack([(texts["vec"][0] + texts["vec"][2]) / 2, texts["vec"][1]])
    var = texts["log_var"].exp()
    for options, share, expected in (
        (PromptOptions(), 0.25, mean),
        (PromptOptions(variance="linear"), 0.5, mean),
        (PromptOptions(renormalise=True), 0.25, torch.nn.functional.normalize(mean, dim=1)),
    ):
        found = combined(head, texts, group, 2, weight, options)
        torch.testing.assert_close(found["vec"], expected)
        torch.testing.assert_close(found["log_var"].exp(), torch.stack([share * (var[0] + var[2]), var[1]]))


@pytest.mark.parametrize("share", ["mean", "of_average"])
@pytest.mark.parametrize("variance", [None, "linear", "squares"])
@pytest.mark.parametrize("renormalise", [None, True, False])
def test_the_ensemble_of_section_4_2(share: str, variance: Any, renormalise: bool | None) -> None:
    """N(1/N sum mu, 1/N or 1/N^2 sum var) of unequal numbers of prompts; None: as the model's setting."""
    head = build(sizes()["debug"], preset("prolip", {"ensemble": share})).head.double()
    texts = {"vec": unit(5, 16).double(), "log_var": unit(5, 16, seed=1).double() - 3}
    group = torch.tensor([0, 1, 0, 0, 1])
    combination = combined(head, texts, group, 2, None, PromptOptions(variance=variance, renormalise=renormalise))
    for c in (0, 1):
        own = (group == c).nonzero()[:, 0].tolist()
        mean = sum(texts["vec"][n] for n in own) / len(own)
        assert isinstance(mean, Tensor)
        mean = mean if renormalise is False else mean / mean.norm()
        torch.testing.assert_close(combination["vec"][c], mean)
        squares = variance == "squares" or (variance is None and share == "of_average")
        var = sum(texts["log_var"][n].exp() for n in own) / len(own) ** (2 if squares else 1)
        torch.testing.assert_close(combination["log_var"][c].exp(), var)


def test_a_class_is_the_nearest_by_csd() -> None:
    """Section 4.2 literally: the mean is not normalised, and CSD takes its norm into account."""
    options = PromptOptions(renormalise=False, variance="squares")
    one, source = matcher(), open_source(SCENES, 32)
    classes = classifier(one.model, one.tokenizer, source.classnames, TEMPLATES, options)  # type: ignore[attr-defined]
    scores, labels = [], list[int]()
    for batch in eval_batches(source, 32):
        seen = one.encode_image(batch.images)
        labels += [int(label) for label in batch.labels]
        for mean, log_var in zip(seen["vec"], seen["log_var"], strict=True):
            distance = [
                (mean - other).square().sum() + log_var.exp().sum() + more.exp().sum()
                for other, more in zip(classes["vec"], classes["log_var"], strict=True)
            ]
            scores.append(torch.stack(distance).neg())
    expected = float((torch.stack(scores).argmax(1) == torch.tensor(labels)).double().mean())
    measured = evaluate(one, "zeroshot", SCENES, prompt_options=options, nearest="csd", templates=TEMPLATES)
    assert measured["acc1"] == pytest.approx(expected)


def test_all_prompts_kept_is_the_ensemble() -> None:
    plain = zeroshot("ensemble")
    for way, options in (("filter", {"coeff": 1e6}), ("topk", {"k": 99})):
        found = zeroshot(way, **options)  # type: ignore[arg-type]
        assert {name: found[name] for name in plain} == plain
        assert found["ensemble_acc1"] == plain["acc1"]
        assert found["kept"] == 5
        assert weights(found) == {c: [pytest.approx(0.2)] * 5 for c in "012"}
    found = zeroshot("topk", k=2)
    uncertainty = variance_sum(matcher().encode_text([template.replace("{c}", "solid") for template in TEMPLATES]))
    kept = [n for n, value in enumerate(weights(found)["0"]) if value > 0]
    assert kept == sorted(uncertainty.argsort()[:2].tolist())
    assert zeroshot("topk")["kept"] == 3  # half of five


@pytest.mark.parametrize("shots", [0, 5])
def test_values_of_re_weighting(shots: int) -> None:
    found = zeroshot("bprw", shots=shots)
    assert found["held_out"] == 3 * shots
    assert found["max_weight_uniform"] == pytest.approx(0.2)
    assert found["entropy_uniform"] == pytest.approx(1.6094379)
    assert 0.2 <= found["max_weight"] <= 1
    assert 0 <= found["entropy"] <= 1.61
    assert [sum(own) for own in weights(found).values()] == [pytest.approx(1.0)] * 3
    assert 0 < found["acc1"] < 1
    assert zeroshot("bprw", shots=shots) == found
    assert weights(zeroshot("bprw", shots=shots, seed=1)) != weights(found)


def test_without_shots_no_label_is_looked_at() -> None:
    seen = photos(torch.arange(40) % 2)
    texts = {"vec": unit(8, 8, seed=4), "log_var": torch.full((8, 8), -6.0)}
    asked = Prompts(texts, torch.arange(8) // 4, 2, ["left", "right"])
    other = replace(seen, labels=torch.full((40,), -1))
    head = matcher().model.head
    found = [choose("bprw", head, score, asked, p, PromptOptions()).weights for p in (seen, other)]
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


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


def posterior(density: Tensor, weights: Tensor, pseudo: Tensor) -> Tensor:
    """Log posterior of weights up to a constant, [C]."""
    likelihood = (density + weights.log()[:, None]).logsumexp(-1).sum(-1)
    return likelihood + torch.xlogy(pseudo, weights).sum(-1)


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
    values = [posterior(density, weights, pseudo)]
    for _ in range(40):
        weights = maximised(density, weights, pseudo)
        values.append(posterior(density, weights, pseudo))
    assert (torch.stack(values).diff(dim=0) >= -1e-10).all()
    assert (values[-1] > values[0]).all()


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


@pytest.mark.parametrize("alpha", [0.1, 0.9])
def test_below_one_weights_are_sparse_and_sum_to_one(alpha: float) -> None:
    seen, mean, log_var = mixture(7, n=30, j=5)  # fewer observations than prompts: every numerator is negative once
    found, _ = fit(seen, mean, log_var, everyone(mean), PromptOptions(alpha=alpha))
    torch.testing.assert_close(found.sum(1), torch.ones(2, dtype=torch.float64))
    assert (found >= 0).all()
    assert (found == 0).any()


def gaussians(n: int, seed: int, d: int = 6) -> Features:
    g = torch.Generator().manual_seed(seed)
    vec = torch.nn.functional.normalize(torch.randn(n, d, generator=g), dim=1)
    return {"vec": vec, "log_var": torch.randn(n, d, generator=g) - 4}


def test_classes_of_different_size_and_in_parts_weigh_as_alone() -> None:
    texts, images, names = gaussians(9, 0), gaussians(12, 1), [f"row {i}" for i in range(12)]
    group = torch.tensor([0, 2, 1, 0, 2, 2, 0, 2, 2])  # 3, 1 and 5 prompts, mixed
    chosen = torch.arange(12).view(3, 4)
    weights, _ = reweigh(texts, group, 3, images, names, chosen, PromptOptions())
    for c in range(3):
        own = {name: value[group == c] for name, value in texts.items()}
        alone, _ = reweigh(
            own, torch.zeros(len(own["vec"]), dtype=torch.int64), 1, images, names, chosen[[c]], PromptOptions()
        )
        torch.testing.assert_close(weights[group == c], alone, rtol=0, atol=1e-12)
    assert weights[2] == 1


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
    ("method", "prompts", "options", "word"),
    [
        ("prolip", "bprw", {"alpha": 0.0}, "alpha is 0"),
        ("prolip", "bprw", {"eps": -0.1}, "eps is -0.1"),
        ("prolip", "bprw", {"shots": -1}, "shots is -1"),
        ("prolip", "bprw", {"neighbours": 0}, "neighbours is 0"),
        ("prolip", "filter", {"coeff": math.nan}, "coeff is nan"),
        ("prolip", "bprw", {"alpha": 0.5, "prior": "uncertainty"}, "no mode with alpha 0.5"),
        ("prolip", "bprw", {"k": 3}, "--prompts topk"),
        ("prolip", "topk", {"alpha": 3.0}, "--prompts bprw"),
        ("prolip", "ensemble", {"shots": 3}, "--prompts bprw"),
        ("prolip", "bprw", {"shots": 100}, "at least one more to score"),
        ("siglip", "ensemble", {"variance": "squares"}, "does not have"),
        *(("siglip", way, {}, "does not have") for way in WEIGHING),
    ],
)
def test_what_does_not_fit_is_refused(method: str, prompts: Way, options: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError) as error:
        zeroshot(prompts, method, **options)
    assert word in str(error.value)
    assert "acc1" in zeroshot("ensemble", method)


def test_constants_of_the_paper() -> None:
    """Appendix C.5: alpha 5 and 10 draws without shots; alpha 2 and 100 / K draws with K."""
    assert (PromptOptions().prior_strength, PromptOptions().samples_of_image) == (5, 10)
    for shots, samples in ((5, 20), (9, 11)):
        given_options = PromptOptions(shots=shots)
        assert (given_options.prior_strength, given_options.samples_of_image) == (2, samples)
    assert PromptOptions(shots=5, alpha=7.0, samples=3).prior_strength == 7
