"""Visual question answering by fine-tuning. Source: arXiv:2401.02137, section 4.2.

The text tower encodes the question; additional cross-attention blocks let it attend to the image. CoCa's text decoder
then generates the answer, attending to the tokens of the question in place of the image's. `--init` from a coca or
sycoca model loads towers and decoder; the cross-attention blocks are new.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, cast

from torch import Tensor, nn

from kiloword.config.recipes import ModelConfig, TextConfig
from kiloword.config.settings import BELOW_1, setting
from kiloword.methods import clip
from kiloword.methods.coca.coca import Decoding, NextWords, caption_loss, decoder_of, ended, memory_width, text_decoder
from kiloword.methods.method import Method, Part
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

    def __init__(self, config: TextConfig, memory: int, causal: bool) -> None:
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
class Settings(Decoding):
    """How answers are predicted. The decoder and the class token are as in the model of --init."""

    smoothing: float = setting(0.0, "label smoothing: share of probability spread over the vocabulary", 0, BELOW_1)
    question_sees: Literal["before", "all"] = setting(
        "before", "words of a question attend to preceding ones, or to all"
    )
    class_token: bool = setting(True, "append a class token to texts, as in the model of --init")


def preset(settings: Settings) -> Method:
    """Train answers to questions only: no pair loss, and the head is not trained."""
    method = clip.preset(clip.Settings())

    def fuser(config: ModelConfig) -> Fuser:
        return Fuser(config.text, memory_width(config), settings.question_sees == "before")

    return replace(
        ended(method) if settings.class_token else method,
        pair_weight=0.0,
        needs=("questions",),
        decoders={"text_decoder": partial(text_decoder, settings=settings), "fuser": fuser},
        terms={"answer": (1.0, Part(AnswerLoss, settings))},
        name="vqa",
        source="arXiv:2401.02137",
        summary="generated answers to questions about images (needs questions)",
    )


class AnswerLoss(NextWords):
    """The loss of answers."""

    def forward(self, model: Model, batch: Batch, encoded: Encoded) -> Tensor:
        assert batch.questions is not None, "the loader gives every image a question"
        memory = fused(model, batch.questions, encoded.image_tokens)
        texts, tokens, smoothing = batch.texts, encoded.text_tokens, self.settings.smoothing
        shared = None if len(texts) == len(batch) else batch
        return caption_loss(model, texts, tokens, memory.keys, smoothing, packing_k=memory.packing(), shared=shared)


def fused(model: Model, questions: Texts, image_tokens: Tensor) -> DecoderMemory:
    """Memory of the text decoder of a model with a fuser for I questions about I images [I, E + P, W]."""
    tokens = model.more["fuser"](model.text_tower, questions, model.memory(image_tokens))
    keys = decoder_of(model).remember(tokens)
    return DecoderMemory([(k[: len(questions.ids)], v[: len(questions.ids)]) for k, v in keys], questions)
