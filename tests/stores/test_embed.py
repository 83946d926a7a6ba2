"""`kiloword embed`: teachers of three kinds give what they give when asked directly; a run takes their table."""

from __future__ import annotations

import json
import sys
import types
from dataclasses import replace
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
from torch import Tensor, nn

from cases import mostly_slow
from kiloword.api import load
from kiloword.cli.main import main
from kiloword.config.recipes import Recipe
from kiloword.data.sources.open import open_source
from kiloword.distributed import collectives, sharing
from kiloword.methods.defaults import default_recipe
from kiloword.stores.embed import _dim, embed
from kiloword.stores.features import FeatureStore
from kiloword.stores.teachers import Foreign, KilowordTeacher, open_teacher
from kiloword.training.loop import RunOptions, train
from tars import pairs, write_tar

SCENES = "scenes?n=48&captions=3"


def small(method: str = "siglip", **changes: Any) -> Recipe:
    base = default_recipe(method, "debug", (SCENES,))
    return replace(base, steps=4, batch=8, precision="fp32", **changes)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder of a short run."""
    return train(small(), tmp_path_factory.mktemp("run"), options=RunOptions(quiet=True, device="cpu"))


def run(*words: object) -> None:
    main([str(word) for word in words])


def close(found: Any, expected: Tensor) -> bool:
    """Equal to the rounding of float16: 2^-11 of numbers below 1."""
    return bool((torch.from_numpy(np.array(found, np.float32)) - expected).abs().max() < 2**-11)


def test_our_own_model(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("embed", model, "--data", SCENES, "--out", tmp_path / "t", "--batch", 7, "--workers", 2, "--device", "cpu")
    output = capsys.readouterr()
    assert "t: 48 images, 144 captions, 16 dimensions, " in output.out
    assert "row 48/48" in output.err
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
    """The run that reads one of them, or leaves the extra captions out, takes the same table."""
    for n in range(2):
        write_tar(tmp_path / f"{n}.tar", pairs(5, 5 * n))
    extra = tmp_path / "extra.parquet"
    pa.parquet.write_table(pa.table({"key": ["0007"], "captions": [["a pseudo-caption"]]}), extra)
    data = [str(tmp_path / f"{n}.tar") for n in range(2)]
    run("embed", model, "--data", *data, "--extra-captions", extra, "--out", tmp_path / "t", "--name", "seer")
    table = FeatureStore(tmp_path / "t")
    assert table.name == "seer"
    assert table.keys == [f"{n:04d}" for n in range(10)]
    assert table.captions[7:9] == ["image 7", "a pseudo-caption"]
    assert np.diff(table.starts).tolist() == [1] * 7 + [2, 1, 1]
    for path in data:
        table.of(open_source(path))


def sentence(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    with pytest.raises(SystemExit) as stop:
        run(*words)
    assert stop.value.code == 2
    output = capsys.readouterr().err
    assert output.count("\n") == 1
    return output


def test_the_command_refuses_with_a_sentence(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = ("--data", SCENES, "--out", tmp_path / "t", "--device", "cpu")
    assert "expected a model folder" in sentence(capsys, "embed", tmp_path / "none", *out)
    assert "has no file of weights" in sentence(capsys, "embed", "open_clip:ViT-B-32", *out)
    assert "no file of weights at nowhere.pt" in sentence(capsys, "embed", "open_clip:ViT-B-32:nowhere.pt", *out)
    monkeypatch.setitem(sys.modules, "transformers", None)
    clip = tmp_path / "clip"
    clip.mkdir()
    assert "config.json: expected a folder that transformers" in sentence(capsys, "embed", f"hf:{clip}", *out)
    (clip / "config.json").write_text('{"model_type": "clip"}')
    (clip / "preprocessor_config.json").write_text('{"size": 224, "crop_size": 224}')
    (clip / "model.safetensors").touch()
    assert "pip install 'kiloword[hf]'" in sentence(capsys, "embed", f"hf:{clip}", *out)
    monkeypatch.setitem(sys.modules, "transformers", types.ModuleType("transformers"))  # a version without the classes
    assert "pip install 'kiloword[hf]'" in sentence(capsys, "embed", f"hf:{clip}", *out)
    assert "no such file or folder" in sentence(capsys, "embed", model, "--data", "nothing", "--out", tmp_path / "t")
    assert not (tmp_path / "t").exists()
    run("embed", model, *out)
    capsys.readouterr()
    assert "precision fp32 there, precision bf16 here" in sentence(capsys, "embed", model, *out, "--precision", "bf16")
    with pytest.raises(ValueError, match="precision is 'fp16': expected fp32 or bf16"):
        open_teacher(str(model), "cpu", "fp16")


def test_other_weights_of_the_same_name_are_another_teacher(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "model"
    copy.mkdir()
    for file in model.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    first = open_teacher(str(copy), "cpu")
    assert first.fingerprint == open_teacher(str(model), "cpu").fingerprint
    weights = load_file(copy / "model.safetensors")
    weights["head.log_scale"] += 1
    save_file(weights, copy / "model.safetensors")
    second = open_teacher(str(copy), "cpu")
    source = open_source(SCENES, size=32)
    embed(first, source, tmp_path / "t", teacher_name="m")
    with pytest.raises(ValueError, match=r"m \(\w+\) there, m \(\w+\) here"):
        embed(second, source, tmp_path / "t", teacher_name="m")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_no_texts_and_half_precision(model: Path, precision: str) -> None:
    teacher = open_teacher(str(model), "cpu", precision)
    assert teacher.encode_texts([]).shape == (0, 16)
    found = teacher.encode_texts(["a red circle"])
    assert found.dtype == torch.float32
    assert abs(float(found.norm()) - 1) < 1e-6


@pytest.mark.slow
def test_a_run_takes_the_table_and_goes_on_exactly(model: Path, tmp_path: Path) -> None:
    """Positives are mined with the features of a model that was trained here; other data is refused."""
    run("embed", model, "--data", SCENES, "--out", tmp_path / "t", "--device", "cpu")
    base = small("siglip+mined")
    recipe = replace(base, data=replace(base.data, features=(str(tmp_path / "t"),), captions=2))
    options = RunOptions(quiet=True, device="cpu", save_every=2)
    whole = load_file(train(recipe, tmp_path / "run", options=options) / "model.safetensors")
    for file in (tmp_path / "run" / "state").glob("step-000000004.*"):
        file.unlink()
    resumed = load_file(train(recipe, tmp_path / "run", options=replace(options, workers=2)) / "model.safetensors")
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())
    plain = train(replace(base, method="siglip", data=replace(base.data, captions=2)), tmp_path / "p", options=options)
    assert not torch.equal(load_file(plain / "model.safetensors")["text_tower.tokens"], whole["text_tower.tokens"])
    other = replace(recipe, data=replace(recipe.data, sources=("scenes?n=64&captions=3",)))
    with pytest.raises(ValueError, match=r"was made from scenes\?n=48&captions=3 .*but the data is scenes\?n=64"):
        train(other, tmp_path / "other", options=options)


CONFIGS: dict[str, dict[str, Any]] = {
    "kw-vit": {
        "embed_dim": 16,
        "vision_cfg": {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 16},
        "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2},
    },
    "kw-resnet": {
        "embed_dim": 16,
        "vision_cfg": {"image_size": 64, "layers": [1, 1, 1, 1], "width": 8, "patch_size": None},
        "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1},
    },
    "kw-scaled": {
        "embed_dim": 16,
        "vision_cfg": {
            "image_size": 32,
            "layers": 2,
            "width": 32,
            "head_width": 16,
            "patch_size": 16,
            "ls_init_value": 0.1,  # layer scale, which no tower of ours has
        },
        "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2},
    },
}


@pytest.fixture(scope="module")
def open_clip(open_clip: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """open_clip with three small models of our own."""
    folder = tmp_path_factory.mktemp("configs")
    for name, config in CONFIGS.items():
        (folder / f"{name}.json").write_text(json.dumps(config))
    open_clip.add_model_config(folder)
    return open_clip


@pytest.mark.parametrize("name", mostly_slow(list(CONFIGS), -1))
def test_open_clip(open_clip: ModuleType, name: str, tmp_path: Path) -> None:
    """Our towers with its weights, or open_clip itself, against open_clip's own preprocessing and encoders."""
    torch.manual_seed(0)
    theirs, _, preprocess = open_clip.create_model_and_transforms(name)
    theirs.eval()
    torch.save(theirs.state_dict(), tmp_path / "w.pt")
    teacher = open_teacher(f"open_clip:{name}:{tmp_path / 'w.pt'}", "cpu")
    assert isinstance(teacher, Foreign if name == "kw-scaled" else KilowordTeacher)
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
    again = open_teacher(f"open_clip:{name}:{tmp_path / 'w.pt'}", "cpu")
    assert again.fingerprint == teacher.fingerprint


