"""`eval caption`: a model's captions and those of a table, the oracle's figures beside the metrics, and the page."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
import torch

from kiloword.api import Matcher
from kiloword.cli.main import main
from kiloword.config.recipes import ModelFile, sizes
from kiloword.data.scenes.source import parse_scenes
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.evaluation import evaluate
from kiloword.evaluation.caption import CaptionOptions
from kiloword.evaluation.caption.metrics import score_captions
from kiloword.evaluation.caption.truth import elsewhere, judge
from kiloword.generation.captioner import Captioner
from kiloword.generation.options import GenerationOptions
from kiloword.methods.registry import preset
from kiloword.models.build import build
from kiloword.models.model_folder import save_model
from kiloword.types import Skipped
from tars import photo, write_tar

SCENES = "scenes:test?n=24&captions=4&levels=1,2,3"
QUIET = CaptionOptions(meteor=False)


@pytest.fixture(scope="module")
def writer() -> Matcher:
    """An untrained model that writes."""
    source = parse_scenes(SCENES)
    tokenizer = Tokenizer.train([c for row in range(len(source)) for c in source.captions(row)], 300)
    return Matcher(build(sizes()["debug"], preset("coca"), seed=0), tokenizer)


def table(path: Path, captions: dict[str, list[str]]) -> Path:
    pa.parquet.write_table(pa.table({"key": list(captions), "captions": list(captions.values())}), path)
    return path


def people(n: int = 24) -> dict[str, list[str]]:
    """Each scene's first caption, as if a captioner had said it."""
    source = parse_scenes(SCENES)
    return {source.key(row): [source.captions(row)[0], "and another"] for row in range(n)}


def test_a_models_captions_are_scored_against_the_images_own(writer: Matcher) -> None:
    source, options = parse_scenes(SCENES, 32), GenerationOptions(method="greedy", longest=8)
    found = evaluate(writer, "caption", source, generate=options, judge=QUIET, batch=10)
    images = torch.stack([torch.from_numpy(source.record(row).image).permute(2, 0, 1) for row in range(24)])
    said = [texts[0].text for texts in Captioner(writer.model, writer.tokenizer).caption(images, options)]
    own = [source.captions(row) for row in range(24)]
    scenes = [source.scene(row) for row in range(24)]
    truths = {**judge(said, scenes), **elsewhere(said, scenes)}
    assert found == {**score_captions(said, own).values, **truths, "skipped": 0}


def test_captions_of_a_table_need_no_model(tmp_path: Path) -> None:
    captions = people(20)
    first, second, third = list(captions)[:3]
    captions |= {first: [""], second: ["an image"]}
    del captions[third]
    bad: list[Skipped] = []
    file = table(tmp_path / "said.parquet", captions)
    found = evaluate(None, "caption", SCENES, captions=file, judge=QUIET, skipped=bad)
    assert [(s.row, s.reason) for s in bad] == [(row, "not in the table of captions") for row in (2, *range(20, 24))]
    assert found["parsable"] == 18 / 19  # the empty caption is judged too
    assert found["wholly_true"] == 18 / 19
    assert found["statements_true"] == 1.0
    assert found["statements_true_elsewhere"] < 0.7
    assert found["bleu_4"] > 0.9
    assert found["skipped"] == 5


def test_photos_have_no_oracle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILOWORD_CACHE", str(tmp_path / "cache"))
    photos = {f"{n}.png": photo(n) for n in range(4)}
    texts = {f"{n}.txt": f"image {n}\na thing number {n}".encode() for n in range(4)}
    write_tar(tmp_path / "photos" / "0.tar", dict(sorted({**photos, **texts}.items())))
    file = table(tmp_path / "said.parquet", {str(n): [f"Image {n}."] for n in range(4)})
    found = evaluate(None, "caption", str(tmp_path / "photos"), captions=file, judge=QUIET)
    assert list(found) == [*score_captions(["a"], [["a"]]).values, "skipped"]
    assert found["rouge_l"] == 1.0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"captions": {"elsewhere": ["a star"]}}, "has captions for none of the images.*'elsewhere'"),
        ({"captions": people(1), "judge": CaptionOptions(spice=True)}, "SPICE cannot be computed"),
        ({"captions": people(1), "judge": CaptionOptions(limit=0)}, "limit is 0. Expected seconds above 0"),
        ({"captions": people(1), "generate": GenerationOptions(beams=2)}, "says how a model writes"),
        ({}, "neither a model to write captions nor a table"),
        ({"captions": people(1), "beams": 3}, "the task caption has no option beams"),
    ],
)
def test_what_cannot_be_judged_gets_a_sentence(options: dict[str, object], said: str, tmp_path: Path) -> None:
    if "captions" in options:
        options = {**options, "captions": table(tmp_path / "said.parquet", options["captions"])}  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=said):
        evaluate(None, "caption", SCENES, **options)


def test_a_model_that_cannot_write_says_so(writer: Matcher) -> None:
    mute = Matcher(build(sizes()["debug"], preset("clip"), seed=0), writer.tokenizer)
    with pytest.raises(ValueError, match="caption"):
        evaluate(mute, "caption", SCENES, judge=QUIET)


def test_without_java_meteor_is_skipped_with_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = evaluate(None, "caption", SCENES, captions=table(tmp_path / "said.parquet", people()))
    assert "meteor" not in found
    assert re.search("^meteor is omitted: METEOR cannot run: .+$", capsys.readouterr().err, re.MULTILINE)


def test_the_command_and_its_page(writer: Matcher, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_model(
        tmp_path / "model",
        writer.model,
        writer.tokenizer,
        ModelFile(method="coca", settings={}, model=writer.model.config),
    )
    file = table(tmp_path / "said.parquet", {**people(), "test-000003": ["three red stars"]})
    words = ["eval", "caption", tmp_path / "model", file, "--data", SCENES, "--judge.no-meteor"]
    words += ["--generate.method", "greedy", "--generate.longest", "8"]
    main([*map(str, words), "--json", str(tmp_path / "c.json"), "--html", str(tmp_path / "c.html")])
    values = json.loads((tmp_path / "c.json").read_text())
    assert values["said.parquet"]["wholly_true"] == 23 / 24
    printed = capsys.readouterr().out
    assert re.search(rf"^cider +\S+ +{values['said.parquet']['cider']:.4f}$", printed, re.MULTILINE)
    page = (tmp_path / "c.html").read_text()
    for text in (
        "CIDEr-D",
        "What is true",
        "Captions of said.parquet",
        "✓\N{NO-BREAK SPACE}",
        "✗ outside the language",
    ):
        assert text in page
