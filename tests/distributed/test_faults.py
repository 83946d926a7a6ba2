"""What happens around a run: nothing is lost, nothing hangs, and one sentence says what it was."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kiloword.training.loop as loop
from cases import mostly_slow
from kiloword.cli.main import main
from kiloword.data import files, reading
from kiloword.data.loader import Loader
from kiloword.data.reading import read
from kiloword.data.tars.shards import TarSource
from kiloword.training.log import read_metrics
from kiloword.types import BadSample
from states import load_state
from tars import pairs, photo, write_tar

SMALL = ["--size", "debug", "--batch", "8", "--log-every", "1", "--vocab", "300"]
SCENES = "scenes?n=64"
ROOT = Path(__file__).parents[2]


def train(out: Path, *more: object, data: object = SCENES, steps: int = 4) -> list[str]:
    return ["train", "siglip", *SMALL, *map(str, ("--data", data, "--out", out, "--steps", steps, *more))]


@pytest.fixture
def ends(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command line that must end with a code; returns what it said, whose last line is the sentence."""

    def run(words: list[str], code: int = 2) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main(words)
        said = capsys.readouterr().err
        assert end.value.code == code, said
        assert "Traceback" not in said
        assert said.strip().splitlines()[-1].startswith("kiloword: "), said
        print(said)
        return said

    return run


def goes_on(words: list[str], out: Path, steps: int = 4) -> None:
    """The same command ends the run, with every step once and whole numbers everywhere."""
    main(words)
    assert [row["step"] for row in read_metrics(out / "metrics.jsonl") if "lr" in row] == list(range(1, steps + 1))
    found = load_state(out / "state", pytest.fail)
    assert found is not None
    assert found[1]["step"] == steps
    assert all(bool(value.isfinite().all()) for value in found[0].values())


# Gradients


def spoil(monkeypatch: pytest.MonkeyPatch, bad: Callable[[int], bool], factor: float) -> None:
    """Gradients of the steps (from 1) that are bad are multiplied."""
    real, calls = loop.backward, []

    def backward(learner: Any, *args: Any) -> dict[str, torch.Tensor]:
        calls.append(1)
        report = real(learner, *args)
        if bad(len(calls)):
            for p in learner.parameters():
                if p.grad is not None:
                    p.grad.mul_(factor)
            report["loss"] = report["loss"] * factor
        return report

    monkeypatch.setattr(loop, "backward", backward)


def test_a_step_without_a_gradient_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(monkeypatch, lambda step: step == 3, float("nan"))
    out = tmp_path / "out"
    goes_on(train(out, "--optim.ema", 0.9, "--save-every", 1), out)
    said = capsys.readouterr().err
    print(said)
    assert "step 3: loss is nan and gradient norm nan: the step was skipped (1 so far)" in said
    rows = read_metrics(out / "metrics.jsonl")
    assert [row["skipped_steps"] for row in rows] == [0, 0, 1, 1]
    assert "loss" not in rows[2] or np.isfinite(rows[2]["loss"])


def test_a_gradient_that_explodes_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(monkeypatch, lambda step: step == 25, 1e6)
    out = tmp_path / "out"
    goes_on(train(out, steps=26), out, 26)
    said = capsys.readouterr().err
    print(said)
    assert re.search(r"step 25: gradient norm \S+ is \d{6,7} times the usual: the step was skipped \(1 so far\)", said)


def test_gradients_that_stay_bad_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: Callable[..., str]
) -> None:
    out = tmp_path / "out"
    words = train(out, "--save-every", 1, "--max-skipped-steps", 3, steps=8)
    with monkeypatch.context() as patch:
        spoil(patch, lambda step: step > 2, float("inf"))
        said = ends(words)
    assert "step 5: loss is inf and gradient norm nan; bad steps in a row: 3. The run stops" in said
    found = load_state(out / "state", pytest.fail)
    assert found is not None
    assert found[1]["step"] == 4
    assert all(bool(value.isfinite().all()) for value in found[0].values())
    main(words)


# Signals


