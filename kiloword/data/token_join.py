"""Tokens of a trunk in place of pixels and words: a source and a tokenizer that read them from token stores."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from kiloword.config.recipes import TextConfig
from kiloword.data.edits import MixtureSource
from kiloword.data.feature_store import contents
from kiloword.data.reading import EMBEDDED
from kiloword.data.sources.optional import key_of, question, texts_of
from kiloword.data.text.tokenizer import REMEMBERED, Tokenizer
from kiloword.data.token_store import ImageTokens, StoredImage, StoredText, TextTokens, serving
from kiloword.types import BadSample, NoCaption, Record, Source, Texts

ABSENT = f"{EMBEDDED}no tokens in the image features"


class WithTokens:
    """A source whose records have the tokens of their images; other members are those of the source.

    Args: stores: that were made from all of its images; lean: records lack image, label and what else training does not
    read, where the source can give captions without the image. A row without tokens is bad.
    """

    def __init__(self, source: Source, stores: Sequence[ImageTokens], lean: bool = False) -> None:
        self.source, self.stores, self.name, self.fingerprint = source, list(stores), source.name, source.fingerprint
        self._of: dict[str, list[ImageTokens]] = {}  # stores of each source of a mixture, by its fingerprint
        self.lean = lean and hasattr(source, "captions") and hasattr(source, "key")

    @property
    def contents(self) -> frozenset[str]:
        """The origins of images and captions; see `kiloword.data.feature_store.contents`."""
        return contents(self.source)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "source":  # during unpickling there is no source yet
            raise AttributeError(name)
        member = getattr(self.source, name)
        return self._at if name == "at" else member

    def _at(self, epoch: int) -> WithTokens:
        """The source of another epoch, see `kiloword.data.sources.optional.OptionalMembers.at`."""
        return WithTokens(self.source.at(epoch), self.stores, self.lean)  # type: ignore[attr-defined]

    def __len__(self) -> int:
        return len(self.source)

    def record(self, row: int) -> Record:
        """The stored sample with its tokens. Raises BadSample with the reason."""
        if self.lean:
            key = key_of(self.source, row)
            tokens, captions = self._tokens(row, key), texts_of(self.source, row)
            asked = question(self.source, row) if hasattr(self.source, "question") else None
            return Record(key, b"", captions, info={"question": asked}, tokens=tokens)
        try:
            record = self.source.record(row)
        except NoCaption as error:
            raise NoCaption(replace(error.record, tokens=self._tokens(row, error.record.key))) from error
        return replace(record, tokens=self._tokens(row, record.key))

    def _tokens(self, row: int, key: str) -> StoredImage:
        source = self.source
        while isinstance(source, MixtureSource):
            source, row = source.locate(row)
        if source.fingerprint not in self._of:  # of equal keys, each source has its own tokens
            self._of[source.fingerprint] = serving(self.stores, source)
        for store in self._of[source.fingerprint]:
            image = store.find(key)
            if image is not None:
                return image
        raise BadSample(ABSENT)


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """A digest of a tokenizer."""
    return hashlib.blake2b(tokenizer.to_bytes(), digest_size=16).hexdigest()


def check_tokenizer(tokenizer: Tokenizer, stores: Sequence[TextTokens]) -> None:
    """Raises: ValueError when the stores have captions in the tokens of another tokenizer."""
    for store in stores:
        if store.file.tokenizer != tokenizer_digest(tokenizer):
            raise ValueError(
                f"{store.path.parent} has tokens of {store.file.tower} by another tokenizer than this model's: make "
                "others by `kiloword embed --tokens`, or omit --text-features."
            )


class TokenizerWithTokens(Tokenizer):
    """A tokenizer whose texts have the tokens of a trunk, where the stores have all captions of a call."""

    def __init__(self, tokenizer: Tokenizer, stores: Sequence[TextTokens]) -> None:
        self.__dict__.update(vars(tokenizer))
        self.stores = list(stores)
        self._places: dict[str, StoredText] = {}

    def __reduce__(self) -> Any:
        return TokenizerWithTokens, (Tokenizer(self._backend.to_str()), self.stores)  # the stores send their paths

    def encode(self, captions: Sequence[str], config: TextConfig) -> Texts:
        """As `Tokenizer.encode`, with `Texts.tokens` where the stores have all captions, of the same lengths."""
        texts = super().encode(captions, config)
        stored = [self.find(caption) for caption in captions]
        starts, extra = texts.starts.tolist(), len(config.extra_tokens)
        lengths = [end - start - extra for start, end in pairwise(starts)]
        if any(text is None or text.length != length for text, length in zip(stored, lengths, strict=True)):
            return texts
        file = self.stores[0].file
        full = any(store.file.dtype == "fp32" for store in self.stores)
        tokens = np.zeros((starts[-1], file.width), np.float32 if full else np.float16)
        for text, start in zip(stored, starts, strict=False):
            assert text is not None
            text.part.read_into(tokens[start : start + text.length], text.start)
        return replace(texts, tokens=torch.from_numpy(tokens))

    def find(self, caption: str) -> StoredText | None:
        """Where the stores have a caption."""
        if caption not in self._places:
            text = next((place for store in self.stores if (place := store.find(caption)) is not None), None)
            if text is None:
                return None
            if len(self._places) >= REMEMBERED:
                self._places.clear()
            self._places[caption] = text
        return self._places[caption]

    def check(self, caption: str, config: TextConfig) -> None:
        """Raises: BadSample when `encode` would not give this caption tokens."""
        text = self.find(caption)
        if text is None:
            raise BadSample(f"{EMBEDDED}a caption has no tokens in the text features")
        length = len(super().encode([caption], config).ids) - len(config.extra_tokens)
        if length != text.length:
            raise BadSample(f"a caption has {text.length} tokens in the text features, but {length} in this run")
