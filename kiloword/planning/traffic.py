"""Bytes that each GPU sends in a step (and receives as many)."""

from __future__ import annotations

from torch import nn

from kiloword.config.recipes import OptimConfig
from kiloword.model.blocks import Block, CrossBlock
from kiloword.model.decoder import Layer
from kiloword.planning.memory import Layout
from kiloword.planning.pairs import columns, features
from kiloword.planning.parameters import bytes_of, matrices, shards
from kiloword.planning.shapes import Load
from kiloword.planning.step import micro_batch
from kiloword.training.learner import Learner
from kiloword.training.optimizer import groups

EXPOSED = ("features", "columns", "Muon's updates")  # no arithmetic hides them


def traffic(
    learner: Learner,
    optim: OptimConfig,
    precision: str,
    share: Load,
    layout: Layout,
    all_texts: float,
    teacher: int = 0,
) -> dict[str, float]:
    """What travels -> bytes that a GPU sends in a step.

    A ring over n ranks sends (n-1)/n of a buffer to gather or to scatter sums, twice that to have the sums everywhere.
    ddp: 2 (n-1)/n of all gradients, once a step. fsdp: blocks are gathered (in bf16 where that is the precision) for
    every pass forward and again backward, once more for the first pass of micro-batches; what is in no block once a
    micro-batch. Their gradients are scattered once a micro-batch; each matrix that Muon makes orthogonal is gathered
    once a step. Features: every rank's texts are gathered, their gradients scattered; of softmax and the like, numbers
    of every text are summed over ranks. Tests count all of it.
    """
    n = layout.gpus
    if n == 1:
        return {}
    ring = (n - 1) / n
    if layout.parallel == "ddp":
        sent = {"gradients": 2 * ring * bytes_of(learner, optim, precision).gradients}
    else:
        sent = {name: ring * value for name, value in _of_fsdp(learner, optim, precision, share, layout).items()}
    if learner.method.pair_weight:
        text = features(learner.model, teacher)[1]
        row = 4 * (text.floats + text.constant)
        sent["features"] = ring * all_texts * (2 * row + 8 * text.whole)
        if numbers := columns(learner.method):
            sent["columns"] = 2 * ring * all_texts * numbers * 4.0
    return sent


def _of_fsdp(learner: Learner, optim: OptimConfig, precision: str, share: Load, layout: Layout) -> dict[str, float]:
    """Bytes of the whole buffers that are gathered and scattered."""
    size = 8 if precision == "fp64" else 4
    cut, (first, both) = shards(learner), _block_bytes(learner, share, 2 if precision == "bf16" else size)
    again = layout.micro_batches > 1 and learner.method.pair_weight > 0
    root = size * cut.root
    sent = {
        "weights": layout.micro_batches * (2 * both + (first if again else 0.0) + root),
        "gradients": float(size * (layout.micro_batches * (cut.sharded + cut.root) + 2 * cut.replicated)),
    }
    turned = sum(p.numel() for kind, some in groups(learner, optim).items() for _, p in some if kind.endswith("muon"))
    return sent | ({"Muon's updates": float(size * turned)} if turned else {})


def _passes(learner: Learner, share: Load) -> tuple[int, int]:
    """Of the image tower and the text tower in one micro-batch."""
    names = [w.name for w in micro_batch(learner, share)]
    image, text = (sum(name.startswith(tower) for name in names) for tower in ("image tower", "text tower"))
    return image, text + ("fuser" in learner.model.more)


def _block_bytes(learner: Learner, share: Load, size: int) -> tuple[float, float]:
    """Bytes of the blocks of all passes of a micro-batch: of encoding alone, and of everything.

    A decoder's layer that looks at a memory is gathered twice: its keys are made apart from its pass.
    """
    model = learner.model
    image, text = (_blocks(tower) for tower in (model.image_tower, model.text_tower))
    more = sum(_blocks(tower) for tower in model.more.values())
    more += sum(
        matrices(part)
        for tower in model.more.values()
        for part in tower.modules()
        if isinstance(part, Layer) and part.cross is not None
    )
    passes = _passes(learner, share)
    return size * float(image + text), size * float(passes[0] * image + passes[1] * text + more)


def _blocks(tower: nn.Module) -> int:
    return sum(matrices(part) for part in tower.modules() if isinstance(part, Block | CrossBlock))
