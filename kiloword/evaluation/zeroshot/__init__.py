"""The task `zeroshot`: classification by prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

from tyro.conf import arg

from kiloword.evaluation.task import Deferred, PythonOnly, Task
from kiloword.evaluation.zeroshot.options import PromptOptions, Templates, Way


@dataclass(frozen=True, kw_only=True)
class ZeroshotTaskOptions:
    """How the prompts of a class become its classifier."""

    # prompts of a class: all alike (ensemble), the least uncertain (filter, topk), or weighted by how well they explain
    # images (bprw); all but the first need a model with Gaussians
    prompts: Way = "ensemble"
    # parameters of filter, topk and bprw
    prompt_options: Annotated[PromptOptions, arg(name="prompts")] = field(default_factory=PromptOptions)
    classnames: PythonOnly[Sequence[str] | None] = None  # None: those of the data
    templates: PythonOnly[Templates | None] = None  # None: those of the data, or "{c}" alone


TASK = Task(
    name="zeroshot",
    help="Classify images by prompts of the class names: accuracy, or mean average precision of many labels.",
    data="images with .cls labels and classnames.txt, or scenes:test?task=colour",
    options=ZeroshotTaskOptions,
    run=Deferred("kiloword.evaluation.zeroshot.task:run"),
    page=Deferred("kiloword.evaluation.zeroshot.page:report"),
    printed=Deferred("kiloword.evaluation.zeroshot.task:printed"),
)
