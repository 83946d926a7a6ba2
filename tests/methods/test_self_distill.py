"""Self-distillation: against a literal transcription of DINO's loss, centre and teacher; a run that is cut goes on."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kiloword.config.recipes import DataConfig, TrunkConfig
from kiloword.data.loader import Loader
from kiloword.data.open import open_source
from kiloword.data.sampler import Order
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.distributed import collectives
from kiloword.methods.defaults import default_recipe
from kiloword.methods.registry import preset
from kiloword.methods.self_distill import CROPS, SelfDistill, SelfDistillTerm, after_step, cross_entropy
from kiloword.training import engine
from kiloword.training.accumulate import backward
from kiloword.training.learner import Learner
from kiloword.verify.batch import MethodChoice, batch, config
from kiloword.verify.suite import learner, over_ranks, verify
from states import whole_and_cut

NAME = "siglip+self-distill"
SMALL = MethodChoice(NAME, {"self_distill": {"large": 2, "small": 2, "prototypes": 24, "hidden": 16}})


def term_of(made: Learner) -> SelfDistillTerm:
    term = made.terms["self_distill"]
    assert isinstance(term, SelfDistillTerm)
    return term


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
    generator = torch.Generator().manual_seed(0)
    teacher, student = (torch.randn(2, n, 5, generator=generator, dtype=torch.float64) for n in (2, 3))
    centre = torch.randn(5, generator=generator, dtype=torch.float64)
    leaf = student.requires_grad_()
    ours = cross_entropy(((teacher - centre) / 0.3).softmax(2), leaf / 0.7)
    expected = literal(teacher, leaf, centre, 0.7, 0.3)
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=0)
    measured, wanted = (torch.autograd.grad(loss, leaf)[0] for loss in (ours, expected))
    torch.testing.assert_close(measured, wanted, rtol=1e-10, atol=1e-12)


def test_a_step_and_what_follows_it() -> None:
    made, data = learner(SMALL), batch(method=SMALL)
    term = term_of(made)
    crops = data.inputs[CROPS]
    assert isinstance(crops, Tensor)
    with torch.no_grad():
        term.centre.copy_(torch.linspace(-0.1, 0.1, 24))
        large, small = (
            term.projection(made.model.image_tokens(part.flatten(0, 1)).mean(1)).view(16, 2, 24)
            for part in (crops[:, :2], crops[:, 2:])  # before the first step, the teacher is the student
        )
    values = backward(made, data.split(4))
    expected = literal(large, small, term.centre, 0.1, 0.04) / 64
    torch.testing.assert_close(values["self_distill"], expected, rtol=1e-10, atol=0)
    before, centre = term.teacher_tower.positions.clone(), term.centre.clone()
    with torch.no_grad():
        made.model.image_tower.positions.add_(1)  # type: ignore[operator]
    made.done = 0.25
    after_step(made, 1)
    momentum = 1 - 0.004 * (math.cos(math.pi * 0.25) + 1) / 2
    torch.testing.assert_close(term.teacher_tower.positions, before + 1 - momentum, rtol=0, atol=1e-12)
    mean = large.flatten(0, 1).mean(0)
    torch.testing.assert_close(term.centre, 0.9 * centre + 0.1 * mean, rtol=1e-10, atol=1e-12)
    assert not term.seen.any()


def test_the_teacher_has_no_gradient_and_starts_as_the_student() -> None:
    made = learner(SMALL)
    term = term_of(made)
    backward(made, [batch(method=SMALL)])
    teacher = [*term.teacher_tower.parameters(), *term.teacher_projection.parameters()]
    student = [*made.model.image_tower.parameters(), *term.projection.parameters()]
    assert all(p.grad is None and torch.equal(p, q) for p, q in zip(teacher, student, strict=True))
    assert all(q.grad is not None for q in student)


def test_a_step_with_infinite_outputs_leaves_the_centre() -> None:
    made = learner(SMALL)
    term = term_of(made)
    term.seen.fill_(torch.nan)
    term.count_seen.fill_(3)
    after_step(made, 1)
    assert not term.centre.any()
    assert not term.seen.any()


def test_small_crops_are_windows_of_the_image() -> None:
    source = open_source("scenes:train?n=8", 32)
    inputs = preset(NAME).inputs

    def crops(step: int) -> Tensor:
        tokenizer = Tokenizer.train(["a"], 300)
        loader = Loader(source, Order(8, 8, 0), DataConfig(), config().text, 32, tokenizer, inputs=inputs)
        made = next(loader.batches(step)).inputs[CROPS]
        assert isinstance(made, Tensor)
        return made

    first = crops(0)
    assert first.shape == (8, 6, 3, 32, 32)
    assert first.dtype == torch.uint8
    assert torch.equal(first, crops(0))
    assert not torch.equal(first[:, 2], first[:, 3])


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="expected ascending numbers"):
        preset(NAME, {"self_distill": {"least": 0.5}})
    small = config()
    for image, message in (
        (replace(small.image, trunk=TrunkConfig(name="lite", width=8, grid=2)), "cannot stand on a trunk"),
        (replace(small.image, tower="resnet"), "self-distill needs a vision transformer"),
    ):
        with pytest.raises(ValueError, match=message):
            SelfDistillTerm(replace(small, image=image), SelfDistill())


@pytest.mark.slow
def test_a_cut_run_ends_as_a_whole_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = default_recipe(NAME, "debug", ("scenes?n=64",))
    run = replace(
        base,
        settings=SMALL.settings,
        batch=8,
        micro=4,
        steps=4,
        data=replace(base.data, tokenizer_vocab=300),
    )
    whole, cut = whole_and_cut(run, tmp_path, monkeypatch)
    assert whole["learner/terms.self_distill.centre"].any()
    assert any("self_distill.teacher_tower.positions" in name for name in whole)
    assert whole.keys() == cut.keys()
    assert all(torch.equal(whole[name], cut[name]) for name in whole)


def three_steps(kind: str, folder: Path) -> None:
    """Teacher and centre after three steps; written by the first rank."""
    made, share = learner(SMALL), 16 // collectives.ranks()
    if kind == "fsdp":
        engine.shard(made)
    first = collectives.rank() * share
    data = batch(first, first + share, method=SMALL)
    optimizer = torch.optim.SGD([p for p in made.parameters() if p.requires_grad], lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        backward(made, data.split(2), reducer=engine.Reducer(made))
        optimizer.step()
        after_step(made, step + 1)
    state = {
        name: x for name, x in term_of(made).state_dict().items() if "projection." not in name or "teacher" in name
    }
    if collectives.rank() == 0:
        torch.save(state, folder / f"{kind}{collectives.ranks()}.pt")


@pytest.mark.slow
def test_teacher_and_centre_do_not_depend_on_the_partition(tmp_path: Path) -> None:
    three_steps("ddp", tmp_path)
    reference: dict[str, Any] = torch.load(tmp_path / "ddp1.pt")
    assert reference["centre"].any()
    for kind in ("ddp", "fsdp"):
        over_ranks(2, three_steps, kind, tmp_path)
        measured = torch.load(tmp_path / f"{kind}2.pt")
        assert measured.keys() == reference.keys()
        for name, value in reference.items():
            torch.testing.assert_close(measured[name], value, rtol=1e-10, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("method", [NAME, "llip+self-distill"])
def test_it_is_verified(method: str) -> None:
    assert not [check for check in verify(method, (1, 2)) if not check.passed]
