"""Attention of all towers: dense images, packed texts, cross-attention, cached decoding."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from kiloword.distributed.device import device_type
from kiloword.types import Texts

HEAD, WIDEST_HEAD = 8, 256  # head sizes of variable-length kernels: multiples of 8, at most 256
UNEVEN = 2.5  # padded rows for each token above which texts on a CPU are padded in groups of similar length
HALF = (torch.float16, torch.bfloat16)
OLDEST = (8, 0)  # compute capability that variable-length kernels need


@dataclass(frozen=True)
class Packing:
    """Positions of the tokens of T packed texts; computed once per forward pass and used by every layer."""

    starts: Tensor  # [T + 1] int32, for variable-length kernels
    longest: int  # L
    text: Tensor  # [S] the text of each token
    place: Tensor  # [S] position of each token in its text
    slot: Tensor  # [S] its row in the padded [T * L]
    valid: Tensor  # [T, L] bool: not padding
    unseen: Tensor | None = None  # [S] bool: tokens that no token attends to, not even itself; not all of a text
    free: Tensor | None = None  # [S + tail] bool: tokens that see all of their text where attention is causal
    tail: int = 0  # padding rows after the S tokens; attention returns zeros there

    @staticmethod
    def of(texts: Texts, multiple: int = 1) -> Packing:
        """Pack texts; multiple: pad the number of rows to a multiple, so that kernels get few shapes."""
        device, starts, longest = texts.ids.device, texts.starts, texts.longest
        lengths = starts.diff()
        # output_size avoids synchronising with the device
        text = torch.repeat_interleave(torch.arange(len(texts), device=device), lengths, output_size=len(texts.ids))
        place = torch.arange(len(texts.ids), device=device) - starts[text]
        # an empty text has one slot, so that no softmax is over zero keys
        valid = torch.arange(longest, device=device) < lengths.clamp(min=1)[:, None]
        tail = -len(texts.ids) % multiple
        return Packing(starts.to(torch.int32), longest, text, place, text * longest + place, valid, tail=tail)

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def full(self) -> bool:
        """Whether all texts have the same length, so that padding is not needed."""
        return len(self.text) == len(self) * self.longest

    @property
    def uneven(self) -> bool:
        """Whether one padded length for all texts would be mostly padding, and lengths can be read without a wait."""
        if torch.compiler.is_compiling() or type(self.starts) is not Tensor or self.starts.device.type != "cpu":
            return False  # a subclass may have no values
        return len(self) * self.longest > UNEVEN * max(len(self.text), 1)

    @cached_property
    def groups(self) -> list[tuple[Tensor, Packing]]:
        """Texts of similar lengths, each at least half of the group's longest: their tokens [s] in S, and packing."""
        starts = self.starts.to(torch.int64)
        lengths = starts.diff()
        kinds = lengths.double().log2().ceil()  # of an empty text -inf
        groups = []
        for kind in sorted(set(kinds[lengths > 0].tolist())):
            chosen = kinds == kind
            tokens = chosen[self.text].nonzero()[:, 0]
            texts = Texts(tokens, F.pad(lengths[chosen].cumsum(0), (1, 0)), int(lengths[chosen].max()))
            unseen = None if self.unseen is None else self.unseen[tokens]
            groups.append((tokens, replace(Packing.of(texts), unseen=unseen)))
        return groups

    def pad(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """[S + tail, ...] -> [T, L, ...]."""
        x = x[: len(self.text)] if self.tail else x
        shape = (len(self), self.longest, *x.shape[1:])
        if self.full:
            return x.reshape(shape)
        empty = x.new_full((len(self) * self.longest, *x.shape[1:]), fill)
        return empty.index_copy(0, self.slot, x).view(shape)

    def unpad(self, x: Tensor) -> Tensor:
        """[T, L, ...] -> [S + tail, ...]."""
        flat = x.reshape(-1, *x.shape[2:])
        flat = flat if self.full else flat.index_select(0, self.slot)
        return torch.cat([flat, flat.new_zeros(self.tail, *flat.shape[1:])]) if self.tail else flat


class KeyValueCache:
    """Keys and values of the decoded tokens of one layer, dense [N, L, H, d]."""

    def __init__(self) -> None:
        self.kept: tuple[Tensor, Tensor] | None = None

    def __len__(self) -> int:
        return 0 if self.kept is None else self.kept[0].shape[1]

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append new keys and values; returns all of them."""
        if self.kept is not None:
            k, v = (torch.cat(pair, 1) for pair in zip(self.kept, (k, v), strict=True))
        self.kept = k, v
        return self.kept

    def take(self, rows: Tensor) -> None:
        """Reorder: row n becomes what was row rows[n]; rows [M] int64."""
        if self.kept is not None:
            self.kept = self.kept[0][rows], self.kept[1][rows]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packing_q: Packing | None = None,
    packing_k: Packing | None = None,
    causal: bool = False,
    cache: KeyValueCache | None = None,
) -> Tensor:
    """softmax(q k^T / sqrt(d)) v, H heads at once.

    Args: each of q and (k, v) is dense [N, L, H, d], or packed [S, H, d] when its packing is given; packed queries
    can attend to dense keys, and dense queries to packed keys (row n belongs to text n). causal: query i of a sequence
    attends to keys up to its own position, counted from the end, so that with a cache the last query attends to every
    key; queries that are `free` in their packing attend to all of their text. cache: dense only.
    Returns: the shape of q.
    """
    if cache is not None:
        k, v = cache.extend(k, v)
    if causal and packing_q is not None and packing_q.free is not None:
        whole, before = (_attention(q, k, v, packing_q, packing_k, c) for c in (False, True))
        return torch.where(packing_q.free[:, None, None], whole, before)
    return _attention(q, k, v, packing_q, packing_k, causal)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, packing_q: Packing | None, packing_k: Packing | None, causal: bool
) -> Tensor:
    within = packing_k is packing_q  # one text, or one row
    assert within or not causal, "causal attention is within one text"
    if packing_q is None and packing_k is None:
        return _dense(q, k, v, None, causal)
    unseen = None if packing_k is None else packing_k.unseen
    half_on_gpu = device_type(q.device) == "cuda" and q.dtype in HALF
    fits = q.shape[-1] % HEAD == 0 and q.shape[-1] <= WIDEST_HEAD
    if half_on_gpu and unseen is None and fits and not old_card(q.device.index):
        return _varlen(q, k, v, packing_q, packing_k, causal)
    if packing_k is not None and within and packing_k.uneven:
        out = q.new_zeros(q.shape)
        for tokens, part in packing_k.groups:  # each is padded to its own longest text
            out = out.index_copy(0, tokens, _attention(q[tokens], k[tokens], v[tokens], part, part, causal))
        return out
    valid = None
    if packing_k is not None:
        if unseen is not None:
            valid = packing_k.valid & ~packing_k.pad(unseen)
        elif not packing_k.full and not causal:  # causal queries do not see the padding, which comes after them
            valid = packing_k.valid
        k, v = packing_k.pad(k), packing_k.pad(v)
    if packing_q is None:
        return _dense(q, k, v, valid, causal)
    return packing_q.unpad(_dense(packing_q.pad(q), k, v, valid, causal))


def old_card(index: int | None) -> bool:
    """Whether a CUDA device is too old for variable-length kernels. A simulated device is not."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability(index) < OLDEST


def _varlen(
    q: Tensor, k: Tensor, v: Tensor, packing_q: Packing | None, packing_k: Packing | None, causal: bool
) -> Tensor:
    """Variable-length kernels; x must not have tail rows, as kernels write neither their outputs nor gradients."""
    from torch.nn.attention.varlen import varlen_attn

    assert not any(packing is not None and packing.tail for packing in (packing_q, packing_k))
    (starts_q, longest_q), (starts_k, longest_k) = _lengths(q, packing_q), _lengths(k, packing_k)
    shape = q.shape
    q, k, v = (x.reshape(-1, *x.shape[-2:]) for x in (q, k, v))
    window = (-1, 0) if causal else (-1, -1)
    out = varlen_attn(q, k, v, starts_q, starts_k, longest_q, longest_k, window_size=window)
    assert isinstance(out, Tensor)
    return out.view(shape)


def _lengths(x: Tensor, packing: Packing | None) -> tuple[Tensor, int]:
    """Cumulative lengths [N + 1] int32 and the longest, of packed x, or of dense x [N, L, H, d]."""
    if packing is not None:
        return packing.starts, packing.longest
    n, longest = x.shape[:2]
    return torch.arange(0, (n + 1) * longest, longest, dtype=torch.int32, device=x.device), longest


def _dense(q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, causal: bool) -> Tensor:
    """q [N, Lq, H, d], k and v [N, Lk, H, d], valid [N, Lk] or None -> [N, Lq, H, d]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    mask, rows, columns = None if valid is None else valid[:, None, None], q.shape[2], k.shape[2]
    if rows == 1:  # the last query attends to all; a branch, as an expression would be symbolic when compiled
        causal = False
    # in half precision torch's CPU kernel is 3 to 9 times slower than plain products; in single precision it is faster
    plain = device_type(q.device) == "cpu" and q.dtype in HALF
    if causal and (plain or mask is not None or rows != columns):
        # the last query attends to every key, the one before to all but the last, ...
        lower = torch.ones(rows, columns, dtype=torch.bool, device=q.device).tril(columns - rows)
        mask, causal = lower if mask is None else mask & lower, False
    if not plain:
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal).transpose(1, 2)
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)  # scale q: [Lq, d] is smaller than [Lq, Lk]
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    mixed: Tensor = scores.softmax(-1).to(v.dtype) @ v
    return mixed.transpose(1, 2)
