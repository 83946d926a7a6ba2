"""Quickstart: figures that equal `kiloword eval`'s, nothing done twice, sentences that follow the figures."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import asdict, replace
from html import unescape
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from kiloword import evaluation
from kiloword.api import Matcher, load
from kiloword.apps.quickstart import baseline
from kiloword.apps.quickstart import run as module
from kiloword.apps.quickstart.judge import CHANCE, QUERIES, Scenes, draw_all, misses, within_groups
from kiloword.apps.quickstart.results import Compared, QuickstartResults, SampleSizes
from kiloword.apps.quickstart.run import quickstart, recipe
from kiloword.apps.quickstart.words import summary, weaknesses
from kiloword.cli.main import main
from kiloword.config import settings
from kiloword.config.recipes import Recipe
from kiloword.config.settings import read_config
from kiloword.data.scenes.source import parse_scenes
from kiloword.evaluation.metrics import average_precision
from kiloword.methods.defaults import default_recipe
from kiloword.report import percent

SIZES = SampleSizes(retrieval=60, classes=80, hard=24, baseline=50)
TASKS = ("colour", "shape", "fill", "count")


def small(steps: int = 4) -> Recipe:
    base = default_recipe("siglip", "debug", ("scenes?n=200",))
    image = replace(base.model.image, size=64, patch=16)  # the colour baseline reads images of 64 pixels
    return replace(base, model=replace(base.model, image=image), steps=steps, batch=16)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "quick start"  # a space: commands of the report quote it
    quickstart(small(), folder, SIZES)
    return folder


@pytest.fixture(scope="module")
def results(out: Path) -> QuickstartResults:
    return read_config(out / "results.json", QuickstartResults)


@pytest.fixture(scope="module")
def matcher(out: Path) -> Matcher:
    return load(out / "model")


def test_retrieval_equals_eval_and_the_baseline(results: QuickstartResults, matcher: Matcher) -> None:
    source = parse_scenes(f"scenes:test?n={SIZES.retrieval}")
    ours = results.judged.retrieval
    judged = evaluation.evaluate(matcher, "retrieval", source)
    assert ours.model == pytest.approx({k: judged[k] for k in ours.model})
    assert ours.colours == pytest.approx(dict(baseline.retrieve(parse_scenes("scenes?n=200"), source, SIZES.baseline)))
    assert ours.chance == pytest.approx({k: int(k.split("@")[1]) / SIZES.retrieval for k in ours.chance})


@pytest.mark.parametrize("name", TASKS)
def test_class_tasks_equal_eval_and_the_baseline(results: QuickstartResults, matcher: Matcher, name: str) -> None:
    source = parse_scenes(f"scenes:test?task={name}&n={SIZES.classes}")
    task = results.judged.tasks[name]
    judged = evaluation.evaluate(matcher, "zeroshot", source)
    assert task.compared.model == pytest.approx({k: judged[k] for k in task.compared.model})
    train = parse_scenes(f"scenes?task={name}")
    assert task.compared.colours == pytest.approx(dict(baseline.classify(train, source, SIZES.baseline)))
    assert task.compared.chance["acc1"] == pytest.approx(1 / len(task.classnames))
    labels = [source.record(row).label for row in range(len(source))]
    assert np.sum(task.confusion, 1).tolist() == np.bincount(labels, minlength=len(task.classnames)).tolist()
    assert np.trace(task.confusion) / SIZES.classes == pytest.approx(task.compared.model["acc1"])


def test_general_captions_count_every_true_image(results: QuickstartResults, matcher: Matcher) -> None:
    source = parse_scenes(f"scenes:test?n={SIZES.retrieval}&levels=2")
    captions = [source.record(row).captions[0] for row in range(len(source))]
    images = matcher.encode_image(draw_all(source.name, 64).pixels)
    scores = matcher.score(images, matcher.encode_text(captions)).T
    expected = average_precision(scores, torch.from_numpy(source.relevance(captions, range(len(source))))).mean().item()
    assert results.judged.general["2"].model["image_retrieval_true_map"] == pytest.approx(expected)


def test_gallery_holds_the_best_images_and_the_truth(results: QuickstartResults, matcher: Matcher) -> None:
    scenes = draw_all(f"scenes:test?n={SIZES.retrieval}", 64)
    images = matcher.encode_image(scenes.pixels)
    for found in results.judged.gallery:
        true = scenes.source.relevance([found.text], range(SIZES.retrieval))[0].tolist()
        assert found.matches == sum(true)
        assert [h.match for h in found.hits] == [true[h.row] for h in found.hits]
        best = matcher.score(images, matcher.encode_text([found.text]))[:, 0].topk(5).values
        assert [h.score for h in found.hits] == pytest.approx(best.tolist())
    assert {level for level, _ in QUERIES} | {3} == {f.level for f in results.judged.gallery}


class Told:
    """A contestant whose scores are given."""

    def __init__(self, scores: torch.Tensor) -> None:
        self.scores = scores

    def images(self, pixels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"vec": torch.arange(len(self.scores))}

    texts = images

    def score(self, images: dict[str, torch.Tensor], texts: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.scores[images["vec"]][:, texts["vec"]]


def test_hard_set_ranks_inside_groups_alone() -> None:
    scores = torch.rand(24, 24, generator=torch.Generator().manual_seed(0))
    told = Told(scores)
    found = within_groups(told.score, told.images(scores), told.texts(scores))
    right = [scores[:, t][t // 8 * 8 : t // 8 * 8 + 8].argmax().item() == t % 8 for t in range(24)]
    assert found["image_retrieval_recall@1"] == pytest.approx(sum(right) / 24)
    right = [scores[i][i // 8 * 8 : i // 8 * 8 + 8].argmax().item() == i % 8 for i in range(24)]
    assert found["text_retrieval_recall@1"] == pytest.approx(sum(right) / 24)
    luck = {"vec": torch.zeros(24, 1)}
    assert list(within_groups(CHANCE.score, luck, CHANCE.texts(["x"] * 24)).values()) == [1 / 8, 1 / 8]
    blocks = torch.block_diag(*[2 * torch.eye(8) for _ in range(3)])
    blocks[:, 0] += 9.0  # another group's caption that fits everything does no harm
    assert within_groups(Told(blocks).score, told.images(scores), told.texts(scores))["image_retrieval_recall@1"] == 1


def test_hard_set_differs_by_shape_alone_and_captions_tell() -> None:
    scenes = draw_all("scenes:test?hard=shape&n=24", 32)
    truth = scenes.source.relevance(scenes.captions, range(24))
    for start in (0, 8, 16):
        assert (truth[start : start + 8, start : start + 8] == np.eye(8, dtype=bool)).all()


def test_misses_compare_the_found_with_the_right() -> None:
    scenes = draw_all("scenes:test?hard=shape&n=8", 32)
    shifted = torch.eye(8).roll(1, 0)  # every caption finds an image of its group: all is right but the shapes
    found = misses(shifted, scenes)
    assert (found.captions, found.missed) == (8, 8)
    assert found.same == {n: float(n != "shapes") for n in found.same}
    assert misses(torch.eye(8), scenes).missed == 0
    assert misses(torch.eye(8), scenes).same == {}


def test_misses_anywhere_is_over_all_pairs() -> None:
    scenes: Scenes = draw_all("scenes:test?n=12", 32)
    described = [scenes.source.scene(row) for row in range(12)]
    pairs = list(permutations(described, 2))
    colours = [sorted(t.colour for t in a.things) == sorted(t.colour for t in b.things) for a, b in pairs]
    places = [[t[4:] for t in a.things] == [t[4:] for t in b.things] for a, b in pairs]
    found = misses(torch.eye(12), scenes).anywhere
    assert found["colours"] == pytest.approx(np.mean(colours))
    assert found["places"] == pytest.approx(np.mean(places))
    assert found["number of objects"] == pytest.approx(np.mean([len(a.things) == len(b.things) for a, b in pairs]))


def test_the_card_shows_the_figures(out: Path, results: QuickstartResults) -> None:
    recall = results.judged.retrieval.model["text_retrieval_recall@5"]
    label = f"retrieval: scenes:test?n={SIZES.retrieval}, {SIZES.retrieval} images, at step "
    (row,) = [x for x in (out / "model" / "README.md").read_text().splitlines() if "text\\_retrieval\\_recall@5 |" in x]
    assert row.startswith(f"| {label}")
    assert f"| {recall:.4f} |" in row


def test_a_second_call_does_nothing_twice(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    (out / "report.html").unlink()

    def refuse(*args: object) -> None:
        raise AssertionError("judged again")

    monkeypatch.setattr(module, "judge", refuse)
    quickstart(small(), out, SIZES)
    assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == before


@pytest.mark.slow
def test_damaged_figures_are_judged_again(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = (out / "results.json").read_text()
    (out / "results.json").write_text(first[:100])
    again = quickstart(small(), out, SIZES)
    assert "judged again" in capsys.readouterr().err
    known = json.loads(first)
    assert json.loads(json.dumps(asdict(again.judged))) == known["judged"]  # the same weights give the same figures


def test_another_length_is_refused(out: Path) -> None:
    with pytest.raises(ValueError, match="steps is 4 there, 5 here"):
        quickstart(small(5), out, SIZES)
    with pytest.raises(ValueError, match="at least 1"):
        module.run(out, steps=0)


def test_report_is_whole_and_self_contained(out: Path, results: QuickstartResults) -> None:
    html = (out / "report.html").read_text()
    assert html.count("<section") == 9
    assert "http" not in html.replace("http-equiv", "")
    assert html.count("<img") == 5 * len(results.judged.gallery)
    assert html.count('class="heat"') == 4
    assert f"{results.facts.parameters / 1e6:.1f} million parameters" in html
    for compared in (results.judged.retrieval, results.judged.hard):
        assert f"{compared.model['image_retrieval_recall@1']:.3f}" in html
    assert "--out &#x27;" in html
    with Image.open(out / "example.png") as example:
        assert example.size == (64, 64)
    assert results.facts.images == 64
    assert 0 < results.facts.training_s < 240
    assert "caption to image, R@1" in summary(results)


@pytest.mark.slow
def test_commands_of_the_report_run(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    html = (out / "report.html").read_text()
    commands = [unescape(code) for code in re.findall(r"<pre[^>]*>(.*?)</pre>", html, re.S)]
    for verb, word in (("score", "example.png"), ("eval", "image_retrieval_true_map")):
        (command,) = [c for c in commands if c.startswith(f"kiloword {verb}")]
        main(shlex.split(command)[1:])
        assert word in capsys.readouterr().out
    (python,) = [c for c in commands if c.startswith("import")]
    names: dict[str, object] = {}
    exec(python.replace("matcher.score(", "scores = matcher.score("), names)
    assert names["scores"].shape == (1, 2)


def test_sentences_follow_the_figures(results: QuickstartResults) -> None:
    judged = results.judged
    sure = dict.fromkeys(judged.hard.model, 1.0)
    perfect_tasks = {}
    for name, task in judged.tasks.items():
        counts = np.diag(np.sum(task.confusion, 1)).tolist()
        perfect = replace(task.compared, model=dict.fromkeys(task.compared.model, 1.0))
        perfect_tasks[name] = replace(task, compared=perfect, confusion=tuple(map(tuple, counts)))
    general = {k: replace(v, model=dict.fromkeys(v.model, 1.0)) for k, v in judged.general.items()}
    perfect = replace(
        judged,
        tasks=perfect_tasks,
        hard=replace(judged.hard, model=sure),
        retrieval=replace(judged.retrieval, model=dict.fromkeys(judged.retrieval.model, 1.0)),
        general=general,
        misses=replace(judged.misses, missed=0, same={}),
    )
    assert weaknesses(perfect) == ["None of these tests is hard enough to show what this model gets wrong."]
    blind = Compared(model={"acc1": 0.2}, colours={"acc1": 0.1}, chance={"acc1": 0.125})
    confusion = [[0] * 8 for _ in range(8)]
    confusion[2] = [0, 0, 1, 0, 0, 9, 0, 0]
    shape = replace(judged.tasks["shape"], compared=blind, confusion=tuple(map(tuple, confusion)))
    (said,) = weaknesses(replace(perfect, tasks={**perfect_tasks, "shape": shape}))
    assert said == (
        "It can hardly tell the shape: 20% right, where guessing gives 12.5%. "
        "Its most frequent error: “heart” for 90% of “triangle”."
    )
    behind = replace(blind, model={"acc1": 0.99}, colours={"acc1": 1.0})
    colour = replace(perfect_tasks["colour"], compared=behind)
    (said,) = weaknesses(replace(perfect, tasks={**perfect_tasks, "colour": colour}))
    assert "does better at: the colour." in said


def test_percent_keeps_a_digit() -> None:
    assert [percent(x) for x in (0, 0.004, 0.125, 0.999, 1)] == ["0%", "0.4%", "12.5%", "99.9%", "100%"]


def test_recipe_is_a_run_of_minutes() -> None:
    chosen = recipe(3)
    assert (chosen.seed, chosen.size) == (3, "tiny")
    assert chosen.steps * chosen.batch <= 400_000
    assert replace(chosen, seed=0) == recipe()  # the seed is all that it changes
    assert settings.parse(json.loads(json.dumps(asdict(chosen))), Recipe) == chosen  # as config.json holds it


@pytest.mark.slow
@pytest.mark.timeout(2500)  # 24 minutes on a CPU without bf16 whose other core was busy
def test_quickstart_reaches_its_figures(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"} | {"OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, "-m", "kiloword", "quickstart", "--out", str(tmp_path / "run")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=2400, check=False)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    judged = read_config(tmp_path / "run" / "results.json", QuickstartResults).judged
    for side in ("text", "image"):
        assert judged.retrieval.model[f"{side}_retrieval_recall@1"] >= 0.70
        assert judged.retrieval.model[f"{side}_retrieval_recall@5"] >= 0.97
    reached = {name: task.compared.model["acc1"] for name, task in judged.tasks.items()}
    assert reached["colour"] >= 0.97
    # Goals of this recipe are count 0.75 and shape 0.60; another processor or number of threads rounds differently, and
    # the moment at which shape is found moves (docs/bench.md has the spread). These are what no run may fall below.
    assert reached["count"] >= 0.68
    assert reached["shape"] >= 0.30
