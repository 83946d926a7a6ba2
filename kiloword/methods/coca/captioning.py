"""The captioning term: the next word of a caption from those before it and the image.

Source: arXiv:2401.02137, eq. 4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kiloword.config.ranges import DEPTH
from kiloword.config.recipes import ModelConfig, TextConfig
from kiloword.methods.coca import masking
from kiloword.methods.coca.masking import MaskSettings
from kiloword.methods.method import Method
from kiloword.model.attention import Packing
from kiloword.model.blocks import Keys
from kiloword.model.decoder import TextDecoder
from kiloword.model.model import Model
from kiloword.types import Batch, Encoded, Texts

CHUNK = 1024  # words whose logits [CHUNK, V] exist at once


@dataclass(frozen=True, kw_only=True)
class CaptionSettings(MaskSettings):
    """How captions are predicted, and what of the image they see."""

    caption_weight: float = 2.0  # of the caption loss: lambda_IC
    smoothing: float = 0.0  # label smoothing: share of each target spread over the vocabulary
    decoder_depth: int = 0  # layers of the text decoder; 0: as many as the text tower has
    tied: bool = False  # the decoder's output is the text tower's token table
    caption_mask: Literal["none", "attentive", "random"] = "none"  # attentive: what the caption does not speak of
    caption_share: float = 0.5  # of the patches, that are masked: r_l
    caption_op: Literal["drop", "token"] = "drop"  # masked patches are left out (cheaper), or a learned token


def captioned(method: Method, settings: CaptionSettings) -> Method:
    """A method that predicts its captions too: a text decoder and the caption loss.

    Raises: ValueError for a method that does so already, or settings out of range.
    """
    if "text_decoder" in method.towers:
        raise ValueError(f"{method.name} predicts captions already: leave +caption away, its settings are there.")
    if not 0 < settings.caption_weight < math.inf:
        raise ValueError(
            f"caption_weight is {settings.caption_weight}: expected a weight above 0; for none leave captions away."
        )
    if not 0 <= settings.smoothing < 1:
        raise ValueError(f"smoothing is {settings.smoothing}: expected a share of at least 0 and below 1.")
    if not 0 <= settings.decoder_depth <= DEPTH:
        raise ValueError(f"decoder_depth is {settings.decoder_depth}: expected a number of layers up to {DEPTH}, or 0.")
    if settings.caption_mask == "none" and (settings.caption_share, settings.caption_op) != (0.5, "drop"):
        raise ValueError("caption_share and caption_op say how captions hide patches: choose a caption_mask too.")

    def shape(config: ModelConfig) -> ModelConfig:
        shaped = method.shape(config)
        check_causal(shaped.text)
        if settings.caption_mask == "attentive":
            masking.check(shaped)
        token = settings.caption_mask != "none" and settings.caption_op == "token"
        return with_mask_token(shaped) if token else shaped

    return replace(
        method,
        shape=shape,
        towers={**method.towers, "text_decoder": lambda config: text_decoder(config, settings)},
        terms={**method.terms, "caption": (settings.caption_weight, lambda config: Caption(settings, config))},
    )


def text_decoder(config: ModelConfig, settings: CaptionSettings) -> TextDecoder:
    """The decoder of a model whose towers are these."""
    depth = settings.decoder_depth or config.text.depth
    return TextDecoder(config.text, depth, memory_width(config), settings.tied)


def memory_width(config: ModelConfig) -> int:
    """Of what `Model.memory` gives."""
    pool = config.head.pool_width if config.head.image_pool == "attentional" else 0
    return pool or config.image.width


def with_mask_token(config: ModelConfig) -> ModelConfig:
    """Towers whose images have a learned token for masked patches."""
    return replace(config, image=replace(config.image, mask_token=True))


def check_causal(config: TextConfig) -> None:
    """Raises: ValueError for a text tower that would show a word to its own prediction."""
    if not config.causal or config.pad_to_context:
        what = "sees later words" if not config.causal else "has visible pads"
        raise ValueError(
            f"captions are predicted word by word, but this text tower {what}: take a causal one without them "
            "(--settings.bidirectional False, where the method has it)."
        )


@dataclass(frozen=True)
class Shared:
    """Rows of a memory that several texts look at."""

    of: Tensor  # [T] int64, ascending: the row of each text
    longest: int  # the most tokens that the texts of one row have together


class Caption(nn.Module):
    """-log probability of each next token of a caption (words and end); mean over those tokens.

    The text tower's pass is the one of the pair loss. So is the image's without a mask; with one there is a second
    pass, of the patches that are left.
    """

    def __init__(self, settings: CaptionSettings, config: ModelConfig) -> None:
        super().__init__()
        self.settings = settings
        self.extra = len(config.text.extra_tokens)
        self.patches = (config.image.size // config.image.patch) ** 2
        masked = settings.caption_mask != "none"
        self.masked = masking.number(settings.caption_share, self.patches, "caption_share") if masked else 0

    def count(self, batch: Batch) -> Tensor:
        return next_tokens(batch.texts, self.extra)

    def forward(self, model: Model, batch: Batch, encoded: Encoded) -> Tensor:
        decoder = model.more["text_decoder"]
        assert isinstance(decoder, TextDecoder)
        keys = self._keys(model, decoder, batch, encoded)
        own = len(keys[0][0]) == len(batch.texts)
        shared = None if own else Shared(batch.image_of_text, longest_row(batch, 1 + self.extra))
        texts, tokens = batch.texts, encoded.text_tokens
        return caption_loss(decoder, model, texts, tokens, keys, self.extra, self.settings.smoothing, shared=shared)

    def _keys(self, model: Model, decoder: TextDecoder, batch: Batch, encoded: Encoded) -> list[Keys]:
        """What captions see of their images: a row an image, or a caption where each has its own mask."""
        if self.settings.caption_mask == "attentive":  # each caption has its own view of the image
            scored = masking.scores(model, batch, encoded, self.settings)
            return decoder.remember(self._memory(model, batch.images[batch.image_of_text], scored))
        if self.settings.caption_mask == "random":
            memory = self._memory(model, batch.images, masking.noise(batch, "caption.mask", self.patches))
        else:
            memory = model.memory(encoded.image_tokens)
        return decoder.remember(memory)

    def _memory(self, model: Model, images: Tensor, scored: Tensor) -> Tensor:
        """Images without the patches of the lowest score."""
        hidden = masking.chosen(scored, self.masked, most=False)
        if self.settings.caption_op == "drop":
            return model.memory(model.image_tokens(images, keep=masking.others(hidden, self.patches)))
        return model.memory(model.image_tokens(images, masked=masking.as_bool(hidden, self.patches)))


def caption_loss(
    decoder: TextDecoder,
    model: Model,
    texts: Texts,
    tokens: Tensor,
    keys: list[Keys],
    extra: int,
    smoothing: float,
    packing_k: Packing | None = None,
    shared: Shared | None = None,
) -> Tensor:
    """Sum over all next tokens of -log their probability. Args: as of `decoded`."""
    x, targets = decoded(decoder, model, texts, tokens, keys, extra, packing_k, shared)
    return word_loss(x, decoder.table(model.text_tower.tokens), targets, smoothing)


def decoded(
    decoder: TextDecoder,
    model: Model,
    texts: Texts,
    tokens: Tensor,
    keys: list[Keys],
    extra: int,
    packing_k: Packing | None = None,
    shared: Shared | None = None,
) -> tuple[Tensor, Tensor]:
    """What the decoder makes of every token that has a next one [N, W], and the next ones [N], -1 where there is none.

    Args: tokens [S, W]: what the text tower made of `texts`; keys: of what text n sees, packed with `packing_k`; extra:
    tokens after the end; shared: which row text n sees instead, so that no keys are copied.
    """
    place, before = prefixes(texts, 1 + extra)
    packing = model.text_tower.packing(before)
    x = F.pad(tokens[place], (0, 0, 0, packing.tail))
    rows = len(keys[0][0]) if packing_k is None else len(packing_k)
    packing_q = None if shared is None else model.text_tower.packing(joined(before, shared, rows))
    x = decoder(x, keys, packing, packing_k, packing_q)
    return x, F.pad(texts.ids[place + 1], (0, packing.tail), value=-1)


def next_tokens(texts: Texts, extra: int) -> Tensor:
    """How many tokens have a next one that is predicted; extra: tokens after the end."""
    return texts.ids.new_full((), len(texts.ids) - len(texts) * (1 + extra))


def joined(texts: Texts, shared: Shared, rows: int) -> Texts:
    """The same tokens with all texts of one row as one text."""
    starts = texts.starts[torch.searchsorted(shared.of, torch.arange(rows + 1, device=shared.of.device))]
    return Texts(texts.ids, starts, shared.longest)


def longest_row(batch: Batch, cut: int) -> int:
    """The most tokens that the texts of one image have together, without the last `cut` of each text."""
    host = batch.host
    lengths = host.texts.starts.diff() - cut
    return int(lengths.new_zeros(len(host)).index_add(0, host.image_of_text, lengths).max())


def prefixes(texts: Texts, cut: int) -> tuple[Tensor, Texts]:
    """Texts without their last `cut` tokens: the places [S'] of what is left, and the texts that it makes."""
    lengths = texts.starts.diff() - cut
    starts = F.pad(lengths.cumsum(0), (1, 0))
    shift = torch.repeat_interleave(
        texts.starts[:-1] - starts[:-1], lengths, output_size=len(texts.ids) - cut * len(texts)
    )
    place = torch.arange(len(shift), device=shift.device) + shift
    return place, Texts(texts.ids[place], starts, max(texts.longest - cut, 0))


def word_loss(x: Tensor, table: Tensor, targets: Tensor, smoothing: float = 0.0, chunk: int = CHUNK) -> Tensor:
    """Sum of the cross-entropy of logits x @ table.T, without ever holding all of them.

    Args: x [N, W]; table [V, W]; targets [N], -1: not counted; smoothing: as of torch's cross_entropy; chunk: rows
    whose logits exist at once. Gradients are made in the forward pass, so that logits are not made twice.
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
            weight, rows = table.detach().to(kind), x.detach().to(kind)
            sums, by_row, by_table = [], [], torch.zeros_like(table) if ctx.needs_input_grad[1] else None
            for some, wanted in zip(torch.split(rows, chunk), torch.split(targets, chunk), strict=True):
                value, gradient = _words(some @ weight.T, wanted, smoothing)
                sums.append(value)
                gradient = gradient.to(kind)
                if ctx.needs_input_grad[0]:
                    by_row.append(gradient @ weight)
                if by_table is not None:
                    by_table += gradient.T @ some
                del gradient  # before the next logits are made
            ctx.save_for_backward(torch.cat(by_row).to(x.dtype) if by_row else None, by_table)
            return torch.stack(sums).sum()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Any, ...]:
        return *(g if g is None else g * upstream[0].to(g.dtype) for g in ctx.saved_tensors), *[None] * 4


def _words(logits: Tensor, targets: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """Sum of the cross-entropy of logits [n, V], at least in single precision, and its gradient by them."""
    log_p = logits.log_softmax(-1, logits.dtype if logits.dtype == torch.float64 else torch.float32)
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
