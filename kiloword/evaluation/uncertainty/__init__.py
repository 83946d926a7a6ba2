"""The task `uncertainty`: what the variances of a model with Gaussians depend on, and whether they predict errors."""

from __future__ import annotations

from dataclasses import dataclass

from kiloword.evaluation.task import ClassNames, Deferred, Prompts, PythonOnly, Task


@dataclass(frozen=True, kw_only=True)
class UncertaintyTaskOptions:
    """Classes of the zero-shot calibration, and the size of blocks."""

    # class names: a text file with one per line, a JSON file, or a data set (kiloword data names). None: of the data
    classnames: ClassNames | None = None
    # prompts with {c} or {} for the class name: a file, a data set, or one template. None: as in zeroshot
    templates: Prompts | None = None
    chunk: PythonOnly[int] = 1024  # rows and columns of scores held at a time


TASK = Task(
    name="uncertainty",
    help="Compare the uncertainty of images and texts with lengths, levels, ground truth and errors (calibration).",
    data="images, with captions or labels where there are any, or texts alone (a table without images, .txt); the "
    "model needs Gaussians",
    options=UncertaintyTaskOptions,
    run=Deferred("kiloword.evaluation.uncertainty.task:run"),
    page=Deferred("kiloword.evaluation.uncertainty.page:report"),
    texts=True,
    hidden=r"_right@|_uncertainty@|_q(25|75)$",  # bins, most quantiles
)
