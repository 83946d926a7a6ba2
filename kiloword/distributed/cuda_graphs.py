"""A CUDA graph of the image tower: one launch replays its kernels. Packed texts have no static shapes, images do.

Tensors that a replay returns, gradients among them, are overwritten by the next replay. One training step therefore
replays the tower once, and the optimizer drops the gradients before the next step. Every other pass of the step (of
masked or dropped patches, or a second one of whole images), validation included, runs compiled without a graph.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kiloword.config.options import RunOptions
from kiloword.distributed import activations
from kiloword.training.learner import Learner

Forward = Callable[..., Tensor]


def check(options: RunOptions, micro_batches: int, device: str) -> None:
    """Refuse options that exclude a CUDA graph. Args: micro_batches: number a step; device: "cpu", "cuda:0".

    Raises: ValueError that names the options.
    """
    if options.compile != "cudagraphs":
        return
    if torch.device(device).type != "cuda":
        raise ValueError(f"--compile cudagraphs needs a CUDA device, but the device is {device}: use towers.")
    wrong = {
        f"{micro_batches} micro-batches (--micro)": micro_batches > 1,  # their gradients would be overwritten
        f"--checkpointing {options.checkpointing}": options.checkpointing != "none",
        f"--parallel {options.parallel}": options.parallel == "fsdp",  # the addresses of weights would change
    }
    if excluded := [name for name, is_set in wrong.items() if is_set]:
        raise ValueError(f"--compile cudagraphs excludes {', '.join(excluded)}: use another --compile, or omit these.")


class Replayed:
    """The image tower's forward pass. Args: graph, other: compiled with and without a CUDA graph; images: of a step."""

    def __init__(self, graph: Forward, other: Forward, images: int) -> None:
        self.graph, self.other, self.images, self._fresh = graph, other, images, False

    def begin(self, *_: object) -> None:
        """Before a training step: the results of the last replay may be overwritten."""
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        self._fresh = True

    def __call__(self, images: Tensor, keep: Tensor | None = None, masked: Tensor | None = None) -> Tensor:
        """As `ImageTower.forward`."""
        whole = keep is None and masked is None and len(images) == self.images
        if not (whole and self._fresh and torch.is_grad_enabled()):
            return self.other(images, keep, masked)
        self._fresh = False
        return self.graph(images)


def compile(learner: Learner, images: int) -> None:
    """Compile every tower as a whole, and record the training pass of the image tower. Args: images: of each step."""
    tower = learner.model.image_tower
    forward = tower.forward
    activations.compile(learner.model, "towers")
    graph = torch.compile(forward, dynamic=False, mode="reduce-overhead")
    replayed = Replayed(graph, tower.forward, images)
    activations.replace_forward(tower, replayed)
    learner.register_forward_pre_hook(replayed.begin)
