"""Configurations that fit a GPU, and the fastest of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, cached_property

import torch
from torch import Tensor

from kiloword.apps.plan.gpu import EXPOSED, Layout, Share, memory, traffic
from kiloword.apps.plan.request import NODE, Card, Plan
from kiloword.apps.plan.simulation import PAIRS, TRUNK, MicroBatch, PairLoss, Simulation
from kiloword.config.recipes import OptimConfig
from kiloword.data.transforms.mix import LARGE
from kiloword.data.transforms.mix import share as composed_share
from kiloword.data.transforms.settings import MixingSettings
from kiloword.methods.method import Method
from kiloword.model.blocks import STACKED
from kiloword.training.optimizer import groups
from kiloword.training.step import Learner
from kiloword.types import Batch, BatchInputs, Features, Input, TextGroup, Texts

CAPTIONS = 6  # of methods that take all: one from the web and five generated ones (arXiv:2405.10286)
QUESTION = 12  # tokens
CLASSES = 1000  # of zero-shot classification (ImageNet)
ROUNDS = 5  # of Muon's Newton-Schulz iteration: the default of `muon.orthogonal`
MEASURED = 256  # most images of a simulated micro-batch; larger ones are on the line through this and its half


@dataclass(frozen=True)
class Work:
    """FLOP of one part of a step on one GPU."""

    name: str
    group: str  # towers, decoders, head, pair loss, terms
    forward: float
    backward: float

    @property
    def both(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True)
class Step:
    """FLOP of one step of one GPU."""

    parts: list[Work]
    twice: dict[str, float]  # no forward or backward pass of the method: what, and its FLOP
    single: float  # in full precision whatever the run's is

    @property
    def needed(self) -> float:
        """Forward and backward passes, nothing done twice."""
        return sum(work.both for work in self.parts)

    @property
    def total(self) -> float:
        return self.needed + sum(self.twice.values())


def step_of(share: Share, layout: Layout) -> Step:
    """One step of a GPU.

    Several micro-batches of a method with a pair loss encode everything once more, without gradient (GradCache).
    Checkpointing "whole" repeats the blocks' forward passes; "selective" repeats no product.
    """
    micro, pairs, n, method = share.micro, share.pairs, layout.micro_batches, share.learner.method
    more = [name.replace("_", " ") for name in share.learner.model.more]
    parts = [Work(name, _group(name, more), n * flop, n * micro.backward[name]) for name, flop in micro.forward.items()]
    pair_loss = Work(PAIRS, PAIRS, pairs.forward, pairs.backward)
    twice = {
        "recomputation of checkpointing": n * micro.recomputed if layout.checkpointing == "whole" else 0.0,
        "first pass of micro-batches": n * micro.encoding.total()
        if n > 1 and (method.pair_weight or method.contrasts)
        else 0.0,
        "optimizer (Muon)": newton_schulz(share.learner, share.optim),
    }
    done = {name: flop for name, flop in twice.items() if flop}
    return Step([*parts, pair_loss], done, n * micro.single.total() + pair_loss.both)


def _group(part: str, more: list[str]) -> str:
    if part.removesuffix(TRUNK) in ("image tower", "text tower"):
        return "towers"
    return "head" if part == "head" else "decoders" if part in more else "terms"


def newton_schulz(learner: Learner, optim: OptimConfig) -> float:
    """FLOP of Muon: five rounds of x x^T, its square and a product with x, 4 a^2 b + 2 a^3 of a matrix [a, b], a <= b.

    Several matrices of a parameter are made orthogonal separately. AdamW has no products.
    """
    total = 0.0
    for kind, members in groups(learner, optim).items():
        for name, p in members if kind.endswith("muon") else ():
            stacked = next((n for end, n in STACKED.items() if name.endswith(end)), 1)
            parts, rows = (len(p), p.shape[1]) if p.dim() == 3 else (stacked, p.shape[0] // stacked)
            a, b = sorted((rows, p.shape[-1]))
            total += parts * ROUNDS * (4.0 * a * a * b + 2.0 * a**3)
    return total


@dataclass(frozen=True)
class Option:
    """One way to run, and what it takes."""

    layout: Layout
    micro: int
    memory: dict[str, float]  # bytes of one GPU by part
    traffic: dict[str, float]  # bytes that a GPU sends in a step
    step: Step
    seconds: float  # a step
    compute: float  # of them, arithmetic
    fits: bool

    @property
    def bytes(self) -> float:
        return sum(self.memory.values())


class Planner:
    """A request made concrete: a learner without content, one GPU's share, a card."""

    def __init__(self, plan: Plan, method: Method, card: Card, varied: bool = False) -> None:
        """Args: varied: captions have lengths spread around the mean, not one length and a longest of the context."""
        self.plan, self.method, self.card, self.varied = plan, method, card, varied
        self.device = "cpu" if card.name == "cpu" else "cuda"
        self.simulation = Simulation(plan.model, method, self.device, plan.precision)
        self.learner: Learner = self.simulation.learner
        self.captions = plan.captions or _captions(method)
        self.images = plan.batch // plan.gpus
        self._micro = cache(self._simulated)

    @cached_property
    def tokens(self) -> float:
        """Mean length of a caption in the tower: with the method's own tokens, longer where a transform joins two."""
        mean, text = self.plan.tokens, self.learner.model.config.text
        for transform in self.method.transforms:
            settings = getattr(transform, "settings", None)
            if isinstance(settings, MixingSettings) and settings.parts != "images":
                mean += composed_share(settings.rho, LARGE) * (mean - 1)  # "and", no second start and end
        return text.context if text.pad_to_context else min(mean + len(text.extra_tokens), text.context)

    def batch(self, images: int, padded: bool = False) -> Batch:
        """A batch of which shapes alone count. Args: padded: captions are as long as the context.

        Where attention pads to the longest text of a batch, that is taken to fill the context, unless lengths vary.
        """
        text, needs, numbers = self.learner.model.config.text, self.method.needs, torch.arange(images)
        tail = [text.special["end"], *(text.special[name] for name in text.extra_tokens)]
        word, n = max(text.special.values()) + 1, images * self.captions
        mean = text.context if padded else self.tokens
        spread = min(mean - 1 - len(tail), text.context - mean) if self.varied else 0.0  # both ways from the mean
        places = torch.arange(n + 1, dtype=torch.float64)
        lengths = (places * (mean + spread * (places / n - 1))).round().diff().int()
        mixed = lengths[torch.randperm(n, generator=torch.Generator().manual_seed(0))].tolist()
        texts = Texts.pack([[text.special["start"], *[word] * (length - 1 - len(tail)), *tail] for length in mixed])
        if not self.varied and (self.device == "cpu" or self.plan.precision != "bf16"):
            texts.longest = text.context
        empty, size = self.simulation.empty, self.learner.model.config.image.size
        teachers = [name for name in needs if name not in ("questions", "truth")]
        image_features = {
            f"{name}{end}": empty(images, self.plan.teacher) for name in teachers for end in ("", ".texts")
        }
        text_features = {name: empty(n, self.plan.teacher) for name in teachers}
        if "truth" in needs:
            text_features["truth"] = empty(n, self.plan.batch, dtype=torch.bool)
        return Batch(
            images=empty(images, 3, size, size, dtype=torch.uint8),
            texts=texts,
            image_of_text=numbers.repeat_interleave(self.captions),
            seeds=numbers,
            position=numbers,
            composed=torch.zeros(images, dtype=torch.bool),
            image_features=image_features,
            text_features=text_features,
            questions=Texts.pack([[word] * QUESTION] * images) if "questions" in needs else None,
            inputs=BatchInputs({name: self._input(one, numbers, texts) for name, one in self.method.inputs.items()}),
        )

    def _input(self, one: Input, numbers: Tensor, texts: Texts) -> Tensor | TextGroup:
        """An input of the method for images of these numbers; texts count as one an image, as long as captions."""
        if one.shape is None:
            return TextGroup(texts.cut(0, len(numbers)), numbers)
        shape = one.shape(self.learner.model.config)
        return self.simulation.empty(len(numbers), *shape, dtype=torch.uint8)

    def _simulated(self, images: int, padded: bool) -> tuple[MicroBatch, Features, Features]:
        return self.simulation.micro_batch(self.batch(images, padded))

    def micro_batch(self, images: int, padded: bool = False) -> MicroBatch:
        """What a micro-batch takes: measured up to 256 images, and on a line through two sizes."""
        most = min(self.images, MEASURED)
        end = self._micro(most, padded)[0]
        if images == most:
            return end
        least = most // 2
        return self._micro(least, padded)[0].toward(end, (images - least) / (most - least))

    @cached_property
    def _pairs(self) -> PairLoss:
        _, image, text = self._micro(min(self.images, MEASURED), False)
        return self.simulation.pair_loss(image, text, self.images, self.plan.batch * self.captions, self.plan.chunk)

    @cached_property
    def inference(self) -> dict[str, tuple[float, float]]:
        """FLOP and seconds of zero-shot classification of an image among CLASSES, each with one prompt.

        "image": encoded. "texts": all prompts, encoded once for all images. "scores": of the image with all classes.
        """
        batch, text = self.batch(1), self.learner.model.config.text
        one = batch.texts.ids[: int(batch.texts.starts[1])].tolist()
        prompts = Texts.pack([one] * CLASSES)
        prompts.longest = text.context if batch.texts.longest == text.context else prompts.longest
        measured = self.simulation.inference(replace(batch, texts=prompts))
        return {name: (flop, self._arithmetic(flop, single)) for name, (flop, single) in measured.items()}

    def _arithmetic(self, flop: float, single: float) -> float:
        """Seconds of arithmetic. Args: single: FLOP of these that are in full precision whatever the run's is."""
        full = self.card.flops_fp32 / (2 if self.plan.precision == "fp64" else 1)
        half = self.card.flops if self.plan.precision == "bf16" else full
        return ((flop - single) / half + single / full) / self.plan.utilisation

    def option(self, parallel: str, checkpointing: str, micro_batches: int, padded: bool = False) -> Option:
        """One way to run."""
        plan, layout = self.plan, Layout(self.plan.gpus, parallel, checkpointing, micro_batches)
        micro = self.micro_batch(self.images // micro_batches, padded)
        texts = self.images * self.captions
        share = Share(self.simulation, plan.optim, self.images, texts, plan.gpus * texts, micro, self._pairs)
        step, held, sent = step_of(share, layout), memory(share, layout), traffic(share, layout)
        compute, seconds = self._seconds(step, sent)
        fits = sum(held.values()) <= self.card.memory
        return Option(layout, self.images // micro_batches, held, sent, step, seconds, compute, fits)

    def _seconds(self, step: Step, sent: dict[str, float]) -> tuple[float, float]:
        """Seconds of a step's arithmetic, and of the step. Losses compute in full precision, at its own speed.

        Gradients and weights travel while others are computed, so that the slower of both counts; features do not: the
        loss waits for them, and the towers' backward passes for their gradients.
        """
        compute = self._arithmetic(step.total, step.single)
        speed = self.card.link if self.plan.gpus <= NODE else self.card.network
        exposed = sum(value for name, value in sent.items() if name in EXPOSED) / speed
        hidden = sum(value for name, value in sent.items() if name not in EXPOSED) / speed
        return compute, max(compute, hidden) + exposed

    def fewest(self, parallel: str, checkpointing: str) -> Option:
        """With the fewest micro-batches that fit, or the smallest ones where none does."""
        for n in [self.images // self.plan.micro] if self.plan.micro else self.divisions():
            option = self.option(parallel, checkpointing, n)
            if option.fits:
                break
        return option

    def divisions(self) -> list[int]:
        """Numbers of micro-batches that a GPU's share can be split into, ascending."""
        return divisors(self.images) if self.plan.model.image.tower == "vit" else [1]  # of batch norm, the whole share

    def options(self) -> list[Option]:
        """Every way that the request leaves open: the fastest that fits first, those that do not fit by memory.

        Of equally fast ones first those with fewer micro-batches, then ddp, then those that need less memory.
        """
        several = ["ddp", "fsdp"] if self.plan.gpus > 1 else ["ddp"]
        ways = several if self.plan.parallel == "auto" else [self.plan.parallel]
        kinds = [self.plan.checkpointing] if self.plan.checkpointing != "auto" else ["none", "selective", "whole"]
        options = [self.fewest(way, kind) for way in ways for kind in kinds]
        return sorted(options, key=_order)

    def largest_micro(self, option: Option) -> int:
        """The most images of a micro-batch that fit in this way of running; 0: not even one."""
        layout = option.layout
        for n in self.divisions():
            if self.option(layout.parallel, layout.checkpointing, n).fits:
                return self.images // n
        return 0

    def rate(self, option: Option) -> float:
        """Pairs per second of all GPUs: images, each with its captions."""
        return self.plan.batch / option.seconds

    def days(self, option: Option) -> float:
        """Of the whole run."""
        return self.plan.samples / self.rate(option) / 86400

    def padded(self, option: Option) -> Option:
        """The same with texts padded to the context."""
        layout = option.layout
        return self.option(layout.parallel, layout.checkpointing, layout.micro_batches, padded=True)


def _order(option: Option) -> tuple[bool, float, float, int, str, float]:
    layout, size = option.layout, option.bytes
    speed = round(option.seconds, 9), layout.micro_batches
    return not option.fits, 0.0 if option.fits else size, *speed, layout.parallel, size


def divisors(n: int) -> list[int]:
    """Of n, ascending."""
    return [d for d in range(1, n + 1) if n % d == 0]


def _captions(method: Method) -> int:
    if isinstance(method.captions, int):
        return method.captions
    return 1 if method.captions == "one" else CAPTIONS
