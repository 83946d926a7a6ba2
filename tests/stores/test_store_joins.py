"""Which rows of a store belong to the rows of a run, by source and row, else by key; and which of augmented views."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from kiloword.cli.main import main
from kiloword.config.recipes import AugmentConfig, DataConfig, Recipe, TextConfig
from kiloword.config.settings import read_config
from kiloword.data.edits import MixtureSource, mix
from kiloword.data.images.augmentation import EvalTransform
from kiloword.data.images.views import Augmented
from kiloword.data.joins import kept, with_captions
from kiloword.data.loader import Loader
from kiloword.data.open import open_source
from kiloword.data.sampler import Order
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.methods.defaults import default_recipe
from kiloword.stores.embed import embed
from kiloword.stores.features import FeatureStore
from kiloword.stores.runs import stored as reads
from kiloword.training.loop import RunOptions, train
from kiloword.training.run_folder import RunFile
from kiloword.types import Batch, Example, Source
from photo_folders import refused
from tars import pairs, photo, write_tar

SIZE, VIEWS = 8, 3
AUGMENT = AugmentConfig(crop=0.3, flip=0.5, jitter=0.5)
STRONG = Augmented(VIEWS, AUGMENT, seed=5)
QUIET = RunOptions(quiet=True, device="cpu", save_every=2)


class Colours:
    """A teacher whose features of an image are the means of its pixels in the cells of a grid."""

    size, fingerprint = SIZE, "colours"
    resize: Literal["shortest"] = "shortest"

    def __init__(self, grid: int = SIZE) -> None:
        self.grid, self.asked = grid, 0

    def encode_images(self, images: Tensor) -> Tensor:
        self.asked += len(images)
        return F.normalize(F.adaptive_avg_pool2d(images.float(), self.grid).flatten(1), dim=1)

    def encode_texts(self, texts: Sequence[str]) -> Tensor:
        return F.normalize(torch.tensor([[len(t)] * 3 * self.grid**2 for t in texts]).float(), dim=1)


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
    images = [EvalTransform(SIZE, "shortest")(source.record(row).image) for row in range(len(source))]
    return torch.allclose(features(store, source), Colours(1).encode_images(torch.stack(images)), atol=1e-6)


@pytest.fixture
def data(tmp_path: Path) -> list[str]:
    return [tar(tmp_path / f"{seed}.tar", range(12), seed) for seed in range(2)]


def embedded(out: Path, *data: str) -> FeatureStore:
    return embed(Colours(1), mix([open_source(one) for one in data]), out, dtype="fp32", part=5)


def test_sources_with_equal_keys_share_a_store(data: list[str], tmp_path: Path) -> None:
    store, (first, second) = embedded(tmp_path / "s", *data), map(open_source, data)
    for source in (first, second, mix([second, first])):
        assert right(store, source)
    weighted = MixtureSource([first, second], [1.5, 2.0])
    assert right(store, weighted)
    assert right(store, weighted.at(1))


def test_parts_and_keep_lists_find_their_rows(tmp_path: Path) -> None:
    path = tar(tmp_path / "many.tar", range(40))
    store, source = embedded(tmp_path / "s", path), open_source(path)
    keep = {"key": [f"{n:04d}" for n in range(40)], "caption": [f"image {n}" for n in range(40)]}
    pq.write_table(pa.table({**keep, "keep": [n % 3 == 0 for n in range(40)]}), tmp_path / "k.parquet")
    chosen, part = kept(source, [tmp_path / "k.parquet"]), open_source(f"train-part:{path}")
    assert (len(chosen), len(part) < 40) == (14, True)
    most = embedded(tmp_path / "h", f"train-part:{path}")
    assert right(store, chosen)
    assert right(store, part)
    assert right(most, part)
    for other in (source, open_source(f"val-part:{path}")):
        with pytest.raises(ValueError, match="lacks"):
            most.of(other)


def test_keys_serve_other_files_of_the_same_images(data: list[str], tmp_path: Path) -> None:
    """A subset, and all rows in another order; not images that the store lacks, nor others of equal keys."""
    store = embedded(tmp_path / "s", data[0])
    for name, rows in (("subset", range(3, 9)), ("order", [7, 3, 11, 0])):
        assert right(store, open_source(tar(tmp_path / f"{name}.tar", rows)))
    for name, rows, seed, caption, word in (
        ("more", range(14), 0, "image {}", "'0012'"),
        ("other", range(6), 1, "image {}", "'0000'"),
        ("words", range(6), 0, "a photo {}", "captions"),
    ):
        with pytest.raises(ValueError, match=word):
            store.of(open_source(tar(tmp_path / f"{name}.tar", rows, seed, caption)))
    both = embedded(tmp_path / "b", *data)
    with pytest.raises(ValueError, match="two images with the key '0003' that differ"):
        both.of(open_source(str(tmp_path / "subset.tar")))


def test_extra_captions_must_be_the_store_s(data: list[str], tmp_path: Path) -> None:
    source = open_source(data[0])
    pq.write_table(pa.table({"key": ["0003"], "captions": [["a pseudo-caption"]]}), tmp_path / "e.parquet")
    extended = with_captions(source, [tmp_path / "e.parquet"])
    assert right(embed(Colours(1), extended, tmp_path / "e", dtype="fp32"), source)
    assert right(FeatureStore(tmp_path / "e"), extended)
    with pytest.raises(ValueError, match=r"lacks captions of .* one of 0003: .*extra captions"):
        embedded(tmp_path / "s", data[0]).of(extended)


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
        embed(Colours(1), sources[0], tmp_path / "s", dtype="fp32").of(sources[1])
    assert right(embed(Colours(1), mix(sources), tmp_path / "both", dtype="fp32"), mix(sources[::-1]))


# Augmented views


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[Source]:
    folder = tmp_path_factory.mktemp("photos")
    return [open_source(str(write_tar(folder / f"{n}.tar", pairs(12, 12 * n)))) for n in range(2)]


@pytest.fixture(scope="module")
def store(sources: list[Source], tmp_path_factory: pytest.TempPathFactory) -> FeatureStore:
    return stored(tmp_path_factory.mktemp("features") / "t", sources)


def stored(out: Path, sources: list[Source], augmented: Augmented = STRONG, grid: int = SIZE, **options: Any) -> Any:
    source = MixtureSource(sources, (1,) * len(sources)) if len(sources) > 1 else sources[0]
    drawn = {"views": augmented.views, "augment": augmented.augment, "seed": augmented.seed}
    return embed(Colours(grid), source, out, dtype="fp32", **drawn, **{"batch": 5, "part": 7, **options})


def loader(source: Source, stores: Sequence[FeatureStore], augment: AugmentConfig = AUGMENT, **options: Any) -> Loader:
    texts = Tokenizer.train([f"image {n}" for n in range(24)], 300)
    data, text = DataConfig(augment=augment), TextConfig(context=16, vocab=texts.vocab)
    order = Order(len(source), 4, seed=1)
    read = reads(stores, data, source, texts)
    made = {"stores": read.stores, "shown": read.shown, "seed": 1, **options}
    return Loader(source, order, data, text, made.pop("size", SIZE), texts, **made)


def batches(made: Loader) -> list[Batch]:
    return list(made.batches(0, 3))


def test_features_are_those_of_the_view_that_is_shown(sources: list[Source], store: FeatureStore) -> None:
    """A run on the second tar has other rows than the store; every view comes once in K epochs."""
    made, seen = loader(sources[1], [store]), list[dict[int, bytes]]()
    for epoch in range(VIEWS + 1):
        seen.append({})
        for step in range(3 * epoch, 3 * epoch + 3):
            batch = made.batch(step)
            found = batch.image_features["teacher"]
            torch.testing.assert_close(found, Colours().encode_images(batch.images), rtol=0, atol=1e-6)
            rows = made.order.batch_rows(step)[1].tolist()
            seen[-1] |= {row: x.numpy().tobytes() for row, x in zip(rows, batch.images, strict=True)}
    assert seen[0] == seen[VIEWS]
    assert all(len({one[row] for one in seen}) == VIEWS for row in range(12))


def test_a_student_of_another_size_sees_the_same_crop(sources: list[Source], tmp_path: Path) -> None:
    """Means of quarters differ by rounding and resampling alone, and less than those of two views."""
    augmented = replace(STRONG, augment=AugmentConfig(crop=0.3, flip=0.5))
    made = stored(tmp_path / "t", sources[:1], augmented, grid=2)
    student = loader(sources[0], [made], augmented.augment, size=24)
    near, far = list[float](), list[float]()
    for batch in batches(student):
        found, seen = batch.image_features["teacher"], Colours(2).encode_images(batch.images)
        near.append(float((found - seen).norm(dim=1).max()))
        far.append(float((found.roll(1, 0) - seen).norm(dim=1).min()))
    assert max(near) < 0.05
    assert max(near) < min(far)


def test_what_does_not_fit_is_refused(sources: list[Source], store: FeatureStore, tmp_path: Path) -> None:
    plain = stored(tmp_path / "plain", sources, Augmented(), name="plain")
    other = stored(tmp_path / "other", sources, replace(STRONG, seed=6), name="other")
    data = DataConfig(augment=AUGMENT, image_features=("tokens",))
    refusals: tuple[tuple[Callable[[], object], str], ...] = (
        (lambda: loader(sources[0], [store, plain]), "the same in all stores"),
        (lambda: loader(sources[0], [store, other]), "the same in all stores"),
        (lambda: loader(sources[0], [store], AugmentConfig()), "no augmentation"),
        (lambda: reads([store], data, sources[0], Tokenizer.train([], 262)), "--image-features"),
        (lambda: store.images(), "`train --features` alone"),
        (lambda: stored(tmp_path / "plain", sources, name="plain"), "views 1 there, 3 here"),
    )
    for refusal, word in refusals:
        with pytest.raises(ValueError, match=word):
            refusal()
    same = stored(tmp_path / "same", sources, name="same", grid=2)
    assert batches(loader(sources[0], [store, same]))[0].image_features.keys() >= {"teacher", "same"}


def recipe(data: str) -> Recipe:
    base = default_recipe("clip", "debug", (data,))
    model = replace(base.model, image=replace(base.model.image, size=16, patch=8))
    return replace(base, model=model, batch=8, steps=2, precision="fp32", data=replace(base.data, tokenizer_vocab=300))


def test_the_commands(sources: list[Source], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two teachers; the run takes their augmentation over, without a note, and goes on bit for bit with workers."""
    data = write_tar(tmp_path / "data.tar", pairs(24))
    model = train(recipe(str(data)), tmp_path / "teacher", options=QUIET)
    flags = ("--data", data, "--device", "cpu", "--workers", 0)
    crop = ("--augment.crop", 0.4, "--augment.flip", 0.5)

    def run(*words: object) -> str:
        main([str(word) for word in words])
        return "".join(capsys.readouterr())

    for name in ("a", "b"):
        dtype = "fp32" if name == "b" else "fp16"
        options = ("--views", 2, *crop, "--name", name, "--dtype", dtype)
        assert "2 views with seed 0, augment.crop 0.4" in run(
            "embed", model, *flags, "--out", tmp_path / name, *options
        )
    stores = ("--features", tmp_path / "a", tmp_path / "b", "--settings.reinforced.teachers", "a", "b")
    size = ("--size", "debug", "--batch", 8, "--steps", 8, "--save-every", 2)
    words = ("train", "clip+reinforced", *flags, *size, *stores)
    shown = run(*words, "--out", tmp_path / "run")
    assert "saw whole images" not in shown
    whole = load_file(tmp_path / "run" / "model" / "model.safetensors")
    file = read_config(tmp_path / "run" / "config.json", RunFile)
    assert (file.recipe.data.augment.crop, file.recipe.data.augment.flip) == (0.4, 0.5)
    assert "2 views with seed 0" in file.features[0]
    states = tmp_path / "run" / "state"
    for state in states.glob("step-000000008.*"):
        state.unlink()
    assert list(states.glob("step-000000006.*"))
    run(*words, "--out", tmp_path / "run", "--workers", 2)
    resumed = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())
    out = ("embed", model, *flags, "--out", tmp_path / "y")
    scenes = ("embed", model, "--data", "scenes?n=16", "--out", tmp_path / "y", *crop)
    for refusal, word in (
        ((*words, "--augment.crop", 0.9, "--out", tmp_path / "x"), "asks for augment.crop 0.9"),
        ((*out, "--views", 2), "--views 2 without augmentation"),
        ((*out, "--seed", 3), "--seed 3"),
        ((*out, "--views", 0, *crop), "--views is 0"),
        ((*out, "--augment.drop-words", 0.5), "changes no image"),
        (scenes, "neither cropped nor mirrored"),
    ):
        assert word in refused(capsys, *refusal)
