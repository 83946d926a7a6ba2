"""The task `probe`: linear probes on frozen features, and how they are fitted. No torch: help is instant."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal, NamedTuple

from kiloword.config.settings import BaseSettings
from kiloword.evaluation.task import ClassNames, Data, Deferred, Task

Name = Literal["clip_benchmark", "adamw", "sgd", "lbfgs"]
Kind = Literal["vec", "pooled"]


@dataclass(frozen=True, kw_only=True)
class ProbeOptions(BaseSettings):
    """Settings of the probe; None: the value of the recipe."""

    recipe: Name = "clip_benchmark"  # as in: FFF (adamw), SLIP and CLIP-C (sgd), CLIP (lbfgs)
    features: Kind | None = None  # vec: the embedding; pooled: before the projection. None: vec, sgd and lbfgs pooled
    lr: float | None = None  # learning rate at the start of the cosine. None: 0.1
    epochs: int | None = None  # passes over the data. None: clip_benchmark 10, adamw 20, sgd 50
    batch: int | None = None  # images in a step. None: 64, sgd 256
    max_iter: int | None = None  # lbfgs: largest number of iterations. None: 1000
    weight_decay: float | None = None  # lbfgs: L2 strength, 1 / C of scikit-learn. None: swept, or else 0
    val_share: float | None = None  # share of each class to sweep on without --val. None: 0, lbfgs 0.1
    shots: int = 0  # training images per class, drawn by the seed; 0: all
    seeds: tuple[int, ...] = ()  # of draws, shuffles, weights; several: report the mean. (): 0, with shots 0 1 2

    def check(self, val: bool) -> None:
        """Args: val: whether a validation split is given.

        Raises: ValueError for numbers that make no sense, and for options that the recipe does not read.
        """
        recipe = RECIPES[self.recipe]
        unread = ("lr", "epochs", "batch") if recipe.optimiser == "lbfgs" else ("max_iter",)
        set_unread = next((name for name in unread if getattr(self, name) is not None), None)
        if set_unread is not None:
            raise ValueError(f"--probe.{_flag(set_unread)} is not used by --probe.recipe {self.recipe}: omit it.")
        self._check_numbers()
        self._check_sweep(recipe, val)

    def _check_numbers(self) -> None:
        for name, low in (("lr", 0.0), ("epochs", 1), ("batch", 1), ("max_iter", 1), ("weight_decay", 0.0)):
            value = getattr(self, name)
            if value is not None and not low <= value < math.inf:
                raise ValueError(f"--probe.{_flag(name)} is {value:g}. Expected at least {low:g}.")
        if self.shots < 0:
            raise ValueError(f"--probe.shots is {self.shots}. Expected images per class, or 0 for all.")
        if self.val_share is not None and not 0 <= self.val_share < 1:
            raise ValueError(f"--probe.val-share is {self.val_share:g}. Expected a share from 0 to below 1.")
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"--probe.seeds names one twice: {' '.join(map(str, self.seeds))}.")

    def _check_sweep(self, recipe: ProbeRecipe, val: bool) -> None:
        val_flag = "--val" if val else "--probe.val-share" if self.val_share else ""
        if val_flag and not recipe.sweep:
            raise ValueError(
                f"{val_flag} selects a weight decay, but --probe.recipe {self.recipe} sweeps none: omit it."
            )
        if val_flag and self.weight_decay is not None:
            raise ValueError(f"{val_flag} selects a weight decay, but --probe.weight-decay sets it: use one of them.")
        if val and self.val_share:
            raise ValueError("--val and --probe.val-share both select the weight decay: use one of them.")
        if recipe.optimiser == "lbfgs" and self.val_share == 0 and self.weight_decay is None and not val:
            raise ValueError("nothing is left to sweep lbfgs's strength on: give --probe.weight-decay, or --val.")

    def resolved(self, val: bool) -> ProbeOptions:
        """The same with the recipe's numbers filled in; `weight_decay` stays None where it is swept."""
        recipe = RECIPES[self.recipe]
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        defaults = {name: getattr(recipe, name) for name in ("features", "lr", "epochs", "batch", "max_iter")}
        defaults["val_share"] = 0.0 if val or self.weight_decay is not None else recipe.val_share
        filled = values | {name: value for name, value in defaults.items() if values[name] is None}
        if not val and not filled["val_share"] and self.weight_decay is None:
            filled["weight_decay"] = 0.0
        filled["seeds"] = self.seeds or ((0, 1, 2) if self.shots else (0,))
        return ProbeOptions(**filled)


def _flag(name: str) -> str:
    return name.replace("_", "-")


class Sweep(NamedTuple):
    """97 numbers, equally far apart as logarithms."""

    low: int  # power of ten of the first
    high: int  # of the last

    def values(self) -> list[float]:
        """All of them, ascending."""
        return [10 ** (self.low + (self.high - self.low) * place / (COUNT - 1)) for place in range(COUNT)]


COUNT = 97


class ProbeRecipe(NamedTuple):
    """What a paper does. Images are seen once and un-augmented, as in all of them but SLIP."""

    optimiser: Literal["adamw", "sgd", "lbfgs"]
    features: Kind
    lr: float | None = 0.1
    epochs: int | None = None
    batch: int | None = 64
    max_iter: int | None = None
    sweep: Sweep | None = None
    val_share: float = 0.0


RECIPES: dict[Name, ProbeRecipe] = {
    # CLIP_benchmark's `linear_probe` and its defaults: without a validation split the decay is 0
    "clip_benchmark": ProbeRecipe("adamw", "vec", epochs=10, sweep=Sweep(-6, 2)),
    # arXiv:2405.10286, appendix A.2, by CLIP_benchmark's code, whose batch it does not change
    "adamw": ProbeRecipe("adamw", "vec", epochs=20),
    # arXiv:2407.01408 drops the projection, tunes rate and batch for each data set: these are SLIP's, 0.1 for a batch
    # of 256 (arXiv:2112.12750)
    "sgd": ProbeRecipe("sgd", "pooled", epochs=50, batch=256),
    # arXiv:2103.00020, appendix A.3
    "lbfgs": ProbeRecipe("lbfgs", "pooled", None, None, None, max_iter=1000, sweep=Sweep(-6, 6), val_share=0.1),
}


@dataclass(frozen=True, kw_only=True)
class ProbeTaskOptions:
    """What the probe is fitted on, and how."""

    train: Data | None = None  # training data; None: the split `train` that goes with --data
    val: Data | None = None  # data on which the weight decay is chosen
    # class names: a text file with one per line, a JSON file, or a data set (kiloword data names). None: of the data
    classnames: ClassNames | None = None
    cache: Path | None = None  # folder that keeps the features
    probe: ProbeOptions = field(default_factory=ProbeOptions)


TASK = Task(
    name="probe",
    help="Fit a linear layer on frozen image features, and classify with it: accuracy.",
    data="class folders, a table with a column `label`, tars with .cls, or scenes:test?task=colour",
    options=ProbeTaskOptions,
    run=Deferred("kiloword.evaluation.probe.task:run"),
    hidden="^(sweep|seed)@",
)
