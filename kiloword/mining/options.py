"""What `kiloword mine` may be asked. No torch here, so that help texts are instant."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

Mined = TypeVar("Mined", bound=Any)
"""Settings with thresholds (`kiloword.methods.fff.preset.Mined`)."""


@dataclass(frozen=True, kw_only=True)
class MineOptions:
    """Flags of `kiloword mine`, beside data, feature store and output folder."""

    p1: float | None = None  # a pair matches when image and caption are more alike; the paper's 0.27
    p2: float | None = None  # or when the caption's image is more alike; the paper's 0.92
    p3: float | None = None  # or when the caption is more like the image's captions, on average (0.99), and p1-text
    p1_text: float | None = None  # is what image and caption must then be alike; the paper's 0.24
    calibrate: bool = False  # fit the thresholds that are not given to the teacher, and print the flags for training
    false_rate: float = 1e-4  # share of random pairs that p1, p2 and p3 may each accept at most when calibrated
    batch: int = 1024  # images in the random batches in which the true caption is ranked
    most: int = 20  # mined pairs of an image in pairs.parquet, best first; all are counted
    gallery: int = 6  # mined pairs that the report shows of each term
    chunk: int = 2048  # images and captions whose similarities are held at once
    extra_captions: tuple[Path, ...] = ()  # parquet tables (key, captions), compared with the images' own captions
    device: str = "auto"  # auto, cpu, cuda, cuda:N
    seed: int = 0  # of what is drawn: batches, random pairs, the gallery

    def check(self) -> None:
        """Errors: ValueError for numbers that make no sense."""
        least = {"batch": 2, "most": 1, "gallery": 0, "chunk": 1}
        for name, low in least.items():
            if getattr(self, name) < low:
                raise ValueError(f"--{name} is {getattr(self, name)}. Expected at least {low}.")
        if not 0 < self.false_rate < 1:
            raise ValueError(f"--false-rate is {self.false_rate:g}. Expected a share between 0 and 1, such as 1e-4.")

    def over(self, settings: Mined) -> Mined:
        """The settings with the thresholds that were given."""
        given = {name: getattr(self, name) for name in ("p1", "p2", "p3", "p1_text")}
        return replace(settings, **{name: value for name, value in given.items() if value is not None})
