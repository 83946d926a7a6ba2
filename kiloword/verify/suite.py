"""The conformity suite: properties that must hold for every method. Used by tests, and by users for custom methods.

The gradient of a batch must not depend on its partition: ranks, micro-batches, blocks of pairs, order of samples.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor
from torch.multiprocessing.spawn import start_processes

from kiloword.config.options import Checkpointing, Parallel
from kiloword.config.recipes import DataConfig, ModelFile
from kiloword.data.loader import Loader
from kiloword.data.open import open_source
from kiloword.data.sampler import Order
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.distributed import collectives as parallel, launch
from kiloword.methods.defaults import MUON
from kiloword.model.model import initialise
from kiloword.model.resnet import Bottleneck
from kiloword.model.trunks.trunk import trunks as trunks_of
from kiloword.models.build import build
from kiloword.models.model_folder import load_model, save_model
from kiloword.models.trust import Trust
from kiloword.training import engine
from kiloword.training.optimizer import Optimizer
from kiloword.training.step import Learner, backward
from kiloword.types import Batch, TextGroup
from kiloword.verify.batch import IMAGES, Chosen, Trunks, batch, config, slots_of

ALONE, FALLS = 40, 0.9  # steps of the pair loss and of each term and contrast alone, and the share that may be left
NEARBY, SLOPE = 3e-5, 1e-4  # how far along the gradient the loss is taken, and the relative error of its slope there
EXACT = 1e-10  # of the largest gradient, in fp64
ROWS = 64  # of the scenes that are loaded
PATIENCE_S = 300  # that processes on a machine with other work wait for each other


@dataclass(frozen=True)
class Check:
    """One property: what was measured, and what it may be at most."""

    name: str
    value: float
    limit: float
    where: str = ""  # the failure is: names of tensors

    @property
    def passed(self) -> bool:
        return self.value <= self.limit  # False for NaN


def compare(name: str, measured: dict[str, Tensor], reference: dict[str, Tensor]) -> Check:
    """The largest difference, relative to the largest gradient (losses and states: to themselves)."""
    if others := sorted(measured.keys() ^ reference.keys()):
        return Check(f"{name}: other parameters have gradients", float("inf"), EXACT, ", ".join(others[:3]))
    largest = max(float(g.abs().max()) for n, g in reference.items() if ":" not in n)
    errors = {
        n: float((measured[n] - g).abs().max()) / (max(float(g.abs().max()), 1e-12) if ":" in n else largest)
        for n, g in reference.items()
    }
    worst = max(errors, key=lambda n: (math.isnan(errors[n]), errors[n]))
    return Check(name, errors[worst], EXACT, f"largest in {worst}")


@dataclass(frozen=True)
class Way:
    """One of the ways to the same gradient."""

    parallel: Parallel = "ddp"
    micro: int = 1
    checkpointing: Checkpointing = "none"
    chunk: int = 0

    def __str__(self) -> str:
        saved = "" if self.checkpointing == "none" else f", {self.checkpointing} checkpointing"
        return f"{self.parallel}, {self.micro} micro-batch{'es' if self.micro > 1 else ''}{saved}"


def verify(method: Chosen, ranks: Sequence[int] = (1, 2, 4), trunks: Trunks = "none") -> Iterator[Check]:
    """All checks of a preset or of a user's "module:preset", each as soon as it is done."""
    slots, made = slots_of(method), partial(gradients, method, trunks=trunks)
    yield _without_gradient(method, trunks)
    reference = made()
    yield (repeated := compare("the same step again", made(), reference))
    if not repeated.passed:  # a loss draws from a global generator: nothing can be compared
        return
    if trunks != "tuned":  # a trunk's ReLUs get exact zeros: no derivative
        yield _slope(method, trunks)
    if slots.transforms or slots.inputs:
        yield Check("bytes of a batch that are made otherwise on other ranks or workers", made_otherwise(method), 0)
    if trunks == "cached":
        yield compare("images through the frozen trunks", gradients(method, trunks="frozen"), reference)
    yield from _additive(method, trunks)
    splits = slots.shape(config(trunks, method)).image.tower == "vit"  # batch norm refuses micro-batches
    parts = (1, 4) if splits else (1,)
    for micro in (2, 4) if splits else ():
        yield compare(f"{micro} micro-batches", made(Way(micro=micro)), reference)
    for chunk in (3, 7):
        yield compare(f"blocks of {chunk} x {chunk} pairs", made(Way(chunk=chunk)), reference)
    yield compare("samples in another order", made(permute=True), reference)
    for kind in ("whole", "selective"):
        yield compare(f"{kind} checkpointing", made(Way(checkpointing=kind)), reference)
    ways = [Way(way, n, saved) for way in get_args(Parallel) for n in parts for saved in ("none", "whole")]
    for n in (n for n in ranks if n > 1):  # gloo processes on this machine
        with tempfile.TemporaryDirectory() as folder:
            over_ranks(n, _save_gradients, method, ways, Path(folder, "gradients"), trunks)
            found = torch.load(Path(folder, "gradients"), weights_only=True)
        for way, measured in zip(ways, found, strict=True):
            yield compare(f"{n} ranks, {way}", measured, reference)
    yield Check("score after save and load", _save_and_load(method, trunks), 0)
    yield Check("bf16 against fp32: 1 - cosine of gradients", _bf16(method, trunks), 0.02)
    for name in (*["pair"] * bool(slots.pair_weight), *((*slots.terms, *slots.contrasts) if trunks == "none" else ())):
        yield _alone(method, name, trunks)


