"""Prompts of classes: kept by their uncertainty or re-weighted, against algorithm 1 as printed and known answers."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from kiloword.api import Matcher
from kiloword.config.recipes import sizes
from kiloword.data.open import open_source
from kiloword.data.reading import eval_batches
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.evaluation import evaluate, prompts
from kiloword.evaluation.features import Seen
from kiloword.evaluation.zeroshot import encoded
from kiloword.methods.registry import preset
from kiloword.models.build import build

SCENES = "scenes:test?task=fill&n=48"
TEMPLATES = ["something {c}", "a {c} thing", "there is something {c}", "a red {c} thing", "{c}"]


@cache
def matcher(method: str = "prolip") -> Matcher:
    tokenizer = Tokenizer.train(["a solid red object", "a striped blue thing", "there is something hollow"], vocab=300)
    made = preset(method)
    return Matcher(build(made.shape(sizes()["debug"]), made, 0), tokenizer)


def zeroshot(way: prompts.Way, method: str = "prolip", **options: Any) -> dict[str, float]:
    given = prompts.PromptOptions(**options)
    return evaluate(matcher(method), "zeroshot", SCENES, prompts=way, prompt_options=given, templates=TEMPLATES)


def unit(*shape: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.nn.functional.normalize(torch.randn(*shape, generator=g), dim=-1)


def photos(labels: Tensor, d: int = 8) -> Seen:
    n = len(labels)
    gaussians = {"vec": unit(n, d), "log_var": torch.full((n, d), -8.0)}
    return Seen(list(range(100, 100 + n)), [""] * n, gaussians, [[]] * n, labels, [{}] * n, "data")


@pytest.mark.parametrize(("way", "kept"), [("topk", [2, 4]), ("filter", [0, 2, 4])])
def test_filter_and_top_k_are_what_they_say(way: prompts.Way, kept: list[int]) -> None:
    """Sums of variances 3, 1, 4, 2 of a class: half of them, and up to mean + deviation 3.6; 5 of the other class."""
    sums = torch.tensor([3.0, 5.0, 1.0, 4.0, 2.0])
    texts = {"vec": unit(5, 8), "log_var": (sums / 8).log()[:, None].repeat(1, 8)}
    found = prompts.choose(
        way, matcher(), prompts.Prompts(texts, torch.tensor([0, 1, 0, 0, 0]), 2), None, prompts.PromptOptions()
    )
    assert found.weights.tolist() == pytest.approx([1 if n == 1 else (n in kept) / len(kept) for n in range(5)])
    mean = torch.nn.functional.normalize(texts["vec"][kept].mean(0), dim=0)
    torch.testing.assert_close(found.classes["vec"], torch.stack([mean, texts["vec"][1]]))


def test_labelled_images_are_of_their_class_and_drawn_by_row() -> None:
    labels = torch.arange(40) % 4
    some = prompts.labelled(photos(labels), 4, prompts.PromptOptions(shots=3))
    assert some.shape == (4, 3)
    assert (labels[some] == torch.arange(4)[:, None]).all()
    assert len(set(some.flatten().tolist())) == 12
    assert prompts.labelled(photos(labels), 4, prompts.PromptOptions(shots=3)).tolist() == some.tolist()
    assert prompts.labelled(photos(labels), 4, prompts.PromptOptions(shots=3, seed=1)).tolist() != some.tolist()
    assert prompts.labelled(photos(labels), 4, prompts.PromptOptions(shots=2)).tolist() == some[:, :2].tolist()
    with pytest.raises(ValueError, match="one class per image"):
        prompts.labelled(photos(torch.eye(4)), 4, prompts.PromptOptions(shots=1))


def test_wrong_prompts_lose_their_weight() -> None:
    """Two classes, each with two prompts near its images and two near the other's: five labels a class tell."""
    centre, labels = unit(2, 8), torch.arange(40) % 2
    seen = photos(labels)
    seen.images["vec"] = torch.nn.functional.normalize(centre[labels] + 0.1 * unit(40, 8, seed=2), dim=1)
    about = torch.tensor([0, 0, 1, 1, 1, 1, 0, 0])
    vec = torch.nn.functional.normalize(centre[about] + 0.1 * unit(8, 8, seed=3), dim=1)
    asked = prompts.Prompts({"vec": vec, "log_var": torch.full((8, 8), -6.0)}, torch.arange(8) // 4, 2)
    found = prompts.choose("bprw", matcher(), asked, seen, prompts.PromptOptions(shots=5))
    own = found.weights.view(2, 4)
    assert (own[(about == asked.group).view(2, 4)].view(2, 2).sum(1) > 0.9).all()
    torch.testing.assert_close(own.sum(1), torch.ones(2, dtype=torch.float64))
    rest = seen.without(found.taken)
    assert [row - 100 for row in rest.rows] == sorted({*range(40)} - {*found.taken.tolist()})
    assert (rest.images["vec"] @ found.classes["vec"].T).argmax(1).tolist() == rest.labels.tolist()
    unlabelled = replace(seen, labels=torch.full((40,), -1))  # without shots no label is looked at
    blind = [
        prompts.choose("bprw", matcher(), asked, given, prompts.PromptOptions()).weights for given in (seen, unlabelled)
    ]
    assert torch.equal(*blind)


@pytest.mark.parametrize("share", ["mean", "of_average"])
@pytest.mark.parametrize("variance", [None, "linear", "squares"])
@pytest.mark.parametrize("renormalise", [None, True, False])
@pytest.mark.parametrize("weights", [None, [0.5, 1.0, 0.3, 0.2, 0.0]])
def test_a_class_is_the_weighted_sum_of_its_prompts(
    share: str, variance: Any, renormalise: bool | None, weights: list[float] | None
) -> None:
    """Z = sum w_i Z_i (section 4.2). None: equal weights; without settings the model's, of weights the paper's."""
    head = build(sizes()["debug"], preset("prolip", {"ensemble": share})).head.double()
    texts = {"vec": unit(5, 16).double(), "log_var": unit(5, 16, seed=1).double() - 3}
    group, given = torch.tensor([0, 1, 0, 0, 1]), None if weights is None else torch.tensor(weights).double()
    found = prompts.combined(
        head, texts, group, 2, given, prompts.PromptOptions(variance=variance, renormalise=renormalise)
    )
    for c in (0, 1):
        own = (group == c).nonzero()[:, 0]
        w = torch.full((len(own), 1), 1 / len(own)).double() if given is None else given[own, None]
        mean = (w * texts["vec"][own]).sum(0)
        unit_length = weights is None if renormalise is None else renormalise
        torch.testing.assert_close(found["vec"][c], mean / mean.norm() if unit_length else mean)
        squares = variance == "squares" or (variance is None and (weights is not None or share == "of_average"))
        torch.testing.assert_close(
            found["log_var"][c].exp(), ((w**2 if squares else w) * texts["log_var"][own].exp()).sum(0)
        )


def test_a_class_is_the_nearest_by_csd() -> None:
    """Section 4.2 literally: the mean is not normalised, and CSD takes its norm into account."""
    options = prompts.PromptOptions(renormalise=False, variance="squares")
    one, source = matcher(), open_source(SCENES, 32)
    asked = encoded(one, source.classnames, TEMPLATES)  # type: ignore[attr-defined]
    classes = prompts.choose("ensemble", one, asked, None, options).classes
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


@pytest.mark.parametrize("way", ["topk", "bprw"])
def test_weights_are_reported_and_drawn_by_the_seed(way: prompts.Way) -> None:
    found, plain = zeroshot(way), zeroshot("ensemble")
    weights = [
        [found[f"weight@{c}.{n}@{t.replace('{c}', name)}"] for n, t in enumerate(TEMPLATES)]
        for c, name in enumerate(open_source(SCENES, 32).classnames)  # type: ignore[attr-defined]
    ]
    assert [sum(of_class) for of_class in weights] == [pytest.approx(1.0)] * 3
    for name in ("acc1", "mean_per_class_recall"):
        assert found[f"ensemble_{name}"] == plain[name]
    if way == "topk":
        assert found["kept"] == 3  # half of five
        return
    assert found["max_weight"] == pytest.approx(sum(map(max, weights)) / 3)
    entropies = [-sum(w * math.log(w) for w in of_class if w) for of_class in weights]
    assert found["entropy"] == pytest.approx(sum(entropies) / 3)
    for shots in (0, 5):
        again = zeroshot(way, shots=shots)
        assert again == zeroshot(way, shots=shots)
        assert again != zeroshot(way, shots=shots, seed=1)


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


def mixture(seed: int, n: int = 4, j: int = 7, d: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    """Observations [J, D], and means and log variances of components [N, D]."""
    g = torch.Generator().manual_seed(seed)
    mean, seen = (torch.randn(k, d, generator=g, dtype=torch.float64) * 0.3 for k in (n, j))
    return seen, mean, torch.randn(n, d, generator=g, dtype=torch.float64) - 2


@pytest.mark.parametrize(("alpha", "eps"), [(5.0, 0.02), (2.0, 0.02), (1.0, 0.0), (1.3, 0.1)])
def test_equals_the_printed_algorithm(alpha: float, eps: float) -> None:
    seen, mean, log_var = mixture(int(10 * alpha))
    for steps in (0, 4):
        found = prompts.fit(seen, mean, log_var, alpha, eps, steps)
        expected = literal(seen, mean, log_var.exp(), alpha, eps, steps)
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), atol=1e-10, rtol=0)
    settled, still = (prompts.fit(seen, mean, log_var, alpha, eps, steps) for steps in (1000, 2000))
    torch.testing.assert_close(settled, still, atol=1e-4, rtol=0)


