"""Scores whose image vector depends on the text: attention from each text to the tokens of each image.

Of Llip (arXiv:2405.00740, eq. 1 and 2), FLAIR (arXiv:2412.03561) and C2LIP (arXiv:2603.25722). With row vectors, the
values V_m [N, d] of an image, the mixing weights p_m [N] of a pair and C = concat_m(p_m V_m), the image feature for a
text is z = C W_O. Its cosine with the text's unit target t is

    cosine = z . t / |z|,     z . t = C . y  with  y = t W_O^T,     |z|^2 = C A C^T  with  A = W_O W_O^T.

"direct" computes C of every pair. "gram" does not: with u = V_m . y_m and the Gram matrix G = V A V^T of the image,
C . y = sum p u and |z|^2 = p G p^T need only the weights. That is less work where M N < D and an image is compared with
many texts. Both process tiles of pairs, and save for backward the derivatives that the gradients of the pairs scale.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kiloword.distributed.device import device_type
from kiloword.model.heads import Pooling, shares, unit
from kiloword.model.pooling import at_least_float
from kiloword.types import Features

ScoreForm = Literal["direct", "gram"]

TILE = 1 << 18  # mixing weights per tile on a CPU: 1 MB in single precision, which stays in the cache
SAVED = {"cpu": 1 << 26, "cuda": 1 << 28}  # saved activations per block, in numbers: 256 MB and 1 GB


class PerText(Pooling):
    """Base of poolings whose image vector depends on the text.

    Images have "keys" and "values" [i, N, M, d], texts "query" [t, M, d] and the unit target "vec" [t, D], D = M d.
    Attributes: form: of the computation, "auto": the cheaper.
    """

    form: Literal["auto", "direct", "gram"] = "auto"

    @property
    def factor(self) -> float:
        """Factor of the products of queries and keys."""
        raise NotImplementedError

    def output(self, texts: Features) -> Tensor:
        """W_O transposed, as the weight of a linear layer: [D, D]."""
        raise NotImplementedError

    def score(self, images: Features, texts: Features) -> Tensor:
        """[i, t]: the cosine of every text with every image as the text attends to its tokens."""
        keys, values, query, target = _floats(images, texts)
        out = at_least_float(self.output(texts))
        return cosine(keys, values, query, target, out, self.factor, self._form(images, texts))

    def score_pairs(self, images: Features, texts: Features) -> Tensor:
        """Scores [n] of image n as text n attends to its tokens."""
        keys, values, query, target = _floats(images, texts)
        phi = torch.einsum("nkmd,nmd->nmk", keys, query * self.factor).softmax(-1)
        mixed = torch.einsum("nmk,nkmd->nmd", phi, values).flatten(1)  # C
        return (unit(mixed @ at_least_float(self.output(texts)).T) * target).sum(1)

    def block(self, images: Features, texts: Features) -> tuple[int, int]:
        """Rows and columns of one block: few images, many texts."""
        return block(images["keys"].shape[1:], self._form(images, texts), device_type(images["keys"].device))

    def _form(self, images: Features, texts: Features) -> ScoreForm:
        return choose(images["keys"].shape[1:], len(texts["vec"])) if self.form == "auto" else self.form

    def ensemble(self, texts: Features, group: Tensor, n: int, weights: Tensor | None) -> Features:
        """Means of the prompts' unit vectors, normalised again, and of their queries (arXiv:2405.00740, appendix A)."""
        query = at_least_float(texts["query"])
        query = query * shares(query, group, n, weights)[:, None, None]
        query = query.new_zeros(n, *query.shape[1:]).index_add(0, group, query)
        return {**super().ensemble(texts, group, n, weights), "query": query}

    def explain(self, images: Features, texts: Features) -> Tensor:
        """Mixing weights [i, t, M, N] of eq. 1."""
        return weights(at_least_float(images["keys"]), at_least_float(texts["query"]), self.factor)


def check_heads(heads: int, dim: int) -> None:
    """Raises: ValueError for heads that do not divide the embedding size."""
    if dim % heads:
        raise ValueError(f"--settings.heads {heads} does not divide the embedding size {dim} (--model.head.dim).")


def _floats(images: Features, texts: Features) -> tuple[Tensor, ...]:
    return tuple(at_least_float(x) for x in (images["keys"], images["values"], texts["query"], texts["vec"]))


def choose(shape: Sequence[int], texts: int) -> ScoreForm:
    """The faster form for a number of texts per image. Args: shape: N, M, d of the keys.

    Counts multiplications, forward and backward: a pair costs 4 (D^2 - (M N)^2) more in the direct form; the Gram
    matrix of an image costs 6 (N D^2 + (M N)^2 d) once.
    """
    n, heads, per_head = shape
    w, d = n * heads, heads * per_head
    once = 6 * (n * d * d + w * w * per_head)
    return "gram" if 4 * (d * d - w * w) * texts > once else "direct"


