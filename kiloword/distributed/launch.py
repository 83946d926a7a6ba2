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

PORTS = range(12_000, 32_000)  # below the ephemeral ports of Linux
TORCH_LOG = "TORCH_CPP_LOG_LEVEL"  # effective only where it is set before torch is imported


def adopt(environment: MutableMapping[str, str] = os.environ) -> int:
    """Set the variables of torchrun in a SLURM job step; returns the number of ranks.

    Those of torchrun have precedence where they are set, so that it works inside `srun`. A batch script itself is not a
    job step: without `srun` there is one rank. Raises: ValueError when WORLD_SIZE contradicts SLURM.
    """
    tasks = environment.get("SLURM_STEP_NUM_TASKS", "1")
    if "RANK" not in environment and tasks != "1":
        if environment.setdefault("WORLD_SIZE", tasks) != tasks:
            raise ValueError(
                f"WORLD_SIZE is {environment['WORLD_SIZE']}, but srun started {tasks} tasks: unset it, or start "
                "torchrun by `srun --ntasks-per-node=1 torchrun ...`."
            )
        environment["RANK"] = environment["SLURM_PROCID"]
        job, step = (int(environment.get(name, "0")) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
        first = first_node(environment.get("SLURM_STEP_NODELIST", ""))
        environment.setdefault("LOCAL_RANK", environment.get("SLURM_LOCALID", "0"))
        environment.setdefault("MASTER_ADDR", first or environment.get("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1"))
        environment.setdefault("MASTER_PORT", str(PORTS[(job * 7 + step) % len(PORTS)]))
    ranks = int(environment.get("WORLD_SIZE", "1"))
    if ranks > 1:
        environment.setdefault(TORCH_LOG, "ERROR")  # otherwise torch prints a stack when a peer exits
    return ranks


def first_node(nodes: str) -> str:
    """First host of a SLURM node list: gpu[07-09,12],login -> gpu07."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+))?", nodes)
    return "" if match is None else match[1] + (match[2] or "")


def announced(rank: int, ranks: int, port: int) -> dict[str, str]:
    """The environment that torchrun would set for one of several processes on this machine."""
    about = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    return {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in about.items()}}


def free_port() -> int:
    """A free port of this machine."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def explain(message: str) -> bool:
    """Record why this rank ends, for torchrun's report (`torch.distributed.elastic`'s `record`, without its import).

    Returns: whether this rank must print the message too; the first one always does.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        about = {"py_callstack": message, "timestamp": str(int(time.time()))}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": about}}), "utf-8")
    return not path or os.environ.get("RANK", "0") == "0"
