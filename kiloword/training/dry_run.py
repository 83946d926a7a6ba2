"""What a run would do, before it is made: its plan, or the message with which it is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from textwrap import wrap
from typing import Any

from kiloword.config.options import RunOptions
from kiloword.config.recipes import Recipe, size_of
from kiloword.config.settings import lacks, leaves, parse, shown
from kiloword.data.edits import parts_of
from kiloword.data.reading import BadRows
from kiloword.distributed import collectives
from kiloword.distributed.device import choose
from kiloword.methods.registry import find
from kiloword.terminal import say
from kiloword.training import tuning
from kiloword.training.resolve import Plan, micro_batches, resolve, visited
from kiloword.training.setup import make_learner
from kiloword.training.step import learner_of
from kiloword.types import Source

MOST = 256  # largest number of images decoded of a rank's first batch
WIDE = 110  # columns


def rehearse(recipe: Recipe, source: Source, out: Path, options: RunOptions) -> None:
    """Do everything before the first step except writing files and building large towers, and print what would run.

    The first batch is read and decoded, at most MOST images on each rank. Raises: ValueError for anything that training
    would refuse before its first evaluation: settings, data, feature stores, a model to start from, `out`.
    """
    with collectives.process_group(timeout_s=options.timeout):
        plan = resolve(recipe, source, out, options, choose(options.device))
        if recipe.init is not None:
            make_learner(plan.recipe, plan.method, options.trust_code)
        loader = plan.loader
        share = loader.order.batch // loader.ranks
        parts = next(n for n in range(1, share + 1) if share % n == 0 and share // n <= MOST)
        few = replace(loader, workers=0, rank=loader.rank * parts, ranks=loader.ranks * parts)
        batch, skipped = next(few.batches(0, 1)), BadRows(sum(map(len, parts_of(source))), recipe.data.bad_share)
        skipped.count(collectives.all_lists(batch.skipped))
        bad = len(skipped)
        if collectives.rank() == 0:
            cut = f", {batch.texts.truncated} cut" if batch.texts.truncated else ""
            kind = f", {bad} bad samples" if bad else ""
            if bad > recipe.data.bad_share * (len(batch) + bad):
                kind += f" (training stops above --bad-share {recipe.data.bad_share:.2%} of all)"
            read = f"{len(batch)} images of the first batch, {len(batch.texts)} captions{cut}{kind}"
            for name, text in (*_lines(plan), ("read", read)):
                indents = {"initial_indent": f"{name:10} ", "subsequent_indent": " " * 11}
                say(*wrap(text, WIDE, break_long_words=False, break_on_hyphens=False, **indents))  # type: ignore[arg-type]


def _lines(plan: Plan) -> Iterator[tuple[str, str]]:
    """A plan as names and texts."""
    recipe, options, rows = plan.recipe, plan.options, visited(plan.recipe, plan.source)
    ranks, parts = collectives.ranks(), micro_batches(recipe)
    learner = learner_of(recipe.model, plan.method)
    counts = tuning.by_part((f"model.{name}", x.numel()) for name, x in learner.model.state_dict().items())
    yield "method", f"{recipe.method} {_settings(parse(recipe.settings, find(recipe.method)[1]))}"
    part = "" if rows == len(plan.source) else f", {rows} visited"
    yield "data", f"{' '.join(recipe.data.sources)}: {len(plan.source)} images{part}"
    for one in plan.val:
        yield "val", f"{one.task} on {one.source.name}: {len(one.source)} images"
    epochs = recipe.steps / plan.loader.order.steps_per_epoch
    yield "length", f"{recipe.steps} steps of {recipe.batch} images, {epochs:.1f} epochs"
    share = f"{parts} x {recipe.batch // ranks // parts} images each{f', {options.parallel}' if ranks > 1 else ''}"
    how = f"checkpointing {options.checkpointing}, compile {options.compile}, {recipe.precision}"
    yield "ranks", f"{ranks}, {share}, {how}"
    listed = ", ".join(f"{name} {count:,}" for name, count in counts.items())
    yield "model", f"{size_of(recipe.model)}, {sum(counts.values()):,} parameters{plan.began}: {listed}"
    tuning.freeze(learner, recipe)
    yield "tuning", tuning.summary(learner, recipe)
    yield "lora", _settings(recipe.lora) if recipe.lora.rank else ""
    for name in ("image", "text", "head"):
        yield f"  {name}", _settings(getattr(plan.file.model, name))
    yield "optimizer", _settings(recipe.optim)
    yield "augment", _settings(recipe.data.augment, every=False) or "none"
    yield "out", f"{plan.out}{' (resumes)' if (plan.out / 'state').is_dir() else ''}"
    yield "device", plan.chosen
    yield from (("note", note) for note in plan.notes)


def _settings(config: Any, every: bool = True) -> str:
    """Settings that are read as `flag=value`, but for tables. Args: every: also flags that have their defaults."""
    usual = {leaf.path: leaf.value for leaf in leaves(type(config)())}
    read = [leaf for leaf in leaves(config) if not (lacks(leaf) or isinstance(leaf.value, dict))]
    chosen = [
        leaf for leaf in read if leaf.value != usual[leaf.path] or (every and leaf.field.metadata.get("flag") != "")
    ]
    return " ".join(f"{leaf.flag}={shown(leaf.value)}" for leaf in chosen)
