"""Features of augmented views: a run shows the student the view whose features it joins; others are refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from kiloword.cli.main import main
from kiloword.config.recipes import AugmentConfig, DataConfig, Recipe, TextConfig
from kiloword.config.settings import read_config
from kiloword.data.edits import MixtureSource
from kiloword.data.images.views import Augmented
from kiloword.data.loader import Loader
from kiloword.data.open import open_source
from kiloword.data.sampler import Order
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.methods.defaults import default_recipe
from kiloword.mining.corpus import Corpus
from kiloword.stores.embed import embed
from kiloword.stores.features import FeatureStore
from kiloword.stores.runs import stored as reads
from kiloword.training.loop import RunOptions, train
from kiloword.training.run_folder import RunFile
from kiloword.types import Batch, Source
from photo_folders import refused
from tars import pairs, write_tar

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


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[Source]:
    """Two tars of 12 photos with captions."""
    folder = tmp_path_factory.mktemp("photos")
    return [open_source(str(write_tar(folder / f"{n}.tar", pairs(12, 12 * n)))) for n in range(2)]


@pytest.fixture(scope="module")
def store(sources: list[Source], tmp_path_factory: pytest.TempPathFactory) -> FeatureStore:
    """The features of both tars, in parts."""
    return stored(tmp_path_factory.mktemp("features") / "t", sources)


def stored(out: Path, sources: list[Source], augmented: Augmented = STRONG, grid: int = SIZE, **options: Any) -> Any:
    source = MixtureSource(sources, (1,) * len(sources)) if len(sources) > 1 else sources[0]
    return embed(Colours(grid), source, out, dtype="fp32", augmented=augmented, **{"batch": 5, "part": 7, **options})


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


def test_workers_and_an_interruption_change_nothing(sources: list[Source], store: FeatureStore, tmp_path: Path) -> None:
    """Views depend on the key, not on the row, the batch or the worker."""
    again = stored(tmp_path / "t", sources, batch=3, workers=2)
    for path in store.path.iterdir():
        assert (again.path / path.name).read_bytes() == path.read_bytes()


def test_what_does_not_fit_is_refused(sources: list[Source], store: FeatureStore, tmp_path: Path) -> None:
    plain = stored(tmp_path / "plain", sources, Augmented(), name="plain")
    other = stored(tmp_path / "other", sources, replace(STRONG, seed=6), name="other")
    data = DataConfig(augment=AUGMENT, image_features=("tokens",))
    refusals: tuple[tuple[Callable[[], object], str], ...] = (
        (lambda: loader(sources[0], [store, plain]), "the same in all stores"),
        (lambda: loader(sources[0], [store, other]), "the same in all stores"),
        (lambda: loader(sources[0], [store], AugmentConfig()), "no augmentation"),
        (lambda: reads([store], data, sources[0], Tokenizer.train([], 262)), "--image-features"),
        (lambda: Corpus.of(store), "`train --features` alone"),
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
