"""What of a forward pass is kept for the backward pass, and what is compiled. Results stay the same."""

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

RECOMPILE = 64  # dynamo counts all blocks of a model as one function, and gives it up after 8 kinds of arguments


def recompute(model: Model, kind: Checkpointing) -> None:
    """Blocks forget what happened inside them and repeat it in the backward pass.

    Args: kind: "whole" keeps a block's input alone (about a third more arithmetic); "selective" keeps products of
    matrices and attention too, and repeats what is cheap: norms and activations.
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
    more: dict[str, Any] = {} if contexts is None else {"context_fn": contexts}
    # nothing random happens in a block, so no generator's state needs keeping
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **more, **kwargs)


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = str(op)
    dear = any(part in name for part in ("aten.mm", "aten.addmm", "aten.bmm", "attention", "varlen"))
    return CheckpointPolicy.MUST_SAVE if dear else CheckpointPolicy.PREFER_RECOMPUTE


def compile(model: Model, kind: Compile, backend: str = "inductor") -> None:
    """Compile each block, or each tower as a whole.

    Numbers of packed tokens and of texts' places are symbols, from the first batch on in text towers and from the
    second on elsewhere: other batches need no other graphs. Args: backend: of `torch.compile`.
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
    """For this module alone; hooks, FSDP's among them, stay outside."""
    part.forward = forward