def at(monkeypatch: pytest.MonkeyPatch, place: Any, name: str, number: int, call: int = 1) -> None:
    """A signal in the middle of a function, as it is called the n-th time."""
    real, calls = getattr(place, name), []

    def hit(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == call:
            signal.raise_signal(number)
        return real(*args, **kwargs)

    monkeypatch.setattr(place, name, hit)


@pytest.mark.parametrize(
    ("place", "call", "says", "step"),
    mostly_slow(
        [
            ("prepare", 1, "stopped before its first step: there was nothing to save", 0),
            ("loading", 3, "stopped after step 2; the state is saved", 2),
            ("backward", 2, "stopped after step 2; the state is saved", 2),
            ("validate", 1, "stopped in the validation after step 4; the state is saved", 4),
        ],
        0,
        2,
    ),
)
def test_sigterm_anywhere(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ends: Callable[..., str],
    place: str,
    call: int,
    says: str,
    step: int,
) -> None:
    where = (Loader, "batch") if place == "loading" else (loop, place)
    out = tmp_path / "out"
    words = train(out, "--save-every", 1, "--val", "scenes:test?n=8")
    with monkeypatch.context() as patch:
        at(patch, *where, signal.SIGTERM, call)
        said = ends(words, 128 + signal.SIGTERM)
    assert says in said
    found = load_state(out / "state", pytest.fail)
    assert (0 if found is None else found[1]["step"]) == step
    goes_on(words, out)
    assert "val/image_retrieval_recall@1" in read_metrics(out / "metrics.jsonl")[-1]


def test_sigusr1_saves_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at(monkeypatch, loop, "backward", signal.SIGUSR1, 2)
    goes_on(train(tmp_path), tmp_path)
    assert sorted(path.stem for path in (tmp_path / "state").glob("*.json")) == ["step-000000002", "step-000000004"]


def test_ctrl_c_twice_ends_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: Callable[..., str]) -> None:
    words = train(tmp_path, "--save-every", 1)
    with monkeypatch.context() as patch:
        at(patch, loop, "backward", signal.SIGINT, 3)
        real = loop.backward

        def twice(*args: Any) -> Any:
            found = real(*args)
            if signal.getsignal(signal.SIGINT).__self__.asked:  # type: ignore[union-attr]
                signal.raise_signal(signal.SIGINT)
            return found

        patch.setattr(loop, "backward", twice)
        assert "interrupted" in ends(words, 130)
    goes_on(words, tmp_path)


