"""What a real step costs: counted FLOPs, bytes of real tensors, saved activations; and the plan of the same step."""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from kiloword.apps.plan.options import Plan
from kiloword.apps.plan.planner import Planner
from kiloword.apps.plan.simulation import FORMULAS
from kiloword.config import recipes
from kiloword.config.options import Checkpointing
from kiloword.config.recipes import ModelConfig, OptimConfig, Recipe
from kiloword.distributed.device import precision_of
from kiloword.methods.defaults import default_recipe
from kiloword.methods.method import Method
from kiloword.models.build import build
from kiloword.training.engine import recompute
from kiloword.training.optimizer import Optimizer
from kiloword.training.step import Learner, backward
from kiloword.types import Batch, BatchInputs, Input, TextGroup, Texts

TEACHER = 16  # width of made-up precomputed features


@dataclass(frozen=True)
class Case:
    """A configuration that is planned and measured."""

    method: str
    size: str
    images: int
    captions: int = 1
    micro_batches: int = 1
    checkpointing: Checkpointing = "none"
    precision: str = "fp32"

    @property
    def label(self) -> str:
        more = [f"{self.captions} captions"] if self.captions > 1 else []
        more += [f"{self.micro_batches} micro-batches"] if self.micro_batches > 1 else []
        more += [f"checkpointing {self.checkpointing}"] if self.checkpointing != "none" else []
        return ", ".join([f"{self.method} {self.size} x {self.images}", self.precision, *more])


CASES = (
    Case("siglip", "tiny", 32, micro_batches=4),
    Case("llip", "tiny", 32, checkpointing="whole"),
    Case("prolip", "tiny", 32),
    Case("sycoca", "tiny", 16, captions=2),
    Case("siglip", "b32", 4),
)


def method_of(name: str) -> Method:
    """A preset with its defaults; nothing is validated, so that pydantic need not be installed."""
    from kiloword.methods.registry import find

    make, kind = find(name)
    return make() if kind is None else make(kind())


def batch_of(config: ModelConfig, images: int, captions: int, method: Method | None = None, seed: int = 0) -> Batch:
    """Noise with captions of 8 to 20 tokens, start and end included, and the method's own behind them."""
    rng, size, numbers = np.random.default_rng(seed), config.image.size, torch.arange(images)
    needs, inputs = ((), {}) if method is None else (method.needs, method.inputs)
    teachers = [name for name in needs if name not in ("questions", "truth")]
    return Batch(
        images=_pixels(rng, (images, 3, size, size)),
        texts=_captions(rng, config, images * captions),
        image_of_text=numbers.repeat_interleave(captions),
        seeds=numbers,
        position=numbers,
        composed=torch.zeros(images, dtype=torch.bool),
        image_features={f"{name}{end}": _noise(rng, images) for name in teachers for end in ("", ".texts")},
        text_features={name: _noise(rng, images * captions) for name in teachers},
        questions=_captions(rng, config, images) if "questions" in needs else None,
        inputs=BatchInputs({name: _input(rng, one, config, images) for name, one in inputs.items()}),
    )


def _captions(rng: np.random.Generator, config: ModelConfig, count: int) -> Texts:
    text = config.text
    words, tail = max(text.special.values()) + 1, [text.special["end"], *(text.special[x] for x in text.extra_tokens)]
    lengths = rng.integers(8, 21, count)
    return Texts.pack(
        [[text.special["start"], *rng.integers(words, text.vocab, n - 2).tolist(), *tail] for n in lengths]
    )


