"""The log of a run: rows, the line that tells of them, alerts, and what a resumed run keeps."""

from __future__ import annotations

import io
import json
import mmap
import os
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kiloword.config.options import RunOptions
from kiloword.config.recipes import OptimConfig
from kiloword.data.sampler import Order
from kiloword.distributed import collectives
from kiloword.methods.defaults import default_recipe
from kiloword.terminal.progress import Pace, duration, per_second
from kiloword.training import log as logging
from kiloword.training import meter
from kiloword.training.log import Log, SinceRow, open_log, read_metrics
from kiloword.training.meter import Meter
from kiloword.training.optimizer import schedule
from kiloword.types import Batch, Texts
from kiloword.watch.rule import About
from terminals import Terminal

ABOUT = About(batch=10)


def row(step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "loss": 1.0, "pairs_per_s": 100.0, "data_wait": 0.25, **more}


def test_rows_say_when_and_how_often_the_run_was_resumed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for start, restarts in ((0, 0), (2, 1), (2, 2), (0, 3)):
        log = Log(path, 10, start, quiet=True)
        for step in (start + 1, start + 2):
            log.row(row(step))
        rows = read_metrics(path)
        assert [r["step"] for r in rows] == list(range(1, start + 3))
        assert [r["restarts"] for r in rows[start:]] == [restarts] * 2
        assert abs(rows[-1]["time"] - time.time()) < 60


def test_a_resumed_log_rewrites_its_file_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    old = "".join(json.dumps(row(n)) + "\n" for n in range(1, 5))
    path.write_text(old)
    inode = path.stat().st_ino
    Log(path, 10, 4, quiet=True)
    assert path.stat().st_ino == inode  # nothing to drop
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError(28, "No space left")))
        with pytest.raises(ValueError, match="What was there before is kept"):
            Log(path, 10, 2, quiet=True)
    assert path.read_text() == old
    path.write_text(old + '{"step": 5, "lo')  # a crash cut this line
    Log(path, 10, 4, quiet=True).row(row(5))
    assert [r["step"] for r in read_metrics(path)] == [1, 2, 3, 4, 5]


def test_alerts_are_printed_once_also_over_a_restart(tmp_path: Path) -> None:
    path, screen = tmp_path / "metrics.jsonl", io.StringIO()
    log = Log(path, 1000, out=screen, about=ABOUT)
    for n in range(1, 100):
        log.row(row(n, loss=1.0 + n % 3 / 100, skipped_steps=int(n >= 50)))
    said = screen.getvalue().splitlines()
    assert [line.partition(":")[0] for line in said] == ["alert at step 50", "over at step 70"]
    again = io.StringIO()
    log = Log(path, 1000, 60, out=again, about=ABOUT)
    for n in range(61, 80):
        log.row(row(n, skipped_steps=1))
    assert [line.partition(":")[0] for line in again.getvalue().splitlines()] == ["over at step 70"]


