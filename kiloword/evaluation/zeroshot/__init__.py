"""The task `zeroshot`: classification by prompts, and how those of a class are combined. No torch: help is instant.

Source: arXiv:2410.18857, section 3.4, algorithm 1, table 3 and appendix C.5.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Literal

from tyro.conf import arg

from kiloword.config.recipes import Nearest
from kiloword.config.settings import BaseSettings
from kiloword.evaluation.task import ClassNames, Deferred, Prompts, Task

PRECISION = "average_precision@"  # of one class: how its metric begins

Way = Literal["ensemble", "filter", "topk", "bprw"]
COMBINING = ("renormalise", "variance")  # options of all ways


@dataclass(frozen=True, kw_only=True)
class PromptOptions(BaseSettings):
    """How prompts are combined, and options of the prompt selections filter, topk and bprw."""

    # normalise the mean of a class; None: yes, but not with bprw (as in the authors' code). Section 4.2: no
    renormalise: bool | None = None
    # variance of a class of prompts with weights p: sum p var (1 / N when equal), or sum p^2 var (1 / N^2, of their
    # average); None: squares with bprw, otherwise as the model was trained (--settings.ensemble)
    variance: Literal["linear", "squares"] | None = None

    # filter: keep prompts up to this many standard deviations above the mean uncertainty of their class
    coeff: float = 1.0
    k: int = 0  # topk: number of prompts per class to keep, the least uncertain; 0: half of them
    shots: int = 0  # bprw: labelled images per class to fit on, excluded from scoring; 0: the nearest, unlabelled
    neighbours: int = 10  # bprw without shots: nearest images per class; the paper: 5, but its total of 100 implies 10
    samples: int | None = None  # bprw: samples from each of those images; None: 10, or 100 / shots
    alpha: float | None = None  # bprw: Dirichlet prior, larger is more uniform; None: 5, with shots 2
    eps: float = 0.02  # bprw: added to every variance
    prior: Literal["symmetric", "uncertainty"] = "symmetric"  # bprw; uncertainty: mode at 1 / trace of the covariance
    steps: int = 1000  # bprw: largest number of steps of expectation maximisation
    tolerance: float = 1e-6  # bprw: stop when no weight of the class changes by more than this
    seed: int = 0  # bprw: seed of the samples and of the choice of labelled images

    def check(self, way: Way) -> None:
        """Raises: ValueError for values out of range, and for options of another selection."""
        changed = [f.name for f in fields(self) if getattr(self, f.name) != f.default]
        unread = next((name for name in changed if name not in COMBINING and reader(name) != way), None)
        if unread is not None:
            raise ValueError(f"--prompts.{unread} is used by --prompts {reader(unread)}, but --prompts is {way}.")
        least = {"k": 0, "shots": 0, "neighbours": 1, "samples": 1, "steps": 1, "eps": 0.0, "tolerance": 0.0}
        for name, low in least.items():
            value = getattr(self, name)
            if value is not None and not low <= value < math.inf:
                raise ValueError(f"--prompts.{name} is {value:g}. Expected at least {low:g}.")
        if not math.isfinite(self.coeff):
            raise ValueError(f"--prompts.coeff is {self.coeff}. Expected a finite number, such as 1.")
        self._check_alpha()

    def _check_alpha(self) -> None:
        alpha = self.resolved().alpha
        assert alpha is not None
        if not 0 < alpha < math.inf:
            raise ValueError(f"--prompts.alpha is {alpha:g}. Expected a number above 0; 1 is no prior.")
        if alpha < 1 and self.prior == "uncertainty":
            raise ValueError(f"--prompts.prior uncertainty has no mode with alpha {alpha:g}. Expected at least 1.")

    def resolved(self) -> PromptOptions:
        """A copy with `samples` and `alpha` filled in (appendix C.5)."""
        samples = max(1, 100 // self.shots) if self.shots else 10
        alpha = 2.0 if self.shots else 5.0
        return replace(
            self,
            samples=samples if self.samples is None else self.samples,
            alpha=alpha if self.alpha is None else self.alpha,
        )


def reader(option: str) -> Way:
    """The prompt selection that uses an option."""
    owners: dict[str, Way] = {"coeff": "filter", "k": "topk"}
    return owners.get(option, "bprw")


@dataclass(frozen=True, kw_only=True)
class ZeroshotTaskOptions:
    """How the prompts of a class become its classifier."""

    # prompts of a class: all alike (ensemble), the least uncertain (filter, topk), or weighted by how well they explain
    # images (bprw); all but the first need a model with Gaussians
    prompts: Way = "ensemble"
    # how prompts are combined, and parameters of filter, topk and bprw
    prompt_options: Annotated[PromptOptions, arg(name="prompts")] = field(default_factory=PromptOptions)
    # score of an image and a class; None: the model's own, which does not subtract half the squared norm of the class's
    # mean, as csd does
    nearest: Nearest | None = None
    # class names: a text file with one per line, a JSON file, or a data set (kiloword data names). None: of the data
    classnames: ClassNames | None = None
    # prompts with {c} or {} for the class name: a file, a data set, or one template. None: those of the data, of the
    # data set that --classnames names, or the class name alone
    templates: Prompts | None = None
    # fields of the json, or of FILE?info=COLUMN, whose values are groups of images: accuracy of each, and of the worst;
    # npy.0: the first number of the .npy beside a .cls; NAME=FIELD: FIELD where there is no NAME
    group_by: tuple[str, ...] = ()
    any_label: bool = False  # an image with several classes is right if any of them is among the first: acc1, acc5
    macro_f1: bool = False  # also F1 as a mean over the classes that occur
    attributes: bool = False  # class names are "attribute object": also the accuracy of each of the two

    def check(self) -> None:
        """Raises: ValueError for options of another selection of prompts, and for those that need the ensemble."""
        self.prompt_options.check(self.prompts)
        counted = ("group_by", "any_label", "macro_f1", "attributes")
        chosen = next((name for name in counted if getattr(self, name)), None)
        if chosen is not None and self.prompts != "ensemble":
            raise ValueError(f"--{chosen.replace('_', '-')} counts with --prompts ensemble, but it is {self.prompts}.")
        if len({field.partition("=")[0] for field in self.group_by}) < len(self.group_by):
            raise ValueError(f"--group-by names a field twice: {', '.join(self.group_by)}.")


TASK = Task(
    name="zeroshot",
    help="Classify images by prompts of the class names: accuracy, or mean average precision of many labels.",
    data="class folders, a table with a column `label`, tars with .cls, or scenes:test?task=colour",
    options=ZeroshotTaskOptions,
    run=Deferred("kiloword.evaluation.zeroshot.task:run"),
    page=Deferred("kiloword.evaluation.zeroshot.page:report"),
    hidden="^(weight|average_precision)@|^count_",
)
