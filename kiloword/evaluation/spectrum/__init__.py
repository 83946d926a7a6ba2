"""The task `spectrum`: the number of directions that image features use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kiloword.evaluation.task import Deferred, Task

Of = Literal["tower", "vec"]


@dataclass(frozen=True, kw_only=True)
class SpectrumTaskOptions:
    """Which features, of how many images."""

    of: Of = "tower"  # tower: output of the image tower, which the head reads; vec: the embeddings
    samples: int = 5000  # number of images, drawn by the fingerprint of the data; all if there are fewer


TASK = Task(
    name="spectrum",
    help="Singular values of the covariance of image features, and their effective rank.",
    data="images",
    options=SpectrumTaskOptions,
    run=Deferred("kiloword.evaluation.spectrum.task:run"),
    page=Deferred("kiloword.evaluation.spectrum.task:report"),
    hidden=r"@(?!(1|2|4|8|16|32|64|128|256|512|1024|2048|4096)$)",  # singular values 3, 5, 6, 7, ...
)
