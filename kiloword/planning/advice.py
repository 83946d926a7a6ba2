"""Configurations that fit a GPU, and the fastest of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from kiloword.data.transforms.mix import LARGE
from kiloword.data.transforms.mix import share as composed_share
from kiloword.data.transforms.settings import MixingSettings
from kiloword.methods.method import Method
from kiloword.planning.cards import NODE, Card
from kiloword.planning.memory import Layout, memory
from kiloword.planning.request import Plan
from kiloword.planning.shapes import Kernels, Lengths, Load, text_length
from kiloword.planning.step import Step, step_of
from kiloword.planning.traffic import EXPOSED, traffic
from kiloword.training.learner import Learner, learner_of

CAPTIONS = 6  # of methods that take all: a raw one and five made ones (arXiv:2405.10286)
QUESTION = 12.0  # tokens


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

    def __init__(self, plan: Plan, method: Method, card: Card) -> None:
        self.plan, self.method, self.card = plan, method, card
        self.learner: Learner = learner_of(plan.model, method)
        self.device = "cpu" if card.name == "cpu" else "cuda"
        self.captions = plan.captions or _captions(method)
        self.images = plan.batch // plan.gpus
        self.all_texts = float(plan.batch * self.captions)
        self.teacher = plan.teacher if set(method.needs) - {"questions", "truth"} else 0

    @cached_property
    def tokens(self) -> float:
        """Of a caption as the tower sees it: with the method's own tokens, longer where a transform joins two."""
        mean = self.plan.tokens
        for transform in self.method.transforms:
            settings = getattr(transform, "settings", None)
            if isinstance(settings, MixingSettings) and settings.parts != "images":
                mean += composed_share(settings.rho, LARGE) * (mean - 1)  # "and", no second start and end
        return text_length(mean, self.learner.model.config.text)

    def share(self, padded: bool = False) -> Load:
        """What one GPU gets of a batch; padded: with every caption as long as the context.

        Where attention pads to the longest text of a batch, that is taken to fill the context.
        """
        kernels = Kernels.of(self.plan.precision, self.device == "cuda")
        context = float(self.learner.model.config.text.context)
        texts = Lengths.equal(self.images * self.captions, context if padded else self.tokens, self.captions)
        if kernels.padded:
            texts = replace(texts, longest=context, together=context * self.captions)
        questions = Lengths.equal(self.images, QUESTION) if "questions" in self.method.needs else None
        return Load(self.images, texts, kernels, self.captions, questions)

    def option(self, parallel: str, checkpointing: str, micro_batches: int, padded: bool = False) -> Option:
        """One way to run."""
        plan, share = self.plan, self.share(padded)
        layout = Layout(plan.gpus, parallel, checkpointing, micro_batches)
        step = step_of(
            self.learner,
            share,
            micro_batches,
            self.all_texts,
            checkpointing,
            self.device,
            plan.optim,
            plan.chunk,
            self.teacher,
        )
        held = memory(
            *(self.learner, plan.optim, plan.precision, share, layout, self.all_texts, self.device),
            chunk=plan.chunk,
            teacher=self.teacher,
        )
        sent = traffic(self.learner, plan.optim, plan.precision, share, layout, self.all_texts, self.teacher)
        compute, seconds = self._seconds(step, sent)
        fits = sum(held.values()) <= self.card.memory
        return Option(layout, self.images // micro_batches, held, sent, step, seconds, compute, fits)

    def _seconds(self, step: Step, sent: dict[str, float]) -> tuple[float, float]:
        """Seconds of a step's arithmetic, and of the step. Losses compute in full precision, at its own speed.

        Gradients and weights travel while others are computed, so that the slower of both counts; features do not: the
        loss waits for them, and the towers' backward passes for their gradients.
        """
        full = self.card.flops_fp32 / (2 if self.plan.precision == "fp64" else 1)
        half = self.card.flops if self.plan.precision == "bf16" else full
        compute = ((step.total - step.single) / half + step.single / full) / self.plan.utilisation
        speed = self.card.link if self.plan.gpus <= NODE else self.card.network
        exposed = sum(value for name, value in sent.items() if name in EXPOSED) / speed
        hidden = sum(value for name, value in sent.items() if name not in EXPOSED) / speed
        return compute, max(compute, hidden) + exposed

    def fewest(self, parallel: str, checkpointing: str) -> Option:
        """With the fewest micro-batches that fit, or the smallest ones where none does."""
        micro_batches = [self.images // self.plan.micro] if self.plan.micro else divisors(self.images)
        options = None
        for n in micro_batches:
            options = self.option(parallel, checkpointing, n)
            if options.fits:
                return options
        assert options is not None
        return options

    def options(self) -> list[Option]:
        """Every way that the request leaves open: the fastest that fits first, those that do not fit by memory."""
        ways = (
            [self.plan.parallel] if self.plan.parallel != "auto" else ["ddp", *(["fsdp"] if self.plan.gpus > 1 else [])]
        )
        kinds = [self.plan.checkpointing] if self.plan.checkpointing != "auto" else ["none", "selective", "whole"]
        options = [self.fewest(way, kind) for way in ways for kind in kinds]
        return sorted(
            options, key=lambda o: (not o.fits, 0.0 if o.fits else o.bytes, round(o.seconds, 9), o.step.micro_batches)
        )

    def largest_micro(self, option: Option) -> int:
        """The most images of a micro-batch that fit in this way of running; 0: not even one."""
        layout = option.layout
        for micro_batches in divisors(self.images):
            if self.option(layout.parallel, layout.checkpointing, micro_batches).fits:
                return self.images // micro_batches
        return 0

    def rate(self, option: Option) -> float:
        """Pairs a second of all GPUs: images, each with its captions."""
        return self.plan.batch / option.seconds

    def padded(self, option: Option) -> Option:
        """The same with texts padded to the context."""
        layout = option.layout
        return self.option(layout.parallel, layout.checkpointing, layout.micro_batches, padded=True)


def divisors(n: int) -> list[int]:
    """Of n, ascending."""
    return [d for d in range(1, n + 1) if n % d == 0]


def _captions(method: Method) -> int:
    if isinstance(method.captions, int):
        return method.captions
    return 1 if method.captions == "one" else CAPTIONS
