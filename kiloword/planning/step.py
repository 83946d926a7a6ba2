"""All parts of a step's arithmetic on one GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kiloword.config.recipes import OptimConfig
from kiloword.model.model import Model
from kiloword.planning.heads import head
from kiloword.planning.layers import Work
from kiloword.planning.pairs import pair_work
from kiloword.planning.shapes import Load
from kiloword.planning.terms import KINDS, SCORES, term_work
from kiloword.planning.towers import image_tower, text_tower
from kiloword.training.learner import Learner
from kiloword.training.optimizer import STACKED, groups

ROUNDS = 5  # of Muon's Newton-Schulz iteration: the default of `muon.orthogonal`


def encoding(model: Model, load: Load) -> list[Work]:
    """Towers and head: what the pair loss needs of a micro-batch."""
    image = image_tower(model.config.image, load.images, load.kernels)
    text = text_tower(model.config.text, load.texts, load.kernels)
    return [replace(w, first=True) for w in (image, text, head(model, load.images, load.texts, load.kernels))]


def micro_batch(learner: Learner, load: Load, chosen: float | None = None) -> list[Work]:
    """Everything of one micro-batch but the pair loss; parts of one name once. Args: as of `term_work`."""
    model = learner.model
    works = encoding(model, load)
    for name, term in learner.terms.items():
        if type(term) in KINDS:
            more = term_work(term, name, model, load, chosen)
            works += [w for w in more if w.name != SCORES or all(w.name != f.name for f in works)]
    return works


def unknown(learner: Learner) -> list[str]:
    """Terms of a kind that is not counted here: a user's own."""
    return [name for name, term in learner.terms.items() if type(term) not in KINDS]


@dataclass(frozen=True)
class Step:
    """Arithmetic of one step of one GPU."""

    parts: list[Work]  # of all micro-batches together, by name
    micro_batches: int  # of a GPU's share
    again: float  # FLOP that checkpointing repeats
    replayed: float  # FLOP of the pass without gradient that several micro-batches need
    optimizer: float  # FLOP
    pair_block: float  # bytes of a block of pairs

    @property
    def needed(self) -> float:
        """FLOP of forward and backward passes, nothing done twice."""
        return sum(w.forward + w.backward for w in self.parts)

    @property
    def single(self) -> float:
        """Of them, in full precision whatever the run's is."""
        return sum(w.single for w in self.parts)

    @property
    def total(self) -> float:
        return self.needed + self.again + self.replayed + self.optimizer


def step_of(
    learner: Learner,
    share: Load,
    micro_batches: int,
    all_texts: float,
    checkpointing: str,
    device: str,
    optim: OptimConfig | None = None,
    chunk: int = 0,
    teacher: int = 0,
) -> Step:
    """One step of a GPU whose share comes in that many micro-batches.

    Several micro-batches of a method with a pair loss encode everything once more, without gradient (GradCache).
    Checkpointing "whole" repeats the blocks' forward passes; "selective" repeats no product.
    """
    micro = micro_load(share, micro_batches)
    parts = [w.times(micro_batches) for w in micro_batch(learner, micro)]
    pair, block = pair_work(learner.model, learner.method, share.images, all_texts, device, chunk, teacher)
    again = sum(w.again for w in parts) if checkpointing == "whole" else 0.0
    replayed = sum(w.forward for w in parts if w.first) if micro_batches > 1 and learner.method.pair_weight else 0.0
    moved = 0.0 if optim is None else newton_schulz(learner, optim)
    return Step([*parts, pair], micro_batches, again, replayed, moved, block)


def micro_load(share: Load, micro_batches: int) -> Load:
    """One of several equal micro-batches."""
    questions = None if share.questions is None else share.questions.share(1 / micro_batches)
    return replace(
        share, images=share.images / micro_batches, texts=share.texts.share(1 / micro_batches), questions=questions
    )


def newton_schulz(learner: Learner, optim: OptimConfig) -> float:
    """FLOP of Muon: five rounds of x x^T, its square and a product with x, 4 a^2 b + 2 a^3 of a matrix [a, b], a <= b.

    Matrices that are several, one below the other, are taken apart. AdamW multiplies nothing.
    """
    total = 0.0
    for kind, members in groups(learner, optim).items():
        for name, p in members if kind.endswith("muon") else ():
            parts = next((n for end, n in STACKED.items() if name.endswith(end)), 1)
            a, b = sorted((p.shape[0] // parts, p.shape[1]))
            total += parts * ROUNDS * (4.0 * a * a * b + 2.0 * a**3)
    return total
