"""Runs as their folders show them: rows that grow, states, and what `watch` prints."""

from __future__ import annotations

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


def test_curves_hold_the_numbers_of_whole_rows(tmp_path: Path) -> None:
    out = write(tmp_path / "run", [row(1), row(2), row(4, loss=7.0, pairs_per_s=25.0)])
    with (out / "metrics.jsonl").open("a") as file:
        file.write('nonsense\n[1]\n{"step": "x"}\n{"step": 5, "loss": NaN, "words": "x"}\n{"step": 6, "lo')
    run = Run(out)
    assert (run.step, run.curves["loss"]) == (5, ([1, 2, 4], [10, 5, 7]))
    assert run.speed == pytest.approx(3 / (2 / 100 + 1 / 25))


def test_states_of_a_run(tmp_path: Path) -> None:
    out = write(tmp_path / "run", [row(n) for n in range(1, 9)], steps=8)
    assert Run(out).state == "finished"
    with Lock(out):
        assert Run(out).state == "running"  # perhaps it validates
    (out / "error.json").write_text('{"error": "no room"}')
    assert Run(out).state == "failed"
    longer = write(tmp_path / "longer", [row(1)])
    assert Run(longer).state == "stopped"
    (longer / LOCK).write_text("process 1 on another machine")
    assert Run(longer).state == "running"
    os.utime(longer / "metrics.jsonl", (0, 0))
    assert Run(longer).state == "stopped"
    assert Run(write(tmp_path / "early", [row(1), {"step": 1, "stopped_early": 1}])).state == "finished"
    (killed := tmp_path / "killed").mkdir()
    with Lock(killed):
        assert Run(killed).state == "running"
    code = f"import os; from pathlib import Path; from kiloword.files import Lock; Lock(Path({str(killed)!r})); "
    subprocess.run([sys.executable, "-c", code + "os.kill(os.getpid(), 9)"], check=False, timeout=60)
    assert (killed / LOCK).exists()
    assert Run(killed).state == "stopped"


def test_a_run_in_a_few_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row(n, truncated=12, skipped_steps=2 * (n > 40), memory=2500.0, lr=5e-4) for n in range(1, 51)]
    rows.append({"step": 50, "val/text_retrieval_recall@1": 0.5, "val/text_retrieval_recall@5": 0.9})
    out = write(tmp_path / "a", rows)
    (out / LOCK).touch()
    write(tmp_path / "b", [row(n) for n in range(1, 5)])
    (tmp_path / "b" / "error.json").write_text('{"error": "no\\u001b room"}')
    main(["watch", str(tmp_path), "--once"])
    first, alert, second, error = capsys.readouterr().out.splitlines()
    for words in ("a  siglip  running  step 50/100  ETA 0:05", "loss 0.2", "lr 5.00e-04", "100 pairs/s"):
        assert words in first
    for words in ("data wait 1%", "memory 2,500 MB", "12 captions cut", "2 steps skipped"):
        assert words in first
    assert first.endswith("text_retrieval_recall@1 0.5")
    assert alert.startswith("  ! skipped steps since step 41: 2 of the last steps")
    assert second.startswith("b  siglip  failed  step 4/100")
    assert error == "  ! the run ended with an error: no\\x1b room"
    for text in ('{"recipe": {"steps":', '{"recipe": [1]}', "null"):
        (tmp_path / "b" / "config.json").write_text(text)
        main(["watch", str(tmp_path / "b")])
        assert "loss 2.5" in capsys.readouterr().out


def test_on_a_terminal_it_follows_the_runs_until_they_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    (write(tmp_path / "a", [row(1)], steps=3) / LOCK).touch()

    def sleep(seconds: float) -> None:
        write(tmp_path / "a", [row(n) for n in range(1, 4)], steps=3)
        write(tmp_path / "b", [row(1), row(2)], steps=2)

    monkeypatch.setattr(time, "sleep", sleep)
    main(["watch", str(tmp_path)])
    said = capsys.readouterr().out
    assert said.index("step 1/3") < said.index("step 3/3")
    assert "b  siglip" in said


def test_names_of_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("x/b", "x/a", "y/a"):
        write(Path(name), [row(1)])
    assert [run.name for run in find([Path("x")])] == ["a", "b"]
    assert [run.name for run in find([Path("x"), Path("y/a")])] == ["x/a", "x/b", "y/a"]


def test_a_pipe_gets_plain_text_and_the_verb_needs_no_torch(tmp_path: Path) -> None:
    out = write(tmp_path / "run", [row(n) for n in range(1, 20)])
    code = "import sys; from kiloword.cli.main import main; main(sys.argv[1:]); assert not {'torch'} & set(sys.modules)"
    command = [sys.executable, "-c", code, "watch", str(out)]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, env=environment, check=True, timeout=120)
    assert b"\x1b" not in done.stdout
    assert b"step 19/100" in done.stdout
