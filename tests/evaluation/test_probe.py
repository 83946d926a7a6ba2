"""Linear probes: fits against literal loops, scikit-learn and CLIP_benchmark; draws, the cache, refusals."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cases import mostly_slow
from kiloword.api import Matcher
from kiloword.cli.main import main
from kiloword.config.recipes import sizes
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.evaluation import evaluate
from kiloword.evaluation.probe import COUNT, RECIPES, TASK, ProbeOptions, Sweep
from kiloword.evaluation.probe import data as probe_data
from kiloword.evaluation.probe import task as probe
from kiloword.evaluation.probe.data import Split, encoded, held_out, order, shots, split
from kiloword.evaluation.probe.fit import LabelledFeatures, Linear, logistic, shuffled, start, steps, sweep
from kiloword.evaluation.task import Inputs
from kiloword.methods.registry import preset
from kiloword.models.build import build
from kiloword.types import BadSample, Record, Skipped
from tars import photo, write_tar


def gaussians(n: int, classes: int, width: int, seed: int, spread: float = 1.0) -> LabelledFeatures:
    """Classes around fixed centres."""
    centres = torch.randn(classes, width, generator=torch.Generator().manual_seed(99))
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % classes
    return LabelledFeatures(centres[y] + spread * torch.randn(n, width, generator=generator), y)


def resolved(**given: object) -> ProbeOptions:
    return ProbeOptions(**given).resolved(val=False)  # type: ignore[arg-type]


def loop_of_sgd(
    rows: LabelledFeatures, first: Linear, epochs: int, batch: int, lr: float, decay: float, seed: int
) -> Linear:
    """Row by row, class by class: softmax, its gradient, momentum 0.9, a cosine that reaches 0 after the last step."""
    weight, bias = first.weight.numpy().copy(), first.bias.numpy().copy()
    fast = {"w": np.zeros_like(weight), "b": np.zeros_like(bias)}
    n, step = len(rows), 0
    total = epochs * -(-n // batch)
    for epoch in range(epochs):
        places = shuffled(n, epoch, seed).tolist()
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
            fast["w"] = 0.9 * fast["w"] + grad_w + decay * weight
            fast["b"] = 0.9 * fast["b"] + grad_b + decay * bias
            weight, bias = weight - rate * fast["w"], bias - rate * fast["b"]
            step += 1
    return Linear(torch.from_numpy(weight), torch.from_numpy(bias))


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_sgd_is_the_loop(decay: float) -> None:
    rows = gaussians(22, 3, 4, seed=0)
    rows = LabelledFeatures(rows.x.double(), rows.y)
    first = start(4, 3, "sgd", seed=5)
    first = Linear(first.weight.double(), first.bias.double())
    got = steps(rows, first, resolved(recipe="sgd", epochs=4, batch=8, lr=0.2), decay, seed=5)
    expected = loop_of_sgd(rows, first, 4, 8, 0.2, decay, 5)
    torch.testing.assert_close(got.weight, expected.weight, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(got.bias, expected.bias, rtol=1e-10, atol=1e-12)


def test_first_weights_are_keyed_and_as_each_source_draws_them() -> None:
    slip, torchs = start(400, 50, "sgd", 0), start(400, 50, "adamw", 0)
    assert slip.weight.std().item() == pytest.approx(0.01, rel=0.02)
    assert not slip.bias.any()
    for values in (torchs.weight, torchs.bias):
        assert 0.04 < values.abs().max().item() <= 400**-0.5
    assert torch.equal(start(400, 50, "sgd", 0).weight, slip.weight)
    assert not torch.equal(start(400, 50, "sgd", 1).weight, slip.weight)
    assert shuffled(50, 0, 0).tolist() != shuffled(50, 1, 0).tolist() != shuffled(50, 1, 1).tolist()


def objective(rows: LabelledFeatures, weight: Tensor, bias: Tensor, strength: float) -> Tensor:
    losses = [-(weight @ x + bias).log_softmax(0)[y] for x, y in zip(rows.x.to(weight), rows.y.tolist(), strict=True)]
    return torch.stack(losses).mean() + strength / 2 * (weight**2).sum() / len(rows)


@pytest.mark.parametrize("strength", [0.1, 3.0, 100.0])
def test_lbfgs_is_at_the_optimum(strength: float) -> None:
    rows = gaussians(300, 4, 6, seed=1)
    layer = logistic(rows, 4, strength, 1000)
    weight, bias = (x.double().requires_grad_() for x in (layer.weight, layer.bias))
    objective(rows, weight, bias, strength).backward()
    assert weight.grad is not None
    assert bias.grad is not None
    assert max(weight.grad.abs().max().item(), bias.grad.abs().max().item()) < 3e-6


@pytest.mark.parametrize(("classes", "strength"), [(4, 0.01), (4, 1.0), (7, 50.0), (2, 1.0)])
def test_lbfgs_equals_scikit_learn(classes: int, strength: float) -> None:
    linear_model = pytest.importorskip("sklearn.linear_model", reason="needs scikit-learn")
    rows, fresh = gaussians(300, classes, 8, seed=2), gaussians(500, classes, 8, seed=3)
    layer = logistic(rows, classes, strength, 1000)
    # with two classes theirs has one weight vector for w and -w, half the price of two
    price = strength / 2 if classes == 2 else strength
    theirs = linear_model.LogisticRegression(C=1 / price, max_iter=10_000, tol=1e-10)
    theirs.fit(rows.x.double().numpy(), rows.y.numpy())
    weight, bias = (torch.from_numpy(x) for x in (theirs.coef_, theirs.intercept_))
    if classes == 2:
        weight, bias = torch.cat([-weight, weight]) / 2, torch.cat([-bias, bias]) / 2
    ours = objective(rows, layer.weight.double(), layer.bias.double(), strength).item()
    assert ours == pytest.approx(objective(rows, weight, bias, strength).item(), abs=1e-6)
    assert layer(fresh.x).argmax(1).tolist() == theirs.predict(fresh.x.double().numpy()).tolist()


@pytest.mark.parametrize("top", range(0, COUNT, 3))
def test_a_sweep_finds_the_top_of_a_hill(top: int) -> None:
    values = Sweep(-6, 2).values()
    heights = [-abs(place - top) for place in range(COUNT)]
    found, tried = sweep(values, lambda value: heights[values.index(value)])
    assert values.index(found) == top
    assert len(tried) <= 7 + 2 * 4


def test_values_of_sweeps() -> None:
    for low, high in ((-6, 2), (-6, 6)):
        np.testing.assert_allclose(Sweep(low, high).values(), np.logspace(low, high, 97), rtol=1e-12)
    assert sweep(Sweep(-6, 2).values(), lambda _: 0.5)[0] == pytest.approx(1e-6)  # of equals the smallest


def test_a_sweep_regularises_what_must_be() -> None:
    """Two numbers in 60 tell the classes apart: without a price on weights, 40 rows are learned by heart."""
    g = torch.Generator().manual_seed(0)
    y = torch.arange(2040) % 2
    x = torch.randn(2040, 60, generator=g)
    x[:, :2] += 0.8 * (2 * y[:, None] - 1)
    rows, val, test = (LabelledFeatures(x[a:b], y[a:b]) for a, b in ((0, 40), (40, 1040), (1040, 2040)))
    best, tried = sweep(Sweep(-6, 6).values(), lambda value: logistic(rows, 2, value, 100).accuracy(val))
    assert tried[best] == max(tried.values())
    assert best > 1
    assert logistic(rows, 2, best, 100).accuracy(test) > logistic(rows, 2, 1e-6, 100).accuracy(test) + 0.03


# CLIP_benchmark


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> object:
    """CLIP_benchmark's linear probe, which insists on a GPU, on the CPU."""
    pytest.importorskip("sklearn", reason="CLIP_benchmark's linear probe needs scikit-learn")
    module = pytest.importorskip("clip_benchmark.metrics.linear_probe", reason="needs the CLIP_benchmark package")
    plain = Tensor.to
    monkeypatch.setattr(Tensor, "cuda", lambda self: self)
    monkeypatch.setattr(Tensor, "to", lambda self, *a, **k: self if a == ("cuda",) else plain(self, *a, **k))
    monkeypatch.setattr(torch.nn.Module, "cuda", lambda self: self)
    monkeypatch.setattr(torch.nn, "DataParallel", lambda model, device_ids: model)
    monkeypatch.setattr(module, "tqdm", lambda loader: loader)
    # Its accuracy() calls float() on an array of shape [1], which NumPy 2.4 refuses: shadow that one name.
    from clip_benchmark.metrics import zeroshot_classification

    monkeypatch.setattr(zeroshot_classification, "float", lambda x: x.item(), raising=False)
    return module


