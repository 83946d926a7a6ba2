"""Models of other libraries by name: features as their own library computes them, from every door."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import kiloword
from kiloword.cli.main import main
from kiloword.config.recipes import ModelFile, sizes
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.interop import names
from kiloword.interop.open_clip_config import torchvision_ready
from kiloword.methods.registry import preset
from kiloword.models.build import build
from kiloword.models.model_folder import save_model

TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZE = 32


def saved(folder: Path, kind: str) -> tuple[Path, Any]:
    """A small CLIP or SigLIP with random weights, as transformers saves it."""
    torchvision_ready()
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    torch.manual_seed(0)
    vision, text = TOWER | {"image_size": SIZE, "patch_size": 8}, TOWER | {"vocab_size": 49408}
    if kind == "clip":
        config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=24)
        model = transformers.CLIPModel(config)
        image = {"size": {"shortest_edge": SIZE}, "crop_size": {"height": SIZE, "width": SIZE}}
    else:
        text |= {"max_position_embeddings": 64, "vocab_size": 1000}
        model = transformers.SiglipModel(transformers.SiglipConfig(text_config=text, vision_config=vision))
        image = {"size": {"height": SIZE, "width": SIZE}}
    for name, value in model.named_parameters():  # biases and norms of a new model hide mistakes
        if value.ndim == 1 and "logit" not in name:
            torch.nn.init.normal_(value, 0.5 if "norm" in name else 0, 0.2)
    model.eval().save_pretrained(folder, safe_serialization=True)
    (folder / "preprocessor_config.json").write_text(json.dumps(image | {"resample": 3}))
    return folder, model


def features(model: Any, pixels: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        encoded = model(input_ids=ids, pixel_values=pixels)
    return F.normalize(encoded.image_embeds, dim=-1), F.normalize(encoded.text_embeds, dim=-1)


@pytest.mark.slow
def test_a_clip_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, theirs = saved(tmp_path / "clip", "clip")
    ours = kiloword.load(f"hf:{folder}")
    pixels = torch.randint(0, 256, (2, 3, SIZE, SIZE), dtype=torch.uint8)
    ids = ours.tokenizer.encode(["a dog"], ours.model.config.text).ids
    padded = torch.full((1, 77), 49407)
    padded[0, : len(ids)] = ids
    images, texts = features(theirs, _normalised(ours, pixels), padded)
    torch.testing.assert_close(ours.encode_image(pixels)["vec"], images, atol=1e-5, rtol=0)
    torch.testing.assert_close(ours.encode_text(["a dog"])["vec"], texts, atol=1e-5, rtol=0)
    assert len(list((tmp_path / "cache" / "models").iterdir())) == 1
    monkeypatch.setattr(names.hf_clip, "import_folder", None)  # translated once
    assert torch.equal(kiloword.load(f"hf:{folder}").encode_text("a dog")["vec"], ours.encode_text("a dog")["vec"])


def _normalised(ours: kiloword.Matcher, pixels: torch.Tensor) -> torch.Tensor:
    mean, std = (torch.tensor(getattr(ours.model.config.preprocess, n)).view(3, 1, 1) for n in ("mean", "std"))
    return (pixels / 255 - mean) / std


def test_a_folder_of_transformers_5(tmp_path: Path) -> None:
    from kiloword.interop.hf_clip import import_folder
    from kiloword.interop.towers import with_image_tower

    folder = saved(tmp_path / "clip", "clip")[0]
    image = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").unlink()
    image |= {"image_mean": [0.25] * 3, "image_std": [0.75] * 3}
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": image}))
    read = import_folder(folder)[0].config.preprocess
    assert (read.mean, read.std, read.resize) == ((0.25,) * 3, (0.75,) * 3, "shortest")
    assert with_image_tower(sizes()["debug"], f"hf:{folder}").preprocess == read
    (folder / "processor_config.json").write_text('{"processor_class": "CLIPProcessor"}')
    with pytest.raises(ValueError, match=r"there is no .*preprocessor_config\.json"):
        import_folder(folder)
    assert with_image_tower(sizes()["debug"], f"hf:{folder}").preprocess.mean == (0.5,) * 3


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("hf:clip", "hf:{}/clip"),
        ("open_clip:ViT-B-32:clip/a:b.pt", "open_clip:ViT-B-32:{}/clip/a:b.pt"),
        ("hf-hub:org/name@v1", "hf-hub:org/name@v1"),
        ("clip", "{}/clip"),
        ("/clip", "/clip"),
    ],
)
def test_a_name_that_holds_in_every_directory(
    name: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert names.absolute(name) == expected.format(tmp_path)


@pytest.mark.slow
def test_a_siglip_of_transformers(tmp_path: Path) -> None:
    from kiloword.interop.folder import assemble
    from kiloword.interop.hf_clip import import_folder

    folder, theirs = saved(tmp_path / "siglip", "siglip")
    imported, weights = import_folder(folder)
    assert (imported.left_over, imported.method) == ([], "siglip")
    with pytest.raises(ValueError, match="need their vocabulary"):
        assemble(imported, folder / "elsewhere" / weights.name)
    assert imported.config.preprocess.resize == "squash"
    model = build(imported.config, preset("siglip"), seed=0)
    model.load_state_dict(imported.state)
    ours = kiloword.Matcher(model, Tokenizer.train(["a dog"], 300))
    pixels = torch.randint(0, 256, (2, 3, SIZE, SIZE), dtype=torch.uint8)
    ids = torch.randint(0, 1000, (3, 64))
    images, texts = features(theirs, _normalised(ours, pixels), ids)
    torch.testing.assert_close(ours.encode_image(pixels)["vec"], images, atol=1e-5, rtol=0)
    from kiloword.types import Texts

    packed = Texts(ids.flatten(), torch.arange(4, dtype=torch.int32) * 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(model.eval().encode_text(packed)[1]["vec"], texts, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_every_door_takes_a_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = saved(tmp_path / "clip", "clip")
    Image.fromarray(np.zeros((40, 40, 3), np.uint8)).save(tmp_path / "a.png")
    name = f"hf:{folder}"
    main(["score", name, "--images", str(tmp_path / "a.png"), "--texts", "a dog", "a cat"])
    main(["classify", name, "--images", str(tmp_path / "a.png"), "--classes", "dog", "cat"])
    main(["eval", "retrieval", name, "--data", "scenes:test?n=8"])
    words = ["--data", "scenes", "--out", str(tmp_path / "run"), "--steps", "1", "--batch", "4", "--precision", "fp32"]
    main(["train", "clip", "--init", name, *words, "--workers", "0"])
    printed = capsys.readouterr().out
    assert "image_retrieval_recall@1" in printed
    assert kiloword.load(tmp_path / "run").model.config.head.dim == 24


def own(folder: Path, method: str = "clip") -> Path:
    model = build(sizes()["debug"], preset("clip"), seed=1)
    save_model(
        folder, model, Tokenizer.train(["a dog"], 300), ModelFile(method=method, settings={}, model=model.config)
    )
    return folder


def test_a_hub_is_asked_only_by_its_prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub", reason="needs huggingface_hub")
    asked: list[tuple[str, Any]] = []

    def fetch(repository: str, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((repository, revision))
        assert not any("bin" in pattern or "py" in pattern for pattern in allow_patterns)
        return str(own(tmp_path / "snapshot") if repository == "org/own" else tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", fetch)
    folder = own(tmp_path / "org" / "own")
    kiloword.load(folder)
    assert asked == []
    model = kiloword.load("hf-hub:org/own@v1")
    assert asked == [("org/own", "v1")]
    assert torch.equal(model.encode_text("a dog")["vec"], kiloword.load(folder).encode_text("a dog")["vec"])
    for name in ("hf-hub:own", "hf-hub:../../etc/passwd", "hf-hub:https://x/y"):
        with pytest.raises(ValueError, match="is no repository: expected hf-hub:ORG/NAME"):
            kiloword.load(name)
    assert len(asked) == 1


def test_a_module_named_in_a_folder_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "evil.py").write_text("import pathlib\npathlib.Path('ran').touch()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = own(tmp_path / "model", "evil:preset")
    with pytest.raises(ValueError, match=r"code that its config\.json names and that is not run unasked"):
        kiloword.load(folder)
    assert not (tmp_path / "ran").exists()
    with pytest.raises(ValueError, match="cannot load method evil:preset"):  # it runs now, and has no preset
        kiloword.load(folder, trust_code=True)
    assert (tmp_path / "ran").exists()


CAPTION = ["--data", "scenes", "--out", "c.parquet"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["caption", "open_clip:coca_ViT-B-32:no.pt", *CAPTION], "no file of weights at no.pt"),
        (["average", "open_clip:ViT-B-32", "m", "--out", "a"], "has no file of weights: write open_clip:NAME:FILE"),
        (["train", "hf:clip", "--out", "r"], "unknown method 'hf:clip': expected cappa, clip"),
        (["verify", "open_clip:ViT-B-32"], "--init open_clip:ViT-B-32"),
        (["sweep", "clip", "--init", "hf:no", "--vary", "optim.lr=1", "--out", "s"], "expected a folder that transfor"),
    ],
)
def test_a_verb_that_a_named_model_does_not_fit(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "clip").mkdir()
    (tmp_path / "clip" / "config.json").write_text('{"model_type": "clip"}')
    (tmp_path / "clip" / "model.safetensors").touch()
    (tmp_path / "hf.py").write_text("raise AssertionError('a name of a model is no module')")
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    assert message in capsys.readouterr().err
