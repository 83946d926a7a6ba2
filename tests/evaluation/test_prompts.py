"""Which prompts count: filter, top-k and re-weighting as choices of zero-shot, on models with Gaussians and without."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kiloword.api import Matcher
from kiloword.cli.main import main
from kiloword.config.recipes import ModelFile, sizes
from kiloword.data.open import open_source
from kiloword.data.reading import eval_batches
from kiloword.data.scenes.captions import parse
from kiloword.data.scenes.world import TASKS
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.evaluation import evaluate
from kiloword.evaluation.zeroshot import PromptOptions, Way
from kiloword.evaluation.zeroshot import prompts as choosing
from kiloword.evaluation.zeroshot.bprw import combined
from kiloword.evaluation.zeroshot.mistakes import SHOWN
from kiloword.evaluation.zeroshot.page import Class, report
from kiloword.evaluation.zeroshot.prompts import Images, Prompts, choose, filtered, labelled, least, nearest
from kiloword.evaluation.zeroshot.task import classifier
from kiloword.methods.prolip.gaussian import variance_sum
from kiloword.methods.registry import preset
from kiloword.model.heads import Head
from kiloword.models.build import build
from kiloword.models.model_folder import save_model
from kiloword.types import Features
from research import bprw as experiment

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


@pytest.mark.parametrize("rows", [7, 4096])
def test_nearest_images_of_each_class(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "ROWS", rows)
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
    with pytest.raises(ValueError, match="class 'c' has 0 labelled images"):
        labelled(photos(torch.arange(40) % 2), ["a", "b", "c"], PromptOptions(shots=3))
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


def test_variances_that_a_model_does_not_have() -> None:
    with pytest.raises(ValueError, match=r"--prompts\.variance squares combines variances, which this model does not"):
        zeroshot("ensemble", "clip", variance="squares")


def test_all_prompts_kept_is_the_ensemble() -> None:
    plain = zeroshot("ensemble")
    for way, options in (("filter", {"coeff": 1e6}), ("topk", {"k": 99})):
        found = zeroshot(way, **options)  # type: ignore[arg-type]
        assert {name: found[name] for name in plain} == plain
        assert found["ensemble_acc1"] == plain["acc1"]
        assert found["kept"] == 5
        assert weights(found) == {c: [pytest.approx(0.2)] * 5 for c in "012"}


def test_filter_keeps_the_least_uncertain() -> None:
    found = zeroshot("topk", k=2)
    output = [template.replace("{c}", "solid") for template in TEMPLATES]
    uncertainty = variance_sum(matcher().encode_text(output))
    kept = [n for n, value in enumerate(weights(found)["0"]) if value > 0]
    assert kept == sorted(uncertainty.argsort()[:2].tolist())
    assert found["kept"] == 2


def test_top_k_keeps_half_of_the_prompts_by_default() -> None:
    assert zeroshot("topk")["kept"] == 3  # of five
    assert zeroshot("filter") == zeroshot("filter", coeff=1.0) != zeroshot("filter", coeff=-0.5)


def test_the_page_explains_what_it_shows_alone() -> None:
    plain = report({"a": {"acc1": 0.5}}, "photos", {"a": {}})
    assert "nats" not in plain
    assert "Weights" not in plain
    classes = [Class("cat", [("a cat", 0.7), ("one cat", 0.3)], [])]
    weighed = {"a": {"acc1": 0.5, "entropy": 0.6}, "b": {"acc1": 0.4}}
    page = report(weighed, "photos", {"a": {"classes": classes, "way": "bprw"}})
    assert "Weights of a class&#x27;s prompts sum to 1. Entropies are in nats." in page
    sure, even = Class("sure", [("a", 1.0), ("b", 0.0)], []), Class("even", [("a", 0.5), ("b", 0.5)], [])
    assert sure.entropy == 0
    assert even.entropy == pytest.approx(math.log(2))
    page = report({"a": {"entropy": 0.5}}, "photos", {"a": {"classes": [sure, even], "way": "bprw"}})
    assert "the largest weight 1/2 = 0.5 and the entropy 0.693" in page
    assert "entropy of a class" in page
    assert "<svg" not in report({}, "", {"a": {"classes": [sure], "way": "topk"}})


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


def test_labelled_images_are_not_scored() -> None:
    """Accuracy is that of the same source without the rows that were learned from."""
    source = open_source(SCENES, 32)
    labels = torch.tensor([source.record(row).label for row in range(48)])
    held = labelled(
        replace(photos(labels), rows=list(range(48)), fingerprint=source.fingerprint), "abc", PromptOptions(shots=4)
    )
    images = matcher().encode_image(torch.stack([matcher()._transform(source.record(row).image) for row in range(48)]))
    rest = torch.tensor([row for row in range(48) if row not in held])
    names = source.classnames  # type: ignore[attr-defined]
    correct = matcher().classify({k: v[rest] for k, v in images.items()}, names, TEMPLATES).argmax(1) == labels[rest]
    found = zeroshot("bprw", shots=4)
    assert found["ensemble_acc1"] == pytest.approx(correct.double().mean().item())


def test_fewer_images_than_neighbours() -> None:
    found = zeroshot("bprw", source="scenes:test?task=fill&n=4")
    assert [sum(own) for own in weights(found).values()] == [pytest.approx(1.0)] * 3


def test_conditioned_on_the_text_and_uncertain() -> None:
    assert 0 <= zeroshot("bprw", method="llip+gaussian", shots=2)["acc1"] <= 1


@pytest.mark.parametrize("way", WEIGHING)
def test_a_model_without_gaussians_is_refused(way: Way) -> None:
    with pytest.raises(ValueError, match=f"--prompts {way} weights prompts by their uncertainty"):
        zeroshot(way, method="siglip")
    assert "acc1" in zeroshot("ensemble", method="siglip")


def test_verb_and_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = matcher()
    file = ModelFile(method="prolip", settings={}, model=model.model.config)
    save_model(tmp_path / "a" / "model", model.model, model.tokenizer, file)
    words = ["eval", "zeroshot", str(tmp_path / "a" / "model"), "--data", SCENES]
    html, numbers = tmp_path / "z.html", tmp_path / "z.json"
    main([*words, "--prompts", "bprw", "--prompts.shots", "2", "--html", str(html), "--json", str(numbers)])
    output = capsys.readouterr().out
    assert "max_weight_uniform" in output
    assert "weight@" not in output
    found = json.loads(numbers.read_text())
    assert found["held_out"] == 6
    assert len(weights(found)) == 3
    page = html.read_text()
    images = {part.split("<")[0]: part.count("<img") for part in re.split("<h2[^>]*>", page)[1:]}
    assert images.pop("Prompts of a, by bprw") == 3 * 2  # two images of each class
    assert 0 < images["Mistakes"] <= SHOWN
    assert "there is something solid" in page
    main([*words, "--html", str(html)])
    assert "acc1" in html.read_text()
    for more, sentence in (
        (
            ["--prompts", "topk", "--prompts.alpha", "3"],
            "--prompts.alpha is used by --prompts bprw, but --prompts is topk",
        ),
        (["--prompts.shots", "3"], "--prompts is ensemble"),
        (["--prompts", "bprw", "--prompts.shots", "100"], "at least one more to score"),
    ):
        with pytest.raises(SystemExit):
            main([*words, *more])
        assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("task", TASKS)
def test_noisy_prompts_are_right_and_wrong_as_their_kind_says(task: str) -> None:
    source = open_source(f"scenes:test?task={task}&n=60")
    labels = torch.tensor([source.record(row).label for row in range(60)])
    prompts = experiment.noisy(task)
    assert list(prompts) == list(TASKS[task].classnames)
    for c, own in enumerate(prompts.values()):
        kinds = [kind for _, kind in own]
        assert [kinds.count(kind) for kind in experiment.KINDS] == [4, 3, 2, 1]
        output = [prompt for prompt, kind in own if kind != "negated"]
        assert all(parse(prompt) is not None for prompt in output)
        true = torch.from_numpy(source.relevance(output, range(60)))  # type: ignore[attr-defined]  # [prompts, 60]
        assert (true[:4] == (labels == c)).all()
        assert not true[4:7, labels == c].any()
        assert (true[7:] != (labels == c)).any(1).all()


def test_experiment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for method in ("prolip", "siglip"):
        model = matcher(method)
        file = ModelFile(method=method, settings={}, model=model.model.config)
        save_model(tmp_path / method / "model", model.model, model.tokenizer, file)
    numbers = tmp_path / "numbers.json"
    words = ["--tasks", "fill", "--n", "40", "--draws", "2"]
    experiment.main(["--model", str(tmp_path / "prolip" / "model"), *words, "--json", str(numbers)])
    output = capsys.readouterr().out
    draws = json.loads(numbers.read_text())["prolip"]["fill"]
    mean = sum(found["bprw, K = 5"]["acc1"] for found in draws) / 2
    assert f"| bprw, K = 5 | {mean:.3f} |" in output
    assert draws[0]["uniform"]["right"] == pytest.approx(0.1)
    for more, sentence in (
        (["--model", str(tmp_path / "siglip" / "model"), *words], "which this model does not have"),
        (["--model", "none", "--tasks", "size"], "--tasks got size"),
        (["--model", "none", "--draws", "0"], "--draws is 0"),
    ):
        with pytest.raises(SystemExit):
            experiment.main(more)
        assert sentence in capsys.readouterr().err
