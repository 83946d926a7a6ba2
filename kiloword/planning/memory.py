"""Memory of one GPU by part."""

from __future__ import annotations

from dataclasses import dataclass

from kiloword.engine import BUCKET
from kiloword.learner import Learner
from kiloword.planning.cards import GIB
from kiloword.planning.pairs import features
from kiloword.planning.parameters import bytes_of, in_products, shards
from kiloword.planning.shapes import Load
from kiloword.planning.step import micro_batch, piece_of, step_of
from kiloword.recipes import OptimConfig

CONTEXT = 1.0 * GIB  # of CUDA, of its libraries' workspaces and of communication: an allowance, not a formula
FRAGMENTS = 0.05  # of everything else: what the allocator holds and cannot use: an allowance too


@dataclass(frozen=True)
class Layout:
    """How a run is spread over GPUs and time."""

    gpus: int
    parallel: str  # ddp, fsdp
    checkpointing: str  # none, whole, selective
    pieces: int  # micro-batches of a GPU's share


def activations(learner: Learner, micro: Load, checkpointing: str) -> float:
    """Bytes that wait for the backward pass of one micro-batch: of all parts, since all share one backward pass."""
    return sum(w.keeps(checkpointing) for w in micro_batch(learner, micro))


def half_copies(learner: Learner, precision: str, checkpointing: str) -> float:
    """Bytes of the weights' copies in half precision that autocast makes and backward reads: whole on each rank.

    Where blocks are repeated their copies are made anew, and stay no longer than the forward pass: what is outside of
    blocks remains. Counted by what `measure` sees, which is after it.
    """
    if precision != "bf16":
        return 0.0
    inside = shards(learner).sharded if checkpointing != "none" else 0
    return 2.0 * max(0, in_products(learner) - inside)


def working(learner: Learner, micro: Load, checkpointing: str) -> float:
    """Bytes of one block's backward pass: gradients as large as what it kept, and that itself where it is repeated."""
    largest = max(w.block for w in micro_batch(learner, micro))
    return largest * (1 if checkpointing == "none" else 2)


def loss_buffers(learner: Learner, share: Load, all_texts: float, gpus: int, pieces: int, teacher: int) -> float:
    """Bytes of features and their gradients: texts of all ranks, gathered, three times; local pictures three times.

    Features, the sums of their gradients that the blocks fill, and those scaled by what comes from above. In several
    pieces the features of the whole share and their gradients stay beside for the replay.
    """
    image, text = features(learner.model, teacher)
    rows = share.images * image.floats + all_texts * text.floats
    constant = share.images * image.constant + (all_texts if gpus > 1 else share.texts.texts) * text.constant
    replay = 2 * (share.images * image.floats + share.texts.texts * text.floats) if pieces > 1 else 0
    return 4.0 * (3 * rows + constant + replay)


def memory(
    learner: Learner,
    optim: OptimConfig,
    precision: str,
    share: Load,
    layout: Layout,
    all_texts: float,
    device: str,
    chunk: int = 0,
    teacher: int = 0,
) -> dict[str, float]:
    """Part -> bytes of one GPU at its fullest: the end of the last forward pass, when backward begins.

    Args: share: of one GPU, in all its micro-batches; all_texts: of all ranks.
    Under fsdp weights, gradients and states of blocks, towers and decoders are divided by the ranks, those of head and
    terms are not. Gathered at once: what is in no block, two blocks (the next one travels early), one's gradient, and
    its copy to be scattered. Under ddp gradients live in the buckets that travel, so that these cost nothing more.
    """
    held, cut, size = bytes_of(learner, optim, precision), shards(learner), 8 if precision == "fp64" else 4
    micro = piece_of(share, layout.pieces)
    part = 1.0
    gathered = 0.0
    if layout.parallel == "fsdp" and layout.gpus > 1:
        numbers = cut.sharded + cut.root + cut.replicated
        part = ((cut.sharded + cut.root) / layout.gpus + cut.replicated) / numbers
        gathered = size * (2 * cut.root + 4.0 * cut.largest)
    buckets = 2.0 * BUCKET * size if layout.gpus > 1 else 0.0
    work = step_of(learner, share, layout.pieces, all_texts, layout.checkpointing, device, None, chunk, teacher)
    copies = 2.0 * in_products(learner) if precision == "bf16" else 0.0
    found = {
        "weights": held.weights * part,
        "gradients": held.gradients * part,
        "optimizer states": held.optimizer * part,
        "average of weights": held.average * part,
        "weights in half precision": copies,
        "gathered by fsdp": gathered,
        "communication buckets": buckets,
        "activations": activations(learner, micro, layout.checkpointing),
        "one block's backward pass": working(learner, micro, layout.checkpointing),
        "features and their gradients": loss_buffers(learner, share, all_texts, layout.gpus, layout.pieces, teacher),
        "a block of pairs": work.pair_block,
        "pictures": share.images * 3.0 * learner.model.config.image.size**2,
    }
    if device == "cuda":
        found["allowance: CUDA, libraries"] = CONTEXT
        found["allowance: fragments"] = FRAGMENTS * (sum(found.values()) - CONTEXT)
    return {name: value for name, value in found.items() if value}
