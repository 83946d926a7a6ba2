"""Activation checkpointing, compilation and CUDA graphs of blocks and towers. None of them changes results."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from kiloword.config.options import Checkpointing, Compile, RunOptions
from kiloword.model.attention import old_card
from kiloword.model.blocks import Block, CrossBlock
from kiloword.model.decoder import TextDecoder
from kiloword.model.model import Model
from kiloword.model.resnet import Bottleneck, check_vit
from kiloword.model.text import TextTower
from kiloword.training.learner import Learner

Forward = Callable[..., Tensor]
RECOMPILE = 64  # graphs of a function; all blocks of a model are one function to dynamo, whose default limit is 8


def recompute(model: Model, kind: Checkpointing) -> None:
    """Activation checkpointing: blocks recompute their activations in the backward pass.

    Args: kind: "whole" saves only the input of a block (about a third more arithmetic); "selective" also saves the
    results of matrix products and attention, and recomputes only cheap operations: norms and activation functions.
    """
    if kind == "none":
        return
    contexts = partial(create_selective_checkpoint_contexts, _policy) if kind == "selective" else None
    for block in recomputed_blocks(model):
        replace_forward(block, partial(_recomputed, block.forward, contexts))


def recomputed_blocks(model: Model) -> list[nn.Module]:
    """The modules that activation checkpointing recomputes."""
    return [part for part in model.modules() if isinstance(part, Block | CrossBlock | Bottleneck)]


def _recomputed(forward: Callable[..., Any], contexts: Callable[[], Any] | None, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    options: dict[str, Any] = {} if contexts is None else {"context_fn": contexts}
    # blocks have no random operations, so the generator's state need not be saved
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **options, **kwargs)


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_expensive(op) else CheckpointPolicy.PREFER_RECOMPUTE


def is_expensive(op: Any) -> bool:
    """Whether selective checkpointing saves the results of an operation: of products and attention."""
    name = str(op)
    return any(part in name for part in ("aten.mm", "aten.addmm", "aten.bmm", "convolution", "attention", "varlen"))


def compile_model(model: Model, kind: Compile, backend: str = "inductor") -> None:
    """Compile each block, or each tower as a whole.

    Numbers of packed tokens and of token positions are symbolic, in text towers from the first batch and elsewhere from
    the second, so that other batches need no further graphs. Args: backend: of `torch.compile`.
    """
    if kind == "none":
        return
    torch.compiler.assume_constant_result(old_card)  # type: ignore[no-untyped-call]
    torch._dynamo.config.recompile_limit = max(RECOMPILE, torch._dynamo.config.recompile_limit)
    towers = [model.image_tower, model.text_tower, *model.more.values()]
    blocks = recomputed_blocks(model)
    for part in blocks if kind == "blocks" else towers:
        dynamic = True if isinstance(part, TextTower | TextDecoder) else None
        replace_forward(part, torch.compile(part.forward, dynamic=dynamic, backend=backend))


def replace_forward(part: nn.Module, forward: Forward) -> None:
    """Replace the forward pass of this module instance; hooks, such as those of FSDP, still run around it."""
    part.forward = forward


def check_graphs(options: RunOptions, micro_batches: int, device: str) -> None:
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
    """The image tower's forward pass: one launch replays its kernels. Packed texts have no static shapes, images do.

    Tensors that a replay returns, gradients among them, are overwritten by the next replay. One training step therefore
    replays the tower once, and the optimizer drops the gradients before the next step. Every other pass of the step (of
    masked or dropped patches, or a second one of whole images), validation included, runs compiled without a graph.

    Args: graph, other: compiled with and without a CUDA graph; images: number in a step.
    """

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


def compile_with_graph(learner: Learner, images: int) -> None:
    """Compile every tower as a whole, and record the training pass of the image tower. Args: images: of each step."""
    tower = learner.model.image_tower
    check_vit(tower.config, "--compile cudagraphs")
    forward = tower.forward
    compile_model(learner.model, "towers")
    graph = torch.compile(forward, dynamic=False, mode="reduce-overhead")
    replayed = Replayed(graph, tower.forward, images)
    replace_forward(tower, replayed)
    learner.register_forward_pre_hook(replayed.begin)
