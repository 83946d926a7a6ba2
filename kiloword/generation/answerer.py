"""Generate answers to questions about images, freely or from a closed list."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kiloword.data.text.tokenizer import Tokenizer
from kiloword.generation.captioner import Captioner
from kiloword.generation.decoding import next_logits, table_of
from kiloword.generation.options import GenerationOptions
from kiloword.generation.rules import Trie
from kiloword.methods.coca.coca import decoded
from kiloword.methods.coca.vqa import fused
from kiloword.model.decoder import DecoderMemory
from kiloword.model.encoding import chunks, inference
from kiloword.model.model import Model
from kiloword.types import Texts

ANSWERS = 256  # answers scored at once
TOKENS = 4096  # tokens of answers, over all questions, scored at once
ROWS = 1024  # rows of logits [ROWS, V] computed at once


@dataclass(frozen=True)
class AnswerList:
    """A closed list of answers; of answers with equal tokens, the first."""

    by_ids: dict[tuple[int, ...], str]  # tokens without start, with end
    texts: Texts  # encoded for the text tower, in the same order

    def __len__(self) -> int:
        return len(self.by_ids)


class Answerer:
    """Answers questions about images with a model. Raises: ValueError for a model without a fuser."""

    def __init__(self, model: Model, tokenizer: Tokenizer) -> None:
        if "fuser" not in model.more:
            raise ValueError("this model cannot answer questions: train vqa from it with --init.")
        self.model, self.tokenizer = model, tokenizer
        self.captioner = Captioner(model, tokenizer)

    def close(self, answers: Sequence[str]) -> AnswerList:
        """Encode a closed list. Raises: ValueError if it is empty, or an answer has no words or too many."""
        config = self.model.config.text
        extra = len(config.extra_tokens)
        chosen: dict[tuple[int, ...], str] = {}
        for answer in answers:
            texts = self.tokenizer.encode([answer], config)
            ids = tuple(texts.ids[1 : len(texts.ids) - extra].tolist())
            if texts.truncated or len(ids) < 2:
                raise ValueError(
                    f"the answer {answer[:60]!r} has {'too many words' if texts.truncated else 'no word'}."
                )
            chosen.setdefault(ids, answer)
        if not chosen:
            raise ValueError("no answers to choose from: expected at least one.")
        return AnswerList(chosen, self.tokenizer.encode(list(chosen.values()), config).to(self.model.device))

    def memory(self, images: Tensor, questions: Sequence[str]) -> DecoderMemory:
        """Decoder memory of I questions about I images uint8 [I, 3, H, W]."""
        with inference(self.model), self.model.computing():
            texts = self.tokenizer.encode(list(questions), self.model.config.text).to(self.model.device)
            return fused(self.model, texts, self.model.image_tokens(images.to(self.model.device)))

    def answer(self, memory: DecoderMemory, options: GenerationOptions, listed: AnswerList | None = None) -> list[str]:
        """Best answer to each question, searched word by word; with a list, one of its answers."""
        trie = None if listed is None else Trie(list(listed.by_ids), self.model.device)
        generated = self.captioner.write(memory, options, [""] * len(memory), trie)
        if listed is None:
            return [texts[0].text for texts in generated]
        return [listed.by_ids[texts[0].ids] for texts in generated]

    def rank(self, memory: DecoderMemory, listed: AnswerList, length_penalty: float = 0.0) -> list[str]:
        """Best answer of a list to each question by scoring all; length_penalty: see `GenerationOptions`."""
        with inference(self.model), self.model.computing():
            scores = self.log_likelihoods(memory, listed.texts)
        lengths = torch.tensor([len(ids) for ids in listed.by_ids], device=scores.device)
        best = (scores / lengths**length_penalty).argmax(1).tolist()
        answers = list(listed.by_ids.values())
        return [answers[n] for n in best]

    def log_likelihoods(self, memory: DecoderMemory, answers: Texts) -> Tensor:
        """Log probabilities of A answers, ends included, to B questions: [B, A]."""
        columns = []
        for part in chunks(len(answers), ANSWERS):
            answer_block = answers.cut(part.start, part.stop)
            tokens = self.model.text_tower(answer_block)
            together = max(1, TOKENS // len(answer_block.ids))
            columns.append(
                torch.cat([self._block(memory, rows, answer_block, tokens) for rows in chunks(len(memory), together)])
            )
        return torch.cat(columns, 1)

    def _block(self, memory: DecoderMemory, rows: slice, answers: Texts, tokens: Tensor) -> Tensor:
        """Log probabilities [b, A] of all answers to a block of questions; tokens [S, W]: of the answers."""
        model, extra = self.model, len(self.model.config.text.extra_tokens)
        questions = torch.arange(rows.start, rows.stop, device=tokens.device)
        b, lengths = len(questions), answers.starts.diff()
        every = Texts(answers.ids.repeat(b), F.pad(lengths.repeat(b).cumsum(0), (1, 0)), answers.longest)
        repeated = memory.take(questions.repeat_interleave(len(answers)))
        decoder = self.captioner.decoder
        x, targets = decoded(model, every, tokens.repeat(b, 1), repeated.keys, repeated.packing())
        table = table_of(model, decoder)
        loss = [
            F.cross_entropy(next_logits(x_rows, table).float(), next_ids, ignore_index=-1, reduction="none")
            for x_rows, next_ids in zip(torch.split(x, ROWS), torch.split(targets, ROWS), strict=True)
        ]
        text = torch.repeat_interleave((lengths - 1 - extra).repeat(b))
        summed = x.new_zeros(len(every), dtype=torch.float32)
        return -summed.index_add(0, text, torch.cat(loss)[: len(text)]).view(b, -1)
