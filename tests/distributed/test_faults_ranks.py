"""What happens around a run of several processes: all end, with one sentence that names the rank (docs/faults.md).

Ranks are started as mpirun or SLURM would, where nobody ends the rest, and by torchrun.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from kiloword.distributed import launch
from kiloword.training.log import read_metrics
from states import load_state

pytestmark = pytest.mark.slow

TRAIN = ["--size", "debug", "--batch", "12", "--log-every", "1", "--save-every", "1", "--vocab", "300"]

# One rank, with a fault in its third step: RANK:KIND in the environment says whose and what. The ranks begin together,
# so that on a loaded machine none comes later than a short --timeout.
SCRIPT = """
import os, signal, sys, time
from pathlib import Path
import kiloword.training.loop as loop
from kiloword.cli.main import main
from kiloword.data.loader import Loader

rank, _, kind = os.environ.get("FAULT", "").partition(":")
calls = []

def fault():
    calls.append(1)
    if len(calls) != 3 or os.environ.get("RANK", os.environ.get("SLURM_PROCID")) != rank:
        return
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if kind == "refuses":
        raise ValueError("photos/0007.tar cannot be read.")
    if kind == "bug":
        raise KeyError("teacher")
    if kind == "loading":
        time.sleep(600)

where, name = (Loader, "batch") if kind == "loading" else (loop, "backward")
real = getattr(where, name)

def hit(*args):
    fault()
    return real(*args)

setattr(where, name, hit)
gate, ranks = Path(os.environ["GATE"]), int(os.environ["GATE_RANKS"])
(gate / str(os.getpid())).touch()
while len(list(gate.iterdir())) < ranks:
    time.sleep(0.01)
