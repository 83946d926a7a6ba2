"""`kiloword quickstart`: train on drawn scenes, judge the model on scenes it never saw, write a report."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from PIL import Image

from kiloword import report
from kiloword.__version__ import __version__
from kiloword.api import Matcher, load
from kiloword.apps.quickstart.judge import draw_all, judge
from kiloword.apps.quickstart.page import page
from kiloword.apps.quickstart.results import Facts, QuickstartResults, SampleSizes
from kiloword.apps.quickstart.words import summary
from kiloword.config.recipes import Recipe
from kiloword.config.settings import read_config
from kiloword.files import atomic, write_json
from kiloword.methods.defaults import default_recipe
from kiloword.models.card import record_evaluation
from kiloword.terminal import say, warn
from kiloword.training.log import read_metrics
from kiloword.training.loop import RunOptions, train
from kiloword.training.resolve import with_length


def recipe(seed: int = 0) -> Recipe:
    """What is trained: every number of the run, in one place.

    Images come in fours that share all but shape, sixteen fours a batch: without them shape is not learned in time,
    and fours leave more to learn besides than the data's groups of eight (docs/log.md).
    Softmax, since general captions (levels 1 and 2) match many scenes of a batch, which a sigmoid loss takes amiss.
    """
    base = default_recipe("clip", "tiny", ("scenes?hard=shape&levels=1:1,2:1,3:6",))
    return replace(base, data=replace(base.data, together=4), steps=1400, seed=seed)


def run(out: Path, steps: int | None = None, seed: int = 0) -> None:
    """Train, judge and report into `out`; the same call again resumes. Prints a summary.

    Raises: ValueError when `out` holds another run or cannot be written, or steps is less than 1.
    """
    results = quickstart(with_length(recipe(seed), 0, steps), out)
    files = f"model    {out / 'model'}", f"figures  {out / 'results.json'}", f"report   {out / 'report.html'}"
    say(*summary(results).splitlines(), "", *files)


def quickstart(chosen: Recipe, out: Path, sizes: SampleSizes | None = None) -> QuickstartResults:
    """A run of a recipe on scenes, judged and reported; finished parts are not repeated.

    Writes `results.json`, `report.html` and `example.png` beside what `train` writes.
    """
    sizes = sizes or SampleSizes()
    start = time.perf_counter()
    folder = train(chosen, out, options=RunOptions(workers=1))  # two threads of two cores leave room for one
    metrics = read_metrics(out / "metrics.jsonl")
    training_s = max(time.perf_counter() - start, seconds_in_loop(metrics, chosen.batch))
    results = _results(chosen, out, folder, sizes, training_s)
    held_out = draw_all(f"scenes:test?n={sizes.retrieval}", results.judged.image_size)
    with atomic(out / "example.png") as file:
        Image.fromarray(held_out.pixels[0].permute(1, 2, 0).numpy()).save(file, "PNG")
    report.write(out / "report.html", page(results, out, metrics, held_out))
    return results


def _results(chosen: Recipe, out: Path, folder: Path, sizes: SampleSizes, training_s: float) -> QuickstartResults:
    """The figures of these very weights, from an earlier call where there was one."""
    weights = hashlib.blake2b((folder / "model.safetensors").read_bytes(), digest_size=16).hexdigest()
    version = f"{__version__}-{weights}"
    known = _read(out / "results.json")
    if known is not None and (known.version, known.sizes) == (version, sizes):
        return known
    warn(f"judging the model on {sizes.images} scenes that it never saw")
    start = time.perf_counter()
    matcher = load(folder)
    judged = judge(matcher, chosen.data.sources, sizes)
    facts = _facts(chosen, matcher, training_s, time.perf_counter() - start)
    results = QuickstartResults(version=version, sizes=sizes, facts=facts, judged=judged)
    write_json(out / "results.json", asdict(results))
    data = f"scenes:test?n={sizes.retrieval}"
    record_evaluation(folder, "retrieval", data, sizes.retrieval, chosen.steps, results.judged.retrieval.model)
    return results


def _read(path: Path) -> QuickstartResults | None:
    if not path.is_file():
        return None
    try:
        return read_config(path, QuickstartResults)
    except ValueError as e:
        warn(f"{e} The model is judged again.")
        return None


def _facts(chosen: Recipe, matcher: Matcher, training_s: float, judging_s: float) -> Facts:
    return Facts(
        method=chosen.method,
        size=chosen.size,
        data=chosen.data.sources,
        seed=chosen.seed,
        steps=chosen.steps,
        batch=chosen.batch,
        images=chosen.steps * chosen.batch,
        parameters=sum(p.numel() for p in matcher.model.parameters()),
        training_s=training_s,
        judging_s=judging_s,
    )


def seconds_in_loop(metrics: Sequence[dict[str, Any]], batch: int) -> float:
    """Time that the steps took, in all the calls that a resumed run had: a row tells the speed since the row before."""
    rows = [row for row in metrics if "pairs_per_s" in row]
    before = [0, *(row["step"] for row in rows[:-1])]
    return float(sum((row["step"] - a) * batch / row["pairs_per_s"] for a, row in zip(before, rows, strict=True)))
