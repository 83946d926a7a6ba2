"""Several validation sets, the best model by a metric, runs that stop early; and resuming all of that exactly."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_resume import PowerCut, assert_same, cut_at, rows

import kiloword.training.loop as loop
from kiloword import evaluation
from kiloword.api import load
from kiloword.config.options import RunOptions
from kiloword.config.recipes import DataConfig, Recipe
from kiloword.config.settings import parse
from kiloword.methods.defaults import default_recipe
from kiloword.training.log import read_metrics
from kiloword.training.loop import train
from kiloword.training.validation import best as best_module
from kiloword.training.validation.best import Best, direction
from kiloword.training.validation.sets import open_val, set_names
from kiloword.watch.command import Runs

COLOURS = "scenes:test?n=16&task=colour"
SETS = ("scenes:val?n=12", f"zeroshot={COLOURS}", f"spectrum={COLOURS}")
METRIC = f"val/zeroshot={COLOURS.partition('?')[0]}/acc1"
EVERY = RunOptions(log_every=1, save_every=5, eval_every=2, quiet=True, keep_best=METRIC, patience=2)


def recipe(*val: str, **more: Any) -> Recipe:
    base = default_recipe("siglip", "debug", ("scenes?n=64&captions=3",))
    base = replace(base, data=replace(base.data, tokenizer_vocab=300, val=val), optim=replace(base.optim, ema=0.9))
    return replace(base, **{"batch": 16, "steps": 14, "seed": 5, **more})


def values(monkeypatch: pytest.MonkeyPatch, accuracies: list[float]) -> None:
    """From now on, validations after steps 2, 4, 6, ... find these accuracies, and their real other metrics."""
    real = loop.validate
    monkeypatch.setattr(loop, "validate", lambda run: {**real(run), METRIC: accuracies[run.step // 2 - 1]})


FOUND = [0.25, 0.5, 0.5, 0.25, 0.75, 0.75, 0.75]  # step 4 is best, and after step 8 the patience of 2 ends


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that stops early, which nothing interrupts."""
    out = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        values(patch, FOUND)
        train(recipe(*SETS), out, options=EVERY)
    return out


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_the_best_model_is_kept_and_the_run_ends_early(whole: Path, tmp_path: Path) -> None:
    assert json.loads((whole / "best" / "best.json").read_text()) == {"metric": METRIC, "step": 4, "value": 0.5}
    logged = [row for row in rows(whole) if METRIC in row]
    assert [(row["step"], row.get("stopped_early")) for row in logged] == [(2, None), (4, None), (6, None), (8, 1)]
    names = ("scenes:val", f"zeroshot={COLOURS.partition('?')[0]}", f"spectrum={COLOURS.partition('?')[0]}")
    starts = [f"val/{name}/" for name in names]
    for start, metric in zip(starts, ("text_retrieval_recall@1", "acc1", "effective_rank"), strict=True):
        assert start + metric in logged[0]
    assert all(name.startswith(("val/", "stopped", "step")) for name in logged[-1])
    (run,), _ = Runs([whole]).update()
    assert run.state() == ("finished", "early, by --patience")
    assert run.best == (METRIC, 0.5, 4)
    model = json.loads((whole / "best" / "config.json").read_text())
    assert model["steps"] == 4
    four = replace(recipe(steps=14), data=replace(recipe().data, val=()))
    with pytest.MonkeyPatch.context() as patch:
        cut_at(patch, 5, four, tmp_path, options=replace(EVERY, keep_best="", patience=0, eval_every=0, save_every=4))
    assert same(weights(whole / "best"), weights(tmp_path / "model"))  # validation does not change the training either