class Keyed:
    """A loader with our batches."""

    def __init__(self, rows: LabelledFeatures, batch: int, seed: int) -> None:
        self.rows, self.batch, self.seed, self.epoch = rows, batch, seed, 0

    def __len__(self) -> int:
        return -(-len(self.rows) // self.batch)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        places = shuffled(len(self.rows), self.epoch, self.seed)
        self.epoch += 1
        for begin in range(0, len(self.rows), self.batch):
            some = places[begin : begin + self.batch]
            yield self.rows.x[some], self.rows.y[some]


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_steps_are_clip_benchmarks(theirs: object, decay: float) -> None:
    rows = gaussians(150, 5, 8, seed=4)
    torch.manual_seed(3)
    layer = torch.nn.Linear(8, 5)
    first = Linear(layer.weight.detach(), layer.bias.detach())
    expected = theirs.train(Keyed(rows, 64, 7), 8, 5, decay, 0.1, 10, False, "cpu", 3)  # type: ignore[attr-defined]
    got = steps(rows, first, resolved(), decay, seed=7)
    torch.testing.assert_close(got.weight, expected.weight.detach(), rtol=0, atol=1e-6)
    torch.testing.assert_close(got.bias, expected.bias.detach(), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("swept", "shots_"), mostly_slow([(False, 0), (False, 6), (True, 6), (True, 0)], 0, 1, 2))
def test_accuracy_is_clip_benchmarks(theirs: object, tmp_path: Path, swept: bool, shots_: int) -> None:
    train, val, test = (gaussians(n, 8, 16, seed=s, spread=2.5) for n, s in ((400, 0), (200, 1), (2000, 2)))
    for name, rows in (("train", train), ("val", val), ("test", test)):
        torch.save(rows.x, _folder(tmp_path) / f"features_{name}.pt")
        torch.save(rows.y, _folder(tmp_path) / f"targets_{name}.pt")
    options = (None, object(), object(), shots_ or -1, 64, 0, 0.1, 10, "m", 0, str(tmp_path), "cuda")
    torch.manual_seed(0)
    expected = [
        theirs.evaluate(*options, val_dataloader=object() if swept else None, amp=False)  # type: ignore[attr-defined]
        for _ in range(3)
    ]
    found = Split({}, train.y, torch.arange(400), [])
    data = probe.ProbeData(train, test, val if swept else None, "abcdefgh", found, "toy")
    wanted = ProbeOptions(shots=shots_).resolved(val=swept)
    ours = [dict(probe._once(data, wanted, seed)) for seed in range(3)]
    assert [one["train_rows"] for one in ours] == [6 * 8 if shots_ else 600 if swept else 400] * 3
    for name in ("acc1", "acc5", "mean_per_class_recall"):
        mean = sum(float(one[f"lp_{name}"]) for one in expected) / 3
        assert sum(one[name] for one in ours) / 3 == pytest.approx(mean, abs=0.06 if shots_ else 0.015)
    assert 0.4 < ours[0]["acc1"] < 0.95


def _folder(root: Path) -> Path:
    folder = root / "m"
    folder.mkdir(exist_ok=True)
    return folder


# Draws


def of(labels: list[int]) -> Split:
    return Split({}, torch.tensor(labels), torch.arange(len(labels)), [])


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.integers(0, 9))
def test_draws_are_by_class_seeded_and_nested(labels: list[int], seed: int) -> None:
    own = order(of(labels), "data", seed)
    assert sorted(place for places in own for place in places) == list(range(len(labels)))
    assert all(labels[place] == c for c, places in enumerate(own) for place in places)
    assert own == order(of(labels), "data", seed)
    fewest = min(len(places) for places in own if places)
    for k in range(1, fewest):
        few, more = shots(own, k, "abcde"), shots(own, k + 1, "abcde")
        assert all(set(a) < set(b) for a, b in zip(few, more, strict=True) if b)
        assert {len(places) for places in few} <= {0, k}


