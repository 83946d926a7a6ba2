"""Images are preprocessed as the model's own library does it, or the setting that kiloword lacks is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from users import Refused, Run

import kiloword
from kiloword.cli.main import main
from kiloword.model.trunks.libraries import torchvision_ready
from other_libraries import SIDE, SIZES, TOWER, of_transformers, save, stirred, word_vocabulary

CLIP = SIZES["CLIP"]
MEAN, STD = [0.4, 0.5, 0.6], [0.2, 0.3, 0.25]
PIXELS = torch.randint(0, 256, (2, 3, SIDE, SIDE), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
PHOTO = np.random.default_rng(0).integers(0, 256, (40, 56, 3), np.uint8)


Models = dict[str, tuple[Path, Any]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """A CLIP and a SigLIP of transformers: their folders, and the models."""
    found = {}
    for kind in SIZES:
        model = of_transformers(kind)
        place = tmp_path_factory.mktemp(kind)
        found[kind] = save(model, place if kind == "CLIP" else word_vocabulary(place)), model
    return found


def folder(models: Models, kind: str, place: Path, settings: dict[str, Any]) -> Path:
    """A model's folder with these settings of its image processor."""
    copy = shutil.copytree(models[kind][0], place / kind)
    (copy / "preprocessor_config.json").write_text(json.dumps(settings))
    return copy


