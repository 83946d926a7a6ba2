"""The validation of a run while it trains."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from kiloword.config.recipes import Recipe, sizes
from kiloword.data.images.augmentation import EvalTransform
from kiloword.data.reading import name_of, read
from kiloword.data.sources.questions import question_of
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.distributed import collectives
from kiloword.distributed.device import precision_of
from kiloword.methods.registry import preset
from kiloword.model.model import build
from kiloword.training.log import read_metrics
from kiloword.training.setup import Run, open_val
from kiloword.types import BadSample, Record, Source

if TYPE_CHECKING:
    from kiloword.api import Matcher

ROWS, TRIED = 2, 32  # rows that are evaluated before a run, and rows that are looked at for them


def validate(run: Run) -> dict[str, float]:
    """Retrieval on the recipe's validation data, or answers where the method wants questions; "val/" before names.

    All ranks share the work and know the result.
    """
    from kiloword.api import Matcher
    from kiloword.distributed.sharing import sharing

    run.val = source = open_val(run.recipe) if run.val is None else run.val
    assert source is not None
    asks = "questions" in run.learner.method.needs
    names = ("accuracy",) if asks else ("text_retrieval_recall@1", "image_retrieval_recall@1")
    run.learner.eval()
    sharded = any(collectives.sharded(p) for p in run.learner.parameters())
    # as the run computes; on a CPU in fp32, with which earlier runs can be compared. Scores are in fp32 everywhere
    precision = precision_of(run.recipe.precision, "cuda") if run.device.type == "cuda" else nullcontext
    with run.average.in_place(run.learner), sharing(lockstep=sharded), precision():
        matcher = Matcher(run.learner.model, run.tokenizer)
        found = _judged(matcher, source, run.loader.source, asks)
    run.learner.train()
    run.log.say(f"val at step {run.step}: " + ", ".join(f"{k} {found[k]:.3f}" for k in names))
    return {f"val/{k}": v for k, v in found.items() if isinstance(v, float)}


def _judged(matcher: Matcher, source: Source, train: Source, asks: bool) -> dict[str, float]:
    from kiloword.evaluation import evaluate

    options: dict[str, Any] = {"train": train} if asks and not hasattr(source, "answers") else {}
    return evaluate(matcher, "vqa" if asks else "retrieval", source, **options)


def check_val(recipe: Recipe, val: Source | None, tokenizer: Tokenizer, source: Source) -> None:
    """Evaluate two rows of the recipe's validation data by a small stand-in model, before hours of training.

    Args: val: the validation data, as `open_val` opens it; tokenizer of the run; source: its training data.
    Raises: ValueError for data that the validation of the run would refuse.
    """
    from kiloword.api import Matcher

    if val is None:
        return
    asks = "questions" in preset(recipe.method, recipe.settings).needs
    method, small = preset("vqa" if asks else "clip"), sizes()["debug"]
    text = replace(small.text, vocab=tokenizer.vocab, special=tokenizer.roles.ids())
    matcher = Matcher(build(replace(small, text=text), method), tokenizer)
    some, train = (_ValidationRows(data, _good_rows(data, asks)) for data in (val, source))
    _judged(matcher, some, train, asks)


def _good_rows(source: Source, asks: bool) -> Sequence[int]:
    """The first ROWS that can be used, or all those that were tried."""
    tried = range(0, len(source), max(1, len(source) // TRIED))[:TRIED]
    transform = EvalTransform(sizes()["debug"].image.size)

    def is_good(row: int) -> bool:
        try:
            record = read(source, row)
            transform(record.image)
        except BadSample:
            return False
        return question_of(record) is not None if asks else bool(record.captions)

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
    """Its metrics hold the last step's validation: a run that was killed before may have ended without."""
    rows = read_metrics(run.out / "metrics.jsonl") if collectives.rank() == 0 else []
    found = any(row["step"] == run.step and any(name.startswith("val/") for name in row) for row in rows)
    return collectives.any_rank(found)[0]
