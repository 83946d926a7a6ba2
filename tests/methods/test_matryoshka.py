"""Matryoshka: the pair loss on prefixes, against a literal transcription of arXiv:2205.13147, eq. 1."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kiloword.verify.batch import batch
from parts import agree, learner, losses

SCALES = {16: 5.0, 8: 3.0, 4: 2.0}


def one(name: str, x: Tensor, y: Tensor, of: list[int], scale: Tensor, bias: Tensor | float) -> Tensor:
    """The pair loss of N images and T texts, by loops over normalised vectors; several texts of an image share it."""
    x, y = (v / (v * v).sum(1, keepdim=True).sqrt() for v in (x, y))
    z, total = scale * (x @ y.T) + bias, x.new_zeros(())
    for i in range(len(x)):
        own = [t for t in range(len(y)) if of[t] == i]
        for t in range(len(y)):
            if name == "siglip":
                total = total - F.logsigmoid(z[i, t] if t in own else -z[i, t]) / len(x)
            elif t in own:
                total = total - z[i].log_softmax(0)[t] / len(own) / len(x) / 2 - z[:, t].log_softmax(0)[i] / len(y) / 2
    return total


@pytest.mark.parametrize("name", ["siglip", "clip"])
@pytest.mark.parametrize("chunk", [0, 3])
@pytest.mark.parametrize("weight", [0.7, 0.0])
def test_the_loss_and_its_gradients_are_the_papers(name: str, chunk: int, weight: float) -> None:
    made = learner(f"{name}+matryoshka", {"matryoshka": {"smallest": 4, "weight": weight}}, chunk=chunk)
    head, some = made.model.head, batch()
    dims = {16: head, 8: head.get_submodule("prefix_8"), 4: head.get_submodule("prefix_4")}
    for dim, part in dims.items():
        part.log_scale.data.fill_(torch.tensor(SCALES[dim]).double().log())
    encoded, expected = made.encode(some), torch.zeros((), dtype=torch.float64)
    for dim, part in dims.items():
        sides = encoded.images["vec"][:, :dim], encoded.texts["vec"][:, :dim]
        bias = 0.0 if part.bias is None else part.bias
        value = one(name, *sides, some.image_of_text.tolist(), part.log_scale.exp(), bias).squeeze()
        expected = expected + value * (1 if dim == 16 else weight)
    agree(losses(made, some)["pair"], expected, [p for p in made.parameters() if p.requires_grad])
