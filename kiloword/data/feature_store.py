"""Feature stores: precomputed features of a data set's images and captions, joined to examples by key.

An image has features of one image without augmentation, or of K augmented views, which training shows the student.

Format (a folder, read by `KeyedStore`): `table.json` (`TableFile`); `part-00000.arrow` and so on, each with the
readable images of `part` rows: keys, captions and features, in the data's order; finally `index.npy`, [2, N] uint64:
ascending digests of the keys, and the place of each (part << 32 | row in the part). Without the index the store is not
finished. Stores of tokens (`token_store`) have other columns.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeVar

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from kiloword.config.recipes import AugmentConfig, Recipe
from kiloword.config.settings import about, read_config
from kiloword.data.edits import MixtureSource, Selection
from kiloword.data.files import find_key, key_bytes, key_text
from kiloword.data.images.views import LATER, MOST, in_words, of_images
from kiloword.data.parts import Part, TableSettings, part_path
from kiloword.randomness import Draw, key
from kiloword.types import Example, Source

OnePart = TypeVar("OnePart", bound=Part)
StoredFeatures = NDArray[np.floating[Any]]
INDEX, TABLE = "index.npy", "table.json"
_OPEN = 256  # parts that a process keeps mapped: for a million images
AGAIN = "Run the same `kiloword embed` command again to complete it."


@dataclass(frozen=True, kw_only=True)
class TableFile(TableSettings):
    """The contents of `table.json`."""

    name: str  # name of the features in a batch
    dim: int = field(metadata=about(low=1, high=1e6))
    teacher: str  # as given by the user
    teacher_fingerprint: str
    precision: str  # of the teacher
    dtype: Literal["fp16", "fp32"]  # of the features in the file
    contents: tuple[str, ...]  # see `contents`
    views: int = field(default=1, metadata=about(low=1, high=MOST))  # K, of each image
    seed: int = 0  # of the augmentation
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    format: Literal["kiloword-features-1"] = "kiloword-features-1"

    def schema(self) -> pa.Schema:
        """Columns of a part; features are fixed-size lists, so that a column is one flat buffer."""
        vector = pa.list_(pa.float16() if self.dtype == "fp16" else pa.float32(), self.dim)
        return pa.schema(
            {
                "key": pa.binary(),
                "content": pa.binary(16),  # digest of pixels and captions
                "image": pa.list_(vector.value_type, self.dim * self.views) if self.augmented else vector,
                "captions": pa.list_(pa.binary()),
                "texts": pa.list_(vector),
            }
        )

    def compared(self) -> list[tuple[Any, str]]:
        digest, space, resize = self.teacher_fingerprint.partition(" ")
        return [
            (self.teacher_fingerprint, f"teacher {self.teacher} ({digest[:16]}{space}{resize})"),
            (self.contents, f"data {self.data} ({self.fingerprint[:16]})"),
            *((getattr(self, name), f"{name} {getattr(self, name)}") for name in ("name", "dim", "precision", "dtype")),
            (self.shown, self.shown),
        ]

    def written(self) -> dict[str, Any]:
        """As ever where images are not augmented, so that older stores go on."""
        drawn = () if self.augmented else ("views", "seed", "augment")
        return {name: value for name, value in super().written().items() if name not in drawn}

    @property
    def augmented(self) -> bool:
        """Whether the features are those of augmented views."""
        return of_images(self.augment) != of_images(AugmentConfig())

    @property
    def shown(self) -> str:
        """What the teacher saw of each image; equal for equal pixels."""
        if not self.augmented:
            return "images without augmentation"
        return f"{self.views} view{'s' * (self.views > 1)} with seed {self.seed}, {in_words(self.augment)}"

    def view(self, draw: Draw, seed: int) -> int:
        """The view that a draw shows: in an epoch, that of its number; for others than the run's `seed`, any."""
        turn = draw.epoch if draw.seed == seed else key(draw.seed, draw.epoch, draw.row, "view")
        return turn % self.views


class StorePart(Part):
    """n images, of K views each, with t captions of a store, memory-mapped.

    Errors: ValueError when the file is missing or damaged.
    """

    again = AGAIN

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        super().__init__(path, schema)
        self.keys, self.contents, image, captions, texts = self.batch.columns
        same = len(texts.values) == len(captions.values) and texts.offsets.equals(captions.offsets)
        if texts.values.null_count or not same:  # every caption has features
            raise ValueError(f"{path} is damaged. {AGAIN}")
        self.captions = captions.values  # [t] binary
        self.starts = captions.offsets.to_numpy()  # [n + 1]
        dim = texts.type.value_type.list_size
        shape = len(image), image.type.list_size // dim, dim  # [n, K, D]
        self.images: StoredFeatures = image.values.to_numpy().reshape(shape)
        self.texts: StoredFeatures = texts.values.values.to_numpy().reshape(-1, dim)

    def texts_of(self, row: int) -> dict[bytes, int]:
        """Captions of an image -> places of their features."""
        start, end = int(self.starts[row]), int(self.starts[row + 1])
        return {caption: start + n for n, caption in enumerate(self.captions[start:end].to_pylist())}


