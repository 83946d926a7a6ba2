"""Each check of the conformity suite measures what its name says: a fault of one kind fails one check."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kiloword.distributed import collectives
from kiloword.methods.method import Method
from kiloword.methods.registry import preset
from kiloword.training import compilation, engine
from kiloword.types import Input, PairBlocks, Pairs, Positives, Total
from kiloword.verify import loading
from kiloword.verify import suite as verify
from kiloword.verify.batch import IMAGES, batch
from kiloword.verify.checks import EXACT, RANDOM_LOSS, Check, again, compare
from kiloword.verify.suite import Way

Gradients = dict[str, Tensor]
REFERENCE = {"a": torch.tensor([1.0, -4.0], dtype=torch.float64), "b": torch.zeros(2), "loss:loss": torch.tensor(-8.0)}


@pytest.mark.parametrize(
    ("name", "way", "permute", "ranks"),
    [
        (None, Way(micro=3), False, 1),
        ("2 micro-batches", Way(micro=2), False, 1),
        ("4 micro-batches", Way(micro=4), False, 1),
        ("blocks of 3 x 3 pairs", Way(chunk=3), False, 1),
        ("blocks of 7 x 7 pairs", Way(chunk=7), False, 1),
        ("samples in another order", Way(), True, 1),
        ("whole checkpointing", Way(checkpointing="whole"), False, 1),
        ("selective checkpointing", Way(checkpointing="selective"), False, 1),
        ("2 ranks, ddp, 1 micro-batch", Way("ddp"), False, 2),
        ("3 ranks, fsdp, 4 micro-batches, whole checkpointing", Way("fsdp", 4, "whole"), False, 3),
        ("2 ranks, fsdp, 1 micro-batch, whole checkpointing", Way("fsdp", 1, "whole"), False, 2),
    ],
)
def test_a_gradient_that_one_way_changes_fails_one_check(
    monkeypatch: pytest.MonkeyPatch, name: str | None, way: Way, permute: bool, ranks: int
) -> None:
    def of(this: Way, order: bool, count: int) -> Gradients:
        wrong = (this, order, count) == (way, permute, ranks)
        return REFERENCE | ({"a": torch.tensor([1.0, -4.0 + 1e-9], dtype=torch.float64)} if wrong else {})

    def alone(method: str, way: Way | None = None, permute: bool = False, trunks: str = "none") -> Gradients:
        return of(way or Way(), permute, 1)

    def over(method: str, ranks: int, ways: Sequence[Way], trunks: str) -> dict[Way, Gradients]:
        assert ranks > 1
        return {way: of(way, False, ranks) for way in ways}

    monkeypatch.setattr(verify, "gradients", alone)
    monkeypatch.setattr(verify, "gradients_over_ranks", over)
    monkeypatch.setattr(verify, "_without_gradient", lambda method, *more: [])
    for check in ("_save_and_load", "_bf16", "_toy"):
        monkeypatch.setattr(verify, check, lambda method, *more: 0.0)
    checks = list(verify.verify("siglip", (1, 2, 3)))
    assert len(checks) == 6 + 7 + 2 * 8
    assert [check.name for check in checks if not check.passed] == ([] if name is None else [name])


@pytest.mark.parametrize(
    ("check", "name"),
    [
        ("_without_gradient", "parameters without a gradient"),
        ("made_otherwise", "bytes of a batch that are made otherwise on other ranks or workers"),
        ("_save_and_load", "score after save and load"),
        ("_bf16", "bf16 against fp32: 1 - cosine of gradients"),
        ("_toy", "toy problem: loss left after 60 steps"),
    ],
)
def test_a_measure_that_is_too_large_fails_one_check(monkeypatch: pytest.MonkeyPatch, check: str, name: str) -> None:
    limits = {"_bf16": 0.02, "_toy": 0.25}
    monkeypatch.setattr(verify, "gradients", lambda *given, **named: REFERENCE)
    found = ["a"] if check == "_without_gradient" else []
    monkeypatch.setattr(verify, "_without_gradient", lambda method, *more: found)
    for one in ("made_otherwise", "_save_and_load", "_bf16", "_toy"):
        limit = limits.get(one, 0.0)
        value = limit + 1e-6 if one == check else limit
        where = loading if one == "made_otherwise" else verify
        monkeypatch.setattr(where, one, lambda method, *more, value=value: value)
    assert [one.name for one in verify.verify("clip-c", (1,)) if not one.passed] == [name]


@pytest.mark.parametrize(
    ("changes", "value"),
    [
        ({}, 0.0),
        ({"a": torch.tensor([1.0, -4.0 + 0.5])}, 0.125),  # of the largest gradient
        ({"b": torch.tensor([0.0, -0.5])}, 0.125),
        ({"loss:loss": torch.tensor(-6.0)}, 0.25),  # of itself
        ({"b": torch.tensor([0.0, math.nan])}, math.nan),
        ({"c": torch.zeros(1)}, math.inf),
    ],
)
def test_differences_are_relative(changes: Gradients, value: float) -> None:
    found = compare("x", REFERENCE | changes, REFERENCE)
    assert found.limit == EXACT
    assert found.value == pytest.approx(value, nan_ok=True)
    assert found.passed == (value == 0)


def test_a_parameter_that_lost_its_gradient_fails() -> None:
    found = compare("x", {"a": REFERENCE["a"], "loss:loss": REFERENCE["loss:loss"]}, REFERENCE)
    assert found.name == "x: other parameters have gradients"
    assert not found.passed


def test_a_measure_may_be_at_its_limit_and_no_nan() -> None:
    assert Check("x", 0.25, 0.25).passed
    assert not Check("x", 0.2500001, 0.25).passed
    assert not Check("x", math.nan, 0.25).passed


@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (1, 2)])
def test_a_way_is_the_way_that_gradients_are_made(monkeypatch: pytest.MonkeyPatch, rank: int, ranks: int) -> None:
    """Blocks, checkpointing, shards, micro-batches, order: nothing but this changes, and each where it is asked for."""
    calls: list[Any] = []
    monkeypatch.setattr(collectives, "rank", lambda: rank)
    monkeypatch.setattr(collectives, "ranks", lambda: ranks)
    monkeypatch.setattr(compilation, "recompute", lambda model, kind: calls.append(("recompute", kind)))
    monkeypatch.setattr(engine, "shard", lambda learner: calls.append(("shard",)))
    monkeypatch.setattr(engine, "replicated", lambda learner: "reducer")

    def backward(learner: Any, micro: list[Any], *, reducer: str) -> Gradients:
        calls.extend([reducer, learner.chunk, [b.position.tolist() for b in micro]])
        first = next(learner.parameters())
        first.grad = torch.ones_like(first)
        return {"loss": torch.tensor(2.0)}

    monkeypatch.setattr(verify, "backward", backward)
    mine = list(range(IMAGES)[rank * IMAGES // ranks : (rank + 1) * IMAGES // ranks])
    found = verify.gradients("siglip")
    assert calls == [("recompute", "none"), "reducer", 0, [mine]]
    assert [name.startswith("model.") for name in found] == [True, False]
    assert found["loss:loss"] == 2
    calls.clear()
    verify.gradients("siglip", Way("fsdp", 2, "whole", 5), permute=True)
    half = len(mine) // 2
    order = [(7 * row + 3) % IMAGES for row in mine]
    assert calls == [("recompute", "whole"), ("shard",), "reducer", 5, [order[:half], order[half:]]]


class Term(torch.nn.Module):
    """A mean over images in place of a sum, a count of batches in place of examples, or all as it should be."""

    def __init__(self, value: str) -> None:
        super().__init__()
        self.value = value

    def count(self, some: Any) -> Tensor:
        return torch.tensor(1.0 if self.value == "count" else len(some), dtype=torch.float64)

    def forward(self, model: Any, some: Any, encoded: Any) -> Tensor:
        of = encoded.images["vec"].square().sum(1).double()
        return of.mean() if self.value == "value" else of.sum()


@pytest.mark.parametrize("value", ["value", "count", ""])
def test_terms_that_do_not_add_up(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    slots = replace(preset("siglip"), terms={"mine": (1.0, lambda config: Term(value))})
    monkeypatch.setattr(verify, "slots_of", lambda method: slots)
    (check,) = verify._additive("siglip")
    assert check.name == "term mine: sum over the parts of a batch"
    assert check.passed == (not value)
    if value:
        assert check.value == pytest.approx(0.75)  # 1 in place of 4
        assert check.cause.startswith(f"The {value} of the term mine for a batch")


def test_parameters_without_a_gradient_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """None, zero or rounding; those that are frozen need none."""
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(2)) for _ in range(6)])
    gradients = (None, [1.0, -7.0], [0.0, 0.0], [1e-11, 0.0], [0.0, 1e-8], None)
    model[5].requires_grad_(False)

    def backward(learner: Any, micro: Any) -> None:
        for p, g in zip(model, gradients, strict=True):
            p.grad = None if g is None else torch.tensor(g)

    monkeypatch.setattr(verify, "learner", lambda method, trunks: model)
    monkeypatch.setattr(verify, "backward", backward)
    assert verify._without_gradient("siglip") == ["0", "2", "3"]


@pytest.mark.parametrize(("weight", "value"), [(1.0, (3.0 - 2.0) / (10.0 - 2.0)), (0.0, 0.25)])
def test_what_is_left_of_a_loss(monkeypatch: pytest.MonkeyPatch, weight: float, value: float) -> None:
    """Of the pair loss above the least possible; without a pair loss, of the whole loss above 0."""
    steps: list[int] = []
    fake = SimpleNamespace(method=SimpleNamespace(pair_weight=weight), clamp_=lambda: None)

    def backward(learner: Any, micro: Any) -> Gradients:
        pair, loss = ((10.0, 8.0), (3.0, 2.0))[len(steps) == 59] if len(steps) in (0, 59) else (99.0, 99.0)
        return {"pair": torch.tensor(pair), "loss": torch.tensor(loss)}

    def optimizer(model: Any, config: Any, total: int) -> Any:
        assert (total, config.warmup) == (60, 0.1)
        return SimpleNamespace(step=steps.append)

    monkeypatch.setattr(verify, "learner", lambda method, dtype, trunks: fake)
    monkeypatch.setattr(verify, "backward", backward)
    monkeypatch.setattr(verify, "Optimizer", optimizer)
    monkeypatch.setattr(verify, "_least", lambda model, some: 2.0)
    assert verify._toy("siglip") == pytest.approx(value)
    assert steps == list(range(60))


def test_half_precision_is_compared_with_single(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def backward(learner: Any, micro: Any, precision: Any = nullcontext) -> None:
        with precision():
            seen.append(torch.is_autocast_enabled("cpu"))
        for n, p in enumerate(learner.parameters()):
            assert p.dtype == torch.float32
            p.grad = torch.zeros_like(p)
            if n == 0:
                p.grad.view(-1)[: 1 + seen[-1]] = 1.0

    monkeypatch.setattr(verify, "backward", backward)
    assert verify._bf16("siglip") == pytest.approx(1 - 0.5**0.5)
    assert seen == [False, True]


@pytest.mark.parametrize("fault", ["none", "images", "ids", "length"])
def test_batches_that_ranks_make_otherwise(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    made: list[tuple[int, int, int]] = []

    class Loader:
        def __init__(self, *given: Any, transforms: Any, inputs: Any, rank: int, ranks: int, workers: int) -> None:
            made.append((rank, ranks, workers))
            self.rank, self.ranks = rank, ranks
            assert (transforms, inputs) == (preset("clip-c").transforms, {})

        def batches(self, step: int, end: int) -> Iterator[Any]:
            assert (step, end) == (1, 2)
            share = IMAGES // self.ranks
            some = batch(self.rank * share, (self.rank + 1) * share)
            if self.rank == 1 and fault == "images":
                some.images[0, 0, 0, :3] += 1
            if self.rank == 1 and fault == "ids":
                some.texts.ids[:2] += 1
            if self.rank == 1 and fault == "length":
                some = batch(8, 15)
            yield some

    monkeypatch.setattr(loading, "Loader", Loader)
    assert loading.made_otherwise("clip-c") == {"none": 0, "images": 3, "ids": 2, "length": math.inf}[fault]
    assert made == [(0, 1, 0), (0, 2, 1), (1, 2, 1)]


def test_a_score_that_a_model_folder_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    load = verify.load_model

    def other(*given: Any, **named: Any) -> Any:
        model, tokenizer = load(*given, **named)
        model.head.log_scale.data += 0.5
        return model, tokenizer

    monkeypatch.setattr("kiloword.model.model.Model.score", lambda self, images, texts: self.head.log_scale.detach())
    assert verify._save_and_load("siglip") == 0
    monkeypatch.setattr(verify, "load_model", other)
    assert verify._save_and_load("siglip") == pytest.approx(0.5)


def test_the_report_has_a_line_for_each_check(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = [Check("one", 0.5, 1, where="here"), *(Check(n, 2, 1, "Because.", "there") for n in ("two", "three"))]
    lines: list[str] = []
    monkeypatch.setattr(verify, "verify", lambda method, ranks, trunks: checks)
    with pytest.raises(ValueError, match=r"^mine fails 2 of its checks: two, three\. Because\.$"):
        verify.main("mine", (1,), lines.append)
    assert "--ranks 1 adds no check" in lines.pop(0)
    assert [line[:6] for line in lines] == ["ok    ", "FAIL  ", "FAIL  "]
    assert [line.endswith("  there") for line in lines] == [False, True, True]
    assert lines[0].split("one")[1].split() == ["5.00e-01", "(at", "most", "1)"]
    monkeypatch.setattr(verify, "verify", lambda method, ranks, trunks: checks[:1])
    verify.main("mine", (1,), lines.append)


def test_nothing_is_compared_with_a_step_that_does_not_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = iter(range(100))

    def gradients(*given: Any, **named: Any) -> Gradients:
        return REFERENCE | {"a": torch.tensor([1.0, -4.0 + next(drawn)])}

    monkeypatch.setattr(verify, "gradients", gradients)
    monkeypatch.setattr(verify, "_without_gradient", lambda method, *more: [])
    _, last = verify.verify("siglip", (1,))
    assert (last.name, last.passed, last.cause) == ("the same step again", False, RANDOM_LOSS)
    assert last.where == "largest in a"
    assert not again(REFERENCE | {"b": torch.tensor([0.0, math.nan])}, REFERENCE).cause  # not random, but not a number


def focal(right_derivative: bool) -> Method:
    """SigLIP's loss, weighted by the squared probability of the wrong answer, with a derivative written by hand."""

    def loss(pairs: PairBlocks, positives: Positives) -> Total:
        def values(block: Pairs, rows: slice, columns: slice) -> tuple[Tensor, Tensor]:
            sign = 2 * positives(block) - 1
            wrong = (-sign * block.logits).sigmoid()
            entropy = -(1 - wrong).log()
            slope = wrong**3 + (2 * entropy * wrong**2 * (1 - wrong) if right_derivative else 0)
            return (entropy * wrong**2).sum(1), -sign * slope

        total = pairs.total(values)
        return Total(total, total.new_tensor(float(pairs.shape[0])), pairs.rows)

    return replace(preset("siglip"), name="focal", pair_loss=loss)


