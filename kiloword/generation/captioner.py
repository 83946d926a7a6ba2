"""Generate captions of images."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kiloword.data.text.tokenizer import Tokenizer
from kiloword.generation.decoding import ModelDecoding, text_decoder, writer
from kiloword.generation.options import GenerationOptions
from kiloword.generation.rules import NEVER, FinishedTexts, Rules, Trie
from kiloword.generation.search import search
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
    """Generates captions with a model. Raises: ValueError for a model without a text decoder."""

    def __init__(self, model: Model, tokenizer: Tokenizer) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.decoder = text_decoder(model)
        if not tokenizer.roles.prefix:
            raise ValueError("captions of this tokenizer have no start token, so generation cannot begin.")

    def caption(
        self, images: Tensor, options: GenerationOptions | None = None, keys: Sequence[str] | None = None
    ) -> list[list[Caption]]:
        """Captions of I images, `num` unique ones each, best first; fewer if no more were generated.

        Different tokens can give equal text; then more beams are searched, or more texts sampled.

        Args: images uint8 [I, 3, H, W]; keys: names that key the samples of nucleus; None: the pixels of the images.
        The captions of an image do not depend on other images.
        Raises: ValueError for invalid options, or a model that outputs NaN or infinity.
        """
        options = options or GenerationOptions()
        named = [_digest(image) for image in images] if keys is None and options.method == "nucleus" else keys
        return self.write(self.memory(images), options, named or [""] * len(images))

    def memory(self, images: Tensor) -> DecoderMemory:
        """Decoder memory of images uint8 [I, 3, H, W]. Raises: ValueError for a model that answers questions."""
        decoder = writer(self.model)
        with inference(self.model), self.model.computing():
            tokens = self.model.image_tokens(images.to(self.model.device))
            return DecoderMemory(decoder.remember(self.model.memory(tokens)))

    def write(
        self, memory: DecoderMemory, options: GenerationOptions, keys: Sequence[str], trie: Trie | None = None
    ) -> list[list[Caption]]:
        """Generate texts from memories of B images; see `caption`. Args: trie: restricts the texts to a closed list."""
        options.check()
        rules = self.rules(options, trie)

        def attempt(lacking: list[int], round_: int) -> list[list[Caption]]:
            whole = len(lacking) == len(memory)
            remaining = memory if whole else memory.take(torch.tensor(lacking, device=self.model.device))
            wider = replace(options, beams=options.beams << round_)
            seeds = self._seeds([keys[n] for n in lacking], options, round_)
            return self._texts(self._search(remaining, wider, rules, seeds))

        return unique(attempt, len(keys), options, rounds=1 if trie is not None else ROUNDS)

    def rules(self, options: GenerationOptions, trie: Trie | None = None) -> Rules:
        """Constraints of generation. Raises: ValueError for texts longer than the text tower's context."""
        config, roles = self.model.config.text, self.tokenizer.roles
        room = config.context - len(config.extra_tokens)
        if options.longest > room:
            raise ValueError(f"longest is {options.longest} tokens, but the text tower reads {room}.")
        if trie is None and options.shortest + 2 > room:
            raise ValueError(
                f"shortest is {options.shortest} tokens, but the text tower reads {room}, start and end included: "
                f"expected at most {room - 2}."
            )
        if trie is not None and trie.longest >= room:
            raise ValueError(f"a text of {trie.longest + 1} tokens to choose from, but the text tower reads {room}.")
        words = text_decoder(self.model).words
        never = torch.arange(words, device=self.model.device) >= self.tokenizer.vocab
        for name, value in roles.ids().items():
            word = name == "pad" and self.tokenizer.clean == "clip"  # CLIP pads with the id of "!"
            if value < words and value != roles.end and not word:
                never[value] = True
        return Rules(
            start=roles.start,
            end=roles.end,
            never=never,
            longest=(options.longest or room) - 1 if trie is None else trie.longest,
            shortest=options.shortest,
            no_repeat=options.no_repeat,
            trie=trie,
        )

    def _search(
        self, memory: DecoderMemory, options: GenerationOptions, rules: Rules, seeds: Tensor | None
    ) -> FinishedTexts:
        with inference(self.model), self.model.computing():
            finished = search(ModelDecoding(self.model, memory), len(memory), rules, options, seeds)
        if not bool(torch.isfinite(finished.score[:, 0]).all()):
            raise ValueError(
                "the text decoder outputs NaN or infinite probabilities: its weights are damaged, or diverged."
            )
        return finished

    def _seeds(self, keys: Sequence[str], options: GenerationOptions, round_: int) -> Tensor | None:
        """Seeds [B, num], keyed by image, so that samples do not depend on other images."""
        if options.method != "nucleus":
            return None
        samples = range(round_ * options.num, (round_ + 1) * options.num)
        seeds = [[key(options.seed, name, "caption", n) for n in samples] for name in keys]
        return torch.tensor(seeds, dtype=torch.int64, device=self.model.device)

    def _texts(self, finished: FinishedTexts) -> list[list[Caption]]:
        """Captions of every image, best first."""
        rows = zip(
            finished.ids.tolist(),
            finished.lengths.tolist(),
            finished.score.tolist(),
            finished.logprob.tolist(),
            strict=True,
        )
        return [
            [
                Caption(self.tokenizer.decode(ids[:n]), score, logprob, tuple(ids[:n]))
                for ids, n, score, logprob in zip(*row, strict=True)
                if score > NEVER
            ]
            for row in rows
        ]


def unique(
    attempt: Callable[[list[int], int], list[list[Caption]]],
    images: int,
    options: GenerationOptions,
    rounds: int = ROUNDS,
) -> list[list[Caption]]:
    """At most `num` different texts of every image, best first; searches again for images that have fewer.

    Args: attempt: indices of images, and the number of the round -> texts of each.
    """
    texts: list[dict[str, Caption]] = [{} for _ in range(images)]
    lacking = list(range(images))
    for round_ in range(1 if options.method == "greedy" else rounds):
        for n, new in zip(lacking, attempt(lacking, round_), strict=True):
            for one in new:
                texts[n].setdefault(one.text, one)
        lacking = [n for n in lacking if len(texts[n]) < options.num]
        if not lacking:
            break
    return [sorted(by_text.values(), key=lambda one: -one.score)[: options.num] for by_text in texts]


def _digest(image: Tensor) -> str:
    return hashlib.blake2b(image.cpu().contiguous().numpy().data, digest_size=16).hexdigest()
