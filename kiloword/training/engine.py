"""How a learner is carried out, with the same results: replicated over ranks (ddp), or with sharded towers (fsdp); with
activation checkpointing; compiled.

FSDP2 averages the gradients of sharded parameters, DDP the gradients of replicated parameters. Other functions
replace the forward pass of module instances: hooks, such as those of FSDP, still run around it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from kiloword.config.options import Checkpointing, Compile
from kiloword.distributed import collectives
from kiloword.model.adapters import MARK
from kiloword.model.attention import old_card
from kiloword.model.blocks import Unit
from kiloword.model.decoder import Layer, TextDecoder
from kiloword.model.model import Model, first_values
from kiloword.model.text import TextTower

if TYPE_CHECKING:
    from kiloword.training.step import Learner

RECOMPILE = 64  # graphs of a function; all blocks of a model are one function to dynamo, whose default limit is 8
BUCKET = 1 << 22  # elements reduced at once: 16 MiB of fp32


def replicated(learner: Learner) -> nn.Module:
    """What runs a learner so that the gradients of its replicated parameters become means over ranks.

    Torch's DDP, which reduces a bucket as soon as the last backward pass of a step has finished it. As it looks for
    unused parameters, it never rebuilds its buckets, so that a resumed run adds in the same order. It begins with the
    first rank's weights, and has a group of its own, so that gathers and reductions may interleave in any order.
    """
    if collectives.ranks() == 1:
        return learner
    sharded = [name for name, p in learner.named_parameters() if isinstance(p, DTensor)]
    ignored = sharded + [name for name, _ in learner.named_buffers()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(learner, ignored)  # type: ignore[no-untyped-call]
    return DistributedDataParallel(
        learner,
        process_group=dist.new_group(),
        bucket_cap_mb=BUCKET >> 18,
        find_unused_parameters=True,
        gradient_as_bucket_view=True,
    )


def shard(learner: Learner, half: bool = False) -> None:
    """Shard blocks and towers over all ranks; head, terms, adapters and all vectors (biases, norms) stay replicated.

    The matrices of a block are gathered for its forward and backward pass and freed afterwards; the rest of the towers
    (tables, stems) is gathered once per micro-batch. With one rank nothing is done.

    Args: half: gather blocks in bf16, the dtype of autocast; otherwise bf16 copies would stay on each rank until the
    backward pass. Their gradients are averaged in fp32.
    """
    if collectives.ranks() == 1:
        return
    # features may be views of a tower's tokens; nothing here writes into them
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    model = learner.model
    mesh = init_device_mesh(model.mean.device.type, (collectives.ranks(),))
    # activations between blocks keep the dtype of autocast
    bf16 = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    small = {p for name, p in model.named_parameters() if p.dim() < 2 or MARK in name}
    replicated = small | set(model.head.parameters())
    for part in units(model):
        fully_shard(part, mesh=mesh, mp_policy=bf16 if half else MixedPrecisionPolicy(), ignored_params=replicated)
        if hasattr(part, "keys"):  # keys of a memory, computed outside a layer's forward pass
            register_fsdp_forward_method(part, "keys")
    fully_shard(model, mesh=mesh, reshard_after_forward=False, ignored_params=replicated)
    # by which callers enter a model; none calls another
    for entry in ("image_tokens", "encode_text", "image_trunk", "with_tokens"):
        register_fsdp_forward_method(model, entry)


def units(model: Model) -> list[nn.Module]:
    """The modules that are sharded separately: blocks of the towers, layers of the decoders."""
    towers = [model.image_tower, model.text_tower, *model.more.values()]
    parts = [m for tower in towers for m in tower.modules() if isinstance(m, Unit | Layer)]
    inside = {block for layer in parts if isinstance(layer, Layer) for block in layer.children()}
    return [part for part in parts if part not in inside]


def materialise(learner: Learner, seed: int) -> None:
    """Allocate the shards of towers that were built without storage, and give them the initial values of ddp.

    Each rank computes the whole values of one parameter at a time. Towers with storage are left unchanged.
    """
    model = learner.model
    bare = [name for name, p in model.named_parameters() if p.is_meta]
    model._apply(lambda x: torch.empty_like(x, device=model.mean.device) if x.is_meta else x)  # type: ignore[no-untyped-call]
    parameters = dict(model.named_parameters())
    for name, values in first_values(model, seed, bare):
        collectives.fill(parameters[name], values)


def settle(module: nn.Module) -> None:
    """Reshard parameters that were gathered outside a step; otherwise later changes of the weights would be ignored."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


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
    """Results of products and attention are saved."""
    saved = ("aten.mm", "aten.addmm", "aten.bmm", "convolution", "attention", "varlen")
    is_saved = any(part in str(op) for part in saved)
    return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE


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
