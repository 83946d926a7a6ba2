"""What a CUDA device changes, on machines without one: kernels and devices are stand-ins."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import varlen

from kiloword.config.options import Compile, RunOptions
from kiloword.config.recipes import Recipe, sizes
from kiloword.distributed import by_device, launch
from kiloword.distributed.device import choose, simulated
from kiloword.methods.defaults import default_recipe
from kiloword.model.attention import attention
from kiloword.randomness import key
from kiloword.training import engine
from kiloword.training.loop import train
from kiloword.training.step import backward
from kiloword.verify.batch import batch
from kiloword.verify.suite import learner
from literal import made, pairs


def kernel(garbage: float) -> Callable[..., Tensor]:
    """`varlen_attn`, as this project calls it, one sequence after the other.

    As torch's: rows behind the last sequence are never written, in the output and in the gradients.
    """

    def unwritten(x: Tensor, end: int, rows: int) -> Tensor:
        return F.pad(x[:end], (0, 0, 0, 0, 0, rows - end), value=garbage)

    def sequences(x: Tensor, starts: list[int]) -> tuple[Tensor, ...]:
        x = x.view_as(x)
        if x.requires_grad:
            x.register_hook(lambda gradient: unwritten(gradient, starts[-1], len(x)))
        return x.tensor_split(starts[1:])[:-1]

    def stand_in(q: Tensor, k: Tensor, v: Tensor, *lengths: Any, window_size: tuple[int, int]) -> Tensor:
        of_q, of_k = (starts.tolist() for starts in lengths[:2])
        every = zip(sequences(q, of_q), sequences(k, of_k), sequences(v, of_k), strict=True)
        out = torch.cat([attention(*(x[None] for x in one), causal=window_size == (-1, 0))[0] for one in every])
        return unwritten(out, len(out), len(q))

    return stand_in


@pytest.mark.parametrize("method", ["siglip", "sycoca"])
def test_gradients_of_compiled_towers_do_not_depend_on_what_variable_length_kernels_leave_unwritten(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda forward, **_: forward)

    def gradients(half: bool, garbage: float = 0.0) -> dict[str, Tensor]:
        monkeypatch.setattr(varlen, "varlen_attn", kernel(garbage))
        model = learner(method, dtype=torch.float32)
        engine.compile_model(model.model, "blocks")
        with simulated("cuda" if half else "cpu"):
            backward(model, [batch(0, 6, method=method)], partial(torch.autocast, "cpu", torch.bfloat16, half))
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    single, clean, found = gradients(half=False), gradients(half=True), gradients(half=True, garbage=1e3)
    assert found.keys() == clean.keys() == single.keys()
    for name, gradient in found.items():
        assert torch.equal(gradient, clean[name]), name
    a, b = (torch.cat([x.flatten() for x in side.values()]) for side in (single, clean))
    assert float(F.cosine_similarity(a, b, dim=0)) > 0.999


def settled(size: str, device: str, earlier: Recipe | None = None, **given: Any) -> tuple[str, str]:
    recipe = by_device.settle(replace(default_recipe("clip", size), **given), device, earlier)
    return recipe.precision, recipe.matmul


@pytest.mark.parametrize("capability", ["avx512_f", "avx512_bf16", "amx_bf16"])
def test_precision_follows_size_and_device_and_what_is_given_or_was_before(
    monkeypatch: pytest.MonkeyPatch, capability: str
) -> None:
    """On a CPU, that of sizes that train there, if it multiplies in bf16."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, capability: True})
    half = {"tiny", "top"} if "bf16" in capability else set()
    cpu = {size: settled(size, "cpu") for size in sizes()}
    assert cpu == {size: ("bf16" if size in half else "fp32", "highest") for size in sizes()}
    cuda = {size: settled(size, "cuda:1") for size in sizes()}
    assert cuda == {size: ("fp32" if size == "debug" else "bf16", "high") for size in sizes()}
    assert settled("b32", "cuda", precision="fp32", matmul="medium") == ("fp32", "medium")
    assert settled("b32", "cpu", replace(default_recipe("clip"), precision="bf16", matmul="high")) == ("bf16", "high")
    assert settled("b32", "cuda", Recipe(method="clip"), matmul="medium") == ("fp32", "medium")


@pytest.mark.parametrize(
    ("cores", "ranks", "free", "workers"),
    [(16, 1, None, 14), (128, 8, None, 14), (64, 1, None, 16), (2, 1, None, 1), (16, 1, 1800, 2), (16, 1, 64, 0)],
)
def test_workers_follow_cores_and_shared_memory(
    monkeypatch: pytest.MonkeyPatch, cores: int, ranks: int, free: int | None, workers: int
) -> None:
    """A container with 64 MB of shared memory, which a batch would not fit into, trains without workers."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(cores))
    memory = SimpleNamespace(f_bavail=10**9 if free is None else free, f_frsize=1)
    monkeypatch.setattr(os, "statvfs", lambda path: memory)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert by_device.workers_of("auto", "cuda", 25, 2) == workers
    assert by_device.workers_of("auto", "cpu", 25, 2) == 0
    assert by_device.workers_of("auto", "cpu", 25, 2, train=True) == min(max(1, cores // ranks // 2), workers, 16)
    assert by_device.workers_of(3, "cuda", 25, 2) == 3


def test_a_run_keeps_its_precision_and_leaves_torchs_as_it_was(tmp_path: Path) -> None:
    """The same command on another device: what `config.json` says counts."""
    recipe = replace(default_recipe("clip", "debug"), precision="auto", matmul="high", steps=1, batch=8)
    recipe = replace(recipe, data=replace(recipe.data, sources=("scenes?n=8",), tokenizer_vocab=300))
    for options in (RunOptions(), RunOptions(extend=True)):
        train(replace(recipe, steps=1 + options.extend), tmp_path, options=options)
        recipe = replace(recipe, matmul="auto")
        assert torch.get_float32_matmul_precision() == "highest"
    said = json.loads((tmp_path / "config.json").read_text())["recipe"]
    assert (said["precision"], said["matmul"], said["steps"]) == ("fp32", "high", 2)


def test_the_gpus_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several ranks, each takes one: none can be named."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [choose(name) for name in ("cuda", "cuda:1")] == ["cuda", "cuda:1"]
    with pytest.raises(ValueError, match=r"cuda:2.* sees 2 CUDA devices"):
        choose("cuda:2")
    for name, value in launch.announced(0, 2, 1234).items():
        monkeypatch.setenv(name, value)
    assert choose("cuda") == "cuda"
    with pytest.raises(ValueError, match="2 ranks"):
        choose("cuda:1")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler's own
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(
    ("method", "parts", "graphs"),
    [("clip", "towers", 2), ("llip", "towers", 2), ("sycoca", "towers", 8), ("clip", "blocks", 4)],
)
def test_batches_of_any_lengths_need_few_graphs(method: str, parts: Compile, graphs: int) -> None:
    """And none is broken. Of each batch the numbers of tokens, the longest text and masks are others; test_engine has
    the gradients."""
    compiled = made(method)
    engine.compile_model(compiled.model, parts, "aot_eager")
    counters = torch._dynamo.utils.counters
    torch._dynamo.reset()
    counters.clear()
    for n in range(12):
        captions = [[list(range(9, 10 + key(n, row) % (4 + n)))] for row in range(4)]
        compiled.zero_grad()
        backward(compiled, [pairs(compiled.model, captions, n)])
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == graphs
