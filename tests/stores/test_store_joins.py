"""Which rows of a store belong to the rows of a run: by source and row, else by key, else the run is refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kiloword.data.edits import MixtureSource, mix
from kiloword.data.images.augmentation import EvalTransform
from kiloword.data.joins import kept, with_captions
from kiloword.data.open import open_source
from kiloword.stores.embed import embed
from kiloword.stores.features import FeatureStore
from kiloword.types import Example, Source
from tars import photo, write_tar


class Colours:
    """A teacher whose features are the mean colour of an image, and the length of a text."""

    size, fingerprint = 8, "colours"
    resize: Literal["shortest"] = "shortest"

    def encode_images(self, images: Tensor) -> Tensor:
        return F.normalize(images.float().mean((2, 3)), dim=1)

    def encode_texts(self, texts: Sequence[str]) -> Tensor:
        return F.normalize(torch.tensor([[1.0, len(text), 0.5] for text in texts]).reshape(-1, 3), dim=1)


def tar(path: Path, rows: Sequence[int], seed: int = 0, caption: str = "image {}") -> str:
    """A tar of photos, each with its key, by rows; other seeds have other pixels."""
    files = dict[str, bytes]()
    for row in rows:
        files |= {f"{row:04d}.png": photo(seed=100 * seed + row), f"{row:04d}.txt": caption.format(row).encode()}
    return str(write_tar(path, files))


def features(store: FeatureStore, source: Source) -> Tensor:
    """[rows, 3] of all images of a source."""
    found, joined = list[Tensor](), store.of(source)
    for row in range(len(source)):
        record = source.record(row)
        example = Example(record.key, row, torch.empty(0), record.captions)
        joined(example, source)
        assert example.text_features["teacher"].any()
        found.append(example.image_features["teacher"])
    return torch.stack(found)


def right(store: FeatureStore, source: Source) -> bool:
    """Whether the features are what the teacher gives for the images of the source."""
    images = [EvalTransform(8, "shortest")(source.record(row).image) for row in range(len(source))]
    return torch.allclose(features(store, source), Colours().encode_images(torch.stack(images)), atol=1e-6)


@pytest.fixture
def data(tmp_path: Path) -> list[str]:
    """Two tars with equal keys and other photos."""
    return [tar(tmp_path / f"{seed}.tar", range(12), seed) for seed in range(2)]


def stored(out: Path, *data: str) -> FeatureStore:
    return embed(Colours(), mix([open_source(one) for one in data]), out, dtype="fp32", part=5)


def test_sources_with_equal_keys_share_a_store(data: list[str], tmp_path: Path) -> None:
    store, (first, second) = stored(tmp_path / "s", *data), map(open_source, data)
    for source in (first, second, mix([second, first])):
        assert right(store, source)
    weighted = MixtureSource([first, second], [1.5, 2.0])
    assert right(store, weighted)
    assert right(store, weighted.at(1))


def test_parts_and_keep_lists_find_their_rows(tmp_path: Path) -> None:
    path = tar(tmp_path / "many.tar", range(40))
    store, source = stored(tmp_path / "s", path), open_source(path)
    keep = {"key": [f"{n:04d}" for n in range(40)], "caption": [f"image {n}" for n in range(40)]}
    pq.write_table(pa.table({**keep, "keep": [n % 3 == 0 for n in range(40)]}), tmp_path / "k.parquet")
    chosen, part = kept(source, [tmp_path / "k.parquet"]), open_source(f"train-part:{path}")
    assert (len(chosen), len(part) < 40) == (14, True)
    most = stored(tmp_path / "h", f"train-part:{path}")
    assert right(store, chosen)
    assert right(store, part)
    assert right(most, part)
    for other in (source, open_source(f"val-part:{path}")):
        with pytest.raises(ValueError, match="lacks"):
            most.of(other)


def test_keys_serve_other_files_of_the_same_images(data: list[str], tmp_path: Path) -> None:
    """A subset, and all rows in another order; not images that the store lacks, nor others of equal keys."""
    store = stored(tmp_path / "s", data[0])
    for name, rows in (("subset", range(3, 9)), ("order", [7, 3, 11, 0])):
        assert right(store, open_source(tar(tmp_path / f"{name}.tar", rows)))
    for name, rows, seed, caption, word in (
        ("more", range(14), 0, "image {}", "'0012'"),
        ("other", range(6), 1, "image {}", "'0000'"),
        ("words", range(6), 0, "a photo {}", "captions"),
    ):
        with pytest.raises(ValueError, match=word):
            store.of(open_source(tar(tmp_path / f"{name}.tar", rows, seed, caption)))
    both = stored(tmp_path / "b", *data)
    with pytest.raises(ValueError, match="two images with the key '0003' that differ"):
        both.of(open_source(str(tmp_path / "subset.tar")))


def test_extra_captions_must_be_the_store_s(data: list[str], tmp_path: Path) -> None:
    source = open_source(data[0])
    pq.write_table(pa.table({"key": ["0003"], "captions": [["a pseudo-caption"]]}), tmp_path / "e.parquet")
    extended = with_captions(source, [tmp_path / "e.parquet"])
    assert right(embed(Colours(), extended, tmp_path / "e", dtype="fp32"), source)
    assert right(FeatureStore(tmp_path / "e"), extended)
    with pytest.raises(ValueError, match=r"lacks captions of .* one of 0003: .*extra captions"):
        stored(tmp_path / "s", data[0]).of(extended)


def test_other_pixels_behind_the_same_names_and_sizes_are_refused(tmp_path: Path) -> None:
    """The fingerprint of a folder covers names and sizes, not pixels."""
    sources = list[Source]()
    for name, colour in (("a", 10), ("b", 240)):
        (tmp_path / name).mkdir()
        for n in range(3):
            raw = b"P6 8 8 255\n" + np.full((8, 8, 3), [colour, 9 * n, 90], np.uint8).tobytes()
            (tmp_path / name / f"{n}.ppm").write_bytes(raw)
            (tmp_path / name / f"{n}.txt").write_text(f"image {n}")
        sources.append(open_source(str(tmp_path / name)))
    assert sources[0].fingerprint == sources[1].fingerprint
    with pytest.raises(ValueError, match="another image"):
        embed(Colours(), sources[0], tmp_path / "s", dtype="fp32").of(sources[1])
    assert right(embed(Colours(), mix(sources), tmp_path / "both", dtype="fp32"), mix(sources[::-1]))