@pytest.mark.parametrize("name", list(CONFIGS))
def test_open_clip_weights_of_another_model(open_clip: ModuleType, name: str, tmp_path: Path) -> None:
    state = open_clip.create_model(name).state_dict()
    state.pop("ln_final.weight")
    torch.save(state, tmp_path / "w.pt")
    with pytest.raises(ValueError, match=rf"weights .* open_clip's {name}.*(text_tower\.norm|ln_final)"):
        open_teacher(f"open_clip:{name}:{tmp_path / 'w.pt'}", "cpu")


class HfTower(nn.Module):
    """Stands in for a tower of transformers' CLIP: features depend on every input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 8)

    def forward(self, **inputs: Tensor) -> Any:
        x = inputs.get("pixel_values")
        if x is None:
            x = F.one_hot(inputs["input_ids"] * inputs["attention_mask"], 50).float()
            return types.SimpleNamespace(pooler_output=self.linear(x.sum(1)))
        return types.SimpleNamespace(pooler_output=self.linear(x.flatten(1)))


class HfModel(nn.Module):
    base_model_prefix = "clip"

    def __init__(self) -> None:
        super().__init__()
        self.vision_model, self.text_model = HfTower(3 * 8 * 8), HfTower(50)
        self.visual_projection, self.text_projection = nn.Linear(8, 4, bias=False), nn.Linear(8, 4, bias=False)


class Tokens(dict[str, Tensor]):
    def to(self, device: str) -> Tokens:
        return self


def hf_tokenizer(texts: list[str], **options: Any) -> Tokens:
    assert options == {"padding": True, "truncation": True, "max_length": 12, "return_tensors": "pt"}
    ids = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.int64)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = torch.tensor([1 + ord(c) % 49 for c in text])
    return Tokens(input_ids=ids, attention_mask=(ids > 0).long())


@pytest.fixture
def hf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as transformers writes it, and a stand-in for the package, which checks have not installed."""
    torch.manual_seed(0)
    made = HfModel()

    def load_it(folder: str, **options: Any) -> tuple[HfModel, dict[str, list[str]]]:
        assert options.pop("output_loading_info")
        assert options == {"local_files_only": True, "use_safetensors": True, "trust_remote_code": False}
        return made, {"missing_keys": [], "unexpected_keys": [], "mismatched_keys": []}

    fake = types.SimpleNamespace(
        CLIPModel=types.SimpleNamespace(from_pretrained=load_it),
        AutoTokenizer=types.SimpleNamespace(
            from_pretrained=lambda folder, local_files_only, trust_remote_code: hf_tokenizer
        ),
    )
    monkeypatch.setitem(sys.modules, "transformers", fake)
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "clip", "text_config": {"max_position_embeddings": 12}}')
    (folder / "preprocessor_config.json").write_text(
        json.dumps({"size": {"shortest_edge": 8}, "crop_size": {"height": 8, "width": 8}, "image_mean": [0.5] * 3})
    )
    save_file({"a": torch.zeros(1)}, folder / "model.safetensors")
    return folder


