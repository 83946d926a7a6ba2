"""OUT/report.html: what a run did, written by rank 0 when it ends, is stopped or fails.

Nothing of it is read again: model, states and rows are the same with and without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kiloword import report
from kiloword.addresses import scrubbed
from kiloword.config.options import RunOptions
from kiloword.config.recipes import Recipe
from kiloword.config.settings import leaves
from kiloword.data.sampler import Order
from kiloword.distributed import collectives
from kiloword.errors import count
from kiloword.methods.defaults import default_recipe
from kiloword.models.card import CARD, write_card
from kiloword.report import Html
from kiloword.training import start
from kiloword.training.report.page import Differs, page
from kiloword.watch import history
from kiloword.watch.runs import ERROR, Watched

if TYPE_CHECKING:
    from kiloword.training.run import Run

NAME = "report.html"
SAMPLES = 8  # examples of the training data that are drawn
ELSEWHERE = ("method", "size", "data.sources", "data.val", "settings", "model.text.vocab")  # shown, or resolved


@contextmanager
def reported(run: Run, options: RunOptions) -> Iterator[None]:
    """Note in the run's history that this process began, and write its report when it ends in any way.

    A finished run that has its report and its card is left as it is.
    """
    if not (collectives.rank() or run.finished):
        history.began(
            run.out,
            step=run.step,
            torch=torch.__version__,
            device=_device(run.device),
            ranks=collectives.ranks(),
            images=len(run.loader.source),
            val={one.name: [scrubbed(one.source.name), len(one.source)] for one in run.val},
            options=_options(options),
        )
    try:
        yield
    finally:
        if _outdated(run.out) or (run.finished and not (run.out / "model" / CARD).is_file()):
            write(run)


def _outdated(out: Path) -> bool:
    """Whether the run has rows or an error that its report lacks."""
    page = out / NAME
    newest = max(
        (file.stat().st_mtime_ns for file in (out / "metrics.jsonl", out / ERROR) if file.is_file()), default=0
    )
    return newest > 0 and (not page.is_file() or page.stat().st_mtime_ns < newest)


def write(run: Run) -> None:
    """Write the report; an error is printed, and does not end the run."""
    if collectives.rank():
        return
    try:
        watched = Watched(run.out, run.out.absolute().name)
        watched.update()
        text = page(watched, unusual(run.recipe), _samples(run), run.recipe.settings)
        report.write(run.out / NAME, text)
    except Exception as e:
        run.log.say(f"{run.out / NAME} was not written ({type(e).__name__}: {e}); nothing else of the run needs it.")
    if run.finished:
        _write_card(run)


def _write_card(run: Run) -> None:
    """Write the model card; an error is printed, and does not end the run."""
    try:
        write_card(run.out / "model")
    except (OSError, ValueError) as e:
        run.log.say(f"the card of {run.out / 'model'} was not written ({e}); nothing else of the run needs it.")


def _device(device: torch.device) -> str:
    return (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{device} ({count(torch.get_num_threads(), 'thread')})"
    )


def _options(options: RunOptions) -> dict[str, Any]:
    """Options that differ from their defaults, as flags."""
    usual = asdict(RunOptions())
    return {name.replace("_", "-"): v for name, v in asdict(options).items() if v != usual[name]}


def unusual(recipe: Recipe) -> list[Differs]:
    """Settings that differ from the defaults of the run's method, size and data: (flag, value, default).

    Defaults that a run resolves by itself ("auto") are omitted.
    """
    usual = {leaf.flag: leaf.value for leaf in leaves(_defaults(recipe))}
    return [
        (leaf.flag, leaf.value, usual.get(leaf.flag))
        for leaf in leaves(recipe)
        if leaf.path not in ELSEWHERE and leaf.value != usual.get(leaf.flag) and usual.get(leaf.flag) != "auto"
    ]


def _defaults(recipe: Recipe) -> Recipe:
    """The recipe without any flags; of a size or folder that is gone, the run's own towers."""
    sources = recipe.data.sources
    try:
        if recipe.init is not None:
            return start.defaults(recipe.method, recipe.init, None, sources)
        plain = default_recipe(recipe.method, recipe.size, sources)
    except ValueError:
        return recipe
    trunks = recipe.model.image.trunk.name or recipe.model.text.trunk.name
    return replace(plain, model=recipe.model) if trunks else plain


def _samples(run: Run) -> Html:
    """The first examples of the run as training sees them; nothing where it reads stored tokens in place of images."""
    loader = run.loader
    if loader.data.image_features or loader.data.text_features or len(loader.source) < SAMPLES:
        return Html()
    order = Order(len(loader.source), SAMPLES, loader.seed)
    few = replace(loader, order=order, inputs={}, stores=(), truth=False, rank=0, ranks=1)
    try:
        examples = few.examples(0)[0]
    except ValueError:  # bad data ended the run: its error says which
        return Html()
    tiles = [(e.image.permute(1, 2, 0).contiguous().numpy(), _words(e)) for e in examples]
    return report.tiles(tiles, columns=4)


def _words(example: Any) -> str:
    """The captions of an example, or its question with the answers."""
    composed, asked = "composed: " if example.composed else "", f"{example.question} " if example.question else ""
    text = f"{composed}{asked}{' | '.join(example.captions)}"
    return text if len(text) <= 160 else text[:160] + "…"
