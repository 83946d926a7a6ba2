"""Linear probes: fits against literal loops, scikit-learn and CLIP_benchmark; draws, the cache, refusals."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kiloword.api import Matcher
from kiloword.config.recipes import sizes
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.evaluation import evaluate, probe
from kiloword.evaluation.probe import Linear, ProbeData, ProbeOptions, Split, encoded, resolved
from kiloword.evaluation.task import Inputs
from kiloword.methods.registry import preset
from kiloword.models.build import build
from kiloword.types import BadSample, Record, Skipped


def gaussians(n: int, classes: int, width: int, seed: int, spread: float = 1.0) -> Split:
    """Classes around fixed centres."""
    centres = torch.randn(classes, width, generator=torch.Generator().manual_seed(99))
    y = torch.arange(n) % classes
    x = centres[y] + spread * torch.randn(n, width, generator=torch.Generator().manual_seed(seed))
    return Split(x, y, torch.arange(n))


def loop_of_sgd(rows: Split, first: Linear, epochs: int, batch: int, lr: float, decay: float, seed: int) -> Linear:
    """Row by row, class by class: softmax, its gradient, momentum 0.9, a cosine that reaches 0 after the last step."""
    weight, bias = first.weight.numpy().copy(), first.bias.numpy().copy()
    fast_weight, fast_bias = np.zeros_like(weight), np.zeros_like(bias)
    n, step = len(rows.x), 0
    total = epochs * -(-n // batch)
    for epoch in range(epochs):
        places = probe.shuffled(n, epoch, seed).tolist()
        for begin in range(0, n, batch):
            some = places[begin : begin + batch]
            grad_w, grad_b = np.zeros_like(weight), np.zeros_like(bias)
            for row in some:
                x = rows.x[row].numpy()
                powers = np.exp(weight @ x + bias)
                for c in range(len(bias)):
                    off = powers[c] / powers.sum() - (c == int(rows.y[row]))
                    grad_w[c] += off * x / len(some)
                    grad_b[c] += off / len(some)
            rate = lr * (1 + math.cos(math.pi * step / total)) / 2
            fast_weight = 0.9 * fast_weight + grad_w + decay * weight
            fast_bias = 0.9 * fast_bias + grad_b + decay * bias
            weight, bias = weight - rate * fast_weight, bias - rate * fast_bias
            step += 1
    return Linear(torch.from_numpy(weight), torch.from_numpy(bias))


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_sgd_is_the_loop(decay: float) -> None:
    rows = gaussians(22, 3, 4, seed=0)
    rows, first = (
        rows._replace(x=rows.x.double()),
        Linear(*(values.double() for values in probe.start(4, 3, "sgd", seed=5))),
    )
    recipe = resolved(ProbeOptions(recipe="sgd", epochs=4, batch=8, lr=0.2), val=False)
    got = probe.steps(rows, first, recipe, decay, seed=5)
    torch.testing.assert_close(got, loop_of_sgd(rows, first, 4, 8, 0.2, decay, 5), rtol=1e-10, atol=1e-12)


def test_first_weights_are_keyed_and_as_each_source_draws_them() -> None:
    slip, torchs = probe.start(400, 50, "sgd", 0), probe.start(400, 50, "adamw", 0)
    assert slip.weight.std().item() == pytest.approx(0.01, rel=0.02)
    assert all(0.04 < values.abs().max().item() <= 400**-0.5 for values in torchs)
    assert not torch.equal(probe.start(400, 50, "sgd", 1).weight, slip.weight)
    assert probe.shuffled(50, 0, 0).tolist() != probe.shuffled(50, 1, 0).tolist() != probe.shuffled(50, 1, 1).tolist()


def objective(rows: Split, weight: Tensor, bias: Tensor, strength: float) -> Tensor:
    losses = [-(weight @ x + bias).log_softmax(0)[y] for x, y in zip(rows.x.to(weight), rows.y.tolist(), strict=True)]
    return torch.stack(losses).mean() + strength / 2 * (weight**2).sum() / len(rows.x)


@pytest.mark.parametrize(("classes", "strength"), [(4, 0.01), (4, 1.0), (7, 50.0), (2, 1.0)])
def test_lbfgs_equals_scikit_learn(classes: int, strength: float) -> None:
    linear_model = pytest.importorskip("sklearn.linear_model", reason="needs scikit-learn")
    rows, fresh = gaussians(300, classes, 8, seed=2), gaussians(500, classes, 8, seed=3)
    layer = probe.logistic(rows, classes, strength, 1000)
    # with two classes theirs has one weight vector for w and -w, half the price of two
    price = strength / 2 if classes == 2 else strength
    theirs = linear_model.LogisticRegression(C=1 / price, max_iter=10_000, tol=1e-10)
    theirs.fit(rows.x.double().numpy(), rows.y.numpy())
    weight, bias = (torch.from_numpy(x) for x in (theirs.coef_, theirs.intercept_))
    if classes == 2:
        weight, bias = torch.cat([-weight, weight]) / 2, torch.cat([-bias, bias]) / 2
    ours = objective(rows, layer.weight.double(), layer.bias.double(), strength).item()
    assert ours == pytest.approx(objective(rows, weight, bias, strength).item(), abs=1e-6)
    found = torch.nn.functional.linear(fresh.x, *layer).argmax(1)
    assert found.tolist() == theirs.predict(fresh.x.double().numpy()).tolist()


@pytest.mark.parametrize("top", range(0, probe.COUNT, 7))
def test_a_sweep_finds_the_top_of_a_hill(top: int) -> None:
    values = np.logspace(-6, 2, 97)
    found, tried = probe.sweep((-6, 2), lambda value: -abs(np.log10(value) - np.log10(values[top])))
    assert found == pytest.approx(values[top], rel=1e-9)
    assert len(tried) <= 7 + 2 * 4
    assert probe.sweep((-6, 6), lambda _: 0.5)[0] == pytest.approx(1e-6)  # of equals the smallest


# CLIP_benchmark


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """CLIP_benchmark's linear probe, which insists on a GPU, on the CPU."""
    pytest.importorskip("sklearn", reason="CLIP_benchmark's linear probe needs scikit-learn")
    module = pytest.importorskip("clip_benchmark.metrics.linear_probe", reason="needs the CLIP_benchmark package")
    monkeypatch.setattr(Tensor, "cuda", lambda self: self)
    monkeypatch.setattr(torch.nn.Module, "cuda", lambda self: self)
    monkeypatch.setattr(torch.nn, "DataParallel", lambda model, device_ids: model)
    monkeypatch.setattr(module, "tqdm", lambda loader: loader)
    return module


