"""Generate answers to questions about images, freely or from a closed list."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kiloword.data.text.tokenizer import Tokenizer
from kiloword.generation.captioner import Captioner
from kiloword.generation.decoding import log_likelihoods
from kiloword.generation.options import GenerationOptions
from kiloword.generation.search import beginnings
from kiloword.methods.coca.vqa import fused
from kiloword.model.decoder import DecoderMemory
from kiloword.model.encoding import chunks, inference
from kiloword.model.model import Model
from kiloword.types import Texts

ANSWERS = 256  # answers scored at once


@dataclass(frozen=True)
class AnswerList:
    """A closed list of answers; of answers with equal tokens, the first."""

    by_ids: dict[tuple[int, ...], str]  # tokens without start, with end
    texts: Texts  # encoded for the text tower, in the same order


class Answerer:
    """Answers questions about images with a model. Raises: ValueError for a model without a fuser."""

    def __init__(self, model: Model, tokenizer: Tokenizer) -> None:
        if "fuser" not in model.more:
            raise ValueError("this model cannot answer questions: train vqa from it with --init.")
        self.model, self.tokenizer = model, tokenizer
        self.captioner = Captioner(model, tokenizer)

    def encode(self, texts: Sequence[str]) -> Texts:
        """Texts on the model's device."""
        return self.tokenizer.encode(list(texts), self.model.config.text).to(self.model.device)

    def close(self, answers: Sequence[str]) -> AnswerList:
        """Encode a closed list. Raises: ValueError if it is empty, or an answer has no words or too many."""
        chosen: dict[tuple[int, ...], str] = {}
        for answer in answers:
            text = self.encode([answer])
            ids = tuple(text.ids[1 : len(text.ids) - len(self.model.config.text.extra_tokens)].tolist())
            if text.truncated or len(ids) < 2:
                raise ValueError(f"the answer {answer[:60]!r} has {'too many words' if text.truncated else 'no word'}.")
            chosen.setdefault(ids, answer)
        if not chosen:
            raise ValueError("no answers to choose from: expected at least one.")
        return AnswerList(chosen, self.encode(list(chosen.values())))

    def memory(self, images: Tensor, questions: Sequence[str]) -> DecoderMemory:
        """Decoder memory of I questions about I images uint8 [I, 3, H, W]."""
        with inference(self.model), self.model.computing():
            tokens = self.model.image_tokens(images.to(self.model.device))
            return fused(self.model, self.encode(questions), tokens)

    def answer(self, memory: DecoderMemory, options: GenerationOptions, listed: AnswerList | None = None) -> list[str]:
        """Best answer to each question, searched word by word; with a list, one of its answers."""
        closed = None if listed is None else beginnings(list(listed.by_ids))
        said = [texts[0] for texts in self.captioner.write(memory, options, [""] * len(memory), closed)]
        return [one.text if listed is None else listed.by_ids[one.ids] for one in said]

    def rank(self, memory: DecoderMemory, listed: AnswerList, length_penalty: float = 0.0) -> list[str]:
        """Best answer of a list to each question by scoring all; length_penalty: see `GenerationOptions`."""
        with inference(self.model), self.model.computing():
            scores = self.log_likelihoods(memory, listed.texts)
        lengths = torch.tensor([len(ids) for ids in listed.by_ids], device=scores.device)
        answers = list(listed.by_ids.values())
        return [answers[n] for n in (scores / lengths**length_penalty).argmax(1).tolist()]

    def log_likelihoods(self, memory: DecoderMemory, answers: Texts) -> Tensor:
        """Log probabilities of A answers, ends included, to B questions: [B, A]."""
        parts = []
        for part in chunks(len(answers), ANSWERS):
            some = answers.cut(part.start, part.stop)
            tokens, same = (
                self.model.text_tower(some),
                torch.zeros(len(some), dtype=torch.int64, device=some.ids.device),
            )
            asked = (memory.take(same + question) for question in range(len(memory)))
            parts.append(torch.stack([log_likelihoods(self.model, some, tokens, one) for one in asked]))
        return torch.cat(parts, 1)