def test_draws_differ_by_seed_and_data() -> None:
    labels = [0] * 30
    drawn = [order(of(labels), data, seed)[0] for data, seed in (("a", 0), ("a", 1), ("b", 0))]
    assert drawn[0] != drawn[1] != drawn[2] != drawn[0]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=5), st.floats(0, 0.99))
def test_held_out_rows_are_no_training_rows_and_a_share_of_every_class(counts: list[int], share: float) -> None:
    places = iter(range(sum(counts)))
    own = [[next(places) for _ in range(n)] for n in counts]
    if max(counts) < 2:
        with pytest.raises(ValueError, match="leaves none to choose"):
            held_out(own, share)
        return
    fitted, chosen = map(set, held_out(own, share))
    assert not fitted & chosen
    assert len(fitted | chosen) == sum(counts)
    for mine in own:
        assert not mine or fitted & set(mine)  # no class is held out whole
        if len(mine) > 1:
            assert abs(len(chosen & set(mine)) - share * len(mine)) <= 1


def test_a_class_too_small_for_the_shots() -> None:
    with pytest.raises(ValueError, match=r"the class 'b' has 2 labelled .* but --probe\.shots is 3"):
        shots([[0, 1, 2], [3, 4]], 3, "ab")
    assert shots([[0, 1, 2], [], [3, 4]], 2, "abc") == [[0, 1], [], [3, 4]]


