"""What tests of methods and losses are made of: the one place that knows how learners, heads and blocks are built."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kiloword.config.recipes import DataConfig, ModelConfig
from kiloword.data.loader import Loader
from kiloword.data.sampler import Order
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.losses.pairs import Blocks
from kiloword.methods.method import Method
from kiloword.methods.registry import preset
from kiloword.model.heads import Head, Pooling, Scale
from kiloword.model.model import initialise
from kiloword.models.build import build
from kiloword.training.step import Learner, backward
from kiloword.types import Batch, Features, Source, Texts, Total
from kiloword.verify import suite
from kiloword.verify.batch import MethodChoice, config


def size(**changes: Any) -> ModelConfig:
    """The model of the conformity suite with some values changed: `image__patch=8` is its image.patch."""
    made = config()
    for name, value in changes.items():
        room, _, field = name.partition("__")
        made = replace(made, **{room: replace(getattr(made, room), **{field: value})})
    return made


def learner(
    method: str | Method, settings: dict[str, Any] | None = None, shape: ModelConfig | None = None, chunk: int = 0
) -> Learner:
    """In double precision, all parameters drawn from seed 0. Args: shape: None: that of the conformity suite."""
    if shape is None and isinstance(method, str):
        return suite.learner(MethodChoice(method, settings or {}), chunk)
    slots = preset(method, settings) if isinstance(method, str) else method
    made = Learner(build(shape or config(), slots, seed=0), slots, chunk)
    initialise(made.terms, 0, "terms.")
    initialise(made.contrasts, 0, "contrasts.")
    return made.double()


def model(method: str, settings: dict[str, Any] | None = None, shape: ModelConfig | None = None) -> Any:
    """The model of a method alone, in double precision."""
    return build(shape or config(), preset(method, settings), seed=0).double()


def losses(made: Learner, some: Batch) -> dict[str, Tensor]:
    """The losses of a whole batch, with their graph."""
    return made(some, made.counts([some]))


def gradients(made: Learner, some: Batch, parts: int = 1) -> dict[str, Tensor]:
    """Gradients of one step by parameter, and its losses as "loss:NAME"."""
    report = backward(made, some.split(parts))
    found = {name: p.grad for name, p in made.named_parameters() if p.grad is not None}
    return found | {f"loss:{name}": value for name, value in report.items()}


def cosine(scale: float = 1.0, bias: float | None = None) -> Any:
    """A head of cosines of features that are made elsewhere, in double precision."""
    made = Head(Pooling(), scale=Scale(scale, bias)).double()
    initialise(made, 0)
    made.log_scale.data.fill_(math.log(scale))  # not rounded to single precision
    return made


def blocks(head: Any, rows: Features, columns: Features, chunk: int = 0) -> Blocks:
    """Pairs of one rank; rows and columns get their number as position where they have none."""
    sides = ({"position": torch.arange(len(side["vec"])), **side} for side in (rows, columns))
    return Blocks(head, *sides, chunk)


def mean(total: Total) -> Tensor:
    return total.sum / total.count


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers in double precision."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def units(*shape: int, seed: int = 0) -> Tensor:
    return F.normalize(drawn(*shape, seed=seed), dim=-1)


def agree(found: Tensor, expected: Tensor, leaves: Sequence[Tensor], rtol: float = 1e-10, atol: float = 1e-12) -> None:
    """Values, and gradients of their sums by all leaves, agree; and not all gradients are zero."""
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)
    kept = {"retain_graph": True, "allow_unused": True}
    by_found, by_expected = (torch.autograd.grad(x.sum(), list(leaves), **kept) for x in (found, expected))
    assert any(g is not None and g.abs().max() > 1e-6 for g in by_expected)
    for leaf, a, b in zip(leaves, by_found, by_expected, strict=True):
        a, b = (torch.zeros_like(leaf) if g is None else g for g in (a, b))
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


def loader(source: Source, inputs: Any = None, shape: ModelConfig | None = None, rows: int = 8, **more: Any) -> Loader:
    """Batches of a source of words that a small tokenizer knows by letters. Args: rows: of a batch."""
    tokenizer = more.pop("tokenizer", None) or Tokenizer.train(["a"], 300)
    order = more.pop("order", None) or Order(len(source), rows, more.get("seed", 0))
    data, shape = more.pop("data", DataConfig()), shape or config()
    return Loader(source, order, data, shape.text, shape.image.size, tokenizer, inputs=inputs or {}, **more)


def ids_of(texts: Texts) -> list[list[int]]:
    return [texts.ids[a:b].tolist() for a, b in pairwise(texts.starts.tolist())]


class Largest(TorchDispatchMode):
    """Numbers of the largest tensor that any operation makes, forward or backward; of a view its storage counts."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self.numbers = max(self.numbers, x.untyped_storage().nbytes() // x.element_size())
        return out
