"""When and what a run saves: its model folder and its resumable state."""

from __future__ import annotations

from kiloword import parallel
from kiloword.checkpoint import save_model, save_state
from kiloword.prepare import Run, state_of
from kiloword.recipes import ModelFile


def save(run: Run) -> None:
    """Model folder and state, by rank 0; the model is the average where there is one.

    The state comes last: a crash between the two repeats some steps, and never leaves a finished run without its model.
    """
    if parallel.rank():
        return
    recipe = run.recipe
    file = ModelFile(
        method=recipe.method,
        settings=recipe.settings,
        model=recipe.model,
        size=recipe.size,
        steps=run.step,
        data=run.loader.source.name,
    )
    with run.average.in_place(run.learner):
        save_model(run.out / "model", run.learner.model, run.tokenizer, file)
    tensors, numbers = state_of(run)
    save_state(run.out / "state", run.step, tensors, numbers)
