"""Models of other libraries by name: features as their own library computes them, from every door."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import kiloword
from cases import mostly_slow
from commands import refused
from folders import model_folder
from kiloword.config.recipes import sizes
from kiloword.interop import names
from kiloword.interop.hf_clip import import_folder
from kiloword.interop.towers import with_image_tower
from kiloword.model.trunks.libraries import transformers
from other_libraries import SIDE, WORDS, first_losses, of_transformers, save, save_whole, word_vocabulary

PIXELS = torch.randint(0, 256, (2, 3, SIDE, SIDE), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


TEXTS = ["a red dog", "It's 2 cats!", "red " * 30, ""]
WHOLE = ("ChineseCLIP", "CLIP", "AltCLIP", "Aimv2", "Blip", "CLIPSeg", "GroupViT", "MetaClip2")


@pytest.mark.parametrize("kind", mostly_slow(("CLIP", "Siglip"), 1))
def test_a_model_of_transformers_that_our_towers_compute(kind: str, tmp_path: Path) -> None:
    theirs, folder = of_transformers(kind), tmp_path / kind
    name = f"hf:{save(theirs, folder if kind == 'CLIP' else word_vocabulary(folder))}"
    ours = kiloword.load(name)
    assert not ours.model.config.image.trunk.name
    ids = ours.tokenizer.encode(["a dog"], ours.model.config.text).ids
    with torch.no_grad():
        expected = theirs(input_ids=ids[None], pixel_values=ours.model.normalise(PIXELS))
    torch.testing.assert_close(ours.encode_image(PIXELS)["vec"], expected.image_embeds, atol=1e-5, rtol=0)
    torch.testing.assert_close(ours.encode_text(["a dog"])["vec"], expected.text_embeds, atol=1e-5, rtol=0)
    (translated,) = (tmp_path / "cache" / "models").iterdir()
    before = translated.stat().st_mtime_ns
    assert torch.equal(kiloword.load(name).encode_text("a dog")["vec"], ours.encode_text("a dog")["vec"])
    assert translated.stat().st_mtime_ns == before, "translated once"


@pytest.mark.parametrize("kind", mostly_slow(WHOLE, 0))
def test_a_model_of_transformers_that_is_used_whole(kind: str, tmp_path: Path) -> None:
    """Features, tokens, scores, and the loss before the first step; the model folder needs the source no more."""
    theirs = of_transformers(kind, **WORDS, **({"project_dim": 24} if kind == "AltCLIP" else {}))
    folder = save_whole(theirs, tmp_path / kind)
    ours = kiloword.load(f"hf:{folder}")
    words = transformers().AutoTokenizer.from_pretrained(folder)
    given = words(TEXTS, padding=True, truncation=True, return_tensors="pt")
    ids, mask = given["input_ids"], given["attention_mask"]
    packed = ours.tokenizer.encode(TEXTS, ours.model.config.text)
    assert packed.ids.tolist() == ids[mask.bool()].tolist()
    with torch.no_grad():
        expected = theirs(input_ids=ids, attention_mask=mask, pixel_values=ours.model.normalise(PIXELS))
    assert np.isclose(*first_losses(ours, f"hf:{folder}", tmp_path / "run"), rtol=1e-4)
    shutil.rmtree(folder)
    for model in (ours, kiloword.load(ours.save(tmp_path / "own"))):
        images, texts = model.encode_image(PIXELS)["vec"], model.encode_text(TEXTS)["vec"]
        torch.testing.assert_close(images, F.normalize(expected.image_embeds, dim=-1), atol=1e-5, rtol=0)
        torch.testing.assert_close(texts, F.normalize(expected.text_embeds, dim=-1), atol=1e-5, rtol=0)
        torch.testing.assert_close(model.model.head.logits(images @ texts.T).detach(), expected.logits_per_image)


def test_every_other_type_of_transformers_is_refused(tmp_path: Path) -> None:
    """Before its weights are read; a model with code of its own, too, and a BLIP that writes captions."""
    taken = {"clip", "siglip", "altclip", "aimv2", "blip", "chinese_clip", "clipseg", "groupvit", "metaclip_2"}
    others: list[dict[str, Any]] = [{"model_type": kind} for kind in transformers().CONFIG_MAPPING if kind not in taken]
    others += [{"model_type": "clip", "auto_map": {"AutoModel": "code.Model"}}]
    others += [{"model_type": "blip", "architectures": ["BlipForConditionalGeneration"]}]
    assert len(others) > 200
    for config in others:
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match=f"{config['model_type']}.*expected one of"):
            import_folder(tmp_path)


def test_a_folder_of_transformers_5(tmp_path: Path) -> None:
    folder = save(of_transformers("CLIP", eos_token_id=2), tmp_path / "clip")  # as in old configs: the largest id
    image = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").unlink()
    image |= {"image_mean": [0.25] * 3, "image_std": [0.75] * 3}
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": image}))
    made = import_folder(folder)[0].config
    read = made.preprocess
    assert (read.mean, read.std, read.resize, made.image.trunk.name) == ((0.25,) * 3, (0.75,) * 3, "shortest", "")
    assert with_image_tower(sizes()["debug"], f"hf:{folder}").preprocess == read
    (folder / "processor_config.json").write_text('{"processor_class": "CLIPProcessor"}')
    with pytest.raises(ValueError, match=r"preprocessor_config\.json"):
        import_folder(folder)
    (folder / "preprocessor_config.json").write_text('{"image_processor_type": "ViTImageProcessor", "size": 32}')
    with pytest.raises(ValueError, match=r"unsupported way"):
        import_folder(folder)
    (folder / "preprocessor_config.json").unlink()
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


def test_a_hub_is_asked_only_by_its_prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub", reason="needs huggingface_hub")
    asked: list[tuple[str, Any]] = []

    def fetch(repository: str, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((repository, revision))
        assert not any("bin" in pattern or "py" in pattern for pattern in allow_patterns)
        return str(model_folder(tmp_path / "snapshot") if repository == "org/own" else tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", fetch)
    folder = model_folder(tmp_path / "org" / "own")
    kiloword.load(folder)
    assert asked == []
    model = kiloword.load("hf-hub:org/own@v1")
    assert asked == [("org/own", "v1")]
    assert torch.equal(model.encode_text("a dog")["vec"], kiloword.load(folder).encode_text("a dog")["vec"])
    for name in ("hf-hub:own", "hf-hub:../../etc/passwd", "hf-hub:https://x/y"):
        with pytest.raises(ValueError, match="is no repository: expected hf-hub:ORG/NAME"):
            kiloword.load(name)
    assert len(asked) == 1


CAPTION = ["--data", "scenes?n=64", "--out", "c.parquet"]


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
    assert message in refused(capsys, *words)
