"""Weights of other libraries: read whole from the files that belong to the model, or refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import kiloword
from kiloword.cli.main import main
from kiloword.interop.open_clip_config import torchvision_ready

SIDE = 32
TEXT = {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2}
VISION = {"image_size": SIDE, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8}
COCA = {"attentional_pool": True, "attn_pooler_heads": 4, "attn_pooler_queries": 5, "output_tokens": True}
NAMES: dict[str, dict[str, Any]] = {
    "kw-whole": {"embed_dim": 24, "vision_cfg": VISION, "text_cfg": TEXT},
    "kw-coca": {
        "embed_dim": 32,
        "vision_cfg": VISION | COCA,
        "text_cfg": TEXT | {"context_length": 76, "embed_cls": True, "output_tokens": True},
        "multimodal_cfg": TEXT | {"context_length": 76, "attn_pooler_heads": 2},
    },
}
PIXELS = torch.randint(0, 256, (1, 3, SIDE, SIDE), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
Files = dict[str, Path]


def filled(model: Any) -> dict[str, Tensor]:
    """The weights of a model, off the values where an error would not show."""
    generator = torch.Generator().manual_seed(0)
    return {
        n: x + 0.1 * torch.randn(x.shape, generator=generator) if x.is_floating_point() and x.ndim else x
        for n, x in model.state_dict().items()
    }


@pytest.fixture(scope="module")
def files(open_clip: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Files:
    """One small model as open_clip's file, two of transformers, one of them in shards, and a folder of kiloword."""
    torchvision_ready()
    transformers = pytest.importorskip("transformers")
    place = tmp_path_factory.mktemp("models")
    for name, config in NAMES.items():
        (place / f"{name}.json").write_text(json.dumps(config))
        open_clip.add_model_config(place / f"{name}.json")
        kind = open_clip.CoCa if "multimodal_cfg" in config else open_clip.CLIP
        save_file({n: x.contiguous() for n, x in filled(kind(**config)).items()}, place / f"{name}.safetensors")
    tower = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = tower | {"image_size": SIDE, "patch_size": 8}
    clip = transformers.CLIPModel(
        transformers.CLIPConfig(text_config=tower | {"vocab_size": 49408}, vision_config=vision, projection_dim=24)
    )
    clip.load_state_dict(filled(clip))
    clip.save_pretrained(place / "hf")
    clip.save_pretrained(place / "shards", max_shard_size="100KB")
    siglip = transformers.SiglipModel(transformers.SiglipConfig(text_config=tower, vision_config=vision))
    siglip.save_pretrained(place / "siglip")
    image = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}, "resample": 3}
    for folder in ("hf", "shards"):
        (place / folder / "preprocessor_config.json").write_text(json.dumps(image))
    image["size"] = image.pop("crop_size")
    (place / "siglip" / "preprocessor_config.json").write_text(json.dumps(image))
    kiloword.load(f"hf:{place / 'hf'}").save(place / "own")
    return {path.stem: path for path in place.iterdir() if path.suffix != ".json"}


def vector(name: object) -> Tensor:
    return kiloword.load(str(name)).encode_image(PIXELS)["vec"]


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """What a command says that ends with exit code 2."""
    with pytest.raises(SystemExit) as end:
        main(list(map(str, words)))
    assert end.value.code == 2
    return capsys.readouterr().err


def without(path: Path, place: Path, *parts: str) -> Path:
    """A copy of a file or folder of weights without the tensors whose names contain one of these parts."""
    copy = shutil.copytree(path, place / path.name) if path.is_dir() else Path(shutil.copy(path, place))
    weights = copy / "model.safetensors" if copy.is_dir() else copy
    state = load_file(weights)
    kept = {name: value for name, value in state.items() if not any(part in name for part in parts)}
    assert len(kept) < len(state)
    save_file(kept, weights)
    return copy


