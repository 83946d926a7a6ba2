"""Gaussians never need a tensor of pairs times dimensions: the largest tensor that any operation makes is watched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kiloword.config.recipes import sizes
from kiloword.losses.inputs import PairInputs
from kiloword.methods.prolip.gaussian import csd_matrix, inclusion_matrix
from kiloword.methods.registry import preset
from kiloword.models.build import build
from kiloword.training.learner import Learner
from kiloword.types import Batch, Features, Texts

DIM = 64
CHUNK = 32


class Largest(TorchDispatchMode):
    """Numbers of the largest tensor that was made, forward or backward."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):  # of an expanded view its storage counts
                self.numbers = max(self.numbers, x.untyped_storage().nbytes() // x.element_size())
        return out


def largest(run: Callable[[], Any]) -> int:
    with Largest() as watched:
        run()
    return watched.numbers


def gaussians(n: int, seed: int = 0) -> Features:
    generator = torch.Generator().manual_seed(seed)
    vec, log_var = (torch.randn(n, DIM, generator=generator) for _ in range(2))
    return {"vec": F.normalize(vec, dim=1), "log_var": log_var - 5}


def learner(method: str, chunk: int = CHUNK) -> Learner:
    config = sizes()["debug"]
    slots = preset(method)
    return Learner(build(replace(config, head=replace(config.head, dim=DIM)), slots), slots, chunk)


def batch(n: int, of: Learner) -> Batch:
    """Noise, and a caption of four words an image."""
    generator, text, numbers = torch.Generator().manual_seed(0), of.model.config.text, torch.arange(n)
    tail = [text.special["end"], *(text.special[name] for name in text.extra_tokens)]
    words = torch.randint(6, text.vocab, (n, 4), generator=generator).tolist()
    return Batch(
        images=torch.randint(256, (n, 3, 32, 32), generator=generator, dtype=torch.uint8),
        texts=Texts.pack([[text.special["start"], *some, *tail] for some in words]),
        image_of_text=numbers,
        seeds=numbers,
        position=numbers,
        composed=torch.zeros(n, dtype=torch.bool),
    )


def pair_loss(method: str, n: int) -> int:
    """Numbers of the largest tensor of n x n pairs' loss and gradients by features."""
    made = learner(method)
    some = batch(n, made)
    with torch.no_grad():
        inputs = PairInputs.join([made.pair_inputs(made.encode(some), some)])

    def run() -> None:
        made.pair_loss(inputs)["pair"].backward()  # type: ignore[no-untyped-call]

    return largest(run)


def step(method: str, n: int) -> int:
    """Numbers of the largest tensor of a whole step, towers and terms included."""
    made = learner(method)
    some = batch(n, made)
    return largest(lambda: made(some, made.counts([some]))["loss"].backward())


def test_the_watch_sees_what_it_is_to_find() -> None:
    a, b = gaussians(10), gaussians(12, 1)
    assert largest(lambda: (a["vec"][:, None] - b["vec"]).square().sum(-1)) == 10 * 12 * DIM
    leaf = b["vec"].clone().requires_grad_()
    written = (a["vec"].sum(1)[:, None] * leaf.sum(1)).sum()
    assert largest(lambda: torch.autograd.grad(written, leaf)) == 10 * 12  # in backward passes too
    assert largest(lambda: torch.ones(3).expand(1000, 3) + 0) == 3000


@pytest.mark.parametrize("method", ["prolip", "prolip-released", "pcme++", "pcme+++deterministic", "clip+gaussian"])
def test_a_pair_loss_makes_no_tensor_of_all_pairs(method: str) -> None:
    n = 128
    features = n * DIM
    assert pair_loss(method, n) <= features < n * n  # no [I, T], and so no [I, T, D]


@pytest.mark.parametrize("n", [64, 128])
def test_gaussians_make_nothing_larger_of_llip(n: int) -> None:
    assert pair_loss("llip+gaussian", n) <= pair_loss("llip", n) < n * n * DIM


@pytest.mark.parametrize("method", ["prolip", "prolip-released", "pcme++", "llip+gaussian+inclusion"])
def test_a_step_s_largest_tensor_grows_as_the_batch_does(method: str) -> None:
    few, many = step(method, 32), step(method, 128)
    assert many <= 4 * few < 128 * 128 * DIM  # of every image with every text it were sixteen times as large


def test_matrices_of_all_pairs_hold_no_dimensions() -> None:
    a, b = gaussians(300), gaussians(400, 1)
    assert largest(lambda: csd_matrix(a, b)) == 300 * 400
    assert largest(lambda: inclusion_matrix(a, b)) < 300 * 400 * DIM / 4
