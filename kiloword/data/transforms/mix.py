"""Transforms that mix an example with another one: with probability rho, redrawn in every epoch.

Source: arXiv:2407.01408 (CLIP-C), section 3 and its ablations of image operations and of stylistic augmentation.

Images are uint8 [3, H, W] of equal size, or cached tokens of a trunk, [N, W] in floating point: the map of N's square
root a side after the tokens before it. Maps are mixed as pixels are, each token as one pixel; the tokens before the map
are averaged by the share of the area. (A trunk that sees the mixed image would give other tokens: its view crosses the
border.) None is changed in place.
Captions are joined unchanged, with white space and full stops. Caption c of an example is joined with caption c mod n
of a partner with n captions, so that an example keeps its number of captions and its rows of precomputed features.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from kiloword.config.recipes import AugmentConfig
from kiloword.config.settings import check
from kiloword.data.columns import read_columns
from kiloword.data.edits import MixtureSource
from kiloword.data.images.augmentation import TrainTransform
from kiloword.data.images.decode import decode
from kiloword.data.reading import read
from kiloword.data.source import keys, texts_of
from kiloword.data.text.eda import eda, read_synonyms
from kiloword.data.transforms.settings import (
    ComposeSettings,
    CutmixSettings,
    MixupSettings,
    PartnerSettings,
    StylisticSettings,
)
from kiloword.randomness import Draw, permutation
from kiloword.types import BadSample, Example, Fetch, Source

Partners = NDArray[np.integer[Any]]  # [N] the partner of every row; -1 for a row that cannot be read
Rewrites = dict[tuple[str, str], list[str]]  # captions of pairs of samples, by their keys
LARGE = 3_500_000  # rows: CC3M is below, CC12M and RedCaps above
BLOCK = 1 << 24  # similarities computed at once: 64 MB


def share(rho: float | None, rows: int) -> float:
    """The share of composed examples for a data set of `rows`. Args: rho: None chooses by size."""
    return rho if rho is not None else 0.3 if rows < LARGE else 0.15


class _Mix:
    """Base class: whether to mix, in which order, and which parts."""

    settings: Any  # `MixingSettings`
    rewrites: Mapping[tuple[str, str], list[str]] = MappingProxyType({})  # captions of pairs of samples, by their keys

    def __post_init__(self) -> None:
        check(self.settings, prefix="")

    def __call__(self, example: Example, fetch: Fetch, draw: Draw) -> Example:
        rng = draw.rng("compose")
        if rng.random() >= share(self.settings.rho, len(fetch)):
            return example
        own_first = bool(rng.random() < 0.5)
        own, other = self._pair(example, fetch, draw, rng)
        image, captions = example.image, example.captions
        if self.settings.parts != "captions":
            image = (self._tokens if image.dim() == 2 else self._image)(own, other.image, own_first, rng)
        if self.settings.parts != "images":
            names = example.key, other.key
            if texts := self.rewrites.get(names) or self.rewrites.get(names[::-1]):
                captions = [texts[n % len(texts)] for n in range(len(captions))]
            else:
                captions = joined(captions, other.captions, self.settings.merge, own_first)
        return replace(example, image=image, captions=captions, composed=True)

    def _pair(self, example: Example, fetch: Fetch, draw: Draw, rng: np.random.Generator) -> tuple[Tensor, Example]:
        """The example's own image, and the example to mix it with."""
        raise NotImplementedError

    def _image(self, image: Tensor, other: Tensor, own_first: bool, rng: np.random.Generator) -> Tensor:
        """Halves of both, as `HalfSettings` say."""
        side_by_side = bool(rng.random() < 0.5)
        swapped = self.settings.image_order == "follows_caption" and not own_first
        first, second = (other, image) if swapped else (image, other)
        return halves(first, second, side_by_side, self.settings.crop == "squash")

    def _tokens(self, tokens: Tensor, other: Tensor, own_first: bool, rng: np.random.Generator) -> Tensor:
        """Mix token maps like images; a further channel, of ones and zeros, says how much is the example's own."""
        own_map, other_map = as_map(tokens), as_map(other)
        ones, zeros = torch.ones_like(own_map[:1]), torch.zeros_like(own_map[:1])
        mixed = self._image(torch.cat([own_map, ones]), torch.cat([other_map, zeros]), own_first, rng)
        before = len(tokens) - own_map[0].numel()
        first = blend(tokens[:before], other[:before], float(mixed[-1].double().mean()))
        return torch.cat([first, mixed[:-1].flatten(1).T])


