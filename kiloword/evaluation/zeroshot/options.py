"""How a class's prompts become one row: what `kiloword eval MODEL zeroshot` may be told. No torch: help is instant.

Source: arXiv:2410.18857, section 3.4, algorithm 1, table 3 and appendix C.5.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Literal

from kiloword.config.recipes import BaseSettings

Way = Literal["ensemble", "filter", "topk", "bprw"]


@dataclass(frozen=True, kw_only=True)
class PromptOptions(BaseSettings):
    """What filter, topk and bprw may be told."""

    coeff: float = 1.0  # filter: prompts up to so many standard deviations above their class's mean uncertainty stay
    k: int = 0  # topk: prompts of a class that stay, the least uncertain; 0: half of them
    shots: int = 0  # bprw: labelled images a class to learn from, which are not scored; 0: the nearest, unlabelled
    neighbours: int = 10  # bprw without shots: nearest images a class; the paper's text says 5, its total of 100 10
    samples: int | None = None  # bprw: draws from each of those images; None: 10, with shots 100 / shots
    alpha: float | None = None  # bprw: of the Dirichlet prior, larger is more uniform; None: 5, with shots 2
    eps: float = 0.02  # bprw: added to every variance
    prior: Literal["symmetric", "uncertainty"] = "symmetric"  # bprw; uncertainty: its mode is 1 / trace, as section 3.4
    renormalise: bool = False  # bprw: whether the weighted mean of a class gets norm 1 again
    variance: Literal["squares", "linear"] = "squares"  # bprw: of a class with weights p, sum p^2 var or sum p var
    steps: int = 1000  # bprw: at most, of expectation maximisation
    tolerance: float = 1e-6  # bprw: it ends when no weight of the class changes more
    seed: int = 0  # bprw: of the draws, and of which labelled images are taken

    def check(self, way: Way) -> None:
        """Raises: ValueError for numbers that make no sense, and for options that another way reads."""
        changed = [f.name for f in fields(self) if getattr(self, f.name) != f.default]
        unread = next((name for name in changed if reader(name) != way), None)
        if unread is not None:
            raise ValueError(f"--prompts.{unread} is read by --prompts {reader(unread)}, but --prompts is {way}.")
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
        """The same with `samples` and `alpha` filled in (appendix C.5)."""
        samples = max(1, 100 // self.shots) if self.shots else 10
        alpha = 2.0 if self.shots else 5.0
        return replace(
            self,
            samples=samples if self.samples is None else self.samples,
            alpha=alpha if self.alpha is None else self.alpha,
        )


def reader(option: str) -> Way:
    """Which way reads an option."""
    owners: dict[str, Way] = {"coeff": "filter", "k": "topk"}
    return owners.get(option, "bprw")
