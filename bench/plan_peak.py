"""The most memory of a forward and backward pass, counted on tensors without content: any size on any machine."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from kiloword.apps.plan import gpu
from kiloword.apps.plan.simulation import Simulation
from kiloword.config import recipes
from kiloword.distributed.device import precision_of
from kiloword.methods.defaults import default_recipe
from kiloword.training.compilation import recompute
from kiloword.training.step import Learner, learner_of
from kiloword.types import Batch
from plan_measure import Case, batch_of, method_of, share_of, without_content

STAYS = ("weights", "optimizer states", "average of weights", "images")  # whatever a step does


class Alive(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of the tensors that operations made and that are alive, and the most there were."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_iter(out):
            if isinstance(x, Tensor):
                self._count(x.untyped_storage())
        return out

    def ignore(self, x: Tensor) -> None:
        """Made before: neither it nor its views count."""
        self.known.add(x.untyped_storage()._cdata)

    def _count(self, storage: torch.UntypedStorage) -> None:
        place = storage._cdata
        if place not in self.known:
            self.known.add(place)
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._free, place, storage.nbytes())

    def _free(self, place: int, size: int) -> None:
        self.known.discard(place)
        self.now -= size


def compare_peak(case: Case) -> tuple[float, float]:
    """Bytes planned and counted of what a step on one CPU needs beyond weights and optimizer; one micro-batch."""
    assert case.micro_batches == 1, "micro-batches are cut by what tensors hold"
    method, config = method_of(case.method), recipes.sizes()[case.size]
    simulation = Simulation(config, method, "cpu", case.precision)
    batch = batch_of(simulation.learner.model.config, case.images, case.captions)
    share = share_of(simulation, without_content(simulation, batch), batch, default_recipe("", case.size).optim)
    parts = gpu.memory(share, gpu.Layout(1, "ddp", case.checkpointing, 1))
    planned = sum(value for name, value in parts.items() if name not in STAYS)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        learner = learner_of(config, method, "cpu")
        recompute(learner.model, case.checkpointing)
        counted = _counted(learner, batch.each(fake.from_tensor), case)
    return planned, counted


def _counted(learner: Learner, batch: Batch, case: Case) -> float:
    alive = Alive()
    for x in (*learner.parameters(), *learner.buffers(), batch.images):
        alive.ignore(x)
    with alive:
        with precision_of(case.precision, "cpu")():
            out = learner(batch, learner.counts([batch]))
        out["loss"].backward()
    return float(alive.peak)
