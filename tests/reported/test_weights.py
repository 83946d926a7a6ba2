"""Weights of other libraries: read whole from the files that belong to the model, or refused by name."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from users import Refused, Run

import kiloword
from kiloword.cli.main import main
from kiloword.config.recipes import ModelFile, sizes
from kiloword.data.text.tokenizer import vocabulary
from kiloword.methods.registry import preset
from kiloword.model.trunks.libraries import torchvision_ready
from kiloword.models.build import build
from kiloword.models.model_folder import save_model
from other_libraries import SIDE, TOWER, of_transformers, save, stirred, word_vocabulary

TEXT = {"context_length": 77, "vocab_size": 8, "width": 32, "heads": 2, "layers": 2}
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


@pytest.fixture(scope="module")
def files(open_clip: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Small models as files of open_clip, as folders of transformers, one of them in shards, and as one of kiloword."""
    place = word_vocabulary(tmp_path_factory.mktemp("models"))
    for name, config in NAMES.items():
        (place / f"{name}.json").write_text(json.dumps(config))
        open_clip.add_model_config(place / f"{name}.json")
        kind = open_clip.CoCa if "multimodal_cfg" in config else open_clip.CLIP
        state = stirred(kind(**config)).state_dict()
        save_file({n: x.contiguous() for n, x in state.items()}, place / f"{name}.safetensors")
    clip = of_transformers("CLIP")
    save(clip, place / "hf")
    save(clip, place / "shards", max_shard_size="100KB")
    save(of_transformers("Siglip"), word_vocabulary(place / "siglip"))
    kiloword.load(f"hf:{place / 'hf'}").save(place / "own")
    main(["import", "open_clip", "kw-whole", str(place / "kw-whole.safetensors"), "--out", str(place / "imported")])
    return {path.stem: path for path in place.iterdir() if path.suffix != ".json"}


def vector(name: object) -> Tensor:
    return kiloword.load(str(name)).encode_image(PIXELS)["vec"]


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
    files: Files, tmp_path: Path, refused: Refused, kind: str, part: str, word: str
) -> None:
    lacking = without(files[kind], tmp_path, part, *(["cross_attn.1."] if part.endswith("resblocks.1.") else []))
    name = f"open_clip:{kind}:{lacking}" if kind in NAMES else lacking if kind == "own" else f"hf:{lacking}"
    said = refused("score", name, "--images", tmp_path / "a.png", "--texts", "a")
    assert word in said
    if kind == "hf":
        said = refused("embed", name, "--data", "scenes:test?n=4", "--out", tmp_path / "out")
        assert part.rstrip(".") in said or word in said
    if kind in NAMES:
        assert word in refused("import", "open_clip", kind, lacking, "--out", tmp_path / "out")
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("verb", ["load", "tower", "teacher", "sweep"])
def test_a_shard_that_is_not_there_is_named(files: Files, tmp_path: Path, refused: Refused, verb: str) -> None:
    folder = shutil.copytree(files["shards"], tmp_path / "shards")
    lost = sorted(folder.glob("*.safetensors"))[1]
    lost.unlink()
    train = ("train", "clip", "--data", "scenes?n=64", "--size", "debug", "--steps", "1", "--out", tmp_path / "run")
    out = ("--data", "scenes:test?n=8", "--out", tmp_path / "out")
    words: dict[str, tuple[object, ...]] = {
        "load": ("eval", "retrieval", f"hf:{folder}", *out[:2]),
        "tower": (*train, "--image-tower", f"hf:{folder}"),
        "teacher": ("embed", f"hf:{folder}", *out),
        "sweep": ("sweep", "clip", "--init", f"hf:{folder}", "--vary", "optim.lr=1", *out),
    }
    assert lost.name in refused(*words[verb])


