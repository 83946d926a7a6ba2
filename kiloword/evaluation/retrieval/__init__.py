"""The task `retrieval`: images by texts and texts by images."""

from __future__ import annotations

from dataclasses import dataclass

from kiloword.config.recipes import Nearest
from kiloword.evaluation.task import Deferred, PythonOnly, Task


@dataclass(frozen=True, kw_only=True)
class RetrievalTaskOptions:
    """How pairs are ranked."""

    # in place of the model's score: cosine of the features (of a Gaussian: its mean), or csd, the closed-form sampled
    # distance of Gaussians. None: the model's score
    nearest: Nearest | None = None
    shortlist: int | None = None  # exact scores of the N nearest images or texts alone; prints the recall lost
    # more positives than the annotated pairs: ECCV Caption's or CxC's json of ids with COCO's annotations,
    # FILE?captions=captions_val2014.json, or a table of images and captions
    extra_positives: str | None = None
    folds: int = 1  # mean of recall@k over N equal parts of the images, in order; COCO 1K: 5 of the 5000
    ks: PythonOnly[tuple[int, ...]] = (1, 5, 10)  # of recall@k
    chunk: PythonOnly[int] = 1024  # rows and columns of scores held at a time


TASK = Task(
    name="retrieval",
    help="Rank images by text and texts by image: recall@k, and mean average precision where ground truth is known.",
    data="images with captions",
    options=RetrievalTaskOptions,
    run=Deferred("kiloword.evaluation.retrieval.task:run"),
)
