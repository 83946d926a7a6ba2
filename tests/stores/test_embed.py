"""`kiloword embed`: teachers of four kinds give what they give when asked directly; first numbers of features."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import tokenizers
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from cases import mostly_slow
from commands import refused
from folders import changed, model_folder, write_encoder
from kiloword.api import load
from kiloword.cli.main import main
from kiloword.data.map_style import MapStyleSource
from kiloword.data.open import open_source
from kiloword.evaluation import evaluate
from kiloword.model.trunks.libraries import torchvision_ready
from kiloword.stores.embed import embed
from kiloword.stores.features import FeatureStore
from kiloword.stores.teachers import open_teacher
from sources import records
from tars import noise

SCENES, SHORT = "scenes?n=48&captions=3", "scenes?n=24&captions=2"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("models") / "model", "siglip+matryoshka")


def run(*words: object) -> None:
    main([str(word) for word in (*words, "--device", "cpu")])


def close(found: Any, expected: Tensor) -> bool:
    """Equal to the rounding of float16: 2^-11 of numbers below 1."""
    return bool((torch.from_numpy(np.array(found, np.float32)) - expected).abs().max() < 2**-11)


def test_our_own_model(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("embed", model, "--data", SCENES, "--out", tmp_path / "t", "--batch", 7, "--workers", 2)
    assert "t: 48 images, 144 captions, 16 dimensions, " in capsys.readouterr().out
    table, matcher, found = FeatureStore(tmp_path / "t"), load(model), records(open_source(SCENES, size=32))
    texts = [caption for record in found for caption in record.captions]
    assert (table.captions, table.file.model) == (texts, str(model))
    images = [Image.fromarray(np.asarray(record.image)) for record in found]
    assert close(table.images(), matcher.encode_image(images)["vec"])
    assert close(table.texts(), matcher.encode_text(texts)["vec"])


VIT = {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 16}
VISION: dict[str, dict[str, Any]] = {
    "kw-vit": VIT,
    "kw-resnet": {"image_size": 64, "layers": [1, 1, 1, 1], "width": 8, "patch_size": None},
    "kw-scaled": {**VIT, "ls_init_value": 0.1},  # layer scale, which no tower of ours has
}
TEXT = {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2}


@pytest.fixture(scope="module")
def open_clip(open_clip: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    folder = tmp_path_factory.mktemp("configs")
    for name, vision in VISION.items():
        config = {"embed_dim": 16, "vision_cfg": vision, "text_cfg": TEXT}
        (folder / f"{name}.json").write_text(json.dumps(config))
    open_clip.add_model_config(folder)
    return open_clip


@pytest.mark.parametrize("name", mostly_slow(list(VISION), -1))
def test_open_clip(open_clip: ModuleType, name: str, tmp_path: Path) -> None:
    """Against open_clip's own preprocessing and encoders."""
    torch.manual_seed(0)
    theirs, _, preprocess = open_clip.create_model_and_transforms(name)
    theirs.eval()
    torch.save(theirs.state_dict(), tmp_path / "w.pt")
    teacher = open_teacher(f"open_clip:{name}:{tmp_path / 'w.pt'}", "cpu")
    images = [Image.fromarray(noise(70 + 9 * n, 90, n)) for n in range(3)]
    source = MapStyleSource([(x, [f"A photo, number {n}", f"a dog's &amp; {n} cats"]) for n, x in enumerate(images)])
    table = embed(teacher, source, tmp_path / "t", dtype="fp32")
    with torch.no_grad():
        expected = F.normalize(theirs.encode_image(torch.stack([preprocess(image) for image in images])), dim=-1)
        texts = F.normalize(theirs.encode_text(open_clip.get_tokenizer(name)(table.captions)), dim=-1)
    assert torch.allclose(torch.from_numpy(np.array(table.images())), expected, atol=1e-5)
    assert torch.allclose(torch.from_numpy(np.array(table.texts())), texts, atol=1e-5)


def test_features_of_images_resized_otherwise_are_others(model: Path, tmp_path: Path) -> None:
    words = ("embed", model, "--data", "scenes?n=6", "--out")
    run(*words, tmp_path / "plain")
    run(*words, tmp_path / "wide", "--resize", 40)
    assert len({(tmp_path / name / "images.npy").read_bytes() for name in ("plain", "wide")}) == 2
    run(*words, tmp_path / "plain", "--resize", "shortest")  # as the model has it