class Keyed:
    """A loader with our batches."""

    def __init__(self, rows: Split, batch: int, seed: int) -> None:
        self.rows, self.batch, self.seed, self.epoch = rows, batch, seed, 0

    def __len__(self) -> int:
        return -(-len(self.rows.x) // self.batch)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        places = probe.shuffled(len(self.rows.x), self.epoch, self.seed)
        self.epoch += 1
        yield from (tuple(self.rows.of(some)[:2]) for some in places.split(self.batch))  # type: ignore[misc]


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_steps_are_clip_benchmarks(theirs: Any, decay: float) -> None:
    rows = gaussians(150, 5, 8, seed=4)
    torch.manual_seed(3)
    layer = torch.nn.Linear(8, 5)
    first = Linear(layer.weight.detach(), layer.bias.detach())
    expected = theirs.train(Keyed(rows, 64, 7), 8, 5, decay, 0.1, 10, False, "cpu", 3)
    got = probe.steps(rows, first, probe.RECIPES["clip_benchmark"], decay, seed=7)
    torch.testing.assert_close(got.weight, expected.weight.detach(), rtol=0, atol=1e-6)
    torch.testing.assert_close(got.bias, expected.bias.detach(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", probe.RECIPES)
def test_every_recipe_learns_and_is_deterministic(name: Any) -> None:
    data = ProbeData(gaussians(300, 5, 16, 300), gaussians(200, 5, 16, 200), None, "abcde", "toy")
    options = ProbeOptions(recipe=name, max_iter=30 if name == "lbfgs" else None)
    found = dict(probe.fit_once(data, resolved(options, val=False), options, seed=0))
    assert min(found["acc1"], found["train_acc1"]) > 0.95
    assert found == dict(probe.fit_once(data, resolved(options, val=False), options, seed=0))


# Draws


def of(labels: list[int]) -> Split:
    return Split(torch.empty(0), torch.tensor(labels), torch.arange(len(labels)))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.integers(0, 9), st.floats(0, 0.99))
def test_draws_are_by_class_and_seeded_and_a_share_is_held_out(labels: list[int], seed: int, share: float) -> None:
    own = probe.order(of(labels), "data", seed)
    assert own == probe.order(of(labels), "data", seed)
    assert sorted(place for places in own for place in places) == list(range(len(labels)))
    assert all(labels[place] == c for c, places in enumerate(own) for place in places)
    if max(map(len, own)) < 2:
        with pytest.raises(ValueError, match="--val"):
            probe.held_out(own, share)
        return
    fitted, chosen = map(set, probe.held_out(own, share))
    assert not fitted & chosen
    assert len(fitted | chosen) == len(labels)
    for mine in own:
        assert not mine or fitted & set(mine)  # no class is held out whole
        assert len(mine) < 2 or abs(len(chosen & set(mine)) - share * len(mine)) <= 1


# Images


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


def matcher(method: str = "siglip", seed: int = 0) -> Matcher:
    tokenizer = Tokenizer.train(["something red", "two blue squares"], 300)
    return Matcher(build(sizes()["debug"], preset(method), seed=seed), tokenizer)


@pytest.fixture(scope="module")
def debug() -> Matcher:
    return matcher()


@pytest.mark.parametrize("method", ["siglip", "clip", "prolip", "llip"])
def test_features_are_the_models(method: str) -> None:
    some = matcher(method)
    vec, pooled = (encoded(Inputs(some, TRAIN, 7), kind) for kind in ("vec", "pooled"))  # type: ignore[arg-type]
    greys = [TRAIN.record(row).image for row in range(20) if row != 3]
    pixels = torch.stack([torch.from_numpy(np.asarray(image)).permute(2, 0, 1) for image in greys])
    torch.testing.assert_close(vec.x, some.encode_image(pixels)["vec"])
    pooling: Any = some.model.head.pooling
    with torch.no_grad():
        again = (pooling.out if method == "llip" else pooling.image_projection)(pooled.x)
    torch.testing.assert_close(vec.x, torch.nn.functional.normalize(again, dim=1))
    assert pooled.rows.tolist() == [row for row in range(20) if row != 3]


def test_without_a_projection_pooled_is_what_the_pooling_makes() -> None:
    config = sizes()["debug"]
    head = replace(config.head, image_projection=False, image_pool="map", dim=config.image.width)
    some = Matcher(build(replace(config, head=head), preset("siglip")), matcher().tokenizer)
    vec, pooled = (encoded(Inputs(some, TRAIN, 7), kind).x for kind in ("vec", "pooled"))  # type: ignore[arg-type]
    torch.testing.assert_close(torch.nn.functional.normalize(pooled, dim=1), vec)
    assert (pooled.norm(dim=1) - 1).abs().min() > 1e-3


def test_skipped_rows_are_named_with_their_split(debug: Matcher) -> None:
    source, bad = replace(TRAIN, labels=[None if n == 5 else n % 3 for n in range(20)]), list[Skipped]()
    evaluate(debug, "probe", TEST, train=source, probe=ProbeOptions(epochs=1), skipped=bad)
    assert {(one.row, one.reason) for one in bad} == {
        (3, "truncated image"), (3, "truncated image (train)"), (5, "no class label (train)")
    }  # fmt: skip


def test_a_probe_of_scenes(debug: Matcher, caplog: pytest.LogCaptureFixture) -> None:
    values = evaluate(debug, "probe", "scenes:test?n=60&task=colour", probe=ProbeOptions(epochs=1))
    assert caplog.messages == ["training data: scenes:train?n=60&task=colour"]
    judged = {"acc1", "acc5", "mean_per_class_recall", "train_acc1"}
    assert set(values) == judged | {"train_rows", "weight_decay", "skipped"}
    options = ProbeOptions(recipe="lbfgs", shots=4, seeds=(0, 1, 2), max_iter=30)
    few = evaluate(debug, "probe", "scenes:test?n=60&task=count", probe=options)
    each = [few[f"seed@{seed}.acc1"] for seed in range(3)]
    assert few["acc1"] == pytest.approx(np.mean(each))
    assert few["acc1_std"] == pytest.approx(np.std(each, ddof=1))
    assert (values["train_rows"], few["train_rows"]) == (60, 12)
    assert not any(probe.TASK.prints(name) for name in few if "@" in name)
    assert sum(name.startswith("seed@1.sweep@") for name in few) >= 10


def test_what_is_swept_on_validation_data(debug: Matcher) -> None:
    val = replace(TEST, name="val", fingerprint="val-v1")
    found = evaluate(debug, "probe", TEST, train=TRAIN, val=val, probe=ProbeOptions(epochs=1))
    assert found["train_rows"] == 19 + 11  # the validation rows are fitted in the end
    tried = {name: value for name, value in found.items() if name.startswith("sweep@")}
    assert len(tried) >= 10
    assert tried[f"sweep@{found['weight_decay']:.3g}"] == max(tried.values())
    few = evaluate(debug, "probe", TEST, train=TRAIN, val=val, probe=ProbeOptions(epochs=1, shots=2))
    assert few["train_rows"] == 6
    assert {f"seed@{seed}.acc1" for seed in range(3)} <= set(few)


def test_classes_that_training_lacks_are_reported(debug: Matcher, caplog: pytest.LogCaptureFixture) -> None:
    train = replace(TRAIN, labels=[n % 2 for n in range(20)], classnames=["red", "green", "blue"])
    evaluate(debug, "probe", replace(TEST, classnames=train.classnames), train=train)
    assert "'blue'" in caplog.text


def test_where_training_data_is(tmp_path: Path) -> None:
    assert probe.beside("scenes:test?task=colour") == "scenes:train?task=colour"
    assert probe.beside("scenes:val") == "scenes:train"
    for folder in ("flowers/train", "flowers/test", "other/more"):
        (tmp_path / folder).mkdir(parents=True)
    for src in ("flowers", "flowers/test"):
        assert probe.beside(str(tmp_path / src)) == str(tmp_path / "flowers/train")
    for src in ("scenes", "scenes:train?n=5", str(tmp_path / "other"), str(tmp_path / "flowers/train"), "a.tar"):
        with pytest.raises(ValueError, match="--train"):
            probe.beside(src)


ABC, VAL = {"classnames": ["a", "b", "c"]}, replace(TEST, fingerprint="val-v1")


@pytest.mark.parametrize(
    ("test", "train", "options", "word"),
    [
        (TEST, None, {}, "--train"),
        (TEST, replace(TRAIN, fingerprint="others-v1"), {}, "are the same"),
        (replace(TEST, **ABC), replace(TRAIN, classnames=["a", "b"]), {}, "classes"),
        (replace(TEST, **ABC), replace(TRAIN, classnames=["a", "c", "b"]), {}, "order"),
        (TEST, replace(TRAIN, classnames=["a", "b"]), {}, "2 classes"),
        (TEST, replace(TRAIN, labels=[1] * 20), {}, "two or more"),
        (TEST, replace(TRAIN, labels=[None] * 20), {}, "class labels"),
        (TEST, TRAIN, {"shots": 7}, "'0' has 6 .*--probe.shots"),
        (TEST, TRAIN, {"recipe": "lbfgs", "shots": 1}, "--probe.weight-decay"),
        (TEST, TRAIN, {"lr": 1e20, "epochs": 3, "weight_decay": 1e20}, "NaN"),
        (TEST, TRAIN, {"recipe": "lbfgs", "lr": 0.1}, "--probe.lr"),
        (TEST, TRAIN, {"max_iter": 5}, "--probe.max-iter"),
        (TEST, TRAIN, {"epochs": 0}, "--probe.epochs"),
        (TEST, TRAIN, {"lr": math.nan}, "--probe.lr"),
        (TEST, TRAIN, {"shots": -1}, "--probe.shots"),
        (TEST, TRAIN, {"seeds": (1, 1)}, "--probe.seeds"),
        (TEST, TRAIN, {"recipe": "sgd", "val": VAL}, "--val"),
        (TEST, TRAIN, {"weight_decay": 0.1, "val": VAL}, "--val"),
    ],
)
def test_refusals(debug: Matcher, test: Greys, train: Greys | None, options: dict[str, Any], word: str) -> None:
    chosen = ProbeOptions(**{name: value for name, value in options.items() if name != "val"})
    with pytest.raises(ValueError, match=word):
        evaluate(debug, "probe", test, train=train, val=options.get("val"), probe=chosen)


def test_features_that_are_no_numbers_are_refused() -> None:
    some = matcher()
    with torch.no_grad():
        some.model.head.pooling.image_projection.weight.fill_(math.nan)  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="11 of 11 images are NaN"):
        evaluate(some, "probe", TEST, train=TRAIN)
