"""A teacher for mined positives: a model trained first on the same data, its features, and thresholds that fit it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from kiloword.config.recipes import Recipe
from kiloword.types import Source
from research.arms import Options
from research.arms_rows import recipe_hash

THRESHOLDS = ("p1", "p2", "p3", "p1_text")
TERMS = ("image_text", "image_image", "text_text")
SEED = 100  # of the teacher, and of the runs that choose learning rates: no run that is reported has it


def make(
    recipe: Recipe, out: Path, device: str, workers: int, source: Callable[[Recipe], Source] | None = None
) -> None:
    """Train `out/teacher`, embed its data into `out/features`, write `out/teacher.json`; each is resumed or kept.

    Where the data has ground truth, the file also holds precision and recall of eq. 2 and of each of its terms.
    Args: source: opens what the teacher is trained on, if not all of the recipe's data.
    Raises: ValueError when the file is of a teacher of another recipe; a file of an older version does not tell.
    """
    made = recipe_hash(recipe)
    if (before := written(out)) is not None:
        if before.get("recipe", made) != made:
            raise ValueError(f"{out} holds a teacher of other settings: choose another --out, or repeat its settings.")
        return
    from kiloword.files import write_json
    from kiloword.stores.command import Embed
    from kiloword.stores.features import FeatureStore
    from kiloword.training.loop import RunOptions, train
    from kiloword.training.resolve import open_sources

    how, seen = RunOptions(workers=workers, device=device), None if source is None else source(recipe)
    model = train(replace(recipe, seed=SEED), out / "teacher", source=seen, options=how)
    Embed(model=str(model), data=recipe.data.sources, out=features(out), workers=workers, device=device).run()
    write_json(out / "teacher.json", {"recipe": made, **_calibrated(FeatureStore(features(out)), open_sources(recipe))})


def _calibrated(table: Any, source: Any) -> dict[str, Any]:
    """Thresholds, and counts of the random pairs that they mine."""
    from kiloword.apps.mine.corpus import corpus_of, truth_of
    from kiloword.apps.mine.search import calibrate, random_pairs
    from kiloword.methods.fff import Mined, matches

    corpus, rows = corpus_of(source, table)
    sample, true = random_pairs(corpus, SEED, truth=truth_of(source, corpus.captions, rows))
    settings = calibrate(corpus.annotated(), sample, Mined())
    mined = {}
    for name, terms in {"eq. 2": TERMS, **{term: (term,) for term in TERMS}}.items():
        on: Any = {term: term in terms for term in TERMS}
        chosen = replace(settings, **on)
        positives = matches(chosen, *sample).any(0)
        counts = {"pairs": len(positives), "mined": int(positives.sum())}
        if true is not None:
            counts |= {"true": int(true.sum()), "right": int((positives & true).sum())}
        mined[name] = counts
    return {"thresholds": {k: v for k, v in asdict(settings).items() if k in THRESHOLDS}, "mined": mined}


def written(out: Path) -> dict[str, Any] | None:
    """The results of `make`; None before it has run."""
    path = out / "teacher.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def features(out: Path) -> Path:
    """The feature store that mined positives need."""
    return out / "features"


def joined(recipe: Recipe, out: Path) -> Recipe:
    """The recipe with the teacher's features, for mined positives."""
    return replace(recipe, data=replace(recipe.data, features=(str(features(out)),)))


def settled(recipe: Recipe, settings: dict[str, Any], out: Path, mined: bool) -> Recipe:
    """The recipe with settings, and, where it mines positives, with the features of the teacher."""
    return replace(joined(recipe, out) if mined else recipe, settings=settings)


def thresholds(out: Path) -> dict[str, float]:
    """Settings of mined positives; none before the teacher is there."""
    results = written(out)
    return {} if results is None else dict(results["thresholds"])


def notes(options: Options) -> Sequence[str]:
    """Markdown: the thresholds, and what the teacher mines of random pairs."""
    results = written(options.out)
    if results is None:
        return ()
    lines = ["", "Mined by the teacher, of random pairs that are not annotated, with "]
    lines[-1] += ", ".join(f"{name} {value:g}" for name, value in results["thresholds"].items()) + ":"
    lines += ["", "| | mined per million | precision | recall |", "|---|---|---|---|"]
    for name, n in results["mined"].items():
        precision = f"{n['right'] / n['mined']:.3f}" if n["mined"] and "right" in n else "-"
        recall = f"{n['right'] / n['true']:.3f}" if n.get("true") else "-"
        lines.append(f"| {name} | {1e6 * n['mined'] / n['pairs']:.0f} | {precision} | {recall} |")
    return lines
