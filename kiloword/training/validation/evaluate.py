"""Evaluation of the validation sets of a run, after its steps."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

import numpy as np

from kiloword.api import Matcher
from kiloword.data.edits import Selection
from kiloword.data.stored import WithTokens
from kiloword.distributed import collectives
from kiloword.distributed.device import precision_of
from kiloword.distributed.sharing import alone, gathered, lockstep, sharing
from kiloword.errors import count
from kiloword.evaluation.task import TOKEN_TASKS
from kiloword.runs.run import MAIN
from kiloword.stores.tokens import FoundImages, ImageTokens, TextTokens, TokenizerWithTokens, opened
from kiloword.training.resolve import Run
from kiloword.training.validation.sets import LOCKSTEP, ValSet, judged, prefix

FEW = 16  # rows of each set that are evaluated before the first step


def first_look(run: Run) -> None:
    """Evaluate a few rows before the first step, so that a run does not end after hours.

    Raises: ValueError for data that the validation cannot use, and where it lacks the metric of `--keep-best`.
    """
    few = list[ValSet]()
    for one in run.val:
        rows = np.linspace(0, len(one.source) - 1, min(FEW, len(one.source))).astype(np.int64)
        few.append(replace(one, source=Selection(one.source, one.source.name, one.source.fingerprint, rows)))
    if few and (metrics := _metrics(run, few)) and run.best.metric:
        run.best.of(metrics)


def validate(run: Run) -> dict[str, float]:
    """Metrics of all validation sets of a run, by name: "val/METRIC", with several sets "val/NAME/METRIC".

    All ranks share the work and get the result.
    """
    values = _metrics(run, run.val)
    for one in run.val:
        named = f" {one.name}" if len(run.val) > 1 else ""
        run.log.say(f"val{named} at step {run.step}: {_summary(values, one, prefix(one, run.val))}")
    return values


def _metrics(run: Run, sets: Sequence[ValSet]) -> dict[str, float]:
    """The ranks share work on the averaged weights; on CUDA in the precision of the run, on a CPU in fp32, so that runs
    can be compared. Scores are in fp32 everywhere."""
    values: dict[str, float] = {}
    sharded = any(collectives.sharded(p) for p in run.learner.parameters())
    precision: Any = precision_of(run.recipe.precision, "cuda") if run.device.type == "cuda" else nullcontext
    run.learner.eval()
    with run.average.in_place(run.learner), sharing(lockstep=sharded), precision():
        folders = run.recipe.data.image_features, run.recipe.data.text_features
        stored = ((), ()) if lockstep() else folders  # ranks with shares of the weights all run the trunk
        images = [store for store in opened(stored[0], ImageTokens) if not store.file.augmented]
        texts = opened(stored[1], TextTokens)
        tokenizer = TokenizerWithTokens(run.tokenizer, texts) if texts else run.tokenizer
        matcher = Matcher(run.learner.model, tokenizer, run.learner.method)
        for one in sets:
            read = one
            if images and one.task in TOKEN_TASKS:
                with suppress(ValueError):  # tokens of other images
                    read = replace(one, source=WithTokens(one.source, FoundImages(images, one.source)))
            try:
                # only the first rank computes all of some tasks (caption)
                with alone() if lockstep() and one.task not in LOCKSTEP else nullcontext():
                    metrics = judged(matcher, read, run.loader.source)
            except ValueError as e:
                raise ValueError(f"--val {one.source.name}, {one.task}: {e}") from e
            values |= {f"{prefix(one, sets)}{name}": value for name, value in gathered(metrics)[0].items()}
    run.learner.train()
    return values


def _summary(values: dict[str, float], one: ValSet, start: str) -> str:
    """The main metrics of a set, with what chance would give among its images, and how many were skipped."""
    names = [name for name in values if name.startswith(start)]
    chosen = [name for name in names if name.endswith(MAIN)] or names
    metrics = ", ".join(f"{name.removeprefix(start)} {values[name]:.3f}" for name in chosen[:2])
    skipped = int(values.get(f"{start}skipped", 0))
    images = len(one.source) - skipped
    chance = f" of {images:,} images (chance {1 / images:.2g})" if one.task == "retrieval" else ""
    bad = f", {count(skipped, 'sample')} skipped (see `kiloword data check`)" if skipped else ""
    return metrics + chance + bad
