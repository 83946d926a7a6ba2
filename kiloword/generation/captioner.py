"""Generate captions of images, and answers to questions about them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kiloword.data.images.augmentation import EvalTransform
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.generation.decoding import ModelDecoding, text_decoder, writer
from kiloword.generation.options import GenerationOptions
from kiloword.generation.search import Rules, beginnings, search
from kiloword.methods.coca.vqa import fused
from kiloword.model.decoder import DecoderMemory
from kiloword.model.encoding import inference
from kiloword.model.model import Model
from kiloword.randomness import key

ROUNDS = 4  # of search, each with more beams or samples, until the captions of an image are unique


@dataclass(frozen=True)
class Caption:
    """A generated text."""

    text: str
    score: float  # logprob / tokens^length_penalty
    logprob: float = math.nan  # log probability of the text, end token included; NaN for captioners of transformers
    ids: tuple[int, ...] = ()  # generated tokens: without start, with end unless the text was cut at the limit


class Captioner:
    """Generates captions with a model. Raises: ValueError for a model without a text decoder.

    Args: fingerprint: of the weights, for a table of captions.
    """

    def __init__(self, model: Model, tokenizer: Tokenizer, fingerprint: str = "") -> None:
        self.model, self.tokenizer, self.fingerprint = model, tokenizer, fingerprint
        self.precision: str = model.precision
        self.words = text_decoder(model).words
        if not tokenizer.roles.prefix:
            raise ValueError("captions of this tokenizer have no start token, so generation cannot begin.")

    @property
    def transform(self) -> EvalTransform:
        """Preprocessing of an image."""
        return EvalTransform(self.model.config.image.size, self.model.config.preprocess.resize)

    def check(self, options: GenerationOptions) -> None:
        """Raises: ValueError for options, or a model, that captions cannot be written with."""
        options.check()
        writer(self.model)
        self.rules(options)

    def caption(
        self, images: Tensor, options: GenerationOptions | None = None, keys: Sequence[str] | None = None
    ) -> list[list[Caption]]:
        """Captions of I images, `num` unique ones each, best first; fewer if no more were generated.

        Different tokens can give equal text; then more beams are searched, or more texts sampled.

        Args: images uint8 [I, 3, H, W]; keys: names that key the samples of nucleus; None: the pixels of the images.
        The captions of an image do not depend on other images.
        Raises: ValueError for invalid options, or a model that outputs NaN or infinity.
        """
        keys = keys or [hashlib.blake2b(one.cpu().numpy().tobytes(), digest_size=16).hexdigest() for one in images]
        return self.write(self.memory(images), options or GenerationOptions(), keys)

    def memory(self, images: Tensor) -> DecoderMemory:
        """Decoder memory of images uint8 [I, 3, H, W]. Raises: ValueError for a model that answers questions."""
        decoder = writer(self.model)
        with inference(self.model), self.model.computing():
            tokens = self.model.image_tokens(images.to(self.model.device))
            return DecoderMemory(decoder.remember(self.model.memory(tokens)))

    def write(
        self,
        memory: DecoderMemory,
        options: GenerationOptions,
        keys: Sequence[str],
        closed: Mapping[tuple[int, ...], list[int]] | None = None,
    ) -> list[list[Caption]]:
        """Generate texts from memories of B images; see `caption`. Args: closed: `beginnings` of a closed list."""
        options.check()
        rules = self.rules(options, closed)
        texts: list[dict[str, Caption]] = [{} for _ in keys]
        lacking = list(range(len(keys)))
        for round_ in range(1 if closed or options.method == "greedy" else ROUNDS):
            some = memory.take(torch.tensor(lacking, device=self.model.device)) if round_ else memory
            wider = replace(options, beams=options.beams << round_)
            samples = range(round_ * options.num, (round_ + 1) * options.num)
            seeds = [[key(options.seed, keys[n], "caption", sample) for sample in samples] for n in lacking]
            with inference(self.model), self.model.computing():
                found = search(ModelDecoding(self.model, some), len(lacking), rules, wider, seeds)
            if not all(found):
                raise ValueError("the text decoder outputs NaN or infinity: its weights are damaged, or diverged.")
            for n, several in zip(lacking, found, strict=True):
                for ids, logprob, score in several[: max(2 * wider.beams, options.num)]:
                    text = self.tokenizer.decode(ids)
                    texts[n].setdefault(text, Caption(text, score, logprob, ids))
            lacking = [n for n in lacking if len(texts[n]) < options.num]
            if not lacking:
                break
        return [sorted(by_text.values(), key=lambda one: -one.score)[: options.num] for by_text in texts]

    def rules(self, options: GenerationOptions, closed: Mapping[tuple[int, ...], list[int]] | None = None) -> Rules:
        """Constraints of generation. Raises: ValueError for texts longer than the text tower's context."""
        config, roles = self.model.config.text, self.tokenizer.roles
        room = config.context - len(config.extra_tokens)
        longest = options.longest or room
        if not options.shortest + 2 <= longest <= room:
            raise ValueError(
                f"longest is {longest} tokens, shortest {options.shortest}: expected at least shortest + 2 (start and "
                f"end), and at most the {room} that the text tower reads."
            )
        never = torch.arange(self.words, device=self.model.device) >= self.tokenizer.vocab
        for name, value in roles.ids().items():
            word = name == "pad" and self.tokenizer.clean == "clip"  # CLIP pads with the id of "!"
            if value < self.words and value != roles.end and not word:
                never[value] = True
        limit = 1 + max(map(len, closed)) if closed else longest - 1
        return Rules(roles.start, roles.end, never, limit, options.shortest, options.no_repeat, closed)


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

    def answer(
        self,
        images: Tensor,
        questions: Sequence[str],
        options: GenerationOptions,
        listed: Mapping[tuple[int, ...], str] | None = None,
    ) -> list[str]:
        """Best answers to I questions about I images uint8 [I, 3, H, W], searched word by word; with a list of `close`,
        each is one of it."""
        with inference(self.model), self.model.computing():
            texts = self.tokenizer.encode(list(questions), self.model.config.text).to(self.model.device)
            memory = fused(self.model, texts, self.model.image_tokens(images.to(self.model.device)))
        closed = None if listed is None else beginnings(listed)
        said = [texts[0] for texts in self.captioner.write(memory, options, [""] * len(memory), closed)]
        return [one.text if listed is None else listed[one.ids] for one in said]
