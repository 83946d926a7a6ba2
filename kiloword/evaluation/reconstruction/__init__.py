"""The task `reconstruction`: masked patches reconstructed from right and wrong captions."""

from __future__ import annotations

from dataclasses import dataclass

from kiloword.evaluation.task import Deferred, Task


@dataclass(frozen=True, kw_only=True)
class ReconstructionTaskOptions:
    """There are none."""


TASK = Task(
    name="reconstruction",
    help="Reconstruct hidden patches from the right caption, a wrong one and none: L1 of each.",
    data="images with captions",
    options=ReconstructionTaskOptions,
    run=Deferred("kiloword.evaluation.reconstruction.task:run"),
    page=Deferred("kiloword.evaluation.reconstruction.page:report"),
)
