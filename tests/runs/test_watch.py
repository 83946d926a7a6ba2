"""Watching runs: what is read while it grows, what a frame shows, what a wrong folder is told."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from kiloword.cli.main import main
from kiloword.runs import command
from kiloword.runs.command import Runs
from kiloword.runs.page import View, page
from kiloword.runs.plot import Series, _labels, _range, plot, short
from kiloword.runs.rows import NAMES, RowReader, smoothed, thinned
from kiloword.runs.runs import Watched, find
from kiloword.training.log import read_metrics
from runs import row, write


def seen(*folders: Path) -> list[Watched]:
    return Runs(folders).update()[0]


def frame(*folders: Path, **view: Any) -> str:
    return page(seen(*folders), View(**{"width": 100, **view})).plain


def test_reader_takes_what_is_new_and_waits_for_half_a_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    read = RowReader(path)
    assert list(read()) == []
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert [r["step"] for r in read()] == [1, 2]
    assert list(read()) == []
    with path.open("a") as f:
        f.write('ep": 3}\nnonsense\n[1]\n{"step": 4}\n')
    assert [r["step"] for r in read()] == [3, 4]
    assert read.times == 1


@pytest.mark.parametrize("kept", [0, 1, 3])
@pytest.mark.parametrize("how", ["renamed", "in place"])
def test_reader_begins_again_when_a_resumed_run_rewrites(tmp_path: Path, kept: int, how: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": n, "loss": 0.5}) + "\n" for n in range(1, 6)))
    read = RowReader(path)
    assert len(list(read())) == 5
    again = [{"step": n, "loss": 0.5} for n in range(1, kept + 1)]
    again += [{"step": n, "loss": 0.25} for n in range(kept + 1, 9)]
    new = path if how == "in place" else tmp_path / "new"
    new.write_text("".join(json.dumps(r) + "\n" for r in again))
    new.replace(path)
    assert list(read()) == again
    assert read.times == 2


def test_a_run_is_followed_from_before_its_first_row_over_a_restart(tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    runs = Runs([out])
    (run,), _ = runs.update()
    assert run.state() == ("waiting", "no row yet")
    write(out, [row(n) for n in range(1, 6)])
    assert runs.update()[1]
    assert (run.step, run.config.steps, run.state()[0]) == (5, 100, "running")
    assert run.left == pytest.approx(95 * 10 / 100)
    assert not runs.update()[1]
    write(out, [row(n) for n in range(1, 4)] + [row(4, restarts=1)])
    assert runs.update()[1]
    assert run.columns.of("step")[0].tolist() == [1, 2, 3, 4]
    assert run.columns.last["restarts"] == 1
    write(out, [row(n) for n in range(1, 9)], steps=8)
    runs.update()
    assert run.state()[0] == "finished"


def test_silent_and_stopped_runs(tmp_path: Path) -> None:
    out = write(tmp_path / "run", [row(n, time=1000.0 + n) for n in range(1, 6)])
    (run,) = seen(out)
    now = (out / "metrics.jsonl").stat().st_mtime
    assert run.state(now + 50)[0] == "running"
    assert run.state(now - 50)[0] == "running"  # clocks differ
    assert run.state(now + 720) == ("silent", "for 12 min")
    (out / "state").mkdir()
    (out / "state" / "step-000000004.json").touch()
    assert run.state(now + 720) == ("silent", "for 12 min; the last state is of step 4")
    (out / "state" / "step-000000005.json").touch()
    assert run.state(now + 720) == ("stopped", "at step 5, 12 min ago; the same command goes on")
    slow = write(tmp_path / "slow", [row(n, time=300.0 * n) for n in range(1, 6)])
    (run,) = seen(slow)
    assert run.state(now + 720)[0] == "running"  # a row came every five minutes


def test_a_pause_between_two_processes_is_not_how_long_a_row_takes(tmp_path: Path) -> None:
    hours = 8 * 3600.0
    rows = [row(n, time=5.0 * n) for n in range(1, 6)] + [row(n, time=hours + 5 * n, restarts=1) for n in range(6, 16)]
    out = write(tmp_path / "run", rows)
    (run,) = seen(out)
    now = (out / "metrics.jsonl").stat().st_mtime
    assert run.state(now + 50)[0] == "running"
    assert run.state(now + 100)[0] == "silent"


def test_a_run_is_finished_when_its_last_state_and_validation_are_there(tmp_path: Path) -> None:
    rows, of = [row(n) for n in range(1, 9)], {"steps": 8, "data": {"val": ["scenes:test"]}}
    out = write(tmp_path / "run", rows, **of)
    now = (out / "metrics.jsonl").stat().st_mtime
    (out / "state" / "step-000000008").mkdir(parents=True)
    (run,) = seen(out)
    assert run.state(now) == ("running", "")
    assert run.state(now + 720)[1].startswith("for 12 min: it still saves, or was stopped before")
    (out / "state" / "step-000000008.json").touch()
    assert run.state(now + 720)[1].startswith("for 12 min: it still validates, or was stopped before")
    write(out, [*rows, {"step": 8, "val/recall@1": 0.5}], **of)
    (run,) = seen(out)
    assert run.state(now + 720) == ("finished", "")


def test_a_frame_says_where_the_run_is(tmp_path: Path) -> None:
    rows = [
        row(n, skipped=3, truncated=12, skipped_steps=2 * (n > 40), restarts=1, memory=2500.0, lr=5e-4)
        for n in range(1, 51)
    ]
    rows.append({"step": 50, "val/text_retrieval_recall@1": 0.5, "val/text_retrieval_recall@5": 0.9})
    said = frame(write(tmp_path / "run", rows))
    for words in (
        "siglip b32 running step 50/100 (50%) ETA 0:05",
        "loss 0.20",
        "lr 5.0e-4",
        "100 pairs/s",
        "data wait 1%",
        "memory 2.5 GB",
        "3 bad samples",
        "12 captions cut",
        "2 steps skipped",
        "1 restarts",
        "! skipped steps since step 41",
        "val/text_retrieval_recall@1",
    ):
        assert words in " ".join(said.split()), words
    assert "recall@5" not in said
    assert "pair " not in said  # is the loss
    assert "recall@5" in frame(tmp_path / "run", curves=("val/",))
    assert "no metric begins with nothing" in frame(tmp_path / "run", curves=("nothing",))


@pytest.mark.parametrize("width", [30, 40, 80, 99, 100, 237])
@pytest.mark.parametrize("height", [None, 8, 24, 60])
@pytest.mark.parametrize("dots", ["braille", "marks"])
def test_frames_fit_their_window(tmp_path: Path, width: int, height: int | None, dots: str) -> None:
    one = write(tmp_path / "one", [row(n, data_wait=0.5, scale=n, bias=-n, lr=1.0) for n in range(1, 41)])
    two = write(tmp_path / "a name that is longer than some windows are wide", [row(n) for n in range(1, 30)])
    for folders in ((one,), (one, two)):
        lines = frame(*folders, width=width, height=height, dots=dots).split("\n")
        assert max(map(len, lines)) <= width
        assert height is None or len(lines) <= height
        assert any("loss" in line for line in lines)


def test_curves_are_where_the_numbers_are() -> None:
    steps = np.arange(0.0, 11.0)
    drawn = plot("t", [Series(steps, steps, 0)], (0, 10), 8 + 11, 11, "marks").plain.split("\n")
    assert drawn[0] == "t"
    assert [line[8:].rstrip() for line in drawn[1:12]] == [" " * (10 - n) + "*" for n in range(11)]
    assert (drawn[1][:8], drawn[11][:8]) == ("   10.0|", "      0|")
    assert drawn[12].split() == ["0", "10"]
    both = plot("t", [Series(steps, steps, 0), Series(steps, 10 - steps, 1)], (0, 10), 19, 11, "marks").plain
    assert both.count("*") == 10
    assert both.count("+") == 11
    dots = plot("t", [Series(steps[:8], steps[:8], 0)], (0, 7), 8 + 4, 2, "braille").plain.split("\n")
    assert (dots[1][8:], dots[2][8:].rstrip()) == ("  \u2860\u280a", "\u2860\u280a")


def test_one_spike_does_not_hide_the_rest() -> None:
    values = np.linspace(1, 2, 100)
    values[50] = 1e6
    drawn = plot("t", [Series(np.arange(100.0), values, 0)], (0, 99), 108, 8, "marks").plain
    assert ">" in drawn.split("\n")[1][:8]
    rows = [n for n, line in enumerate(drawn.split("\n")[1:9]) if "*" in line[8:]]
    assert len(rows) == 8


def test_thinned_and_smoothed_against_their_definitions() -> None:
    steps, values = np.arange(1000.0), np.random.default_rng(0).normal(size=1000)
    bins, means = thinned(steps, values, 0, 999, 10)
    for b, mean in zip(bins, means, strict=True):
        assert mean == pytest.approx(values[np.round(steps / 999 * 9) == b].mean())
    weights = 0.9 ** np.arange(1000)
    expected = [(values[n::-1] * weights[: n + 1]).sum() / weights[: n + 1].sum() for n in range(1000)]
    assert smoothed(values, 0.9) == pytest.approx(np.array(expected))
    assert smoothed(values, 0) is values


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *(
            (0, "0"),
            (1.5, "1.50"),
            (-12.34, "-12.3"),
            (1234.4, "1234"),
            (0.00123, "1.2e-3"),
            (98765, "98.8k"),
            (3e9, "3G"),
        ),
        *((0.01, "0.01"), (0.009999, "1.0e-2"), (9999.4, "9999"), (1e4, "10k"), (999_600, "1000k"), (1e6, "1M")),
        *((2.5e12, "2.5T"), (9.9996e14, "1000T"), (-4e-12, "-4.0e-12"), (10.0, "10.0"), (100.0, "100")),
    ],
)
def test_short_numbers(value: float, text: str) -> None:
    assert short(value) == text


def test_a_folder_of_runs_and_runs_that_come_later(tmp_path: Path) -> None:
    write(tmp_path / "b", [row(1), row(2)])
    write(tmp_path / "a", [row(1)])
    (tmp_path / "notes").mkdir()
    runs = Runs([tmp_path])
    assert [run.name for run in runs.update()[0]] == ["a", "b"]
    write(tmp_path / "c", [row(1)])
    found, new = runs.update()
    assert new
    assert [run.name for run in found] == ["a", "b", "c"]
    said = page(found, View(width=100)).plain
    assert [line[:4] for line in said.split("\n") if line[1:2] == " " and line[0] in "*+o"] == ["* a ", "+ b ", "o c "]


def refused(folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(["watch", str(folder), *words])
    assert end.value.code == 2
    return capsys.readouterr().err


def test_what_is_no_run_gets_a_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = write(tmp_path / "out", [row(1)])
    (out / "model").mkdir()
    (out / "model" / "model.safetensors").touch()
    assert f"is a part of a run: expected its --out, {out}." in refused(out / "model", capsys)
    assert f"`kiloword train`, {out}." in refused(out / "metrics.jsonl", capsys)
    assert "does not exist" in refused(tmp_path / "nowhere", capsys)
    other = tmp_path / "other"
    (other / "photos").mkdir(parents=True)
    assert "is no run and holds none" in refused(other, capsys)
    (other / "model.safetensors").touch()
    assert "is a model folder" in refused(other, capsys)
    assert "--every is 0" in refused(out, capsys, "--every", "0")
    assert "--smooth is 1.0" in refused(out, capsys, "--smooth", "1")
    assert find([out]) == {out: str(out)}


def test_damaged_config_and_rows_of_another_version_are_shown_all_the_same(tmp_path: Path) -> None:
    out = write(tmp_path / "run", [{"step": 1, "loss": 2.0}, {"step": 2, "loss": float("nan"), "words": "x"}])
    (out / "config.json").write_text('{"recipe": {"steps":')
    assert "loss" in frame(out)


@pytest.mark.parametrize(
    "text",
    [
        '{"step": 4, "loss": 1}\n{"step": 3, "loss": 1}\n',
        '{"step": -3, "loss": 1}\n{"step": 1e400, "loss": 1}\n{"step": true}\n',
        '{"step": 4, "loss": -1e308}\n{"step": 6, "loss": 1e308, "bias": 1e-320}\n',
        '{"step": 1, "pairs_per_s": Infinity, "time": -5e300, "memory": [1]}\n{"step": 2, "time": 1e18}\n',
        '{"step": 1, "loss": 1' + "0" * 400 + '}\n{"step": 1' + "0" * 400 + "}\n",
        "[" * 100_000 + "\n\x1b[31m\x00\n",
    ],
)
@pytest.mark.filterwarnings("error")
def test_damaged_rows_and_configs_are_skipped(tmp_path: Path, text: str) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / "metrics.jsonl").write_text(text + '{"step": 7, "loss": 1.5}\n')
    for config in ('{"recipe": [1]}', '{"recipe": {"steps": "x", "batch": [], "data": 5, "settings": 7}}', "null"):
        (out / "config.json").write_text(config)
        assert "step 7" in frame(out)


def endless(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def values(value: object) -> str:
    return json.dumps(dict.fromkeys(row(1), value) | {"step": 30}) + "\n"


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.json"])
@pytest.mark.parametrize("harm", [endless, pipe, lambda path: os.truncate(path, 1 << 26), lambda path: path.unlink()])
def test_a_strangers_files_are_read_as_far_as_they_have_an_end(
    tmp_path: Path, name: str, harm: Callable[[Path], None]
) -> None:
    out = write(tmp_path / "run", [row(n) for n in range(1, 9)])
    harm(out / name)
    assert len(frame(out)) < 5000


@pytest.mark.parametrize("value", ["\x1b[31mx", [1], None, {"a": 1}, True, 1e99, -1e99])
def test_values_that_are_no_numbers_are_skipped(tmp_path: Path, value: object) -> None:
    out = write(tmp_path / "run", [row(n) for n in range(1, 9)])
    append(out / "metrics.jsonl", values(value))
    assert "step 30" in frame(out)
    assert len(read_metrics(out / "metrics.jsonl")) == 9


def test_absurd_settings_of_a_run_are_none(tmp_path: Path) -> None:
    """Numbers that no float holds: the run is shown without them."""
    run = write(tmp_path, [row(1), row(2)], steps=10**4000, batch=10**4000)
    (found,) = seen(run)
    assert (found.config.steps, found.config.batch) == (None, 1)
    assert "step 2" in frame(run)


def test_a_run_has_a_bounded_number_of_metrics(tmp_path: Path) -> None:
    out = write(tmp_path / "run", [row(1)])
    for n in range(2, 40):
        append(out / "metrics.jsonl", json.dumps({"step": n, **{f"m{n}_{i}": 1.0 for i in range(100)}}) + "\n")
    append(
        out / "metrics.jsonl", json.dumps({"step": 40, "x" * 300: 1.0, **{f"y{i}": 1 for i in range(20_000)}}) + "\n"
    )
    append(out / "metrics.jsonl", json.dumps(row(41)) + "\n")
    (run,) = seen(out)
    assert run.step == 41
    assert NAMES - 10 <= len(run.columns.names) <= NAMES
    assert len(run.columns.of("loss")[0]) == 2


def test_a_pipe_gets_plain_text_and_the_verb_needs_no_torch(tmp_path: Path) -> None:
    out = write(tmp_path / "run", [row(n) for n in range(1, 20)])
    code = (
        "import sys; from kiloword.cli.main import main; main(sys.argv[1:]); "
        "assert not {'torch', 'tensorboard'} & set(sys.modules)"
    )
    environment = {**os.environ, "COLUMNS": "40", "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-c", code, "watch", str(out)], capture_output=True, env=environment, check=True, timeout=120
    )
    text = done.stdout.decode("ascii")
    assert "\x1b" not in text
    assert "*" in text
    assert max(map(len, text.split("\n"))) <= 40


def terminal(**more: Any) -> Console:
    size = {"width": 80, "height": 30}
    return Console(file=io.StringIO(), force_terminal=True, highlight=False, **{**size, **more})


def test_live_until_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The frame follows the file; Ctrl-C ends it and gives the terminal back."""
    monkeypatch.setenv("TERM", "xterm-256color")
    out = write(tmp_path / "run", [row(n) for n in range(1, 20)])
    moments: Iterator[Callable[[], Any]] = iter([lambda: write(out, [row(n) for n in range(1, 38)]), _interrupt])
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", lambda seconds: (waits.append(seconds), next(moments)()))
    console = terminal(color_system="256")
    command.main([out], console=console)
    assert waits == [2.0, 2.0]
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert said.index("step 19/100") < said.index("step 37/100")
    assert said.index("\x1b[?1049h") < said.index("\x1b[?1049l")
    assert "\u2800" < max(said) < "\u28ff"