def test_only_the_model_s_own_files_are_read(files: Files, tmp_path: Path) -> None:
    """model.safetensors, else the files of its index: neither another format's copy nor a shard of another model."""
    expected = vector(f"hf:{files['hf']}")
    assert torch.equal(vector(f"hf:{files['shards']}"), expected)
    noise = {n: torch.randn_like(x) for n, x in load_file(files["hf"] / "model.safetensors").items()}
    for kind, name in (("hf", "open_clip_model.safetensors"), ("shards", "model-00009-of-00009.safetensors")):
        folder = shutil.copytree(files[kind], tmp_path / kind / name)
        save_file(noise, folder / name)
        assert torch.equal(vector(f"hf:{folder}"), expected), name
    shutil.copytree(files["hf"], tmp_path / "other")
    (tmp_path / "other" / "model.safetensors").rename(tmp_path / "other" / "other.safetensors")
    with pytest.raises(ValueError, match=r"no model\.safetensors"):
        kiloword.load(f"hf:{tmp_path / 'other'}")


def test_tensors_that_the_towers_do_not_compute_are_named(
    files: Files, tmp_path: Path, run: Run, refused: Refused
) -> None:
    """Layer scale, a deeper model's blocks, a decoder: dropped, they would give other features."""
    state = load_file(files["kw-whole"])
    word_vocabulary(tmp_path)
    for name in (
        "visual.transformer.resblocks.0.ls_1.gamma",
        "transformer.resblocks.2.ln_1.weight",
        "text_decoder.ln_final.weight",
        "visual.trunk.norm_pre.weight",
    ):
        save_file({**state, name: torch.ones(32)}, tmp_path / "more.safetensors")
        words = ("import", "open_clip", "kw-whole", tmp_path / "more.safetensors", "--out", tmp_path / "out")
        assert name.rpartition(".")[0] in refused(*words)
    save_file({**state, "classifier.weight": torch.ones(3, 24)}, tmp_path / "more.safetensors")
    assert "left over: classifier.weight" in run(*words)[1]
    assert torch.equal(vector(tmp_path / "out"), vector(files["imported"]))


def numbers() -> dict[str, Any]:
    """The optimizer's part as older trainings wrote it."""
    group = {"lr": np.float64(1e-4), "steps": np.int64(3), "betas": np.float32([0.9, 0.98]), "params": [0]}
    return {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [group]}


CHECKPOINTS: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "numpy": lambda state: {"epoch": 1, "state_dict": state, "optimizer": numbers()},
    "ddp": lambda state: {"state_dict": {f"module.{n}": x for n, x in state.items()}},
    "compiled": lambda state: {f"_orig_mod.{n}": x for n, x in state.items()},
    "compiled ddp": lambda state: {"model": {f"_orig_mod.module.{n}": x for n, x in state.items()}},
    "ddp of compiled": lambda state: {"module": {f"module._orig_mod.{n}": x for n, x in state.items()}},
    "compiled tower": lambda state: {n.replace("visual.", "visual._orig_mod."): x for n, x in state.items()},
    "settings": lambda state: {"ema": state, "args": argparse.Namespace(lr=1e-4, out=Path("/runs"))},
    "lightning": lambda state: {"state_dict": state, "optimizer_states": [numbers()], "callbacks": {}, "loops": {}},
    "lightning module": lambda state: {"state_dict": {f"model.{n}": x for n, x in state.items()}, "epoch": 2},
    "compiled lightning": lambda state: {f"model._orig_mod.{n}": x for n, x in state.items()},
    "epoch among tensors": lambda state: {**state, "epoch": 3, "loss": 0.5, "best": None},
    "counter": lambda state: {"model": {**state, "visual.bn1.num_batches_tracked": 7}, "step": 9},
}


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_checkpoints_as_trainings_write_them(files: Files, tmp_path: Path, kind: str) -> None:
    torch.save(CHECKPOINTS[kind](load_file(files["kw-whole"])), word_vocabulary(tmp_path) / "w.pt")
    main(["import", "open_clip", "kw-whole", str(tmp_path / "w.pt"), "--out", str(tmp_path / "out")])
    found, expected = (load_file(path / "model.safetensors") for path in (tmp_path / "out", files["imported"]))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