def theirs(settings: dict[str, Any], pixels: Tensor, mean: list[float], std: list[float]) -> Tensor:
    """As image processors of transformers compute it."""
    x = pixels.double()
    if settings.get("do_rescale", True):
        x = x * settings.get("rescale_factor", 1 / 255)
    if settings.get("do_normalize", True):
        x = (x - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    return x.float()


@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize(
    "said",
    [
        {},
        {"do_normalize": False},
        {"do_rescale": False},
        {"do_rescale": False, "do_normalize": False},
        {"rescale_factor": 1 / 127.5},
        {"rescale_factor": 1 / 256, "do_normalize": False},
        {"rescale_factor": None, "resample": None},
        {"do_rescale": None, "do_normalize": None, "do_pad": None, "do_pad_to_square": False},
    ],
)
def test_values_of_pixels(models: Models, tmp_path: Path, kind: str, said: dict[str, Any]) -> None:
    settings = {**SIZES[kind], "image_mean": MEAN, "image_std": STD, **said}
    ours = kiloword.load(f"hf:{folder(models, kind, tmp_path, settings)}")
    values = theirs({k: v for k, v in said.items() if v is not None}, PIXELS, MEAN, STD)
    with torch.no_grad():
        found = models[kind][1].get_image_features(pixel_values=values)
    expected = F.normalize(found if isinstance(found, Tensor) else found.pooler_output, dim=-1)
    torch.testing.assert_close(ours.encode_image(PIXELS)["vec"], expected, atol=2e-5, rtol=0)


def test_a_margin_that_is_cropped(models: Models, tmp_path: Path) -> None:
    """The shorter side becomes 36 pixels, of which the middle 32 are seen."""
    ours = kiloword.load(f"hf:{folder(models, 'CLIP', tmp_path, {**CLIP, 'size': {'shortest_edge': 36}})}")
    resized = np.asarray(Image.fromarray(PHOTO).resize((50, 36), Image.Resampling.BICUBIC))[2:34, 9:41]
    expected = ours.encode_image(torch.from_numpy(resized.copy()).permute(2, 0, 1)[None])["vec"]
    torch.testing.assert_close(ours.encode_image([PHOTO])["vec"], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("door", ["load", "embed", "train"])
@pytest.mark.parametrize(
    ("said", "word"),
    [
        ({"do_resize": False}, "do_resize"),
        ({"do_center_crop": False}, "do_center_crop"),
        ({"do_flip_channel_order": True}, "do_flip_channel_order"),
        ({"do_pad": True}, "do_pad"),
        ({"crop_size": 40}, "crop_size"),
        ({"image_std": [0, 0, 0]}, "preprocessor_config.json"),
        ({"image_mean": ["a", 0, 0]}, "preprocessor_config.json"),
        ({"rescale_factor": 0}, "preprocessor_config.json"),
        ({"rescale_factor": "many"}, "preprocessor_config.json"),
    ],
)
def test_a_setting_that_kiloword_lacks_is_named(
    models: Models, tmp_path: Path, refused: Refused, door: str, said: dict[str, Any], word: str
) -> None:
    name, out = f"hf:{folder(models, 'CLIP', tmp_path, {**CLIP, **said})}", ["--out", tmp_path / "out"]
    few = ["--steps", "1"]
    words = {
        "load": ["eval", "retrieval", name, "--data", "scenes:test?n=8"],
        "embed": ["embed", name, "--data", "scenes:test?n=8", *out],
        "train": ["train", "clip", "--data", "scenes?n=64", "--size", "debug", "--image-tower", name, *few, *out],
    }
    assert word in refused(*words[door])


TAGS = [  # what open_clip publishes: of which model, and words of what is printed
    ("ViT-B-32", "openai", ("0.481", "shortest", "quick_gelu")),
    ("ViT-H-14", "dfn5b", ("0.481", "squash", "quick_gelu")),
    ("ViT-L-14", "laion2b_s32b_b82k", ("0.5, 0.5, 0.5", "shortest", "gelu")),
    ("ViT-B-16-SigLIP", "webli", ("0.5, 0.5, 0.5", "squash", "gelu")),
]


@pytest.fixture
def small(open_clip: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of a small model of open_clip, for which weights are published under the tags of others."""
    config = {
        "embed_dim": 24,
        "vision_cfg": {"image_size": SIDE, "layers": 1, "width": 32, "head_width": 16, "patch_size": 8},
        "text_cfg": {"context_length": 16, "vocab_size": 5, "width": 32, "heads": 2, "layers": 1},
    }
    (tmp_path / "kw-tagged.json").write_text(json.dumps(config))
    open_clip.add_model_config(tmp_path / "kw-tagged.json")
    table = {tag: open_clip.get_pretrained_cfg(name, tag) for name, tag, _ in TAGS}
    table["datacomp1b"] = open_clip.get_pretrained_cfg("ViT-L-14-CLIPA", "datacomp1b")
    monkeypatch.setitem(open_clip.pretrained._PRETRAINED, "kw-tagged", table)
    torch.manual_seed(0)
    torch.save(stirred(open_clip.create_model("kw-tagged")).state_dict(), word_vocabulary(tmp_path) / "w.pt")
    return tmp_path / "w.pt"


IMPORT = ["import", "open_clip"]


@pytest.mark.parametrize("door", ["load", "import"])
@pytest.mark.parametrize(("name", "tag", "words"), TAGS)
def test_a_tag_says_preprocessing_and_activation(
    open_clip: ModuleType,
    small: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    tag: str,
    words: tuple[str, ...],
    door: str,
) -> None:
    if door == "load":
        ours = kiloword.load(f"open_clip:kw-tagged@{tag}:{small}")
    else:
        main([*IMPORT, f"kw-tagged@{tag}", str(small), "--out", str(tmp_path / "out")])
        ours = kiloword.load(tmp_path / "out")
    printed = capsys.readouterr()
    assert all(word in printed.out + printed.err for word in words)
    published = open_clip.get_pretrained_cfg(name, tag)
    model = open_clip.create_model("kw-tagged", force_quick_gelu=bool(published.get("quick_gelu"))).eval()
    model.load_state_dict(torch.load(small))
    transform = open_clip.transform.image_transform_v2(
        open_clip.transform.PreprocessCfg(
            size=SIDE, **{k: published[k] for k in ("mean", "std", "interpolation", "resize_mode")}
        ),
        is_train=False,
    )
    with torch.no_grad():
        expected = model.encode_image(transform(Image.fromarray(PHOTO))[None], normalize=True)
    torch.testing.assert_close(ours.encode_image([PHOTO])["vec"], expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("tag", "words"),
    [
        ("@openia", ["openai"]),
        ("@datacomp1b", ["bilinear"]),
        ("", ["0.481", "0.268", "shortest", "bicubic", "activation gelu", "TAG"]),
    ],
)
def test_other_tags(small: Path, tmp_path: Path, run: Run, tag: str, words: list[str]) -> None:
    """Preprocessing that kiloword lacks is refused; what is assumed without a tag is printed."""
    code, said = run(*IMPORT, f"kw-tagged{tag}", small, "--out", tmp_path / "out")
    assert (code, (tmp_path / "out").exists()) == ((2, False) if tag else (0, True))
    assert all(word in said for word in words)


def test_no_tag_is_published(
    small: Path, tmp_path: Path, refused: Refused, open_clip: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(open_clip.pretrained._PRETRAINED, "kw-tagged", {})
    said = refused(*IMPORT, "kw-tagged@openai", small, "--out", tmp_path / "out")
    assert ("openai" in said, "are none" in said) == (True, False)


@pytest.mark.parametrize(
    ("said", "resample"),
    [
        ({"resample": 2, "size": {"height": SIDE, "width": SIDE}}, "2"),
        ({"resample": 0, "size": SIDE}, "0"),
        ({"resample": None, "image_mean": None, "image_std": None, "rescale_factor": None, "size": SIDE}, ""),
    ],
)
def test_another_filter_of_a_tower_is_noted(tmp_path: Path, run: Run, said: dict[str, Any], resample: str) -> None:
    torchvision_ready()
    transformers = pytest.importorskip("transformers")
    transformers.ViTModel(transformers.ViTConfig(**TOWER, image_size=SIDE, patch_size=8)).save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(said))
    words = ["--data", "scenes?n=64", "--size", "debug", "--steps", "1", "--batch", "4", "--workers", "0"]
    printed = run("train", "clip", *words, "--dry-run", "--image-tower", f"hf:{tmp_path}")[1]
    assert ("bicubic" in printed) == bool(resample)
    assert not resample or f"resample {resample}" in printed
