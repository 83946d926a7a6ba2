"""Recipes: sizes are the field's, defaults depend on method, size and data as documented, settings are validated."""

from __future__ import annotations

import importlib.util
import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from kiloword.config.recipes import (
    DataConfig,
    ModelFile,
    OptimConfig,
    Preprocess,
    TextConfig,
    model_of_size,
    size_of,
    sizes,
)
from kiloword.config.settings import LARGEST, check, read_config, setting
from kiloword.methods.defaults import FIELD, MUON, PHOTOS, TOP, TOP_PHOTOS, default_recipe
from kiloword.training.run_folder import RunFile


@pytest.mark.parametrize(
    ("size", "name"),
    [(f"{n}{patch}", f"ViT-{n.upper() if n != 'g' else n}-{patch}") for n, patch in
     (("s", 16), ("b", 32), ("b", 16), ("l", 16), ("l", 14), ("h", 14), ("g", 14))],
)  # fmt: skip
def test_sizes_are_those_of_open_clip(size: str, name: str) -> None:
    spec = importlib.util.find_spec("open_clip")
    if spec is None or spec.origin is None:
        pytest.skip("open_clip is not installed")
    known = json.loads((Path(spec.origin).parent / "model_configs" / f"{name}.json").read_text())
    image, text, ours = known["vision_cfg"], known["text_cfg"], sizes()[size]
    assert (size_of(ours), size_of(replace(ours, image=replace(ours.image, patch=8)))) == (size, "custom")
    expected = {"size": 224, "patch": image["patch_size"], "width": (width := image["width"]), "depth": image["layers"]}
    expected |= {"heads": width // image.get("head_width", 64), "mlp": int(width * image.get("mlp_ratio", 4))}
    assert {k: v for k, v in asdict(ours.image).items() if k in expected} == expected
    names = {"context_length": "context", "vocab_size": "vocab", "width": "width", "layers": "depth", "heads": "heads"}
    assert {theirs: asdict(ours.text)[own] for theirs, own in names.items()} == text
    assert ours.text.mlp == 4 * ours.text.width
    assert ours.head.dim == known["embed_dim"]


@pytest.mark.parametrize("drawn", [("scenes",), ("scenes:train", "scenes?n=7")])
@pytest.mark.parametrize("photos", [("a.tar",), ("scenes", "a.tar"), ("scenes.tar",)])
def test_defaults_follow_method_size_and_data(drawn: tuple[str, ...], photos: tuple[str, ...]) -> None:
    small, large = default_recipe("siglip", "tiny", drawn), default_recipe("siglip", "b32", drawn)
    assert (small.steps, small.batch, small.precision, small.optim) == (1000, 64, "auto", MUON)
    assert (large.steps, large.batch, large.precision, large.optim) == (1000, 1024, "auto", FIELD)
    assert small.data == large.data == DataConfig(sources=drawn)
    small, large = default_recipe("siglip", "debug", photos), default_recipe("siglip", "b32", photos)
    assert (small.steps, small.batch, small.matmul) == (2000, 128, "auto")
    assert small.optim == replace(MUON, weight_decay=0.3, ema=0.998)
    assert small.data.augment.drop_words > 0
    assert (large.steps, large.batch, large.optim, large.data.augment) == (2000, 1024, FIELD, PHOTOS)
    top, writing = default_recipe("siglip", "top", photos), default_recipe("sycoca", "top", photos)
    assert (top.optim, top.data.augment, top.data.captions) == (TOP, TOP_PHOTOS, "all")
    assert (top.model.text.vocab, top.model.text.context) == (4096, 48)
    assert (writing.optim, writing.data.augment.drop_patches, writing.data.captions) == (TOP, 0, "one")
    assert default_recipe("siglip", "top", drawn).data == DataConfig(sources=drawn)
    assert default_recipe("fff", "b32", photos).data.captions == "all"
    assert default_recipe("siglip") == default_recipe("siglip", "tiny", ("scenes",))
    assert default_recipe("").method == ""


def test_a_size_by_its_name_in_open_clip_suggests_ours() -> None:
    for theirs, ours in (("ViT-B-32", "b32"), ("ViT-L/14", "l14"), ("RN50", "rn50")):
        with pytest.raises(ValueError, match=rf"unknown size '{theirs}': .* Did you mean {ours}\?"):
            model_of_size(theirs)


def test_a_file_of_settings_is_read_or_refused(tmp_path: Path) -> None:
    path, file = tmp_path / "config.json", ModelFile(method="clip", settings={}, model=sizes()["debug"])
    path.write_bytes(TypeAdapter(ModelFile).dump_json(file))
    assert read_config(path, ModelFile) == file
    raws = [b"[" * 100_000, b'{"recipe":' * 50_000, b"\xff\xfe", b"", b"null", b"[]", b"NaN", b"9" * 5000]
    for raw in (*raws, b'{"\\ud800": 1}', b" " * (LARGEST + 1)):
        path.write_bytes(raw)
        for kind in (RunFile, ModelFile):
            with pytest.raises(ValueError, match=r"config.json cannot be used") as caught:
                read_config(path, kind)
            assert len(str(caught.value)) < 700


def test_limits_of_numbers() -> None:
    with pytest.raises(ValueError, match=r"--lr is nan: .*; --beta1 is 1\.0: "):
        check(OptimConfig(lr=float("nan"), beta1=1.0))
    with pytest.raises(TypeError, match="a setting has no need"):
        setting(1.0, "a weight", need="name=muon")
    check(OptimConfig(lr=0.0, beta1=math.nextafter(1.0, 0.0), ema=1.0, scale_lr=1e4))
    check(TextConfig(width=65536, context=3))
    for resize in ("squash", 40):  # no number, and not the default
        check(replace(sizes()["debug"], preprocess=Preprocess(resize=resize)))  # type: ignore[arg-type]