def learner(method: Chosen, chunk: int = 0, dtype: torch.dtype = torch.float64, trunks: Trunks = "none") -> Learner:
    """A method on the small model of the suite, its parameters drawn from seed 0."""
    slots = slots_of(method)
    made = Learner(build(config(trunks, method), slots), slots, chunk)
    initialise(made.terms, 0, "terms.")
    initialise(made.contrasts, 0, "contrasts.")
    for trunk in trunks_of(made):
        trunk.requires_grad_(trunks == "tuned")
    for part in made.modules():
        if isinstance(part, Bottleneck):  # starts as its shortcut, without gradients inside
            part.bn3.weight.data.fill_(0.3)
    made.to(dtype).done = 0.5  # where weights that rise or fall over the run are above 0
    made.after_step(0)
    return made


def inputs(model: Learner, data: Batch, trunks: Trunks) -> Batch:
    """The batch as it reaches training: images and texts, or their trunks' tokens."""
    with torch.no_grad():
        return model.above_trunks(data) if trunks == "cached" else data


def gradients(method: Chosen, way: Way = Way(), permute: bool = False, trunks: Trunks = "none") -> dict[str, Tensor]:
    """The gradient of every parameter in fp64, and the losses as "loss:NAME"; of ranks, each works on its share."""
    order = [(7 * row + 3) % IMAGES if permute else row for row in range(IMAGES)]
    share, rank = IMAGES // parallel.ranks(), parallel.rank()
    model = learner(method, way.chunk, trunks=trunks)
    data = inputs(model, batch(rank * share, (rank + 1) * share, order, method, trunks), trunks)
    engine.recompute(model.model, way.checkpointing)
    if way.parallel == "fsdp":
        engine.shard(model)
    report = backward(model, data.split(way.micro), reducer=engine.replicated(model))
    measured = {name: parallel.whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return {**measured, **{f"loss:{name}": value for name, value in report.items()}, **_state(model)}


def _state(model: Learner) -> dict[str, Tensor]:
    """What `after_step` leaves after a step in the contrasts and terms, as "state:NAME"."""
    model.after_step(1)
    parts = ((f"state:{name}", getattr(model, name)) for name in ("terms", "contrasts"))
    values = (pair for name, part in parts for pair in (*part.named_parameters(name), *part.named_buffers(name)))
    return {n: x.detach().clone() for n, x in values if not x.requires_grad}


def _save_gradients(method: Chosen, ways: Sequence[Way], path: Path, trunks: Trunks) -> None:
    found = [gradients(method, way, trunks=trunks) for way in ways]
    if parallel.rank() == 0:
        torch.save(found, path)


def over_ranks(ranks: int, work: Callable[..., None], *args: Any) -> None:
    """Call `work(*args)` in gloo processes on this machine, and wait for all.

    The processes are forks of a server process that imports this module once; each call would import it `ranks` times.
    """
    get_context("forkserver").set_forkserver_preload([__name__, "torch._dynamo", "pydantic"])
    os.environ.setdefault(launch.TORCH_LOG, "ERROR")  # read by the server as it imports torch, not by its forks
    start_processes(  # type: ignore[no-untyped-call]
        _rank, (ranks, launch.free_port(), dict(os.environ), work, args), nprocs=ranks, start_method="forkserver"
    )


def _rank(
    rank: int, ranks: int, port: int, environment: dict[str, str], work: Callable[..., None], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    os.environ |= environment | launch.announced(rank, ranks, port)
    with parallel.process_group(timeout_s=PATIENCE_S):
        work(*args)


def _ready(method: Chosen, trunks: Trunks, dtype: torch.dtype = torch.float64) -> tuple[Learner, Batch]:
    """A learner and the suite's batch."""
    model = learner(method, dtype=dtype, trunks=trunks)
    return model, inputs(model, batch(method=method, trunks=trunks), trunks)


def _without_gradient(method: Chosen, trunks: Trunks) -> Check:
    """Parameters without a gradient, or with rounding errors alone (a bias that softmax cancels)."""
    model, data = _ready(method, trunks)
    backward(model, [data])
    if trunks != "none" and model.model.config.text.trunk.name:  # vectors of extra tokens, which few methods have
        model.model.text_tower.tokens.requires_grad_(False)
    learned = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    measured = {name: 0.0 if g is None else float(g.abs().max()) for name, g in learned.items()}
    without = [name for name, g in measured.items() if g <= EXACT * max(measured.values())]
    return Check("parameters without a gradient", len(without), 0, ", ".join(without[:3]))


def _slope(method: Chosen, trunks: Trunks) -> Check:
    """The slope of the loss along its gradient, by the losses on both sides, against the gradient's norm."""
    model, data = _ready(method, trunks)
    backward(model, [data])
    gradients = [(p, p.grad.clone()) for p in model.parameters() if p.grad is not None]
    norm = torch.stack([g.square().sum() for _, g in gradients]).sum().sqrt()

    def moved(distance: float) -> Tensor:
        with torch.no_grad():
            for p, g in gradients:
                p.add_(g / norm * distance)
        return backward(model, [data])["loss"]

    ahead, behind = moved(NEARBY), moved(-2 * NEARBY)
    error = (ahead - behind) / (2 * NEARBY) / norm - 1
    return Check("slope of the loss along its gradient", float(error.abs()), SLOPE)


def made_otherwise(method: Chosen) -> float:
    """Bytes that differ between a batch of scenes made on one rank, and on two ranks with a worker."""
    source, text, slots = open_source(f"scenes:train?n={ROWS}", 32), config().text, slots_of(method)
    tokenizer = Tokenizer.train([c for row in range(ROWS) for c in source.record(row).captions], 500)

    def loaded(rank: int, ranks: int, workers: int) -> list[Tensor]:
        made: dict[str, Any] = {"transforms": slots.transforms, "inputs": slots.inputs, "rank": rank, "ranks": ranks}
        order = Order(ROWS, IMAGES, 0)
        loader = Loader(source, order, DataConfig(), text, 32, tokenizer, workers=workers, **made)
        batch = next(loader.batches(1, 2))
        groups = (value.texts.ids if isinstance(value, TextGroup) else value for value in batch.inputs.values())
        return [batch.images, batch.texts.ids, *groups]

    joined = [torch.cat(parts) for parts in zip(loaded(0, 2, 1), loaded(1, 2, 1), strict=True)]
    pairs = zip(joined, loaded(0, 1, 0), strict=True)
    return float(sum((a != b).sum() if a.shape == b.shape else float("inf") for a, b in pairs))


@torch.no_grad()
def _additive(method: Chosen, trunks: Trunks) -> Iterator[Check]:
    """For each term: its sums and counts over the parts of a batch, compared with those of the whole batch."""
    model = learner(method, trunks=trunks)
    whole = model.above_trunks(batch(method=method, trunks=trunks))  # terms see what `Learner.forward` passes on
    parts = [whole, *whole.split(4)]
    for name, term in model.terms.items():
        run: Any = term
        measured = torch.stack(
            [torch.stack([run(model.model, b, model.encode(b)), torch.as_tensor(run.count(b))]) for b in parts]
        )
        errors = (measured[1:].sum(0) - measured[0]).abs() / measured[1:].abs().sum(0).clamp_min(1e-12)
        yield Check(f"term {name}: sum over the parts of a batch", float(errors.max()), EXACT)


def _save_and_load(method: Chosen, trunks: Trunks) -> float:
    """Largest change of a score."""
    trained, data = _ready(method, trunks, torch.float32)
    model = trained.model.eval()
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        name, settings = (method, None) if isinstance(method, str) else method
        tokenizer = Tokenizer.train(["a small red star", "two blue circles"], 300)
        file = ModelFile(method=name, settings=settings or {}, model=model.config, size="debug")
        save_model(Path(folder), model, tokenizer, file)
        loaded, _ = load_model(folder, trust=Trust(named=name))
        a, b = (m.score(m.image_features(data.images), m.encode_text(data.texts)[1]) for m in (model, loaded.eval()))
    return float((a - b).abs().max())


def _bf16(method: Chosen, trunks: Trunks) -> float:
    """1 - cosine between the gradients of a step under bf16 autocast and in fp32."""
    measured = []
    for on in (False, True):
        model, data = _ready(method, trunks, torch.float32)
        backward(model, [data], partial(torch.autocast, "cpu", torch.bfloat16, on))
        measured.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    return 1 - float(torch.nn.functional.cosine_similarity(measured[0], measured[1], dim=0))


def _alone(method: Chosen, name: str, trunks: Trunks) -> Check:
    """Train the pair loss, a term or a contrast alone: it must fall, and in the right direction.

    The mean score of matching pairs must gain on the mean of all pairs. A term or a contrast must stay above 0, which
    its negative would not.
    """
    model, data = _ready(method, trunks, torch.float32)
    slots = model.method
    model.method = replace(
        slots,
        pair_weight=lambda _: float(name == "pair"),  # a number would freeze the head
        terms={n: (float(n == name), make) for n, (_, make) in slots.terms.items()},
        contrasts={n: (float(n == name), make) for n, (_, make) in slots.contrasts.items()},
    )
    optimizer, losses = Optimizer(model, replace(MUON, lr=4e-3, muon_lr=0.02, warmup=0.1), ALONE), list[float]()
    before = _lead(model, data)
    for step in range(ALONE):
        losses.append(float(backward(model, [data])[name]))
        optimizer.step(step)
        model.clamp_()
    left, wrong = 1 - (losses[0] - losses[-1]) / abs(losses[0]), ""
    if name == "pair" and _lead(model, data) <= before:
        left, wrong = math.inf, "scores of pairs that match do not rise over others"
    elif name != "pair" and min(losses) < 0:
        left, wrong = math.inf, f"it fell to {min(losses):.3g}, below 0"
    return Check(f"{name} alone: loss left after {ALONE} steps", left, FALLS, wrong)


@torch.no_grad()
def _lead(model: Learner, data: Batch) -> float:
    """Mean score of the matching pairs, less the mean score of all pairs."""
    encoded = model.encode(data)
    scores = model.model.head.score(encoded.images, encoded.texts)
    matched = scores[data.image_of_text, torch.arange(len(data.image_of_text))]
    return float(matched.mean() - scores.mean())
