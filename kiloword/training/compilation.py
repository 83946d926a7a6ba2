"""Activation checkpointing and compilation of blocks and towers. Neither changes results.

Both replace the forward pass of module instances: hooks, such as those of FSDP, still run around it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from kiloword.config.options import Checkpointing, Compile
from kiloword.model.attention import old_card
from kiloword.model.blocks import Unit
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
    more: dict[str, Any] = (
        {"context_fn": partial(create_selective_checkpoint_contexts, _policy)} if kind == "selective" else {}
    )
    # blocks have no random operations, so the generator's state need not be saved
    again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False, **more)
    for block in recomputed_blocks(model):
        block.forward = partial(_recomputed, block.forward, again)


def recomputed_blocks(model: Model) -> list[nn.Module]:
    """The modules that activation checkpointing recomputes."""
    return [part for part in model.modules() if isinstance(part, Unit)]


def _recomputed(forward: Callable[..., Any], again: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    if not torch.compiler.is_compiling():  # a weight that an earlier call of the block cast is cast again in backward
        torch.clear_autocast_cache()
    return again(forward, *args, **kwargs)


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_expensive(op) else CheckpointPolicy.PREFER_RECOMPUTE


def is_expensive(op: Any) -> bool:
    """Whether selective checkpointing saves the results of an operation: of products and attention."""
    return any(part in str(op) for part in ("aten.mm", "aten.addmm", "aten.bmm", "convolution", "attention", "varlen"))


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
    for part in recomputed_blocks(model) if kind == "blocks" else towers:
        dynamic = True if isinstance(part, TextTower | TextDecoder) else None
        part.forward = torch.compile(part.forward, dynamic=dynamic, backend=backend)
