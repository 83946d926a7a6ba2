"""The verb mine. No torch at import: help is instant."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kiloword.config.execution import Some
from kiloword.config.settings import ABOVE_0, BELOW_1, check, setting


@dataclass(frozen=True, kw_only=True)
class Mine:
    """Find captions that match further images, by the features of a teacher.

    Writes OUT/report.html, pairs.parquet and mine.json.

    Examples:
      kiloword mine photos/train --features features --out mined --calibrate
    """

    data: Some[str]  # tars, a table, a folder of images or scenes, as for `kiloword train`
    features: Path  # feature store of a teacher for the data (`kiloword embed`)
    out: Path  # folder for report, pairs and figures
    p1: float | None = None  # a pair matches if the cosine of image and caption is above this; the paper: 0.27
    p2: float | None = None  # or if the cosine of the image and the caption's own image is above this; the paper: 0.92
    # or if the mean cosine of the caption and the image's captions is above this, and p1-text holds; the paper: 0.99
    p3: float | None = None
    p1_text: float | None = None  # with p3: the cosine of image and caption is above this; the paper: 0.24
    calibrate: bool = False  # choose missing thresholds to suit the teacher, and print the flags for training
    false_rate: float = setting(
        1e-4, "with calibrate: largest share of random pairs that each of p1, p2 and p3 may accept", ABOVE_0, BELOW_1
    )
    batch: int = setting(1024, "number of images in the random batches in which the true caption is ranked", 2)
    most: int = setting(20, "mined pairs per image in pairs.parquet, best first; all are counted", 1)
    extra_captions: tuple[Path, ...] = ()  # parquet tables (key, captions), compared with the original captions
    device: str = "auto"  # auto, cpu, cuda, cuda:N
    seed: int = 0  # seed of batches, random pairs and the examples on the page

    def run(self) -> None:
        """Search, analyse, print, and write the files. Raises: ValueError for what cannot be used."""
        from kiloword.apps.mine.mine import mine

        check(self)
        if self.false_rate != Mine.false_rate and not self.calibrate:
            raise ValueError("--false-rate has an effect only with --calibrate: add that, or omit it.")
        if self.calibrate and None not in (self.p1, self.p2, self.p3, self.p1_text):
            raise ValueError("--calibrate fits the thresholds that are not given, and all are given: omit it.")
        mine(self)
