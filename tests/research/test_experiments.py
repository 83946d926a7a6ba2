"""The script that runs arms: resumes, skips what is finished, tells changed losses, prints means and spreads."""

from __future__ import annotations

import importlib
import json
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import tyro

from folders import matcher
from kiloword import evaluation
from kiloword.apps.quickstart.scenes import draw_all
from kiloword.config.recipes import Recipe
from kiloword.data.scenes.source import parse_scenes
from kiloword.methods.defaults import default_recipe
from kiloword.methods.registry import preset
from kiloword.models.build import build
from kiloword.models.states import steps_done
from kiloword.training.log import read_metrics
from kiloword.types import Source
from research import arms_rows as rows, fff, shortcut, teacher
from research.arms import Arm, Options, command, main, with_options
from research.scenes_judge import SCENES, judge_scenes, within_groups

STUB = """
from dataclasses import dataclass, replace
from kiloword import evaluation
from kiloword.methods.defaults import default_recipe
from research.arms import Arm, Experiment, Options, main

@dataclass(frozen=True, kw_only=True)
class StubOptions(Options):
    val: str = "scenes:test?n=20"

def arms(options):
    def judge(matcher):
        found = evaluation.evaluate(matcher, "retrieval", options.val)
        return {"recall": found["text_retrieval_recall@10"]}

    base = default_recipe("siglip", "debug", ("scenes?n=64",))
    base = replace(base, batch=8, steps=3, data=replace(base.data, tokenizer_vocab=300))
    return [
        Arm(name="plain", recipe=base, judge=judge),
        Arm(name="other", recipe=replace(base, settings={"bias": -5.0}), judge=judge),
    ]

EXPERIMENT = Experiment(module="stub", title="A stub", options=StubOptions, arms=arms, columns={"R@10": "recall"})

if __name__ == "__main__":
    main(EXPERIMENT)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the stub, importable here and in the processes that are started."""
    folder = tmp_path_factory.mktemp("experiment")
    (folder / "stub.py").write_text(STUB)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        patch.syspath_prepend(folder)
        yield folder


def run(place: Path, *words: str) -> None:
    """The script in this process; its runs are processes of their own unless `--only` names one."""
    main(importlib.import_module("stub").EXPERIMENT, ["--out", str(place / "out"), *words])


@pytest.fixture(scope="module")
def found(place: Path) -> list[rows.Row]:
    run(place, "--seeds", "0", "--arms", "plain")
    run(place, "--only", "plain:1")
    return rows.read(place / "out")


@pytest.mark.slow
def test_every_arm_and_seed_has_a_row(place: Path, found: list[rows.Row]) -> None:
    assert sorted((r["arm"], r["seed"]) for r in found) == [("plain", 0), ("plain", 1)]
    for row in found:
        assert (row["steps"], row["images"], row["losses_of"]) == (3, 24, 3)
        assert row["cpu_s"] > 0
        assert row["train_s"] > 0
    assert found[0]["losses"] != found[1]["losses"]
    assert not list((place / "out").glob("*/state"))


@pytest.mark.slow
def test_finished_rows_are_skipped_and_reported(
    place: Path, found: list[rows.Row], capsys: pytest.CaptureFixture[str]
) -> None:
    before = (place / "out" / "results.jsonl").read_bytes()
    run(place, "--seeds", "0", "1", "--arms", "plain")
    assert (place / "out" / "results.jsonl").read_bytes() == before
    said = capsys.readouterr()
    assert "2 of 2 runs are finished, 0 to do" in said.err
    values = [r["metrics"]["recall"] for r in found]
    assert f"| plain | {sum(values) / 2:.3f} ({min(values):.3f}..{max(values):.3f}) |" in said.out
    run(place, "--table", "--seeds", "0", "7")
    said = capsys.readouterr()
    one = next(r["metrics"]["recall"] for r in found if r["seed"] == 0)
    assert f"| plain | {one:.3f} |" in said.out
    assert "| other | - | - | 0 |" in said.out


@pytest.mark.slow
def test_check_tells_changed_losses(place: Path, found: list[rows.Row], capsys: pytest.CaptureFixture[str]) -> None:
    path, wrong = place / "out" / "results.jsonl", [row | {"losses": "0" * 16} for row in found]
    kept = path.read_text()
    for stored, code, said in ((found, 0, "are those of"), (wrong, rows.OTHER_LOSSES, "are NOT those of")):
        path.write_text("".join(json.dumps(row) + "\n" for row in stored))
        with pytest.raises(SystemExit) as ended:
            run(place, "--check", "--only", "plain:0")
        assert ended.value.code == code
        assert f"plain, seed 0: the first 3 losses {said}" in capsys.readouterr().out
    path.write_text(kept)


