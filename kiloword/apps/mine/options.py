"""Options of `kiloword mine`. No torch here, so that help texts are instant."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

Mined = TypeVar("Mined", bound=Any)
"""Settings with thresholds (`kiloword.methods.fff.preset.Mined`)."""

RATE = 1e-4  # the default of --false-rate


@dataclass(frozen=True, kw_only=True)
class MineOptions:
    """Flags of `kiloword mine`, besides data, feature store and output folder."""

    p1: float | None = None  # a pair matches if the cosine of image and caption is larger; the paper: 0.27
    p2: float | None = None  # or if the cosine of the image and the caption's image is larger; the paper: 0.92
    # or if the mean cosine of the caption and the image's captions is larger (the paper: 0.99), and p1-text holds
    p3: float | None = None
    p1_text: float | None = None  # with p3: the cosine of image and caption is larger; the paper: 0.24
    calibrate: bool = False  # fit unspecified thresholds to the teacher, and print the flags for training
    # with calibrate: largest share of random pairs that p1, p2 and p3 each accept; default: 1e-4
    false_rate: float | None = None
    batch: int = 1024  # images per random batch in which the true caption is ranked
    most: int = 20  # mined pairs per image in pairs.parquet, best first; all are counted
    gallery: int = 6  # mined pairs per term in the report
    chunk: int = 2048  # images and captions per block of similarities
    extra_captions: tuple[Path, ...] = ()  # parquet tables (key, captions), compared with the original captions
    device: str = "auto"  # auto, cpu, cuda, cuda:N
    seed: int = 0  # seed of batches, random pairs and the gallery

    def check(self) -> None:
        """Errors: ValueError for values out of range."""
        least = {"batch": 2, "most": 1, "gallery": 0, "chunk": 1}
        for name, low in least.items():
            if getattr(self, name) < low:
                raise ValueError(f"--{name} is {getattr(self, name)}. Expected at least {low}.")
        if not 0 < self.rate < 1:
            raise ValueError(f"--false-rate is {self.rate:g}. Expected a share between 0 and 1, such as 1e-4.")
        if self.calibrate and None not in (self.p1, self.p2, self.p3, self.p1_text):
            raise ValueError("--calibrate fits the thresholds that are not given, and all are given: omit it.")
        if self.false_rate is not None and not self.calibrate:
            raise ValueError("--false-rate is of --calibrate, which is missing: add it, or omit --false-rate.")

    @property
    def rate(self) -> float:
        """The largest share of random pairs that p1, p2 and p3 each accept."""
        return RATE if self.false_rate is None else self.false_rate

    def over(self, settings: Mined) -> Mined:
        """The settings with the specified thresholds."""
        thresholds = {name: getattr(self, name) for name in ("p1", "p2", "p3", "p1_text")}
        return replace(settings, **{name: value for name, value in thresholds.items() if value is not None})