@dataclass(frozen=True)
class WithPartner(_Mix):
    """Mixes with another row of the whole data set. Attributes: rows, rewrites, note: set by `bind`."""

    settings: PartnerSettings
    rows: Partners | None = None  # None: random or fixed
    rewrites: Rewrites = field(default_factory=dict)
    note: str | None = None  # for the user before the run

    def __post_init__(self) -> None:
        super().__post_init__()
        needed = {"nearest": "partner_table", "farthest": "partner_table", "file": "partner_file"}
        name = needed.get(self.settings.partner)
        if name and getattr(self.settings, name) is None:
            raise ValueError(f"partner {self.settings.partner} needs {name}: name its file or folder.")
        if self.settings.rewrites is not None and self.settings.parts == "images":
            raise ValueError("rewrites are captions, which parts images does not change: omit one of them.")

    def bind(self, source: Source, open_store: Callable[[str], Any]) -> WithPartner:
        """The transform that knows the data set. Args: open_store: opens feature stores.

        Raises: ValueError for files that are unusable or of other data, and for rows without a partner.
        """
        s, rows = self.settings, None
        if s.partner != "random" and isinstance(source, MixtureSource) and any(w % 1 for w in source.weights):
            raise ValueError(
                f"{source.name}: fractional --weights draw other rows each epoch: use whole weights, or partner random."
            )
        if s.partner == "file":
            rows = named(source, str(s.partner_file))
        elif s.partner in ("nearest", "farthest"):
            rows = similar(source, open_store(str(s.partner_table)), farthest=s.partner == "farthest")
        if s.rewrites is None:
            return replace(self, rows=rows)
        rewrites = read_rewrites(s.rewrites, source)
        note = (
            f"{s.rewrites} has captions of {len(rewrites):,} pairs; the captions of others are joined by {s.merge!r}."
        )
        return replace(self, rows=rows, rewrites=rewrites, note=note)

    def partner(self, row: int, n: int, draw: Draw, rng: np.random.Generator) -> int:
        """The row of the partner among n rows; never `row` itself if there is another."""
        random_row = another(row, n, rng)
        if self.settings.partner == "fixed":
            return int(cycle(draw.seed, n)[row])
        return random_row if self.rows is None or self.rows[row] < 0 else int(self.rows[row])

    def _pair(self, example: Example, fetch: Fetch, draw: Draw, rng: np.random.Generator) -> tuple[Tensor, Example]:
        """The partner is augmented by independent draws, not with the crop and flip of the example."""
        row = self.partner(example.row, len(fetch), draw, rng)
        return example.image, fetch.example(row, draw.other("partner"))


@dataclass(frozen=True)
class Compose(WithPartner):
    """CLIP-C: the centre halves of two images joined along width or height, and both captions."""

    settings: ComposeSettings


@dataclass(frozen=True)
class Mixup(WithPartner):
    """Two images blended pixel by pixel, and both captions."""

    settings: MixupSettings

    def _image(self, image: Tensor, other: Tensor, own_first: bool, rng: np.random.Generator) -> Tensor:
        return blend(image, other, rng.beta(self.settings.alpha, self.settings.alpha))


@dataclass(frozen=True)
class Cutmix(WithPartner):
    """A crop of the partner's image pasted at the same place on the example's image, and both captions."""

    settings: CutmixSettings

    def _image(self, image: Tensor, other: Tensor, own_first: bool, rng: np.random.Generator) -> Tensor:
        own_share = rng.beta(self.settings.alpha, self.settings.alpha)
        down, right = rng.random(2)
        return paste(image, other, box(image.shape[1], image.shape[2], own_share, down, right))


