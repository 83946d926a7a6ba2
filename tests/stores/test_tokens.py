"""Stored tokens: what the trunk gives, whatever interruptions; a run on them is the run on images."""

from __future__ import annotations

import io
import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from cases import mostly_slow
from commands import refused
from kiloword.cli.main import main
from kiloword.config.recipes import AugmentConfig, LoraConfig, Recipe, TextConfig
from kiloword.data.open import open_source
from kiloword.methods.defaults import default_recipe
from kiloword.model.encoding import inference
from kiloword.stores.embed import embed_tokens
from kiloword.stores.options import EmbedOptions
from kiloword.stores.runs import towers_of
from kiloword.stores.tokens import FoundImages, ImageTokens, TextTokens, TokenizerWithTokens, quantised, restored
from kiloword.training.log import read_metrics
from kiloword.training.loop import RunOptions, train
from kiloword.types import Record
from sources import files_of
from tiny_trunks import JITTER, KINDS, SCENES, SIZE, TinyTrunk, recipe, stored, tiny_trunks, trunks_of

__all__ = ["tiny_trunks"]
pytestmark = pytest.mark.usefixtures("tiny_trunks")
QUIET = RunOptions(log_every=1, quiet=True, device="cpu")


def on_tokens(run: Recipe, folder: Path, **data: Any) -> Recipe:
    features = {"image_features": (str(folder),), "text_features": (str(folder),), **data}
    return replace(run, data=replace(run.data, **features))


def losses(out: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(out / "metrics.jsonl")]


def test_captions_by_their_text(tmp_path: Path) -> None:
    run, source = recipe(), open_source(SCENES, size=SIZE)
    folder = stored(run, tmp_path / "f", ["texts"])
    model, tokenizer = trunks_of(run, source)
    reader = pickle.loads(pickle.dumps(TokenizerWithTokens(tokenizer, [TextTokens(folder)])))
    captions = [source.record(row).captions[1] for row in (3, 46, 5)]
    config = replace(model.config.text, extra_tokens=("unc", "cls"))
    texts = reader.encode(captions, config)
    plain = tokenizer.encode(captions, model.config.text)
    with inference(model):
        expected = model.text_tower.trunk(plain, model.text_tower.packing(plain))[: len(plain.ids)]
    extra = torch.isin(texts.ids, torch.tensor([tokenizer.roles.ids()[name] for name in config.extra_tokens]))
    assert extra.sum() == 6
    assert not texts.tokens[extra].any()
    assert torch.allclose(texts.tokens[~extra], expected, atol=1e-6)
    assert reader.encode(["an unknown caption"], config).tokens is None
    assert reader.encode(captions, TextConfig(context=6, vocab=400)).tokens is None  # they are cut


def test_bytes_of_tokens_are_near_them() -> None:
    """The largest error is half a step; a group of equal channels, and one whose minimum is far from 0, are exact."""
    tokens = np.random.default_rng(0).standard_normal((50, 128)).astype(np.float32) ** 3
    tokens[7, :64], tokens[8, 64:] = 2.5, 0.0
    levels, scales = quantised(tokens)
    assert levels.dtype == np.uint8
    steps = scales.reshape(50, 2, 2)[..., 1].repeat(64, 1)
    difference = np.abs(restored(levels, scales).float().numpy() - tokens)
    assert (difference <= 0.5 * steps + 2**-10 * np.abs(tokens)).all()
    assert not difference[7, :64].any()
    assert not difference[8, 64:].any()


class Changed:
    """Scenes whose row 40 interrupts; with a fingerprint of their own, every sixth row has no image instead."""

    natural = False

    def __init__(self, source: Any, fingerprint: str = "") -> None:
        self.source, self.name, self.bad = source, source.name, bool(fingerprint)
        self.fingerprint = fingerprint or source.fingerprint

    def __len__(self) -> int:
        return len(self.source)

    def record(self, row: int) -> Record:
        record = self.source.record(row)
        if row == 40 and not self.bad:
            raise KeyboardInterrupt
        return replace(record, image=b"no image") if self.bad and row % 6 == 2 else record