def test_a_derivative_written_by_hand_is_compared_with_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same on every rank and in every micro-batch, so that no other check sees that a factor is forgotten."""
    checks = []
    for right in (True, False):
        monkeypatch.setattr(verify, "slots_of", lambda method, right=right: focal(right))
        checks.append(verify._slope("siglip", "none"))
    assert [check.passed for check in checks] == [True, False]
    assert "stops_gradient=True" in checks[1].cause
    monkeypatch.setattr(verify, "slots_of", lambda method: replace(focal(False), stops_gradient=True))
    first = [check.name for check, _ in zip(verify.verify("siglip", ()), range(3), strict=False)]
    assert first == ["parameters without a gradient", "the same step again", "2 micro-batches"]


def test_a_state_that_differs_is_named_with_its_cause() -> None:
    state = {"state:terms.own.centre": torch.ones(2, dtype=torch.float64)}
    found = compare("2 ranks", REFERENCE | {name: 2 * x for name, x in state.items()}, REFERENCE | state)
    assert found.where == "largest in state:terms.own.centre"
    assert "sum_over_ranks" in found.cause


def wrong_input(example: Any, fetch: Any, draw: Any) -> Tensor:
    return torch.zeros(3, 16, 32)


def test_inputs_of_another_shape_than_stated_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = replace(preset("siglip"), inputs={"view": Input(wrong_input, lambda config: (3, 32, 32))})
    monkeypatch.setattr(loading, "slots_of", lambda method: slots)
    failed = [check for check in loading.what_is_loaded("siglip") if not check.passed]
    assert [check.where for check in failed] == ["view: made torch.float32 [3, 16, 32], stated torch.uint8 [3, 32, 32]"]
    monkeypatch.setattr(loading, "slots_of", lambda method: preset("slip"))
    assert all(check.passed for check in loading.what_is_loaded("slip"))
