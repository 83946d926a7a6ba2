"""Results of `kiloword mine`, from which its report, JSON and table of pairs are written."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kiloword.apps.mine import analyses, pairs
from kiloword.apps.mine.calibrate import RandomPairs, ThresholdChoice, calibrate, candidates, compare, random_pairs
from kiloword.apps.mine.corpus import Corpus, Floats
from kiloword.apps.mine.options import MineOptions
from kiloword.apps.mine.origin import Truths
from kiloword.distributed.sharing import is_first
from kiloword.methods.fff.preset import Mined
from kiloword.runs.alerts import MINED
from kiloword.terminal.progress import Bar

WHOLE = "eq. 2"
LABELS = {WHOLE: "all terms", "it": "image-text (p1)", "ii": "image-image (p2)", "tt": "text-text (p3)"}
"""Keys of the JSON -> what is printed."""


@dataclass(frozen=True)
class Group:
    """Analyses of a group of captions: all, the original, or the extra ones."""

    captions: int
    repeated: int  # captions that repeat an earlier one
    frequent: list[tuple[str, int]]
    ranks: analyses.Ranks
    annotated: Floats  # S_it
    nearest: Floats
    among: Floats
    one: Floats
    mean: Floats


@dataclass(frozen=True)
class MiningResults:
    """Results of mining, without images."""

    data: str
    teacher: str
    corpus: Corpus
    options: MineOptions
    settings: Mined  # as used
    mined: pairs.MinedPairs
    sample: RandomPairs
    choices: list[ThresholdChoice]
    groups: dict[str, Group]
    seconds: dict[str, float]

    @property
    def memory_mb(self) -> float:
        """Peak memory of the process, in MB."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / (1 << 20 if sys.platform == "darwin" else 1 << 10)


def judge(
    corpus: Corpus,
    parts: dict[str, Corpus],
    settings: Mined,
    options: MineOptions,
    names: tuple[str, str],
    truths: Truths | None,
) -> MiningResults | None:
    """Calibrate if requested, search, analyse. Args: parts: groups of captions; names: of the data and the teacher.

    Ranks that share the work each search some of the images; only the first one returns results.
    """
    seconds, start = {}, time.perf_counter()
    annotated = corpus.annotated()
    sample = random_pairs(corpus, options.seed, truth=truths)
    if options.calibrate:
        settings = options.over(calibrate(annotated, sample, settings, options.rate))
    choices = compare(corpus, annotated, sample, settings, candidates(annotated, sample, settings.p1))
    seconds["calibration"] = time.perf_counter() - start
    progress = Bar("pairs", "pairs")
    mined = pairs.search(corpus, settings, most=options.most, chunk=options.chunk, truth=truths, progress=progress)
    seconds["search"] = time.perf_counter() - start - seconds["calibration"]
    near = {name: analyses.nearest(part, options.seed) for name, part in parts.items()}
    if not is_first():
        return None
    groups = {name: _group(part, options, near[name]) for name, part in parts.items()}
    seconds["analyses"] = time.perf_counter() - start - sum(seconds.values())
    return MiningResults(*names, corpus, options, settings, mined, sample, choices, groups, seconds)


def _group(corpus: Corpus, options: MineOptions, nearest: Floats) -> Group:
    """The paper's analyses of a corpus. Args: nearest: see `analyses.nearest`."""
    one, mean = analyses.one_and_mean(corpus, options.seed)
    return Group(
        captions=len(corpus.captions),
        repeated=len(corpus.captions) - len(set(corpus.captions)),
        frequent=analyses.frequent(corpus.captions),
        ranks=analyses.ranks(corpus, options.batch, options.seed),
        annotated=corpus.annotated(),
        nearest=nearest,
        among=analyses.among(corpus),
        one=one,
        mean=mean,
    )


def flags(settings: Mined, prefix: str = "--settings.") -> str:
    """The thresholds as flags of `kiloword train fff`."""
    named = [] if settings.teacher == "teacher" else [f"{prefix}teacher {settings.teacher}"]
    values = (f"{prefix}{name.replace('_', '-')} {value:g}" for name, value in thresholds(settings).items())
    return " ".join([*values, *named])


