"""`kiloword embed`: teachers of three kinds give what they give when asked directly; a run takes their table."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from cases import mostly_slow
from folders import model_folder
from kiloword.api import load
from kiloword.cli.main import main
from kiloword.data.open import open_source
from kiloword.stores.embed import embed
from kiloword.stores.features import FeatureStore
from kiloword.stores.teachers import open_teacher
from photo_folders import refused
from tars import pairs, write_tar

SCENES = "scenes?n=48&captions=3"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("models") / "model")


def run(*words: object) -> None:
    main([str(word) for word in words])


def close(found: Any, expected: Tensor) -> bool:
    """Equal to the rounding of float16: 2^-11 of numbers below 1."""
    return bool((torch.from_numpy(np.array(found, np.float32)) - expected).abs().max() < 2**-11)


def test_our_own_model(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("embed", model, "--data", SCENES, "--out", tmp_path / "t", "--batch", 7, "--workers", 2, "--device", "cpu")
    output = capsys.readouterr()
    assert "t: 48 images, 144 captions, 16 dimensions, " in output.out
    assert "images 100%" in output.err
    table, matcher = FeatureStore(tmp_path / "t"), load(model)
    source = open_source(SCENES, size=32)
    records = [source.record(row) for row in range(48)]
    images = [Image.fromarray(np.asarray(record.image)) for record in records]
    assert close(table.images(), matcher.encode_image(images)["vec"])
    texts = [caption for record in records for caption in record.captions]
    assert table.captions == texts
    assert close(table.texts(), matcher.encode_text(texts)["vec"])
    assert table.file.model == str(model)


def test_several_sources_and_extra_captions(model: Path, tmp_path: Path) -> None:
    data = [write_tar(tmp_path / f"{n}.tar", pairs(5, 5 * n)) for n in range(2)]
    extra = tmp_path / "extra.parquet"
    pa.parquet.write_table(pa.table({"key": ["0007"], "captions": [["a pseudo-caption"]]}), extra)
    run("embed", model, "--data", *data, "--extra-captions", extra, "--out", tmp_path / "t", "--name", "seer")
    table = FeatureStore(tmp_path / "t")
    assert (table.name, table.keys) == ("seer", [f"{n:04d}" for n in range(10)])
    assert table.captions[7:9] == ["image 7", "a pseudo-caption"]


def test_the_command_refuses_with_a_sentence(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "config.json").write_text('{"model_type": "bert"}')
    (tmp_path / "bert" / "model.safetensors").touch()
    out = ("--data", SCENES, "--out", tmp_path / "t", "--device", "cpu")
    for words, word in (
        ((tmp_path / "none", *out), "expected a model folder"),
        (("open_clip:ViT-B-32:nowhere.pt", *out), "no file of weights at nowhere.pt"),
        ((f"hf:{tmp_path / 'bert'}", *out), "no tokenizer.json"),
        ((model, "--data", "nothing", "--out", tmp_path / "t"), "no such file or folder"),
        ((model, *out, "--dtype", "int8"), "--tokens"),
    ):
        assert word in refused(capsys, "embed", *words)
    assert not (tmp_path / "t").exists()
    run("embed", model, *out)
    assert "precision fp32 there, bf16 here" in refused(capsys, "embed", model, *out, "--precision", "bf16")


def test_other_weights_of_the_same_name_are_another_teacher(model: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "model")
    first = open_teacher(str(copy), "cpu")
    assert first.fingerprint == open_teacher(str(model), "cpu").fingerprint
    weights = load_file(copy / "model.safetensors")
    weights["head.log_scale"] += 1
    save_file(weights, copy / "model.safetensors")
    source = open_source(SCENES, size=32)
    embed(first, source, tmp_path / "t", model="m")
    with pytest.raises(ValueError, match=r"weights \w+ there, \w+ here"):
        embed(open_teacher(str(copy), "cpu"), source, tmp_path / "t", model="m")


VIT = {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 16}
VISION: dict[str, dict[str, Any]] = {
    "kw-vit": VIT,
    "kw-resnet": {"image_size": 64, "layers": [1, 1, 1, 1], "width": 8, "patch_size": None},
    "kw-scaled": {**VIT, "ls_init_value": 0.1},  # layer scale, which no tower of ours has
}
TEXT = {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2}


@pytest.fixture(scope="module")
def open_clip(open_clip: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """open_clip with three small models of our own."""
    folder = tmp_path_factory.mktemp("configs")
    for name, vision in VISION.items():
        config = {"embed_dim": 16, "vision_cfg": vision, "text_cfg": TEXT}
        (folder / f"{name}.json").write_text(json.dumps(config))
    open_clip.add_model_config(folder)
    return open_clip


@pytest.mark.parametrize("name", mostly_slow(list(VISION), -1))
def test_open_clip(open_clip: ModuleType, name: str, tmp_path: Path) -> None:
    """Our towers with its weights, or open_clip itself, against open_clip's own preprocessing and encoders."""
    torch.manual_seed(0)
    theirs, _, preprocess = open_clip.create_model_and_transforms(name)
    theirs.eval()
    torch.save(theirs.state_dict(), tmp_path / "w.pt")
    teacher = open_teacher(f"open_clip:{name}:{tmp_path / 'w.pt'}", "cpu")
    rng = np.random.default_rng(0)
    path = tmp_path / "data"
    path.mkdir()
    images = [Image.fromarray(rng.integers(0, 256, (70 + 9 * n, 90, 3), np.uint8)) for n in range(3)]
    for n, image in enumerate(images):
        image.save(path / f"{n}.png")
        (path / f"{n}.txt").write_text(f"A photo, number {n}\na dog's life &amp; {n} cats")
    table = embed(teacher, open_source(str(path)), tmp_path / "t", dtype="fp32")
    with torch.no_grad():
        expected = F.normalize(theirs.encode_image(torch.stack([preprocess(image) for image in images])), dim=-1)
        texts = F.normalize(theirs.encode_text(open_clip.get_tokenizer(name)(table.captions)), dim=-1)
    assert torch.allclose(torch.from_numpy(np.array(table.images())), expected, atol=1e-5)
    assert torch.allclose(torch.from_numpy(np.array(table.texts())), texts, atol=1e-5)
