"""Memory of one GPU by part."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kiloword.config.recipes import OptimConfig
from kiloword.methods.coca.captioning import CHUNK
from kiloword.model.attention import WIDEST_HEAD, bad_heads
from kiloword.model.decoder import ImageDecoder, TextDecoder
from kiloword.model.image import extra
from kiloword.planning.cards import GIB
from kiloword.planning.pairs import features
from kiloword.planning.parameters import bytes_of, in_products, shards
from kiloword.planning.shapes import Load
from kiloword.planning.step import micro_batch, micro_load, step_of
from kiloword.training.engine import BUCKET
from kiloword.training.learner import Learner

CONTEXT = 1.0 * GIB  # of CUDA, of its libraries' workspaces and of communication: an allowance, not a formula
SCRATCH = 128  # rows of a block of the backward pass of attention
FRAGMENTS = 0.05  # of everything else: what the allocator holds and cannot use: an allowance too


@dataclass(frozen=True)
class Layout:
    """How a run is spread over GPUs and time."""

    gpus: int
    parallel: str  # ddp, fsdp
    checkpointing: str  # none, whole, selective
    micro_batches: int  # of a GPU's share


def activations(learner: Learner, micro: Load, checkpointing: str) -> float:
    """Bytes that wait for the backward pass of one micro-batch: of all parts, since all share one backward pass."""
    return sum(w.keeps(checkpointing) for w in micro_batch(learner, micro))


def half_copies(learner: Learner, precision: str, checkpointing: str, sharded: bool) -> float:
    """Bytes of the weights' copies in half precision that autocast makes and backward reads.

    Where blocks are repeated, the copies of theirs are made anew, and the first ones last no longer than the forward
    pass: those of what is in no block remain. Sharded blocks are gathered in half precision: there is nothing to copy.
    """
    if precision != "bf16":
        return 0.0
    inside = shards(learner).sharded if sharded or checkpointing != "none" else 0
    return 2.0 * max(0, in_products(learner) - inside)


def passing(learner: Learner, micro: Load, precision: str, checkpointing: str, sharded: bool = False) -> float:
    """Bytes that come and go while activations wait.

    Without checkpointing none: a block's backward pass frees what it kept as it makes gradients. Else a block's inside
    is there again with gradients beside it, those of the hidden layer and of the stream: (4 W + 2 W) of 16 W where M =
    4 W. Or, if those are more, the copies in half precision of all blocks, which last as long as the forward pass, or
    the logits of a chunk of words. In either case the scratch of one layer's attention over texts.
    """
    words, scratch = word_logits(learner, micro), attention_scratch(learner, micro)
    if checkpointing == "none":
        return max(words, scratch)
    largest = max(micro_batch(learner, micro), key=lambda w: w.block)
    again = largest.block * (1 - (largest.selective / largest.kept if checkpointing == "selective" else 0.0))
    return max(words, again + 0.375 * largest.block + scratch, half_copies(learner, precision, "none", sharded))


def attention_scratch(learner: Learner, micro: Load) -> float:
    """Bytes in which the backward pass of one layer of fused attention sums gradients of queries, in fp32.

    4 R H d, d rounded up to 32 (64 above 128). Rows R of packed queries: S + 128 T, since each of T sequences may take
    128 more; of dense ones, N tokens of each of I images: I N, N rounded up to 128. None but on CUDA in half precision.
    Packed are texts, and the images of a decoder that looks at texts.
    """
    model = learner.model
    image, text = model.config.image, model.config.text
    if micro.kernels.padded:
        return 0.0
    tokens = extra(image) + (image.size // image.patch) ** 2
    decoders = [part for part in model.more.values() if isinstance(part, ImageDecoder)]
    guided = any(decoder.layers[0].cross is not None for decoder in decoders)
    packed = 0.0 if bad_heads(text.width // text.heads) else micro.texts.tokens + SCRATCH * micro.texts.texts
    images = tokens + SCRATCH if guided else math.ceil(tokens / SCRATCH) * SCRATCH
    sizes = _summed(text.width, text.heads, packed), _summed(image.width, image.heads, micro.images * images)
    return max(sizes)


def _summed(width: int, heads: int, rows: float) -> float:
    """Bytes of `rows` rows of gradients; 0 for heads that no fused kernel takes."""
    head = width // heads
    step = 32 if head <= 128 else 64
    return 0.0 if head > WIDEST_HEAD else 4.0 * rows * heads * math.ceil(head / step) * step


def word_logits(learner: Learner, micro: Load) -> float:
    """Bytes of the caption loss's largest tensors: logits of a chunk of words, their softmax and its masked copy.

    n V numbers twice in single precision, in half precision twice more beside, and a copy of the table and of its
    gradient.
    """
    decoder = getattr(learner.model.more, "text_decoder", None)
    if not isinstance(decoder, TextDecoder):
        return 0.0
    numbers = min(CHUNK, micro.texts.tokens) * decoder.words
    table = decoder.words * learner.model.config.text.width
    size = micro.kernels.stream
    return 2.0 * numbers * size + ((numbers + table) * 4.0 if micro.kernels.half else 0.0)


def loss_buffers(learner: Learner, share: Load, all_texts: float, gpus: int, micro_batches: int, teacher: int) -> float:
    """Bytes of features and their gradients: texts of all ranks, gathered, three times; local images three times.

    Features, the sums of their gradients that the blocks fill, and those scaled by what comes from above. In several
    micro-batches the features of the whole share and their gradients stay beside for the replay.
    """
    image, text = features(learner.model, teacher)
    rows = share.images * image.floats + all_texts * text.floats
    constant = share.images * image.constant + (all_texts if gpus > 1 else share.texts.texts) * text.constant
    replay = 2 * (share.images * image.floats + share.texts.texts * text.floats) if micro_batches > 1 else 0
    return 4.0 * (3 * rows + constant + replay)


def fsdp(learner: Learner, precision: str, gpus: int) -> tuple[float, float]:
    """Share of weights, gradients and states that a GPU holds, and bytes of what is gathered at once.

    Those of blocks, towers and decoders are divided by the ranks, those of head and terms are not. Gathered at once:
    what is in no block, two blocks (the next one travels early), one's gradient, and its copy to be scattered.
    """
    cut, size = shards(learner), 8 if precision == "fp64" else 4
    numbers = cut.sharded + cut.root + cut.replicated
    own = 2 if precision == "bf16" else size
    part = ((cut.sharded + cut.root) / gpus + cut.replicated) / numbers
    return part, 2.0 * size * cut.root + (3.0 * own + size) * cut.largest


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
    """Part -> bytes of one GPU at its fullest: when the backward pass of the last micro-batch begins.

    Args: share: of one GPU, in all its micro-batches; all_texts: of all ranks.
    Under ddp gradients live in the buckets that travel, so that these cost nothing more. Of one GPU and one micro-batch
    gradients grow as activations go: what counts is by how much they are more.
    """
    held, size = bytes_of(learner, optim, precision), 8 if precision == "fp64" else 4
    micro, sharded = micro_load(share, layout.micro_batches), layout.parallel == "fsdp" and layout.gpus > 1
    part, gathered = fsdp(learner, precision, layout.gpus) if sharded else (1.0, 0.0)
    buckets = 2.0 * BUCKET * size if layout.gpus > 1 else 0.0
    work = step_of(learner, share, layout.micro_batches, all_texts, layout.checkpointing, device, None, chunk, teacher)
    kept = activations(learner, micro, layout.checkpointing)
    there = held.gradients * part
    if layout.gpus == layout.micro_batches == 1:
        there = max(0.0, there - kept)
    sizes = {
        "weights": held.weights * part,
        "gradients": there,
        "optimizer states": held.optimizer * part,
        "average of weights": held.average * part,
        "weights in half precision": half_copies(learner, precision, layout.checkpointing, sharded),
        "gathered by fsdp": gathered,
        "communication buckets": buckets,
        "activations": kept,
        "passing: one block, or words": passing(learner, micro, precision, layout.checkpointing, sharded),
        "features and their gradients": loss_buffers(
            learner, share, all_texts, layout.gpus, layout.micro_batches, teacher
        ),
        "a block of pairs": work.pair_block,
        "images": share.images * 3.0 * learner.model.config.image.size**2,
    }
    if device == "cuda":
        sizes["allowance: CUDA, libraries"] = CONTEXT
        sizes["allowance: fragments"] = FRAGMENTS * (sum(sizes.values()) - CONTEXT)
    return {name: value for name, value in sizes.items() if value}
