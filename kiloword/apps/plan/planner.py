"""Memory and time of a run: which layouts fit a GPU, and what each takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from kiloword.apps.plan.options import GIB, Plan
from kiloword.apps.plan.simulation import Count, FirstBlock, like
from kiloword.config.recipes import NO_MICRO, Recipe
from kiloword.distributed.device import precision_of, simulated
from kiloword.files import write_json
from kiloword.methods.method import Method
from kiloword.methods.registry import preset
from kiloword.model.trunks.trunk import trunks
from kiloword.report import Table, say_blocks
from kiloword.terminal import say
from kiloword.training.engine import BUCKET, recompute, recomputed_blocks, units
from kiloword.training.optimizer import Optimizer
from kiloword.training.resolve import micro_batches
from kiloword.training.step import learner_of
from kiloword.types import Batch, BatchInputs, Features, TextGroup, Texts

CAPTIONS = 6  # of methods that take all: one from the web and five generated ones (arXiv:2405.10286)
QUESTION = 12  # tokens
TEACHER = 768  # numbers of a teacher's features
CLASSES = 1000  # of zero-shot classification (ImageNet)
NODE = 8  # GPUs that the fast link joins; more communicate over the network
CONTEXT = 1.0 * GIB  # of CUDA, of its libraries' workspaces and of communication: an allowance
FRAGMENTS = 0.05  # of everything else: what the allocator holds and cannot use: an allowance


@dataclass(frozen=True)
class Option:
    """One way to run, and what it takes."""

    parallel: str  # ddp, fsdp
    checkpointing: str  # none, whole, selective
    micro: int  # images of a micro-batch
    micro_batches: int
    fits: bool
    bytes: float  # of one GPU
    memory: dict[str, float]  # these by part
    flop: dict[str, float]  # of a step of one GPU, by part
    traffic: float  # bytes that a GPU sends in a step
    seconds: float  # a step
    pairs_per_second: float  # of all GPUs: images, each with its captions
    days: float  # of the whole run
    gpu_hours: float

    def __str__(self) -> str:
        return f"{self.parallel}, checkpointing {self.checkpointing}, micro-batch {self.micro} x {self.micro_batches}"


@dataclass(frozen=True)
class MicroBatch:
    """What one micro-batch takes on one GPU, without its pair losses."""

    flop: dict[str, float]  # "towers", each term, "backward"
    activations: float  # bytes that wait for the backward pass
    temporary: float  # bytes beside them, at the fullest moment of both passes
    sides: dict[str, list[tuple[Features, float]]]  # one row and column of every pair loss, and their numbers an image


class Planner:
    """A run made concrete: a learner without content, one GPU's share, a card. Args: method: None: the recipe's.

    Every method is counted, a user's own included; nothing here knows what a method does.
    Raises: ValueError for a batch that does not divide.
    """

    def __init__(self, plan: Plan, recipe: Recipe, method: Method | None = None) -> None:
        self.images, parts = recipe.batch // plan.gpus, micro_batches(recipe, plan.gpus)
        if parts > 1 and recipe.model.image.tower != "vit":
            raise ValueError(f"micro {recipe.micro} splits {self.images} images of a GPU, but {NO_MICRO}")
        self.plan, self.recipe = plan, recipe
        self.method = method = method or preset(recipe.method, recipe.settings)
        self.half = recipe.precision in ("auto", "bf16")
        self.precision = precision_of("bf16" if self.half else "fp32", "cpu")
        sheet = "flops" if self.half else "flops_fp32"
        self.card = plan.card(sheet)
        self.speed: float = getattr(self.card, sheet)
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        with self.mode:
            self.learner = learner_of(recipe.model, method, "cpu")
        self.learner.done = 0.5  # where losses that have a window are computed
        for trunk in trunks(self.learner.model):  # frozen by default
            trunk.requires_grad_(False)
        trained = [p for p in self.learner.parameters() if p.requires_grad]
        self.parameters = sum(p.numel() for p in self.learner.parameters())
        self.trained = sum(p.numel() for p in trained)
        with self.counted() as count:
            optimizer = Optimizer(self.learner, recipe.optim, 2)
            for p in trained:
                p.grad = torch.empty_like(p)
            optimizer.step(0)
            self.states, self.update = sum(x.nbytes for x in optimizer.state_dict().values()), count.flop()
        for p in trained:  # gradients are counted apart
            p.grad = None
            p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))  # type: ignore[no-untyped-call]
        self.micro_batch = cache(self._micro_batch)
        text, every = self.learner.model.config.text, CAPTIONS if method.captions == "all" else 1
        self.captions = plan.captions or (method.captions if isinstance(method.captions, int) else every)
        tokens = text.context if text.pad_to_context else plan.tokens + len(text.extra_tokens)
        self.tokens = min(tokens, text.context)  # of a caption in the tower, on average

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor without content."""
        with self.mode:
            return torch.empty(shape, dtype=dtype)

    @contextmanager
    def counted(self) -> Iterator[Count]:
        """Count what runs inside. Raises: ValueError for a loss that reads values, which fake tensors do not have."""
        count = Count((*self.learner.parameters(), *self.learner.buffers()))
        try:
            with simulated("cpu" if self.plan.gpu == "cpu" else "cuda"), self.mode, count:
                yield count
        except (DataDependentOutputException, DynamicOutputShapeException) as e:
            raise ValueError(f"a loss of {self.method.name} reads values, so it cannot be planned.") from e

    def _micro_batch(self, kind: Any, images: int) -> MicroBatch:
        """A micro-batch, forward and backward, with a kind of activation checkpointing."""
        learner, batch = self.learner, self.batch(images)
        flop, roots, sides = dict[str, float](), list[Tensor](), dict[str, list[tuple[Features, float]]]()
        for block in recomputed_blocks(learner.model):
            vars(block).pop("forward", None)  # of another kind
        recompute(learner.model, kind)
        with self.counted() as count:
            with self.precision():
                batch = learner.above_trunks(batch)
                encoded = learner.encode(batch)
                inputs = learner.inputs(batch, encoded)
                flop["towers"] = count.flop()
                for name, term in learner.terms.items():
                    roots.append(term(learner.model, batch, encoded))
                    flop[name.replace("_", " ")] = count.flop()
            for name, pair in inputs.items():
                both = pair.rows, {**pair.columns, **pair.constants}
                sides[name] = [(like(side, 1), len(side["vec"]) / images) for side in both]
                roots += [x for side in both for x in side.values()]
                del pair, both
            roots = list({id(x): x for x in roots if x.requires_grad}.values())
            del encoded, inputs
            activations = count.alive
            torch.autograd.backward(roots, [torch.empty_like(x) for x in roots])
            flop["backward"] = count.flop()
        return MicroBatch(flop, activations, count.peak - activations, sides)

    @cached_property
    def pairs(self) -> tuple[float, float]:
        """FLOP and bytes of the pair losses of one GPU's images with the texts of all.

        Bytes: of features, the sums of their gradients, these scaled by the gradient of the loss, and one block.
        """
        flop, micro = 0.0, self.micro_batch("none", self.images)
        with self.counted() as count:
            for name, ((row, rows), (column, columns)) in micro.sides.items():
                contrast: Any = self.learner.contrasts[name]
                made = like(row, round(rows * self.images)), like(column, round(columns * self.recipe.batch))
                pairs = FirstBlock(contrast.head, *made, 0)
                contrast.loss(pairs).sum.backward()
                flop += count.flop() * prod(pairs.shape) / prod(map(min, pairs.shape, pairs.step))
        return flop, count.peak

    def batch(self, images: int) -> Batch:
        """A batch of which shapes alone count; captions have many lengths around the mean."""
        config, needs, numbers = self.learner.model.config, self.method.needs, torch.arange(images)
        text, n, empty = config.text, images * self.captions, self.empty
        tail = [text.special["end"], *(text.special[name] for name in text.extra_tokens)]
        word, middle = max(text.special.values()) + 1, round(self.tokens) - 1 - len(tail)  # words of a caption
        spread = min(middle, text.context - round(self.tokens))  # both ways
        words = [[word] * (middle - spread + int(row * 0.618 % 1 * (2 * spread + 1))) for row in range(n)]
        texts = Texts.pack([[text.special["start"], *ids, *tail] for ids in words])
        teachers = [name for name in needs if name not in ("questions", "truth")]
        of_texts = {name: empty(n, TEACHER) for name in teachers}
        if "truth" in needs:
            of_texts["truth"] = empty(n, self.recipe.batch, dtype=torch.bool)

        inputs = {
            name: TextGroup(texts.cut(0, images), numbers)  # one an image, as long as captions
            if one.shape is None
            else empty(images, *one.shape(config), dtype=torch.uint8)
            for name, one in self.method.inputs.items()
        }
        return Batch(
            images=empty(images, 3, config.image.size, config.image.size, dtype=torch.uint8),
            texts=texts,
            image_of_text=numbers.repeat_interleave(self.captions),
            seeds=numbers,
            position=numbers,
            composed=torch.zeros(images, dtype=torch.bool),
            image_features={f"{t}{end}": empty(images, TEACHER) for t in teachers for end in ("", ".texts")},
            text_features=of_texts,
            questions=Texts.pack([[word] * QUESTION] * images) if "questions" in needs else None,
            inputs=BatchInputs(inputs),
        )

    @cached_property
    def inference(self) -> dict[str, float]:
        """FLOP of zero-shot classification of an image among 1,000 classes, each with one prompt: "image" and "texts"
        to encode it and all prompts, "scores" of the image with all classes."""
        images, prompts, flop = self.batch(1).images, self.batch(CLASSES).texts.cut(0, CLASSES), dict[str, float]()
        model = self.learner.model
        with self.counted() as count, torch.no_grad(), self.precision():
            image = model.encode_image(images)[1]
            flop["image"] = count.flop()
            texts = model.encode_text(prompts)[1]
            flop["texts"] = count.flop()
            model.head.score(image, texts)
            flop["scores"] = count.flop()
        return flop

    def option(self, parallel: str, kind: str, n: int) -> Option:
        """One way to run, in n micro-batches. Several encode everything once more, without gradient (GradCache).

        Time is that of arithmetic at --utilisation, pair losses in fp32, or of traffic where that is more.
        """
        plan, card, micro, pairs = self.plan, self.card, self.micro_batch(kind, self.images // n), self.pairs[0]
        flop = {name: n * x for name, x in micro.flop.items()} | {"pair losses": pairs}
        flop["first pass of micro-batches"] = flop["towers"] if n > 1 and pairs else 0.0
        flop["optimizer"] = self.update
        memory, traffic = self._memory(parallel, micro, n)
        arithmetic = ((sum(flop.values()) - pairs) / self.speed + pairs / card.flops_fp32) / plan.utilisation
        seconds = max(arithmetic, traffic / (card.link if plan.gpus <= NODE else card.network))
        batch, held = self.recipe.batch, sum(memory.values())
        days = (plan.samples or 0) / batch * seconds / 86400
        return Option(
            parallel, kind, self.images // n, n, held <= card.memory, held, memory, flop, traffic, seconds,
            batch / seconds, days, 24 * days * plan.gpus,
        )  # fmt: skip

    def _memory(self, parallel: str, micro: MicroBatch, n: int) -> tuple[dict[str, float], float]:
        """Part -> bytes of one GPU at its fullest, in a backward pass; and bytes that it sends in a step.

        ddp: everything on every GPU; gradients are summed over g ranks, which sends 2 (g-1)/g of them. fsdp: matrices
        of the towers divided by g, and two blocks, a gradient and its copy gathered; every micro-batch gathers weights
        for both passes and scatters gradients, (g-1)/g of each. With one GPU and one micro-batch gradients grow as
        activations are freed: counted is by how much they are more.
        """
        plan, gpus, model = self.plan, self.plan.gpus, self.learner.model
        half, fsdp = 2 if self.half else 4, parallel == "fsdp"
        total, trained = self.parameters, self.trained
        sharded = _matrices(model) - _matrices(model.head)
        part = 1 - sharded / total * (1 - 1 / gpus) if fsdp else 1.0
        gradients = 4 * part * trained
        sizes = {
            "weights": 4 * part * total,
            "gradients": max(0.0, gradients - micro.activations) if gpus == n == 1 else gradients,
            "optimizer states": part * self.states,
            "average of weights": gradients if self.recipe.optim.ema else 0.0,
            "gathered by fsdp": (3.0 * half + 4) * max(map(_matrices, units(model))) if fsdp else 0.0,
            "communication buckets": 8.0 * BUCKET if gpus > 1 else 0.0,
            "activations": micro.activations,
            "temporary": micro.temporary,
            "features, their gradients, a block of pairs": self.pairs[1],
            "images": self.images * 3.0 * model.config.image.size**2,
        }
        if plan.gpu != "cpu":
            sizes["allowance: fragments"] = FRAGMENTS * sum(sizes.values())
            sizes["allowance: CUDA, libraries"] = CONTEXT
        sent = n * (2 * half + 4) * sharded if fsdp else 8 * trained
        return {name: value for name, value in sizes.items() if value}, sent * (gpus - 1) / gpus

    def options(self) -> list[Option]:
        """Every way that the request leaves open, each with the fewest micro-batches that fit, or the most there are;
        those that fit first, then by speed, then by memory."""
        plan, share, micro, options = self.plan, self.images, self.recipe.micro, list[Option]()
        several = ["ddp", "fsdp"] if plan.gpus > 1 else ["ddp"]
        ways = several if plan.parallel == "auto" else [plan.parallel]
        kinds = ["none", "selective", "whole"] if plan.checkpointing == "auto" else [plan.checkpointing]
        least = micro or (share if self.recipe.model.image.tower != "vit" else 1)  # batch norm sees the whole share
        numbers = [n for n in range(share // (micro or share), share // least + 1) if share % n == 0]
        for way, kind in product(ways, kinds):
            for n in numbers:
                option = self.option(way, kind, n)
                if option.fits:
                    break
            options.append(option)
        return sorted(options, key=lambda o: (not o.fits, round(o.seconds, 9), o.micro_batches, o.parallel, o.bytes))


def _matrices(module: nn.Module) -> int:
    """Number of elements of a module's parameters but for vectors."""
    return sum(p.numel() for p in module.parameters() if p.dim() > 1)


def show(planner: Planner) -> None:
    """Print a plan, and write it where `--json` says. Raises: ValueError, after both, when nothing fits the card."""
    plan, recipe, room, options = planner.plan, planner.recipe, planner.card.memory / GIB, planner.options()
    best, pair = options[0], planner.images * 1e9
    speed = plan.utilisation * planner.speed / 1e3
    cost = [(name, f"{n / 1e9:.4g}", f"{n / speed:.3g}") for name, n in planner.inference.items()]
    rows = [
        (o.parallel, o.checkpointing, f"{o.micro} x {o.micro_batches}", o.bytes / GIB, "yes" if o.fits else "no",
         f"{sum(o.flop.values()) / pair:.4g}", f"{o.pairs_per_second:,.0f}", f"{o.days:.2f}", f"{o.gpu_hours:,.0f}")
        for o in options
    ]  # fmt: skip
    header = f"parallel|checkpointing|micro-batches|GiB of {room:g}|fits|GFLOP a pair|pairs/s|days|GPU hours"

    def parts(name: str, unit: str, of: dict[str, float], one: float) -> Table:
        cells = {**of, "total": sum(of.values())}
        return Table([(part, value / one) for part, value in cells.items() if value], (name, unit))

    say(f"{planner.parameters / 1e6:.2f} million parameters")
    say_blocks(
        [
            parts(f"a pair, captions {planner.captions} x {planner.tokens:g} tokens", "GFLOP", best.flop, pair),
            parts(f"memory of a GPU: {best}", "GiB", best.memory, GIB),
            Table(cost, (f"zero-shot among {CLASSES:,} classes", "GFLOP", "ms")),
            Table(rows, header.split("|")),
        ]
    )
    if plan.json is not None:
        named = {"method": planner.method.name, "size": recipe.size, "gpus": plan.gpus, "gpu": plan.gpu}
        named |= {"batch": recipe.batch, "samples": plan.samples, "utilisation": plan.utilisation}
        named |= {name: getattr(planner, name) for name in ("tokens", "captions", "parameters", "inference")}
        write_json(plan.json, {**named, "options": [asdict(o) for o in options]})
    if not best.fits:
        raise ValueError(
            f"nothing fits: {best} takes {best.bytes / GIB:.1f} GiB of {room:g}. Take more --gpus (fsdp divides "
            "weights over them), a smaller --batch or --micro, or a larger --gpu."
        )