PARTS = [  # of a file, in the names of each format; and a word of the refusal
    ("own", "image_tower.blocks.1.", "blocks.1"),
    ("own", "image_projection", "image_projection"),
    ("own", "text_tower.norm", "text_tower.norm"),
    ("hf", "vision_model.encoder.layers.1.", "blocks.1"),
    ("hf", "text_projection", "text_projection"),
    ("hf", "post_layernorm", "norm"),
    ("hf", "text_model.encoder.layers.0.self_attn.k_proj", "blocks.0.attention.qkv"),
    ("hf", "logit_scale", "scale"),
    ("siglip", "logit_bias", "bias"),
    ("siglip", "vision_model.head.probe", "probe"),
    ("kw-whole", "transformer.resblocks.1.", "blocks.1"),
    ("kw-whole", "text_projection", "text_projection"),
    ("kw-whole", "ln_final", "text_tower.norm"),
    ("kw-coca", "text_decoder.resblocks.1.", "layers.1"),
    ("kw-coca", "text_decoder.", "text_decoder"),
]


@pytest.mark.parametrize(("kind", "part", "word"), PARTS)
def test_a_tensor_that_the_file_lacks_is_named(
    files: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, part: str, word: str
) -> None:
    lacking = without(files[kind], tmp_path, part, *(["cross_attn.1."] if part.endswith("resblocks.1.") else []))
    name = f"open_clip:{kind}:{lacking}" if kind in NAMES else lacking if kind == "own" else f"hf:{lacking}"
    said = refused(capsys, "score", name, "--images", tmp_path / "a.png", "--texts", "a")
    assert word in said
    if kind in NAMES:
        assert word in refused(capsys, "import", "open_clip", kind, lacking, "--out", tmp_path / "out")
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("verb", ["load", "tower", "teacher", "sweep"])
def test_a_shard_that_is_not_there_is_named(
    files: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    folder = shutil.copytree(files["shards"], tmp_path / "shards")
    lost = sorted(folder.glob("*.safetensors"))[1]
    lost.unlink()
    train = ("train", "clip", "--data", "scenes", "--size", "debug", "--steps", "1", "--out", tmp_path / "run")
    out = ("--data", "scenes:test?n=8", "--out", tmp_path / "out")
    words: dict[str, tuple[object, ...]] = {
        "load": ("eval", "retrieval", f"hf:{folder}", *out[:2]),
        "tower": (*train, "--image-tower", f"hf:{folder}"),
        "teacher": ("embed", f"hf:{folder}", *out),
        "sweep": ("sweep", "clip", "--init", f"hf:{folder}", "--vary", "optim.lr=1", *out),
    }
    assert lost.name in refused(capsys, *words[verb])


def test_only_the_model_s_own_files_are_read(files: Files, tmp_path: Path) -> None:
    """model.safetensors, else the files of its index: neither another format's copy nor a shard of another model."""
    expected = vector(f"hf:{files['hf']}")
    assert torch.equal(vector(f"hf:{files['shards']}"), expected)
    noise = {n: torch.randn_like(x) for n, x in load_file(files["hf"] / "model.safetensors").items()}
    for kind, name in (
        ("hf", "open_clip_model.safetensors"),
        ("shards", "model-00009-of-00009.safetensors"),
    ):
        folder = shutil.copytree(files[kind], tmp_path / kind / name)
        save_file(noise, folder / name)
        assert torch.equal(vector(f"hf:{folder}"), expected), name
    shutil.copytree(files["hf"], tmp_path / "other")
    (tmp_path / "other" / "model.safetensors").rename(tmp_path / "other" / "other.safetensors")
    with pytest.raises(ValueError, match=r"no model\.safetensors"):
        kiloword.load(f"hf:{tmp_path / 'other'}")


def test_tensors_that_the_towers_do_not_compute_are_named(
    files: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Layer scale, a deeper model's blocks, a decoder: dropped, they would give other features."""
    state = load_file(files["kw-whole"])
    for name in (
        "visual.transformer.resblocks.0.ls_1.gamma",
        "transformer.resblocks.2.ln_1.weight",
        "text_decoder.ln_final.weight",
        "visual.trunk.norm_pre.weight",
    ):
        save_file({**state, name: torch.ones(32)}, tmp_path / "more.safetensors")
        words = ("import", "open_clip", "kw-whole", tmp_path / "more.safetensors", "--out", tmp_path / "out")
        assert name.rpartition(".")[0] in refused(capsys, *words)
    save_file({**state, "classifier.weight": torch.ones(3, 24)}, tmp_path / "more.safetensors")
    main([*map(str, words)])
    assert "left over: classifier.weight" in capsys.readouterr().out
    assert torch.equal(vector(tmp_path / "out"), vector(f"open_clip:kw-whole:{files['kw-whole']}"))