class Code:
    """Runs when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("ran"),)


@pytest.mark.parametrize(
    ("checkpoint", "words"),
    [
        (lambda state: {"model": state, "ema": state}, ("model", "ema")),
        (lambda state: {"state_dict": state, "state_dict_ema": state, "epoch": 3}, ("state_dict", "state_dict_ema")),
        (lambda state: {"x": state["ln_final.bias"], "module.x": state["ln_final.bias"]}, ("module.",)),
        (lambda state: {"model": state, "hook": Code()}, ("code",)),
        (lambda state: {"state_dict": {**state, "hook": np.float64(3)}}, ("state dict",)),
    ],
)
def test_checkpoints_whose_model_is_not_plain(
    files: Files, tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch, checkpoint: Any, words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(checkpoint(load_file(files["kw-whole"])), "w.pt")
    said = refused("import", "open_clip", "kw-whole", "w.pt", "--out", "out")
    assert all(word in said for word in words)
    assert not Path("ran").exists()


@pytest.mark.parametrize("side", [30, 38, 23])
def test_pixels_beyond_whole_patches_are_not_used(open_clip: ModuleType, tmp_path: Path, side: int) -> None:
    """As in open_clip's convolution: the features are equal, and the last pixels change nothing."""
    config = NAMES["kw-whole"] | {"vision_cfg": VISION | {"image_size": side, "patch_size": 14}}
    (tmp_path / "kw-rest.json").write_text(json.dumps(config))
    open_clip.add_model_config(tmp_path / "kw-rest.json")
    theirs = stirred(open_clip.CLIP(**config))
    torch.save(theirs.state_dict(), word_vocabulary(tmp_path) / "w.pt")
    ours = kiloword.load(f"open_clip:kw-rest:{tmp_path / 'w.pt'}")
    pixels = torch.randint(0, 256, (2, 3, side, side), dtype=torch.uint8)
    with torch.no_grad():
        expected = theirs.encode_image(ours.model.normalise(pixels), normalize=True)
    found = ours.encode_image(pixels)["vec"]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    changed = pixels.clone()
    changed[..., side // 14 * 14 :] = 0
    assert torch.equal(ours.encode_image(changed)["vec"], found)
    assert "unused" in str(ours)


def test_a_run_with_pixels_beyond_whole_patches(tmp_path: Path, run: Run) -> None:
    """Masked and reconstructed patches, their figures, and a plan."""
    size = ("--size", "debug", "--model.image.size", "35", "--model.image.patch", "16")
    few = ("--steps", "1", "--batch", "4", "--workers", "0", "--model.image.stem", "conv")
    assert "not used" in run("train", "sycoca", "--data", "scenes?n=64", *size, *few, "--out", tmp_path / "run")[1]
    model = kiloword.load(tmp_path / "run")
    images = [np.full((35, 35, 3), n, np.uint8) for n in (0, 200)]
    assert model.score(images, ["a dog"]).shape == (2, 1)
    assert model.explain(images[0], ["a dog"]).grid == (2, 2)
    assert run("plan", "clip", *size, "--batch", "8", "--samples", "1e4", "--gpu", "h100")[0] == 0
    words = ("reconstruction", tmp_path / "run", "--data", "scenes:test?n=4", "--workers", "0")
    assert run("eval", *words)[0] == 0


def test_an_export_to_transformers_is_read_again(tmp_path: Path) -> None:
    """SigLIP's vocabulary drops punctuation, by a class of characters in the tokenizer.json of the export."""
    pytest.importorskip("transformers")
    tokenizer, debug = vocabulary(str(word_vocabulary(tmp_path))), sizes()["debug"]
    text = replace(debug.text, vocab=tokenizer.plain_vocab, causal=False, pad_to_context=True)
    image = replace(debug.image, class_token=False, pre_norm=False, stem_bias=True)
    head = replace(debug.head, dim=image.width, image_pool="map", image_projection=False, text_projection_bias=True)
    config = replace(debug, image=image, text=text, head=head)
    file = ModelFile(method="siglip", settings={}, model=config)
    save_model(tmp_path / "own", build(config, preset("siglip")), tokenizer, file)
    main(["export", "transformers", str(tmp_path / "own"), "--out", str(tmp_path / "hf")])
    texts = ["a dog", "A DOG!", "cat's_dog [a] `क`", ""]
    pixels = torch.randint(0, 256, (1, 3, image.size, image.size), dtype=torch.uint8)
    first, again = kiloword.load(tmp_path / "own"), kiloword.load(f"hf:{tmp_path / 'hf'}")
    torch.testing.assert_close(again.encode_text(texts)["vec"], first.encode_text(texts)["vec"], atol=1e-5, rtol=0)
    torch.testing.assert_close(again.encode_image(pixels)["vec"], first.encode_image(pixels)["vec"], atol=1e-5, rtol=0)


TOWERS = {  # of transformers: a model, its config and sizes, and which tower it is
    "vit": ("ViTForImageClassification", "ViTConfig", TOWER | {"image_size": SIDE, "patch_size": 8}, "image"),
    "clip": (
        "CLIPModel",
        "CLIPConfig",
        {"text_config": TOWER | {"vocab_size": 8}, "vision_config": TOWER | {"image_size": SIDE}},
        "image",
    ),
    "bert": ("BertForMaskedLM", "BertConfig", TOWER | {"vocab_size": 9}, "text"),
    "distilbert": (
        "DistilBertModel",
        "DistilBertConfig",
        {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 2, "vocab_size": 9},
        "text",
    ),
    "electra": ("ElectraModel", "ElectraConfig", TOWER | {"vocab_size": 9, "embedding_size": 32}, "text"),
}


def library_folder(kind: str, folder: Path) -> Path:
    """A small model of transformers with a tokenizer, saved in a folder."""
    torchvision_ready()
    transformers = pytest.importorskip("transformers")
    made, config, sizes, _ = TOWERS[kind]
    getattr(transformers, made)(getattr(transformers, config)(**sizes)).save_pretrained(folder)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "red", "circle", "square"]
    (folder / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


LIBRARY_KINDS = [pytest.param(n, marks=pytest.mark.slow) if n in ("vit", "clip") else n for n in TOWERS]


@pytest.mark.parametrize("kind", LIBRARY_KINDS)
def test_tensors_beyond_the_config_of_a_tower_are_named(tmp_path: Path, run: Run, refused: Refused, kind: str) -> None:
    """A layer more, an adapter: dropped, they would give other features. Heads and constants are left out."""
    folder = library_folder(kind, tmp_path / kind)
    weights = folder / "model.safetensors"
    state = load_file(weights)
    first = next(n for n in state if "layer" in n and ".1." in n and n.endswith("weight") and "text_model" not in n)
    tower, small = f"--{TOWERS[kind][-1]}-tower", ("--size", "debug", "--steps", "1", "--batch", "4", "--workers", "0")
    train = ("train", "clip", "--data", "scenes?n=64", *small, "--freeze", "none", tower, f"hf:{folder}")
    train = (*train, "--out", tmp_path / "run")
    embed = ("embed", f"hf:{folder}", "--data", "scenes:test?n=4", "--out", tmp_path / "out")
    deeper, adapter = first.replace(".1.", ".2."), first.removesuffix("weight") + "lora_A.weight"
    for name, part in ((deeper, ".2."), (adapter, "lora_A")):
        save_file(state | {name: torch.ones(2, 32)}, weights, {"format": "pt"})
        assert part in refused(*train)
        if kind != "vit":
            (folder / "preprocessor_config.json").write_text(json.dumps({"size": 32, "crop_size": 32}))
            assert part in refused(*embed)
    constant = next(n for n in state if "embeddings." in n).partition("embeddings.")[0] + "embeddings.position_ids"
    save_file(state | {constant: torch.arange(4), "other_head.weight": torch.ones(2)}, weights, {"format": "pt"})
    if kind != "clip":  # which takes longer
        code, said = run(*train)
        assert code == 0
        assert kind != "vit" or "classifier.weight" in said


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_torchscript_archive(files: Files, tmp_path: Path, refused: Refused) -> None:
    """As OpenAI's files are; torch's own message advises to run its code."""
    torch.jit.save(torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(1, 2)), tmp_path / "w.pt")
    size = ("--size", "debug", "--steps", "1", "--out", tmp_path / "run")
    for words in (
        ("import", "open_clip", "kw-whole", tmp_path / "w.pt", "--out", tmp_path / "out"),
        ("embed", f"open_clip:kw-whole:{tmp_path / 'w.pt'}", "--data", "scenes:test?n=4", "--out", tmp_path / "out"),
        ("train", "clip", "--image-tower", f"efficientnet-lite0:{tmp_path / 'w.pt'}", "--data", "scenes?n=64", *size),
    ):
        said = refused(*words)
        assert "TorchScript" in said
        assert "safetensors" in said
        assert "weights_only" not in said
