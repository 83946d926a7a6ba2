"""The answer term: predict the next word of an answer from the preceding words, the question and the image.

Source: arXiv:2401.02137, section 4.2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, cast

from torch import Tensor, nn

from kiloword.config.recipes import DEPTH, ModelConfig, TextConfig
from kiloword.config.settings import BELOW_1, BaseSettings, setting
from kiloword.methods.coca.captioning import (
    CaptionSettings,
    caption_loss,
    check_causal,
    decoder_of,
    memory_width,
    next_tokens,
    text_decoder,
)
from kiloword.methods.method import Method
from kiloword.model.blocks import CrossBlock
from kiloword.model.decoder import DecoderMemory
from kiloword.model.model import Model
from kiloword.model.text import TextTower
from kiloword.types import Batch, Encoded, Texts


class Fuser(nn.Module):
    """Cross-attention blocks, one per block of a text tower, through which questions attend to images.

    Args: memory: width of image tokens, and of the decoder's memory; causal: whether words attend only to preceding
    words, as in the tower's training. Source: arXiv:2401.02137, section 4.2.
    """

    def __init__(self, config: TextConfig, memory: int, causal: bool = True) -> None:
        super().__init__()
        self.causal = causal
        self.blocks = nn.ModuleList(CrossBlock(config, 2 * config.depth, memory) for _ in range(config.depth))
        self.bridge = None if config.width == memory else nn.Linear(config.width, memory)

    def forward(self, tower: TextTower, texts: Texts, memory: Tensor) -> Tensor:
        """Packed questions -> packed [S + tail, W'], of which the first S rows are the tokens of the questions.

        Args: tower: the text tower; memory [T, M, W]: row n is the image of question n.
        """
        packing = tower.packing(texts)
        x = tower.embed(texts, packing)
        for text_block, block in zip(tower.blocks, self.blocks, strict=True):
            cross = cast(CrossBlock, block)
            x = cross(text_block(x, packing, self.causal), cross.keys(memory), packing)
        x = tower.norm(x) if tower.config.norm_words else x
        out: Tensor = x if self.bridge is None else self.bridge(x)
        return out


@dataclass(frozen=True, kw_only=True)
class AnswerSettings(BaseSettings):
    """How answers are predicted."""

    smoothing: float = setting(0.0, "label smoothing: share of probability spread over the vocabulary", 0, BELOW_1)
    question_sees: Literal["before", "all"] = setting(
        "before", "words of a question attend to preceding ones, or to all"
    )
    decoder_depth: int = setting(0, "layers of the text decoder, as in --init; 0: the text tower's number", 0, DEPTH)
    tied: bool = setting(False, "share the output weight with the token embedding of texts, as in --init")


def answering(method: Method, settings: AnswerSettings) -> Method:
    """Train answers to questions only: no pair loss, and the head is not trained.

    Raises: ValueError for settings out of range.
    """
    decoding = CaptionSettings(decoder_depth=settings.decoder_depth, tied=settings.tied)

    def shape(config: ModelConfig) -> ModelConfig:
        shaped = method.shape(config)
        check_causal(shaped.text)
        return shaped

    return replace(
        method,
        shape=shape,
        pair_weight=0.0,
        needs=(*method.needs, "questions"),
        towers={
            **method.towers,
            "text_decoder": lambda config: text_decoder(config, decoding),
            "fuser": lambda config: Fuser(config.text, memory_width(config), settings.question_sees == "before"),
        },
        terms={**method.terms, "answer": (1.0, lambda config: AnswerLoss(settings, config))},
    )


class AnswerLoss(nn.Module):
    """-log probability of each next token of an answer (words and end); mean over those tokens."""

    def __init__(self, settings: AnswerSettings, config: ModelConfig) -> None:
        super().__init__()
        self.smoothing = settings.smoothing
        self.extra = len(config.text.extra_tokens)

    def count(self, batch: Batch) -> Tensor:
        return next_tokens(batch.texts, self.extra)

    def forward(self, model: Model, batch: Batch, encoded: Encoded) -> Tensor:
        assert batch.questions is not None, "the loader gives every image a question"
        memory = fused(model, batch.questions, encoded.image_tokens)
        if len(batch.texts) != len(batch):
            host = batch.host
            assert host.questions is not None
            memory = memory.take(batch.image_of_text, int(host.questions.starts.diff()[host.image_of_text].sum()))
        texts, tokens, packing = batch.texts, encoded.text_tokens, memory.packing()
        return caption_loss(model, texts, tokens, memory.keys, self.smoothing, packing_k=packing)


def fused(model: Model, questions: Texts, image_tokens: Tensor) -> DecoderMemory:
    """Memory of the text decoder for I questions about I images. Args: image_tokens [I, E + P, W].

    Raises: ValueError for a model without a fuser.
    """
    if "fuser" not in model.more:
        raise ValueError("this model cannot answer questions: train vqa from it with --init.")
    tokens = model.more["fuser"](model.text_tower, questions, model.memory(image_tokens))
    keys = decoder_of(model).remember(tokens)
    return DecoderMemory([(k[: len(questions.ids)], v[: len(questions.ids)]) for k, v in keys], questions)
