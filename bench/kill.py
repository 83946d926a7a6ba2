"""Kill runs at random moments, go on by the same command, compare with the run that nothing interrupts.

A run is killed many times: the whole group or one rank, while it starts, trains or saves. Then it goes on to its end:
with as many ranks all tensors, files and rows are the same bits; with another number they agree to --close.

    python bench/kill.py --kills 100 --ranks 2 [--parallel fsdp] [--method siglip] [--seed 0]
    python bench/kill.py --kills 20 --ranks 2 1 4 --precision fp64 --close 1e-6
    python bench/kill.py --exits 50 --ranks 4
    python bench/kill.py --kills 5 --ranks 1 --torchrun 0 --device cuda --precision bf16

Ranks come from torchrun for every n-th start (--torchrun n), else by fork from this process, which has loaded torch.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from safetensors.torch import load_file

from kiloword.cli import main as cli
from kiloword.distributed import launch
from kiloword.models.states import newest, states
from kiloword.runs.rows import read_metrics
from kiloword.training import loop  # noqa: F401 (train is loaded once, for all forks)

TIMED = ("pairs_per_s", "loader_pairs_per_s", "data_wait", "slowest_data_wait", "memory", "save_s", "time", "restarts")
PATIENCE_S = 600.0  # for one run on a loaded machine
ALONE_S = 60.0  # that ranks get to notice the death of another one


@dataclass(frozen=True)
class Start:
    """One start of a run."""

    out: Path
    words: list[str]  # of the command line
    ranks: int
    torchrun: bool
    log: Path

    def begin(self) -> list[int]:
        """Process ids: of torchrun, or of all ranks. They stand in a group of their own."""
        words = [*self.words, "--out", str(self.out)]
        if self.torchrun:
            run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.ranks)]
            with self.log.open("ab") as log:
                command = [sys.executable, *run, "-m", "kiloword", *words]
                return [subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True).pid]
        port = launch.free_port()
        pids: list[int] = []
        for rank in range(self.ranks):
            pid = os.fork()
            if pid == 0:
                self._be(rank, port, pids[0] if pids else 0, words)
            if not pids:
                os.setpgid(pid, pid)
            pids.append(pid)
        return pids

    def _be(self, rank: int, port: int, group: int, words: list[str]) -> None:
        """The rest of a forked process's life; leaves as a script does, through the interpreter's own end."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setpgid(0, group)
        log = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ |= launch.announced(rank, self.ranks, port)
        cli.main(words)
        sys.exit(0)


def ended(pids: list[int], codes: dict[int, int]) -> bool:
    """Whether all are gone; their exit codes, negative for a signal, are filled in."""
    for pid in pids:
        if pid not in codes:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
    return len(codes) == len(pids)


@contextmanager
def running(start: Start) -> Iterator[tuple[list[int], dict[int, int]]]:
    """Begin: process ids, and exit codes for `ended` to fill in. However the block ends, what is left is killed."""
    pids: list[int] = start.begin()
    codes: dict[int, int] = {}
    try:
        yield pids, codes
    finally:
        _kill_all(pids, codes, _ranks(start, pids, codes))


def finish(start: Start) -> list[int]:
    """Run to the end. Returns: exit codes. Raises: SystemExit at a hang of PATIENCE_S, when all is killed."""
    until = time.monotonic() + PATIENCE_S
    with running(start) as (pids, codes):
        while not ended(pids, codes):
            if time.monotonic() > until:
                raise SystemExit(f"{start.out}: hangs; see {start.log}")
            time.sleep(0.005)
    return list(codes.values())


def kill(start: Start, rng: random.Random) -> str | None:
    """Begin and kill at a random moment. Returns: what was killed and when; None when the run ended before.

    Raises: AssertionError when the run failed by itself, and at a hang of PATIENCE_S, when all is killed.
    """
    steps = last_step(start.out)
    early = rng.random() < 0.1
    after, delay = rng.randrange(1, 4), rng.random() * (2.0 if early else 0.3)
    until = time.monotonic() + PATIENCE_S
    with running(start) as (pids, codes):
        while not early and last_step(start.out) < steps + after:
            if ended(pids, codes):
                return _ended_itself(start, codes)
            assert time.monotonic() < until, f"hangs; see {start.log}"
            time.sleep(0.001)
        time.sleep(delay)
        if ended(pids, codes):
            return _ended_itself(start, codes)
        how = _kill(start, pids, codes, rng)
    return f"{how[0]}, {'starting' if early else how[1]}"


