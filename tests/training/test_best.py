"""Several validation sets, the best model by a metric, runs that stop early; and resuming all of that exactly."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from commands import refused, torchrun
from kiloword import evaluation
from kiloword.api import load
from kiloword.cli.main import main
from kiloword.config.options import RunOptions
from kiloword.config.recipes import Recipe
from kiloword.files import SaveError
from kiloword.methods.defaults import default_recipe
from kiloword.runs.run import Run
from kiloword.stores.teachers import open_teacher
from kiloword.training.loop import train
from kiloword.training.validation import Best, direction, open_val, set_names
from runs import PowerCut, assert_equal, assert_same, cut_at, rows
from sources import files_of
from tars import photo

COLOURS = "scenes:test?n=16&task=colour"
SETS = ("scenes:val?n=12", f"zeroshot={COLOURS}", f"spectrum={COLOURS}")
METRIC = "val/scenes:val/image_retrieval_recall@5"  # is best after step 6 of 14
EVERY = RunOptions(log_every=1, save_every=5, eval_every=2, quiet=True, keep_best=METRIC, patience=2)


def recipe(*val: str, **more: Any) -> Recipe:
    base = default_recipe("siglip", "debug", ("scenes?n=64&captions=3",))
    optim = replace(base.optim, ema=0.9, lr=3e-3)
    base = replace(base, data=replace(base.data, tokenizer_vocab=300, val=val), optim=optim)
    return replace(base, **{"batch": 16, "steps": 14, "seed": 5, **more})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that stops early, which nothing interrupts."""
    out = tmp_path_factory.mktemp("whole")
    train(recipe(*SETS), out, options=EVERY)
    return out


def kept(out: Path) -> Any:
    return json.loads((out / "best" / "best.json").read_text())


def same_weights(folder: Path, other: Path) -> None:
    assert_equal(*(load_file(of / "model.safetensors") for of in (folder, other)))


def test_the_best_model_is_kept_and_the_run_ends_early(whole: Path, tmp_path: Path) -> None:
    logged = [row for row in rows(whole) if METRIC in row]
    values = {row["step"]: row[METRIC] for row in logged}
    best = max(values, key=lambda step: (values[step], -step))  # the first of equal ones
    assert kept(whole) == {"metric": METRIC, "step": best, "value": values[best]}
    assert list(values) == list(range(2, best + 5, 2))  # two more, none of them better
    assert [row.get("stopped_early") for row in logged] == [None] * (len(logged) - 1) + [1]
    for name, metric in (("scenes:val", "rsum"), ("zeroshot=scenes:test", "acc1"), ("spectrum=scenes:test", "skipped")):
        assert f"val/{name}/{metric}" in logged[0]
    run = Run(whole)
    assert run.state == "finished"
    assert run.best == (METRIC, values[best], best)
    assert METRIC in run.validation
    assert json.loads((whole / "best" / "config.json").read_text())["steps"] == best
    without = replace(EVERY, keep_best="", patience=0, eval_every=0, save_every=best)
    cut_at(best + 1, recipe(), tmp_path, without)
    same_weights(whole / "best", tmp_path / "model")  # validation does not change the training either


def test_a_finished_run_trains_no_further(whole: Path, tmp_path: Path) -> None:
    """Also where its last step is the best."""
    train(recipe(*SETS, steps=6), tmp_path, options=EVERY)
    for out, steps in ((whole, 14), (tmp_path, 6)):
        before = files_of(out)
        for options in (EVERY, replace(EVERY, extend=True)):
            train(recipe(*SETS, steps=steps), out, options=options)
            assert files_of(out) == before


@pytest.mark.slow
def test_a_finished_run_trains_on_with_more_patience(whole: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(whole, tmp_path / "out"))
    train(recipe(*SETS), out, options=replace(EVERY, patience=9))
    assert rows(out)[-1]["step"] == 14
    assert Run(out).state == "finished"


@pytest.mark.parametrize("step", [7, *(pytest.param(at, marks=pytest.mark.slow) for at in (3, 8, 10))])
def test_a_cut_run_with_three_sets_ends_bit_identical(step: int, whole: Path, tmp_path: Path) -> None:
    cut_at(step, recipe(*SETS), tmp_path, EVERY)
    train(recipe(*SETS), tmp_path, options=EVERY)
    same_best(tmp_path, whole)


def same_best(out: Path, whole: Path) -> None:
    assert_same(out, whole)
    same_weights(out / "best", whole / "best")
    for name in ("tokenizer.json", "config.json", "best.json"):
        assert (out / "best" / name).read_bytes() == (whole / "best" / name).read_bytes()