class KeyedStore(Generic[OnePart]):
    """A finished folder of parts, memory-mapped, whose rows are found by key. Pickling it for a worker sends the path.

    Errors: ValueError when the folder is not a finished store, or is damaged.
    """

    file: TableSettings
    what: ClassVar[str] = "feature store"

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        if not (self.path / TABLE).is_file():
            kinds = [kind for kind in ("image", "text") if (self.path / f"{kind}s" / TABLE).is_file()]
            flags = " and ".join(f"--{kind}-features" for kind in kinds)
            holds = f"it has tokens of a tower, which {flags} take{'s' * (len(kinds) == 1)}" if kinds else ""
            raise ValueError(
                f"{path} is no {self.what}: {holds or f'it has no {TABLE}'}. Make one by `kiloword embed`."
            )
        self.file = self.read_settings(self.path / TABLE)
        self._open()

    def read_settings(self, path: Path) -> TableSettings:
        """The contents of `table.json`."""
        raise NotImplementedError

    def open_part(self, path: Path) -> OnePart:
        """Open a part. Raises: ValueError when it is missing or damaged."""
        raise NotImplementedError

    def _open(self) -> None:
        path = self.path
        self._seen_whole: set[int] = set()  # numbers of parts
        self._part = lru_cache(_OPEN)(lambda number: self.open_part(part_path(path, number)))
        if not (path / INDEX).is_file():
            raise ValueError(f"{path} is not finished. {AGAIN}")
        try:
            self._index = np.asarray(np.load(path / INDEX, mmap_mode="r"))  # a plain array: faster to search
        except (OSError, ValueError, EOFError):
            raise ValueError(f"{path / INDEX} is damaged. Remove that file. {AGAIN}") from None
        if self._index.dtype != np.uint64 or self._index.ndim != 2 or len(self._index) != 2:
            raise ValueError(f"{path / INDEX} is not an index of a feature store. Remove that file. {AGAIN}")

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "file": self.file}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    def __len__(self) -> int:
        return int(self._index.shape[1])

    def places(self, raw: bytes) -> Iterator[tuple[OnePart, int]]:
        """The parts, and the rows in them, that can have a key."""
        for place in find_key(self._index, raw):
            yield self._part(place >> 32), place & 0xFFFFFFFF


class FeatureStore(KeyedStore["StorePart"]):
    """Features of one teacher on one data set, memory-mapped; `kiloword embed` writes the folder.

    `join` adds `image_features[name]` [D] and `text_features[name]` [captions, D] (unit norm; zeros, which match
    nothing, where the store has none) and `image_features[name + ".texts"]` [D], the mean of the example's
    `text_features` rows.

    It has N images in the data's order, without bad rows, and T captions. Methods that read the whole store verify
    checksums; `join` notices only unreadable parts. Errors: see `KeyedStore`.
    """

    file: TableFile

    def read_settings(self, path: Path) -> TableFile:
        """The contents of `table.json`."""
        return read_config(path, TableFile)

    def open_part(self, path: Path) -> StorePart:
        """Open a part. Raises: ValueError when it is missing or damaged."""
        return StorePart(path, self.file.schema())

    @property
    def name(self) -> str:
        """Name of the features in a batch, by default "teacher"."""
        return self.file.name

    @property
    def dim(self) -> int:
        """Dimension of the features."""
        return self.file.dim

    def check(self, source: Source) -> None:
        """The store may have more than the source: other sources of a mixture, other captions.

        Raises: ValueError when the store was made from other data.
        """
        if contents(source) <= set(self.file.contents):
            return
        raise ValueError(
            f"the feature store {self.path} was made from {self.file.data} (fingerprint {self.file.fingerprint}), but "
            f"the data is {source.name} ({source.fingerprint}): make one from the same data and extra captions by "
            "`kiloword embed MODEL --data SRC --out DIR`."
        )

    def join(self, example: Example, view: int = 0) -> None:
        """Add features to an example, by its key and the texts of its captions. Args: view: the one of its image."""
        image = np.zeros(self.dim, np.float32)
        texts = np.zeros((len(example.captions), self.dim), np.float32)
        location = self._find(example.key)
        if location is not None:
            part, row = location
            image[:] = part.images[row, view]
            text_places = part.texts_of(row)
            for n, caption in enumerate(example.captions):
                place = text_places.get(key_bytes(caption))
                if place is not None:
                    texts[n] = part.texts[place]
        if not (np.isfinite(image).all() and np.isfinite(texts).all()):
            raise ValueError(
                f"the feature store {self.path} has NaN or infinite features of {example.key}: make it again in "
                "another folder by `kiloword embed`, with --precision fp32."
            )
        example.image_features[self.name] = torch.from_numpy(image)
        example.text_features[self.name] = torch.from_numpy(texts)
        example.image_features[self.name + ".texts"] = example.text_features[self.name].mean(0)

    def _find(self, key: str) -> tuple[StorePart, int] | None:
        raw = key_bytes(key)
        for part, row in self.places(raw):
            if row < len(part.keys) and part.keys[row].as_py() == raw:
                return part, row
        return None

    @cached_property
    def keys(self) -> list[str]:
        """The keys [N]."""
        return [key_text(key) for part in self._parts() for key in part.keys.to_pylist()]

    @cached_property
    def captions(self) -> list[str]:
        """The captions [T], image by image."""
        return [key_text(caption) for part in self._parts() for caption in part.captions.to_pylist()]

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """[N + 1]: the captions of image n are starts[n] to starts[n + 1]."""
        counts = [np.diff(part.starts) for part in self._parts()]
        return np.concatenate([[0], np.cumsum(np.concatenate(counts), dtype=np.int64)])

    def images(self) -> StoredFeatures:
        """[N, D], unit norm, as stored (by default float16); memory-mapped if there is one part.

        Raises: ValueError for a store of augmented views.
        """
        if self.file.augmented:
            raise ValueError(
                f"the feature store {self.path} has {self.file.shown}, which `train --features` alone reads: make one "
                "without --augment in another folder by `kiloword embed`."
            )
        return _joined([part.images[:, 0] for part in self._parts()])

    def texts(self) -> StoredFeatures:
        """[T, D], unit norm, as stored; memory-mapped if there is one part."""
        return _joined([part.texts for part in self._parts()])

    def text_means(self) -> NDArray[np.float32]:
        """[N, D], the mean of each image's captions, float32, not of unit norm; zeros for one without captions."""
        return np.concatenate([_means(part) for part in self._parts()])

    def _parts(self) -> Iterator[StorePart]:
        """All parts, after verification."""
        for number in range(self.file.parts):
            part = self._part(number)
            if number not in self._seen_whole:
                self._check_whole(part, part_path(self.path, number))
                self._seen_whole.add(number)
            yield part

    def _check_whole(self, part: StorePart, path: Path) -> None:
        """Raises: ValueError for damaged bytes, and for features that are NaN or infinite."""
        if not part.whole():
            raise ValueError(f"{path} is damaged. {AGAIN}")
        if not (np.isfinite(part.images).all() and np.isfinite(part.texts).all()):
            raise ValueError(
                f"{path} has features that are NaN or infinite: make it again in another folder by `kiloword embed`, "
                "with --precision fp32."
            )


