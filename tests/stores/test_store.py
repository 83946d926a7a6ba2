"""Feature stores: what is embedded once is what a batch carries, joined to the rows of a run; and augmented views."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from io import StringIO
from itertools import chain
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

from commands import refused
from folders import model_folder
from kiloword.cli.main import main
from kiloword.config.recipes import AugmentConfig, DataConfig, TextConfig
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
from kiloword.randomness import key
from kiloword.stores.embed import embed
from kiloword.stores.features import Features, FeatureStore
from kiloword.stores.runs import stored as reads
from kiloword.training.loop import RunOptions, train
from kiloword.training.run_folder import RunFile
from kiloword.types import Example, Source
from sources import Images, decoded, files_of
from tars import pairs, photo, write_tar

SIZE, DIM, ROWS, PART, VIEWS = 8, 12, 40, 16, 3
AUGMENT = AugmentConfig(crop=0.3, flip=0.5, jitter=0.5)
STRONG = Augmented(VIEWS, AUGMENT, seed=5)
TOKENIZER = Tokenizer.train([f"image {i} caption {j}" for i in range(ROWS) for j in range(3)], 320)
Captions = int | Literal["one", "all"]


class Colours:
    """A teacher whose features of an image are the means of its pixels in a grid; it counts what it is asked."""

    size = SIZE
    resize: Literal["shortest"] = "shortest"

    def __init__(self, grid: int = 2, fingerprint: str = "colours", stop_after: int = -1) -> None:
        self.grid, self.fingerprint, self.stop_after, self.images = grid, fingerprint, stop_after, 0

    def encode_images(self, images: Tensor) -> Tensor:
        if self.images == self.stop_after:
            raise KeyboardInterrupt
        self.images += len(images)
        return F.normalize(F.adaptive_avg_pool2d(images.float(), self.grid).flatten(1), dim=1)

    def encode_texts(self, texts: Sequence[str]) -> Tensor:
        rows = [torch.randn(3 * self.grid**2, generator=torch.Generator().manual_seed(key(text))) for text in texts]
        return F.normalize(torch.stack(rows), dim=1) if rows else torch.empty(0, 3 * self.grid**2)


class Wrong(Colours):
    """Texts get NaN, or one number fewer than images."""

    def encode_texts(self, texts: Sequence[str]) -> Tensor:
        found = super().encode_texts(texts)
        return found / 0 if self.fingerprint == "broken" else found[:, 1:]


# Row 5 is bad, rows 7 and 8 have odd keys, row 9 has no caption.
ODD = {7: "folder/ünï.cöde", 8: "no \udcff utf-8"}
images = partial(Images, bad={5: "sample", 9: "silent"}, side=SIZE, most=3, keys=ODD)


def rounded(features: Tensor) -> Tensor:
    return features.half().float()


def pixels(source: Source, row: int) -> Tensor:
    return torch.from_numpy(source.record(row).image).permute(2, 0, 1)[None]


def loader(source: Source, stores: Sequence[FeatureStore], size: int = SIZE, **data: Any) -> Loader:
    config = DataConfig(**{"augment": AUGMENT, **data})
    order, text = Order(len(source), 4, seed=1), TextConfig(context=24, vocab=400)
    read = reads(stores, config, source, TOKENIZER)
    return Loader(source, order, config, text, size, TOKENIZER, stores=read.stores, shown=read.shown, seed=1)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> FeatureStore:
    """Three pieces: of 16, 16 and 8 rows."""
    return embed(Colours(), images(), tmp_path_factory.mktemp("features") / "t", batch=5, part=PART)


def test_what_is_stored(table: FeatureStore) -> None:
    source, teacher = images(), Colours()
    good = [row for row in range(ROWS) if row != 5]
    assert (table.name, table.file.width, len(table)) == ("teacher", DIM, len(good))
    assert table.keys == [source.key(row) for row in good]
    captions = [source.record(row).captions for row in good]
    assert table.captions == list(chain(*captions))
    assert table.starts.tolist() == np.cumsum([0, *map(len, captions)]).tolist()
    assert table.places(source).tolist() == [-1 if row == 5 else row - (row > 5) for row in range(ROWS)]
    expected = torch.cat([teacher.encode_images(pixels(source, row)) for row in good])
    assert torch.equal(torch.tensor(table.images()).float(), rounded(expected))
    assert torch.equal(torch.tensor(table.texts()).float(), rounded(teacher.encode_texts(table.captions)))
    means = [rounded(teacher.encode_texts(c)).mean(0) if c else torch.zeros(DIM) for c in captions]
    assert torch.allclose(torch.from_numpy(table.text_means()), torch.stack(means), atol=1e-7)
    for row in (4, 5):  # a row that was bad has no features
        example = Example(source.key(row), row, torch.zeros(3, SIZE, SIZE), [])
        Features(table, source)(example, source)
        assert bool(example.image_features["teacher"].any()) == (row != 5)


@pytest.mark.parametrize("captions", ["one", 2, "all"])
def test_a_batch_carries_the_features_of_its_whole_captions(table: FeatureStore, captions: Captions) -> None:
    """Words are dropped from the texts, not from what the features are of."""
    teacher, dropped = Colours(), 0
    plain = loader(images(), [table], captions=captions, augment=AugmentConfig(crop=0.5, drop_words=0.3))
    whole = replace(plain, data=replace(plain.data, augment=AugmentConfig()))
    for step in range(11):
        batch, undropped = plain.batch(step), whole.batch(step)
        texts = decoded(TOKENIZER, undropped.texts)
        assert torch.equal(batch.text_features["teacher"], rounded(teacher.encode_texts(texts)))
        rows = [int(text.split()[1]) for text in texts]
        expected = torch.cat([rounded(teacher.encode_images(pixels(images(), row))) for row in rows])
        assert torch.equal(batch.image_features["teacher"][batch.image_of_text], expected)
        for n in range(len(batch)):
            own = batch.text_features["teacher"][batch.image_of_text == n]
            assert torch.allclose(batch.image_features["teacher.texts"][n], own.mean(0), atol=1e-7)
        dropped += len(undropped.texts.ids) - len(batch.texts.ids)
    assert dropped > 0


@pytest.mark.parametrize("workers", [0, 2])
def test_goes_on_after_an_interruption(tmp_path: Path, workers: int) -> None:
    """Whole pieces are not made again, and the result is that of one run, byte for byte."""
    whole = embed(Colours(), images(), tmp_path / "whole", part=PART, batch=4).path
    with pytest.raises(KeyboardInterrupt):
        embed(Colours(stop_after=1 + 23), images(), tmp_path / "cut", part=PART, batch=4)  # within the second piece
    with pytest.raises(ValueError, match="not finished"):
        FeatureStore(tmp_path / "cut")
    with (tmp_path / "cut" / "images.npy").open("ab") as file:
        file.write(b"of a piece that was not finished")
    teacher = Colours()
    embed(teacher, images(), tmp_path / "cut", part=PART, batch=4, workers=workers)
    assert teacher.images == 1 + ROWS - PART  # and one to see how many numbers a feature has
    assert files_of(tmp_path / "cut") == files_of(whole)
    teacher, lines = Colours(), StringIO()
    embed(teacher, images(), tmp_path / "cut", lines, batch=3)
    assert teacher.images == 1, "a finished store is left alone"
    assert "1 of 40 samples are bad" in lines.getvalue()
    assert "truncated image: k005\n" in lines.getvalue()
    assert files_of(tmp_path / "cut") == files_of(whole)


def test_what_makes_no_store(tmp_path: Path, table: FeatureStore) -> None:
    """Another teacher, other data or options than what is there; values that cannot be stored; other folders."""
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").touch()
    broken = images(bad=dict.fromkeys(range(ROWS), "sample"))
    given: dict[str, Any] = {"teacher": Colours(), "source": images(), "out": table.path}
    for n, (change, word) in enumerate((
        ({"teacher": Colours(fingerprint="new")}, "weights colours there, new here"),
        ({"source": images(fingerprint="q")}, "fingerprint f there, q here"),
        ({"name": "second"}, "name teacher there, second here"),
        ({"dtype": "fp32"}, "dtype fp16 there, fp32 here"),
        ({"views": 3, "augment": AUGMENT}, "views 1 there, 3 here"),
        ({"out": tmp_path / "photos"}, "photos exists and holds no features"),
        ({"source": broken}, "none of its 40 rows is a usable image: .*truncated im"),
        ({"teacher": Wrong(fingerprint="broken")}, "texts are NaN or infinite, near row 0"),
        ({"teacher": Wrong()}, f"images {DIM} dimensions and texts {DIM - 1}"),
        ({"name": "a.b"}, r"'a\.b'"),
        ({"batch": 0}, "--batch"),
    )):  # fmt: skip
        out = {"out": tmp_path / str(n)} if n > 5 else {}
        with pytest.raises(ValueError, match=word):
            embed(**{**given, **out, **change})
    shutil.copytree(table.path, tmp_path / "cut")
    (tmp_path / "cut" / "texts.npy").write_bytes(b"")
    for name, word in (("photos", "holds no features"), ("cut", "damaged")):
        with pytest.raises(ValueError, match=word):
            FeatureStore(tmp_path / name)


def test_a_table_of_another_teacher_at_the_same_path_is_no_resumption(tmp_path: Path) -> None:
    """Made again by the same teacher, it is the same."""
    base = default_recipe("siglip+mined", "debug", ("scenes?n=16",))
    data = replace(base.data, tokenizer_vocab=300, features=(str(tmp_path / "t"),))
    recipe = replace(base, data=data, batch=8)

    def go_on(steps: int, teacher: Colours) -> None:
        shutil.rmtree(tmp_path / "t", ignore_errors=True)
        embed(teacher, open_source("scenes?n=16", SIZE), tmp_path / "t")
        train(replace(recipe, steps=steps), tmp_path / "run", options=RunOptions(extend=True, quiet=True))

    go_on(1, Colours())
    go_on(2, Colours())
    with pytest.raises(ValueError, match=r"of the model colours .* of the model other "):
        go_on(3, Colours(fingerprint="other"))


# Which rows of a store belong to the rows of a run: by source and row, else by key


def tar(path: Path, rows: Sequence[int], seed: int = 0, caption: str = "image {}") -> Source:
    """Photos, each with its key, by rows; other seeds have other pixels."""
    files = dict[str, bytes]()
    for row in rows:
        files |= {f"{row:04d}.png": photo(seed=100 * seed + row), f"{row:04d}.txt": caption.format(row).encode()}
    return open_source(str(write_tar(path, files)))


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[Source]:
    """Two tars of equal keys."""
    folder = tmp_path_factory.mktemp("photos")
    return [tar(folder / f"{seed}.tar", range(12), seed) for seed in range(2)]


def embedded(out: Path, *sources: Source) -> FeatureStore:
    return embed(Colours(1), mix(list(sources)), out, dtype="fp32", part=5)


def right(store: FeatureStore, source: Source) -> bool:
    """Whether the features are what the teacher gives for the images of the source."""
    found, images, joined = list[Tensor](), list[Tensor](), Features(store, source)
    for row in range(len(source)):
        record = source.record(row)
        example = Example(record.key, row, torch.empty(0), record.captions)
        joined(example, source)
        assert example.text_features["teacher"].any()
        found.append(example.image_features["teacher"])
        images.append(EvalTransform(SIZE, "shortest")(record.image))
    return torch.allclose(torch.stack(found), Colours(1).encode_images(torch.stack(images)), atol=1e-6)


def test_sources_with_equal_keys_share_a_store(sources: list[Source], tmp_path: Path) -> None:
    store, (first, second) = embedded(tmp_path / "s", *sources), sources
    weighted = MixtureSource([first, second], [1.5, 2.0])
    for source in (first, second, mix([second, first]), weighted, weighted.at(1)):
        assert right(store, source)


def test_parts_and_keep_lists_find_their_rows(tmp_path: Path) -> None:
    source = tar(tmp_path / "many.tar", range(40))
    keep = {"key": [f"{n:04d}" for n in range(40)], "caption": [f"image {n}" for n in range(40)]}
    pq.write_table(pa.table({**keep, "keep": [n % 3 == 0 for n in range(40)]}), tmp_path / "k.parquet")
    chosen, part = kept(source, [tmp_path / "k.parquet"]), open_source(f"train-part:{source.name}")
    assert (len(chosen), len(part) < 40) == (14, True)
    store, most = embedded(tmp_path / "s", source), embedded(tmp_path / "h", part)
    assert right(store, chosen)
    assert right(store, part)
    assert right(most, part)
    for other in (source, open_source(f"val-part:{source.name}")):
        with pytest.raises(ValueError, match="lacks"):
            Features(most, other)


def test_keys_serve_other_files_of_the_same_images(sources: list[Source], tmp_path: Path) -> None:
    """A subset, and all rows in another order; not images that the store lacks, nor others of equal keys."""
    store, both = embedded(tmp_path / "s", sources[0]), embedded(tmp_path / "b", *sources)
    subset = tar(tmp_path / "subset.tar", range(3, 9))
    assert right(store, subset)
    assert right(store, tar(tmp_path / "order.tar", [7, 3, 11, 0]))
    for made, source, word in (
        (store, tar(tmp_path / "more.tar", range(14)), "'0012'"),
        (store, tar(tmp_path / "other.tar", range(6), 1), "'0000'"),
        (store, tar(tmp_path / "words.tar", range(6), 0, "a photo {}"), "captions"),
        (both, subset, "two images with the key '0003' that differ"),
    ):
        with pytest.raises(ValueError, match=word):
            Features(made, source)


def test_extra_captions_must_be_the_store_s(sources: list[Source], tmp_path: Path) -> None:
    pq.write_table(pa.table({"key": ["0003"], "captions": [["a pseudo-caption"]]}), tmp_path / "e.parquet")
    extended = with_captions(sources[0], [tmp_path / "e.parquet"])
    store = embed(Colours(1), extended, tmp_path / "e", dtype="fp32")
    assert right(store, sources[0])
    assert right(store, extended)
    with pytest.raises(ValueError, match=r"lacks captions of .* one of 0003: .*extra captions"):
        Features(embedded(tmp_path / "s", sources[0]), extended)


def test_other_pixels_behind_the_same_names_and_sizes_are_refused(tmp_path: Path) -> None:
    """The fingerprint of a folder covers names and sizes, not pixels."""
    sources = list[Source]()
    for name, colour in (("a", 10), ("b", 240)):
        (tmp_path / name).mkdir()
        for n in range(3):
            (tmp_path / name / f"{n}.ppm").write_bytes(b"P6 8 8 255\n" + bytes([colour, 9 * n, 90]) * 64)
            (tmp_path / name / f"{n}.txt").write_text(f"image {n}")
        sources.append(open_source(str(tmp_path / name)))
    assert sources[0].fingerprint == sources[1].fingerprint
    with pytest.raises(ValueError, match="another image"):
        Features(embedded(tmp_path / "s", sources[0]), sources[1])
    assert right(embedded(tmp_path / "both", *sources), mix(sources[::-1]))


# Augmented views


def viewed(out: Path, sources: list[Source], augmented: Augmented = STRONG, grid: int = SIZE, **options: Any) -> Any:
    drawn = {"views": augmented.views, "augment": augmented.augment, "seed": augmented.seed}
    return embed(Colours(grid), mix(sources), out, dtype="fp32", **drawn, **{"batch": 5, "part": 7, **options})


@pytest.fixture(scope="module")
def views(sources: list[Source], tmp_path_factory: pytest.TempPathFactory) -> FeatureStore:
    store: FeatureStore = viewed(tmp_path_factory.mktemp("features") / "t", sources)
    return store


def test_features_are_those_of_the_view_that_is_shown(sources: list[Source], views: FeatureStore) -> None:
    """A run on the second tar has other rows than the store; every view comes once in K epochs."""
    made, seen = loader(sources[1], [views]), list[dict[int, bytes]]()
    for epoch in range(VIEWS + 1):
        seen.append({})
        for step in range(3 * epoch, 3 * epoch + 3):
            batch = made.batch(step)
            found = batch.image_features["teacher"]
            torch.testing.assert_close(found, Colours(SIZE).encode_images(batch.images), rtol=0, atol=1e-6)
            rows = made.order.batch_rows(step)[1].tolist()
            seen[-1] |= {row: x.numpy().tobytes() for row, x in zip(rows, batch.images, strict=True)}
    assert seen[0] == seen[VIEWS]
    assert all(len({one[row] for one in seen}) == VIEWS for row in range(12))


def test_views_that_do_not_fit_are_refused(sources: list[Source], views: FeatureStore, tmp_path: Path) -> None:
    plain = viewed(tmp_path / "plain", sources, Augmented(), name="plain")
    other = viewed(tmp_path / "other", sources, replace(STRONG, seed=6), name="other")
    refusals: tuple[tuple[Callable[[], object], str], ...] = (
        (lambda: loader(sources[0], [views, plain]), "the same in all stores"),
        (lambda: loader(sources[0], [views, other]), "the same in all stores"),
        (lambda: loader(sources[0], [views], augment=AugmentConfig()), "no augmentation"),
        (lambda: loader(sources[0], [views], image_features=("tokens",)), "--image-features"),
        (lambda: views.images(), "`train --features` alone"),
    )
    for refusal, word in refusals:
        with pytest.raises(ValueError, match=word):
            refusal()
    same = viewed(tmp_path / "same", sources, name="same", grid=2)
    assert loader(sources[0], [views, same]).batch(0).image_features.keys() >= {"teacher", "same"}


def test_a_run_on_views_of_two_teachers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run takes their augmentation over, without a note, and goes on bit for bit with workers."""
    data, model = write_tar(tmp_path / "data.tar", pairs(24)), model_folder(tmp_path / "teacher")
    flags = ("--data", data, "--device", "cpu", "--workers", 0)

    def run(*words: object) -> str:
        main([str(word) for word in words])
        return "".join(capsys.readouterr())

    for name, dtype in (("a", "fp16"), ("b", "fp32")):
        options = ("--views", 2, "--augment.crop", 0.4, "--augment.flip", 0.5, "--name", name, "--dtype", dtype)
        shown = run("embed", model, *flags, "--out", tmp_path / name, *options)
        assert "2 views with seed 0, augment.crop 0.4" in shown
    stores = ("--features", tmp_path / "a", tmp_path / "b", "--settings.reinforced.teachers", "a", "b")
    size = ("--size", "debug", "--batch", 8, "--steps", 4, "--save-every", 2)
    words = ("train", "clip+reinforced", *flags, *size, *stores)
    assert "saw whole images" not in run(*words, "--out", tmp_path / "run")
    whole = load_file(tmp_path / "run" / "model" / "model.safetensors")
    file = read_config(tmp_path / "run" / "config.json", RunFile)
    assert (file.recipe.data.augment.crop, file.recipe.data.augment.flip) == (0.4, 0.5)
    assert "2 views with seed 0" in file.features[0]
    for state in (tmp_path / "run" / "state").glob("step-000000004.*"):
        state.unlink()
    run(*words, "--out", tmp_path / "run", "--workers", 2)
    resumed = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())
    twice = ("--features", tmp_path / "a", tmp_path / "a")
    assert "of a, a" in refused(capsys, *words[:-6], *twice, "--out", tmp_path / "x")
    assert "asks for augment.crop 0.9" in refused(capsys, *words, "--augment.crop", 0.9, "--out", tmp_path / "x")