main()
"""


def words(out: Path, *more: object) -> list[str]:
    return ["train", "siglip", *TRAIN, "--data", "scenes?n=64", "--out", str(out), *map(str, more)]


def srun(rank: int, ranks: int, port: int) -> dict[str, str]:
    about = {"PROCID": rank, "LOCALID": rank, "STEP_NUM_TASKS": ranks, "JOB_ID": port, "STEP_ID": 0}
    return {f"SLURM_{name}": str(value) for name, value in about.items()} | {"SLURM_STEP_NODELIST": "localhost"}


@contextmanager
def started(
    flags: list[str], ranks: int, fault: str = "", by: Callable[[int, int, int], Mapping[str, str]] = launch.announced
) -> Iterator[list[subprocess.Popen[str]]]:
    port, gate = launch.free_port(), tempfile.mkdtemp()
    quiet = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    quiet |= {"FAULT": fault, "GATE": gate, "GATE_RANKS": str(ranks)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, *flags],
            env=quiet | dict(by(rank, ranks, port)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()
        shutil.rmtree(gate)


def ended(process: subprocess.Popen[str], seconds: float = 240) -> tuple[int, str]:
    """The exit code, and what it said that is no progress."""
    said = process.communicate(timeout=seconds)[1]
    progress = re.compile(r"step |alert |\S+ goes on from step \d+ of \d+\.$")
    kept = [line for line in said.splitlines() if not progress.match(line)]
    print(process.returncode, *kept, sep="\n")
    return process.returncode, "\n".join(kept)


def goes_on(flags: list[str], out: Path, ranks: int = 1) -> None:
    """The same command, with any number of ranks, makes every step once."""
    with started([*flags, "--steps", "6"], ranks) as processes:
        assert [ended(process) for process in processes] == [(0, "")] * ranks
    assert [row["step"] for row in read_metrics(out / "metrics.jsonl")] == list(range(1, 7))
    assert load_state(out / "state", pytest.fail) is not None


@pytest.mark.parametrize(
    ("fault", "silent", "code", "says"),
    [
        ("1:stopped", 1, 2, r"rank 1: no heartbeat; it was last [a-z0-9 ]+\. It was killed, or its machine hangs"),
        (
            "0:stopped",
            0,
            2,
            r"no answer from 127\.0\.0\.1:\d+, the rendezvous of the ranks: rank 0 or its torchrun was",
        ),
        (
            "1:loading",
            1,
            2,
            r"rank 1: it has been waiting for its data of step 3 for \d+ s; the others stopped waiting",
        ),
        ("1:refuses", None, 2, r"rank 1: photos/0007\.tar cannot be read\.$"),
        ("1:bug", 1, 2, r"rank 1: KeyError: 'teacher'$"),
    ],
)
def test_one_rank_is_at_fault(tmp_path: Path, fault: str, silent: int | None, code: int, says: str) -> None:
    """`silent`: whose own words are not looked at."""
    with started(words(tmp_path, "--timeout", 5, "--steps", 6), 2, fault) as processes:
        found = {rank: ended(process) for rank, process in enumerate(processes) if rank != silent}
    assert all(one[0] == code for one in found.values())
    assert re.match(rf"kiloword: {says}", "\n".join(said for _, said in found.values()).strip())
    state = load_state(tmp_path / "state", pytest.fail)
    assert (0 if state is None else state[1]["step"]) in (1, 2)  # the last one may have been on its way


def test_three_ranks_agree_who_died(tmp_path: Path) -> None:
    flags = words(tmp_path, "--timeout", 600)
    with started([*flags, "--steps", "6"], 3, "2:killed") as processes:  # a closed connection needs no time-out
        (first, said), (second, quiet) = ended(processes[0]), ended(processes[1])
    assert (first, second, quiet) == (2, 2, "")
    assert said.startswith("kiloword: rank 2: no heartbeat")
    goes_on(flags, tmp_path, 2)


def test_under_torchrun_one_sentence_ends_all(tmp_path: Path) -> None:
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "kiloword"]
    flags = words(tmp_path, "--steps", 6, "--extra-captions", tmp_path / "none.parquet")
    done = subprocess.run([*run, *flags], capture_output=True, text=True, timeout=240)
    said = f"{tmp_path}/none.parquet"
    print(done.stderr)
    assert done.returncode == 1
    (sentence,) = [line for line in done.stderr.splitlines() if line.startswith("kiloword: ")]
    assert said in sentence
    assert re.search(rf"traceback : .*{re.escape(said)}", done.stderr)  # in torchrun's own report


def test_a_dry_run_of_several_ranks_is_printed_once(tmp_path: Path) -> None:
    for batch, code, says in (
        (12, 0, "ranks      2, 2 x 3 images each, ddp"),
        (9, 2, "9 does not divide over 2 ranks"),
    ):
        with started(words(tmp_path, "--dry-run", "--micro", 3, "--batch", batch), 2) as processes:
            done = [process.communicate(timeout=240) for process in processes]
            assert [process.returncode for process in processes] == [code] * 2
        assert sum((out + said).count(says) for out, said in done) == 1
        assert not list(tmp_path.iterdir())


def test_sigterm_to_all_ranks_saves(tmp_path: Path) -> None:
    """As Kubernetes and SLURM do."""
    flags = words(tmp_path, "--workers", 1)
    with started([*flags, "--steps", "100000"], 2) as processes:
        while not (rows := read_metrics(tmp_path / "metrics.jsonl")) or rows[-1]["step"] < 3:
            assert all(process.poll() is None for process in processes)
            time.sleep(0.05)
        for process in processes:
            process.send_signal(signal.SIGTERM)
        (code, said), (other, quiet) = (ended(process) for process in processes)
    assert (code, other, quiet) == (143, 143, "")
    found = load_state(tmp_path / "state", pytest.fail)
    assert found is not None
    assert re.search(rf"stopped after step {found[1]['step']}; the state is saved", said)


def test_srun_starts_ranks(tmp_path: Path) -> None:
    with started([*words(tmp_path), "--steps", "3"], 2, by=srun) as processes:
        outs = [process.communicate(timeout=240) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outs
    assert [out for out, _ in outs] == [f"model: {tmp_path}/model\n", ""]
    assert read_metrics(tmp_path / "metrics.jsonl")[-1]["step"] == 3


def test_the_port_is_taken(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with started(words(tmp_path), 1, by=lambda rank, ranks, _: launch.announced(0, 2, port)) as (process,):
            code, said = ended(process)
    assert code == 2
    assert said.startswith(f"kiloword: the rendezvous at port {port} of 127.0.0.1 failed: another process has it")


def test_a_rank_that_does_not_come(tmp_path: Path) -> None:
    flags = [*words(tmp_path), "--steps", "3", "--timeout", "5"]
    with started(flags, 1, by=lambda rank, ranks, port: launch.announced(0, 2, port)) as (process,):
        assert ended(process) == (2, "kiloword: rank 1 of 2 did not join within 5 s.")


def test_a_small_disk(tmp_path: Path) -> None:
    """A real one, where this user may mount one: the run ends with a sentence, and goes on when there is room."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("no right to mount a file system")
    try:
        flags = words(disk / "out")
        with started([*flags, "--steps", "6"], 1, by=lambda *_: {}) as (process,):
            code, said = ended(process)
        assert code == 2
        assert re.match(r"kiloword: cannot write .*: No space left on device. What was there before is kept", said)
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        goes_on(flags, disk / "out")
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_the_terminal_goes(tmp_path: Path) -> None:
    """SIGHUP, and nobody reads what the run says any more: the state is saved."""
    flags = words(tmp_path)
    with started([*flags, "--steps", "100000"], 1, by=lambda *_: {}) as (process,):
        while not (rows := read_metrics(tmp_path / "metrics.jsonl")) or rows[-1]["step"] < 3:
            assert process.poll() is None
            time.sleep(0.05)
        assert process.stderr is not None
        process.stderr.close()
        process.send_signal(signal.SIGHUP)
        process.wait(timeout=120)
        process.stderr = None
    found = load_state(tmp_path / "state", pytest.fail)
    assert found is not None
    assert found[1]["step"] >= 3
