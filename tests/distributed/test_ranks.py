"""Ranks as processes: one model from any number of them, and a rank that dies ends all."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from commands import torchrun
from kiloword.distributed import launch
from kiloword.training.log import read_metrics
from runs import rows, state

TRAIN = ["train", "siglip", "--size", "debug", "--data", "scenes?levels=1&n=200", "--batch", "16", "--log-every", "1"]
TRAIN += ["--model.text.context", "5", "--vocab", "300"]


FAULT = """
import os, signal
import torch
from kiloword.cli.main import main

real, calls = torch.Tensor.backward, []

def backward(*args):
    calls.append(1)
    if len(calls) == 3 and os.environ["RANK"] == "1" and "FAULT" in os.environ:
        if os.environ["FAULT"] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("0007.tar cannot be read.")
    return real(*args)

torch.Tensor.backward = backward
main()
"""


@pytest.mark.slow
def test_torchrun_reports_the_rank_that_failed_and_the_same_command_goes_on(tmp_path: Path) -> None:
    script, out = tmp_path / "train.py", tmp_path / "out"
    script.write_text(FAULT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    command += [*TRAIN, "--steps", "6", "--save-every", "1", "--out", str(out)]
    for fault, why in (("refuses", "0007.tar cannot be read"), ("killed", "Signal 9")):
        done = subprocess.run(command, env={**os.environ, "FAULT": fault}, capture_output=True, text=True, timeout=240)
        cause = done.stderr.partition("Root Cause")[2]
        assert done.returncode == 1
        assert re.search(rf"rank +: 1 .*{why}", cause, re.DOTALL), done.stderr
        assert done.stderr.count("kiloword: ") == 1  # of the first rank, and torchrun's report for the other
    subprocess.run(command, capture_output=True, timeout=240, check=True)
    assert [row["step"] for row in rows(out) if "lr" in row] == list(range(1, 7))


def trained(ranks: int, out: Path, *more: str) -> dict[str, torch.Tensor]:
    done = torchrun(ranks, *TRAIN, "--precision", "fp64", "--out", out, *more)
    assert done.returncode == 0, done.stderr[-3000:]
    return load_file(out / "model" / "model.safetensors")


@pytest.mark.slow
def test_two_ranks_make_the_model_that_one_makes(tmp_path: Path) -> None:
    """Also in micro-batches, and where a run of two ranks goes on with one."""
    constant = ["--optim.warmup", "2", "--optim.final-lr", "1"]  # the length changes no rate
    one = trained(1, tmp_path / "one", *constant, "--steps", "6")
    two = trained(2, tmp_path / "two", *constant, "--steps", "6", "--micro", "4")
    trained(2, tmp_path / "cut", *constant, "--steps", "3")
    rest = trained(1, tmp_path / "cut", *constant, "--steps", "6", "--extend")
    alone, both = (read_metrics(tmp_path / out / "metrics.jsonl")[-1] for out in ("one", "two"))
    assert alone["truncated"] == both["truncated"] > 0
    assert alone["captions"] == both["captions"] == 16
    assert both["slowest_data_wait"] >= both["data_wait"]
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=0, atol=1e-6, msg=name)
        torch.testing.assert_close(rest[name], value, rtol=0, atol=1e-6, msg=name)


@contextmanager
def srun(*flags: object) -> Iterator[list[subprocess.Popen[str]]]:
    """Two ranks as `srun` starts them."""
    about = {"STEP_NUM_TASKS": 2, "JOB_ID": launch.free_port(), "STEP_ID": 0, "STEP_NODELIST": "localhost"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "kiloword", *TRAIN, *map(str, flags)],
            env=os.environ | {f"SLURM_{k}": str(v) for k, v in {**about, "PROCID": rank, "LOCALID": rank}.items()},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.slow
def test_sigterm_to_all_ranks_saves(tmp_path: Path) -> None:
    """As Kubernetes and SLURM do."""
    with srun("--workers", 1, "--out", tmp_path, "--steps", 100_000) as processes:
        while len(rows(tmp_path)) < 3:
            assert all(process.poll() is None for process in processes)
            time.sleep(0.05)
        for process in processes:
            process.send_signal(signal.SIGTERM)
        said = [process.communicate(timeout=240)[1] for process in processes]
        assert [process.returncode for process in processes] == [143, 143]
    assert all(f"stopped after step {state(tmp_path)[1]['step']}" in one for one in said)


@pytest.mark.slow
def test_a_dry_run_of_several_ranks_is_printed_once(tmp_path: Path) -> None:
    with srun("--out", tmp_path / "out", "--steps", 3, "--dry-run", "--micro", 4) as processes:
        printed = [process.communicate(timeout=240)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert "ranks      2, 2 x 4 images each, ddp" in printed[0]
    assert printed[1] == ""
    assert not (tmp_path / "out").exists()


def test_srun_is_understood() -> None:
    about = {"STEP_NUM_TASKS": "4", "PROCID": "2", "LOCALID": "0", "JOB_ID": "4711", "STEP_ID": "1"}
    about["STEP_NODELIST"] = "gpu[07-09,12],login"
    step = {f"SLURM_{name}": value for name, value in about.items()}
    environment = dict(step)
    assert launch.adopt(environment) == launch.adopt(environment) == 4
    named = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")
    assert [environment[name] for name in named] == ["2", "4", "0", "gpu07"]
    other = {**step, "SLURM_STEP_ID": "2"}
    launch.adopt(other)
    assert other["MASTER_PORT"] != environment["MASTER_PORT"]
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert launch.adopt(both := {**step, **torchrun}) == 2
    assert both["RANK"] == "1"
    assert launch.adopt({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}) == 1  # a batch script is no step
    assert [launch.first_node(n) for n in ("a-b3", "n[1,3]", "n[01-02]x", "")] == ["a-b3", "n1", "n01", ""]
    with pytest.raises(ValueError, match="WORLD_SIZE is 3, but srun started 4 tasks"):
        launch.adopt({**step, "WORLD_SIZE": "3"})
