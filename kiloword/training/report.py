"""OUT/report.html: what a run did, written by rank 0 when it ends, is stopped or fails.

Nothing of it is read again: model, states and rows are the same with and without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import torch

from kiloword.addresses import scrubbed
from kiloword.config.options import RunOptions
from kiloword.config.recipes import Recipe
from kiloword.config.settings import leaves
from kiloword.data.sampler import Order
from kiloword.distributed import collectives
from kiloword.errors import count
from kiloword.models.card import CARD, write_card
from kiloword.report import Gallery, Text, Tile, write_page
from kiloword.runs.page import Differs, page
from kiloword.runs.rows import began
from kiloword.runs.run import Run as Folder
from kiloword.training.resolve import Run

NAME = "report.html"
SAMPLES = 8  # examples of the training data that are drawn
ELSEWHERE = ("method", "size", "data.sources", "data.val", "settings")  # the page shows them already
DECIDING = ("init", "image_tower", "text_tower", "data.image_features", "data.text_features")  # defaults follow them


@contextmanager
def reported(run: Run) -> Iterator[None]:
    """Note in the run's history that this process began, and write its report when it ends in any way.

    A finished run that has its report and its card is left as it is.
    """
    done = run.finished and all(path.is_file() for path in (run.out / NAME, run.out / "model" / CARD))
    if not (collectives.rank() or run.finished):
        threads = f"{run.device} ({count(torch.get_num_threads(), 'thread')})"
        began(
            run.out,
            step=run.step,
            torch=torch.__version__,
            device=torch.cuda.get_device_name(run.device) if run.device.type == "cuda" else threads,
            ranks=collectives.ranks(),
            images=len(run.loader.source),
            val={one.name: [scrubbed(one.source.name), len(one.source)] for one in run.val},
        )
    try:
        yield
    finally:
        if not done:
            write(run)


def write(run: Run) -> None:
    """Write the report, and the model card of a finished run; an error is printed, and does not end the run."""
    if collectives.rank():
        return
    try:
        write_page(run.out / NAME, page(Folder(run.out), run.finished, run.unusual, list(_samples(run))))
        if run.finished:
            write_card(run.out / "model")
    except Exception as e:
        run.log.say(f"{run.out / NAME} or the model card was not written ({type(e).__name__}: {e}).")


def unusual(recipe: Recipe, usual: Recipe, options: RunOptions) -> list[Differs]:
    """Settings that differ from their defaults: (flag, value, default).

    Args: recipe: as it is requested, not resolved; usual: with the defaults of the method, size, data, init and towers
    of `recipe`.
    """
    mine, plain = ([*leaves(of), *leaves(run)] for of, run in ((recipe, options), (usual, RunOptions())))
    return [
        (leaf.flag, leaf.value, default)
        for leaf, other in zip(mine, plain, strict=True)
        for default in [leaf.field.default if leaf.path in DECIDING else other.value]
        if leaf.value != default and leaf.path not in ELSEWHERE and ".trunk." not in leaf.path
    ]


def _samples(run: Run) -> Iterator[Text | Gallery]:
    """The first examples of the run as training sees them; nothing where it reads stored tokens in place of images."""
    loader = run.loader
    if loader.data.image_features or loader.data.text_features or len(loader.source) < SAMPLES:
        return
    order = Order(len(loader.source), SAMPLES, loader.seed)
    few = replace(loader, order=order, inputs={}, stores=(), truth=False, ranks=1)
    with suppress(ValueError):  # bad data ended the run: its error says which
        examples = few.examples(0)[0]
        yield Text(
            "The first examples of the run as training sees them: augmented, with the captions that were chosen."
        )
        images = (e.image.permute(1, 2, 0).contiguous().numpy() for e in examples)
        yield Gallery([Tile(image, [e.words]) for image, e in zip(images, examples, strict=True)], columns=4)
