"""What happens around a run: nothing is lost, nothing hangs, and one sentence says what it was."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from commands import held_by_another, refused, run
from kiloword.cli.main import main
from kiloword.data.open import open_source
from kiloword.data.reading import read
from kiloword.types import BadSample
from runs import at_step, rows, state
from tars import pairs, write_tar

SMALL = ["--size", "debug", "--batch", "8", "--log-every", "1", "--vocab", "300"]
SCENES = "scenes?n=64"


def train(out: Path, *more: object, data: object = SCENES, steps: int = 4) -> list[str]:
    return ["train", "siglip", *SMALL, *map(str, ("--data", data, "--out", out, "--steps", steps, *more))]


def goes_on(words: list[str], out: Path, steps: int = 4) -> None:
    """The same command ends the run, with every step once and whole numbers everywhere."""
    main(words)
    assert [row["step"] for row in rows(out) if "lr" in row] == list(range(1, steps + 1))
    tensors, numbers = state(out)
    assert numbers["step"] == steps
    assert all(bool(value.isfinite().all()) for value in tensors.values())


def test_sigterm_saves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where the last row of the log was cut."""
    words = train(tmp_path, "--val", "scenes:test?n=8")
    with at_step(2, lambda _: signal.raise_signal(signal.SIGTERM)):
        code, said = run(capsys, *words)
    assert (code, "stopped after step 2" in said) == (128 + signal.SIGTERM, True)
    with (tmp_path / "metrics.jsonl").open("a") as log:
        log.write('{"step": 3, "lo')
    goes_on(words, tmp_path)
    assert "val/image_retrieval_recall@1" in rows(tmp_path)[-1]


def test_sigusr1_saves_and_goes_on(tmp_path: Path) -> None:
    with at_step(2, lambda _: signal.raise_signal(signal.SIGUSR1)):
        goes_on(train(tmp_path), tmp_path)
    assert sorted(path.stem for path in (tmp_path / "state").glob("*.json")) == ["step-000000002", "step-000000004"]


@pytest.mark.slow
def test_the_terminal_goes(tmp_path: Path) -> None:
    """SIGHUP, and nobody reads what the run says any more: the state is saved."""
    words = [sys.executable, "-m", "kiloword", *train(tmp_path, steps=100_000)]
    heard = partial(signal.signal, signal.SIGHUP, signal.SIG_DFL)  # nohup, under which the tests may run, ignores it
    with subprocess.Popen(words, stderr=subprocess.PIPE, preexec_fn=heard) as process:
        while len(rows(tmp_path)) < 3:
            assert process.poll() is None
            time.sleep(0.05)
        assert process.stderr is not None
        process.stderr.close()
        process.send_signal(signal.SIGHUP)
        process.wait(timeout=120)
    assert state(tmp_path)[1]["step"] >= 3


def test_two_runs_in_one_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with held_by_another(tmp_path) as other:
        assert f"process {other.pid} on " in refused(capsys, *train(tmp_path))
        assert not (tmp_path / "metrics.jsonl").exists()
    goes_on(train(tmp_path), tmp_path)


@pytest.mark.parametrize("passes", [True, False])
def test_a_read_error_that_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passes: bool) -> None:
    shard, tar = write_tar(tmp_path / "0.tar", pairs(10, 0)), tmp_path / "kept.tar"
    source = open_source(str(shard))
    shard.rename(tar)
    shard.symlink_to("/proc/self/mem")  # at its beginning reading is an input/output error

    def wait(_: float) -> None:
        if passes:
            shard.unlink()
            shard.symlink_to(tar)

    monkeypatch.setattr(time, "sleep", wait)
    if passes:
        assert read(source, 3).captions
        return
    with pytest.raises(BadSample, match="Input/output error"):
        read(source, 3)
