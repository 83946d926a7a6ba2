"""CoCa: contrastive loss and captioning, which predicts each word from the preceding words and the image.

Source: arXiv:2205.01917; open_clip's code; the baseline of arXiv:2401.02137 (eq. 4). All words at once from the image
alone: CapPa, arXiv:2306.07915.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kiloword.config.recipes import DEPTH, ModelConfig, TextConfig
from kiloword.config.settings import ABOVE_0, BELOW_1, BaseSettings, setting
from kiloword.methods import clip
from kiloword.methods.coca import masking
from kiloword.methods.coca.masking import MaskSettings
from kiloword.methods.method import Component, Method, Part, Term
from kiloword.model.attention import Packing
from kiloword.model.blocks import Keys
from kiloword.model.decoder import TextDecoder
from kiloword.model.model import Model
from kiloword.model.text import prefixes
from kiloword.randomness import uniform
from kiloword.types import Batch, Encoded, Texts

CHUNK = 1024  # rows of logits [CHUNK, V] computed at once


@dataclass(frozen=True, kw_only=True)
class Decoding(BaseSettings):
    """The text decoder."""

    decoder_depth: int = setting(0, "layers of the text decoder; 0: as many as the text tower's", 0, DEPTH)
    tied: bool = setting(False, "share the output weight with the text tower's token embedding")


@dataclass(frozen=True, kw_only=True)
class CaptionSettings(Decoding, MaskSettings):
    """The caption loss, the decoder, and the patches that it attends to."""

    caption_weight: float = setting(
        2.0, "weight of the caption loss: lambda_IC", ABOVE_0, hint="; to disable it, use a method without captions"
    )
    smoothing: float = setting(0.0, "label smoothing: share of probability spread over the vocabulary", 0, BELOW_1)
    caption_reduction: Literal["tokens", "captions"] = setting(
        "tokens", "mean over all tokens; captions: sum over the tokens of a caption, mean over captions"
    )
    parallel: float = setting(
        0.0, "share of images whose captions are predicted all at once, from mask tokens: 0.75 in CapPa", 0, 1
    )
    caption_mask: Literal["none", "attentive", "random"] = setting(
        "none", "patches hidden from the text decoder; attentive: those least similar to the caption"
    )
    caption_share: float = setting(0.5, "share of masked patches: r_l", ABOVE_0, BELOW_1, needs="caption_mask!=none")
    caption_op: Literal["drop", "token"] = setting(
        "drop", "drop masked patches (cheaper), or replace by a token", needs="caption_mask!=none"
    )


@dataclass(frozen=True, kw_only=True)
class Settings(CaptionSettings, clip.Settings):
    """Captioning beside CLIP's pair loss."""

    contrast_weight: float = setting(
        1.0, "weight of the pair loss; 0 disables it (attentive masks then need --init)", 0
    )
    class_token: bool = setting(True, "append a class token to texts for the pair loss, where text_pool is last")


def preset(settings: Settings) -> Method:
    method = replace(clip.preset(settings), pair_weight=settings.contrast_weight)
    return replace(
        captioned(ended(method) if settings.class_token else method, settings),
        name="coca",
        source="arXiv:2205.01917",
        summary="CLIP with a text decoder that also predicts captions",
    )


def ended(method: Method) -> Method:
    """Append a class token to texts where text_pool is last; the end token is for the decoder."""

    def towers(config: ModelConfig) -> ModelConfig:
        config = method.towers(config)
        text = config.text
        if config.head.text_pool != "last" or "cls" in text.extra_tokens:
            return config
        return replace(config, text=replace(text, extra_tokens=(*text.extra_tokens, "cls")))

    return replace(method, towers=towers)


def captioned(method: Method, settings: CaptionSettings) -> Method:
    """Add a text decoder and the caption loss.

    Raises: ValueError for a method that has them already, or settings out of range.
    """
    masking.in_window(1.0, settings)
    decoders = {"text_decoder": partial(text_decoder, settings=settings)}
    return method.plus(decoders=decoders, terms={"caption": (settings.caption_weight, Part(CaptionLoss, settings))})


def text_decoder(config: ModelConfig, settings: Decoding) -> TextDecoder:
    """The text decoder for a model of this configuration."""
    depth = settings.decoder_depth or config.text.depth
    return TextDecoder(config.text, depth, memory_width(config), settings.tied)


