"""What a training step asks of a CUDA device, on a machine without one: see `pretended`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cases import mostly_slow
from kiloword.methods.registry import PRESETS
from kiloword.training.meter import on_host
from kiloword.training.muon import Muon
from kiloword.training.optimizer import Average
from tests.pretended import Watch, pretended, step

WAITS: dict[str, dict[str, int]] = {  # of the host for the device, a micro-batch; nothing waits where no line says so
    "prolip, words dropped": {"boolean index in types.at": 1},  # how many are left
}
MIXED = (
    *("siglip+caption", "llip+compose", "siglip+self-distill", "clip+negatives", "clip+clic"),
    *("clip+superclass", "siglip+matryoshka", "siglip+maxsim", "siglip+concepts", "clip+reinforced"),
)
SETTINGS: dict[str, dict[str, Any]] = {"prolip, words dropped": {"hide_words": "drop"}}


STEPS = [("clip", "bf16", 2, "muon"), ("prolip", "fp32", 1, "adamw")]
for n, name in enumerate((*PRESETS, *MIXED, *SETTINGS)):
    STEPS += [(name, "fp32", 1 + n % 2, "muon" if n % 2 else "adamw"), (name, "bf16", 2 - n % 2, "adamw")]


@pytest.mark.parametrize(("name", "precision", "micro", "optimizer"), mostly_slow(STEPS, 0))
def test_step_on_a_pretended_device(name: str, precision: str, micro: int, optimizer: str) -> None:
    made = step(name.split(",")[0], precision, micro, optimizer, SETTINGS.get(name, {}))
    assert dict(made.watch.waits) == {where: n * micro for where, n in WAITS.get(name, {}).items()}
    assert not +made.watch.on_cpu
    assert made.missing == []
    assert {x.device.type for x in made.report.values()} == {"cuda"}
    assert sum(made.watch.kernels.values()) > 100


@pytest.mark.parametrize("what", ["average", "muon", "skipping muon"])
def test_launches_of_a_step_do_not_grow_with_depth(what: str) -> None:
    def launches(depth: int) -> int:
        module = torch.nn.ModuleList([torch.nn.Linear(6, 4, bias=False, device="cuda:0") for _ in range(depth)])
        average, optimizer = Average(module, 0.99), Muon(list(module.parameters()), 0.1, weight_decay=0.1)
        optimizer.found_inf = torch.zeros((), device="cuda:0") if "skipping" in what else None
        for n in range(2):
            for p in module.parameters():
                p.grad = torch.empty_like(p)
            with Watch() as watch:
                average.update(n) if what == "average" else optimizer.step()
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
