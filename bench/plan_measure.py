"""What a real step costs: counted FLOPs, bytes of real tensors, what backward waits for. The plan's judge."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from kiloword.config import recipes
from kiloword.config.options import Checkpointing
from kiloword.config.recipes import ModelConfig, OptimConfig
from kiloword.distributed.device import precision_of
from kiloword.methods.defaults import default_recipe
from kiloword.methods.method import Method
from kiloword.model.model import build
from kiloword.planning import memory, parameters, step
from kiloword.planning.shapes import Kernels, Lengths, Load
from kiloword.training.accumulate import backward
from kiloword.training.compilation import recompute
from kiloword.training.learner import Learner, learner_of
from kiloword.training.optimizer import Optimizer
from kiloword.types import Batch, Texts

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


def batch_of(config: ModelConfig, images: int, captions: int, needs: tuple[str, ...] = (), seed: int = 0) -> Batch:
    """Noise with captions of 8 to 20 tokens, start and end included, and the method's own behind them."""
    rng, text, size = np.random.default_rng(seed), config.text, config.image.size
    words, numbers = max(text.special.values()) + 1, torch.arange(images)
    tail = [text.special["end"], *(text.special[name] for name in text.extra_tokens)]
    lengths = rng.integers(8, 21, images * captions)
    sequences = [[text.special["start"], *rng.integers(words, text.vocab, n - 2).tolist(), *tail] for n in lengths]
    teachers = [name for name in needs if name not in ("questions", "truth")]
    asked = [[text.special["start"], *rng.integers(words, text.vocab, 9).tolist()] for _ in range(images)]
    return Batch(
        images=torch.from_numpy(rng.integers(0, 256, (images, 3, size, size), dtype=np.uint8)),
        texts=Texts.pack(sequences),
        image_of_text=numbers.repeat_interleave(captions),
        seeds=numbers,
        position=numbers,
        composed=torch.zeros(images, dtype=torch.bool),
        image_features={f"{name}{end}": _noise(rng, images) for name in teachers for end in ("", ".texts")},
        text_features={name: _noise(rng, images * captions) for name in teachers},
        questions=Texts.pack(asked) if "questions" in needs else None,
    )


def _noise(rng: np.random.Generator, rows: int) -> Tensor:
    return torch.from_numpy(rng.normal(size=(rows, TEACHER)).astype(np.float32))


def load_of(batch: Batch, kernels: Kernels, captions: int) -> Load:
    """A batch as the plan sees it."""
    lengths = batch.texts.starts.diff().view(-1, captions).sum(1)
    questions = None if batch.questions is None else Lengths.of(batch.questions)
    return Load(len(batch), Lengths.of(batch.texts, int(lengths.max())), kernels, captions, questions)


class Measured:
    """A real learner, its optimizer and a batch."""

    def __init__(self, case: Case, device: str = "cpu", optim: OptimConfig | None = None) -> None:
        self.case, self.device, self.method = case, device, method_of(case.method)
        self.config = recipes.sizes()[case.size]
        self.optim = optim or default_recipe("", case.size).optim
        model = build(self.config, self.method)
        recompute(model, case.checkpointing)
        self.learner = Learner(model, self.method).to(device)
        self.batch = batch_of(model.config, case.images, case.captions, self.method.needs).to(device)
        self.optimizer = Optimizer(self.learner, self.optim, 10)
        self.precision = precision_of(case.precision, device)

    def run(self) -> None:
        backward(self.learner, self.batch.split(self.case.micro_batches), self.precision)

    def flops(self) -> float:
        """Of a forward and backward pass, by torch's counter; attention by plain products, which it counts."""
        self.optimizer.zero_grad()
        counter = FlopCounterMode(display=False)
        with counter, sdpa_kernel(SDPBackend.MATH):
            self.run()
        self.optimizer.zero_grad()
        return float(counter.get_total_flops())

    def held(self) -> dict[str, int]:
        """Bytes of weights, gradients and optimizer states after a real step."""
        self.run()
        found = {"weights": _bytes(self.learner.parameters())}
        found["gradients"] = _bytes(p.grad for p in self.learner.parameters() if p.grad is not None)
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


def planned(measured: Measured) -> dict[str, float]:
    """The same figures by the plan's formulas, and with "peak" all that a GPU holds but the allowances."""
    case, device = measured.case, "cuda" if measured.device.startswith("cuda") else "cpu"
    learner = learner_of(measured.config, measured.method)
    kernels = Kernels.of(case.precision, device == "cuda")
    share, teacher = load_of(measured.batch, kernels, case.captions), TEACHER if measured.method.needs else 0
    texts = share.texts.texts
    found = step.step_of(learner, share, case.micro_batches, texts, case.checkpointing, device, teacher=teacher)
    held = parameters.bytes_of(learner, measured.optim, case.precision)
    first = load_of(measured.batch.split(case.micro_batches)[0], kernels, case.captions)
    layout = memory.Layout(1, "ddp", case.checkpointing, case.micro_batches)
    parts = memory.memory(learner, measured.optim, case.precision, share, layout, texts, device, teacher=teacher)
    kept = memory.activations(learner, first, case.checkpointing)
    return {
        "flops": found.total,
        "weights": held.weights,
        "gradients": held.gradients,
        "optimizer": held.optimizer,
        "activations": kept + memory.half_copies(learner, case.precision, case.checkpointing, sharded=False),
        "peak": sum(value for name, value in parts.items() if not name.startswith("allowance")),
    }


def compare(case: Case, device: str = "cpu") -> dict[str, tuple[float, float]]:
    """Figure -> planned, measured."""
    real = Measured(case, device)
    plan, found = planned(real), {"activations": float(real.activations())}
    if device == "cpu":  # the counter does not know the GPU's attention over packed texts
        found["flops"] = real.flops()
    found |= real.held()
    if device != "cpu":
        found["peak"] = float(real.peak())
    return {name: (plan[name], found[name]) for name in plan if name in found}
