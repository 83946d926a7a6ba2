"""Recipes by name and from files: what they set, how flags override them, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import save_file

from commands import refused, said
from folders import model_folder, write_encoder
from kiloword.config import papers
from kiloword.config.papers import RecipeValue, fill, read
from kiloword.config.settings import check, leaves
from kiloword.methods.defaults import default_recipe
from kiloword.methods.registry import preset
from kiloword.model.trunks.lite import EfficientNetLite
from paper_values import VALUES

RUN = ["--size", "debug", "--batch", "8", "--steps", "2", "--data", "scenes?n=16", "--vocab", "300"]
DEBUG = [*RUN, "--tokenizer", "own"]


def values(name: str) -> dict[str, RecipeValue]:
    return papers.expanded(papers.load(name))


@pytest.mark.parametrize("name", papers.names())
def test_a_recipe_sets_what_its_paper_states(name: str) -> None:
    """Every stated value is set, and says where it is stated; the towers' own values may come from the size. Each
    recipe builds its method; a value has a source or a reason."""
    chosen, entries = papers.load(name), values(name)
    for setting, (stated, quotation, place) in VALUES.get(name, {}).items():
        if setting == "method":
            assert chosen.method == stated
            continue
        entry = entries[setting]
        value = tuple(entry.value) if isinstance(entry.value, list) else entry.value
        assert value == stated, f"{setting}: the paper says {stated} ({quotation!r}, {place})"
        assert entry.source or setting.startswith("model."), f"{setting}: no source, but the paper states it ({place})"
    for key, entry in (entries | chosen.facts).items():
        assert bool(entry.source) != bool(entry.open), key
    recipe = replace(fill(default_recipe(chosen.method, chosen.value("size")), chosen), settings=chosen.settings())
    check(recipe)
    preset(recipe.method, recipe.settings)
    assert len(chosen.length()) == 1
    assert chosen.about
    assert chosen.paper
    now = {leaf.path: leaf.value for leaf in leaves(recipe)}
    for key, entry in entries.items():
        if key in now:
            assert json.loads(json.dumps(now[key])) == entry.value, key


def test_inheritance() -> None:
    g14 = values("llip-g14")
    assert g14["model.image.width"] == RecipeValue(1664, open="size bigg")
    assert values("llip-bigg") == g14
    assert [values(f"llip-{size}")["optim.lr"].value for size in ("b32", "l14")] == [5e-4, 4e-4]
    assert papers.load("paper", "llip").name == "llip-b32"
    for method in ("llip", "clip-c", "sycoca", "coca", "prolip", "pcme++", "fff"):
        assert papers.load("paper", method).method == method


def test_a_recipe_starts_from_another_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The initialisation of SyCoCa's recipes is not of a model that brings its weights, unless a flag asks for it."""
    init = ("--init", model_folder(tmp_path / "m"))
    words = ("train", "--recipe", "sycoca-cc3m", *init, *RUN[2:-2], "--tokenizer", "own", "--out", tmp_path)
    assert "here 0; section 4.1" in said(capsys, *words, "--dry-run")
    assert "--model.init-std" in refused(capsys, *words, "--model.init-std", "0.1")