def _pixels(rng: np.random.Generator, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(rng.integers(0, 256, shape, dtype=np.uint8))


def _input(rng: np.random.Generator, one: Input, config: ModelConfig, images: int) -> Tensor | TextGroup:
    """An input of the method: noise in its shape, or a text for every image."""
    if one.shape is not None:
        return _pixels(rng, (images, *one.shape(config)))
    return TextGroup(_captions(rng, config, images), torch.arange(images))


def _noise(rng: np.random.Generator, rows: int) -> Tensor:
    return torch.from_numpy(rng.normal(size=(rows, TEACHER)).astype(np.float32))


class Measured:
    """A real learner, its optimizer and a batch."""

    def __init__(self, case: Case, device: str = "cpu", optim: OptimConfig | None = None) -> None:
        self.case, self.device, self.method = case, device, method_of(case.method)
        self.config = recipes.sizes()[case.size]
        self.optim = optim or default_recipe("", case.size).optim
        model = build(self.config, self.method)
        recompute(model, case.checkpointing)
        self.learner = Learner(model, self.method).to(device)
        self.batch = batch_of(model.config, case.images, case.captions, self.method).to(device)
        self.optimizer = Optimizer(self.learner, self.optim, 10)
        self.precision = precision_of(case.precision, device)

    def run(self) -> None:
        backward(self.learner, self.batch.split(self.case.micro_batches), self.precision)

    def flops(self) -> float:
        """Of a forward and backward pass, by torch's counter with formulas for what it does not know."""
        self.optimizer.zero_grad()
        with FlopCounterMode(
            display=False, custom_mapping={op: inspect.unwrap(FORMULAS[op]) for op in FORMULAS}
        ) as counter:
            self.run()
        self.optimizer.zero_grad()
        return float(counter.get_total_flops())

    def held(self) -> dict[str, int]:
        """Bytes of weights and optimizer states after a real step."""
        self.run()
        found = {"weights": _bytes(self.learner.parameters())}
        self.optimizer.step(0)
        found["optimizer"] = _bytes(self.optimizer.state_dict().values())
        return found

    def peak(self) -> int:
        """Bytes that a GPU holds at most in a step that is not the first."""
        for n in range(2):
            torch.cuda.reset_peak_memory_stats()
            self.run()
            self.optimizer.step(n)
        return torch.cuda.max_memory_allocated()

    def activations(self) -> int:
        """Bytes that wait for the backward pass of one micro-batch: storages of saved tensors that are still there."""
        own = {p.untyped_storage().data_ptr() for p in self.learner.parameters()}
        own |= {b.untyped_storage().data_ptr() for b in self.learner.buffers()}
        gc.collect()
        own |= {x.untyped_storage().data_ptr() for x in _objects()}
        piece = self.batch.split(self.case.micro_batches)[0]
        counts, saved = self.learner.counts([piece]), list[weakref.ReferenceType[Tensor]]()

        def keep(x: Tensor) -> Tensor:
            x = x.detach()  # a result that its own graph holds would keep that graph for ever
            saved.append(weakref.ref(x))
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x), self.precision():
            out = self.learner(piece, counts)
        alive = [x for ref in saved if (x := ref()) is not None]
        if self.case.checkpointing == "selective":  # products are cached beside the graph, where no hook sees them
            alive += _objects()
        storages = [x.untyped_storage() for x in alive]
        del out
        return sum({s.data_ptr(): s.nbytes() for s in storages if s.data_ptr() not in own}.values())


def _objects() -> list[Tensor]:
    """Tensors that Python knows of, parameters left out."""
    return [x for x in gc.get_objects() if type(x) is Tensor]


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


class OfBatch(Planner):
    """Plans the step of a batch that is given."""

    given: Batch

    def batch(self, images: int) -> Batch:
        """The first images of the batch; images and precomputed features have no content."""
        part, empty = self.given.split(len(self.given) // images)[0].to("cpu"), self.empty
        features = [
            {name: empty(*x.shape) for name, x in side.items()} for side in (part.image_features, part.text_features)
        ]
        images = empty(*part.images.shape, dtype=torch.uint8)
        return replace(part, images=images, image_features=features[0], text_features=features[1])


def planned(real: Measured) -> dict[str, float]:
    """The same figures by the plan, and with "peak" all that a GPU holds but the allowances."""
    case = real.case
    recipe = Recipe(method=case.method, model=real.config, optim=real.optim, batch=case.images)
    recipe = replace(recipe, precision="bf16" if case.precision == "bf16" else "fp32")
    planner = OfBatch(Plan(gpu="cpu" if real.device == "cpu" else "h200"), recipe, real.method)
    planner.given = real.batch
    option = planner.option("ddp", case.checkpointing, case.micro_batches)
    return {
        "flops": sum(option.flop.values()) - option.flop["optimizer"],
        "weights": option.memory["weights"],
        "optimizer": option.memory["optimizer states"],
        "activations": option.memory["activations"],
        "peak": sum(value for name, value in option.memory.items() if not name.startswith("allowance")),
    }


def compare(case: Case, device: str = "cpu") -> dict[str, tuple[float, float]]:
    """Figure -> planned, measured."""
    real = Measured(case, device)
    plan, found = planned(real), {"activations": float(real.activations())}
    if device == "cpu":
        found["flops"] = real.flops()
    found |= real.held()
    if device != "cpu":
        found["peak"] = float(real.peak())
    return {name: (plan[name], found[name]) for name in plan if name in found}
