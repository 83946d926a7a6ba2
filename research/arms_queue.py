"""Runs of an experiment as processes of their own, `--jobs` at a time; ended together, and resumed together."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import IO

from kiloword.terminal import warn
from research import arms_rows as rows
from research.arms import TUNING, Arm, Experiment, Options, command

THREADS = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}  # equal losses need equal numbers of threads
POLL_S = 0.2

Process = subprocess.Popen[bytes]


def run_all(experiment: Experiment, options: Options) -> None:
    """Every arm and seed that is not finished, seed by seed. Raises: ValueError when runs failed, naming their logs."""
    options.out.mkdir(parents=True, exist_ok=True)
    if experiment.first is not None:
        _run([("first", options.out / "first.log")], experiment, options)
    done = rows.read(options.out)
    arms = experiment.chosen(options)
    jobs = [(arm, seed) for seed in options.seeds for arm in arms if arm.seed in (None, seed) or seed == TUNING]
    todo = [(arm, seed) for arm, seed in jobs if rows.finished(done, arm, seed, options) is None]
    _say(f"{len(jobs) - len(todo)} of {len(jobs)} runs are finished, {len(todo)} to do")
    _run([_named(options.out, arm, seed) for arm, seed in todo], experiment, options)


def _named(out: Path, arm: Arm, seed: int) -> tuple[str, Path]:
    folder = rows.folder_of(out, arm, seed)
    return f"{arm.name}:{seed}", folder / "log.txt"


def _run(todo: Sequence[tuple[str, Path]], experiment: Experiment, options: Options) -> None:
    """Jobs (what `--only` names, log), at most `options.jobs` at a time."""
    waiting, running, failed = list(todo), dict[Process, tuple[str, Path]](), list[Path]()
    with _ended_together(running):
        while waiting or running:
            while waiting and len(running) < max(1, options.jobs):
                name, log = waiting.pop(0)
                log.parent.mkdir(parents=True, exist_ok=True)
                with log.open("ab") as file:
                    running[_process(_words(name, experiment, options), file)] = name, log
            time.sleep(POLL_S)
            for process in [process for process in running if process.poll() is not None]:
                name, log = running.pop(process)
                failed += [log] if process.returncode else []
                state = f"failed, see {log}" if process.returncode else "finished"
                _say(f"{name} {state}; {len(waiting) + len(running)} to do")
    if failed:
        raise ValueError(f"{len(failed)} of {len(todo)} runs failed: {_last_line(failed[0])} ({failed[0]})")


def _words(name: str, experiment: Experiment, options: Options) -> list[str]:
    return command(experiment, replace(options, only=name, arms=(), seeds=(0,)))


def _process(words: Sequence[str], output: IO[bytes] | None = None) -> Process:
    return subprocess.Popen(words, env=os.environ | THREADS, stdout=output, stderr=output)


@contextmanager
def _ended_together(running: Collection[Process]) -> Iterator[None]:
    """However this ends, no run stays behind; each saves its state first."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    # SIGINT too: a script started in the background inherits that it is ignored
    before = {s: signal.signal(s, interrupt) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
        for process in running:
            process.terminate()
        for process in running:
            process.wait()


def check_all(experiment: Experiment, options: Options) -> None:
    """Repeat the first steps of every arm's first finished seed.

    Raises: ValueError when any has other losses or cannot be checked, and when no arm has a row.
    """
    done, codes = rows.read(options.out), dict[str, int]()
    for arm in experiment.chosen(options):
        seed = next((s for s in options.seeds if rows.finished(done, arm, s) is not None), None)
        if seed is not None:
            codes[arm.name] = _code(f"{arm.name}:{seed}", experiment, options)
    if not codes:
        raise ValueError(f"{options.out} has no row of these arms and seeds: there is nothing to check.")
    changed = ", ".join(name for name, code in codes.items() if code == rows.OTHER_LOSSES)
    failed = ", ".join(name for name, code in codes.items() if code not in (0, rows.OTHER_LOSSES))
    problems = [f"rows of {changed} are of code that computed other losses: run them again."] if changed else []
    problems += [f"rows of {failed} could not be checked, see above."] if failed else []
    if problems:
        raise ValueError(" ".join(problems))


def _code(name: str, experiment: Experiment, options: Options) -> int:
    """How the process of a check ends, which does not outlive this one."""
    running = list[Process]()
    with _ended_together(running):
        running.append(_process(_words(name, experiment, options)))
        return running[0].wait()


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"


def _say(sentence: str) -> None:
    warn(sentence)
