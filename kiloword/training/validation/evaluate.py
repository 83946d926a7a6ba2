"""Evaluation of the validation sets of a run, after its steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kiloword.data.stored import WithTokens
from kiloword.distributed import collectives
from kiloword.distributed.device import precision_of
from kiloword.distributed.sharing import alone, gathered, lockstep, sharing
from kiloword.errors import count
from kiloword.evaluation.task import TOKEN_TASKS
from kiloword.stores.tokens import FoundImages, ImageTokens, TextTokens, TokenizerWithTokens, opened
from kiloword.training.log import read_metrics
from kiloword.training.validation.sets import LOCKSTEP, ValSet, judged, prefix

if TYPE_CHECKING:
    from kiloword.data.text.tokenizer import Tokenizer
    from kiloword.training.run import Run

HEADLINES = {  # metrics in the message about a set; of other tasks the first two
    "retrieval": ("text_retrieval_recall@1", "image_retrieval_recall@1"),
    "vqa": ("accuracy",),
    "zeroshot": ("acc1", "mean_average_precision"),
    "caption": ("cider",),
}


def validate(run: Run) -> dict[str, float]:
    """Metrics of all validation sets of a run, by name: "val/METRIC", with several sets "val/NAME/METRIC".

    All ranks share the work and get the result.
    """
    from kiloword.api import Matcher

    values: dict[str, float] = {}
    with _evaluating(run):
        matcher = Matcher(run.learner.model, _tokenizer(run), run.learner.method)
        stored = [] if lockstep() else opened(run.recipe.data.image_features, ImageTokens)
        images = [store for store in stored if not store.file.augmented]
        for one in run.val:
            metrics = _of_set(matcher, _on_tokens(one, images), run)
            values |= {f"{prefix(one, run.val)}{name}": value for name, value in metrics.items()}
    for one in run.val:
        named = f" {one.name}" if len(run.val) > 1 else ""
        run.log.say(f"val{named} at step {run.step}: {_summary(values, one, prefix(one, run.val))}")
    return values


def _tokenizer(run: Run) -> Tokenizer:
    """The tokenizer, which gives captions their stored tokens; ranks with shares of the weights all run the trunk."""
    texts = [] if lockstep() else opened(run.recipe.data.text_features, TextTokens)
    return TokenizerWithTokens(run.tokenizer, texts) if texts else run.tokenizer


def _on_tokens(one: ValSet, stores: Sequence[ImageTokens]) -> ValSet:
    """The set with tokens of its images, where the stores have them and its task can read them."""
    if not stores or one.task not in TOKEN_TASKS:
        return one
    try:
        return replace(one, source=WithTokens(one.source, FoundImages(stores, one.source)))
    except ValueError:
        return one


@contextmanager
def _evaluating(run: Run) -> Iterator[None]:
    """Inside, the ranks share work on the averaged weights; on CUDA in the precision of the run, on a CPU in fp32, so
    that runs can be compared. Scores are in fp32 everywhere."""
    run.learner.eval()
    sharded = any(collectives.sharded(p) for p in run.learner.parameters())
    precision = precision_of(run.recipe.precision, "cuda") if run.device.type == "cuda" else nullcontext
    with run.average.in_place(run.learner), sharing(lockstep=sharded), precision():
        yield
    run.learner.train()


def _of_set(matcher: Any, one: ValSet, run: Run) -> Mapping[str, float]:
    """Metrics of one set, equal on all ranks; only the first rank computes all of some tasks (caption)."""
    with alone() if lockstep() and one.task not in LOCKSTEP else nullcontext():
        metrics = judged(matcher, one, run.loader.source)
    return gathered(metrics)[0]


def _summary(values: Mapping[str, float], one: ValSet, start: str) -> str:
    """The most telling metrics of a set, with what chance would give among its images, and how many were skipped."""
    names = [name.removeprefix(start) for name in values if name.startswith(start)]
    chosen = [name for name in names if name in HEADLINES.get(one.task, names[:2])]
    metrics = ", ".join(f"{name} {values[start + name]:.3f}" for name in chosen)
    skipped = int(values.get(f"{start}skipped", 0))
    images = len(one.source) - skipped
    chance = f" of {images:,} images (chance {1 / images:.2g})" if one.task == "retrieval" else ""
    bad = f", {count(skipped, 'sample')} skipped (see `kiloword data check`)" if skipped else ""
    return metrics + chance + bad


def validated(run: Run) -> bool:
    """Whether the metrics hold the validation of the last step; a run that was killed may lack it."""
    rows = read_metrics(run.out / "metrics.jsonl") if collectives.rank() == 0 else []
    validated_here = any(row["step"] == run.step and any(name.startswith("val/") for name in row) for row in rows)
    return collectives.any_rank(validated_here)[0]
