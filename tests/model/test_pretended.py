"""What a training step asks of a CUDA device, on a machine without one: see `pretended`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cases import mostly_slow
from kiloword.methods.registry import names
from kiloword.training.meter import on_host
from kiloword.training.muon import Muon
from kiloword.training.optimizer import Average
from tests.pretended import Watch, pretended, step

WAITS: dict[str, dict[str, int]] = {  # of the host for the device, a micro-batch; nothing waits where no line says so
    "prolip, words dropped": {"boolean index in types.at": 1},  # how many are left
}
MIXED = (
    "siglip+caption",
    "llip+compose",
    "siglip+self-distill",
    "siglip+text-crops",
    "clip+negatives",
    "clip+clic",
    "clip+superclass",
    "siglip+matryoshka",
    "siglip+maxsim",
    "siglip+concepts",
    "clip+reinforced",
)
SETTINGS: dict[str, dict[str, Any]] = {"prolip, words dropped": {"hide_words": "drop"}}
ROUNDS = [("fp32", 1, "adamw"), ("bf16", 1, "muon"), ("bf16", 2, "adamw"), ("fp32", 2, "muon")]


@pytest.mark.parametrize(
    ("name", "precision", "micro", "optimizer"),
    mostly_slow([("clip", "bf16", 2, "muon"), ("prolip", "fp32", 1, "adamw")], 0),
)
def test_step_on_a_pretended_device(name: str, precision: str, micro: int, optimizer: str) -> None:
    made = step(name.split(",")[0], precision, micro, optimizer, SETTINGS.get(name, {}))
    assert dict(made.watch.waits) == {where: n * micro for where, n in WAITS.get(name, {}).items()}
    assert not +made.watch.on_cpu
    assert made.missing == []
    assert {x.device.type for x in made.report.values()} == {"cuda"}
    assert sum(made.watch.kernels.values()) > 100


@pytest.mark.slow
@pytest.mark.parametrize("name", [*names(), *MIXED, *SETTINGS])
def test_every_step_on_a_pretended_device(name: str) -> None:
    for precision, micro, optimizer in ROUNDS:
        test_step_on_a_pretended_device(name, precision, micro, optimizer)


@pytest.mark.parametrize("skip", [False, True])
def test_muon_s_launches_do_not_grow_with_depth(skip: bool) -> None:
    def launches(depth: int) -> int:
        weights = [torch.nn.Parameter(torch.empty(6, 4, device="cuda:0")) for _ in range(depth)]
        optimizer = Muon(weights, 0.1, weight_decay=0.1)
        optimizer.found_inf = torch.zeros((), device="cuda:0") if skip else None
        for _ in range(2):
            for p in weights:
                p.grad = torch.empty_like(p)
            with Watch() as watch:
                optimizer.step()
        assert not watch.waits
        return sum(watch.kernels.values())

    with pretended():
        assert launches(2) == launches(9)


def test_launches_of_averaged_weights_do_not_grow_with_depth() -> None:
    def launches(depth: int) -> int:
        module = torch.nn.ModuleList([torch.nn.Linear(6, 4, device="cuda:0") for _ in range(depth)])
        average = Average(module, 0.99)
        with Watch() as watch:
            average.update(0)
        assert not watch.waits
        return sum(watch.kernels.values())

    with pretended():
        assert launches(2) == launches(9)


def test_a_row_of_the_log_waits_once() -> None:
    with pretended(), Watch() as watch:
        away = torch.empty((), device="cuda:0")
        found = on_host([torch.zeros(()), away, away.double()])
        assert [x.device.type for x in found] == ["cpu"] * 3
    assert dict(watch.waits) == {"cuda to cpu in training.meter.on_host": 1}


def test_waits_are_seen() -> None:
    with pretended(), Watch() as watch:
        x = torch.ones(4, device="cuda:0")
        float(x.sum())
        x.nonzero()
        x[x > 0].sum()
        torch.repeat_interleave(x.long())
        x.new_tensor(1.0)
        x.cpu()
    waits = "item", "nonzero", "boolean index", "repeat_interleave", "cpu to cuda", "cuda to cpu"
    assert dict(watch.waits) == {f"{why} in torch": 1 for why in waits}
    assert not +watch.on_cpu


def test_work_on_the_cpu_and_lost_gradients_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from kiloword.model.heads import Single

    project = Single.project_text_tokens

    def leaky(self: Single, tokens: torch.Tensor) -> torch.Tensor:
        torch.zeros(3) + 1
        return project(self, tokens).detach()

    monkeypatch.setattr(Single, "project_text_tokens", leaky)
    made = step("siglip", "fp32", 1, "adamw", {})
    assert set(made.watch.on_cpu) == {"zeros in model.heads.text", "add in model.heads.text"}
    assert "model.text_tower.tokens" in made.missing