@dataclass(frozen=True)
class Stylistic(_Mix):
    """The control of CLIP-C: two crops of one image as halves, and its caption joined with an edited copy."""

    settings: StylisticSettings

    def bind(self, source: Source, open_store: Callable[[str], Any]) -> Stylistic:
        """The same transform. Raises: ValueError when the file of synonyms cannot be used."""
        read_synonyms(self.settings.synonyms)
        return self

    def _pair(self, example: Example, fetch: Fetch, draw: Draw, rng: np.random.Generator) -> tuple[Tensor, Example]:
        """The same example with another augmentation, and cropped where the loader does not crop; captions edited."""
        if example.image.dim() == 2:
            raise ValueError(
                "the transform stylistic composes two crops of one image, and cached tokens hold one view of it: train "
                "on images, or choose another transform, such as compose."
            )
        image, again = example.image, fetch.example(example.row, draw.other("again"))
        words, synonyms = draw.rng("eda"), read_synonyms(self.settings.synonyms)
        other = replace(again, captions=[eda(c, synonyms, self.settings.edits, words) for c in example.captions])
        if fetch.crops:
            return image, other
        crop = TrainTransform(image.shape[-1], AugmentConfig(crop=self.settings.least_area))
        pixels = image.permute(1, 2, 0).numpy()
        first, second = (crop(pixels, draw.other(f"{name} crop")) for name in ("first", "second"))
        return first, replace(other, image=second)


def pairs_table(source: Source, transform: WithPartner, seed: int) -> pa.Table:
    """Every readable row's key, its partner's and their joined captions: columns key, partner, caption."""
    names, rows = keys(source), list[tuple[str | None, str | None, str]]()
    for row, name in enumerate(names):
        draw = Draw(seed, 0, row)
        other = transform.partner(row, len(source), draw, draw.rng("compose"))
        try:
            texts = texts_of(source, row), texts_of(source, other)
        except BadSample:
            continue
        if name is not None and names[other] is not None and all(texts):
            rows += [(name, names[other], text) for text in joined(*texts, transform.settings.merge, own_first=True)]
    return pa.table({column: [one[n] for one in rows] for n, column in enumerate(("key", "partner", "caption"))})


def joined(captions: Sequence[str], others: Sequence[str], merge: str, own_first: bool) -> list[str]:
    """Join each caption with one of `others`, in the order of `own_first`; as many as `captions`."""
    pairs = [(caption, others[n % len(others)]) for n, caption in enumerate(captions)]
    return [merge.join(pair if own_first else pair[::-1]) for pair in pairs]


def as_map(tokens: Tensor) -> Tensor:
    """The map [W, G, G] of tokens [N, W]: the last G^2 tokens, where at most 2 G stand before them."""
    side = math.isqrt(len(tokens))
    return tokens[len(tokens) - side * side :].T.reshape(-1, side, side)