def block(shape: Sequence[int], form: ScoreForm, device: str) -> tuple[int, int]:
    """Rows and columns of a block, chosen such that the memory saved for backward is bounded; arguments as `choose`.

    A Gram matrix is computed per image and y per text; the ratio of columns to rows makes both cost the same.
    """
    n, heads, per_head = shape
    w, d = n * heads, heads * per_head
    pairs = SAVED.get(device, SAVED["cuda"]) // (2 * w + (2 * d if form == "direct" else 0))
    columns = max(1, int((pairs * (n + w * w / (heads * d))) ** 0.5))
    return max(1, pairs // columns), columns


def cosine(
    keys: Tensor, values: Tensor, query: Tensor, target: Tensor, out: Tensor, factor: float, form: ScoreForm
) -> Tensor:
    """Cosine of every image, mixed for every text, with the text's target: [i, t].

    Args: keys, values [i, N, M, d]; query [t, M, d]; target [t, D], unit vectors; out [D, D], W_O transposed, as the
    weight of a linear layer; factor: multiplies the products of queries and keys.
    """
    heads, dim = query.shape[1], target.shape[1]
    y = (target @ out).view(-1, heads, dim // heads)  # [t, M, d]
    square = out.T @ out  # A [D, D]
    if form == "gram":
        square = grams(values, square)
    save = torch.is_grad_enabled() and any(x.requires_grad for x in (keys, values, query, y, square))
    result: Tensor = _Cosine.apply(keys, values, query * factor, y, square, form, save)  # type: ignore[no-untyped-call]
    return result


def weights(keys: Tensor, query: Tensor, factor: float) -> Tensor:
    """Mixing weights [i, t, M, N] of eq. 1; the weights of each head sum to one."""
    return torch.einsum("inmd,tmd->itmn", keys, query * factor).softmax(-1)


def grams(values: Tensor, square: Tensor) -> Tensor:
    """Gram matrices [i, M N, M N] of the projected values of each image; values [i, N, M, d], A [D, D]."""
    i, n, m, d = values.shape
    spread = torch.einsum("inmd,mdke->imnke", values, square.view(m, d, m, d))
    return torch.einsum("imnke,ilke->imnkl", spread, values).reshape(i, m * n, m * n)


@dataclass
class _Saved:
    """Saved activations of one tile; backward multiplies them by the gradient g of the cosines."""

    rows: slice
    columns: slice
    by_logit: Tensor  # [r, M, N, c] derivative of the cosine by the attention's logits
    mixed: Tensor  # [r, M N or D, c] weights (gram) or C (direct), over |z|
    pull: Tensor  # [r, c] the cosine; zero where |z|^2 was clamped, as a clamped norm has no gradient
    weights: Tensor | None = None  # direct: [r, M, N, c]
    by_mixed: Tensor | None = None  # direct: [r, M, d, c] derivative of the cosine by C


class _Cosine(torch.autograd.Function):
    """Both forms; texts are the last, contiguous axis of every tile."""

    @staticmethod
    def forward(
        ctx: Any, keys: Tensor, values: Tensor, query: Tensor, y: Tensor, square: Tensor, form: ScoreForm, save: bool
    ) -> Tensor:
        ctx.save_for_backward(keys, values, query, y, square)
        ctx.form, ctx.tiles = form, []
        result = keys.new_empty(len(keys), len(query))
        for rows, columns in _tiles(keys, len(query)):
            result[rows, columns], saved_tile = _tile(rows, columns, form, keys, values, query, y, square)
            if save:
                ctx.tiles.append(saved_tile)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        sums = tuple(torch.zeros_like(x, memory_format=torch.contiguous_format) for x in saved)
        add = _add_gram if ctx.form == "gram" else _add_direct
        for tile in ctx.tiles:
            gradient = g[tile.rows, tile.columns]
            _add_attention(tile, gradient, saved, sums)
            add(tile, gradient, saved, sums)
        return *sums, None, None


def _tiles(keys: Tensor, texts: int) -> Iterator[tuple[slice, slice]]:
    """Rows and columns of each tile: on a CPU what fits in its cache, elsewhere the whole block."""
    images, per_pair = len(keys), keys.shape[1] * keys.shape[2]
    most = max(1, TILE // per_pair) if device_type(keys.device) == "cpu" else images * texts
    across = max(1, min(texts, most))
    down = max(1, most // across)
    for i in range(0, images, down):
        for t in range(0, texts, across):
            yield slice(i, min(i + down, images)), slice(t, min(t + across, texts))


def _by_head(x: Tensor) -> Tensor:
    """[r, N, M, d] -> [M, r N, d], no copy."""
    return x.flatten(0, 1).transpose(0, 1)


def _against(x: Tensor, texts: Tensor) -> Tensor:
    """Products of x [r, N, M, d] and texts [c, M, d]: [r, M, N, c]."""
    r, n, m, _ = x.shape
    return torch.bmm(_by_head(x), texts.permute(1, 2, 0)).view(m, r, n, -1).transpose(0, 1)


def _norms(squared: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """1 / |z| [r, c], and whether |z|^2 is above its rounding error; only there it has a gradient.

    Args: squared [r, c]; scale [r, 1] or [r, c], the magnitude of the summands of |z|^2.
    """
    floor = torch.finfo(squared.dtype).eps * scale + 1e-24  # 1e-24: the square of eps of torch's normalize
    return squared.maximum(floor).rsqrt(), squared > floor


def _tile(
    rows: slice, columns: slice, form: ScoreForm, keys: Tensor, values: Tensor, query: Tensor, y: Tensor, square: Tensor
) -> tuple[Tensor, _Saved]:
    """Cosines [r, c] of a tile, with x the weights (gram) or C (direct): x . target / sqrt(x . matrix . x)."""
    phi = torch.softmax(_against(keys[rows], query[columns]), 2).contiguous()  # eq. 1: [r, M, N, c]
    heads, y, values = values.shape[2], y[columns], values[rows]
    by_head = values.transpose(1, 2)  # [r, M, N, d]
    if form == "gram":
        x, matrix, target = phi.flatten(1, 2), square[rows], _against(values, y).flatten(1, 2)
        scale = heads * matrix.diagonal(dim1=1, dim2=2).mean(1, keepdim=True)
    else:
        x = torch.matmul(by_head.mT, phi).flatten(1, 2)  # [r, D, c]
        matrix, target = square.expand(len(x), -1, -1), y.flatten(1).T
        scale = x.square().sum(1) * square.trace()  # of C itself: its values may cancel
    w = torch.bmm(matrix, x)
    inverse, free = _norms((x * w).sum(1), scale)
    result = (x * target).sum(1) * inverse  # the cosine of eq. 2
    pull = result * free
    by_x = (target * inverse[:, None]).addcmul_(w, (pull * inverse.square())[:, None], value=-1)
    saved: tuple[Tensor, ...] = ()
    if form == "gram":
        by_weight = by_x.view_as(phi)
    else:
        by_mixed = by_x.view(len(by_x), heads, -1, by_x.shape[2])
        by_weight, saved = torch.matmul(by_head, by_mixed), (phi, by_mixed)
    product = phi * by_weight  # before x changes, which in the gram form is a view of phi
    by_logit = product.addcmul_(phi, product.sum(2, keepdim=True), value=-1)  # backward of softmax
    return result, _Saved(rows, columns, by_logit, x.mul_(inverse[:, None]), pull, *saved)


def _add_attention(tile: _Saved, g: Tensor, saved: tuple[Tensor, ...], sums: tuple[Tensor, ...]) -> None:
    """Gradients by keys and queries."""
    by_logit = (tile.by_logit * g[:, None, None]).transpose(0, 1).flatten(1, 2)  # [M, r N, c]
    keys, query = saved[0][tile.rows], saved[2][tile.columns]
    _by_head(sums[0][tile.rows]).add_(torch.bmm(by_logit, query.transpose(0, 1)))
    sums[2][tile.columns] += torch.bmm(by_logit.mT, _by_head(keys)).transpose(0, 1)


def _add_gram(tile: _Saved, g: Tensor, saved: tuple[Tensor, ...], sums: tuple[Tensor, ...]) -> None:
    """Gradients by values, y and Gram matrices."""
    values, y = saved[1][tile.rows], saved[3][tile.columns]
    scaled = tile.mixed * g[:, None]  # [r, M N, c]
    by_head = scaled.view_as(tile.by_logit).transpose(0, 1).flatten(1, 2)  # [M, r N, c]
    _by_head(sums[1][tile.rows]).add_(torch.bmm(by_head, y.transpose(0, 1)))
    sums[3][tile.columns] += torch.bmm(by_head.mT, _by_head(values)).transpose(0, 1)
    sums[4][tile.rows].baddbmm_(scaled * tile.pull[:, None], tile.mixed.mT, alpha=-0.5)


def _add_direct(tile: _Saved, g: Tensor, saved: tuple[Tensor, ...], sums: tuple[Tensor, ...]) -> None:
    """Gradients by values, y and A."""
    assert tile.weights is not None
    assert tile.by_mixed is not None
    by_value = torch.matmul(tile.weights, (tile.by_mixed * g[:, None, None]).mT)  # [r, M, N, d]
    sums[1][tile.rows] += by_value.transpose(1, 2)
    scaled = tile.mixed * g[:, None]  # [r, D, c]
    sums[3][tile.columns] += scaled.sum(0).T.view_as(sums[3][tile.columns])
    left, right = ((x.transpose(0, 1).flatten(1)) for x in (scaled * tile.pull[:, None], tile.mixed))
    sums[4].addmm_(left, right.T, alpha=-0.5)