def _kill(start: Start, pids: list[int], codes: dict[int, int], rng: random.Random) -> tuple[str, str]:
    """Kill one rank, which the others have to notice, or all. Returns: what was killed, and what the run was at."""
    one, ranks = rng.random() < 0.3, _ranks(start, pids, codes)
    if one and ranks:
        try:
            os.kill(rng.choice(ranks), signal.SIGKILL)
        except ProcessLookupError:
            one = False
    moment = where(start.out)
    until = time.monotonic() + ALONE_S
    while one and not ended(pids, codes) and time.monotonic() < until:
        time.sleep(0.005)
    alone = one and not ended(pids, codes)
    _kill_all(pids, codes, ranks)
    what = (f"one rank, others waited over {ALONE_S:.0f} s" if alone else "one rank") if one else "all ranks"
    return what, moment


def _ended_itself(start: Start, codes: dict[int, int]) -> str | None:
    """None. Raises: AssertionError when the run failed."""
    assert not any(codes.values()), f"exit codes {list(codes.values())} of a run that nothing killed; see {start.log}"
    return None


def _kill_all(pids: list[int], codes: dict[int, int], ranks: list[int]) -> None:
    """What is left of a run; torchrun puts each rank into a session of its own."""
    for pid in (*ranks, *pids):
        if pid not in codes:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    while not ended(pids, codes):
        time.sleep(0.002)
    while any(Path(f"/proc/{pid}").exists() and not _zombie(pid) for pid in ranks):
        time.sleep(0.002)


def _ranks(start: Start, pids: list[int], codes: dict[int, int]) -> list[int]:
    """Process ids of the ranks that are not known to have ended."""
    left = [pid for pid in pids if pid not in codes]
    return [rank for pid in left for rank in _children(pid)] if start.torchrun else left


def _children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(p) for p in found.read_text().split()] if found.exists() else []


def _zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def last_step(out: Path) -> int:
    """The step of the last whole row of a run's log; 0 without one."""
    rows = read_metrics(out / "metrics.jsonl")
    return int(rows[-1]["step"]) if rows else 0


def where(out: Path) -> str:
    """What the run was at, by its files."""
    folder = out / "state"
    whole = {path.stem for path in states(folder)}
    parts = [p for p in folder.glob("step-*") if p.is_dir() and p.name not in whole]
    writing = [*parts, *folder.rglob(".*.tmp"), *(out / "model").glob(".*.tmp")]
    return "saving" if writing else "training"


def compare(out: Path, reference: Path, close: float) -> tuple[float, int]:
    """The largest difference between two finished runs, and the number of rows of their logs.

    Rows are compared in all but times and rates. Raises: AssertionError, which names it, when something differs by more
    than `close`, or is NaN, be it in both.
    """
    worst = 0.0
    found, expected = (_state(folder) for folder in (out, reference))
    if close == 0:
        assert found[1] == expected[1], "numbers or checksums of the states differ"
    pairs = [(found[0], expected[0]), *_models(out, reference)]
    for mine, theirs in pairs:
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            assert mine[name].dtype == value.dtype, name
            assert mine[name].shape == value.shape, name
            apart = _apart(mine[name], value)
            assert apart <= close, f"{name}: {apart} apart"  # not so for NaN
            assert close or torch.equal(mine[name], value), name
            worst = max(worst, apart)
    rows, wanted = (_rows(folder) for folder in (out, reference))
    assert wanted, "no log to compare"
    assert [row["step"] for row in rows] == [row["step"] for row in wanted], "rows twice, lost or out of order"
    for row, want in zip(rows, wanted, strict=True):
        assert row.keys() == want.keys()
        assert close or row == want, f"row {want} is {row}"
        apart = _apart(*(torch.tensor(r["loss"], dtype=torch.float64) for r in (row, want)))
        assert apart <= close, f"loss of step {want['step']}: {apart} apart, {row['loss']} for {want['loss']}"
        worst = max(worst, apart)
    return worst, len(rows)


