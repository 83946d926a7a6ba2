"""Gather every rank's texts on every rank: one all-gather forward, one reduce-scatter backward, few copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from kiloword.distributed.collectives import rank, ranks
from kiloword.types import Features

# torch 2.13 renamed both; 2.11 has only the old names
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
ALIGNED = 16  # rows of bytes are padded to a multiple of this, so that columns can be viewed in their dtypes


def gather_features(features: Features) -> Features:
    """Every rank's rows in rank order, with gradient; the number of rows may differ between ranks.

    Tensors with gradient are sent as one buffer, and so are their gradients; the others are sent once, as bytes. The
    numbers of rows are exchanged on the host, so that nothing waits for a GPU.

    Args: features: values [n, ...] with this rank's n; keys, dtypes and shapes beyond n are the same on every rank.
    Returns: the same keys, every value [sum of n, ...].
    """
    if ranks() == 1:
        return features
    counts = row_counts(len(next(iter(features.values()))))
    learned = {k: v for k, v in features.items() if v.requires_grad}
    constant = {k: v for k, v in features.items() if not v.requires_grad}
    out = _gather_bytes(constant, counts)
    if learned:
        gathered = _Gather.apply(counts, *learned.values())  # type: ignore[no-untyped-call]
        out |= dict(zip(learned, gathered, strict=True))
    return {k: out[k] for k in features}


def gather_one_row(x: Tensor) -> Tensor:
    """Stack this rank's tensor and those of all others, [R, ...], with gradient."""
    if ranks() == 1:
        return x[None]
    gathered: tuple[Tensor] = _Gather.apply([1] * ranks(), x[None])  # type: ignore[no-untyped-call]
    return gathered[0]


def row_counts(n: int) -> list[int]:
    """The number of rows of every rank."""
    out = torch.empty(ranks(), dtype=torch.int64)
    _all_gather(out, torch.tensor([n]))
    return out.tolist()


class _Gather(torch.autograd.Function):
    """Gather rows of several tensors over ranks; backward sums the gradients of this rank's rows over ranks."""

    @staticmethod
    def forward(ctx: Any, counts: Sequence[int], *mine: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.counts, ctx.shapes, ctx.dtypes = counts, [x.shape[1:] for x in mine], [x.dtype for x in mine]
        flat = _side_by_side(mine)
        rows, ctx.dtype = _rows_of_all(flat, counts), flat.dtype
        parts = torch.split(rows, [s.numel() for s in ctx.shapes], 1)
        shaped = zip(parts, ctx.shapes, ctx.dtypes, strict=True)
        return tuple(p.reshape(len(p), *s).to(d) for p, s, d in shaped)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        example = next(g for g in gradients if g is not None)
        dense = [
            example.new_zeros(sum(ctx.counts), s.numel()) if g is None else _matrix(g)
            for g, s in zip(gradients, ctx.shapes, strict=True)
        ]
        flat = _side_by_side(dense, ctx.dtype)
        most, mine = max(ctx.counts), ctx.counts[rank()]
        if min(ctx.counts) < most:
            flat = torch.cat([F.pad(x, (0, 0, 0, most - len(x))) for x in torch.split(flat, ctx.counts)])
        reduced = flat.new_empty(most, flat.shape[1])
        _reduce_scatter(reduced, flat)
        parts = torch.split(reduced[:mine], [s.numel() for s in ctx.shapes], 1)
        return None, *(p.reshape(mine, *s).to(d) for p, s, d in zip(parts, ctx.shapes, ctx.dtypes, strict=True))


def _matrix(x: Tensor) -> Tensor:
    """[n, ...] -> [n, F]; n may be 0."""
    return x.flatten(1) if x.dim() > 1 else x[:, None]


def _side_by_side(parts: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """Concatenate tensors [n, ...] to [n, sum of F], contiguous; a single tensor is not copied."""
    flat = [_matrix(x) for x in parts]
    joined = flat[0] if len(flat) == 1 else torch.cat(flat, 1)
    return joined.to(dtype or joined.dtype).contiguous()


def _rows_of_all(flat: Tensor, counts: Sequence[int]) -> Tensor:
    """Every rank's rows [sum of n, F]; they are padded and cut again only where numbers of rows differ."""
    most = max(counts)
    out = flat.new_empty(len(counts) * most, flat.shape[1])
    _all_gather(out, F.pad(flat, (0, 0, 0, most - len(flat))) if len(flat) < most else flat)
    if min(counts) == most:
        return out
    return torch.cat([out[r * most : r * most + n] for r, n in enumerate(counts)])


def _gather_bytes(constant: Features, counts: Sequence[int]) -> Features:
    """Gather tensors without gradient as columns of one matrix of bytes: exact for every dtype."""
    if not constant:
        return {}
    order = sorted(constant, key=lambda name: -constant[name].element_size())  # so that each column is aligned
    flat = {name: _matrix(constant[name]).contiguous().view(torch.uint8) for name in order}
    wide = torch.cat(list(flat.values()), 1)
    rows = _rows_of_all(F.pad(wide, (0, -wide.shape[1] % ALIGNED)), counts)
    out, start = {}, 0
    for name, part in flat.items():
        x, end = constant[name], start + part.shape[1]
        out[name] = rows[:, start:end].view(x.dtype).view(len(rows), *x.shape[1:])
        start = end
    return out