def halves(first: Tensor, second: Tensor, side_by_side: bool, squash: bool = False) -> Tensor:
    """Half of each image, put together to a whole one: left and right (halves [H, W / 2]), or above and below.

    The half is the centre of the image (arXiv:2407.01408, section 3), or with `squash` the whole image resized. Of an
    odd side the second image gets the larger part; a centre between two pixels is rounded to the left or up.
    """
    axis = 2 if side_by_side else 1
    length = first.shape[axis]
    parts = [(first, length // 2), (second, length - length // 2)]
    if squash:
        return torch.cat([_squeezed(image, size, axis) for image, size in parts], axis)
    return torch.cat([image.narrow(axis, (length - size) // 2, size) for image, size in parts], axis)


def _squeezed(image: Tensor, size: int, axis: int) -> Tensor:
    shape = [size if a == axis else image.shape[a] for a in (1, 2)]
    whole = image if image.dtype == torch.uint8 else image.float()  # torch resizes no half precision on a CPU
    return F.interpolate(whole[None], shape, mode="bicubic", antialias=True)[0].to(image.dtype)


def blend(first: Tensor, second: Tensor, share: float) -> Tensor:
    """MixUp: share x first + (1 - share) x second, pixel by pixel, pixels rounded (arXiv:1710.09412, eq. 1)."""
    mixed = torch.lerp(second.float(), first.float(), share)
    return (mixed.round() if first.dtype == torch.uint8 else mixed).to(first.dtype)


def box(height: int, width: int, share: float, down: float, right: float) -> tuple[int, int, int, int]:
    """CutMix's crop: top, left, height, width, the sides scaled by sqrt(1 - share) (arXiv:1905.04899, eq. 2).

    Args: down, right in [0, 1): position of the crop, 0: at the top left. It always lies inside the image.
    """
    scale = math.sqrt(1 - share)
    high, wide = round(height * scale), round(width * scale)
    return int(down * (height - high + 1)), int(right * (width - wide + 1)), high, wide


def paste(onto: Tensor, source: Tensor, place: tuple[int, int, int, int]) -> Tensor:
    """`onto` with a box (top, left, height, width) of `source` at the same place."""
    top, left, high, wide = place
    out = onto.clone()
    out[:, top : top + high, left : left + wide] = source[:, top : top + high, left : left + wide]
    return out


def another(row: int, n: int, rng: np.random.Generator) -> int:
    """Any other of n rows with equal probability; `row` itself if it is the only one."""
    if n == 1:
        return row
    other = int(rng.integers(n - 1))
    return other + (other >= row)


@lru_cache(maxsize=2)
def cycle(seed: int, n: int) -> Partners:
    """Every row's successor in a keyed cycle of all n rows: each row is the partner of exactly one other."""
    order = permutation(n, seed, "partners")
    partners = np.empty_like(order)
    partners[order] = np.roll(order, -1)
    return partners


def read_rewrites(path: str, source: Source) -> Rewrites:
    """Captions of pairs from a parquet file (key, partner, caption); several rows of a pair are several captions.

    Raises: ValueError when it cannot be read, or names no pair of the source.
    """
    rewrites: Rewrites = {}
    table = read_columns(path, "key", "partner", "caption")
    for own, partner, caption in zip(*table, strict=True):
        rewrites.setdefault((own, partner), []).append(caption)
    known = set(keys(source))
    if not any(known.issuperset(pair) for pair in rewrites):
        first = next(iter(rewrites), ("", ""))
        raise ValueError(
            f"{path}: no row names two samples of {source.name}, the first is {first}. Was it made of other data?"
        )
    return rewrites


def named(source: Source, path: str) -> Partners:
    """Partners from a parquet file (key, partner).

    Raises: ValueError for a key twice, a partner that the source does not have, or a readable row without partner.
    """
    own, others = read_columns(path, "key", "partner")
    if twice := [key for key, count in Counter(own).items() if count > 1]:
        raise ValueError(f"{path} names a partner of {twice[0]!r} twice. Expected one row per sample.")
    all_keys, partner_of = keys(source), dict(zip(own, others, strict=True))
    row_of = {key: row for row, key in reversed(list(enumerate(all_keys)))}
    if unknown := [other for other in others if other not in row_of]:
        raise ValueError(f"{path} names the partner {unknown[0]!r}, which {source.name} does not have.")
    rows = np.array([row_of[partner_of[key]] if key in partner_of else -1 for key in all_keys], np.int64)
    for row in np.flatnonzero(rows < 0).tolist():
        with suppress(BadSample):  # bad rows are never composed
            record = read(source, row)
            decode(record.image)
            if record.captions:
                raise ValueError(f"{path} has no entry for {record.key!r} of {source.name}. Expected every key.")
    return rows


def similar(source: Source, table: Any, farthest: bool) -> Partners:
    """For each row the row with the largest (or smallest) cosine of mean caption embeddings.

    Raises: ValueError when the feature store lacks a readable row.
    """
    places, means = table.places(source), table.text_means()
    norms = np.linalg.norm(means, axis=1, keepdims=True)
    embedded = (places >= 0) & (norms[places, 0] > 0)
    rows, place = np.flatnonzero(embedded), places[embedded]
    if len(set(place.tolist())) < 2:
        raise ValueError(f"{source.name} has one sample with an embedding: nearest and farthest need at least two.")
    unit = (means / np.maximum(norms, 1e-12))[place]
    partners = np.full(len(places), -1, np.int64)
    partners[rows] = rows[_best(-unit if farthest else unit, unit, place)]
    return partners


def _best(queries: NDArray[np.float32], features: NDArray[np.float32], place: Partners) -> Partners:
    """For each query [N, D] the feature [N, D] of another sample with the largest product."""
    step = max(1, BLOCK // len(features))
    best = []
    for start in range(0, len(queries), step):
        product = queries[start : start + step] @ features.T
        product[place[start : start + step, None] == place[None]] = -np.inf
        best.append(product.argmax(1))
    return np.concatenate(best).astype(np.int64)