def test_log_density_is_that_of_normals() -> None:
    """Also where means lie far from zero and variances are tiny, so that the expanded square would cancel."""
    seen, mean, log_var = mixture(1, d=64)
    for shift, narrow in ((0.0, 0.0), (100.0, 0.0), (0.0, 12.0)):
        var = (log_var - narrow).exp()
        expected = torch.distributions.Normal(mean + shift, var.sqrt()).log_prob(seen[:, None] + shift).sum(-1)
        torch.testing.assert_close(
            prompts.log_density(seen + shift, mean + shift, var), expected, rtol=1e-11, atol=1e-9
        )


@pytest.mark.parametrize(("shots", "samples"), [(0, 10), (5, 20), (9, 11)])
def test_draws_are_keyed_and_of_the_right_width(shots: int, samples: int) -> None:
    """Appendix C.5: 10 draws of an image without shots, 100 / K with K."""
    images, options = photos(torch.zeros(5), 4000), prompts.PromptOptions(shots=shots)
    images.images["log_var"] = torch.linspace(-6, -2, 5)[:, None].expand(5, 4000).clone()
    seen = prompts.observations(images, torch.tensor([3, 1]), options)
    assert len(seen) == 2 * samples
    spread = (seen.view(2, samples, -1) - images.images["vec"][[3, 1]][:, None]).var((1, 2))
    torch.testing.assert_close(spread.float(), torch.tensor([-3.0, -5.0]).exp(), atol=0, rtol=0.05)
    torch.testing.assert_close(prompts.observations(images, torch.tensor([1]), options), seen[samples:], rtol=0, atol=0)
    assert not torch.equal(prompts.observations(images, torch.tensor([1]), replace(options, seed=1)), seen[samples:])


@pytest.mark.parametrize(
    ("method", "way", "options", "word"),
    [
        ("prolip", "bprw", {"shots": 48}, "48 images"),
        ("siglip", "ensemble", {"variance": "squares"}, "variances"),
        *(("siglip", way, {}, "variances") for way in ("filter", "topk", "bprw")),
    ],
)
def test_refusals(method: str, way: prompts.Way, options: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        zeroshot(way, method, **options)
    assert "acc1" in zeroshot("ensemble", method)
