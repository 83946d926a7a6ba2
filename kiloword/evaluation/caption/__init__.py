"""The task `caption`: captions of a model against those that people wrote."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from kiloword.config.settings import BaseSettings
from kiloword.evaluation.task import Deferred, PythonOnly, Task
from kiloword.generation.options import GenerationOptions


@dataclass(frozen=True, kw_only=True)
class CaptionOptions(BaseSettings):
    """How captions are compared with those that people wrote."""

    tokenizer: Literal["own", "ptb"] = "own"  # ptb: pycocoevalcap's, in Java; COCO metrics differ by 0.0003
    meteor: bool = True  # METEOR through pycocoevalcap; omitted with a note where it or Java is missing
    spice: bool = False  # SPICE through pycocoevalcap, where Stanford's models are installed
    limit: float = 600  # seconds that each of these Java programs may take

    def check(self) -> None:
        """Raises: ValueError for a limit that is none."""
        if not 0 < self.limit < math.inf:
            raise ValueError(f"--judge.limit is {self.limit:g}. Expected seconds above 0.")


@dataclass(frozen=True, kw_only=True)
class CaptionTaskOptions:
    """How captions are generated, and how they are scored."""

    generate: GenerationOptions = field(default_factory=GenerationOptions)
    judge: CaptionOptions = field(default_factory=CaptionOptions)
    # fields of the json, or of FILE?info=COLUMN, whose values are groups of images: figures of each; by default NoCaps'
    # domain, where images have it
    group_by: tuple[str, ...] = ()
    results: Path | None = (
        None  # write the captions as COCO and NoCaps take them; images may lack captions of their own
    )
    captions: PythonOnly[Path | None] = None  # table whose captions are scored, the first of each key; None: a model's


def captions_of_table(path: str, options: CaptionTaskOptions) -> CaptionTaskOptions | None:
    """Options to score the captions of a parquet table or a result file, and generate none; None for another path."""
    if not path.lower().endswith((".parquet", ".json")):
        return None
    return replace(options, captions=Path(path), generate=GenerationOptions())


TASK = Task(
    name="caption",
    help="Caption images, and compare with captions that people wrote: CIDEr-D, BLEU, METEOR, ROUGE-L.",
    data="images with captions",
    models="model folder (OUT/model of a run), or any captioner's parquet table (key, captions) or COCO result file; "
    "several are compared",
    options=CaptionTaskOptions,
    run=Deferred("kiloword.evaluation.caption.task:run"),
    page=Deferred("kiloword.evaluation.caption.page:report"),
    hidden="^bleu_[23]",
    without_model=captions_of_table,
)
