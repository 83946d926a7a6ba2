"""Generate answers to questions about images, freely or from a closed list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from kiloword.data.text.tokenizer import Tokenizer
from kiloword.generation.captioner import Captioner
from kiloword.generation.options import GenerationOptions
from kiloword.generation.search import beginnings
from kiloword.methods.coca.vqa import fused
from kiloword.model.decoder import DecoderMemory
from kiloword.model.encoding import inference
from kiloword.model.model import Model


class Answerer:
    """Answers questions about images with a model. Raises: ValueError for a model without a fuser."""

    def __init__(self, model: Model, tokenizer: Tokenizer) -> None:
        if "fuser" not in model.more:
            raise ValueError("this model cannot answer questions: train vqa from it with --init.")
        self.model, self.tokenizer = model, tokenizer
        self.captioner = Captioner(model, tokenizer)

    def close(self, answers: Sequence[str]) -> dict[tuple[int, ...], str]:
        """A closed list by tokens without start, with end; of answers with equal tokens, the first.

        Raises: ValueError if it is empty, or an answer has no words or too many.
        """
        config = self.model.config.text
        chosen: dict[tuple[int, ...], str] = {}
        for answer in answers:
            text = self.tokenizer.encode([answer], config)
            ids = tuple(text.ids[1 : len(text.ids) - len(config.extra_tokens)].tolist())
            if text.truncated or len(ids) < 2:
                raise ValueError(f"the answer {answer[:60]!r} has no word, or too many words.")
            chosen.setdefault(ids, answer)
        if not chosen:
            raise ValueError("no answers to choose from: expected at least one.")
        return chosen

    def memory(self, images: Tensor, questions: Sequence[str]) -> DecoderMemory:
        """Decoder memory of I questions about I images uint8 [I, 3, H, W]."""
        with inference(self.model), self.model.computing():
            texts = self.tokenizer.encode(list(questions), self.model.config.text).to(self.model.device)
            return fused(self.model, texts, self.model.image_tokens(images.to(self.model.device)))

    def answer(
        self, memory: DecoderMemory, options: GenerationOptions, listed: Mapping[tuple[int, ...], str] | None = None
    ) -> list[str]:
        """Best answer to each question, searched word by word; with a list of `close`, one of its answers."""
        closed = None if listed is None else beginnings(listed)
        said = [texts[0] for texts in self.captioner.write(memory, options, [""] * len(memory), closed)]
        return [one.text if listed is None else listed[one.ids] for one in said]