def _interrupt() -> None:
    raise KeyboardInterrupt


def test_a_dumb_terminal_gets_frames_below_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    out = write(tmp_path / "run", [row(n) for n in range(1, 20)])
    moments: Iterator[Callable[[], Any]] = iter(
        [lambda: None, lambda: write(out, [row(n) for n in range(1, 38)]), _interrupt]
    )
    monkeypatch.setattr(time, "sleep", lambda seconds: next(moments)())
    console = terminal(color_system=None)
    command.main([out], console=console)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b" not in said
    assert (said.count("step 19/100"), said.count("step 37/100")) == (1, 1)


def test_without_colours_runs_differ_by_their_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    folders = [write(tmp_path / name, [row(n, loss=n + 9.0 * k) for n in range(1, 20)]) for k, name in enumerate("ab")]
    console = terminal()
    command.main(folders, once=True, curves=("loss",), console=console)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b[3" not in said
    assert said.count("*") > 10
    assert said.count("+") > 10


FRAME = """\
* a  siglip b32  running  step 50/100 (50%)  ETA 0:05  loss 0.20  lr 5.0e-4  epoch 0.50  100 pairs/s
  data wait 1%  memory 2.5 GB  3 bad samples  0 captions cut  2 steps skipped  1 restarts
  ! skipped steps since step 41: 2 of the last steps had a NaN, infinite or exploding loss or gradient, and
    were skipped. If it goes on: a smaller --optim.lr, a longer --optim.warmup, or --precision fp32.
+ b  siglip b32  finished  step 40/40 (100%)  loss 0.25  epoch 0.40  100 pairs/s  data wait 1%  0 bad samples
  0 captions cut  0 restarts
  over: data wait

loss                                                    val/image_retrieval_recall@1
   10.0|+                                                  0.55|
       |+                                                      |
       | +                                                     |
       | ++                                                    |                                             *
       |   ++++                                                |
   0.20|       ++++++++++++++++++++++++++++++*********     0.45|
        1                                           50          1                                           50
gradient_norm                                           pairs_per_s
   1.10|                                                    110|
       |                                                       |
       |                                                       |+++++++++++++++++++++++++++++++++++++*********
       |+++++++++++++++++++++++++++++++++++++*********         |
       |                                                       |
   0.90|                                                   90.0|
        1                                           50          1                                           50
7 more curves: a larger window shows them, or choose by --curves"""


def two_runs(folder: Path) -> list[Watched]:
    """One with skipped steps at its end, and one that is over and had waited for data."""
    more = {"lr": 5e-4, "bias": -1.0, "memory": 2500.0, "scale": 10.0, "skipped": 3, "restarts": 1}
    rows = [row(n, **more, skipped_steps=2 * (n > 40)) for n in range(1, 51)]
    write(folder / "a", [*rows, {"step": 50, "val/image_retrieval_recall@1": 0.5, "val/loss": 1.0}])
    write(folder / "b", [row(n, slowest_data_wait=0.01 if n > 18 else 0.5) for n in range(1, 41)], steps=40)
    return seen(folder)


def test_a_frame_in_full(tmp_path: Path) -> None:
    """What matters most first, as much as the window holds, and how much it does not."""
    runs = two_runs(tmp_path)
    assert page(runs, View(width=110, height=26)).plain.split("\n") == FRAME.split("\n")
    names = ["gradient_norm", "pairs_per_s", "data_wait", "slowest_data_wait", "lr", "scale", "bias", "memory"]
    free = page(runs, View(width=64)).plain.split("\n")
    titles = [line for line in free if line in (*names, "skipped_steps", "loss", "val/image_retrieval_recall@1")]
    assert titles == ["loss", "val/image_retrieval_recall@1", *names, "skipped_steps"]
    small = page(runs, View(width=110, height=16, curves=("b", "lr", "val"))).plain.split("\n")
    assert len(small) <= 16
    assert "2 more curves: a larger window shows them, or choose by --curves" in small


def test_what_ended_and_what_failed_is_reported(tmp_path: Path) -> None:
    runs = two_runs(tmp_path)
    (tmp_path / "b" / "error.json").write_text('{"error": "no\\u001b room"}')
    for run in runs:
        run.update()
    (line,) = [at for at in page(runs, View(width=110)).plain.split("\n") if at.startswith("+ b")]
    assert line.startswith("+ b  siglip b32  failed  0 min ago  step 40/40 (100%)")
    assert "  ! the run ended with an error: no\\x1b room\n" in page(runs, View(width=110)).plain
    changed = (tmp_path / "b" / "error.json").stat().st_mtime
    assert [runs[1].state(changed + s)[1] for s in (7199, 7200, -5)] == ["120 min ago", "2 h ago", "0 min ago"]


@pytest.mark.parametrize(
    ("gaps", "silence"),
    [([], 60), ([5.0] * 50, 60), ([10.0] * 50, 100), ([1.0] * 95 + [90.0] * 5, 180), ([1.0] * 300 + [50.0] * 200, 500)],
)
def test_silence_is_judged_by_the_pauses_of_the_last_rows(tmp_path: Path, gaps: list[float], silence: float) -> None:
    times = np.concatenate([[1000.0], 1000.0 + np.cumsum(gaps)])
    (run,) = seen(write(tmp_path, [row(n, time=float(t)) for n, t in enumerate(times, 1)], steps=1000))
    now = (tmp_path / "metrics.jsonl").stat().st_mtime
    assert [run.state(now + silence + s)[0] for s in (-1, 1)] == ["running", "silent"]


def test_a_spike_is_cut_where_the_usual_values_end() -> None:
    usual = np.linspace(0, 1, 19)
    assert _range(np.append(usual[:-1], 100.0)) == (0.0, 100.0, False)  # too few to know what is usual
    values = np.append(np.linspace(0, 1, 199), 100.0)
    high = float(np.quantile(values, 0.98))
    assert _range(values) == (0.0, pytest.approx(1.5 * high), True)
    assert _range(np.append(np.linspace(0, 1, 199), 4.0)) == (0.0, 4.0, False)
    assert _range(np.array([2.0, 2.0])) == (pytest.approx(1.8), pytest.approx(2.2), False)
    assert _range(np.array([0.0])) == (-1.0, 1.0, False)
    assert _range(np.array([1000.0, 1000.9]))[:2] == (pytest.approx(899.91), pytest.approx(1100.99))
    assert _range(np.array([1000.0, 1001.1]))[:2] == (1000.0, 1001.1)
    assert _labels(1.0001, 1.0002) == ("1.0002", "1.0001")


def test_many_runs_have_a_line_each_and_losses_by_method(tmp_path: Path) -> None:
    for method, at in (("clip", 1.0), ("siglip", 100.0)):
        for seed in range(3):
            rows = [row(n, loss=at + seed, pair=at + seed) for n in range(1, 30)]
            write(tmp_path / f"{method}-{seed}", rows, steps=29, method=method, seed=seed)
    (tmp_path / "siglip-2" / "config.json").write_text("{")  # is like no other
    lines = page(seen(tmp_path), View(width=130)).plain.split("\n")
    marks = [line.split()[0] for line in lines[1:7]]
    assert marks == ["*", "*", "*", "+", "+", "o"]
    assert lines[1].split()[1:6] == ["clip-0", "clip", "finished", "29/29", "1.00"]
    titles = [
        title for title in ("loss of clip, batch 10", "loss of siglip, batch 10") if any(title in x for x in lines)
    ]
    assert len(titles) == 2
    first = next(n for n, line in enumerate(lines) if "loss of clip" in line)
    assert "2.2" in lines[first + 1][:8]  # of 2, the mean over seeds, with a margin: not of siglip's 100
    assert "gradient_norm" not in "".join(lines)