def test_dry_run_prints_sources(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("train", "llip+compose", "--recipe", "llip-b32", "--dry-run", *DEBUG, "--settings.k", "4")
    lines = said(capsys, *words).splitlines()
    found = {line.split()[0]: line.split(maxsplit=2)[1:] for line in lines if line.startswith("  ")}
    assert found["optim.beta2"] == ["0.95", "section 4; appendix A"]
    assert found["settings.k"] == ["64", "here 4; table 1; table 5 has 128"]
    assert found["samples"][1].startswith("here none; ")
    assert found["model.image.patch"][1].startswith("here 16; ")
    assert list(tmp_path.iterdir()) == []


def test_own_file(tmp_path: Path) -> None:
    """A user's file inherits a recipe, and sets values plainly or with a source."""
    path = tmp_path / "mine.toml"
    path.write_text(
        'base = "llip-b32"\nepochs = 2\nbatch = 64\n[settings]\nk = 8\n[optim]\n'
        'lr = {value = 1e-3, source = "our sweep"}\n[data.augment]\nblur_sigma = [0.5, 1]\nblur = 0.1\n'
    )
    mine = read(path)
    assert (mine.method, mine.length(), mine.settings()["k"]) == ("llip", {"epochs": 2}, 8)
    assert mine.entries["optim.lr"] == RecipeValue(1e-3, "our sweep")
    recipe = fill(default_recipe("llip", "b32"), mine)
    assert (recipe.batch, recipe.data.augment.blur_sigma, recipe.optim.beta2) == (64, (0.5, 1.0), 0.95)
    path.write_text("batch = 64")
    assert papers.expanded(read(path)) == {"batch": RecipeValue(64)}
    path.write_text('base = "prolip-b16-1.28b"\nsize = "debug"\nmodel.text.depth = 3\n')
    plain = default_recipe("prolip", "debug")  # another size replaces the towers of the base
    model = fill(plain, read(path)).model
    assert (model.image, model.text) == (plain.model.image, replace(plain.model.text, depth=3))


PUBLIC_CODE = {  # read in the public code that each reason names
    "llip-b32": {"settings.temperature_mode": "divide", "settings.per_token_projections": True},
    "metaclip-h14": {"optim.beta2": 0.98, "optim.lr": 4e-4},
    "fff-cc3m": {"optim.beta2": 0.999, "optim.eps": 1e-8, "data.augment.crop": 0.2},
    "fff-cc3m-b16": {"optim.beta2": 0.98, "optim.eps": 1e-6, "data.augment.jitter": 0.8},
    "clip-c-cc3m": {"optim.final_lr": 0.02, "model.text.activation": "quick_gelu", "optim.weight_decay": 0.5},
    "clip-redcaps": {"epochs": 35, "optim.eps": 1e-8},
    "sycoca-cc12m": {"model.head.dim": 512, "model.text.width": 768},
    "prolip-l16-finetuned": {"model.image.size": 256, "model.text.width": 1024, "model.head.dim": 1024},
}


def test_what_papers_leave_open_is_as_in_public_code() -> None:
    for name, stated in PUBLIC_CODE.items():
        entries = values(name)
        assert {key: entries[key].value for key in stated} == stated, name
        assert all(entries[key].open for key in stated), name


@pytest.mark.slow
@pytest.mark.parametrize("name", papers.names())
def test_each_recipe_dry_runs(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the recipe's own towers, of random weights; a batch that the scenes fill; FFF without its teacher."""
    words: list[object] = ["--settings.positives", "annotated"] if papers.load(name).method == "fff" else []
    towers = {key: entry.value for key, entry in values(name).items() if key.endswith("_tower")}
    if towers.get("text_tower") == "minilm":
        write_encoder(tmp_path / "minilm")
        words += ["--text-tower", f"minilm:{tmp_path / 'minilm'}"]
    if towers.get("image_tower") == "efficientnet-lite0":
        save_file(EfficientNetLite("efficientnet-lite0").state_dict(), tmp_path / "lite0.safetensors")
        words += ["--image-tower", f"efficientnet-lite0:{tmp_path / 'lite0.safetensors'}"]
    data = ["--data", "scenes?n=8", "--tokenizer", "own", "--batch", "8"]
    lines = said(capsys, "train", "--recipe", name, "--dry-run", "--out", tmp_path / "run", *data, *words).splitlines()
    printed = {line.split()[0] for line in lines if line.startswith("  ")}
    assert set(values(name)) <= printed


def test_listed_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listed = said(capsys, "recipes")
    assert all(name in listed for name in papers.names())
    said(capsys, "recipes", "show", "llip-b32", "--json", tmp_path / "r.json")
    written = json.loads((tmp_path / "r.json").read_text())
    assert written["values"]["settings.k"] == {"value": 64, "source": "table 1; table 5 has 128", "open": ""}
    assert written["plan"]["gpus"]["value"] == 128


BAD_FLAGS = {
    "--recipe llip-b23": "llip-b23",
    "--recipe b16-12.8b": "Did you mean prolip-b16-12.8b?",
    "siglip --recipe llip-b32": "METHOD is siglip",
    "--recipe paper": "METHOD",
    "clip --recipe paper": "clip-cc3m",
    "--recipe llip-b32 --config x.toml": "both",
    "--config missing.toml": "missing.toml",
    "--config .": "no file",
}
BAD_FILES = {
    "bacth = 3": "bacth",
    'base = "llip-b23"': "llip-b23",
    "base = 3": "base is '3'",
    'batch = "many"': "batch",
    "batch = -3": ": batch is -3",
    "[settings]\nkk = 3": "settings.kk",
    "steps = 3\nepochs = 1": "steps and epochs",
    "epochs = true": "epochs",
    "samples = 2.5": "samples",
    'method = "mine:preset"': "trust",
    'size = "huge"': "huge",
    "batch = ": "no recipe",
    "a = " + "[" * 3000: "no recipe",
    '{"format": "kiloword-model-1", "method": "clip"}': "folder above",
}


@pytest.mark.parametrize(("words", "says"), BAD_FLAGS.items())
def test_bad_flags(words: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert says in refused(capsys, "train", *words.split(), "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("text", "says"), BAD_FILES.items(), ids=lambda text: text[:30])
def test_bad_files(text: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / ("mine.json" if text[0] == "{" else "mine.toml")
    path.write_text(text if "method" in text or "base" in text else f'method = "llip"\n{text}')
    assert says in refused(capsys, "train", "--config", path, "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()