@pytest.mark.parametrize("at", [6, *(pytest.param(at, marks=pytest.mark.slow) for at in (5, 8))])
def test_a_run_cut_while_it_keeps_the_best(
    at: int, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, between and behind the four files of the second best."""
    copies, real = list[Path](), Path.replace

    def replaced(self: Path, to: Path) -> Path:
        if Path(to).parent.name == "best":
            copies.append(to)
            if len(copies) == at:
                raise PowerCut
        return real(self, to)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", replaced)
        with pytest.raises(PowerCut):
            train(recipe(*SETS), tmp_path, options=EVERY)
    train(recipe(*SETS), tmp_path, options=EVERY)
    same_best(tmp_path, whole)


def test_a_damaged_state_behind_the_best(whole: Path, tmp_path: Path) -> None:
    """The run goes back to an earlier best step, keeps the model of that one, and reaches the best again."""
    cut_at(7, recipe(*SETS), tmp_path, replace(EVERY, keep_states=4))
    for step in (5, 6):
        (tmp_path / "state" / f"step-{step:09d}.json").write_text("{}")
    cut_at(1, recipe(*SETS), tmp_path, EVERY)
    assert kept(tmp_path)["step"] == json.loads((tmp_path / "best" / "config.json").read_text())["steps"] == 4
    train(recipe(*SETS), tmp_path, options=EVERY)
    same_best(tmp_path, whole)


def taken(made: Best, *values: float) -> list[bool]:
    return [made.take({"val/l1_m": value, "val/acc1": value}, step) for step, value in enumerate(values, 1)]


def test_what_is_better(tmp_path: Path) -> None:
    """Equal values and NaN are not; the counter starts again at each best."""
    one = Best(tmp_path, "acc1", 2)
    assert taken(one, 0.25, 0.25, 0.5, math.nan) == [True, False, True, False]
    assert (one.step, one.value, one.stale, one.stalled) == (3, 0.5, 1, False)
    assert not one.take({"val/acc1": 0.5}, 5)
    assert (one.stalled, "0.5 after step 3" in str(one)) == (True, True)
    with pytest.raises(SaveError):  # there is no model
        one.keep()
    assert taken(Best(tmp_path, "val/l1_m", 2), 0.5, 0.25, 0.75) == [True, True, False]
    never = Best(tmp_path, "acc1", 2)
    assert taken(never, math.nan, math.nan) == [False, False]
    assert (never.stalled, "best: none" in str(never)) == (True, True)
    other = Best(tmp_path, "l1_m", 2)
    other.resume(one.state, 5)  # of another metric
    assert (other.step, other.stale) == (None, 0)
    for keep in ("val/acc1", "val/val/acc1"):  # of a set named val
        assert Best(tmp_path, keep, 0, ("val/val/", "val/test/")).metric == "val/val/acc1"
    with pytest.raises(ValueError, match=r"expected one of acc1, acc5"):
        Best(tmp_path, "acc2", 0).take({"val/acc1": 0.0, "val/acc5": 0.0, "val/skipped": 0.0}, 1)


@pytest.mark.parametrize(
    ("metric", "way"),
    [
        *((name, 1) for name in ("image_retrieval_recall@5", "acc1", "accuracy/question/colour", "cider", "bleu_4")),
        *((name, 1) for name in ("mean_average_precision", "image_retrieval_true_map", "root_hit", "group_score")),
        *((name, -1) for name in ("reconstruction_l1_right@random", "l1_none@block")),
        *((name, 0) for name in ("skipped", "questions", "dimensions", "singular_value@1", "", "mapped")),
    ],
)
def test_which_way_is_better(metric: str, way: int) -> None:
    assert direction(metric) == way


@pytest.mark.parametrize(
    ("sets", "names"),
    [
        ("a=flickr/dev", "dev"),
        ("a=flickr/dev a=a/coco/dev a=cifar.tar", "flickr/dev coco/dev cifar"),
        ("a=scenes:test?n=4 a=scenes:test?n=8", "scenes:test?n=4 scenes:test?n=8"),
        ("retrieval=a/dev caption=a/dev zeroshot=b/dev", "retrieval=a/dev caption=a/dev b/dev"),
    ],
)
def test_names_of_sets(sets: str, names: str) -> None:
    pairs = [(task, src) for task, _, src in (word.partition("=") for word in sets.split())]
    assert set_names(pairs, "--val") == names.split()


def test_the_task_of_a_set(tmp_path: Path) -> None:
    (tmp_path / "classes").mkdir()
    for n in range(3):
        (tmp_path / "classes" / f"{n}.png").write_bytes(photo(n))
        (tmp_path / "classes" / f"{n}.cls").write_text(str(n % 2))
    (tmp_path / "classes" / "classnames.txt").write_text("cat\ndog\n")
    words = (f"{tmp_path}/classes", COLOURS, f"zeroshot={COLOURS}")
    assert [one.task for one in open_val(recipe(*words))] == ["zeroshot", "retrieval", "zeroshot"]
    assert [one.task for one in open_val(recipe("scenes?task=vqa", method="vqa"))] == ["vqa"]


@pytest.mark.parametrize(
    ("words", "word"),
    [
        ("--val zeroshoot=scenes", "zeroshoot"),
        ("--val zeroshot=", "zeroshot="),
        ("--val probe=scenes?task=colour", "probe"),
        ("--val caption=scenes:test?n=8", "text decoder"),
        ("--val scenes:test?n=8 zeroshot=scenes:test?n=9", "class names"),
        ("--val scenes:test?n=8 scenes:test?n=8", "twice"),
        ("--keep-best acc1", "--val"),
        ("--val scenes:test?n=8 --keep-best recall@1", "text_retrieval_recall@1"),
        ("--val scenes:test?n=8 --keep-best skipped", "mean_recall@1"),
        ("--val scenes:test?n=8 --patience 2", "--keep-best"),
        ("--val scenes:test?n=8 scenes:val?n=8 --keep-best acc1", "NAME/METRIC"),
        ("--val scenes:test?n=8 --patience 2 --keep-best acc1", "--eval-every"),
        ("--eval-every 2", "--val"),
        ("--log-every 0", "--log-every is 0"),
        ("--eval-epochs 0.5", "--val"),
        ("--val scenes:test?n=8 --eval-every 2 --eval-epochs 1", "--eval-epochs"),
    ],
)
def test_what_is_refused_before_the_first_step(
    words: str, word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = f"train siglip --data scenes?n=32 --size debug --batch 8 --vocab 300 --steps 4 --out {tmp_path / 'out'}"
    assert word in refused(capsys, *run.split(), *words.split())
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


def test_a_few_bad_rows_of_the_validation_data_are_no_reason(tmp_path: Path) -> None:
    images = tmp_path / "images"
    images.mkdir()
    for n in range(40):
        (images / f"{n}.png").write_bytes(photo(n) if n % 4 else b"no image")
        (images / f"{n}.txt").write_text(f"thing {n}")
    train(recipe(str(images), steps=1), tmp_path / "run", options=replace(EVERY, keep_best="", patience=0))
    assert rows(tmp_path / "run")[-1]["val/skipped"] == 10
    for path in images.glob("*.png"):
        path.write_bytes(b"no image")
    with pytest.raises(ValueError, match="images, retrieval: "):
        train(recipe(str(images), steps=1), tmp_path / "other", options=EVERY)


def test_states_and_runs_are_models(whole: Path, tmp_path: Path) -> None:
    """Figures are those that the run logged; of averaged weights."""
    logged = {row["step"]: row["val/scenes:val/image_retrieval_true_map"] for row in rows(whole) if METRIC in row}
    last, best = max(logged), kept(whole)["step"]
    places = dict.fromkeys(["", "model", "state", f"state/step-{last:09d}", f"state/step-{last:09d}.json"], last)
    earlier = f"state/step-{last - 2:09d}"
    for place, step in {**places, earlier: last - 2, "best": best}.items():
        found = evaluation.evaluate(load(whole / place), "retrieval", SETS[0])
        assert found["image_retrieval_true_map"] == logged[step], place
    main(["average", str(whole / earlier), str(whole / "best"), "--out", str(tmp_path / "average")])
    assert all(f" ({n} steps on " in (tmp_path / "average" / "README.md").read_text() for n in (last - 2, best))
    for nowhere in (whole / "state" / "step-000000007", Path("nowhere/state")):
        with pytest.raises(ValueError, match="is no state"):
            load(nowhere)


def test_embed_knows_the_files_of_a_run(whole: Path) -> None:
    prints = {name: open_teacher(str(whole / name)).fingerprint for name in ("", "model", "state", "best")}
    assert prints[""] == prints["model"]
    assert len(set(prints.values())) == 3


@pytest.mark.slow
def test_two_ranks_validate_keep_and_stop_as_one(tmp_path: Path) -> None:
    """Captions are scored by the first rank alone; all ranks know the figures, and stop together."""
    run = "train coca --data scenes?n=32 --size debug --batch 8 --steps 8 --vocab 300 --precision fp64 --eval-every 1"
    run += " --val caption=scenes:test?n=6 retrieval=scenes:test?n=6 --patience 2"
    words = [*run.split(), "--keep-best", "caption=scenes:test/caption_statements_true"]
    outs = {ranks: tmp_path / str(ranks) for ranks in (1, 2)}
    for ranks, out in outs.items():
        done = torchrun(ranks, *words, "--out", out)
        assert done.returncode == 0, done.stderr
    one, two = (rows(out)[-1] for out in outs.values())
    assert one["stopped_early"] == two["stopped_early"] == 1
    assert one["step"] == two["step"] < 8
    figures = [{k: v for k, v in last.items() if k.startswith("val/")} for last in (one, two)]
    assert figures[0] == pytest.approx(figures[1], abs=1e-6)
    assert kept(outs[1]) == kept(outs[2])
