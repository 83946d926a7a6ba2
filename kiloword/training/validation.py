"""Validation during training."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from kiloword.config.recipes import Recipe, sizes
from kiloword.data.images.augmentation import EvalTransform
from kiloword.data.reading import name_of, read
from kiloword.data.sources.sample import question_in
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.distributed import collectives
from kiloword.distributed.device import precision_of
from kiloword.methods.registry import preset
from kiloword.model.model import build
from kiloword.training.log import read_metrics
from kiloword.types import BadSample, Record, Source

if TYPE_CHECKING:
    from kiloword.api import Matcher
    from kiloword.training.setup import Run

ROWS, TRIED = 2, 32  # rows evaluated before a run, and rows searched for them


def validate(run: Run) -> dict[str, float]:
    """Retrieval on the recipe's validation data, or VQA where the method needs questions; names start with "val/".

    All ranks share the work and get the result.
    """
    from kiloword.api import Matcher
    from kiloword.distributed.sharing import sharing

    source = run.val
    assert source is not None
    with_questions = "questions" in run.learner.method.needs
    names = ("accuracy",) if with_questions else ("text_retrieval_recall@1", "image_retrieval_recall@1")
    run.learner.eval()
    sharded = any(collectives.sharded(p) for p in run.learner.parameters())
    # the precision of the run; on a CPU fp32, comparable with earlier runs. Scores are in fp32 everywhere
    precision = precision_of(run.recipe.precision, "cuda") if run.device.type == "cuda" else nullcontext
    with run.average.in_place(run.learner), sharing(lockstep=sharded), precision():
        matcher = Matcher(run.learner.model, run.tokenizer)
        metrics = _judged(matcher, source, run.loader.source, with_questions)
    run.learner.train()
    run.log.say(f"val at step {run.step}: " + ", ".join(f"{k} {metrics[k]:.3f}" for k in names))
    return {f"val/{k}": v for k, v in metrics.items() if isinstance(v, float)}


def _judged(matcher: Matcher, source: Source, train: Source, with_questions: bool) -> dict[str, float]:
    from kiloword.evaluation import evaluate

    options: dict[str, Any] = {"train": train} if with_questions and not hasattr(source, "answers") else {}
    return evaluate(matcher, "vqa" if with_questions else "retrieval", source, **options)


def check_val(recipe: Recipe, val: Source | None, tokenizer: Tokenizer, source: Source) -> None:
    """Evaluate two rows of the recipe's validation data with a small stand-in model, before hours of training.

    Args: val: result of `open_val`; tokenizer: of the run; source: the training data.
    Raises: ValueError for data that the validation of the run would refuse.
    """
    from kiloword.api import Matcher

    if val is None:
        return
    with_questions = "questions" in preset(recipe.method, recipe.settings).needs
    method, small = preset("vqa" if with_questions else "clip"), sizes()["debug"]
    text = replace(small.text, vocab=tokenizer.vocab, special=tokenizer.roles.ids())
    matcher = Matcher(build(replace(small, text=text), method), tokenizer)
    samples, train = (_ValidationRows(data, _good_rows(data, with_questions)) for data in (val, source))
    _judged(matcher, samples, train, with_questions)


def _good_rows(source: Source, with_questions: bool) -> Sequence[int]:
    """The first ROWS usable rows, or all rows that were tried."""
    tried = range(0, len(source), max(1, len(source) // TRIED))[:TRIED]
    transform = EvalTransform(sizes()["debug"].image.size)

    def is_good(row: int) -> bool:
        try:
            record = read(source, row)
            transform(record.image)
        except BadSample:
            return False
        return question_in(record.info) is not None if with_questions else bool(record.captions)

    good = list(islice(filter(is_good, tried), ROWS))
    return good or tried


class _ValidationRows:
    """Some rows of a source."""

    natural = True

    def __init__(self, source: Source, rows: Sequence[int]) -> None:
        self.source, self.rows = source, rows
        self.name, self.fingerprint = source.name, source.fingerprint
        if hasattr(source, "answers"):
            self.answers = source.answers

    def __len__(self) -> int:
        return len(self.rows)

    def record(self, row: int) -> Record:
        return self.source.record(self.rows[row])

    def key(self, row: int) -> str:
        return name_of(self.source, self.rows[row])


def validated(run: Run) -> bool:
    """Whether the metrics hold the validation of the last step; a run that was killed may lack it."""
    rows = read_metrics(run.out / "metrics.jsonl") if collectives.rank() == 0 else []
    validated_here = any(row["step"] == run.step and any(name.startswith("val/") for name in row) for row in rows)
    return collectives.any_rank(validated_here)[0]