# Images


@dataclass
class Greys:
    """Row n is a grey; row 3 cannot be read."""

    labels: list[int | None]
    classnames: list[str] | None = None
    name: str = "greys"
    fingerprint: str = "greys-v1"
    bad: tuple[int, ...] = (3,)
    shift: int = 0

    def __len__(self) -> int:
        return len(self.labels)

    def record(self, row: int) -> Record:
        if row in self.bad:
            raise BadSample("truncated image")
        grey = (7 * (row + self.shift)) % 256
        return Record(f"k{row}", np.full((32, 32, 3), grey, np.uint8), [], self.labels[row])


TRAIN = Greys([n % 3 for n in range(20)])
TEST = Greys([n % 3 for n in range(12)], name="others", fingerprint="others-v1", shift=1)


@pytest.fixture(scope="module")
def debug() -> Matcher:
    return matcher("siglip")


def matcher(method: str, seed: int = 0) -> Matcher:
    tokenizer = Tokenizer.train(["something red", "two blue squares"], 300)
    return Matcher(build(sizes()["debug"], preset(method), seed=seed), tokenizer)


def pixels(source: Greys) -> Tensor:
    records = [source.record(row).image for row in range(len(source)) if row not in source.bad]
    return torch.stack([torch.from_numpy(np.asarray(image)).permute(2, 0, 1) for image in records])


@pytest.mark.parametrize("method", ["siglip", "clip", "prolip", "llip"])
def test_features_are_the_models(method: str) -> None:
    some = matcher(method)
    found = encoded(Inputs(some, TRAIN, 7))
    torch.testing.assert_close(found.features["vec"], some.encode_image(pixels(TRAIN))["vec"])
    pooling = some.model.head.pooling
    project = pooling.out if method == "llip" else pooling.image_projection
    with torch.no_grad():
        again = torch.nn.functional.normalize(project(found.features["pooled"]), dim=1)
    torch.testing.assert_close(found.features["vec"], again)
    assert found.rows.tolist() == [row for row in range(20) if row != 3]
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in some.model.modules())


