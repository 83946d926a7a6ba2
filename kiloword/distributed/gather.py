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
    numbers = torch.empty(ranks(), dtype=torch.int64)
    _all_gather(numbers, torch.tensor([len(next(iter(features.values())))]))
    counts = numbers.tolist()
    learned = {k: v for k, v in features.items() if v.requires_grad}
    out = _gather_bytes({k: v for k, v in features.items() if not v.requires_grad}, counts)
    if learned:
        flat = [_matrix(x) for x in learned.values()]
        rows = _Gather.apply(flat[0] if len(flat) == 1 else torch.cat(flat, 1), counts)  # type: ignore[no-untyped-call]
        parts = torch.split(rows, [x.shape[1] for x in flat], 1)
        for (k, x), part in zip(learned.items(), parts, strict=True):
            out[k] = part.reshape(len(part), *x.shape[1:]).to(x.dtype)
    return {k: out[k] for k in features}


def gather_one_row(x: Tensor) -> Tensor:
    """Stack this rank's tensor and those of all others, [R, ...], with gradient."""
    if ranks() == 1:
        return x[None]
    rows: Tensor = _Gather.apply(x.reshape(1, -1), [1] * ranks())  # type: ignore[no-untyped-call]
    return rows.view(-1, *x.shape)


class _Gather(torch.autograd.Function):
    """Gather rows [n, F] over ranks; backward sums the gradients of this rank's rows over ranks."""

    @staticmethod
    def forward(ctx: Any, flat: Tensor, counts: Sequence[int]) -> Tensor:
        ctx.counts = counts
        return _rows_of_all(flat.contiguous(), counts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        most, mine = max(ctx.counts), ctx.counts[rank()]
        if min(ctx.counts) < most:
            gradient = torch.cat([F.pad(x, (0, 0, 0, most - len(x))) for x in torch.split(gradient, ctx.counts)])
        reduced = gradient.new_empty(most, gradient.shape[1])
        _reduce_scatter(reduced, gradient.contiguous())
        return reduced[:mine], None


def _matrix(x: Tensor) -> Tensor:
    """[n, ...] -> [n, F]; n may be 0."""
    return x.flatten(1) if x.dim() > 1 else x[:, None]


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
