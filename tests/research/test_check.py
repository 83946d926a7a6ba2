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
from research import arms_queue
from research import arms_rows as rows
from research.arms import Arm, Experiment, Options

ENDS = {"same": 0, "other": rows.OTHER_LOSSES, "gone": 2, "broken": 1, "killed": -9}
STUB = f"""
import os, sys, time
name = sys.argv[sys.argv.index("--only") + 1].partition(":")[0]
if name == "waits":
    open("child", "w").write(str(os.getpid()))
    time.sleep(100)
code = {ENDS}[name]
os.kill(os.getpid(), -code) if code < 0 else sys.exit(code)
"""
EXPERIMENT = Experiment(
    module="checked_stub",
    title="A stub",
    arms=lambda _: [Arm(name=name, recipe=Recipe(method="siglip"), judge=lambda _: {}) for name in (*ENDS, "waits")],
    columns={},
)


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the rows and of the shell; checks are processes of STUB, which end as ENDS says."""
    (tmp_path / "checked_stub.py").write_text(STUB)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(Path(__file__).parent), *sys.path]))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_rows(out: Path, *names: str) -> None:
    for name in names:
        recipe = rows.recipe_hash(Recipe(method="siglip"))
        rows.append(out, {"arm": name, "seed": 0, "recipe": recipe, "commit": "0123456", "dirty": False})


@pytest.mark.parametrize(
    ("names", "said", "unsaid"),
    [
        (ENDS, ["rows of other are of code that computed other losses", "gone, broken, killed"], "same"),
        (["same", "broken"], ["broken"], "other losses"),
        ([], ["no row"], "other losses"),
    ],
)
def test_other_losses_are_told_from_failures(out: Path, names: list[str], said: list[str], unsaid: str) -> None:
    write_rows(out, *names)
    with pytest.raises(ValueError) as error:
        arms_queue.check_all(EXPERIMENT, Options(out=out))
    assert all(words in str(error.value) for words in said)
    assert unsaid not in str(error.value)


def test_equal_losses_pass(out: Path) -> None:
    write_rows(out, "same")
    arms_queue.check_all(EXPERIMENT, Options(out=out))


def test_a_check_ends_with_the_script_that_started_it(out: Path) -> None:
    write_rows(out, "waits")
    script = "from test_check import *; from research.arms import main; main(EXPERIMENT, ['--out', '.', '--check'])"
    started = subprocess.Popen([sys.executable, "-c", script])
    while not (out / "child").exists() or not (out / "child").read_text():
        assert started.poll() is None
        time.sleep(0.05)
    started.send_signal(signal.SIGTERM)
    code, child = started.wait(timeout=30), int((out / "child").read_text())
    try:
        os.kill(child, signal.SIGKILL)
    except ProcessLookupError:
        assert code == 130
    else:
        pytest.fail("the check goes on")
