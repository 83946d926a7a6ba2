"""Images in, captions out."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kiloword.data.text.tokenizer import Tokenizer
from kiloword.evaluation.features import inference
from kiloword.generation.decoding import DecoderMemory, ModelDecoding, WholeDecoding, text_decoder, writer
from kiloword.generation.options import GenerationOptions
from kiloword.generation.rules import NEVER, FinishedTexts, Rules, Trie
from kiloword.generation.search import search
from kiloword.model.model import Model
from kiloword.randomness import key

ROUNDS = 4  # of search, each wider than the one before, where an image's captions are not all different


@dataclass(frozen=True)
class Caption:
    """A text that was generated."""

    text: str
    score: float  # logprob / tokens^length_penalty, the end among the tokens
    logprob: float  # that the model gives the text, its end included
    ids: tuple[int, ...]  # tokens as they were generated: no start, and an end unless the text was cut at the limit


class Captioner:
    """A model that describes images.

    Args: cache: whether keys and values of earlier tokens are kept; without, every step computes them again.
    Raises: ValueError for a model that cannot write.
    """

    def __init__(self, model: Model, tokenizer: Tokenizer, cache: bool = True) -> None:
        self.model, self.tokenizer, self.cache = model, tokenizer, cache
        self.decoder = text_decoder(model)
        if not tokenizer.roles.prefix:
            raise ValueError(
                "this tokenizer's captions have no start token, so there is nothing to begin to write from."
            )

    def caption(
        self, images: Tensor, options: GenerationOptions | None = None, keys: Sequence[str] | None = None
    ) -> list[list[Caption]]:
        """Captions of I images, `num` different ones each, best first; fewer where no more were found.

        Different tokens may read the same; where they do, more beams are searched, or more texts drawn.

        Args: images uint8 [I, 3, H, W]; keys: names that nucleus draws by; None: by the images' pixels. What stands
        beside an image does not matter to it.
        Raises: ValueError for options that do not fit, or a model that gives no numbers.
        """
        options = options or GenerationOptions()
        named = [_digest(image) for image in images] if keys is None and options.method == "nucleus" else keys
        return self.write(self.memory(images), options, named or [""] * len(images))

    def memory(self, images: Tensor) -> DecoderMemory:
        """What the decoder sees of images: uint8 [I, 3, H, W]. Raises: ValueError where it sees questions."""
        decoder = writer(self.model)
        with inference(self.model), self.model.computing():
            tokens = self.model.image_tokens(images.to(self._device))
            return DecoderMemory(decoder.remember(self.model.memory(tokens)))

    def write(
        self, memory: DecoderMemory, options: GenerationOptions, keys: Sequence[str], trie: Trie | None = None
    ) -> list[list[Caption]]:
        """Texts about B memories; as `caption`. Args: trie: the only texts that may be written."""
        options.check()
        rules = self.rules(options, trie)
        texts: list[dict[str, Caption]] = [{} for _ in keys]
        lacking = list(range(len(keys)))
        for round_ in range(1 if options.method == "greedy" or trie is not None else ROUNDS):
            some = memory if len(lacking) == len(memory) else memory.take(torch.tensor(lacking, device=self._device))
            wider = replace(options, beams=options.beams << round_)
            found = self._search(some, wider, rules, self._seeds([keys[n] for n in lacking], options, round_))
            for n, new in zip(lacking, self._texts(found), strict=True):
                for caption in new:
                    texts[n].setdefault(caption.text, caption)
            lacking = [n for n in lacking if len(texts[n]) < options.num]
            if not lacking:
                break
        ranked = (sorted(some.values(), key=lambda caption: -caption.score) for some in texts)
        return [some[: options.num] for some in ranked]

    def rules(self, options: GenerationOptions, trie: Trie | None = None) -> Rules:
        """What may be said. Raises: ValueError for texts longer than the text tower reads."""
        config, roles = self.model.config.text, self.tokenizer.roles
        room = config.context - len(config.extra_tokens)
        if options.longest > room:
            raise ValueError(f"longest is {options.longest} tokens, but the text tower reads {room}.")
        if trie is not None and trie.longest >= room:
            raise ValueError(f"a text of {trie.longest + 1} tokens to choose from, but the text tower reads {room}.")
        words = text_decoder(self.model).words
        never = torch.arange(words, device=self._device) >= self.tokenizer.vocab
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
        kind = ModelDecoding if self.cache else WholeDecoding
        with inference(self.model), self.model.computing():
            found = search(kind(self.model, memory), len(memory), rules, options, seeds)
        if not bool(torch.isfinite(found.score[:, 0]).all()):
            raise ValueError("the text decoder gives no finite probabilities: its weights are damaged, or diverged.")
        return found

    def _seeds(self, keys: Sequence[str], options: GenerationOptions, round_: int) -> Tensor | None:
        """[B, num]: each image's draws are its own, whatever stands beside it."""
        if options.method != "nucleus":
            return None
        samples = range(round_ * options.num, (round_ + 1) * options.num)
        seeds = [[key(options.seed, name, "caption", n) for n in samples] for name in keys]
        return torch.tensor(seeds, dtype=torch.int64, device=self._device)

    def _texts(self, found: FinishedTexts) -> list[list[Caption]]:
        """Of every image, best first."""
        rows = zip(
            found.ids.tolist(), found.lengths.tolist(), found.score.tolist(), found.logprob.tolist(), strict=True
        )
        return [
            [
                Caption(self.tokenizer.decode(ids[:n]), score, logprob, tuple(ids[:n]))
                for ids, n, score, logprob in zip(*row, strict=True)
                if score > NEVER
            ]
            for row in rows
        ]

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device


def _digest(image: Tensor) -> str:
    return hashlib.blake2b(image.cpu().contiguous().numpy().data, digest_size=16).hexdigest()