def test_transformers(hf: Path) -> None:
    teacher = open_teacher(f"hf:{hf}", "cpu")
    assert (teacher.size, teacher.resize) == (8, "shortest")
    made, _ = sys.modules["transformers"].CLIPModel.from_pretrained(
        "", local_files_only=True, use_safetensors=True, trust_remote_code=False, output_loading_info=True
    )
    images = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8)
    std = torch.tensor([0.26862954, 0.26130258, 0.27577711]).view(3, 1, 1)
    with torch.no_grad():
        pooled = made.vision_model(pixel_values=(images / 255 - 0.5) / std).pooler_output
        expected = F.normalize(made.visual_projection(pooled), dim=-1)
        texts = made.text_projection(made.text_model(**hf_tokenizer(["ab", "c"], **LONG)).pooler_output)
    assert torch.allclose(teacher.encode_images(images), expected, atol=1e-6)
    assert torch.allclose(teacher.encode_texts(["ab", "c"]), F.normalize(texts, dim=-1), atol=1e-6)


LONG = {"padding": True, "truncation": True, "max_length": 12, "return_tensors": "pt"}


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("config.json", '{"model_type": "siglip"}', "holds a 'siglip' model: expected a CLIP"),
        ("config.json", "{", r"config\.json is damaged: it is no json"),
        ("config.json", "[]", r"config\.json is damaged: it is no json object"),
        ("preprocessor_config.json", '{"size": 8, "crop_size": 9}', "in an unsupported way"),
        ("preprocessor_config.json", '{"size": 8, "do_center_crop": false}', "in an unsupported way"),
        ("preprocessor_config.json", '{"size": 8, "crop_size": 8, "resample": 2}', "in an unsupported way"),
        ("preprocessor_config.json", "", "is damaged"),
        ("model.safetensors", None, r"has no model\.safetensors"),
        ("config.json", None, r"there is no .*config\.json: expected a folder that"),
    ],
)
def test_transformers_folders_that_cannot_be_used(hf: Path, file: str, text: str | None, message: str) -> None:
    if text is None:
        (hf / file).unlink()
    else:
        (hf / file).write_text(text)
    with pytest.raises(ValueError, match=message):
        open_teacher(f"hf:{hf}", "cpu")


@pytest.mark.parametrize("texts", [3, 4])
def test_images_and_texts_have_features_of_one_size(monkeypatch: pytest.MonkeyPatch, texts: int) -> None:
    """Asked of each rank alone: those of several would wait for each other."""
    monkeypatch.setattr(collectives, "ranks", lambda: 2)

    def images(x: Tensor) -> Tensor:
        assert (x.shape, x.dtype) == ((1, 3, 8, 8), torch.uint8)
        assert sharing.share() == (0, 1)
        return torch.zeros(1, 3)

    teacher: Any = types.SimpleNamespace(
        size=8, encode_images=images, encode_texts=lambda x: torch.zeros(len(x), texts)
    )
    with sharing.sharing():
        if texts == 3:
            assert _dim(teacher) == 3
        else:
            with pytest.raises(ValueError, match="gives images 3 dimensions and texts 4: expected equal numbers"):
                _dim(teacher)