# The first numbers of features


@pytest.fixture(scope="module")
def stores(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    found = {dim: tmp_path_factory.mktemp("stores") / str(dim) for dim in (16, 8)}
    for dim, out in found.items():
        run("embed", model, "--data", SHORT, "--dtype", "fp32", "--out", out, "--dim", dim)
    return found


def test_a_store_has_the_first_numbers(stores: dict[int, Path]) -> None:
    whole, part = (FeatureStore(stores[dim]) for dim in (16, 8))
    assert (whole.file.width, part.file.width) == (16, 8)
    for a, b in ((whole.images(), part.images()), (whole.texts(), part.texts())):
        torch.testing.assert_close(F.normalize(torch.tensor(a)[:, :8], dim=1), torch.tensor(b))


def test_audits_and_evaluations_of_the_first_numbers(
    model: Path, stores: dict[int, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("audit", SHORT, "--model", model, "--out", tmp_path / "dim", "--dim", 8)
    run("audit", SHORT, "--out", tmp_path / "store", "--features", stores[8])
    dim, store = (pq.read_table(tmp_path / n / "keep.parquet").column("score").to_pylist() for n in ("dim", "store"))
    assert dim == pytest.approx(store, abs=1e-4)
    out = tmp_path / "values.json"
    run("eval", "retrieval", model, "--data", SHORT, "--dim", 5, "--json", out)
    assert "not on its first 5" in capsys.readouterr().err
    found = {name: x for name, x in json.loads(out.read_text()).items() if isinstance(x, float)}
    assert found == pytest.approx(dict(evaluate(load(model, dim=5), "retrieval", SHORT)))


def test_what_the_commands_refuse(
    model: Path, stores: dict[int, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bert, llip = f"hf:{tmp_path / 'bert'}", model_folder(tmp_path / "llip", "llip")
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "config.json").write_text('{"model_type": "bert"}')
    (tmp_path / "bert" / "model.safetensors").touch()
    out = ("--data", SHORT, "--out", tmp_path / "t")
    audit = ("audit", SHORT, "--out", tmp_path / "t", "--features", stores[16])
    there = ("embed", model, "--data", SHORT, "--dtype", "fp32", "--out", stores[8])
    for words, word in (
        (("embed", tmp_path / "none", *out), "expected a model folder"),
        (("embed", "open_clip:ViT-B-32:nowhere.pt", *out), "no file of weights at nowhere.pt"),
        (("embed", bert, *out), "no tokenizer.json"),
        (("embed", model, "--data", "nothing", "--out", tmp_path / "t"), "no such file or folder"),
        (("embed", model, *out, "--resize", 30), "resize 30 is smaller"),
        (("embed", model, *out, "--dtype", "int8"), "--tokens"),
        (("embed", "minilmm", *out, "--tokens"), "mean minilm"),
        (("embed", "timm:test_vit", *out, "--tokens"), "timm:test_vit:FILE"),
        (("embed", bert, *out, "--tokens"), "Of images: "),
        (("embed", model, *out, "--dim", 0), "0 was asked for: expected 1 to 16"),
        (("embed", model, *out, "--tokens", "--dim", 8), "--dim are for features"),
        (("embed", llip, *out, "--dim", 8), "omit the dimension"),
        (("embed", model, *out, "--views", 2), "--views 2 without augmentation"),
        (("embed", model, *out, "--seed", 3), "--seed 3"),
        (("embed", model, *out, "--views", 0, "--augment.jitter", 0.4), "--views is 0"),
        (("embed", model, *out, "--augment.drop-words", 0.5), "changes no image"),
        (("embed", model, *out, "--augment.crop", 0.4), "neither cropped nor mirrored"),
        (there, "holds other features"),
        ((*there, "--dim", 4), " dim 8 there, "),
        ((*there, "--dim", 8, "--resize", 40), "resize 40"),
        ((*audit, "--dim", 8), "--dim"),
        ((*audit, "--model", model), "--model"),
        (("eval", "retrieval", model, "--data", SHORT, "--dim", 17), "17 was asked for"),
        (("eval", "retrieval", llip, "--data", SHORT, "--dim", 8), "omit the dimension"),
    ):
        assert word in refused(capsys, *words)
    assert not (tmp_path / "t").exists()


# Encoders of texts alone

TEXTS = ["a red circle", "Two blue squares and a star", "a", "star " * 40]
MODULES = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]


@pytest.fixture
def bert(tmp_path: Path) -> tuple[Path, Any]:
    """A tiny random BERT as sentence-transformers saves it, and what transformers makes of a text."""
    torchvision_ready()
    transformers = pytest.importorskip("transformers")
    place = changed(write_encoder(tmp_path / "minilm"), "tokenizer.json", normalizer__lowercase=False)
    model = transformers.AutoModel.from_pretrained(str(place), add_pooling_layer=False).eval()
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in MODULES]
    (place / "modules.json").write_text(json.dumps(modules))
    (place / "sentence_bert_config.json").write_text('{"max_seq_length": 9, "do_lower_case": true}')
    (place / "1_Pooling").mkdir()
    (place / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')

    def tokens(text: str, length: int) -> torch.Tensor:
        tokenizer = tokenizers.Tokenizer.from_file(str(place / "tokenizer.json"))
        tokenizer.no_padding()
        tokenizer.enable_truncation(length)
        with torch.no_grad():
            found: torch.Tensor = model(torch.tensor([tokenizer.encode(text).ids])).last_hidden_state[0]
            return found

    return place, tokens


def test_tokens_are_pooled_as_the_folder_says(bert: tuple[Path, Any]) -> None:
    """Lower case and cut as it says too; without its files, the mean of all tokens that the encoder takes."""
    folder, tokens = bert
    fingerprints = set[str]()
    for mode, pool in (
        ("mean_tokens", lambda x: x.mean(0)),
        ("cls_token", lambda x: x[0]),
        ("max_tokens", lambda x: x.amax(0)),
    ):
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{mode}": True, "other": 3}))
        teacher = open_teacher(f"hf:{folder}", "cpu")
        fingerprints.add(teacher.fingerprint)
        for text, row in zip(TEXTS, teacher.encode_texts(TEXTS), strict=True):
            expected = F.normalize(pool(tokens(text.lower(), 9)), dim=0)
            torch.testing.assert_close(row, expected, atol=1e-5, rtol=1e-4)
    assert len(fingerprints) == 3
    for file in ("modules.json", "sentence_bert_config.json"):
        (folder / file).unlink()
    plain = open_teacher(f"hf:{folder}", "cpu")
    for text, row in zip(TEXTS, plain.encode_texts(TEXTS), strict=True):
        torch.testing.assert_close(row, F.normalize(tokens(text, 40).mean(0), dim=0), atol=1e-5, rtol=1e-4)
    assert plain.encode_texts([]).shape == (0, 24)


@pytest.mark.parametrize(
    ("file", "text", "word"),
    [
        ("config.json", '{"model_type": "bert", "max_position_embeddings": 2}', "2 tokens"),
        ("modules.json", "{}", "no json list"),
        ("modules.json", '[{"type": "x.Transformer"}, {"type": "x.Dense"}]', "Dense"),
        ("modules.json", '[{"type": "Transformer"}, {"type": "Pooling", "path": "../../secret"}]', "secret"),
        ("1_Pooling/config.json", "{}", "nothing"),
        ("1_Pooling/config.json", '{"pooling_mode_mean_tokens": true, "pooling_mode_cls_token": true}', "cls_token"),
        ("1_Pooling/config.json", None, "1_Pooling/config.json"),
    ],
)
def test_folders_that_cannot_be_used(bert: tuple[Path, Any], file: str, text: str | None, word: str) -> None:
    if text is None:
        (bert[0] / file).unlink()
    else:
        (bert[0] / file).write_text(text)
    with pytest.raises(ValueError, match=word):
        open_teacher(f"hf:{bert[0]}", "cpu")


def test_a_store_of_texts_alone(bert: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It serves partners with the nearest captions (CLIP-C's ablation)."""
    run("embed", f"hf:{bert[0]}", "--data", "scenes?n=12", "--out", tmp_path / "store")
    assert "encodes texts alone" in capsys.readouterr().err
    assert not np.asarray(FeatureStore(tmp_path / "store").images()).any()
    words = "train clip-c --data scenes?n=12 --size debug --batch 4 --steps 1 --vocab 300 --settings.partner nearest"
    run(*words.split(), "--settings.partner-table", tmp_path / "store", "--out", tmp_path / "run")
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
