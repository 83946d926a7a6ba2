"""Tokens of a frozen trunk in stores: a folder of features holds `images/`, `texts/` or both, each a store.

Images are found by their row or key, captions by their text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kiloword.config.recipes import DataConfig, TextConfig
from kiloword.data.edits import digest
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.stores.store import Places, Store, check_alike, check_captions, group_of
from kiloword.types import BadSample, Source, Texts

TokenKind = Literal["images", "texts"]
LEVELS = 255
ALIKE = ("weights", "width", "precision", "size", "resize", "tokens", "context", "tokenizer")  # in all stores of a run
REMAKE = "use what they were made with, or make others by `kiloword embed --tokens`."


def quantised(tokens: NDArray[Any]) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Tokens [n, W] as bytes [n, W], and the minimum and the step [n, groups, 2] of each group of channels."""
    grouped = tokens.astype(np.float32).reshape(len(tokens), -1, group_of(tokens.shape[1]))
    least = grouped.min(-1)
    step = (grouped.max(-1) - least) / LEVELS
    step[step == 0] = 1.0
    levels = np.rint((grouped - least[..., None]) / step[..., None]).clip(0, LEVELS)
    return levels.astype(np.uint8).reshape(tokens.shape), np.stack([least, step], -1)


def restored(levels: NDArray[np.uint8], scales: NDArray[np.float32]) -> Tensor:
    """The inverse of `quantised`: float16 [n, W]."""
    n, width = levels.shape
    grouped = torch.from_numpy(levels.astype(np.float32)).view(n, -1, group_of(width))
    least, step = torch.from_numpy(scales.reshape(n, -1, 2).copy()).unbind(-1)
    return torch.addcmul(least[..., None], grouped, step[..., None]).half().view(n, width)


class _TokenStore(Store):
    def read(self, start: int, count: int) -> Tensor:
        """A copy of tokens [count, W], fp16 or fp32."""
        rows = slice(start, start + count)
        tokens = self.column("tokens")[rows]
        return restored(tokens, self.column("scales")[rows]) if self.file.dtype == "int8" else torch.tensor(tokens)


class ImageTokens(_TokenStore):
    """Tokens of a data set's images, in the folder `images` of a folder of features. Errors: see `Store`."""

    kind = "images"


@dataclass(frozen=True)
class StoredImage:
    """The tokens of an image, in place of its pixels (`kiloword.types.StoredTokens`)."""

    store: ImageTokens
    place: int

    def tokens(self, epoch: int) -> Tensor:
        """The view of an epoch: [N, W], fp16 or fp32."""
        file = self.store.file
        return self.store.read((self.place * file.views + epoch % file.views) * file.tokens, file.tokens)


class FoundImages(Places[ImageTokens]):
    """The tokens of a source's images. Raises: ValueError, see `Places`."""

    def __call__(self, source: Source, row: int) -> StoredImage | None:
        """The tokens of a row of the source, or of the source in another epoch; None where there are none."""
        found = self.find(source, row)
        return None if found is None else StoredImage(*found)


class TextTokens(_TokenStore):
    """Tokens of captions, in the folder `texts` of a folder of features. Errors: see `Store`."""

    kind = "texts"


Kept = TypeVar("Kept", ImageTokens, TextTokens)


def opened(folders: Sequence[str], kind: type[Kept]) -> list[Kept]:
    """The stores of several folders. Raises: ValueError where they are of different towers."""
    stores = [kind(folder) for folder in folders]
    for other in stores[1:]:
        alike = {name: getattr(stores[0].file, name) for name in ALIKE}
        check_alike(other, str(stores[0].path), "expected tokens of one tower, made alike.", **alike)
    return stores


def token_stores(data: DataConfig) -> tuple[list[ImageTokens], list[TextTokens]]:
    """The stores that a run reads. Raises: as `opened`."""
    return opened(data.image_features, ImageTokens), opened(data.text_features, TextTokens)


def find(stores: Sequence[TextTokens], caption: str) -> tuple[TextTokens, int, int] | None:
    """The store that has a caption, where its tokens begin, and their number."""
    for store in stores:
        if (text := store.find(caption)) is not None:
            start, end = store.column("starts")[text : text + 2].tolist()
            return store, start, end - start
    return None


def check_texts(stores: Sequence[TextTokens], source: Source, tokenizer: Tokenizer) -> None:
    """Raises: ValueError when the stores lack captions of a source, or have them in another tokenizer's tokens."""
    check_captions(stores, source, lambda whole, row: False)
    for store in stores:
        check_alike(store, "this model", REMAKE, tokenizer=tokenizer_digest(tokenizer))


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """A digest of a tokenizer."""
    return digest(tokenizer.to_bytes().decode())


class TokenizerWithTokens(Tokenizer):
    """A tokenizer whose texts have the tokens of a trunk, where the stores have all captions of a call."""

    def __init__(self, tokenizer: Tokenizer, stores: Sequence[TextTokens]) -> None:
        self.__dict__.update(vars(tokenizer))
        self.stores = list(stores)

    def __reduce__(self) -> Any:
        return TokenizerWithTokens, (Tokenizer(self._backend, self.roles), self.stores)  # the stores send their paths

    def encode(self, captions: Sequence[str], config: TextConfig) -> Texts:
        """As `Tokenizer.encode`, with `Texts.tokens` where the stores have all captions, of the same lengths."""
        texts = super().encode(captions, config)
        stored = [find(self.stores, caption) for caption in captions]
        starts, extra = texts.starts.tolist(), len(config.extra_tokens)
        lengths = [end - start - extra for start, end in pairwise(starts)]
        if any(text is None or text[2] != length for text, length in zip(stored, lengths, strict=True)):
            return texts
        full = any(store.file.dtype == "fp32" for store in self.stores)
        width = self.stores[0].file.width
        tokens = torch.zeros(starts[-1], width, dtype=torch.float32 if full else torch.float16)
        for text, start in zip(stored, starts, strict=False):
            assert text is not None
            store, first, length = text
            tokens[start : start + length] = store.read(first, length)
        return replace(texts, tokens=tokens)

    def check(self, caption: str, config: TextConfig) -> None:
        """Raises: BadSample when `encode` would not give this caption tokens."""
        text = find(self.stores, caption)
        if text is None:
            raise BadSample("a caption has no tokens in the text features")
        length = len(super().encode([caption], config).ids) - len(config.extra_tokens)
        if length != text[2]:
            raise BadSample(f"a caption has {text[2]} tokens in the text features, but {length} in this run")
