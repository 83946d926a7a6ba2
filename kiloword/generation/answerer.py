"""Images and questions in, answers out: from a closed list, or in the model's own words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kiloword.data.text.tokenizer import Tokenizer
from kiloword.evaluation.features import chunks, inference
from kiloword.generation.captioner import Captioner
from kiloword.generation.decoding import DecoderMemory, next_logits, table_of
from kiloword.generation.options import GenerationOptions
from kiloword.generation.rules import Trie
from kiloword.methods.coca.answering import fused
from kiloword.methods.coca.captioning import decoded
from kiloword.model.model import Model
from kiloword.types import Texts

ANSWERS = 256  # answers whose words are looked at together
TOKENS = 4096  # words of answers, over all questions, that are looked at together
ROWS = 1024  # words whose logits [ROWS, V] exist at once


@dataclass(frozen=True)
class AnswerList:
    """The only answers that may be given; of those that are the same tokens the first."""

    by_ids: dict[tuple[int, ...], str]  # tokens without start, with end
    texts: Texts  # as the text tower reads them, in the same order

    def __len__(self) -> int:
        return len(self.by_ids)


class Answerer:
    """A model that answers questions about images. Raises: ValueError for one that cannot."""

    def __init__(self, model: Model, tokenizer: Tokenizer) -> None:
        if "fuser" not in model.more:
            raise ValueError("this model cannot answer questions: train vqa from it with --init.")
        self.model, self.tokenizer = model, tokenizer
        self.captioner = Captioner(model, tokenizer)

    def close(self, answers: Sequence[str]) -> AnswerList:
        """A closed list. Raises: ValueError when it is empty, or an answer has no words or too many."""
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
        return AnswerList(chosen, self.tokenizer.encode(list(chosen.values()), config).to(self._device))

    def memory(self, images: Tensor, questions: Sequence[str]) -> DecoderMemory:
        """What the decoder sees of I questions about I images: uint8 [I, 3, H, W]."""
        with inference(self.model), self.model.computing():
            texts = self.tokenizer.encode(list(questions), self.model.config.text).to(self._device)
            return fused(self.model, texts, self.model.image_tokens(images.to(self._device)))

    def answer(self, memory: DecoderMemory, options: GenerationOptions, listed: AnswerList | None = None) -> list[str]:
        """The best answer to each question; with a list one of it, found word by word, without one any."""
        trie = None if listed is None else Trie(list(listed.by_ids), self._device)
        found = self.captioner.write(memory, options, [""] * len(memory), trie)
        if listed is None:
            return [texts[0].text for texts in found]
        return [listed.by_ids[texts[0].ids] for texts in found]

    def rank(self, memory: DecoderMemory, listed: AnswerList, length_penalty: float = 0.0) -> list[str]:
        """The likeliest answer of a list to each question, every one tried; as `GenerationOptions.length_penalty`."""
        with inference(self.model), self.model.computing():
            scores = self.log_likelihoods(memory, listed.texts)
        lengths = torch.tensor([len(ids) for ids in listed.by_ids], device=scores.device)
        best = (scores / lengths**length_penalty).argmax(1).tolist()
        answers = list(listed.by_ids.values())
        return [answers[n] for n in best]

    def log_likelihoods(self, memory: DecoderMemory, answers: Texts) -> Tensor:
        """Log probability of A answers, their ends included, to B questions: [B, A]."""
        columns = []
        for part in chunks(len(answers), ANSWERS):
            some = answers.cut(part.start, part.stop)
            tokens = self.model.text_tower(some)
            together = max(1, TOKENS // len(some.ids))
            columns.append(
                torch.cat([self._block(memory, rows, some, tokens) for rows in chunks(len(memory), together)])
            )
        return torch.cat(columns, 1)

    def _block(self, memory: DecoderMemory, rows: slice, answers: Texts, tokens: Tensor) -> Tensor:
        """[b, A] of some questions: every answer to every one of them; tokens [S, W] of the answers."""
        model, extra = self.model, len(self.model.config.text.extra_tokens)
        questions = torch.arange(rows.start, rows.stop, device=tokens.device)
        b, lengths = len(questions), answers.starts.diff()
        every = Texts(answers.ids.repeat(b), F.pad(lengths.repeat(b).cumsum(0), (1, 0)), answers.longest)
        own = memory.take(questions.repeat_interleave(len(answers)))
        decoder = self.captioner.decoder
        x, targets = decoded(decoder, model, every, tokens.repeat(b, 1), own.keys, extra, own.packing())
        table = table_of(model, decoder)
        loss = [
            F.cross_entropy(next_logits(some, table).float(), wanted, ignore_index=-1, reduction="none")
            for some, wanted in zip(torch.split(x, ROWS), torch.split(targets, ROWS), strict=True)
        ]
        text = torch.repeat_interleave((lengths - 1 - extra).repeat(b))
        summed = x.new_zeros(len(every), dtype=torch.float32)
        return -summed.index_add(0, text, torch.cat(loss)[: len(text)]).view(b, -1)

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device
