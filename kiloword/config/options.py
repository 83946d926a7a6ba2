"""How a run is carried out: what may change between a run and its resumption without changing its result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Parallel = Literal["ddp", "fsdp"]
Checkpointing = Literal["none", "whole", "selective"]
Compile = Literal["none", "blocks", "towers", "cudagraphs"]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What may change between a run and its resumption without changing its result."""

    workers: int | Literal["auto"] = "auto"  # loader processes of each rank; auto: by cores on CUDA, 0 on a CPU
    device: str = "auto"  # auto, cpu, cuda, cuda:N
    log_every: int = 10  # steps
    log_to: Literal["file", "tensorboard"] = "file"  # OUT/metrics.jsonl, or also events in OUT/tensorboard
    save_every: int = 0  # steps; 0: every two minutes
    eval_every: int = 0  # steps; 0: at the end
    keep_states: int = 2  # the newest and those before, should the newest be damaged
    timeout: int = 600  # seconds that a rank waits for another one, and for its loader, before the run ends
    max_skipped_steps: int = 10  # steps in a row without a usable gradient that end the run
    parallel: Parallel = "ddp"  # of several ranks (torchrun): each holds the weights, or they are sharded (fsdp)
    checkpointing: Checkpointing = "none"  # recompute activations: of whole blocks, or all but products (selective)
    compile: Compile = "none"  # by torch.compile: each block, each tower, or towers with a CUDA graph of images
    extend: bool = False  # let the run in --out go on to another length
    trust_code: bool = False  # import the module that the config.json of --init names, where METHOD does not name it
    quiet: bool = False  # say nothing but what goes wrong

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
