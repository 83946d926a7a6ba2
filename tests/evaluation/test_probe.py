"""Linear probes: fits against a literal loop and CLIP_benchmark; features, draws, refusals."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kiloword.api import Matcher
from kiloword.config.recipes import sizes
from kiloword.evaluation import evaluate, probe
from kiloword.evaluation.probe import Split, encoded
from kiloword.evaluation.task import Inputs
from kiloword.evaluation.tasks import ProbeOptions
from kiloword.methods.registry import preset
from kiloword.models.build import build
from kiloword.types import BadSample, Record, Skipped


def gaussians(n: int, classes: int, width: int, seed: int) -> Split:
    """Classes around fixed centres."""
    centres = torch.randn(classes, width, generator=torch.Generator().manual_seed(99))
    y = torch.arange(n) % classes
    return Split(centres[y] + torch.randn(n, width, generator=torch.Generator().manual_seed(seed)), y)


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_sgd_is_a_loop_of_gradients(decay: float) -> None:
    """Softmax, its gradient, momentum 0.9, a cosine that reaches 0 after the last of 4 x 3 steps."""
    rows, first = gaussians(22, 3, 4, seed=0), probe.start(4, 3, "sgd", seed=5)
    x, y = rows.x.double(), torch.nn.functional.one_hot(rows.y).double()
    weights = [values.double() for values in first]
    fast = [torch.zeros_like(values) for values in weights]
    batches = [some for epoch in range(4) for some in probe.shuffled(22, epoch, 5).split(8)]
    for step, some in enumerate(batches):
        off = ((x[some] @ weights[0].T + weights[1]).softmax(1) - y[some]) / len(some)
        rate = 0.2 * (1 + math.cos(math.pi * step / len(batches))) / 2
        for n, slope in enumerate((off.T @ x[some], off.sum(0))):
            fast[n] = 0.9 * fast[n] + slope + decay * weights[n]
            weights[n] = weights[n] - rate * fast[n]
    options = ProbeOptions(recipe="sgd", epochs=4, batch=8, lr=0.2, seed=5, weight_decay=decay)
    got = probe.steps(rows._replace(x=x), (first[0].double(), first[1].double()), options)
    torch.testing.assert_close(got, tuple(weights), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_steps_are_clip_benchmarks(monkeypatch: pytest.MonkeyPatch, decay: float) -> None:
    """Theirs insists on a GPU; its loader has our batches."""
    pytest.importorskip("sklearn", reason="CLIP_benchmark's linear probe needs scikit-learn")
    theirs: Any = pytest.importorskip("clip_benchmark.metrics.linear_probe", reason="needs the CLIP_benchmark package")
    monkeypatch.setattr(Tensor, "cuda", lambda self: self)
    monkeypatch.setattr(torch.nn.Module, "cuda", lambda self: self)
    monkeypatch.setattr(torch.nn, "DataParallel", lambda model, device_ids: model)
    monkeypatch.setattr(theirs, "tqdm", lambda loader: loader)
    rows, epochs = gaussians(150, 5, 8, seed=4), itertools.count()

    class Loader(list[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter([(rows.x[some], rows.y[some]) for some in probe.shuffled(150, next(epochs), 7).split(64)])

    torch.manual_seed(3)
    layer = torch.nn.Linear(8, 5)
    first = layer.weight.detach().clone(), layer.bias.detach().clone()
    expected = theirs.train(Loader([0] * 3), 8, 5, decay, 0.1, 10, False, "cpu", 3)
    got = probe.steps(rows, first, ProbeOptions(seed=7, weight_decay=decay))
    torch.testing.assert_close(got, (expected.weight.detach(), expected.bias.detach()), rtol=0, atol=1e-6)


def test_first_weights_orders_and_shots_are_keyed() -> None:
    slip, torchs = probe.start(400, 50, "sgd", 0), probe.start(400, 50, "adamw", 0)
    assert slip[0].std().item() == pytest.approx(0.01, rel=0.02)
    assert not slip[1].any()
    assert all(0.04 < values.abs().max().item() <= 400**-0.5 for values in torchs)
    assert not torch.equal(probe.start(400, 50, "sgd", 1)[0], slip[0])
    assert probe.shuffled(50, 0, 0).tolist() != probe.shuffled(50, 1, 0).tolist() != probe.shuffled(50, 1, 1).tolist()
    rows = gaussians(30, 3, 4, 0)
    two, four, other = (probe.drawn(rows, shots, "data", seed) for shots, seed in ((2, 0), (4, 0), (4, 1)))
    assert torch.bincount(four.y).tolist() == [4, 4, 4]
    assert {tuple(x) for x in two.x.tolist()} < {tuple(x) for x in four.x.tolist()}  # the first of more
    assert not torch.equal(four.x, other.x)


@dataclass
class Greys:
    """Row n is a grey; row 3 cannot be read."""

    labels: list[int | None]
    classnames: list[str] | None = None
    name: str = "greys"
    fingerprint: str = "greys-v1"
    shift: int = 0

    def __len__(self) -> int:
        return len(self.labels)

    def record(self, row: int) -> Record:
        if row == 3:
            raise BadSample("truncated image")
        return Record(f"k{row}", np.full((32, 32, 3), (7 * (row + self.shift)) % 256, np.uint8), [], self.labels[row])


TRAIN = Greys([n % 3 for n in range(20)])
TEST = Greys([n % 3 for n in range(12)], name="others", fingerprint="others-v1", shift=1)


@pytest.mark.parametrize("method", ["siglip", "prolip", "llip", ""])
def test_features_are_the_models(matcher_of: Callable[[str], Matcher], method: str) -> None:
    """Of the last model, without a projection, pooled is what the pooling makes."""
    some = matcher_of(method or "siglip")
    if not method:
        config = sizes()["debug"]
        head = replace(config.head, image_projection=False, image_pool="map", dim=config.image.width)
        some = Matcher(build(replace(config, head=head), preset("siglip")), some.tokenizer)
    vec, pooled = (encoded(Inputs(some, TRAIN, 7), None, before) for before in (False, True))  # type: ignore[arg-type]
    greys = [TRAIN.record(row).image for row in range(20) if row != 3]
    torch.testing.assert_close(vec.x, some.encode_image(greys)["vec"])
    pooling: Any = some.model.head.pooling
    again = pooled.x
    if method:
        with torch.no_grad():
            again = (pooling.out if method == "llip" else pooling.image_projection)(pooled.x)
    torch.testing.assert_close(vec.x, torch.nn.functional.normalize(again, dim=1))
    assert (again.norm(dim=1) - 1).abs().max() > 1e-3
    assert pooled.y.tolist() == [row % 3 for row in range(20) if row != 3]


@pytest.mark.parametrize(("classes", "strength"), [(4, 0.01), (4, 50.0), (2, 1.0)])
def test_lbfgs_is_the_optimum_of_logistic_regression(classes: int, strength: float) -> None:
    """The gradient of the mean cross-entropy + strength |W|^2 / (2 N) is 0; a class without rows is never chosen."""
    pytest.importorskip("sklearn", reason="the recipe lbfgs needs scikit-learn")
    rows = gaussians(300, classes, 8, seed=2)
    weight, bias = (x.double() for x in probe.fit(rows, classes + 1, strength, ProbeOptions(recipe="lbfgs")))
    off = (rows.x.double() @ weight.T + bias).softmax(1) - torch.nn.functional.one_hot(rows.y, classes + 1)
    slope = (off.T @ rows.x.double() + strength * weight) / len(rows.x)
    assert slope[classes - 1].abs().max() < 1e-3
    assert off.mean(0).abs().max() < 1e-3
    assert not weight[classes].any()


def test_a_sweep_finds_the_top_of_a_hill() -> None:
    values = np.logspace(-6, 2, 97)
    for top in values[::7]:
        found, tried = probe.sweep(2, lambda value, top=top: -abs(np.log10(value / top)))  # type: ignore[misc]
        assert found == pytest.approx(top, rel=1e-9)
        assert len(tried) <= 7 + 2 * 4
    assert probe.sweep(6, lambda _: 0.5)[0] == pytest.approx(1e-6)  # of equals the smallest


def test_a_decay_is_chosen_on_validation_data(matcher: Matcher) -> None:
    val = replace(TEST, name="val", fingerprint="val-v1")
    found = evaluate(matcher, "probe", TEST, train=TRAIN, val=val, probe=ProbeOptions(epochs=1))
    assert found["train_rows"] == 19 + 11  # the validation rows are fitted in the end
    tried = {name: value for name, value in found.items() if name.startswith("sweep@")}
    assert len(tried) >= 10
    assert tried[f"sweep@{found['weight_decay']:.3g}"] == max(tried.values())
    few = evaluate(matcher, "probe", TEST, train=TRAIN, val=val, probe=ProbeOptions(epochs=1, shots=2))
    assert few["train_rows"] == 6
    more = replace(val, labels=[n % 4 for n in range(12)])  # a class that --train lacks
    assert 0 <= evaluate(matcher, "probe", TEST, train=TRAIN, val=more, probe=ProbeOptions(epochs=1))["acc1"] <= 1
    for options, others in ((ProbeOptions(weight_decay=1.0), {"val": val}), (ProbeOptions(recipe="lbfgs"), {})):
        with pytest.raises(ValueError, match="--val"):
            evaluate(matcher, "probe", TEST, train=TRAIN, probe=options, **others)


@pytest.mark.parametrize("recipe", [*probe.EPOCHS, "lbfgs"])
def test_every_recipe_learns(matcher: Matcher, recipe: Any) -> None:
    if recipe == "lbfgs":
        pytest.importorskip("sklearn", reason="the recipe lbfgs needs scikit-learn")
    data = ("scenes:test?n=60&task=colour", "scenes:train?n=60&task=colour")
    options = ProbeOptions(recipe=recipe, weight_decay=0.1 if recipe == "lbfgs" else None)
    found = evaluate(matcher, "probe", data[0], train=data[1], probe=options)
    judged = {"acc1", "acc5", "mean_per_class_recall", "train_acc1", "train_rows", "weight_decay", "skipped"}
    assert (set(found), found["train_rows"]) == (judged, 60)
    rows, fresh = gaussians(300, 5, 16, 300), gaussians(200, 5, 16, 200)
    weight, bias = probe.fit(rows, 5, 0.1, options)
    assert ((fresh.x @ weight.T + bias).argmax(1) == fresh.y).double().mean() > 0.95
    assert torch.equal(probe.fit(rows, 5, 0.1, options)[0], weight)


def test_skipped_rows_are_named(matcher: Matcher) -> None:
    source, bad = replace(TRAIN, labels=[None if n == 5 else n % 3 for n in range(20)]), list[Skipped]()
    found = evaluate(matcher, "probe", TEST, train=source, probe=ProbeOptions(epochs=1), skipped=bad)
    assert (found["train_rows"], found["skipped"]) == (18, 3)
    assert [(one.row, "(train)" in one.reason) for one in bad] == [(3, False), (3, True), (5, True)]


ABC = {"classnames": ["a", "b", "c"]}


@pytest.mark.parametrize(
    ("test", "train", "options", "word"),
    [
        (TEST, None, {}, "--train"),
        (TEST, replace(TRAIN, fingerprint="others-v1"), {}, "different images"),
        (replace(TEST, **ABC), replace(TRAIN, classnames=["a", "b"]), {}, "classes"),
        (replace(TEST, **ABC), replace(TRAIN, classnames=["a", "c", "b"]), {}, "order"),
        (TEST, replace(TRAIN, classnames=["a", "b"]), {}, "2 classes"),
        (TEST, replace(TRAIN, labels=[None] * 20), {}, "class labels"),
        (TEST, TRAIN, {"shots": 7}, "--probe.shots"),
        (TEST, TRAIN, {"lr": 1e20, "epochs": 3, "weight_decay": 1e20}, "NaN"),
        (TEST, TRAIN, {"epochs": 0}, "--probe.epochs"),
        (TEST, TRAIN, {"lr": math.nan}, "--probe.lr"),
    ],
)
def test_refusals(matcher: Matcher, test: Greys, train: Greys | None, options: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        evaluate(matcher, "probe", test, train=train, probe=ProbeOptions(**options))
