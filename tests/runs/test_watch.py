"""Runs as their folders show them: rows that grow, states, and what `watch` prints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kiloword.cli.main import main
from kiloword.files import LOCK, Lock
from kiloword.runs.run import Run, find
from runs import row, write


def old(path: Path) -> Path:
    """The folder of a run whose last row came an hour ago."""
    os.utime(path / "metrics.jsonl", (time.time() - 3600,) * 2)
    return path


def test_rows_that_grow_are_read_once_and_half_a_line_later(tmp_path: Path) -> None:
    out = write(tmp_path / "run", [row(1), row(2)])
    run = Run(out)
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    run.update()
    assert list(run.curves["loss"][0]) == [1, 2]
    with (out / "metrics.jsonl").open("a") as file:
        file.write('ss": 0.5}\nnonsense\n[1]\n{"step": "x"}\n{"step": 4, "loss": NaN, "words": "x"}\n')
    run.update()
    assert (run.step, list(run.curves["loss"][0]), list(run.curves["loss"][1])) == (4, [1, 2, 3], [10, 5, 0.5])
    assert list(run.curves["pair"][0]) == [1, 2]


def test_rows_that_a_resumed_run_writes_again_are_read_again(tmp_path: Path) -> None:
    out = write(tmp_path / "run", [row(n) for n in range(1, 6)])
    run = Run(out)
    write(tmp_path / "new", [*(row(n) for n in (1, 2, 3)), row(4, loss=7.0, restarts=1)])
    (tmp_path / "new" / "metrics.jsonl").replace(out / "metrics.jsonl")
    run.update()
    assert list(run.curves["loss"][1]) == [10, 5, 10 / 3, 7]
    assert (run.step, run.last["restarts"]) == (4, 1)


def test_states_of_a_run(tmp_path: Path) -> None:
    out = write(tmp_path / "run", [row(n) for n in range(1, 9)], steps=8)
    assert Run(out).state == "finished"
    (out / "state").mkdir()
    (out / "state" / "step-000000004.json").touch()
    assert Run(old(out)).state == "stopped"  # killed before it was saved
    (out / "state" / "step-000000008.json").touch()
    assert Run(out).state == "finished"
    with Lock(out):
        assert Run(out).state == "running"  # perhaps it validates
    (out / "error.json").write_text('{"error": "no room"}')
    assert Run(out).state == "failed"
    longer = write(tmp_path / "longer", [row(1)])
    assert Run(longer).state == "stopped"
    (longer / LOCK).touch()  # of a process on another machine, or of one that was killed
    assert Run(longer).state == "running"
    os.utime(longer / LOCK, (0, 0))
    assert Run(old(longer)).state == "stopped"
    early = write(tmp_path / "early", [row(1), {"step": 1, "stopped_early": 1}])
    assert Run(old(early)).state == "finished"
    (tmp_path / "begun").mkdir()
    with Lock(tmp_path / "begun"):
        assert Run(tmp_path / "begun").state == "running"


def test_the_seconds_of_a_run_are_those_of_its_steps(tmp_path: Path) -> None:
    out = write(
        tmp_path / "run", [row(10, pairs_per_s=100.0), row(20, pairs_per_s=50.0), {"step": 20, "val/loss": 1.0}]
    )
    assert Run(out).seconds == pytest.approx(10 * 10 / 100 + 10 * 10 / 50)


def test_a_run_in_a_few_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row(n, truncated=12, skipped_steps=2 * (n > 40), memory=2500.0, lr=5e-4) for n in range(1, 51)]
    rows.append({"step": 50, "val/text_retrieval_recall@1": 0.5, "val/text_retrieval_recall@5": 0.9})
    out = write(tmp_path / "a", rows)
    (out / LOCK).touch()
    (out / "best").mkdir()
    (out / "best" / "best.json").write_text('{"metric": "val/rsum", "value": 3.5, "step": 40}')
    write(tmp_path / "b", [row(n) for n in range(1, 5)])
    (tmp_path / "b" / "error.json").write_text('{"error": "no\\u001b room"}')
    main(["watch", str(tmp_path), "--once"])
    said = capsys.readouterr().out
    first, validation, alert, second, error = said.splitlines()
    for words in ("a  siglip  b32  running  step 50/100 (50%)  ETA 0:05", "loss 0.2", "lr 5.00e-04", "100 pairs/s"):
        assert words in first
    for words in ("data wait 1%", "memory 2,500 MB", "12 captions cut", "2 steps skipped"):
        assert words in first
    assert validation.split() == ["text_retrieval_recall@1", "0.5", "best", "rsum", "3.5", "at", "step", "40"]
    assert alert.startswith("  ! skipped steps since step 41: 2 of the last steps")
    assert second.startswith("b  siglip  b32  failed  step 4/100")
    assert error == "  ! the run ended with an error: no\\x1b room"


def test_on_a_terminal_it_follows_the_runs_until_they_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    (write(tmp_path / "a", [row(1)], steps=3) / LOCK).touch()
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        write(tmp_path / "a", [row(n) for n in range(1, 4)], steps=3)
        write(tmp_path / "b", [row(1), row(2)], steps=2)

    monkeypatch.setattr(time, "sleep", sleep)
    main(["watch", str(tmp_path), "--every", "5"])
    said = capsys.readouterr().out
    assert waits[0] == 5
    assert said.index("step 1/3") < said.index("step 3/3")
    assert "b  siglip" in said


def test_names_of_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("x/b", "x/a", "y/a"):
        write(Path(name), [row(1)])
    assert list(find([Path("x")]).values()) == ["a", "b"]
    assert list(find([Path("x"), Path("y/a")]).values()) == ["x/a", "x/b", "y/a"]


@pytest.mark.parametrize(
    ("words", "said"),
    [(["nowhere"], "nowhere is no run"), (["other"], "holds none"), (["run", "--every", "0"], "--every")],
)
def test_what_is_refused(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("run"), [row(1)])
    (tmp_path / "other" / "photos").mkdir(parents=True)
    with pytest.raises(SystemExit) as end:
        main(["watch", *words])
    assert end.value.code == 2
    assert said in capsys.readouterr().err


def test_a_run_without_settings_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = write(tmp_path / "run", [{"step": 1, "loss": 2.0}, {"step": 2, "loss": float("nan"), "words": "x"}])
    for text in ('{"recipe": {"steps":', '{"recipe": [1]}', "null"):
        (out / "config.json").write_text(text)
        main(["watch", str(out)])
        assert "loss 2" in capsys.readouterr().out


def test_a_pipe_gets_plain_text_and_the_verb_needs_no_torch(tmp_path: Path) -> None:
    out = write(tmp_path / "run", [row(n) for n in range(1, 20)])
    code = "import sys; from kiloword.cli.main import main; main(sys.argv[1:]); assert not {'torch'} & set(sys.modules)"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-c", code, "watch", str(out)]
    done = subprocess.run(command, capture_output=True, env=environment, check=True, timeout=120)
    assert b"\x1b" not in done.stdout
    assert b"step 19/100" in done.stdout


def test_history_has_a_line_each_process(tmp_path: Path) -> None:
    from kiloword.runs.rows import HISTORY, began, objects

    began(tmp_path, step=0, images=3)
    began(tmp_path, step=7, images=3)
    assert [(line["step"], line["images"]) for line in objects(tmp_path / HISTORY)[0]] == [(0, 3), (7, 3)]
    assert json.loads((tmp_path / HISTORY).read_text().splitlines()[0])["version"]
