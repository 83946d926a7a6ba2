"""Pair losses: memory that does not grow with the number of texts, and how often ranks talk in one step."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from commands import module_at
from kiloword.distributed import collectives
from kiloword.methods.prolip.gaussian import csd_matrix, inclusion_matrix
from kiloword.training.engine import replicated
from kiloword.training.step import backward
from kiloword.verify.batch import IMAGES, batch
from kiloword.verify.suite import over_ranks
from literal import pairs
from parts import Largest, learner, losses, size

SETTINGS = argparse.Namespace(images=128, dim=64, chunk=128, device="cpu")
DIM = 64


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return module_at(Path(__file__).parents[2] / "bench" / "loss.py", "bench_loss")


ALL = [(head, loss) for head in ("single", "gaussian") for loss in ("softmax", "sigmoid", "matching", "balanced")]


@pytest.mark.parametrize(
    ("head", "loss"), [*ALL, ("single", "supcon-in"), pytest.param("contextual", "softmax", marks=pytest.mark.slow)]
)
def test_memory_beyond_features_and_gradients_is_flat(bench: ModuleType, head: str, loss: str) -> None:
    """From 512 to 2048 texts only numbers of one a text are added; 3 T D numbers hold features and gradients."""
    few, many = (bench.measure(SETTINGS, head, loss, texts) for texts in (512, 2048))
    assert many["blocks_beyond"] - few["blocks_beyond"] <= 40 * (2048 - 512)  # ten numbers a text
    if head != "contextual":  # whose block is more than its logits
        assert few["blocks_beyond"] < 12 * 4 * SETTINGS.chunk**2
    if many["full"] is not None:  # the measure itself: all pairs at once do hold them
        assert many["full"] > 2 * 4 * SETTINGS.images * 2048


def step(method: str, n: int) -> int:
    """Numbers of the largest tensor of a whole step of n images and as many texts."""
    made = learner(method, shape=size(head__dim=DIM), chunk=32)
    some = pairs(made.model, [[[40 + row, 7, 8, 9]] for row in range(n)])
    with Largest() as watched:
        losses(made, some)["loss"].backward()
    return watched.numbers


@pytest.mark.parametrize("method", ["prolip", "prolip-released", "pcme+++deterministic", "llip+gaussian+inclusion"])
def test_a_step_s_largest_tensor_grows_as_the_batch_does(method: str) -> None:
    few, many = step(method, 32), step(method, 128)
    assert many <= 4 * few < 128 * 128 * DIM  # of every image with every text it were sixteen times as large


def test_matrices_of_all_pairs_hold_no_dimensions() -> None:
    a, b = ({"vec": torch.ones(n, DIM), "log_var": torch.ones(n, DIM)} for n in (300, 400))
    for matrix, most in ((csd_matrix, 300 * 400), (inclusion_matrix, 300 * 400 * DIM / 4)):
        with Largest() as watched:
            matrix(a, b)
        assert 300 * 400 <= watched.numbers <= most


def test_backward_twice_through_a_graph_that_is_kept(bench: ModuleType) -> None:
    made = bench.make(argparse.Namespace(**{**vars(SETTINGS), "texts_now": 256}), "single")
    total = bench.softmax_loss(bench.Blocks(*made, 64), bench.annotated)
    inputs = bench.leaves(*made)
    first = torch.autograd.grad(total.sum, inputs, retain_graph=True)
    second = torch.autograd.grad(3 * total.sum, inputs)
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(3 * a, b)
    with pytest.raises((RuntimeError, AssertionError)):  # never a gradient times another
        torch.autograd.grad(total.sum, inputs)


class Collectives(TorchDispatchMode):
    """What this rank says to others: how often, by the operation's name and the numbers of its largest tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = Counter[tuple[str, int]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            sizes = [x.numel() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            self.calls[func._opname, max(sizes, default=0)] += 1
        return func(*args, **(kwargs or {}))


def talks() -> None:
    """What the ranks say to each other in one step of a softmax loss: a gather and a scatter of what it reads."""
    share, rank = IMAGES // 2, collectives.rank()
    made, shares = learner("clip"), [batch(r * share, (r + 1) * share, method="clip+mined") for r in (0, 1)]
    most, every = (f(len(one.texts) for one in shares) for f in (max, sum))
    features = 2 * most * made.model.config.head.dim
    reducer = replicated(made)
    with Collectives() as said:
        backward(made, shares[rank].split(1), reducer=reducer)
    gathered = {n for (name, n), times in said.calls.items() if "gather" in name for _ in range(times)}
    assert gathered == {2, 2 * most * 16, features}  # counts, bytes, floats
    scattered = [n for (name, n), times in said.calls.items() if "scatter" in name for _ in range(times)]
    assert scattered == [features]
    columns = {n: times for (name, n), times in said.calls.items() if "reduce_" in name and n in (every, 2 * every)}
    named = int(2 * every == len(list(made.parameters())))  # DDP says which parameters it used
    assert columns == {every: 1, 2 * every: 1 + named}  # one number a text, and with it the number of positives


@pytest.mark.slow
def test_one_gather_and_one_reduce_scatter_a_step() -> None:
    over_ranks(2, talks)
