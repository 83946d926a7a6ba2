"""Activation checkpointing and compilation of blocks and towers. Neither changes results."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from kiloword.config.options import Checkpointing, Compile
from kiloword.model.attention import old_card
from kiloword.model.blocks import Block, CrossBlock
from kiloword.model.decoder import TextDecoder
from kiloword.model.model import Model
from kiloword.model.text import TextTower

RECOMPILE = 64  # graphs of a function; all blocks of a model are one function to dynamo, whose default limit is 8


def recompute(model: Model, kind: Checkpointing) -> None:
    """Activation checkpointing: blocks recompute their activations in the backward pass.

    Args: kind: "whole" saves only the input of a block (about a third more arithmetic); "selective" also saves the
    results of matrix products and attention, and recomputes only cheap operations: norms and activation functions.
    """
    if kind == "none":
        return
    contexts = partial(create_selective_checkpoint_contexts, _policy) if kind == "selective" else None
    for part in model.modules():
        if isinstance(part, Block | CrossBlock):
            replace_forward(part, partial(_recomputed, part.forward, contexts))


def _recomputed(forward: Callable[..., Any], contexts: Callable[[], Any] | None, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    options: dict[str, Any] = {} if contexts is None else {"context_fn": contexts}
    # blocks have no random operations, so the generator's state need not be saved
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **options, **kwargs)


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = str(op)
    expensive = any(part in name for part in ("aten.mm", "aten.addmm", "aten.bmm", "attention", "varlen"))
    return CheckpointPolicy.MUST_SAVE if expensive else CheckpointPolicy.PREFER_RECOMPUTE


def compile(model: Model, kind: Compile, backend: str = "inductor") -> None:
    """Compile each block, or each tower as a whole.

    Numbers of packed tokens and of token positions are symbolic, in text towers from the first batch and elsewhere from
    the second, so that other batches need no further graphs. Args: backend: of `torch.compile`.
    """
    if kind == "none":
        return
    torch.compiler.assume_constant_result(old_card)  # type: ignore[no-untyped-call]
    torch._dynamo.config.recompile_limit = max(RECOMPILE, torch._dynamo.config.recompile_limit)
    towers = [model.image_tower, model.text_tower, *model.more.values()]
    blocks = [m for m in model.modules() if isinstance(m, Block | CrossBlock)]
    for part in blocks if kind == "blocks" else towers:
        dynamic = True if isinstance(part, TextTower | TextDecoder) else None
        replace_forward(part, torch.compile(part.forward, dynamic=dynamic, backend=backend))


def replace_forward(part: nn.Module, forward: Callable[..., Tensor]) -> None:
    """Replace the forward pass of this module instance; hooks, such as those of FSDP, still run around it."""
    part.forward = forward
