"""Self-distillation: against a literal transcription of DINO's loss, centre and teacher, over ranks too."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from kiloword.methods.self_distill import CROPS, cross_entropy
from kiloword.training.step import backward
from kiloword.verify.batch import MethodChoice, batch
from parts import agree, drawn, learner

NAME = "siglip+self-distill"
SETTINGS = {"self_distill": {"large": 2, "small": 2, "prototypes": 24, "hidden": 16}}


def made_and_data() -> tuple[Any, Any, Any]:
    made = learner(NAME, SETTINGS)
    return made, made.terms["self_distill"], batch(method=MethodChoice(NAME, SETTINGS))


def literal(teacher: Tensor, student: Tensor, centre: Tensor, warm: float, cold: float) -> Tensor:
    """DINO's eq. 2 and 4 by loops. Args: teacher [I, G, K], student [I, L, K]: outputs before temperatures."""
    total = student.new_zeros(())
    for of_teacher, of_student in zip(teacher, student, strict=True):
        for large in of_teacher:
            p = [((large[k] - centre[k]) / cold).exp() for k in range(len(centre))]
            for small in of_student:
                q = [(small[k] / warm).exp() for k in range(len(centre))]
                for k in range(len(centre)):
                    total = total - p[k] / sum(p) * (q[k] / sum(q)).log()
    return total


def test_the_loss_and_its_gradient_are_the_papers() -> None:
    teacher, student, centre = drawn(2, 2, 5), drawn(2, 3, 5, seed=1).requires_grad_(), drawn(5, seed=2)
    found = cross_entropy(((teacher - centre) / 0.3).softmax(2), student / 0.7)
    agree(found, literal(teacher, student, centre, 0.7, 0.3), [student])


def test_a_step_and_what_follows_it() -> None:
    made, term, data = made_and_data()
    crops = data.inputs[CROPS]
    with torch.no_grad():
        term.centre.copy_(torch.linspace(-0.1, 0.1, 24))
        large, small = (
            term.projection(made.model.image_tokens(part.flatten(0, 1)).mean(1)).view(16, 2, 24)
            for part in (crops[:, :2], crops[:, 2:])  # before the first step, the teacher is the student
        )
    values = backward(made, data.split(4))
    expected = literal(large, small, term.centre, 0.1, 0.04) / 64
    torch.testing.assert_close(values["self_distill"], expected, rtol=1e-10, atol=0)
    of_teacher = [*term.teacher_tower.parameters(), *term.teacher_projection.parameters()]
    of_student = [*made.model.image_tower.parameters(), *term.projection.parameters()]
    assert all(p.grad is None and torch.equal(p, q) for p, q in zip(of_teacher, of_student, strict=True))
    assert all(q.grad is not None for q in of_student)
    before, centre = term.teacher_tower.positions.clone(), term.centre.clone()
    with torch.no_grad():
        made.model.image_tower.positions.add_(1)
    made.done = 0.25
    made.after_step(1)
    momentum = 1 - 0.004 * (math.cos(math.pi * 0.25) + 1) / 2
    torch.testing.assert_close(term.teacher_tower.positions, before + 1 - momentum, rtol=0, atol=1e-12)
    mean = large.flatten(0, 1).mean(0)
    torch.testing.assert_close(term.centre, 0.9 * centre + 0.1 * mean, rtol=1e-10, atol=1e-12)


def test_a_step_with_infinite_outputs_leaves_the_centre() -> None:
    made, term, data = made_and_data()
    with torch.no_grad():
        term.teacher_tower.positions.fill_(torch.nan)
        term(made.model, data, made.encode(data))
    made.after_step(1)
    assert not term.centre.any()
