"""`--compile cudagraphs` without a card: a stand-in overwrites what the image tower returned, as a CUDA graph does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kiloword.cli.main import main
from kiloword.config.options import RunOptions
from kiloword.config.recipes import OptimConfig, Recipe
from kiloword.training import compilation, setup
from kiloword.training.accumulate import backward
from kiloword.training.learner import Learner
from kiloword.training.optimizer import Optimizer
from kiloword.verify.batch import batch
from kiloword.verify.suite import learner

IMAGES = 6


class Graph:
    """A module's forward and backward pass whose results and saved activations always lie in the same memory."""

    def __init__(self, forward: Any) -> None:
        self.forward, self.weights, self.passes = forward, list(forward.__self__.parameters()), 0
        self.memory: dict[int, Tensor] = {}
        self.saved: Tensor | None = None

    def __call__(self, images: Tensor) -> Tensor:
        self.passes += 1
        out: Tensor = Pass.apply(self, images, *self.weights)  # type: ignore[no-untyped-call]
        return out

    def keep(self, place: int, x: Tensor) -> Tensor:
        return self.memory.setdefault(place, torch.empty_like(x)).copy_(x).detach()

    def free(self) -> None:
        for x in self.memory.values():
            x.fill_(torch.nan)
        self.saved = None


class Pass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graph: Graph, images: Tensor, *weights: Tensor) -> Tensor:
        ctx.graph = graph
        with torch.enable_grad():
            graph.saved = graph.forward(images)
        return graph.keep(-1, graph.saved.detach())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        graph = ctx.graph
        found = torch.autograd.grad(graph.saved, graph.weights, gradient, allow_unused=True)
        return None, None, *(None if g is None else graph.keep(n, g) for n, g in enumerate(found))


class Compiler:
    """`torch.compile` and the mark of a step: what was compiled how, and how often what ran."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.given: dict[str, list[dict[str, Any]]] = {}
        self.graphs: list[Graph] = []
        self.marks = self.others = 0
        monkeypatch.setattr(torch, "compile", self.compile)
        monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", self.mark)

    def compile(self, forward: Any, **given: Any) -> Callable[..., Tensor]:
        tower = type(forward.__self__).__name__
        self.given.setdefault(tower, []).append(given)
        if given.get("mode") == "reduce-overhead":
            self.graphs.append(Graph(forward))
            return self.graphs[-1]

        def run(*args: Any, **named: Any) -> Tensor:
            self.others += tower == "ImageTower"
            out: Tensor = forward(*args, **named)
            return out

        return run

    def mark(self) -> None:
        self.marks += 1
        for graph in self.graphs:
            graph.free()


def made(method: str) -> Learner:
    found = learner(method)
    setup.spread(found, Recipe(method=method, batch=IMAGES), RunOptions(compile="cudagraphs"))
    return found


@pytest.mark.parametrize(("method", "others"), [("clip", 0), ("llip", 0), ("prolip", 3), ("coca", 0), ("sycoca", 6)])
def test_three_steps_are_those_of_a_run_without_graphs(
    method: str, others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though every replay overwrites what the last one returned. Masked passes are not replayed."""
    compiler, plain = Compiler(monkeypatch), learner(method)
    compiled = made(method)
    for model in (plain, compiled):
        optimizer = Optimizer(model, OptimConfig(lr=1e-3), 10)
        for step in range(3):
            report = backward(model, [batch(0, IMAGES, method=method)])
            assert model is plain or others or shared(model, compiler.graphs[0])  # sums have memory of their own
            report |= optimizer.step(step, report["loss"])
    assert (compiler.marks, compiler.graphs[0].passes, compiler.others) == (3, 3, others)
    for (name, p), q in zip(plain.named_parameters(), compiled.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=0, atol=1e-9), name


def shared(model: Learner, graph: Graph) -> bool:
    """Whether gradients lie where the next replay writes."""
    places = {x.data_ptr() for x in graph.memory.values()}
    gradients = [p.grad for p in model.model.image_tower.parameters() if p.grad is not None]
    return any(g.data_ptr() in places for g in gradients)


def test_two_micro_batches_would_lose_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    Compiler(monkeypatch)
    plain, compiled = learner("siglip"), made("siglip")
    for model in (plain, compiled):
        backward(model, [batch(0, IMAGES, method="siglip"), batch(6, 6 + IMAGES, method="siglip")])
    expected, found = (model.model.image_tower.positions.grad for model in (plain, compiled))
    assert expected is not None
    assert found is not None
    assert not torch.allclose(expected, found, rtol=0.1)


def test_one_whole_pass_of_a_training_step_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Compiler(monkeypatch)
    compiled, some = made("clip"), batch(0, IMAGES, method="clip")
    for image_pass in (some.images, some.images[:4]):
        compiled.model.image_tokens(image_pass)  # of no step
    assert (compiler.graphs[0].passes, compiler.others) == (0, 2)
    compiled(batch(0, 4, method="clip"), {})
    with torch.no_grad():
        compiled(some, {})
    assert (compiler.graphs[0].passes, compiler.others) == (0, 4)
    compiled(some, {})
    first = compiled.encode(some).image_tokens  # of the same step
    assert (compiler.graphs[0].passes, compiler.others) == (1, 5)
    assert torch.equal(first, learner("clip").encode(some).image_tokens)


def test_only_the_image_tower_has_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Compiler(monkeypatch)
    made("sycoca")
    modes = {tower: [given.get("mode") for given in all_given] for tower, all_given in compiler.given.items()}
    assert modes.pop("ImageTower") == [None, "reduce-overhead"]
    assert set(modes) == {"TextTower", "TextDecoder", "ImageDecoder"}
    assert set(map(tuple, modes.values())) == {(None,)}
    assert compiler.given["ImageTower"][1]["dynamic"] is False


@pytest.mark.parametrize(
    ("options", "micro_batches", "device", "message"),
    [
        ({}, 1, "cpu", "needs a CUDA device, but the device is cpu: use towers."),
        ({}, 2, "cuda", r"excludes 2 micro-batches \(--micro\): use another --compile, or omit these."),
        (
            {"checkpointing": "whole", "parallel": "fsdp"},
            1,
            "cuda:0",
            "excludes --checkpointing whole, --parallel fsdp: use another --compile",
        ),
    ],
)
def test_what_a_graph_cannot_do_is_refused(
    options: dict[str, Any], micro_batches: int, device: str, message: str
) -> None:
    with pytest.raises(ValueError, match=f"--compile cudagraphs {message}"):
        compilation.check_graphs(RunOptions(compile="cudagraphs", **options), micro_batches, device)
    compilation.check_graphs(RunOptions(compile="cudagraphs"), 1, "cuda")
    compilation.check_graphs(RunOptions(**options), micro_batches, device)


@pytest.mark.parametrize("more", [["--dry-run"], []])
def test_a_run_without_a_card_is_refused(more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "clip", "--size", "debug", "--data", "scenes?n=8", "--batch", "8", "--steps", "1"]
    with pytest.raises(SystemExit, match="2"):
        main([*words, "--device", "cpu", "--out", f"{tmp_path / 'run'}", "--compile", "cudagraphs", *more])
    assert "--compile cudagraphs needs a CUDA device" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