@pytest.mark.parametrize("dtype", mostly_slow(["fp16", "int8"], 1))
def test_the_same_bytes_whatever_happens(tmp_path: Path, dtype: Any) -> None:
    """Batches, workers and an interruption; the folder is not finished before its end."""
    run, source = recipe(), open_source("scenes?n=75&captions=2", size=SIZE)
    model, tokenizer = trunks_of(run, source)
    options = EmbedOptions(views=2, augment=JITTER, seed=5, dtype=dtype, batch=32, part=32)
    for kind in KINDS:
        embed_tokens(model, tokenizer, kind, source, tmp_path / "a", options)
    for kind in KINDS:
        other = replace(options, batch=9, workers=2 if kind == "images" and dtype == "fp16" else 0)
        with pytest.raises(KeyboardInterrupt):
            embed_tokens(model, tokenizer, kind, Changed(source), tmp_path / "b", replace(other, workers=0))
        with pytest.raises(ValueError, match="is not finished"):
            (ImageTokens if kind == "images" else TextTokens)(tmp_path / "b")
        embed_tokens(model, tokenizer, kind, source, tmp_path / "b", replace(other, batch=100))
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")
    with pytest.raises(ValueError, match="seed 5 there, 6 here"):
        embed_tokens(model, None, "images", source, tmp_path / "a", replace(options, seed=6))


def test_training_on_tokens_is_training_on_images(tmp_path: Path) -> None:
    """Four epochs of three steps on three views: the fourth sees the first one again, on images another one."""
    run = recipe(steps=12, micro=8)
    train(run, tmp_path / "images", options=QUIET)
    of_images = losses(tmp_path / "images")
    for dtype, error in (("fp32", 2e-5), ("int8", 2e-2)):
        folder = stored(run, tmp_path / f"tokens in {dtype}", views=3, dtype=dtype)
        train(on_tokens(run, folder), tmp_path / dtype, options=QUIET)
        assert losses(tmp_path / dtype)[:9] == pytest.approx(of_images[:9], rel=error)
    assert losses(tmp_path / "fp32")[9] != pytest.approx(of_images[9], rel=2e-5)
    source, store = open_source(SCENES, size=SIZE), ImageTokens(tmp_path / "tokens in fp32")
    found: Any = FoundImages([store], source)(source, 7)
    assert len(store) == 48
    assert [torch.equal(found.tokens(n), found.tokens(1)) for n in (4, 2)] == [True, False]
    assert towers_of([str(folder)], [str(folder)]) == ("tiny", "tiny")