def with_views(recipe: Recipe, folders: Sequence[str]) -> Recipe:
    """The recipe of a run on feature stores: where they have augmented views, its images are augmented as those are."""
    made = next((store.file.augment for store in map(FeatureStore, folders) if store.file.augmented), None)
    if made is None:
        return recipe
    augment = replace(made, **{name: getattr(recipe.data.augment, name) for name in LATER})
    return replace(recipe, data=replace(recipe.data, augment=augment))


def shown_views(stores: Sequence[FeatureStore], augment: AugmentConfig) -> TableFile | None:
    """The settings of the views that a run on some stores shows; None where no store has augmented views.

    Raises: ValueError where stores have other views than each other, or than the run's augmentation makes.
    """
    first = next((store for store in stores if store.file.augmented), None)
    if first is None:
        return None
    for store in stores:
        if store.file.shown != first.file.shown:
            raise ValueError(
                f"the feature store {first.path} has {first.file.shown}, {store.path} {store.file.shown}: expected the "
                "same in all feature stores of a run. Make them by `kiloword embed` with the same --views, --seed and "
                "--augment."
            )
    if of_images(augment) != of_images(first.file.augment):
        raise ValueError(
            f"the feature store {first.path} has {first.file.shown}, but the run asks for {in_words(augment)}: omit "
            "--augment, or make another store by `kiloword embed --views K` with that augmentation."
        )
    return first.file


def contents(source: Source) -> frozenset[str]:
    """The origin of a source's images and captions, so that a store of more data can serve a run on less.

    For a plain source its fingerprint's images and captions, which edits of captions change; for a mixture those of all
    its sources, whatever their weights.
    """
    if isinstance(source, Selection) and hasattr(source.edit, "contents"):
        change: Callable[[frozenset[str]], frozenset[str]] = source.edit.contents  # type: ignore[union-attr]
        return change(contents(source.source))
    if isinstance(source, MixtureSource):
        return frozenset().union(*(contents(part) for part in source.sources))
    origin: frozenset[str] | None = getattr(source, "contents", None)
    return origin or frozenset({f"{source.fingerprint} images", f"{source.fingerprint} captions"})


def check_name(name: str) -> None:
    """Raises: ValueError for a name that a batch cannot have."""
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name) or name in ("truth", "position"):
        raise ValueError(f"features cannot be named {name!r}: expected letters, digits, - and _, and not 'truth'.")


def _joined(parts: list[StoredFeatures]) -> StoredFeatures:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _means(part: StorePart) -> NDArray[np.float32]:
    counts = np.diff(part.starts)
    owner = torch.from_numpy(np.repeat(np.arange(len(counts)), counts))
    texts = torch.from_numpy(part.texts.astype(np.float32))
    sums = torch.zeros(len(counts), texts.shape[1]).index_add_(0, owner, texts)
    return (sums / torch.from_numpy(counts).clamp(min=1)[:, None]).numpy()