def test_without_a_projection_pooled_is_what_the_pooling_makes() -> None:
    config = sizes()["debug"]
    config = replace(
        config, head=replace(config.head, image_projection=False, image_pool="map", dim=config.image.width)
    )
    some = Matcher(build(config, preset("siglip")), matcher("siglip").tokenizer)
    found = encoded(Inputs(some, TRAIN, 7))
    pooled = found.features["pooled"]
    torch.testing.assert_close(torch.nn.functional.normalize(pooled, dim=1), found.features["vec"])
    assert (pooled.norm(dim=1) - 1).abs().min() > 1e-3


def test_a_cached_split_is_the_same(
    debug: Matcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = replace(TRAIN, labels=[None if n == 5 else n % 3 for n in range(20)])
    first = split(Inputs(debug, source, 7), tmp_path)
    assert [(one.row, one.reason) for one in first.skipped] == [(3, "truncated image"), (5, "no class label")]
    (file,) = tmp_path.iterdir()
    with monkeypatch.context() as nothing:
        nothing.setattr(probe_data, "encoded", lambda *_: pytest.fail("computed again"))
        same(split(Inputs(debug, source, 7), tmp_path), first)
    assert not caplog.text
    whole = file.read_bytes()
    for damaged in (whole[:-9], whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:], b"", b"{}\n", b"no json\n" + whole):
        file.write_bytes(damaged)
        caplog.clear()
        same(split(Inputs(debug, source, 7), tmp_path), first)
        assert "is damaged" in caplog.text
        assert file.read_bytes() == whole
    others = [(matcher("siglip", seed=1), source), (debug, replace(source, fingerprint="greys-v2"))]
    for some, changed in others:
        split(Inputs(some, changed, 7), tmp_path)
    assert len(list(tmp_path.iterdir())) == 3


def same(a: Split, b: Split) -> None:
    assert a.features.keys() == b.features.keys() == {"vec", "pooled"}
    assert all(torch.equal(a.features[name], b.features[name]) for name in a.features)
    assert torch.equal(a.labels, b.labels)
    assert torch.equal(a.rows, b.rows)
    assert a.skipped == b.skipped


# The task


