"""Options of a run: settings that may change when it is resumed, as they do not change its result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Parallel = Literal["ddp", "fsdp"]
Checkpointing = Literal["none", "whole", "selective"]
Compile = Literal["none", "blocks", "towers", "cudagraphs"]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Settings that may change when a run is resumed, as they do not change its result."""

    workers: int | Literal["auto"] = "auto"  # loader processes per rank; auto: by cores on CUDA, 0 on a CPU
    device: str = "auto"  # auto, cpu, cuda, cuda:N
    log_every: int = 10  # steps between rows of metrics.jsonl
    log_to: Literal["file", "tensorboard"] = "file"  # tensorboard: also write events to OUT/tensorboard
    save_every: int = 0  # steps between states; 0: every two minutes
    eval_every: int = 0  # steps between validations; 0: only at the end
    keep_states: int = 2  # number of states to keep, should the newest be damaged
    timeout: int = 600  # seconds that a rank waits for another rank or its loader before the run ends
    max_skipped_steps: int = 10  # stop after this number of steps in a row without a usable gradient
    parallel: Parallel = "ddp"  # with several ranks (torchrun): weights are replicated (ddp) or sharded (fsdp)
    checkpointing: Checkpointing = "none"  # activation checkpointing: of whole blocks, or all except matrix products
    compile: Compile = "none"  # torch.compile each block or tower; cudagraphs: towers, with a CUDA graph of images
    extend: bool = False  # continue the run in --out to another length
    trust_code: bool = False  # import the module named in the config.json of --init, if METHOD does not name it
    quiet: bool = False  # print only warnings and errors

    def __post_init__(self) -> None:
        at_least = {
            "workers": 0,
            "log_every": 1,
            "save_every": 0,
            "eval_every": 0,
            "keep_states": 1,
            "timeout": 1,
            "max_skipped_steps": 1,
        }
        for name, least in at_least.items():
            value = getattr(self, name)
            if value != "auto" and value < least:
                raise ValueError(f"--{name.replace('_', '-')} is {value}: expected at least {least}.")