def test_runs_that_tokens_do_not_fit_are_refused(tmp_path: Path) -> None:
    """Another tower, size, data, augmentation or tokenizer; fewer captions; trained trunks; transforms of captions."""
    run = recipe(steps=2)
    folder = stored(run, tmp_path / "f", views=2)
    good = on_tokens(run, folder)
    texts = on_tokens(recipe(steps=2, augment=AugmentConfig()), folder, image_features=())
    own = replace(default_recipe("siglip", "debug", (SCENES,)), steps=2, batch=16)
    large = replace(good.model, image=replace(good.model.image, size=SIZE + 4, patch=(SIZE + 4) // 4))
    squashed = replace(good.model, preprocess=replace(good.model.preprocess, resize="squash"))
    (tmp_path / "model").mkdir()
    model, _ = trunks_of(run, open_source(SCENES, size=SIZE))
    made = EmbedOptions(dtype="fp32", model=str(tmp_path / "model"))
    embed_tokens(model, None, "images", open_source(SCENES, size=SIZE), tmp_path / "m", made)

    def data(run: Recipe, **changes: Any) -> Recipe:
        return replace(run, data=replace(run.data, **changes))

    for n, (wrong, word) in enumerate((
        (on_tokens(run, stored(replace(run, seed=4), tmp_path / "tower")), "has weights"),
        (data(good, sources=("scenes?n=48&captions=2&seed=9",)), "another image"),
        (data(good, augment=AugmentConfig(blur=0.5)), "asks for augment.blur 0.5"),
        (data(good, tokenizer_vocab=280), "has tokenizer"),
        (data(good, augment=replace(JITTER, drop_words=0.1)), "drop-words"),
        (data(texts, sources=(SCENES, "scenes?n=16&captions=2&seed=4")), "extra captions"),
        (replace(good, freeze=("text:trunk",)), "trains weights of the image trunk"),
        (replace(good, lora=LoraConfig(rank=2, targets=("text:qkv",))), "trains weights of the text trunk"),
        (replace(good, method="clip-c"), "compose changes captions"),
        (replace(good, method="siglip+clic"), "clic composes images"),
        (replace(good, model=large), "this model 36"),
        (replace(good, model=squashed), "squash"),
        (data(own, image_features=(str(folder),), augment=JITTER), "--image-tower tiny"),
        (data(own, image_features=(str(tmp_path / "m"),)), f"--init {tmp_path / 'model'}"),
    )):  # fmt: skip
        with pytest.raises(ValueError, match=word):
            train(wrong, tmp_path / str(n), options=QUIET)
        assert not (tmp_path / str(n) / "config.json").exists()


def test_tokens_too_large_for_halves(tmp_path: Path) -> None:
    source = open_source(SCENES, size=SIZE)
    model, tokenizer = trunks_of(recipe(), source)
    with torch.no_grad():
        model.text_tower.trunk.layers[-1].norm2.weight.fill_(1e6)
    with pytest.raises(ValueError, match="--dtype fp32"):
        embed_tokens(model, tokenizer, "texts", source, tmp_path / "f", EmbedOptions(dtype="fp16"))
    assert embed_tokens(model, tokenizer, "texts", source, tmp_path / "g", EmbedOptions(dtype="fp32")) is not None


def test_images_without_tokens_are_skipped_and_named(tmp_path: Path) -> None:
    """The command that makes tokens names them; a run stops as on images."""
    run = recipe(steps=3, augment=AugmentConfig())
    source = Changed(open_source(SCENES, size=SIZE), "bad")
    model, _ = trunks_of(run, source)
    out = io.StringIO()
    options = EmbedOptions(dtype="fp32", batch=5)
    embed_tokens(model, None, "images", source, tmp_path / "f", options, report=out)
    assert len(ImageTokens(tmp_path / "f")) == 40
    assert "8 of 48 samples are bad" in out.getvalue()
    data = replace(run.data, image_features=(str(tmp_path / "f"),), bad_share=0.01)
    with pytest.raises(ValueError, match=r"no tokens in the image features.* --bad-share"):
        train(replace(run, data=data), tmp_path / "run", source, RunOptions())


@pytest.mark.slow
def test_evaluation_reads_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As on images, without running the trunk; so does validation in training. Augmented views are refused."""
    run = recipe(steps=4, augment=AugmentConfig())
    folder, run = stored(run, tmp_path / "f"), replace(run, data=replace(run.data, val=(SCENES,)))
    values = []
    for name, one in (("images", run), ("tokens", on_tokens(run, folder))):
        train(one, tmp_path / name, options=QUIET)
        last = read_metrics(tmp_path / name / "metrics.jsonl")[-1]
        values.append({name: value for name, value in last.items() if name.startswith("val/")})
    assert values[0] == values[1] != {}
    model = tmp_path / "tokens" / "model"
    words = ["eval", "retrieval", str(model), "--data", SCENES, "--device", "cpu", "--json"]
    features = ["--image-features", str(folder), "--text-features", str(folder)]
    main([*words, str(tmp_path / "a.json")])
    TinyTrunk.calls = 0
    main([*words, str(tmp_path / "b.json"), *features])
    assert TinyTrunk.calls == 0
    assert json.loads((tmp_path / "a.json").read_text()) == json.loads((tmp_path / "b.json").read_text())
    views = stored(recipe(), tmp_path / "views", ["images"], views=2)
    for command, word in (
        ([*words, tmp_path / "c", "--image-features", views], "augmented"),
        ([*words, tmp_path / "c", "--image-features", tmp_path / "none"], "no tokens of images"),
        (["eval", "spectrum", model, "--data", SCENES, *features], "omit --image-features"),
    ):
        assert word in refused(capsys, *command)


@pytest.mark.slow
def test_a_run_on_tokens_goes_on_exactly(tmp_path: Path) -> None:
    """Weights and all rows of metrics, bit for bit, over an epoch's end, with workers in the second part."""
    run = on_tokens(recipe(steps=8, micro=8), stored(recipe(), tmp_path / "f", views=2, dtype="int8"))
    options = replace(QUIET, save_every=2)
    train(run, tmp_path / "run", options=options)
    whole, before = load_file(tmp_path / "run/model/model.safetensors"), losses(tmp_path / "run")
    for file in (tmp_path / "run" / "state").glob("step-000000008.*"):
        file.unlink()
    train(run, tmp_path / "run", options=replace(options, workers=1))
    weights = load_file(tmp_path / "run/model/model.safetensors")
    assert all(torch.equal(weights[name], value) for name, value in whole.items())
    assert losses(tmp_path / "run") == before