@pytest.mark.slow
def test_a_killed_script_goes_on_and_a_check_stops_early(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--seeds", "3", "--arms", "other", "--steps", "4000")
    command = [sys.executable, "-m", "stub", "--out", str(place / "out"), *words]
    folder = place / "out" / f"other-3-{rows.recipe_hash(replace(other(), steps=4000))}"
    done = 0
    first: list[float] = []
    for signal_ in (signal.SIGTERM, signal.SIGINT):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        while last_step(folder) < done + 20:
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal_)
        _, stderr = process.communicate(timeout=180)
        assert process.returncode == 130
        assert stderr.decode().splitlines()[-1] == "python -m stub: interrupted; the same command goes on from here"
        assert not first or rows.losses(folder) == first  # resumed: the steps before the state are not computed again
        first = rows.losses(folder)
        assert done + 20 <= steps_done(folder / "state") < 4000
        done = steps_done(folder / "state")
    assert "goes on from there" in (folder / "log.txt").read_text()
    assert not [r for r in rows.read(place / "out") if r["seed"] == 3]
    row = {"arm": "other", "seed": 3, "recipe": folder.name[-12:], "commit": "0123456789", "dirty": False}
    rows.append(place / "out", row | {"losses": rows.losses_hash(first), "losses_of": 20})
    run(place, "--check", *words)
    rows.append(place / "out", row | {"losses": rows.losses_hash(first[1:]), "losses_of": 20})
    with pytest.raises(SystemExit) as ended:
        run(place, "--check", *words)
    assert ended.value.code == 2
    assert "rows of other are of code that computed other losses" in capsys.readouterr().err


def last_step(folder: Path) -> int:
    return max((row["step"] for row in read_metrics(folder / "metrics.jsonl")), default=0)


def other() -> Recipe:
    stub = importlib.import_module("stub")
    return stub.arms(stub.StubOptions(out=Path()))[1].recipe  # type: ignore[no-any-return]


