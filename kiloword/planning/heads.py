"""Cost of the head: from tokens to features of images and texts."""

from __future__ import annotations

from dataclasses import replace

from kiloword.config.recipes import ImageConfig
from kiloword.methods.llip.pooling import Attention, Contextual, LearnedAverage
from kiloword.methods.prolip.gaussian import Gaussian
from kiloword.methods.prolip.released import FromMean
from kiloword.model.heads import Single
from kiloword.model.image import extra
from kiloword.model.model import Model
from kiloword.model.pooling import AttentionalPool, ImagePool, MapPool, TextPool
from kiloword.planning.layers import Work, linear, outside
from kiloword.planning.shapes import Kernels, Lengths
from kiloword.planning.towers import patches


def head(model: Model, images: float, texts: Lengths, kernels: Kernels, tokens: float | None = None) -> Work:
    """From tokens to features of both sides; tokens: of an image, all when None.

    Projections of n rows cost 2 n W D. Kept: what they read, and of unit vectors the vectors before and behind.
    """
    work = image_head(model, images, kernels, tokens) + text_head(model, texts, kernels)
    return replace(work, name="head", group="head")


def image_head(model: Model, images: float, kernels: Kernels, tokens: float | None = None) -> Work:
    """Features of images: the pool, its projection, and what Gaussians read."""
    pooling, config, dim = model.head.pooling, model.config.image, model.config.head.dim
    length = extra(config) + patches(config) if tokens is None else tokens
    a, r = kernels.product, kernels.stream
    if isinstance(pooling, Attention):
        work = _mixture(pooling, images, mixed_tokens(model), kernels)
    else:
        assert isinstance(pooling, Single)
        work = _image_pool(pooling.image_pool, config, images, length, kernels)
        if pooling.image_projection is not None:
            projection = pooling.image_projection
            work = work + outside(linear(images, projection.in_features, dim), images * projection.in_features * a)
        work = work + outside(0, 2 * images * dim * r)
    if isinstance(model.head.uncertainty, Gaussian):
        work = work + outside(linear(images, config.width, dim), images * config.width * a + 2 * images * dim * r)
    return replace(work, name="head", group="head")


def text_head(model: Model, texts: Lengths, kernels: Kernels) -> Work:
    """Features of texts: the pool, its projection (and query), and what Gaussians read."""
    pooling, config, dim = model.head.pooling, model.config.text, model.config.head.dim
    n, a, r = texts.texts, kernels.product, kernels.stream
    pool: TextPool = pooling.text_pool  # type: ignore[attr-defined]
    slots = texts.texts * texts.longest
    read = (slots + texts.tokens) * config.width * r if pool.kind == "max" else 0
    layers = 1 + isinstance(pooling, Contextual)
    work = outside(layers * linear(n, config.width, dim), read + n * config.width * a + (1 + layers) * n * dim * r)
    uncertainty = model.head.uncertainty
    if isinstance(uncertainty, FromMean):
        more = linear(n, config.width, dim) + linear(n, dim, dim)
        work = work + outside(more, n * (config.width + dim) * a + 2 * n * dim * r)
    elif isinstance(uncertainty, Gaussian):
        work = work + outside(linear(n, config.width, dim), n * config.width * a + 2 * n * dim * r)
    return replace(work, name="head", group="head")


def _image_pool(pool: ImagePool, config: ImageConfig, images: float, length: float, kernels: Kernels) -> Work:
    """A class token is a view: in full precision it keeps all tokens of its image alive; so does a maximum."""
    tokens, r = images * length, kernels.stream
    if pool.kind == "cls":
        return outside(0, 0 if kernels.half else tokens * config.width * r)
    if pool.kind == "max":
        return outside(0, tokens * config.width * r)
    if pool.map is not None:
        return _map(pool.map, config, images, length - pool.extra, kernels)
    if pool.attentional is not None:
        return _attentional(pool.attentional, config, images, length, 1, kernels)
    return Work()


def _map(pool: MapPool, config: ImageConfig, images: float, places: float, kernels: Kernels) -> Work:
    """Keys and values of all patches, the query of one probe; then an MLP on one vector an image."""
    width, mlp, a, r = config.width, pool.mlp.fc.out_features, kernels.product, kernels.stream
    keys, attended = linear(images * places, width, 2 * width), 4 * images * places * width
    rest = linear(1 + images, width, width) + 2 * linear(images, width, mlp)
    kept = images * places * width * 3 * a + images * (width * (r + 3 * a) + 2 * mlp * a)
    return outside(keys + attended + rest, kept)


def _attentional(
    pool: AttentionalPool, config: ImageConfig, images: float, length: float, queries: int, kernels: Kernels
) -> Work:
    """Some learned queries look at all tokens; their keys are made for each call."""
    width, tokens, a, r = pool.width, images * length, kernels.product, kernels.stream
    n = images * queries
    forward = linear(tokens, config.width, 2 * width) + 2 * linear(n, width, width) + 4 * n * length * width
    return outside(forward, tokens * (config.width + 2 * width) * a + n * width * (3 * a + 2 * r))


def memory_work(model: Model, images: float, length: float, kernels: Kernels) -> tuple[Work, float]:
    """What a decoder sees of images: arithmetic of making it, and how many tokens an image it is."""
    pool = getattr(model.head.pooling, "image_pool", None)
    own = None if pool is None else pool.attentional
    if own is None or not hasattr(model.head.pooling, "memory"):
        return Work(), length
    queries = model.config.head.pool_queries
    return _attentional(own, model.config.image, images, length, queries, kernels), queries


def _mixture(pooling: Attention, images: float, tokens: int, kernels: Kernels) -> Work:
    """Keys and values of N = K (+ P) tokens: 2 I N W D each, kept with what they read.

    The text-free stand-in (2 I D^2) has no backward pass; a learned average adds one query's attention.
    """
    settings, dim, a, r = pooling.settings, pooling.dim, kernels.product, kernels.stream
    n = images * tokens
    work = outside(2 * linear(n, pooling.width, dim), n * (2 * pooling.width * a + 2 * dim * r))
    stand_in = linear(images, dim, dim)
    if isinstance(pooling, LearnedAverage):
        attended = 4 * n * dim
        return work + outside(attended + stand_in, n * (2 * dim + settings.heads) * r + 2 * images * dim * r)
    return work + outside(stand_in, 0, backward=0)


def mixed_tokens(model: Model) -> int:
    """N, the tokens of an image that texts look at."""
    pooling = model.head.pooling
    assert isinstance(pooling, Attention)
    return pooling.settings.k + (patches(model.config.image) if pooling.settings.patch_keys else 0)