def test_the_line_fits_the_terminal(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrapped line could not be rewritten."""
    monkeypatch.setenv("COLUMNS", "60")
    log = Log(None, 1000, out=terminal, about=ABOUT)
    log.progress(row(10, lr=1e-3, skipped=3, skipped_steps=1))
    assert terminal.frames[-1].startswith("step 10/1000  loss 1.000  100 pairs/s  ETA 1:39  dat")
    assert max(map(len, terminal.frames)) < 60


def test_the_plain_line_tells_what_is_wrong_and_bears_a_lost_loss() -> None:
    screen = io.StringIO()
    values = row(1000, lr=1e-3, skipped=3, skipped_steps=1, slowest_data_wait=0.5)
    del values["loss"]
    Log(None, 1000, out=screen, about=ABOUT).progress(values)
    assert screen.getvalue() == (
        "step 1000/1000  loss ?  100 pairs/s  ETA 0:00  data wait 50%  lr 1.00e-03  3 bad samples  1 skipped steps\n"
    )


def test_time_left_follows_the_recent_rate() -> None:
    pace = Pace(10)
    assert pace.seconds(5) is None
    for _ in range(100):
        pace.add(row(1, pairs_per_s=1.0))
    for _ in range(20):
        pace.add(row(1, pairs_per_s=50.0))
    assert pace.seconds(100) == pytest.approx(20)
    pace.add({"step": 1, "val/accuracy": 0.5})
    pace.add(row(1, pairs_per_s=25.0))  # pairs of 20 rows by their time
    assert pace.rate == pytest.approx(20 / (19 / 50 + 1 / 25))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "?"), (0, "0:00"), (65, "1:05"), (3600, "1:00:00"), (86399, "23:59:59"), (1e6, "11d 13h")],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("rate", "text"), [(0.0, "0"), (0.134, "0.13"), (2.96, "3"), (9.949, "9.9"), (9.96, "10"), (1523.4, "1,523")]
)
def test_rates(rate: float, text: str) -> None:
    assert per_second(rate) == text


def test_the_rate_of_a_slow_run_is_not_rounded_to_nothing() -> None:
    screen = io.StringIO()
    Log(None, 1000, out=screen, about=ABOUT).progress(row(10, pairs_per_s=0.134))
    assert "  0.13 pairs/s  " in screen.getvalue()


@pytest.mark.parametrize(
    ("rank", "to", "scale"), [(0, "file", 100.0), (0, "tensorboard", None), (1, "tensorboard", 100.0)]
)
def test_rank_0_alone_keeps_a_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, to: Any, scale: float | None
) -> None:
    """It knows from which scale on to warn, and hands its rows to TensorBoard where that is asked for."""
    abouts: list[About] = []
    monkeypatch.setattr(collectives, "rank", lambda: rank)
    monkeypatch.setattr(logging, "Alerts", lambda about: abouts.append(about) or SimpleNamespace(add=lambda row: []))
    monkeypatch.setattr(logging, "in_training", lambda out, say: lambda: (out / "mirrored").touch())
    base = default_recipe("siglip", "debug")
    recipe = replace(base, batch=24, steps=70, data=replace(base.data, bad_share=0.25))
    limit = None if scale is None else torch.tensor(scale).log()
    log = open_log(tmp_path, recipe, 3, RunOptions(log_to=to, quiet=scale is None), limit)
    log.row(row(4))
    assert log.steps == 70
    assert log.quiet == (rank == 1 or scale is None)
    assert (tmp_path / "metrics.jsonl").exists() == (rank == 0)
    assert (tmp_path / "mirrored").exists() == (rank == 0 and to == "tensorboard")
    if rank == 0:
        about = abouts[0]
        assert (about.batch, about.bad_share) == (24, 0.25)
        assert about.max_scale == (None if scale is None else pytest.approx(scale))


def test_a_log_that_cannot_be_kept(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match=r"metrics\.jsonl is a pipe: expected a file of metrics, or none\. Remove it"):
        Log(tmp_path / "metrics.jsonl", 10)
    log = Log(tmp_path / "gone" / "metrics.jsonl", 10, quiet=True)
    with pytest.raises(ValueError, match=r"cannot write .*metrics\.jsonl: No such file.*The last state is kept"):
        log.row(row(1))


def test_what_steps_reported_is_kept_with_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each number in its own precision; captions of all ranks, which rank 0 counts on."""
    monkeypatch.setattr(collectives, "add_up", lambda mine: 10 * mine)
    since = SinceRow([{"loss": torch.tensor(0.1, dtype=kind)} for kind in (torch.float64, torch.bfloat16)], 7)
    state = json.loads(json.dumps(since.state_dict()))
    assert state["captions"] == 70
    for rank, captions in ((0, 70), (1, 0)):
        monkeypatch.setattr(collectives, "rank", lambda rank=rank: rank)
        again = SinceRow()
        again.load_state_dict(state, torch.device("meta" if rank else "cpu"))
        assert again.captions == captions
        assert [report["loss"].dtype for report in again.reports] == [torch.float64, torch.bfloat16]
        assert {report["loss"].device.type for report in again.reports} == {"meta" if rank else "cpu"}
        if not rank:
            assert again.reports == since.reports


def test_memory_is_that_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3_000_000 if device.index == 1 else 0)
    assert meter.peak_memory(torch.device("cuda", 1)) == 3
    monkeypatch.setattr(meter.resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=2_000_000))
    monkeypatch.setattr(meter, "_file_pages", lambda: 0)
    for platform, megabytes in (("linux", 2048), ("darwin", 2)):  # kilobytes, bytes
        monkeypatch.setattr(meter.sys, "platform", platform)
        assert meter.peak_memory(torch.device("cpu")) == megabytes


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def batches(self) -> Iterator[Any]:
        for texts in (30, 34):
            self.now += 1.0  # the loader's
            yield Batch(torch.zeros(16, 1), Texts.pack([[1]] * texts), *[torch.zeros(0)] * 4, made_s=4.0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(meter, "time", clock)
    return clock


def measuring(clock: Clock) -> Meter:
    """Two steps: 2 s of waiting, 2 s of steps, 4 s of saving, 100 s of validation."""
    head = SimpleNamespace(log_scale=torch.zeros(1), bias=None)
    run: Any = SimpleNamespace(
        since_row=SinceRow(),
        step=0,
        recipe=SimpleNamespace(batch=16, steps=100, optim=OptimConfig(lr=0.5)),
        learner=SimpleNamespace(model=SimpleNamespace(head=head)),
        device=torch.device("cpu"),
        loader=SimpleNamespace(workers=2, order=Order(64, 16)),
        bad=[],
        truncated=5,
        skipped_steps=0,
    )
    guard: Any = SimpleNamespace(add=lambda step, report: None, look=lambda: None)
    two_steps = Meter(run, guard)
    for _ in two_steps.timed(clock.batches()):
        clock.now += 1.0
        run.step += 1
        two_steps.add({"loss": torch.tensor(float(run.step)), "gradient_norm": torch.tensor(1.0)}, 16)
    with two_steps.saving():
        clock.now += 4.0
    with two_steps.paused():
        clock.now += 100.0
    return two_steps


def measured(clock: Clock) -> dict[str, Any]:
    return measuring(clock).row()


def test_rates_leave_validation_out_and_count_saving(clock: Clock) -> None:
    found = measured(clock)
    assert found["pairs_per_s"] == 32 / 8
    assert found["data_wait"] == 2 / 8
    assert found["loader_pairs_per_s"] == 2 * 32 / (4 + 4)  # two workers, 4 s a batch
    assert found["save_s"] == 4
    assert found["captions"] == 64
    assert found["lr"] == 0.5 * schedule(1, 100, OptimConfig())
    assert 10 < found["memory"] < 1e6
    assert "slowest_data_wait" not in found


def test_data_wait_of_a_whole_run_counts_from_its_first_batch_on(clock: Clock) -> None:
    assert measuring(clock).data_wait() == 1 / 7  # workers start with the first batch


def test_of_several_ranks_the_slowest_tells(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    other = torch.tensor([[0.0] * 4, [60.0, 0.75, 1e6, 0.5]], dtype=torch.float64)
    monkeypatch.setattr(collectives, "ranks", lambda: 2)
    monkeypatch.setattr(collectives, "sum_over_ranks", lambda table: table + other)
    found = measured(clock)
    assert found["data_wait"] == 2 / 8
    assert found["slowest_data_wait"] == 0.75
    assert found["captions"] == 124
    assert found["memory"] == 1e6
    assert found["save_s"] == 4
    assert found["pairs_per_s"] == 2 * 32 / 8
    assert found["loader_pairs_per_s"] == 2 * 2 * 32 / 8


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells how much memory is pages of files")
def test_pages_of_files_are_no_memory_of_a_run(tmp_path: Path) -> None:
    """Stored tokens are mapped and read page by page, which looked like a leak."""
    size = 1 << 28
    path = tmp_path / "tokens"
    path.write_bytes(bytes(size))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages:
        assert not any(pages[n] for n in range(0, size, mmap.PAGESIZE))
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
        assert meter.peak_memory(torch.device("cpu")) < resident - 0.9 * size / 1e6