@pytest.mark.slow
def test_a_probe_of_scenes(debug: Matcher, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = "scenes:test?n=60&task=colour"
    values = evaluate(debug, "probe", given, cache=tmp_path)
    assert caplog.messages == ["training data: scenes:train?n=60&task=colour"]
    judged = {"acc1", "acc5", "mean_per_class_recall", "train_acc1"}
    assert set(values) == judged | {"train_rows", "weight_decay", "skipped"}
    assert values["train_rows"] == 60
    assert values == evaluate(debug, "probe", given, cache=tmp_path) == evaluate(debug, "probe", given)
    options = ProbeOptions(recipe="lbfgs", shots=4, seeds=(0, 1, 2), max_iter=30)
    few = evaluate(debug, "probe", "scenes:test?n=60&task=count", probe=options)
    each = [few[f"seed@{seed}.acc1"] for seed in range(3)]
    assert few["acc1"] == pytest.approx(np.mean(each))
    assert few["acc1_std"] == pytest.approx(np.std(each, ddof=1))
    assert few["train_rows"] == 12
    shown = {name for name in few if TASK.prints(name)} - {"weight_decay"}
    judged -= {"acc5"}
    assert shown == {"train_rows", "skipped"} | judged | {f"{name}_std" for name in judged}
    assert sum(name.startswith("seed@1.sweep@") for name in few) >= 10


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_learns_and_is_deterministic(name: str) -> None:
    train, test = (gaussians(n, 5, 16, seed=n, spread=1.0) for n in (300, 200))
    data = probe.ProbeData(train, test, None, "abcde", of(train.y.tolist()), "toy")
    options = resolved(recipe=name, max_iter=30 if name == "lbfgs" else None)
    found = dict(probe._once(data, options, seed=0))
    assert found["acc1"] > 0.95
    assert found["train_acc1"] > 0.95
    assert found == dict(probe._once(data, options, seed=0))


def test_of_what_is_swept(debug: Matcher) -> None:
    val = replace(TEST, name="val", fingerprint="val-v1")
    found = evaluate(debug, "probe", TEST, train=TRAIN, val=val, probe=ProbeOptions(epochs=1))
    assert found["train_rows"] == 19 + 11  # the validation rows are fitted in the end
    tried = {name for name in found if name.startswith("sweep@")}
    assert len(tried) >= 10
    assert not any(map(TASK.prints, tried))
    assert f"sweep@{found['weight_decay']:.3g}" in tried
    assert found[f"sweep@{found['weight_decay']:.3g}"] == max(found[name] for name in tried)
    own = evaluate(debug, "probe", TEST, train=TRAIN, probe=ProbeOptions(epochs=1, val_share=0.3))
    assert own["train_rows"] == 19
    few = evaluate(debug, "probe", TEST, train=TRAIN, val=val, probe=ProbeOptions(epochs=1, shots=2, seeds=(0,)))
    assert few["train_rows"] == 6


def test_skipped_rows_are_named_with_their_split(debug: Matcher) -> None:
    bad: list[Skipped] = []
    values = evaluate(debug, "probe", TEST, train=replace(TRAIN, labels=[None, *TRAIN.labels[1:]]), skipped=bad)
    assert values["skipped"] == 3
    assert {(one.key, one.reason) for one in bad} == {
        ("row 3", "truncated image"),
        ("row 3", "truncated image (train)"),
        ("k0", "no class label (train)"),
    }


def test_classes_that_training_lacks_are_reported(debug: Matcher, caplog: pytest.LogCaptureFixture) -> None:
    train = replace(TRAIN, labels=[n % 2 for n in range(20)], classnames=["red", "green", "blue"])
    evaluate(debug, "probe", replace(TEST, classnames=train.classnames), train=train)
    assert "1 classes of the test images have no training image" in caplog.text
    assert "'blue'" in caplog.text


def test_where_training_data_is(tmp_path: Path) -> None:
    assert probe.beside("scenes:test?task=colour") == "scenes:train?task=colour"
    assert probe.beside("scenes:val") == "scenes:train"
    for folder in ("flowers/train", "flowers/test", "other/more"):
        (tmp_path / folder).mkdir(parents=True)
    for src in ("flowers", "flowers/test"):
        assert probe.beside(str(tmp_path / src)) == str(tmp_path / "flowers/train")
    for src in ("scenes", "scenes:train?n=5", str(tmp_path / "other"), str(tmp_path / "flowers/train"), "a.tar"):
        with pytest.raises(ValueError, match="give --train SRC"):
            probe.beside(src)


@pytest.mark.parametrize(
    ("test", "train", "options", "message"),
    [
        (TEST, None, {}, "no training data beside others: give --train"),
        (TEST, replace(TRAIN, fingerprint="others-v1"), {}, "the test and train data are the same, others"),
        (replace(TEST, classnames=["a", "b", "c"]), replace(TRAIN, classnames=["a", "b"]), {}, "names 3 classes"),
        (replace(TEST, classnames=["a", "b", "c"]), replace(TRAIN, classnames=["a", "c", "b"]), {}, "same order"),
        (TEST, replace(TRAIN, classnames=["a", "b"]), {}, "labels run to 2, but there are 2 class names"),
        (TEST, replace(TRAIN, labels=[1] * 20), {}, "one class only"),
        (TEST, replace(TRAIN, labels=[None] * 20), {}, "greys has no class labels"),
        (TEST, TRAIN, {"shots": 7}, "the class '0' has 6 labelled .* --probe.shots is 7"),
        (TEST, TRAIN, {"recipe": "lbfgs", "shots": 1}, "one training image a class leaves none"),
        (TEST, TRAIN, {"lr": 1e20, "epochs": 3, "weight_decay": 1e20}, "smaller --probe.lr"),
    ],
)
def test_bad_data_gets_a_sentence(
    debug: Matcher, test: Greys, train: Greys | None, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate(debug, "probe", test, train=train, probe=ProbeOptions(**options))  # type: ignore[arg-type]


def test_features_that_are_no_numbers_get_a_sentence() -> None:
    some = matcher("siglip")
    with torch.no_grad():
        some.model.head.pooling.image_projection.weight.fill_(math.nan)  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="others: features of 11 of 11 images are NaN or infinite, first of row 0"):
        evaluate(some, "probe", TEST, train=TRAIN)
    evaluate(some, "probe", TEST, train=TRAIN, probe=ProbeOptions(features="pooled"))


@pytest.mark.parametrize(
    ("options", "val", "message"),
    [
        ({"recipe": "lbfgs", "lr": 0.1}, False, "--probe.lr is not used by --probe.recipe lbfgs"),
        ({"max_iter": 5}, False, "--probe.max-iter is not used by --probe.recipe clip_benchmark"),
        ({"epochs": 0}, False, "--probe.epochs is 0. Expected at least 1"),
        ({"lr": math.nan}, False, "--probe.lr is nan"),
        ({"shots": -1}, False, "--probe.shots is -1"),
        ({"val_share": 1.0}, False, "--probe.val-share is 1"),
        ({"seeds": (1, 1)}, False, "names one twice: 1 1"),
        ({"recipe": "sgd"}, True, "--val selects a weight decay, but --probe.recipe sgd sweeps none"),
        ({"recipe": "adamw", "val_share": 0.1}, False, "--probe.val-share selects a weight decay"),
        ({"weight_decay": 0.1}, True, "--probe.weight-decay sets it"),
        ({"val_share": 0.1}, True, "both select the weight decay"),
        ({"recipe": "lbfgs", "val_share": 0.0}, False, "nothing is left to sweep"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, object], val: bool, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ProbeOptions(**options).check(val)  # type: ignore[arg-type]


def test_recipes_are_the_papers() -> None:
    assert resolved() == ProbeOptions(
        features="vec", lr=0.1, epochs=10, batch=64, weight_decay=0.0, val_share=0.0, seeds=(0,)
    )
    assert ProbeOptions().resolved(val=True).weight_decay is None
    adamw, sgd, lbfgs = (resolved(recipe=name) for name in ("adamw", "sgd", "lbfgs"))
    assert (adamw.features, adamw.lr, adamw.epochs, adamw.weight_decay) == ("vec", 0.1, 20, 0.0)
    assert (sgd.features, sgd.lr, sgd.epochs, sgd.batch, sgd.weight_decay) == ("pooled", 0.1, 50, 256, 0.0)
    assert (lbfgs.features, lbfgs.max_iter, lbfgs.weight_decay, lbfgs.val_share) == ("pooled", 1000, None, 0.1)
    assert resolved(recipe="lbfgs", weight_decay=3.0).val_share == 0
    assert resolved(shots=4).seeds == (0, 1, 2)


def test_from_the_command_line(tmp_path: Path, debug: Matcher, capsys: pytest.CaptureFixture[str]) -> None:
    from kiloword.config.recipes import ModelFile
    from kiloword.models.model_folder import save_model

    file = ModelFile(method="siglip", settings={}, model=debug.model.config)
    save_model(tmp_path / "model", debug.model, debug.tokenizer, file)
    data = tmp_path / "photos"
    (data / "test").mkdir(parents=True)
    (data / "classnames.txt").write_text("a\nb")
    for part, first, count in (("train", 0, 12), ("test", 12, 8)):
        rows = range(first, first + count)
        members = [(f"{n}.{s}", photo(n) if s == "png" else b"%d" % (n % 2)) for n in rows for s in ("png", "cls")]
        write_tar(data / part / "0.tar", members)
    words = ["eval", "probe", str(tmp_path / "model"), "--data", str(data / "test"), "--json", str(tmp_path / "r.json")]
    main([*words, "--cache", str(tmp_path / "cache"), "--probe.shots", "3", "--probe.seeds", "4", "5"])
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["train_rows"] == 6
    assert {"seed@4.acc1", "seed@5.acc1", "acc1_std"} <= found.keys()
    output = capsys.readouterr().out
    assert "acc1_std" in output
    assert "seed@" not in output
    with pytest.raises(SystemExit):
        main([*words, "--val", str(data / "train")])
    assert "the train and val data are the same" in capsys.readouterr().err
