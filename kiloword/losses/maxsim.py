"""Token-wise maximum similarity of every image with every text, by tiles, with a gradient that keeps places alone.

With unit vectors p of an image's P patches and w of a text's words, the score is

    by_word * sum_w share_w max_p <p, w>  +  by_patch * mean_p max_w <p, w>.

The maxima have a gradient in one product each: of the P x W products of a pair, P + W places are saved for backward,
which writes the gradient into a tile of zeros and multiplies it by both sides. Texts are the last, contiguous axis of
every tile, along which maxima over patches and over words are computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kiloword.distributed.device import device_type, readable
from kiloword.model.encoding import chunks

TILE = {"cpu": 1 << 18, "cuda": 1 << 26}  # products of a tile, in numbers: 1 MB, which stays in a cache, and 256 MB
SAVED = {"cpu": 1 << 26, "cuda": 1 << 28}  # places saved for the gradient of a block


@dataclass(frozen=True)
class Sides:
    """Weights of both sums of maxima."""

    by_word: float
    by_patch: float


def similarity(patches: Tensor, words: Tensor, share: Tensor, sides: Sides) -> Tensor:
    """Scores [i, t] of every image with every text.

    Args: patches [i, P, D], words [t, W, D]: unit vectors; share [t, W]: weight of each word, 0 for padding, which is
    last. The score has no gradient by the shares.
    """
    save = torch.is_grad_enabled() and (patches.requires_grad or words.requires_grad)
    result: Tensor = _MaxSim.apply(patches, words, share.detach(), sides, save)  # type: ignore[no-untyped-call]
    return result


def block(patches: int, words: int, device: str) -> tuple[int, int]:
    """Rows and columns of a block, of as many patches as words, for which the saved places are bounded."""
    pairs = SAVED.get(device, SAVED["cuda"]) // (patches + words)
    columns = max(1, int((pairs * patches / words) ** 0.5))
    return max(1, pairs // columns), columns


@dataclass
class _Places:
    """What the gradient of a tile needs."""

    rows: slice
    columns: slice
    words: int  # W of the tile
    best_patch: Tensor | None  # [r, 1, W, c] place of each word's maximum
    best_word: Tensor | None  # [r, P, 1, c] place of each patch's


class _MaxSim(torch.autograd.Function):
    """The scores, a tile at a time. On a CPU texts are sorted by length, so that tiles have little padding."""

    @staticmethod
    def forward(ctx: Any, patches: Tensor, words: Tensor, share: Tensor, sides: Sides, save: bool) -> Tensor:
        lengths, order = _ordered(share)
        sorted_words, sorted_share = (x if order is None else x[order] for x in (words, share))
        result, ctx.tiles = patches.new_empty(len(patches), len(words)), []
        for columns, longest, down in _tiles(patches, len(words), words.shape[1], lengths):
            of_words = sorted_words[columns, :longest].transpose(0, 1).contiguous()
            shares = sorted_share[columns, :longest].T
            for rows in chunks(len(patches), down):
                result[rows, columns], *places = _tile(patches[rows], of_words, shares, sides, save)
                if save:
                    ctx.tiles.append(_Places(rows, columns, longest, *places))
        ctx.save_for_backward(patches, words, share, order)
        ctx.sides = sides
        return result if order is None else torch.empty_like(result).index_copy_(1, order, result)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        patches, words, share, order = ctx.saved_tensors
        if order is not None:
            g, words, share = g[:, order], words[order], share[order]
        words, share = words.transpose(0, 1).contiguous(), share.T  # [W, t, D], [W, t]
        by_patches, by_words = torch.zeros_like(patches), torch.zeros_like(words)
        for tile in ctx.tiles:
            r, c, n = tile.rows, tile.columns, tile.words
            gradient = _gradient(tile, g[r, c], share[:n, c], patches.shape[1], ctx.sides)  # [r P, W c]
            by_patches[r] += (gradient @ words[:n, c].flatten(0, 1)).view_as(patches[r])
            by_words[:n, c] += (gradient.T @ patches[r].flatten(0, 1)).view_as(words[:n, c])
        by_words = by_words.transpose(0, 1)
        if order is not None:
            by_words = torch.empty_like(by_words).index_copy_(0, order, by_words)
        return by_patches, by_words, None, None, None


def _ordered(share: Tensor) -> tuple[list[int] | None, Tensor | None]:
    """On a CPU, the ascending numbers of words of texts, and the texts in this order; elsewhere reading them waits."""
    if not readable(share.device):
        return None, None
    lengths, order = (share > 0).sum(1).sort(stable=True)
    return lengths.tolist(), order


def _tiles(patches: Tensor, texts: int, words: int, lengths: list[int] | None) -> Iterator[tuple[slice, int, int]]:
    """Columns of tiles, the words of their longest text, and the rows of a tile: about as many patches as words."""
    most = TILE.get(device_type(patches.device), TILE["cuda"])
    first = 0
    while first < texts:
        across = int(most**0.5) // max(1, words if lengths is None else lengths[first])
        end = min(texts, first + max(1, across))
        longest = max(1, words if lengths is None else lengths[end - 1])
        yield slice(first, end), longest, max(1, most // (patches.shape[1] * longest * (end - first)))
        first = end


def _tile(
    patches: Tensor, words: Tensor, share: Tensor, sides: Sides, save: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Scores [r, c] of a tile, and the places of the maxima if they are saved.

    Args: patches [r, P, D]; words [W, c, D]; share [W, c].
    """
    products = patches.flatten(0, 1) @ words.flatten(0, 1).T
    products = products.view(*patches.shape[:2], *share.shape)  # [r, P, W, c]
    best, best_patch = _maximum(products, 1, save)
    score = sides.by_word * torch.einsum("rwc,wc->rc", best, share)
    if not sides.by_patch:
        return score, best_patch, None
    products += torch.where(share > 0, 0.0, -torch.inf).to(products)
    best, best_word = _maximum(products, 2, save)
    return score + sides.by_patch * best.mean(1), best_patch, best_word


def _maximum(products: Tensor, dim: int, save: bool) -> tuple[Tensor, Tensor | None]:
    """Maxima along a dimension and, if they are saved, their places, with that dimension kept."""
    if not save:
        return products.amax(dim), None
    best, place = products.max(dim, keepdim=True)
    return best.squeeze(dim), place.to(torch.int16 if products.shape[dim] < 1 << 15 else torch.int32)


def _gradient(tile: _Places, g: Tensor, share: Tensor, patches: int, sides: Sides) -> Tensor:
    """Gradient by the products of a tile: [r P, W c]. Args: g [r, c]; share [W, c]."""
    r, c = g.shape
    gradient = g.new_zeros(r, patches, tile.words, c)
    if tile.best_patch is not None:
        gradient.scatter_(1, tile.best_patch.long(), (sides.by_word * g[:, None] * share)[:, None])
    if tile.best_word is not None:
        by_patch = (sides.by_patch / patches * g)[:, None, None].expand(-1, patches, -1, -1)
        gradient.scatter_add_(2, tile.best_word.long(), by_patch)
    return gradient.view(r * patches, tile.words * c)
