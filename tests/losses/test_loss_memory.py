"""The pair loss alone: memory that does not grow with the number of texts, and how often ranks talk in one step."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from kiloword.distributed import collectives, gather
from kiloword.distributed.gather import gather_features
from kiloword.training.accumulate import backward
from kiloword.types import Features
from kiloword.verify.batch import IMAGES, batch
from kiloword.verify.suite import learner, over_ranks
from modules import module_at

SETTINGS = argparse.Namespace(images=128, dim=64, chunk=128, device="cpu")
PAIR_BLOCK = 4 * SETTINGS.chunk**2  # bytes of the logits of a block


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    path = Path(__file__).parents[2] / "bench" / "loss.py"
    return module_at(path, "bench_loss")


def test_the_measure_sees_all_pairs_at_once(bench: ModuleType) -> None:
    """What is held at once, and what was freed before; and a plain formula that holds [I, T] is found out."""
    numbers = 1 << 16

    def one_after_the_other() -> None:
        for _ in range(3):
            torch.ones(numbers)

    assert 4 * numbers <= bench.peak(one_after_the_other, "cpu") < 5 * numbers
    assert 12 * numbers <= bench.peak(lambda: [torch.ones(numbers) for _ in range(3)], "cpu") < 13 * numbers
    row = bench.measure(SETTINGS, "single", "sigmoid", 4096)
    assert row["full"] > 2 * 4 * SETTINGS.images * 4096
    assert row["full_over_blocks"] > 2


ALL = [(head, loss) for head in ("single", "gaussian") for loss in ("softmax", "sigmoid", "matching", "balanced")]


@pytest.mark.parametrize(
    ("head", "loss"), [*ALL, ("single", "supcon-in"), pytest.param("contextual", "softmax", marks=pytest.mark.slow)]
)
def test_memory_beyond_features_and_gradients_is_flat(bench: ModuleType, head: str, loss: str) -> None:
    """From 512 to 2048 texts only numbers of one a text are added; 3 T D numbers hold features and gradients."""
    few, many = (bench.measure(SETTINGS, head, loss, texts) for texts in (512, 2048))
    assert many["blocks_beyond"] - few["blocks_beyond"] <= 40 * (2048 - 512)  # ten numbers a text
    if head != "contextual":  # whose block is more than its logits
        assert few["blocks_beyond"] < 12 * PAIR_BLOCK


def test_backward_twice_through_a_graph_that_is_kept(bench: ModuleType) -> None:
    made = bench.make(argparse.Namespace(**{**vars(SETTINGS), "texts_now": 256}), "single")
    total = bench.softmax_loss(bench.Blocks(*made, 64), bench.annotated)
    inputs = bench.leaves(*made)
    first = torch.autograd.grad(total.sum, inputs, retain_graph=True)
    second = torch.autograd.grad(3 * total.sum, inputs)
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(3 * a, b)
    with pytest.raises(
        (RuntimeError, AssertionError), match=r"second backward|second time"
    ):  # never a gradient times another
        torch.autograd.grad(total.sum, inputs)


def _features(rank: int, n: int) -> Features:
    generator = torch.Generator().manual_seed(rank)
    learned = {"vec": (n, 5), "tokens": (n, 2, 3), "number": (n,)}
    floats = {k: torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for k, s in learned.items()}
    return {
        **floats,
        "position": torch.arange(n) + 10 * rank,
        "mineable": torch.arange(n) % 2 == 0,
        "text_features.x": torch.randn(n, 3, generator=generator).half(),
        "text_features.truth": torch.rand(n, 7, generator=generator) < 0.5,
    }


def _gathers(sizes: list[int]) -> None:
    """Values and gradients are those of one process that has all rows."""
    rank = collectives.rank()
    every = [_features(r, n) for r, n in enumerate(sizes)]
    found = gather_features(every[rank])
    for name, value in found.items():
        expected = torch.cat([one[name] for one in every])
        assert value.dtype == expected.dtype
        assert torch.equal(value, expected), name
    weights = [torch.randn(sum(sizes), dtype=torch.float64, generator=torch.Generator().manual_seed(r)) for r in (0, 1)]
    (found["vec"].sum(1) * weights[rank]).sum().add((found["number"] * weights[rank]).sum()).backward()
    own = torch.stack(weights).sum(0)[sum(sizes[:rank]) :][: sizes[rank]]
    for name, expected in (("vec", own[:, None].expand(-1, 5)), ("number", own), ("tokens", None)):
        grad = every[rank][name].grad
        assert grad is not None
        torch.testing.assert_close(grad, torch.zeros_like(grad) if expected is None else expected)


def _step() -> None:
    """What the ranks say to each other in one step of a softmax loss."""
    rank = collectives.rank()
    said: list[tuple[str, int]] = []

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*tensors: Any, **more: Any) -> Any:
            said.append((name, max(x.numel() for x in tensors if isinstance(x, Tensor))))
            return function(*tensors, **more)

        return call

    gather._all_gather = counted("gather", gather._all_gather)
    gather._reduce_scatter = counted("scatter", gather._reduce_scatter)
    dist.all_reduce = counted("sum", dist.all_reduce)
    share = IMAGES // 2
    model = learner("clip")
    mine = batch(rank * share, (rank + 1) * share, method="clip")
    most = max(len(batch(r * share, (r + 1) * share, method="clip").texts) for r in (0, 1))
    backward(model, mine.split(1))
    every = sum(len(batch(r * share, (r + 1) * share, method="clip").texts) for r in (0, 1))
    features = 2 * most * model.model.config.head.dim
    assert [size for name, size in said if name == "gather"] == [2, 2 * most * 16, features]  # counts, bytes, floats
    assert [size for name, size in said if name == "scatter"] == [features]
    columns = [size for name, size in said if name == "sum" and size in (every, 2 * every)]
    assert columns == [every, 2 * every]  # one number a text, and with it the number of positives


def _gathers_and_step() -> None:
    for sizes in ([3, 3], [2, 4], [4, 2], [3, 0]):
        _gathers(sizes)
    _step()


@pytest.mark.slow
def test_one_gather_and_one_reduce_scatter_a_step() -> None:
    over_ranks(2, _gathers_and_step)