def warning(mined: pairs.MinedPairs) -> str:
    """A warning if more than a few percent of all pairs are mined; otherwise empty."""
    share = mined.mined.whole / max(mined.pairs, 1)
    if share <= MINED:
        return ""
    return (
        f"{share:.1%} of all pairs are mined as positives, so positives carry little information. Raise the "
        "thresholds, or fit them to the teacher with --calibrate and a lower --false-rate."
    )


def thresholds(settings: Mined) -> dict[str, float]:
    """p1, p2, p3 and p1'."""
    return {name: getattr(settings, name) for name in ("p1", "p2", "p3", "p1_text")}


def terms(mined_pairs: pairs.MinedPairs) -> dict[str, dict[str, float | int | None]]:
    """Counts, precision and recall of eq. 2 and of each of its terms."""
    table: dict[str, dict[str, float | int | None]] = {}
    for name in (WHOLE, *pairs.TERMS):
        mined, right, kept = (
            counts.whole if name == WHOLE else counts.term[name]
            for counts in (mined_pairs.mined, mined_pairs.right, mined_pairs.annotated)
        )
        table[name] = {
            "mined": mined,
            "alone": None if name == WHOLE else mined_pairs.mined.alone[name],
            "share_of_pairs": mined / max(mined_pairs.pairs, 1),
            "annotated_accepted": kept / max(mined_pairs.annotated_pairs, 1),
            "precision": right / mined if mined_pairs.true is not None and mined else None,
            "recall": right / mined_pairs.true if mined_pairs.true else None,
        }
    return table


def as_json(results: MiningResults) -> dict[str, Any]:
    """Content of `mine.json`; metric names never change meaning."""
    mined, corpus = results.mined, results.corpus
    counts = mined.per_image.numpy()
    return {
        "data": results.data,
        "teacher": results.teacher,
        "images": len(corpus.keys),
        "captions": len(corpus.captions),
        "thresholds": thresholds(results.settings),
        "calibrated": results.options.calibrate,
        "pairs": mined.pairs,
        "true_pairs": mined.true,
        "terms": terms(mined),
        "mined_per_image": _spread(counts),
        "images_without_mined": int((counts == 0).sum()),
        "choices": [asdict(choice) for choice in results.choices],
        "similarity": {name: _spread(getattr(results.sample, name).numpy()) for name in pairs.TERMS},
        "analyses": {name: _group_json(group) for name, group in results.groups.items()},
        "seconds": results.seconds,
        "memory_mb": results.memory_mb,
    }


def _group_json(group: Group) -> dict[str, Any]:
    ranks = group.ranks
    return {
        "captions": group.captions,
        "repeated": group.repeated,
        "frequent": group.frequent,
        "rank_batch": ranks.batch,
        "rank_batches": ranks.batches,
        "rank_of_own_caption": _spread(ranks.captions),
        "rank_of_own_image": _spread(ranks.images),
        "own_caption_first": float(np.mean(ranks.captions <= 1)),
        "own_image_first": float(np.mean(ranks.images <= 1)),
        "annotated_similarity": _spread(group.annotated),
        "nearest_captions_similarity": _spread(group.nearest),
        "similarity_among_captions": _spread(group.among),
        "similarity_with_one_caption": _spread(group.one),
        "similarity_with_mean_caption": _spread(group.mean),
    }


def _spread(values: Sequence[float] | Floats | np.ndarray[Any, Any]) -> dict[str, float] | None:
    """Mean, deviation and quantiles; None without values."""
    if not len(values):
        return None
    array = np.asarray(values, np.float64)
    low, median, high = np.quantile(array, (0.05, 0.5, 0.95))
    return {
        "mean": float(array.mean()),
        "std": float(array.std()),
        "q05": float(low),
        "median": float(median),
        "q95": float(high),
        "max": float(array.max()),
    }