def test_two_runs_in_one_folder(tmp_path: Path, ends: Callable[..., str]) -> None:
    hold = "import sys, time; from pathlib import Path; from kiloword.files import Lock; "
    hold += "lock = Lock(Path(sys.argv[1]))"
    words = [sys.executable, "-c", f"{hold}; print('held', flush=True); time.sleep(600)", str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        said = ends(train(tmp_path))
        assert re.search(rf"process {other.pid} on \S+ is training in {tmp_path}: wait for its end", said)
        assert not (tmp_path / "metrics.jsonl").exists()
        other.kill()
    goes_on(train(tmp_path), tmp_path)


# Shards


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    """Twenty tars of ten images."""
    (tmp_path / "data").mkdir()
    return [write_tar(tmp_path / "data" / f"{n:04d}.tar", pairs(10, 10 * n)) for n in range(20)]


def lose(tar: Path) -> None:
    tar.unlink()


def cut(tar: Path) -> None:
    os.truncate(tar, tar.stat().st_size // 2)


def replace(tar: Path) -> None:
    other = {f"x{n}.{kind}": value for n in range(12) for kind, value in (("png", photo(n)), ("txt", b"another"))}
    write_tar(tar.with_suffix(".new"), other).rename(tar)


def overwrite(tar: Path) -> None:
    tar.write_bytes(b"no tar at all" * 1000)


def grow(tar: Path) -> None:
    write_tar(tar, pairs(14, 10 * int(tar.stem)))


def touch(tar: Path) -> None:
    os.utime(tar, ns=(1, 1))


@pytest.mark.parametrize("opened", mostly_slow([False, True], 1))
@pytest.mark.parametrize(
    ("change", "reason", "bad"),
    [
        (lose, "0007.tar is missing", 10),
        (cut, "0007.tar has become shorter since it was indexed", 5),
        (replace, "0007.tar is another file than when the run began", 10),
        (overwrite, "0007.tar is another file than when the run began", 10),
        (grow, "", 0),
        (touch, "", 0),
    ],
)
def test_a_shard_that_changes(
    shards: list[Path], change: Callable[[Path], None], reason: str, bad: int, opened: bool
) -> None:
    """What was read before and is read again is the same or bad, never another image."""
    source = TarSource("data", shards)
    before = (
        [read(source, row) for row in range(200)] if opened else [read(TarSource("d", shards), n) for n in range(200)]
    )
    change(shards[7])
    reasons = []
    for row, expected in enumerate(before):
        try:
            assert read(source, row) == expected
        except BadSample as error:
            assert 70 <= row < 80
            reasons.append(str(error))
    if opened and change in (lose, replace):  # its open file is still there
        assert reasons == []
    else:
        assert reasons == [reason] * len(reasons)
        assert bad - 1 <= len(reasons) <= bad + 1


def test_between_two_runs_of_the_same_command(
    shards: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: Callable[..., str]
) -> None:
    """Indexes are made again; data that is another is refused, and what was trained stays."""
    out = tmp_path / "out"
    words = train(out, "--save-every", 1, data=tmp_path / "data")
    with monkeypatch.context() as patch:
        at(patch, loop, "backward", signal.SIGTERM, 2)
        ends(words, 143)
    shards[3].rename(tmp_path / "away")
    begins = "holds another run: the data is not what the run began with (a file is missing, new, cut or replaced); "
    assert f"{begins}data_fingerprint is" in ends(words)
    pattern = train(out, data=tmp_path / "data" / "{0000..0019}.tar")
    assert f"1 of 20 tars are missing, the first is {shards[3]}" in ends(pattern)
    (tmp_path / "away").rename(shards[3])
    shards[4].with_name(f"{shards[4].name}.kwindex").write_bytes(b"noise")
    goes_on(words, out)


@pytest.mark.parametrize(("times", "bad"), [(2, 0), (99, 1)])
def test_a_read_error_that_passes(shards: list[Path], monkeypatch: pytest.MonkeyPatch, times: int, bad: int) -> None:
    source, failures = TarSource("data", shards), iter(range(times))
    real = files.PositionlessFile.read

    def stutter(file: files.PositionlessFile, offset: int, size: int) -> bytes:
        if next(failures, None) is not None:
            raise OSError(errno.EIO, "Input/output error")
        return real(file, offset, size)

    waited: list[float] = []
    source.key(3)  # its index is read
    monkeypatch.setattr(files.PositionlessFile, "read", stutter)
    monkeypatch.setattr(reading.time, "sleep", waited.append)
    if not bad:
        assert read(source, 3).captions
        assert waited == [0.1, 0.4]
        return
    with pytest.raises(BadSample, match=r"OSError: \[Errno 5\] Input/output error: '.*0000.tar'"):
        read(source, 3)
    assert waited == list(reading.AGAIN_S)


# The folder of the run


def at_step(monkeypatch: pytest.MonkeyPatch, step: int, do: Callable[[], object]) -> None:
    real, calls = loop.backward, []

    def backward(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == step:
            do()
        return real(*args)

    monkeypatch.setattr(loop, "backward", backward)


def test_validation_data_that_is_gone_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: Callable[..., str]
) -> None:
    """The trained model is saved before, and the same command validates when the data is back."""
    val, away = write_tar(tmp_path / "val.tar", pairs(8)), tmp_path / "away"
    out = tmp_path / "out"
    words = train(out, "--val", val)

    def empty() -> None:  # a file that is moved away stays open
        shutil.copy2(val, away)
        os.truncate(val, 0)

    with monkeypatch.context() as patch:
        at_step(patch, 2, empty)
        said = ends(words)
    assert f"{val}: none of its 8 rows is a usable image, the first because: val.tar is another file than" in said
    found = load_state(out / "state", pytest.fail)
    assert found is not None
    assert found[1]["step"] == 4
    assert (out / "model" / "model.safetensors").is_file()
    away.rename(val)
    goes_on(words, out)
    assert "val/image_retrieval_recall@1" in read_metrics(out / "metrics.jsonl")[-1]


def test_no_room_for_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: Callable[..., str]) -> None:
    log = tmp_path / "metrics.jsonl"

    def fill() -> None:
        log.rename(tmp_path / "kept")
        log.symlink_to("/dev/full")

    with monkeypatch.context() as patch:
        at_step(patch, 3, fill)
        said = ends(train(tmp_path, "--save-every", 1))
    assert f"cannot write {log}: No space left on device. The last state is kept." in said
    log.unlink()
    (tmp_path / "kept").rename(log)
    goes_on(train(tmp_path, "--save-every", 1), tmp_path)


def test_a_log_that_was_cut(tmp_path: Path, ends: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    words = train(tmp_path, "--save-every", 1)
    with monkeypatch.context() as patch:
        at(patch, loop, "backward", signal.SIGTERM, 2)
        ends(words, 143)
    log = tmp_path / "metrics.jsonl"
    log.write_bytes(log.read_bytes() + b'{"step": 3, "lo')
    goes_on(words, tmp_path)


def test_ranks_that_do_not_divide_the_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: Callable[..., str]
) -> None:
    monkeypatch.setattr("kiloword.distributed.collectives.ranks", lambda: 3)
    assert "batch 8 does not divide over 3 ranks: choose a multiple of 3" in ends(train(tmp_path))
