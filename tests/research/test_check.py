"""`--check`: which rows are of code that computed other losses, and which could not be checked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kiloword.config.recipes import Recipe
from research import arms_queue, arms_run
from research import arms_rows as rows
from research.arms import Arm, Experiment, Options

ENDS = {"same": 0, "other": 3, "gone": 2, "broken": 1, "killed": -9}
EXPERIMENT = Experiment(
    module="stub",
    title="A stub",
    arms=lambda _: [Arm(name=name, recipe=Recipe(method="siglip"), judge=lambda matcher: {}) for name in ENDS],
    columns={},
)


def checked(out: Path, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Arms of these names have rows, and their checks end as ENDS says."""

    def process(words: list[str], output: object = None) -> subprocess.Popen[bytes]:
        code = ENDS[words[words.index("--only") + 1].partition(":")[0]]
        end = f"import os; os.kill(os.getpid(), {-code})" if code < 0 else f"raise SystemExit({code})"
        return subprocess.Popen([sys.executable, "-c", end])

    monkeypatch.setattr(arms_queue, "_process", process)
    for name in names:
        recipe = rows.recipe_hash(Recipe(method="siglip"))
        rows.append(out, {"arm": name, "seed": 0, "recipe": recipe, "commit": "0123456", "dirty": False})
    arms_queue.check_all(EXPERIMENT, Options(out=out))


def test_other_losses_are_told_from_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ENDS["other"] == rows.OTHER_LOSSES
    with pytest.raises(ValueError) as error:
        checked(tmp_path, monkeypatch, *ENDS)
    assert "rows of other are of code that computed other losses: run them again." in str(error.value)
    assert "gone, broken, killed could not be checked" in str(error.value)


def test_a_failure_alone_says_nothing_of_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError) as error:
        checked(tmp_path, monkeypatch, "same", "broken")
    assert "other losses" not in str(error.value)


def test_equal_losses_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked(tmp_path, monkeypatch, "same")


def test_without_rows_nothing_can_be_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="no row"):
        checked(tmp_path, monkeypatch)


def test_a_check_ends_with_the_script_that_started_it(tmp_path: Path) -> None:
    row = {"arm": "same", "seed": 0, "recipe": rows.recipe_hash(Recipe(method="siglip"))}
    rows.append(tmp_path, row | {"commit": "0123456", "dirty": False})
    script = f"""
import subprocess, sys
from pathlib import Path
from research import arms_queue
from research.arms import main
from test_check import EXPERIMENT

def process(words, output=None):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    Path({str(tmp_path / "child")!r}).write_text(str(child.pid))
    return child

arms_queue._process = process
main(EXPERIMENT, ["--out", {str(tmp_path)!r}, "--check"])
"""
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    started = subprocess.Popen([sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": paths})
    while not (tmp_path / "child").exists() or not (tmp_path / "child").read_text():
        assert started.poll() is None
        time.sleep(0.05)
    started.send_signal(signal.SIGTERM)
    code, child = started.wait(timeout=30), int((tmp_path / "child").read_text())
    try:
        os.kill(child, signal.SIGKILL)
    except ProcessLookupError:
        assert code == 130
    else:
        pytest.fail("the check goes on")


def test_a_check_that_has_begun_nothing_ends_at_sigterm(tmp_path: Path) -> None:
    """Its own signal comes when all losses are there; another one is of somebody who wants it to end."""

    def interrupted() -> None:
        with arms_run._stop_after(tmp_path, 3):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
