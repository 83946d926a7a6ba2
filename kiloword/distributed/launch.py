"""Launch: rank and address of this process, from the environment set by torchrun or SLURM's `srun`."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path

from kiloword.terminal import shown

PORTS = range(12_000, 32_000)  # below the ephemeral ports of Linux
_PARENT = os.getppid()  # read at the start of the process, seconds before torch is imported
TORCH_LOG = "TORCH_CPP_LOG_LEVEL"  # effective only where it is set before torch is imported
_NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def adopt(environment: MutableMapping[str, str] = os.environ) -> int:
    """Set the variables of torchrun in a SLURM job step; returns the number of ranks.

    RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT have precedence where they are set, so that torchrun works inside
    `srun`. A batch script itself is not a job step: without `srun` there is one rank.
    Raises: ValueError when the variables contradict each other.
    """
    if "RANK" not in environment and _number(environment, "SLURM_STEP_NUM_TASKS", 1) > 1:
        _from_slurm(environment)
    ranks = _number(environment, "WORLD_SIZE", 1)
    if ranks > 1:
        environment.setdefault(TORCH_LOG, "ERROR")  # otherwise torch prints a stack when a peer exits
        missing = [name for name in _NAMES if name not in environment]
        if missing:
            raise ValueError(
                f"WORLD_SIZE is {ranks}, but not set: {', '.join(missing)}. Start with torchrun or srun, or set all of "
                f"{', '.join(_NAMES)}."
            )
    rank = _number(environment, "RANK", 0)
    if rank >= ranks:
        raise ValueError(f"RANK is {rank}, but WORLD_SIZE is {ranks}: expected a rank from 0 to {ranks - 1}.")
    return ranks


def _from_slurm(environment: MutableMapping[str, str]) -> None:
    tasks, rank = _number(environment, "SLURM_STEP_NUM_TASKS", 1), _number(environment, "SLURM_PROCID", 0)
    world_size = _number(environment, "WORLD_SIZE", tasks)
    if world_size != tasks:
        raise ValueError(
            f"WORLD_SIZE is {world_size}, but srun started {tasks} tasks: unset it, or start torchrun by `srun "
            "--ntasks-per-node=1 torchrun ...`."
        )
    job, step = _number(environment, "SLURM_JOB_ID", 0), _number(environment, "SLURM_STEP_ID", 0)
    first = first_node(environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST") or "")
    environment["RANK"], environment["WORLD_SIZE"] = str(rank), str(tasks)
    environment.setdefault("LOCAL_RANK", environment.get("SLURM_LOCALID", "0"))
    environment.setdefault("MASTER_ADDR", first or environment.get("SLURM_LAUNCH_NODE_IPADDR") or "127.0.0.1")
    environment.setdefault("MASTER_PORT", str(PORTS[(job * 7 + step) % len(PORTS)]))


def announced(rank: int, ranks: int, port: int) -> dict[str, str]:
    """The environment that torchrun would set for one of several processes on this machine."""
    about = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    return {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in about.items()}}


def free_port() -> int:
    """A free port of this machine."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def orphaned() -> bool:
    """Whether the torchrun that started this rank was killed; the rank must not join the next run."""
    return "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != _PARENT


def explain(message: str) -> None:
    """Record why this rank ends, for the report that torchrun prints at its end."""
    message = shown(message)
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        about = {"py_callstack": message, "timestamp": str(int(time.time()))}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": about}}), encoding="utf-8")


def first_node(nodes: str) -> str:
    """First host of a SLURM node list: gpu[07-09,12],login -> gpu07."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+))?", nodes)
    return "" if match is None else match[1] + (match[2] or "")


def _number(environment: MutableMapping[str, str], name: str, missing: int) -> int:
    value = environment.get(name, str(missing))
    if not (value.isascii() and value.isdecimal()):
        raise ValueError(f"{name} is {value!r}: expected a whole number.")
    return int(value)
