"""Options of a run that are not part of its recipe: where that comes from, and how it is carried out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kiloword.config.recipes import Recipe
from kiloword.config.settings import BaseSettings, check, setting

Parallel = Literal["ddp", "fsdp"]
Checkpointing = Literal["none", "whole", "selective"]
Compile = Literal["none", "blocks", "towers"]


@dataclass(frozen=True, kw_only=True)
class RecipeFlags(BaseSettings):
    """Where the settings of a run come from; other flags override them."""

    name: str | None = setting(None, "recipe of a paper by name (`kiloword recipes`)", flag="recipe")
    config: str | None = setting(None, "recipe in a TOML file, or the config.json of a run")


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Settings that may change when a run is resumed, as they do not change its result."""

    workers: int | Literal["auto"] = setting("auto", "loader processes per rank; auto: by cores and data", 0)
    device: str = setting("auto", "auto, cpu, cuda, cuda:N")
    log_every: int = setting(10, "steps between rows of metrics.jsonl", 1)
    log_to: Literal["file", "tensorboard", "wandb", "mlflow"] = setting(
        "file", "also send rows to OUT/tensorboard, or to the server that wandb or mlflow is set up for"
    )
    save_every: int = setting(0, "steps between states; 0: every two minutes", 0)
    eval_every: int = setting(0, "steps between validations; 0: only at the end", 0)
    eval_epochs: float = setting(0.0, "passes over the data between validations, in place of --eval-every", 0, 1e6)
    keep_best: str = setting("", "keep the model that is best by this metric of --val as OUT/best")
    patience: int = setting(0, "end the run after this number of validations without a better --keep-best; 0: never", 0)
    keep_states: int = setting(2, "number of states to keep, in case the newest is damaged", 1)
    timeout: int = setting(600, "seconds that a rank waits for another rank or its loader before the run ends", 1)
    max_skipped_steps: int = setting(10, "stop after this number of steps in a row without a usable gradient", 1)
    parallel: Parallel = setting("ddp", "with several ranks (torchrun): weights are replicated (ddp) or sharded (fsdp)")
    checkpointing: Checkpointing = setting("none", "activation checkpointing: whole blocks, or all but matrix products")
    compile: Compile = setting("none", "torch.compile blocks or towers")
    extend: bool = setting(False, "continue the run in --out to another length")
    trust_code: bool = setting(False, "import the module that config.json of --init names, if METHOD does not name it")
    quiet: bool = setting(False, "print only warnings and errors")

    def __post_init__(self) -> None:
        check(self)


def missing(recipe: Recipe) -> dict[str, str]:
    """Flags without effect in a recipe -> what they need of settings elsewhere in it."""
    model, trains = recipe.model, bool(recipe.unfreeze)
    trunks = model.image.trunk.name or model.text.trunk.name
    needs = {
        "vocab": (
            recipe.init is None and not recipe.text_tower and recipe.data.tokenizer == "own",
            "a tokenizer of the run's own, without --init, --text-tower and --tokenizer",
        ),
        "optim.text-lr": (trains or "text" not in recipe.freeze, "a text tower that is trained"),
        "optim.trunk-lr": (
            trunks and (trains or recipe.freeze or recipe.lora.rank),
            "a trunk (--image-tower or --text-tower) that is trained (--freeze none)",
        ),
    }
    return {flag: need for flag, (read, need) in needs.items() if not read}
