"""What a CUDA device changes, on machines without one: kernels and devices are stand-ins."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

from kiloword import activations
from kiloword.accumulate import backward
from kiloword.learner import Learner
from kiloword.towers import attention, blocks
from kiloword.towers.attention import Packing
from kiloword.verify import learner
from kiloword.verify_batch import batch

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
    return torch.cat([attention._dense(*(x[None] for x in one), None, causal)[0] for one in zip(*own, strict=True)])


def unwritten(x: Tensor, like: Tensor) -> Tensor:
    out = torch.full_like(like, GARBAGE)
    out[: len(x)] = x
    return out


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
    monkeypatch.setattr(torch, "compile", lambda forward: forward)
    monkeypatch.setattr(varlen, "varlen_attn", stand_in)
    monkeypatch.setattr(blocks, "attention", with_kernel)
    model = learner(method)
    activations.compile(model.model, "blocks")
    found = gradients(model, method)
    largest = max(float(g.abs().max()) for g in expected.values())
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert float((gradient - expected[name]).abs().max()) < 1e-10 * largest, name