def memory_width(config: ModelConfig) -> int:
    """Width of the result of `Model.memory`."""
    pool = config.head.pool_width if config.head.image_pool == "attentional" else 0
    return pool or config.image.width


def check_causal(config: TextConfig) -> None:
    """Raises: ValueError for a text tower whose tokens attend to later words or pads, or of another library."""
    if config.trunk.name or not config.causal or config.pad_to_context:
        raise ValueError(
            "captions and answers are predicted word by word, with words that the text tower learns: use a causal one "
            "without pads (--settings.bidirectional False, where the method has it) that is not of another library "
            "(omit --text-tower and --text-features; --image-tower and --image-features may stay)."
        )


class NextWords(Term):
    """-log probability of each next token of a text (words and end); mean over those tokens."""

    @staticmethod
    def towers(config: ModelConfig, settings: Any) -> ModelConfig:
        check_causal(config.text)
        return config

    def __init__(self, config: ModelConfig, settings: Any) -> None:
        super().__init__()
        self.settings = settings
        self.cut = 1 + len(config.text.extra_tokens)  # tokens from the end on

    def count(self, batch: Batch) -> int:
        return len(batch.texts.ids) - len(batch.texts) * self.cut


class CaptionLoss(NextWords):
    """The loss of captions.

    The text tower's output is shared with the pair loss. So is the image tower's without a mask; with a mask, a second
    pass encodes the visible patches. The captions of a share of the images are predicted in parallel (`decoded`).
    """

    @staticmethod
    def towers(config: ModelConfig, settings: CaptionSettings) -> ModelConfig:
        check_causal(config.text)
        return masking.towers(config, settings.caption_mask, settings.caption_op)

    def count(self, batch: Batch) -> int:
        return len(batch.texts) if self.settings.caption_reduction == "captions" else super().count(batch)

    def forward(self, model: Model, batch: Batch, encoded: Encoded) -> Tensor:
        s, memory = self.settings, encoded.image_tokens
        if s.caption_mask != "none" and s.masks_from <= encoded.done < s.masks_until:
            how = (s.caption_mask, s.caption_share, s.caption_op)
            *_, memory = masking.masked(model, batch, encoded, s, how, most=False, purpose="caption.mask")
        keys = decoder_of(model).remember(model.memory(memory))
        shared = None if len(keys[0][0]) == len(batch.texts) else batch
        parallel = None
        if s.parallel:
            parallel = (uniform(batch.seeds, "caption.parallel", 1)[:, 0] < s.parallel)[batch.image_of_text]
        texts, tokens = batch.texts, encoded.text_tokens
        return caption_loss(model, texts, tokens, keys, s.smoothing, shared=shared, parallel=parallel)


def decoder_of(model: Model) -> TextDecoder:
    decoder = model.more["text_decoder"]
    assert isinstance(decoder, TextDecoder)
    return decoder


def caption_loss(
    model: Model, texts: Texts, tokens: Tensor, keys: list[Keys], smoothing: float = 0.0, **memory: Any
) -> Tensor:
    """Sum of -log probability over all next tokens. Args: see `decoded`."""
    x, targets = decoded(model, texts, tokens, keys, **memory)
    return word_loss(x, decoder_of(model).table(model.text_tower.tokens), targets, smoothing)


