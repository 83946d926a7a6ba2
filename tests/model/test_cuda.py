"""What a CUDA device changes, on machines without one: kernels and devices are stand-ins."""

from __future__ import annotations

import json
import os
from dataclasses import replace
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
from kiloword.distributed.device import choose
from kiloword.methods.defaults import default_recipe
from kiloword.model import attention, blocks
from kiloword.model.attention import Packing
from kiloword.randomness import key
from kiloword.training import engine
from kiloword.training.loop import train
from kiloword.training.step import Learner, backward
from kiloword.verify.batch import batch
from kiloword.verify.suite import learner
from literal import made, pairs

GARBAGE = 1e3


class Kernel(torch.autograd.Function):
    """As torch's: rows behind the last sequence are never written, in the output and in the gradients."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor, starts_k: Tensor, causal: bool) -> Tensor:
        ctx.save_for_backward(q, k, v, starts_q, starts_k)
        ctx.causal = causal
        return unwritten(each(q, k, v, starts_q, starts_k, causal), q)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, starts = [x.detach().requires_grad_() for x in ctx.saved_tensors[:3]], ctx.saved_tensors[3:]
        with torch.enable_grad():
            out = each(*inputs, *starts, ctx.causal)
        found = torch.autograd.grad(out, inputs, gradient[: len(out)])
        ends = starts[0][-1], starts[1][-1], starts[1][-1]
        return *(unwritten(g[:end], x) for g, end, x in zip(found, ends, inputs, strict=True)), None, None, None


def each(q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor, starts_k: Tensor, causal: bool) -> Tensor:
    """Attention of one sequence after the other."""
    own = [x.tensor_split(starts[1:].tolist())[:-1] for x, starts in ((q, starts_q), (k, starts_k), (v, starts_k))]
    return torch.cat([attention.attention(*(x[None] for x in one), causal=causal)[0] for one in zip(*own, strict=True)])


def unwritten(x: Tensor, like: Tensor) -> Tensor:
    return F.pad(x, (0, 0, 0, 0, 0, len(like) - len(x)), value=GARBAGE)


def stand_in(q: Tensor, k: Tensor, v: Tensor, *lengths: Any, window_size: tuple[int, int]) -> Tensor:
    """`varlen_attn`, as this project calls it."""
    out: Tensor = Kernel.apply(q, k, v, lengths[0], lengths[1], window_size == (-1, 0))  # type: ignore[no-untyped-call]
    return out


def with_kernel(
    q: Tensor, k: Tensor, v: Tensor, packing_q: Packing | None, packing_k: Packing | None, causal: bool = False, *_: Any
) -> Tensor:
    """`attention` as on a CUDA device in half precision."""
    if packing_q is None and packing_k is None:
        return attention.attention(q, k, v, causal=causal)
    return attention._varlen(q, k, v, packing_q, packing_k, causal)


def gradients(model: Learner, method: str) -> dict[str, Tensor]:
    backward(model, [batch(0, 6, method=method)])
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("method", ["siglip", "sycoca"])
def test_gradients_of_compiled_towers_do_not_depend_on_what_variable_length_kernels_leave_unwritten(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = gradients(learner(method), method)
    monkeypatch.setattr(torch, "compile", lambda forward, **_: forward)
    monkeypatch.setattr(varlen, "varlen_attn", stand_in)
    monkeypatch.setattr(blocks, "attention", with_kernel)
    model = learner(method)
    engine.compile_model(model.model, "blocks")
    found = gradients(model, method)
    largest = max(float(g.abs().max()) for g in expected.values())
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert float((gradient - expected[name]).abs().max()) < 1e-10 * largest, name


def settled(size: str, device: str, earlier: Recipe | None = None, **given: Any) -> tuple[str, str]:
    recipe = by_device.settle(replace(default_recipe("clip", size), **given), device, earlier)
    return recipe.precision, recipe.matmul


def cpu_with(monkeypatch: pytest.MonkeyPatch, *capabilities: str) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(capabilities, True))


@pytest.mark.parametrize("capability", ["avx512_bf16", "amx_bf16"])
def test_precision_follows_size_and_device_and_what_is_given_or_was_before(
    monkeypatch: pytest.MonkeyPatch, capability: str
) -> None:
    cpu_with(monkeypatch, "avx2", capability)
    cpu = {size: settled(size, "cpu") for size in sizes()}
    assert cpu == {size: ("bf16" if size in ("tiny", "top") else "fp32", "highest") for size in sizes()}
    cuda = {size: settled(size, "cuda:1") for size in sizes()}
    assert cuda == {size: ("fp32" if size == "debug" else "bf16", "high") for size in sizes()}
    assert settled("b32", "cuda", precision="fp32", matmul="medium") == ("fp32", "medium")
    assert settled("b32", "cpu", replace(default_recipe("clip"), precision="bf16", matmul="high")) == ("bf16", "high")
    assert settled("b32", "cuda", Recipe(method="clip"), matmul="medium") == ("fp32", "medium")


def test_a_cpu_without_bf16_trains_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_with(monkeypatch, "avx2", "avx512_f")
    assert {settled(size, "cpu")[0] for size in sizes()} == {"fp32"}


@pytest.mark.parametrize(
    ("cores", "ranks", "free", "workers"),
    [(16, 1, None, 14), (128, 8, None, 14), (64, 1, None, 16), (2, 1, None, 1), (16, 1, 1800, 2), (16, 1, 64, 0)],
)
def test_workers_follow_cores_and_shared_memory(
    monkeypatch: pytest.MonkeyPatch, cores: int, ranks: int, free: int | None, workers: int
) -> None:
    """A container with 64 MB of shared memory, which a batch would not fit into, trains without workers."""
    monkeypatch.setattr(by_device, "cores", lambda: cores)
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
    """And none is broken. Of each batch the numbers of tokens, the longest text and masks are others."""
    plain, compiled = made(method), made(method)
    engine.compile_model(compiled.model, parts, "aot_eager")
    counters = torch._dynamo.utils.counters
    torch._dynamo.reset()
    counters.clear()
    for n in range(20):
        captions = [[list(range(9, 10 + key(n, row) % (4 + n)))] for row in range(4)]
        compiled.zero_grad()
        backward(compiled, [pairs(compiled.model, captions, n)])
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == graphs
    backward(plain, [pairs(plain.model, captions, n)])
    largest = max(float(p.grad.abs().max()) for p in plain.parameters() if p.grad is not None)
    for (name, p), q in zip(plain.named_parameters(), compiled.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None and q.grad is not None:
            assert float((p.grad - q.grad).abs().max()) < 1e-10 * largest, name
