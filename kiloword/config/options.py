"""Options of a run that are not part of its recipe: how it is carried out, and components of its method."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from kiloword.config.recipes import Recipe
from kiloword.config.settings import BaseSettings, check, leaves, setting

Parallel = Literal["ddp", "fsdp"]
Checkpointing = Literal["none", "whole", "selective"]
Trackers = Literal["wandb", "mlflow"]
Compile = Literal["none", "blocks", "towers"]


@dataclass(frozen=True, kw_only=True)
class Mixing(BaseSettings):
    """Components of other methods (`kiloword methods`), one or several for each slot."""

    pooling: str | None = setting(None, "another method's pooling: contextual, attended, maxsim")
    transforms: str | None = setting(None, "another method's transforms: compose, mixup, cutmix, stylistic")
    positives: str | None = setting(None, "another method's positives: mined, exact, fff")
    pair_loss: str | None = setting(None, "another method's pair loss: softmax, sigmoid, supcon, ppcl, matching")
    uncertainty: str | None = setting(None, "gaussian: features with a variance")
    contrasts: tuple[str, ...] = setting(
        (), "further pair losses, one or several: simclr, reinforced, negatives, clic, text-crops, concepts"
    )
    terms: tuple[str, ...] = setting(
        (), "more terms of the loss, one or several: caption, mim, inclusion, self-distill, superclass"
    )


@dataclass(frozen=True, kw_only=True)
class RecipeFlags(BaseSettings):
    """Where the settings of a run come from; other flags override them."""

    name: str | None = setting(None, "recipe of a paper by name (`kiloword recipes`)", flag="recipe")
    config: str | None = setting(None, "recipe in a TOML file, or the config.json of a run")


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Settings that may change when a run is resumed, as they do not change its result."""

    workers: int | Literal["auto"] = setting(
        "auto", "loader processes per rank; auto: by cores on CUDA, half of them on a CPU, none for scenes", 0
    )
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
    checkpointing: Checkpointing = setting(
        "none", "activation checkpointing: whole blocks, or all except matrix products"
    )
    compile: Compile = setting("none", "torch.compile blocks or towers")
    extend: bool = setting(False, "continue the run in --out to another length")
    trust_code: bool = setting(False, "import the module that config.json of --init names, if METHOD does not name it")
    quiet: bool = setting(False, "print only warnings and errors")

    def __post_init__(self) -> None:
        check(self)


NEEDED: tuple[tuple[str, str, Callable[[Recipe], bool]], ...] = (  # flags that are read only with other settings
    (
        "vocab",
        "a tokenizer of the run's own, without --init, --text-tower and --tokenizer",
        lambda r: r.init is None and not r.text_tower and r.data.tokenizer == "own",
    ),
    ("first-captions", "--captions one or N", lambda r: r.data.captions != "all"),
    ("optim.muon-lr optim.muon-weight-decay optim.momentum", "--optim.name muon", lambda r: r.optim.name == "muon"),
    ("optim.delta optim.wd-ratio", "--optim.name adamp", lambda r: r.optim.name == "adamp"),
    ("optim.text-lr", "a text tower that is trained", lambda r: "text" not in r.freeze or bool(r.unfreeze)),
    (
        "optim.trunk-lr",
        "a trunk (--image-tower or --text-tower) that is trained (--freeze none)",
        lambda r: (
            bool(r.model.image.trunk.name or r.model.text.trunk.name) and bool(r.freeze or r.unfreeze or r.lora.rank)
        ),
    ),
    ("lora.alpha lora.targets lora.save", "--lora.rank above 0", lambda r: r.lora.rank > 0),
    ("augment.ratio", "--augment.crop below 1", lambda r: r.data.augment.crop < 1),
    ("augment.jitter-strength", "--augment.jitter above 0", lambda r: r.data.augment.jitter > 0),
    ("augment.blur-sigma", "--augment.blur above 0", lambda r: r.data.augment.blur > 0),
)


def unread(recipe: Recipe, usual: Recipe) -> Iterator[str]:
    """The settings of a recipe that differ from the usual ones, and that the run would not read."""
    theirs = {leaf.flag: leaf.value for leaf in leaves(usual)}
    unread = {flag: needed for flags, needed, read in NEEDED if not read(recipe) for flag in flags.split()}
    for leaf in leaves(recipe):
        if leaf.flag in unread and leaf.value != theirs[leaf.flag]:
            yield f"--{leaf.flag} is {leaf.value}, which has an effect only with {unread[leaf.flag]}"
