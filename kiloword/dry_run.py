"""A run that is not made: what would run, or the sentence with which it would be refused."""

from __future__ import annotations

from pathlib import Path

from kiloword import effects, parallel
from kiloword.data.sampler import steps_per_epoch
from kiloword.device import choose
from kiloword.methods import preset
from kiloword.options import Options
from kiloword.prepare import make_learner, make_loader, micro_batches, open_val, resolve
from kiloword.recipes import Recipe
from kiloword.run_folder import check_same_run, check_utf8, run_file
from kiloword.terminal import say
from kiloword.types import Source


def rehearse(recipe: Recipe, source: Source, out: Path, options: Options) -> None:
    """Do what comes before the first step, but for what writes and for building large towers, and say what would run.

    Raises: ValueError for what training would refuse: settings, data, side tables, a model to start from, `out`.
    """
    choose(options.device)
    with parallel.process_group(timeout_s=options.timeout):
        _prepare(recipe, source, out, options)
        if parallel.rank() == 0:
            say(*describe(recipe, source, out, options))


def _prepare(recipe: Recipe, source: Source, out: Path, options: Options) -> None:
    micro_batches(recipe)
    check_utf8(out)
    recipe, tokenizer = resolve(recipe, source, out / "model", options.trust_code)
    check_same_run(out, run_file(recipe, source), options.extend)
    method = preset(recipe.method, recipe.settings)
    if recipe.init is None:
        method.head(method.shape(recipe.model))
    else:
        make_learner(recipe, method, options.trust_code)
    make_loader(recipe, source, method, tokenizer, options)


def describe(recipe: Recipe, source: Source, out: Path, options: Options) -> list[str]:
    """What a run would do, in a few lines."""
    epochs = recipe.steps / steps_per_epoch(len(source), recipe.batch)
    val = open_val(recipe)
    ranks, pieces = parallel.ranks(), micro_batches(recipe)
    share = f"{pieces} x {recipe.batch // ranks // pieces} pictures each"
    how = f"checkpointing {options.checkpointing}, compile {options.compile}, {recipe.precision}"
    return [
        f"method     {recipe.method} {recipe.settings or ''}",
        f"data       {' '.join(recipe.data.sources)}: {len(source)} pictures",
        *([] if val is None else [f"val        {val.name}: {len(val)} pictures"]),
        f"length     {recipe.steps} steps of {recipe.batch} pictures, {epochs:.1f} epochs",
        f"ranks      {ranks}, {share}{f', {options.parallel}' if ranks > 1 else ''}, {how}",
        f"towers     {recipe.size}: {recipe.model.image}; {recipe.model.text}",
        f"optimizer  {recipe.optim}",
        f"augment    {recipe.data.augment}",
        f"out        {out}{' (resumes)' if (out / 'state').is_dir() else ''}",
        *(f"note       {note}" for note in effects.notes(recipe)),
    ]