def test_a_finished_run_trains_no_further(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values(monkeypatch, [])
    before = (whole / "metrics.jsonl").read_bytes()
    for options in (EVERY, replace(EVERY, extend=True)):
        train(recipe(*SETS), whole, options=options)
        assert (whole / "metrics.jsonl").read_bytes() == before


@pytest.mark.slow
def test_a_finished_run_trains_on_with_more_patience(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values(monkeypatch, FOUND)
    out = tmp_path / "out"
    subprocess.run(["cp", "-r", str(whole), str(out)], check=True)
    train(recipe(*SETS), out, options=replace(EVERY, patience=3))
    assert json.loads((out / "best" / "best.json").read_text())["step"] == 10
    assert rows(out)[-1]["step"] == 14
    (run,), _ = Runs([out]).update()
    assert run.state()[0] == "finished"


@pytest.mark.slow
@pytest.mark.parametrize("step", [6, 3, 8])
def test_a_cut_run_with_three_sets_ends_bit_identical(
    step: int, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values(monkeypatch, FOUND)
    cut_at(monkeypatch, step, recipe(*SETS), tmp_path, options=EVERY)
    train(recipe(*SETS), tmp_path, options=EVERY)
    same_best(tmp_path, whole)


def same_best(out: Path, whole: Path) -> None:
    assert_same(out, whole)
    assert same(weights(out / "best"), weights(whole / "best"))
    for name in (*best_module.MODEL[:2], best_module.FILE):
        assert (out / "best" / name).read_bytes() == (whole / "best" / name).read_bytes()


@pytest.mark.parametrize("at", [2, *(pytest.param(at, marks=pytest.mark.slow) for at in (0, 3))])
def test_a_run_cut_while_it_keeps_the_best(
    at: int, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the copy, after its weights, and after `best.json`."""
    values(monkeypatch, FOUND)
    copies: list[str] = []
    real, written = best_module.atomic, best_module.write_json

    def cut(name: str) -> None:
        copies.append(name)
        if len(copies) == 4 + at + 1:  # of the second best
            raise PowerCut

    def atomic(path: Path) -> Any:
        cut(path.name)
        return real(path)

    with monkeypatch.context() as patch:
        patch.setattr(best_module, "atomic", atomic)
        patch.setattr(best_module, "write_json", lambda path, value: (cut(path.name), written(path, value)))
        with pytest.raises(PowerCut):
            train(recipe(*SETS), tmp_path, options=EVERY)
    train(recipe(*SETS), tmp_path, options=EVERY)
    same_best(tmp_path, whole)


@pytest.mark.slow
def test_a_damaged_state_behind_the_best(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run goes back before its best step, which it reaches again."""
    values(monkeypatch, FOUND)
    cut_at(monkeypatch, 5, recipe(*SETS), tmp_path, options=replace(EVERY, keep_states=4))
    (tmp_path / "state" / "step-000000004.json").write_text("{}")
    train(recipe(*SETS), tmp_path, options=EVERY)
    same_best(tmp_path, whole)


@pytest.mark.slow
def test_a_disk_that_is_full_ends_the_run_and_keeps_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values(monkeypatch, FOUND)

    def full(path: Path, value: Any) -> None:
        raise best_module.SaveError(f"cannot write {path}: No space left on device. What was there before is kept.")

    monkeypatch.setattr(best_module, "write_json", full)
    with pytest.raises(ValueError, match=r"best\.json: No space left on device"):
        train(recipe(*SETS), tmp_path, options=EVERY)


def best(tmp_path: Path, way: int = 1, patience: int = 2) -> Best:
    return Best(tmp_path, "m", way, patience)


def taken(made: Best, *values: float) -> list[bool]:
    return [made.take({"val/m": value}, step) for step, value in enumerate(values, 1)]


def test_what_is_better(tmp_path: Path) -> None:
    """Equal values and NaN are not; the counter starts again at each best."""
    one = best(tmp_path)
    assert taken(one, 0.25, 0.25, 0.5, math.nan) == [True, False, True, False]
    assert (one.step, one.value, one.stale, one.stalled) == (3, 0.5, 1, False)
    assert not one.take({"val/m": 0.5}, 5)
    assert one.stalled
    assert str(one) == f"2 validations without a better m (best: 0.5 after step 3, in {tmp_path / 'best'})"
    assert taken(best(tmp_path, way=-1), 0.5, 0.25, 0.75) == [True, True, False]
    never = best(tmp_path)
    assert taken(never, math.nan, math.nan) == [False, False]
    assert never.stalled
    with pytest.raises(ValueError, match="the validation has only val/x"):
        best(tmp_path).take({"val/x": 1.0}, 1)
    assert not Best(tmp_path, "", 0, 0).take({}, 1)


def test_best_of_another_metric_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "best").mkdir()
    (tmp_path / "metrics.jsonl").write_text('{"step": 2, "val/m": 0.5}\n{"step": 4, "val/m": 0.25}\n')
    for text in ('{"metric": "val/n", "step": 2, "value": 0.9}', "[1]", "{", '{"metric": "val/m", "step": "2"}'):
        (tmp_path / "best" / "best.json").write_text(text)
        one = best(tmp_path)
        assert one.resume(4)  # the only validation whose model is there
        assert (one.step, one.value, one.stale) == (4, 0.25, 0)
    (tmp_path / "best" / "best.json").write_text('{"metric": "val/m", "step": 2, "value": 0.5}')
    one = best(tmp_path)
    assert not one.resume(4)
    assert (one.step, one.value, one.stale) == (2, 0.5, 1)


@pytest.mark.parametrize(
    ("metric", "way"),
    [
        *((name, 1) for name in ("image_retrieval_recall@5", "acc1", "accuracy/question/colour", "cider", "bleu_4")),
        *((name, 1) for name in ("mean_average_precision", "image_retrieval_true_map", "root_hit", "group_score")),
        *((name, -1) for name in ("loss", "reconstruction_l1_right@random", "mean_rank", "calibration_error")),
        *((name, 0) for name in ("skipped", "questions", "dimensions", "singular_value@1", "", "mapped")),
    ],
)
def test_which_way_is_better(metric: str, way: int) -> None:
    assert direction(metric) == way


def test_names_of_sets() -> None:
    def named(*sources: str) -> list[str]:
        return set_names([("retrieval", src) for src in sources], "--val")

    assert named("flickr/dev") == ["dev"]
    assert named("flickr/dev", "a/coco/dev", "cifar.tar") == ["flickr/dev", "coco/dev", "cifar"]
    assert named("scenes:test?n=4", "scenes:test?n=8") == ["scenes:test?n=4", "scenes:test?n=8"]
    assert named("scenes:test?n=4", "scenes:val", "scenes:test?n=8")[1] == "scenes:val"
    assert named("x/dev/", "dev.csv?image=photo") == ["x/dev", "dev"]
    pairs = [("retrieval", "a/dev"), ("caption", "a/dev"), ("zeroshot", "b/dev")]
    assert set_names(pairs, "--val") == ["retrieval=a/dev", "caption=a/dev", "b/dev"]
    with pytest.raises(ValueError, match=r"--val names a/dev twice for the task caption: name it once\."):
        set_names([("caption", "a/dev"), ("caption", "a/dev")], "--val")


def test_the_task_of_a_set(tmp_path: Path) -> None:
    (tmp_path / "classes").mkdir()
    from tars import photo

    for n in range(3):
        (tmp_path / "classes" / f"{n}.png").write_bytes(photo(n))
        (tmp_path / "classes" / f"{n}.cls").write_text(str(n % 2))
    (tmp_path / "classes" / "classnames.txt").write_text("cat\ndog\n")
    words = (f"{tmp_path}/classes", COLOURS, f"zeroshot={COLOURS}")
    assert [one.task for one in open_val(recipe(*words))] == ["zeroshot", "retrieval", "zeroshot"]
    assert [one.task for one in open_val(recipe("scenes?task=vqa", method="vqa"))] == ["vqa"]
    (tmp_path / "a=b").mkdir()
    (tmp_path / "a=b" / "0.png").write_bytes(photo(0))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        assert open_val(recipe("a=b"))[0].source.name == "a=b"


def test_credentials_of_data_are_not_kept() -> None:
    assert parse({"val": ["zeroshot=https://u:planted@host/0.tar"]}, DataConfig).val == ("zeroshot=https://host/0.tar",)


REFUSED: list[tuple[list[str], str]] = [
    (["--val", "zeroshoot=scenes"], "--val zeroshoot=scenes: unknown task 'zeroshoot'"),
    (["--val", "zeroshot="], "--val zeroshot= names no data"),
    (["--val", "probe=scenes?task=colour"], "probe needs a training set"),
    (["--val", "caption=scenes:test?n=8"], "has no text decoder"),
    (["--val", "scenes:test?n=8", "zeroshot=scenes:test?n=9"], "--val scenes:test?n=9, zeroshot: scenes:test?n=9 has"),
    (["--val", "scenes:test?n=8", "scenes:test?n=8"], "--val names scenes:test?n=8 twice for the task retrieval"),
    (["--val", "scenes:test?n=8", "--val", "scenes:test?n=9"], "--val is given twice"),
    (["--keep-best", "acc1"], "--keep-best acc1 needs data to evaluate on: add --val SRC"),
    (["--val", "scenes:test?n=8", "--keep-best", "recall@1"], "--keep-best recall@1 is no metric of this validation: "),
    (["--val", "scenes:test?n=8", "--keep-best", "skipped"], "--keep-best skipped has no better direction: "),
    (["--val", "scenes:test?n=8", "--patience", "2"], "--patience counts validations without a better metric: name"),
    (["--val", "scenes:test?n=8", "--patience", "2", "--keep-best", "x"], "there is only one, at the end: add"),
    (["--eval-every", "2"], "--eval-every needs data to evaluate on: add --val SRC"),
    (["--eval-epochs", "0.5"], "--eval-epochs needs data to evaluate on: add --val SRC"),
    (["--eval-every", "2", "--eval-epochs", "1"], "--eval-every and --eval-epochs both say how often to validate"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "message"), REFUSED, ids=[" ".join(words)[:40] for words, _ in REFUSED])
def test_what_is_refused_before_the_first_step(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from kiloword.cli.main import main

    small = ["--data", "scenes?n=32", "--size", "debug", "--batch", "8", "--vocab", "300", "--steps", "4"]
    for more in (["--dry-run"], []):
        with pytest.raises(SystemExit) as ended:
            main(["train", "siglip", *small, "--out", str(tmp_path / "out"), *words, *more])
        assert ended.value.code == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out" / "model" / "model.safetensors").exists()


def test_a_close_metric_is_suggested() -> None:
    names = {"val/acc1": "acc1", "val/acc5": "acc5", "val/skipped": "skipped"}
    with pytest.raises(ValueError, match=r"expected one of acc1, acc5\. Did you mean acc1\?"):
        best_module.check_metric("ac1", names)
    assert best_module.check_metric("val/acc1", names) == best_module.check_metric("acc1", names) == 1


def test_states_and_runs_are_models(whole: Path) -> None:
    """Figures are those that the run logged; of averaged weights."""
    logged = {row["step"]: row["val/scenes:val/image_retrieval_true_map"] for row in rows(whole) if METRIC in row}
    paths = {
        8: ["", "model", "state", "state/step-000000008", "state/step-000000008.json"],
        6: ["state/step-000000006"],
    }
    for step, places in paths.items():
        for place in places:
            found = evaluation.evaluate(load(whole / place), "retrieval", SETS[0])
            assert found["image_retrieval_true_map"] == logged[step], place
    found = evaluation.evaluate(load(whole / "best"), "retrieval", SETS[0])
    assert found["image_retrieval_true_map"] == logged[4]
    with pytest.raises(ValueError, match=r"step-000000007 is no state: .* has step-000000008, step-000000006"):
        load(whole / "state" / "step-000000007")
    with pytest.raises(ValueError, match=r"nowhere/state is no state"):
        load("nowhere/state")


@pytest.mark.slow
def test_a_damaged_state_is_no_model(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    subprocess.run(["cp", "-r", str(whole), str(out)], check=True)
    (shard,) = (out / "state" / "step-000000006").iterdir()
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    with pytest.raises(ValueError, match=r"step-000000006 is damaged .*checksum"):
        load(out / "state" / "step-000000006")


def test_embed_knows_the_files_of_a_run(whole: Path) -> None:
    from kiloword.stores.teachers import open_teacher

    prints = {name: open_teacher(str(whole / name)).fingerprint for name in ("", "model", "state", "best")}
    assert prints[""] == prints["model"]
    assert len(set(prints.values())) == 3


@pytest.mark.slow
def test_two_ranks_validate_keep_and_stop_as_one(tmp_path: Path) -> None:
    """Captions are scored by the first rank alone; all ranks know the figures, and stop together."""
    run = "train coca --data scenes?n=32 --size debug --batch 8 --steps 8 --vocab 300 --precision fp64 --eval-every 1"
    run += " --val caption=scenes:test?n=6 retrieval=scenes:test?n=6 --patience 2"
    words = [*run.split(), "--keep-best", "caption=scenes:test/caption_statements_true"]
    two = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for name, launch in (("one", list[str]()), ("two", two)):
        command = [sys.executable, *launch, "-m", "kiloword", *words, "--out", str(tmp_path / name)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    one, two_ranks = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("one", "two"))
    assert one[-1]["stopped_early"] == two_ranks[-1]["stopped_early"] == 1
    assert one[-1]["step"] == two_ranks[-1]["step"] < 8
    figures = [{k: v for k, v in found[-1].items() if k.startswith("val/")} for found in (one, two_ranks)]
    assert figures[0] == pytest.approx(figures[1], abs=1e-6)
    kept = [json.loads((tmp_path / name / "best" / "best.json").read_text()) for name in ("one", "two")]
    assert kept[0] == kept[1]