def decoded(
    model: Model,
    texts: Texts,
    tokens: Tensor,
    keys: list[Keys],
    packing_k: Packing | None = None,
    shared: Batch | None = None,
    parallel: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs [N, W] of the text decoder for every token with a next one, and the ids of these [N], -1 for padding.

    Args: tokens [S, W]: the text tower's output for `texts`; keys: of the memory of text n, packed with `packing_k`;
    shared: the batch of the texts, where texts of one image share its keys; parallel [T] bool: texts whose tokens are
    predicted all at once, by a decoder that sees mask tokens in place of words, those after a token too. Of a caption
    it sees the length alone (arXiv:2306.07915, section 3.1, where texts are padded to one length).
    """
    cut = 1 + len(model.config.text.extra_tokens)
    place, before = prefixes(texts, cut)
    packing = model.text_tower.packing(before)
    x = tokens[place]
    if parallel is not None:
        free = parallel[packing.text]
        x = torch.where(free[:, None], masks(model, before.longest)[packing.place].to(x.dtype), x)
        packing = replace(packing, free=F.pad(free, (0, packing.tail)))
    x = F.pad(x, (0, 0, 0, packing.tail))
    packing_q = None if shared is None else model.text_tower.packing(by_image(before, shared, cut))
    x = decoder_of(model)(x, keys, packing, packing_k, packing_q)
    return x, F.pad(texts.ids[place + 1], (0, packing.tail), value=-1)


def masks(model: Model, length: int) -> Tensor:
    """The text tower's outputs [length, W] for a text of mask tokens; the first n are those of n mask tokens."""
    tower = model.text_tower
    ids = torch.full((length,), tower.config.special["mask"], device=tower.tokens.device)
    for name in tower.config.extra_tokens:  # for towers that write to their places; no mask token sees them
        ids = F.pad(ids, (0, 1), value=tower.config.special[name])
    out: Tensor = tower(Texts(ids, torch.arange(2, device=ids.device) * len(ids), len(ids)))
    return out[:length]


def by_image(texts: Texts, batch: Batch, cut: int = 0) -> Texts:
    """The texts of a batch, each without its last `cut` tokens, with all texts of one image joined into one text."""
    host, of = batch.host, batch.image_of_text
    lengths = host.texts.starts.diff() - cut
    longest = int(lengths.new_zeros(len(host)).index_add(0, host.image_of_text, lengths).max())
    first = torch.searchsorted(of, torch.arange(len(batch) + 1, device=of.device))
    return replace(texts, starts=texts.starts[first], longest=longest)


def word_loss(x: Tensor, table: Tensor, targets: Tensor, smoothing: float = 0.0, chunk: int = CHUNK) -> Tensor:
    """Sum of the cross-entropy of logits x @ table.T, without holding all logits at once.

    Gradients are computed in the forward pass, so that logits are computed once.

    Args: x [N, W]; table [V, W]; targets [N], -1: ignored; smoothing: as in torch's cross_entropy; chunk: rows of
    logits computed at once.
    """
    device = x.device.type
    kind = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else table.dtype
    loss: Tensor = _WordLoss.apply(x, table, targets, smoothing, chunk, kind)  # type: ignore[no-untyped-call]
    return loss


class _WordLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, table: Tensor, targets: Tensor, smoothing: float, chunk: int, kind: torch.dtype
    ) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            weight, rows = table.to(kind), x.to(kind)
            sums, by_row, by_table = [], [], torch.zeros_like(table) if ctx.needs_input_grad[1] else None
            for row_chunk, target_chunk in zip(torch.split(rows, chunk), torch.split(targets, chunk), strict=True):
                value, gradient = _words(row_chunk @ weight.T, target_chunk, smoothing)
                sums.append(value)
                gradient = gradient.to(kind)
                if ctx.needs_input_grad[0]:
                    by_row.append(gradient @ weight)
                if by_table is not None:
                    by_table += gradient.T @ row_chunk
                del gradient  # before the next logits are computed
            ctx.save_for_backward(torch.cat(by_row).to(x.dtype) if by_row else None, by_table)
            return torch.stack(sums).sum()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Any, ...]:
        return *(g if g is None else g * upstream[0].to(g.dtype) for g in ctx.saved_tensors), *[None] * 4


def _words(logits: Tensor, targets: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """Sum of the cross-entropy of logits [n, V], at least in single precision, and its gradient by the logits."""
    log_p = logits.log_softmax(-1, torch.promote_types(logits.dtype, torch.float32))
    counted = (targets >= 0)[:, None]
    index = targets.clamp(min=0)[:, None]
    even = smoothing / logits.shape[1]
    value = -(1 - smoothing) * log_p.gather(1, index)
    if smoothing:
        value = value - even * log_p.sum(1, keepdim=True)
    gradient = log_p.exp_()  # in place: the largest tensors of a step
    if smoothing:
        gradient -= even
    gradient.scatter_add_(1, index, gradient.new_full(index.shape, smoothing - 1))
    return (value * counted).sum(), gradient.masked_fill_(~counted, 0.0)


COMPONENTS = {
    "caption": Component(
        "terms", "a text decoder that predicts captions (needs a causal text tower)", CaptionSettings, captioned
    ),
}
