"""Parameters of a learner; memory and traffic of one GPU."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from kiloword.apps.plan.request import GIB
from kiloword.apps.plan.simulation import MicroBatch, PairLoss, Simulation, matrices
from kiloword.config.recipes import OptimConfig
from kiloword.distributed.gather import ALIGNED
from kiloword.training.engine import BUCKET, units
from kiloword.training.optimizer import groups
from kiloword.training.step import Learner

CONTEXT = 1.0 * GIB  # of CUDA, of its libraries' workspaces and of communication: an allowance
FRAGMENTS = 0.05  # of everything else: what the allocator holds and cannot use: an allowance
EXPOSED = ("features", "columns", "Muon's updates")  # no arithmetic hides them
NORM = 16  # bytes: the optimizer's running gradient norm and its weight
TABLES = ("tokens", "positions", "class_token", "extra_tokens", "uncertainty_token", "mask_token")


@dataclass(frozen=True)
class Layout:
    """How a run is spread over GPUs and time."""

    gpus: int
    parallel: str  # ddp, fsdp
    checkpointing: str  # none, whole, selective
    micro_batches: int  # of a GPU's share


@dataclass(frozen=True)
class Share:
    """What one GPU computes in a step."""

    simulation: Simulation
    optim: OptimConfig
    images: int  # in all micro-batches
    texts: int
    all_texts: int  # of all ranks
    micro: MicroBatch
    pairs: PairLoss

    @property
    def learner(self) -> Learner:
        return self.simulation.learner

    @property
    def number(self) -> int:
        """Bytes of a number of weights and gradients."""
        return 8 if self.simulation.precision == "fp64" else 4

    @property
    def block_number(self) -> int:
        """Bytes of a number of weights of blocks that FSDP gathers."""
        return 2 if self.simulation.precision == "bf16" else self.number


def parts(learner: Learner) -> dict[str, int]:
    """Part of the model -> number of parameters: towers and decoders without their tables, head, embeddings."""
    counts = {"image tower": 0, "text tower": 0}
    counts |= {name.replace("_", " "): 0 for name in learner.model.more} | {"head": 0, "embeddings": 0}
    for name, p in learner.named_parameters():
        words = name.split(".")
        if words[-1] in TABLES:
            part = "embeddings"
        elif words[0] in ("terms", "contrasts"):
            part = words[0]
        else:
            part = (words[2] if words[1] == "more" else words[1]).replace("_", " ")
        counts[part] = counts.get(part, 0) + p.numel()
    return counts


def total(learner: Learner) -> int:
    return sum(p.numel() for p in learner.parameters())


def states(learner: Learner, optim: OptimConfig, size: int) -> dict[str, float]:
    """Bytes of weights and gradients in fp32 (with bf16 too: autocast keeps them so), and of optimizer states.

    AdamW has two moments per parameter and a step count of 4 bytes per tensor, Muon one moment, both together a running
    gradient norm; an average of the weights is one more copy of the trained ones.

    Args: size: bytes of a number.
    """
    trained = float(size * sum(p.numel() for p in learner.parameters() if p.requires_grad))
    optimizer = float(NORM)
    for kind, members in groups(learner, optim).items():
        numbers = sum(p.numel() for _, p in members)
        optimizer += numbers * size if kind.endswith("muon") else 2 * numbers * size + 4 * len(members)
    return {
        "weights": float(total(learner) * size),
        "gradients": trained,
        "optimizer states": optimizer,
        "average of weights": trained if optim.ema else 0.0,
    }


@dataclass(frozen=True)
class ShardedParameters:
    """Numbers of parameters as FSDP holds them."""

    sharded: int  # matrices in blocks, gathered one by one
    root: int  # of towers and decoders, in no block: gathered once per micro-batch
    replicated: int  # vectors, head and terms
    largest: int  # block


def shards(learner: Learner) -> ShardedParameters:
    """How `engine.shard` shards a learner."""
    model: nn.Module = learner.model
    sizes = [matrices(unit) for unit in units(learner.model)]
    root = matrices(model) - matrices(learner.model.head) - sum(sizes)
    return ShardedParameters(sum(sizes), root, total(learner) - sum(sizes) - root, max(sizes))


def half_copies(micro: MicroBatch, checkpointing: str, sharded: bool) -> float:
    """Bytes of the weights' copies in half precision that autocast makes and backward reads.

    Blocks that are recomputed make theirs anew. Sharded blocks are gathered in half precision.
    """
    return micro.half["outside"] + (0.0 if sharded or checkpointing != "none" else micro.half["inside"])


def passing(micro: MicroBatch, checkpointing: str, sharded: bool = False) -> float:
    """Bytes that are allocated for a moment while activations wait.

    Without checkpointing what the forward pass needs, as a block's backward pass frees what it saved, or the scratch of
    attention. Else the inside of a block again and the gradients of its hidden layer and of the stream, (4 W + 2 W) of
    16 W if M = 4 W; or, if those are more, the copies in half precision of all blocks, which last as long as the
    forward pass.
    """
    if checkpointing == "none":
        return max(micro.passing, micro.scratch)
    whole = micro.block["none"]
    recomputed = whole - (micro.block["selective"] if checkpointing == "selective" else 0.0)
    return max(micro.passing, recomputed + 0.375 * whole + micro.scratch, half_copies(micro, "none", sharded))


def loss_buffers(share: Share, layout: Layout) -> float:
    """Bytes of features and their gradients: texts of all ranks, gathered, three times; local images three times.

    Features, the sums of their gradients that the blocks fill, and those scaled by the gradient of the loss. In several
    micro-batches the features of the whole share and their gradients stay for the replay.
    """
    image, text = share.pairs.image, share.pairs.text
    learned = share.images * image.learned + share.all_texts * text.learned
    constant = share.images * image.constant + (share.all_texts if layout.gpus > 1 else share.texts) * text.constant
    replay = share.images * image.learned + share.texts * text.learned if layout.micro_batches > 1 else 0
    return float(3 * learned + constant + 2 * replay)


def fsdp(share: Share, gpus: int) -> tuple[float, float]:
    """Share of weights, gradients and states that a GPU holds, and bytes that are gathered at once.

    Those of blocks, towers and decoders are divided by the ranks, those of head and terms are not. Gathered at once:
    what is in no block, two blocks (the next one is prefetched), one's gradient, and its copy to be scattered.
    """
    cut, size = shards(share.learner), share.number
    numbers = cut.sharded + cut.root + cut.replicated
    part = ((cut.sharded + cut.root) / gpus + cut.replicated) / numbers
    return part, 2.0 * size * cut.root + (3.0 * share.block_number + size) * cut.largest


def memory(share: Share, layout: Layout) -> dict[str, float]:
    """Part -> bytes of one GPU at its fullest: when the backward pass of the last micro-batch begins.

    With ddp gradients live in the communication buckets, which are not counted twice. With one GPU and one micro-batch
    gradients grow as activations are freed: counted is by how much they are more.
    """
    micro, kind = share.micro, layout.checkpointing
    sharded = layout.parallel == "fsdp" and layout.gpus > 1
    part, gathered = fsdp(share, layout.gpus) if sharded else (1.0, 0.0)
    held, activations = states(share.learner, share.optim, share.number), micro.saved[kind]
    sizes = {name: value * part for name, value in held.items()}
    if layout.gpus == layout.micro_batches == 1:
        sizes["gradients"] = max(0.0, sizes["gradients"] - activations)
    sizes |= {
        "weights in half precision": half_copies(micro, kind, sharded),
        "gathered by fsdp": gathered,
        "communication buckets": 2.0 * BUCKET * share.number if layout.gpus > 1 else 0.0,
        "activations": activations,
        "temporary: one block, or the vocabulary logits": passing(micro, kind, sharded),
        "features and their gradients": loss_buffers(share, layout),
        "a block of pairs": share.pairs.block,
        "images": share.images * 3.0 * share.learner.model.config.image.size**2,
    }
    if share.simulation.device == "cuda":
        sizes["allowance: CUDA, libraries"] = CONTEXT
        sizes["allowance: fragments"] = FRAGMENTS * (sum(sizes.values()) - CONTEXT)
    return {name: value for name, value in sizes.items() if value}


def traffic(share: Share, layout: Layout) -> dict[str, float]:
    """What travels -> bytes that a GPU sends in a step.

    A ring over n ranks sends (n-1)/n of a buffer to gather or to scatter sums, twice that to have the sums everywhere.
    ddp: 2 (n-1)/n of all gradients, once a step. Features: every rank's texts are gathered, their gradients scattered;
    of softmax and the like, numbers of every text are summed over ranks.
    """
    n = layout.gpus
    if n == 1:
        return {}
    ring = (n - 1) / n
    if layout.parallel == "ddp":
        sent = {"gradients": 2 * ring * states(share.learner, share.optim, share.number)["gradients"]}
    else:
        sent = {name: ring * value for name, value in _fsdp(share, layout).items()}
    if share.learner.method.pair_weight or share.learner.contrasts:
        constant = -(-share.pairs.text.constant // ALIGNED) * ALIGNED
        sent["features"] = ring * share.all_texts * (2 * share.pairs.text.learned + constant)
        if share.pairs.reduced:
            sent["columns"] = 2 * ring * share.all_texts * share.pairs.reduced * 4.0
    return sent


def _fsdp(share: Share, layout: Layout) -> dict[str, float]:
    """Bytes of the whole buffers that are gathered and scattered.

    Blocks are gathered (in bf16 where that is the precision) for every pass forward and again backward, once more for
    the first pass of micro-batches; what is in no block once per micro-batch. Their gradients are scattered once per
    micro-batch; each matrix that Muon makes orthogonal is gathered once a step.
    """
    learner, size, cut = share.learner, share.number, shards(share.learner)
    gathered = share.micro.gathered
    pairs = learner.method.pair_weight or learner.contrasts
    first = gathered["encoding"] if layout.micro_batches > 1 and pairs else 0.0
    sent = {
        "weights": layout.micro_batches * (share.block_number * (2 * gathered["all"] + first) + size * cut.root),
        "gradients": float(size * (layout.micro_batches * (cut.sharded + cut.root) + 2 * cut.replicated)),
    }
    turned = sum(
        p.numel() for kind, members in groups(learner, share.optim).items() for _, p in members if kind.endswith("muon")
    )
    return sent | ({"Muon's updates": float(size * turned)} if turned else {})
