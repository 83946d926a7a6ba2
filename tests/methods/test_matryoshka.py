"""Matryoshka: the pair loss on prefixes, against a literal transcription of arXiv:2205.13147, eq. 1."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kiloword.verify.batch import batch
from literal import matching, sigmoid_pairs, softmax_pairs
from parts import agree, learner, losses, model

SCALES = {16: 5.0, 8: 3.0, 4: 2.0}


@pytest.mark.parametrize(("smallest", "dims"), [(1, (8, 4, 2, 1)), (4, (8, 4)), (5, (8,)), (8, (8,))])
def test_prefixes_are_halved_until_the_smallest(smallest: int, dims: tuple[int, ...]) -> None:
    head = model("siglip+matryoshka", {"matryoshka": {"smallest": smallest}}).head
    assert list(head.further()) == [f"prefix_{dim}" for dim in dims]


@pytest.mark.parametrize(("name", "chunk", "weight"), [("siglip", 0, 0.7), ("siglip", 3, 0.0), ("clip", 3, 0.7)])
def test_the_loss_and_its_gradients_are_the_papers(name: str, chunk: int, weight: float) -> None:
    made = learner(f"{name}+matryoshka", {"matryoshka": {"smallest": 4, "weight": weight}}, chunk=chunk)
    head, some = made.model.head, batch()
    dims = {16: head, 8: head.get_submodule("prefix_8"), 4: head.get_submodule("prefix_4")}
    for dim, part in dims.items():
        part.log_scale.data.fill_(torch.tensor(SCALES[dim]).double().log())
    encoded, expected = made.encode(some), torch.zeros((), dtype=torch.float64)
    y = matching(some.image_of_text.tolist())
    for dim, part in dims.items():
        x, t = (F.normalize(side["vec"][:, :dim], dim=1) for side in (encoded.images, encoded.texts))
        z = part.log_scale.exp() * (x @ t.T) + (0.0 if part.bias is None else part.bias)
        value = softmax_pairs(z, y) if name == "clip" else sigmoid_pairs(z, y) / len(x)
        expected = expected + value * (1 if dim == 16 else weight)
    agree(losses(made, some)["pair"], expected, [p for p in made.parameters() if p.requires_grad])