def _apart(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference of their values: 0 of no values and of equal infinities, NaN when one is NaN."""
    mine, theirs = mine.double(), theirs.double()
    gaps = torch.where(mine == theirs, 0.0, (mine - theirs).abs())
    return float(gaps.max()) if gaps.numel() else 0.0


def _rows(out: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k not in TIMED} for row in read_metrics(out / "metrics.jsonl")]


def _state(out: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    stored = newest(out / "state", print)
    assert stored is not None
    return {name: stored.whole(name) for name in stored.specs}, stored.numbers


def _models(out: Path, reference: Path) -> list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]:
    for name in ("config.json", "tokenizer.json"):
        assert (out / "model" / name).read_bytes() == (reference / "model" / name).read_bytes(), name
    return [(load_file(out / "model" / "model.safetensors"), load_file(reference / "model" / "model.safetensors"))]


def words(args: argparse.Namespace) -> list[str]:
    """The command of every run, `train` first; where it writes is left to `Start`."""
    sizes = f"--data scenes?n=256&captions=2 --size debug --batch 16 --steps {args.steps} --optim.ema 0.9"
    saves = f"--log-every {args.log_every} --save-every {args.save_every}"
    how = f"--precision {args.precision} --parallel {args.parallel} --device {args.device}"
    return ["train", args.method, *f"{sizes} {saves} {how}".split(), *args.more]


def exits(args: argparse.Namespace, folder: Path) -> None:
    """Clean ends: every rank must leave with 0 and say nothing of aborting.

    Args: folder: gets a folder and a log of every run. Raises: AssertionError when one does not; SystemExit at a hang.
    """
    seen: Counter[int] = Counter()
    for n in range(args.exits):
        log = folder / f"exit-{n}.log"
        by_torchrun = args.torchrun > 0 and n % args.torchrun == 0
        ran = Start(folder / f"exit-{n}", words(args), args.ranks[0], by_torchrun, log)
        codes = finish(ran)
        log_text = log.read_text()
        seen.update(codes)
        assert not any(codes), f"{codes}; see {log}"
        assert "terminate called" not in log_text, f"see {log}"
        assert "SIGABRT" not in log_text, f"see {log}"
    print(f"{args.exits} runs of {args.ranks[0]} ranks ended: exit codes {dict(seen)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--runs", type=int, default=1, help="over which the kills are spread")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="the first is the whole run's; starts choose")
    parser.add_argument("--exits", type=int, default=0, help="end runs this often instead")
    parser.add_argument("--method", default="siglip")
    parser.add_argument("--parallel", default="ddp")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=2)
    parser.add_argument("--log-every", type=int, default=3, help="steps a row: not a divisor of --save-every")
    parser.add_argument("--close", type=float, default=0.0)
    parser.add_argument("--torchrun", type=int, default=5, help="every n-th start; 0: none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("more", nargs="*", help="more flags of train, behind --")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # bench/gpu.py's, at its limit: ranks are killed first
    folder = args.out or Path(tempfile.mkdtemp(prefix="kill-"))
    folder.mkdir(parents=True, exist_ok=True)
    if args.exits:
        exits(args, folder)
        return
    killed(args, folder)


def killed(args: argparse.Namespace, folder: Path) -> None:
    """Make the whole run, then kill others, let each end and compare it; prints a line for each and counts at the end.

    Args: folder: gets a folder and a log of every run. Raises: AssertionError when a run fails or differs, or one that
    is to be killed hangs; SystemExit when one that is to end hangs.
    """
    reference = Start(folder / "whole", words(args), args.ranks[0], False, folder / "whole.log")
    assert not any(finish(reference)), f"see {reference.log}"
    rng, seen, starts, left, run = random.Random(args.seed), Counter[str](), 0, args.kills, 0
    while left > 0:
        out, here = folder / f"run-{run}", 0
        while here < -(-args.kills // args.runs) and left > 0:
            starts += 1
            by_torchrun = args.torchrun > 0 and starts % args.torchrun == 0
            ranks = rng.choice(args.ranks)
            how = kill(Start(out, words(args), ranks, by_torchrun, folder / f"run-{run}.log"), rng)
            if how is None:
                break  # it ended: the next run takes the rest of the kills
            seen[f"{'torchrun' if by_torchrun else 'fork'}: {how}"] += 1
            here, left = here + 1, left - 1
        codes = finish(Start(out, words(args), rng.choice(args.ranks), False, folder / f"run-{run}.log"))
        assert not any(codes), f"{codes}; see {folder / f'run-{run}.log'}"
        worst, rows = compare(out, reference.out, args.close)
        same = f"{worst:.1e} apart at most, {rows} rows of the log"
        print(f"run {run}: killed {here} times, then as the whole run: {same}", flush=True)
        run += 1
    print(json.dumps({"kills": args.kills, "runs": run, **dict(sorted(seen.items()))}, indent=2), flush=True)


if __name__ == "__main__":
    main()
