"""Cost of the terms of a loss: second passes of towers, decoders, and scores of patches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import nn

from kiloword.methods.coca.answering import AnswerLoss
from kiloword.methods.coca.captioning import CaptionLoss
from kiloword.methods.coca.masked_images import MaskedImages
from kiloword.methods.prolip.inclusion import ImageInText, MaskedImage, MaskedText, Spread, Vib
from kiloword.model.decoder import ImageDecoder, TextDecoder
from kiloword.model.image import extra
from kiloword.model.model import Model
from kiloword.planning.heads import image_head, memory_work, text_head
from kiloword.planning.layers import AttendedTokens, Work, linear, outside
from kiloword.planning.shapes import Load
from kiloword.planning.towers import fuser, image_decoder, image_tower, patches, seen_images, text_decoder, text_tower

SCORES = "scores of patches"
ELEMENTWISE = 14  # numbers a dimension that one inclusion of a pair of Gaussians keeps


def term_work(term: nn.Module, name: str, model: Model, load: Load, chosen: float | None = None) -> list[Work]:
    """What one term adds to a micro-batch, a part for each pass.

    Args: chosen: images with masked copies, where they are known; the share that the term says when None.
    Raises: KeyError for a term of a kind that is not known.
    """
    work = KINDS[type(term)](term, model, load, chosen)
    return [w if w.group == "decoders" or w.name == SCORES else _named(w, name) for w in work]


def _named(work: Work, term: str) -> Work:
    return replace(work, name=f"{work.name} ({term.replace('_', ' ')})", group="terms")


def _caption(term: nn.Module, model: Model, load: Load, chosen: float | None) -> list[Work]:
    """The decoder over all tokens that have a next one, and a pass of the image where captions hide patches.

    Without a mask it sees the clean pass. A random mask is a pass an image, an attentive one a pass a caption.
    """
    assert isinstance(term, CaptionLoss)
    decoder = model.more["text_decoder"]
    assert isinstance(decoder, TextDecoder)
    image, places, kernels = model.config.image, patches(model.config.image), load.kernels
    kind, rows, length, works = term.settings.caption_mask, load.images, extra(image) + places, []
    if kind != "none":
        rows = load.texts.texts if kind == "attentive" else load.images
        drop = term.settings.caption_op == "drop"
        seen = places - term.masked if drop else None
        works.append(replace(image_tower(image, rows, kernels, seen), name="image tower, masked"))
        length -= term.masked if drop else 0
    if kind == "attentive":
        works.append(_scores(model, load))
    made, seen_tokens = memory_work(model, rows, length, kernels)
    if made.forward:
        works.append(replace(made, name="queries of captions"))
    before = load.texts.longer(-1 - term.extra, load.captions)
    joined = rows if rows != load.texts.texts else 0
    memory = seen_images(before, rows, seen_tokens, decoder_memory(model), kernels, bool(joined))
    return [*works, text_decoder(decoder, model.config.text, before, memory, kernels, joined)]


def decoder_memory(model: Model) -> int:
    """Width of what the text decoder looks at."""
    pool = model.config.head.pool_width if model.config.head.image_pool == "attentional" else 0
    return pool or model.config.image.width


def _masked_images(term: nn.Module, model: Model, load: Load, chosen: float | None) -> list[Work]:
    """A pass of masked images, then the image decoder; a row a caption where captions choose or guide."""
    assert isinstance(term, MaskedImages)
    decoder = model.more["image_decoder"]
    assert isinstance(decoder, ImageDecoder)
    image, kernels, settings = model.config.image, load.kernels, term.settings
    attentive = settings.mim_mask == "attentive"
    passes = load.texts.texts if attentive else load.images
    rows = load.texts.texts if term.by_caption else load.images
    seen = term.patches - term.hidden if settings.mim_op == "drop" else None
    works = [replace(image_tower(image, passes, kernels, seen), name="image tower, masked")]
    if attentive:
        works.append(_scores(model, load))
    width = model.config.text.width
    return [*works, image_decoder(decoder, image, width, rows, term.hidden, load.texts, kernels)]


def _scores(model: Model, load: Load) -> Work:
    """How much each caption speaks of each patch, without gradient: 2 I P W D + 2 S W' D + 2 T P L D.

    In full precision. Made once a batch, whatever number of terms reads them.
    """
    config, dim = model.config, model.config.head.dim
    places, texts = patches(config.image), load.texts
    forward = linear(load.images * places, config.image.width, dim) + linear(texts.tokens, config.text.width, dim)
    forward += 2 * texts.texts * places * texts.longest * dim
    return replace(outside(forward, 0, backward=0), name=SCORES, group="terms", single=forward)


def _masked_image(term: nn.Module, model: Model, load: Load, chosen: float | None) -> list[Work]:
    """A pass of copies with few patches, of one image in `masked_every`."""
    assert isinstance(term, MaskedImage)
    n = load.images / term.settings.masked_every if chosen is None else chosen
    copies = image_tower(model.config.image, n, load.kernels, term.kept)
    length = extra(model.config.image) + term.kept
    work = copies + image_head(model, n, load.kernels, length) + _gaussians(model, load, n)
    return [replace(work, name="image tower, copies")]


def _masked_text(term: nn.Module, model: Model, load: Load, chosen: float | None) -> list[Work]:
    """A pass of copies of the captions of one image in `masked_every`: as long, or without the hidden words."""
    assert isinstance(term, MaskedText)
    part = 1 / term.settings.masked_every if chosen is None else chosen / load.images
    texts = load.texts.share(part)
    if term.settings.hide_words == "drop":
        fixed = 2 + len(model.config.text.extra_tokens)  # start and end stay too
        words = max(0.0, texts.tokens / texts.texts - fixed)
        texts = texts.scaled(1 - term.settings.mask_words * words / (words + fixed))
    copies = text_tower(model.config.text, texts, load.kernels)
    work = copies + text_head(model, texts, load.kernels) + _gaussians(model, load, texts.texts)
    return [replace(work, name="text tower, copies")]


def _gaussians(model: Model, load: Load, pairs: float) -> Work:
    """Inclusion of pairs of Gaussians: no products, some numbers a dimension."""
    return outside(0, ELEMENTWISE * pairs * model.config.head.dim * load.kernels.stream)


def _image_in_text(term: nn.Module, model: Model, load: Load, chosen: float | None) -> list[Work]:
    return [replace(_gaussians(model, load, load.texts.texts), name="inclusion")]


def _vib(term: nn.Module, model: Model, load: Load, chosen: float | None) -> list[Work]:
    assert isinstance(term, Vib)
    n = load.images if term.side == "image" else load.texts.texts
    return [replace(outside(0, 3 * n * model.config.head.dim * load.kernels.stream), name="bottleneck")]


def _answer(term: nn.Module, model: Model, load: Load, chosen: float | None) -> list[Work]:
    """Questions fused with images, then the decoder over answers, which look at their question's tokens."""
    assert isinstance(term, AnswerLoss)
    assert load.questions is not None
    decoder = model.more["text_decoder"]
    assert isinstance(decoder, TextDecoder)
    image, kernels = model.config.image, load.kernels
    fused = fuser(model.config.text, model, load, extra(image) + patches(image))
    before, asked = load.texts.longer(-1 - term.extra, load.captions), load.questions
    slots = asked.texts * asked.longest if kernels.padded else asked.tokens
    pairs = slots * before.longest if kernels.padded else asked.tokens * before.tokens / before.texts
    memory = AttendedTokens(asked.tokens, slots, kernels.padded, pairs * load.captions, decoder_memory(model))
    return [fused, text_decoder(decoder, model.config.text, before, memory, kernels)]


Cost = Callable[[nn.Module, Model, Load, float | None], list[Work]]
KINDS: dict[type, Cost] = {
    CaptionLoss: _caption,
    MaskedImages: _masked_images,
    MaskedImage: _masked_image,
    MaskedText: _masked_text,
    ImageInText: _image_in_text,
    Spread: _image_in_text,
    Vib: _vib,
    AnswerLoss: _answer,
}
