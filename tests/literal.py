"""The towers and decoders of one image and one caption, written out: no batch, no packing, no cache, no chunks.

Slow and obvious, from the weights of a model of ours. An image is [3, H, W], normalised; a caption a list of ids.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from kiloword.config.recipes import ModelConfig
from kiloword.methods.registry import preset
from kiloword.model.model import Model
from kiloword.models.build import build
from kiloword.randomness import key
from kiloword.training.step import Learner
from kiloword.types import Batch, Encoded, Texts
from kiloword.verify.batch import config


def small(**image: Any) -> ModelConfig:
    """Sixteen patches an image, one block a tower."""
    base = config()
    return replace(
        base, image=replace(base.image, patch=8, depth=1, **image), text=replace(base.text, depth=1, vocab=320)
    )


def made(
    method: str, settings: dict[str, Any] | None = None, shape: ModelConfig | None = None, dtype: Any = torch.float64
) -> Learner:
    """A learner whose biases, norms and class tokens are off the values where an error would not show."""
    slots = preset(method, settings)
    learner = Learner(build(shape or small(), slots), slots).to(dtype)
    for name, p in learner.model.named_parameters():
        if p.ndim == 1 and not name.startswith("head.log"):
            noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(key(0, name)))
            p.data.add_((0.2 * noise).to(p))
    return learner


def pairs(model: Model, captions: Sequence[Sequence[Sequence[int]]], seed: int = 0) -> Batch:
    """A batch of noise images; captions: of each image a list of captions of words, without start, end and more."""
    text, size, n = model.config.text, model.config.image.size, len(captions)
    tail = [text.special[name] for name in ("end", *text.extra_tokens)]
    whole = [[text.special["start"], *words, *tail] for own in captions for words in own]
    noise = torch.Generator().manual_seed(seed)
    return Batch(
        images=torch.randint(256, (n, 3, size, size), dtype=torch.uint8, generator=noise),
        texts=Texts.pack(whole),
        image_of_text=torch.repeat_interleave(torch.tensor([len(own) for own in captions])),
        seeds=torch.tensor([key(seed, row, "literal") for row in range(n)]),
        position=torch.arange(n),
        composed=torch.zeros(n, dtype=torch.bool),
    )


CAPTIONS: list[list[list[int]]] = [[[9, 40, 9], [17]], [[33, 8, 100, 51, 60]], [[]], [[7, 7], [300, 12, 11], [64, 65]]]
"""Of four images: one to three captions each, of none to five words."""


def term(learner: Learner, name: str, batch: Batch, encoded: Encoded | None = None) -> Tensor:
    """The sum of one term over a batch."""
    found: Tensor = learner.terms[name](learner.model, batch, encoded or learner.encode(batch))
    return found


def captions_of(texts: Texts) -> list[list[int]]:
    """Ids of each text, extra tokens too."""
    return [part.tolist() for part in torch.split(texts.ids, texts.starts.diff().tolist())]


# Layers


def norm(x: Tensor, layer: nn.LayerNorm) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    variance = (x - mean).square().mean(-1, keepdim=True)
    return (x - mean) / (variance + layer.eps).sqrt() * layer.weight + layer.bias


def linear(x: Tensor, layer: nn.Linear) -> Tensor:
    return x @ layer.weight.T + layer.bias


def mlp(x: Tensor, layer: Any) -> Tensor:
    hidden = linear(x, layer.fc)
    return linear(0.5 * hidden * (1 + torch.erf(hidden / math.sqrt(2))), layer.proj)


def attend(q: Tensor, k: Tensor, v: Tensor, heads: int, causal: bool = False) -> Tensor:
    """One head after the other, one query after the other; a causal query i sees keys 0 to i."""
    size, columns = q.shape[1] // heads, []
    for h in range(heads):
        own = slice(h * size, (h + 1) * size)
        rows = []
        for i in range(len(q)):
            last = i + 1 if causal else len(k)
            weights = ((k[:last, own] @ q[i, own]) / math.sqrt(size)).softmax(0)
            rows.append(weights @ v[:last, own])
        columns.append(torch.stack(rows))
    return torch.cat(columns, 1)


def self_block(x: Tensor, block: Any, causal: bool) -> Tensor:
    q, k, v = linear(norm(x, block.norm1), block.attention.qkv).chunk(3, 1)
    x = x + linear(attend(q, k, v, block.attention.heads, causal), block.attention.out)
    return x + mlp(norm(x, block.norm2), block.mlp)


def cross_block(x: Tensor, memory: Tensor, block: Any) -> Tensor:
    q = linear(norm(x, block.norm1), block.attention.q)
    k, v = linear(norm(memory, block.norm_memory), block.attention.kv).chunk(2, 1)
    x = x + linear(attend(q, k, v, block.attention.heads), block.attention.out)
    return x + mlp(norm(x, block.norm2), block.mlp)


# Towers


def text_tokens(ids: Sequence[int], model: Model) -> Tensor:
    """[L, W] of a causal tower."""
    tower: Any = model.text_tower
    x = torch.stack([tower.tokens[i] + tower.positions[n] for n, i in enumerate(ids)])
    for block in tower.blocks:
        x = self_block(x, block, causal=True)
    return norm(x, tower.norm)


def patch(image: Tensor, place: int, size: int) -> Tensor:
    """[3, size, size], patch number `place` in rows of patches."""
    row, column = divmod(place, image.shape[2] // size)
    return image[:, row * size : (row + 1) * size, column * size : (column + 1) * size]


def stem(image: Tensor, model: Model) -> tuple[Tensor | float, list[Tensor]]:
    """What joins the class token, and [W] of every patch: of pixels, or of a trunk's tokens [1 + P, W']; no bias."""
    layer: Any = model.image_tower.patches
    c = model.config.image
    if c.trunk.name:
        first, *rest = (token @ layer.weight.T for token in image)
        return first, rest
    kernel = layer.weight.view(c.width, 3, c.patch, c.patch)
    return 0.0, [(kernel * patch(image, place, c.patch)).sum((1, 2, 3)) for place in range((c.size // c.patch) ** 2)]


def image_tokens(image: Tensor, model: Model, hidden: Sequence[int] = (), op: str = "drop") -> Tensor:
    """[E + P, W], of a linear stem; hidden patches dropped, or replaced by the mask token."""
    tower: Any = model.image_tower
    c = model.config.image
    first, patches = stem(image, model)
    rows = [] if tower.class_token is None else [tower.class_token + tower.positions[0] + first]
    rows += [] if tower.extra_tokens is None else list(tower.extra_tokens)
    rows += [] if tower.uncertainty_token is None else [tower.uncertainty_token]
    for place, x in enumerate(patches):
        if place in hidden and op == "drop":
            continue
        rows.append((tower.mask_token if place in hidden else x) + tower.positions[int(c.class_token) + place])
    x = torch.stack(rows)
    x = x if tower.pre_norm is None else norm(x, tower.pre_norm)
    for block in tower.blocks:
        x = self_block(x, block, causal=False)
    return norm(x, tower.norm)


def word_logits(ids: Sequence[int], memory: Tensor, model: Model) -> Tensor:
    """[V] of the word after `ids`, the whole sequence anew for every word."""
    decoder: Any = model.more["text_decoder"]
    x = text_tokens(ids, model)
    for layer in decoder.layers:
        x = cross_block(self_block(x, layer.own, causal=True), memory, layer.cross)
    table = model.text_tower.tokens / math.sqrt(x.shape[1]) if decoder.output is None else decoder.output
    return table @ norm(x, decoder.norm)[-1]


def pixels(seen: Tensor, words: Tensor | None, model: Model, hidden: Sequence[int]) -> Tensor:
    """[P, 3 * patch^2] that the image decoder makes of `image_tokens`; words [L, W'], None for no guide."""
    decoder: Any = model.more["image_decoder"]
    x = seen
    if decoder.mask_token is not None:  # hidden patches were dropped
        before, rows = len(seen) - (len(decoder.positions) - len(hidden)), list(seen)
        patches = iter(rows[before:])
        whole = [decoder.mask_token if p in hidden else next(patches) for p in range(len(decoder.positions))]
        x = torch.stack(rows[:before] + [x + p for x, p in zip(whole, decoder.positions, strict=True)])
    for layer in decoder.layers:
        x = self_block(x, layer.own, causal=False)
        x = x if words is None else cross_block(x, words, layer.cross)
    places = (model.config.image.size // model.config.image.patch) ** 2
    return linear(norm(x, decoder.norm), decoder.pixels)[-places:]


def scores(patches: Tensor, words: Tensor, similarity: str) -> list[float]:
    """Eq. 7: s_i = max_j <v_i, w_j>."""
    found = []
    for v in patches:
        pairs = [v @ w / (v.norm() * w.norm()) if similarity == "cosine" else v @ w for w in words]
        found.append(max(float(pair.detach()) for pair in pairs))
    return found


def lowest(scored: Sequence[float], n: int) -> list[int]:
    """Places of the n lowest, of equal ones the first."""
    return sorted(sorted(range(len(scored)), key=lambda place: scored[place])[:n])


def highest(scored: Sequence[float], n: int) -> list[int]:
    """Places of the n highest, of equal ones the first."""
    return lowest([-s for s in scored], n)


def inputs(model: Model, batch: Batch) -> Tensor:
    """What the image tower takes: normalised pixels, or a trunk's tokens [I, 1 + P, W']."""
    return batch.images if model.config.image.trunk.name else model.normalise(batch.images)


def attentive(learner: Learner, batch: Batch, n: int, similarity: str = "cosine") -> list[float]:
    """Scores of text n's patches, from the literal towers."""
    model, ids = learner.model, captions_of(batch.texts)[n]
    head, extra = model.head, len(model.config.text.extra_tokens)
    patches = image_tokens(inputs(model, batch)[int(batch.image_of_text[n])], model)[-16:]
    words = text_tokens(ids, model)[: len(ids) - extra]
    return scores(head.pooling.project_image_tokens(patches), head.pooling.project_text_tokens(words), similarity)


def assert_equal(learner: Learner, fast: Tensor, slow: Tensor) -> None:
    """Values, and gradients of all parameters, to rounding."""
    parameters = {name: p for name, p in learner.model.named_parameters() if p.requires_grad}
    torch.testing.assert_close(fast, slow, rtol=1e-12, atol=0)
    found, wanted = (torch.autograd.grad(x, list(parameters.values()), allow_unused=True) for x in (fast, slow))
    largest = max(float(g.abs().max()) for g in wanted if g is not None)
    for name, a, b in zip(parameters, found, wanted, strict=True):
        zero = torch.zeros_like(parameters[name])
        difference = (zero if a is None else a) - (zero if b is None else b)
        assert float(difference.abs().max()) < 1e-11 * largest, name


# Pair losses of logits z [I, T] and targets y [I, T], pair by pair


def sigmoid_pairs(z: Tensor, y: Tensor) -> Tensor:
    """The sum of -y log p - (1 - y) log (1 - p), p = sigmoid(z) (arXiv:2303.15343, eq. 1)."""
    total = z.new_zeros(())
    for i in range(z.shape[0]):
        for t in range(z.shape[1]):
            p = 1 / (1 + torch.exp(-z[i, t]))
            total = total - y[i, t] * torch.log(p) - (1 - y[i, t]) * torch.log(1 - p)
    return total


def softmax_rows(z: Tensor, y: Tensor) -> Tensor:
    """The mean over rows of -sum of y log p; targets of a row that sum to more than 1 share it."""
    total = z.new_zeros(())
    for row, target in zip(z, y, strict=True):
        for p in range(len(row)):
            share = target[p] / max(1.0, float(target.sum()))
            total = total - share * torch.log(torch.exp(row[p]) / sum(torch.exp(a) for a in row))
    return total / len(z)


def softmax_pairs(z: Tensor, y: Tensor) -> Tensor:
    """The mean of both directions (arXiv:2103.00020, figure 3)."""
    return (softmax_rows(z, y) + softmax_rows(z.T, y.T)) / 2


def matching(of: Sequence[int]) -> Tensor:
    """y [I, T]: 1 where text t is of image i."""
    return (torch.arange(max(of) + 1)[:, None] == torch.tensor(of)).double()
