"""Pair losses: memory that does not grow with the number of texts, and how often ranks talk in one step."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kiloword.distributed import collectives
from kiloword.methods.prolip.gaussian import csd_matrix, inclusion_matrix
from kiloword.training.engine import replicated
from kiloword.training.step import backward
from kiloword.verify.batch import IMAGES, batch
from kiloword.verify.suite import over_ranks
from literal import pairs
from modules import module_at
from parts import Largest, learner, losses, size

SETTINGS = argparse.Namespace(images=128, dim=64, chunk=128, device="cpu")
DIM = 64


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return module_at(Path(__file__).parents[2] / "bench" / "loss.py", "bench_loss")


def largest(run: Callable[[], Any]) -> int:
    with Largest() as watched:
        run()
    return watched.numbers


def test_the_measures_see_all_pairs_at_once(bench: ModuleType) -> None:
    """What is held at once, and what was freed before; in backward passes too."""
    numbers = 1 << 16
    assert 12 * numbers <= bench.peak(lambda: [torch.ones(numbers) for _ in range(3)], "cpu") < 13 * numbers
    assert 4 * numbers <= bench.peak(lambda: [torch.ones(numbers).sum() for _ in range(3)], "cpu") < 5 * numbers
    row = bench.measure(SETTINGS, "single", "sigmoid", 4096)
    assert row["full"] > 2 * 4 * SETTINGS.images * 4096
    assert row["full_over_blocks"] > 2
    a, b = torch.ones(10, DIM), torch.ones(12, DIM, requires_grad=True)
    assert largest(lambda: (a[:, None] - b).square().sum(-1)) == 10 * 12 * DIM
    written = (a.sum(1)[:, None] * b.sum(1)).sum()
    assert largest(lambda: torch.autograd.grad(written, b)) == 10 * 12
    assert largest(lambda: torch.ones(3).expand(1000, 3) + 0) == 3000


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


def step(method: str, n: int, pair_loss_alone: bool = False) -> int:
    """Numbers of the largest tensor of a whole step, or of the pair loss of n x n pairs and its gradients."""
    made = learner(method, shape=size(head__dim=DIM), chunk=32)
    some = pairs(made.model, [[[40 + row, 7, 8, 9]] for row in range(n)])
    if not pair_loss_alone:
        return largest(lambda: losses(made, some)["loss"].backward())
    with torch.no_grad():
        encoded = made.encode(some)
    for side in (encoded.images, encoded.texts):
        side |= {name: value.requires_grad_() for name, value in side.items()}
    return largest(lambda: made.pair_losses(made.inputs(some, encoded))["pair"].backward())


@pytest.mark.parametrize("method", ["prolip", "prolip-released", "pcme++", "pcme+++deterministic", "clip+gaussian"])
def test_a_pair_loss_makes_no_tensor_of_all_pairs(method: str) -> None:
    assert step(method, 128, pair_loss_alone=True) <= 128 * DIM < 128 * 128


@pytest.mark.parametrize("method", ["prolip", "prolip-released", "pcme++", "llip+gaussian+inclusion"])
def test_a_step_s_largest_tensor_grows_as_the_batch_does(method: str) -> None:
    few, many = step(method, 32), step(method, 128)
    assert many <= 4 * few < 128 * 128 * DIM  # of every image with every text it were sixteen times as large


def test_matrices_of_all_pairs_hold_no_dimensions() -> None:
    a, b = ({"vec": torch.ones(n, DIM), "log_var": torch.ones(n, DIM)} for n in (300, 400))
    assert largest(lambda: csd_matrix(a, b)) == 300 * 400
    assert largest(lambda: inclusion_matrix(a, b)) < 300 * 400 * DIM / 4


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
