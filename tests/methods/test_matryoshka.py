"""Matryoshka: the pair loss on prefixes, against a literal transcription of arXiv:2205.13147, eq. 1."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kiloword.losses.pairs import Blocks
from kiloword.methods.registry import preset
from kiloword.model.model import initialise
from kiloword.training.accumulate import backward
from kiloword.verify.batch import batch, config
from kiloword.verify.suite import learner

SCALES = {16: 5.0, 8: 3.0, 4: 2.0}


def one(name: str, x: Tensor, y: Tensor, scale: float, bias: float) -> Tensor:
    """The pair loss of N pairs, by loops over normalised vectors."""
    x, y = (v / (v * v).sum(1, keepdim=True).sqrt() for v in (x, y))
    z = scale * (x @ y.T) + bias
    n, total = len(x), z.new_zeros(())
    for i in range(n):
        for j in range(n):
            if name == "siglip":
                total = total - F.logsigmoid(z[i, j] if i == j else -z[i, j])
        if name == "clip":
            total = total - z[i].log_softmax(0)[i] / 2 - z[:, i].log_softmax(0)[i] / 2
    return total / n


@pytest.mark.parametrize("name", ["siglip", "clip"])
@pytest.mark.parametrize("chunk", [0, 3])
def test_the_loss_and_its_gradients_are_the_papers(name: str, chunk: int) -> None:
    method = preset(f"{name}+matryoshka", {"matryoshka": {"smallest": 4, "weight": 0.7}})
    head = method.head(config()).double()
    initialise(head, 0)
    dims = {config().head.dim: head} | {part.pooling.dim: part for part in map(_any, head.inner().values())}
    for dim, part in dims.items():
        part.log_scale.data.fill_(torch.tensor(SCALES.get(dim, 4.0)).double().log())
    generator = torch.Generator().manual_seed(0)
    x, y = F.normalize(torch.randn(2, 7, config().head.dim, generator=generator, dtype=torch.float64), dim=-1)
    results = []
    for fast in (True, False):
        leaves = [v.clone().requires_grad_() for v in (x, y)]
        if fast:
            sides = [{"vec": F.normalize(leaf, dim=-1), "position": torch.arange(7)} for leaf in leaves]
            total = method.pair_loss(Blocks(head, sides[0], sides[1], chunk), method.positives)
            loss = total.sum / total.count
            assert total.rows is not None
            torch.testing.assert_close(total.rows.sum(), total.sum.detach(), rtol=1e-12, atol=0)
        else:
            parts = []
            for dim, part in dims.items():
                bias = 0.0 if part.bias is None else float(part.bias.detach())
                value = one(name, leaves[0][:, :dim], leaves[1][:, :dim], float(part.log_scale.detach().exp()), bias)
                parts.append(value * (1 if part is head else 0.7))
            loss = torch.stack(parts).sum()
        results.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
    assert sorted(dims) == [4, 8, 16]
    torch.testing.assert_close(results[0], results[1], rtol=1e-10, atol=1e-12)


def _any(part: Any) -> Any:
    return part


def test_scale_and_bias_of_every_prefix_learn() -> None:
    made = learner("siglip+matryoshka")
    backward(made, [batch(method="siglip+matryoshka")])
    for head in made.model.head.inner().values():
        assert head.log_scale.grad is not None
        assert float(head.log_scale.grad.abs()) > 0


def test_weight_0_is_the_method_itself() -> None:
    choice = preset("siglip+matryoshka", {"matryoshka": {"weight": 0.0}})
    made = learner("siglip")
    some = batch()
    expected = backward(made, [some])["pair"]
    plain = made.pair_inputs(made.encode(some), some)
    head = choice.head(config()).double()
    initialise(head, 0)
    for name in ("log_scale", "bias"):
        getattr(head, name).data.copy_(getattr(made.model.head, name).data)
    total = choice.pair_loss(Blocks(head, plain.rows, plain.gathered()), choice.positives)
    torch.testing.assert_close((total.sum / total.count).detach(), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", ["llip", "prolip", "pcme++"])
def test_other_poolings_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="by more than the cosine of one vector"):
        preset(f"{name}+matryoshka")


def test_a_prefix_larger_than_half_is_refused() -> None:
    with pytest.raises(ValueError, match="have no prefix of at least 5000"):
        preset("siglip+matryoshka", {"matryoshka": {"smallest": 5000}}).head(config())