@pytest.mark.slow
def test_a_failed_run_is_named(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, named in (("--arms plain --seeds 0 --batch 7000", "log.txt"), ("--arms plane", "plain, other")):
        with pytest.raises(SystemExit) as ended:
            run(place, *words.split())
        assert ended.value.code == 2
        assert named in capsys.readouterr().err


def test_a_rate_multiplies_every_learning_rate_of_an_arm() -> None:
    recipe = default_recipe("siglip", "debug", ("scenes?n=64",))
    arm = Arm(name="plain", recipe=recipe, judge=judge_scenes, rate=0.5)
    options = Options(out=Path())
    assert with_options(replace(arm, rate=1.0), options).recipe == recipe
    slower, faster = (with_options(arm, replace(options, rate=rate)).recipe.optim for rate in (None, 2.0))
    assert (slower.lr, slower.muon_lr) == (0.5 * recipe.optim.lr, 0.5 * recipe.optim.muon_lr)
    assert (faster.lr, faster.muon_lr) == (2 * recipe.optim.lr, 2 * recipe.optim.muon_lr)


def test_recipe_hashes() -> None:
    recipe = default_recipe("siglip", "debug", ("scenes?n=64",))
    assert rows.recipe_hash(recipe) == rows.recipe_hash(replace(recipe, seed=5))
    others = [replace(recipe, steps=7), replace(recipe, settings={"bias": -5.0}), replace(recipe, freeze=("image",))]
    assert len({rows.recipe_hash(r) for r in [recipe, *others]}) == 4


PHOTOS = ("--data", "scenes?n=64", "--val", "scenes:test?n=20")
MODULES = {"llip": (), "clip_c": ("--scenes", "inner"), "fff": (), "flickr": (*PHOTOS, "--mined"), "shortcut": ()}


def arms_of(name: str, *words: str) -> list[Arm]:
    experiment = importlib.import_module(f"research.{name}").EXPERIMENT
    assert experiment.module == f"research.{name}"
    words = ("--size", "debug", "--out", "nowhere", *MODULES[name], *words)
    options = tyro.cli(experiment.options, args=words)
    again = tyro.cli(experiment.options, args=command(experiment, options)[3:])
    assert again == options  # what a run's own process is told
    return experiment.chosen(options)


@pytest.mark.parametrize("name", MODULES)
def test_arms_can_be_built_and_share_length_and_towers(name: str) -> None:
    arms = arms_of(name)
    assert 5 <= len(arms) <= 8
    assert len({arm.name for arm in arms}) == len({rows.folder_of(Path(), arm, 0) for arm in arms}) == len(arms)
    assert len({(a.recipe.steps, a.recipe.batch, str(a.recipe.optim)) for a in arms}) == 1
    assert len({str((a.recipe.model.image, a.recipe.model.text)) for a in arms}) == 1
    for arm in arms:
        build(arm.recipe.model, preset(arm.recipe.method, arm.recipe.settings))


def test_controls_change_images_alone() -> None:
    source = parse_scenes("scenes?n=40")
    images = [source.record(row).image for row in range(40)]
    for changed in (shortcut.constant(source), shortcut.shuffled(source)):
        assert isinstance(changed, Source)
        assert not hasattr(changed, "relevance")
        assert changed.fingerprint != source.fingerprint
        assert pickle.loads(pickle.dumps(changed)).fingerprint == changed.fingerprint  # a loader's worker
        assert [changed.record(row).captions for row in range(40)] == [source.captions(row) for row in range(40)]
    constant = shortcut.constant(source)
    assert all(np.array_equal(constant.record(row).image, images[0]) for row in range(40))
    shuffled = [shortcut.shuffled(source).record(row).image for row in range(40)]
    assert {p.tobytes() for p in shuffled} == {p.tobytes() for p in images}
    assert not any(np.array_equal(a, b) for a, b in zip(shuffled, images, strict=True))


def test_a_model_of_constant_images_is_judged_as_chance() -> None:
    arms = {arm.name: arm for arm in arms_of("shortcut", "--val", "scenes:test?n=20")}
    judged = arms["llip-constant"].judge(matcher("llip"))
    for k in (1, 5, 10):
        assert judged[f"image_retrieval_recall@{k}"] == pytest.approx(k / 20)
        assert judged[f"text_retrieval_recall@{k}"] == pytest.approx(k / 20)


@pytest.mark.parametrize("inner", [False, True])
def test_figures_are_those_of_eval(inner: bool) -> None:
    trained = matcher("llip")
    judged = judge_scenes(trained, n=16, inner=inner)
    more = "&inner=1" if inner else ""
    found = evaluation.evaluate(trained, "retrieval", f"scenes:test?n=16{more}")
    shape = evaluation.evaluate(trained, "zeroshot", f"scenes:test?task=shape&n=32{more}")
    assert found.pop("skipped") == 0
    assert {name: judged[name] for name in found} == found
    assert judged["zeroshot_shape_acc1"] == shape["acc1"]
    assert set(SCENES.values()) - set(judged) == ({v for v in SCENES.values() if "hard" in v} if inner else set())


@pytest.mark.slow
def test_a_teacher_is_made_once_and_its_thresholds_stand_in_the_arms(tmp_path: Path) -> None:
    words = ("--out", str(tmp_path), "--size", "debug", "--steps", "3", "--batch", "8", "--seeds", "0")
    words = (*words, "--teacher-steps", "200", "--n", "500", "--arms", "mined", "exact-balanced")
    main(fff.EXPERIMENT, words)
    found = rows.read(tmp_path)
    assert sorted(r["arm"] for r in found) == ["exact-balanced", "mined"]
    mined = json.loads((tmp_path / "teacher.json").read_text())
    assert len(mined["recipe"]) == 12
    assert set(mined["thresholds"]) == set(teacher.THRESHOLDS)
    for counts in mined["mined"].values():
        assert counts["right"] <= min(counts["mined"], counts["true"])
        assert counts["pairs"] > 10**6
    (config,) = tmp_path.glob("mined-0-*/config.json")
    settings = json.loads(config.read_text())["recipe"]["settings"]
    assert {name: settings[name] for name in teacher.THRESHOLDS} == mined["thresholds"]
    written = (tmp_path / "teacher.json").stat().st_mtime_ns
    main(fff.EXPERIMENT, words)
    assert (tmp_path / "teacher.json").stat().st_mtime_ns == written
    assert len(rows.read(tmp_path)) == 2


def test_a_teacher_of_other_settings_is_not_read_as_fresh(tmp_path: Path) -> None:
    """By its recipe, which a file of before does not have."""
    recipe = default_recipe("clip", "debug", ("scenes?n=64",))
    for stored in ({}, {"recipe": rows.recipe_hash(recipe)}):
        (tmp_path / "teacher.json").write_text(json.dumps({"thresholds": {}, "mined": {}, **stored}))
        teacher.make(recipe, tmp_path, "cpu", 0)
    with pytest.raises(ValueError, match="a teacher of other settings"):
        teacher.make(replace(recipe, steps=7), tmp_path, "cpu", 0)


def test_hard_set_ranks_inside_groups_alone() -> None:
    scores = torch.rand(24, 24, generator=torch.Generator().manual_seed(0))
    index = {"vec": torch.arange(24)}

    def told(scores: torch.Tensor) -> dict[str, float]:
        return within_groups(lambda images, texts: scores[images["vec"]][:, texts["vec"]], index, index)

    right = [scores[:, t][t // 8 * 8 : t // 8 * 8 + 8].argmax().item() == t % 8 for t in range(24)]
    assert told(scores)["image_retrieval_recall@1"] == pytest.approx(sum(right) / 24)
    right = [scores[i][i // 8 * 8 : i // 8 * 8 + 8].argmax().item() == i % 8 for i in range(24)]
    assert told(scores)["text_retrieval_recall@1"] == pytest.approx(sum(right) / 24)
    assert list(told(torch.zeros(24, 24)).values()) == [1 / 8, 1 / 8]  # ties get their expected value
    blocks = torch.block_diag(*[2 * torch.eye(8) for _ in range(3)])
    blocks[:, 0] += 9.0  # another group's caption that fits everything does no harm
    assert told(blocks)["image_retrieval_recall@1"] == 1
    scenes = draw_all("scenes:test?hard=shape&n=24", 32)  # which differ by shape alone, and captions tell
    truth = scenes.source.relevance(scenes.captions, range(24))
    for start in (0, 8, 16):
        assert (truth[start : start + 8, start : start + 8] == np.eye(8, dtype=bool)).all()
