"""Outputs of `kiloword mine`: report, table of pairs, metrics, thresholds, terminal summary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from kiloword import report
from kiloword.apps.mine.corpus import Corpus
from kiloword.apps.mine.gallery import ranked_above, raw_and_pseudo
from kiloword.apps.mine.images import Pair, ReportImages
from kiloword.apps.mine.origin import Origin, Truths
from kiloword.apps.mine.page import page
from kiloword.apps.mine.pairs import TERMS, MinedPairs, by_term
from kiloword.apps.mine.results import LABELS, MiningResults, as_json, flags, terms, thresholds, warning
from kiloword.files import atomic, write_json
from kiloword.randomness import generator
from kiloword.terminal import say

IMAGES = 65536  # whose pairs are written at once
WIDE, BEST = 6, 5  # captions that match many images, and images per caption in the report


def write(out: Path, results: MiningResults, origin: Origin, parts: Mapping[str, Corpus]) -> None:
    """Write all files atomically; the report last. Args: parts: groups of captions, as of `origin.split_extra`."""
    truths = origin.truth(results.corpus.captions)
    write_json(out / "thresholds.json", thresholds(results.settings))
    write_json(out / "mine.json", as_json(results))
    write_pairs(out / "pairs.parquet", results, truths)
    report.write(out / "report.html", page(results, chosen(results, truths, parts), origin.thumbnail))
    say(*summary(results), f"report: {out / 'report.html'}")


def write_pairs(path: Path, results: MiningResults, truths: Truths | None) -> None:
    """Write the kept pairs; memory is that of IMAGES images, as a row group."""
    with ExitStack() as stack:
        file, writer = stack.enter_context(atomic(path)), None
        for first in range(0, len(results.mined.column), IMAGES):
            part = pairs_table(results, truths, range(first, first + IMAGES))
            writer = writer or stack.enter_context(pq.ParquetWriter(file, part.schema))
            writer.write_table(part)


def pairs_table(results: MiningResults, truths: Truths | None, part: range) -> pa.Table:
    """The kept pairs of a part of the images, image by image, best S_it first.

    Columns: key of the image; caption, its index among the captions of its own image (key `owner`); S_it, S_ii and
    S_tt as it, ii, tt, which terms of eq. 2 accept them (by_it, by_ii, by_tt), and whether they are `true`, with
    ground truth. The table is valid input of `kiloword train --extra-captions`.
    """
    corpus, mined = results.corpus, results.mined
    column = mined.column[part.start : part.stop]
    kept = column >= 0
    images = part.start + torch.nonzero(kept)[:, 0].numpy()
    captions = column[kept].numpy()
    values = {name: mined.scores[name][part.start : part.stop][kept] for name in TERMS}
    accepted = by_term(results.settings, **values)
    owner = corpus.owner[captions]
    columns: dict[str, object] = {
        "key": _texts(corpus.keys, images),
        "caption": _texts(corpus.captions, captions),
        "caption_index": captions - corpus.starts[owner],
        "owner": _texts(corpus.keys, owner),
        **{name: value.numpy() for name, value in values.items()},
        **{f"by_{name}": value.numpy() for name, value in accepted.items()},
    }
    if truths is not None:
        columns["true"] = _true(truths, captions, images)
    return pa.table(columns)


def _true(truths: Truths, captions: np.ndarray, images: np.ndarray) -> np.ndarray:
    """Whether each caption is true of the image beside it, bool [n]."""
    true = np.zeros(len(captions), bool)
    order = np.argsort(captions, kind="stable")
    for block in np.array_split(order, max(1, len(order) // 512)):
        true[block] = truths(captions[block], images[block]).diagonal().numpy()
    return true


def _texts(texts: Sequence[str], places: np.ndarray) -> pa.Array:
    """Texts [n]; lone surrogates (file names that are not UTF-8), which parquet cannot store, are replaced."""
    different, inverse = np.unique(places, return_inverse=True)
    return pa.array([texts[n].encode("utf-8", "replace").decode("utf-8") for n in different], pa.string()).take(inverse)


def chosen(results: MiningResults, truths: Truths | None, parts: Mapping[str, Corpus]) -> ReportImages:
    """Random mined pairs of every term, the captions mined most often, and images with lists of captions."""
    corpus, options = results.corpus, results.options
    if not options.gallery:
        return ReportImages({}, [])
    return ReportImages(
        {name: list(_drawn(results, name, truths)) for name in TERMS},
        [(caption, _best(results, caption, truths)) for caption in _widest(corpus, results.mined)],
        list(raw_and_pseudo(parts, options.gallery, options.seed)),
        list(ranked_above(corpus, options.batch, options.gallery, options.seed, truths)),
    )


def _drawn(results: MiningResults, term: str, truths: Truths | None) -> Iterator[Pair]:
    """At most `gallery` mined pairs accepted by a term, each of another image."""
    mined, options = results.mined, results.options
    accepted = by_term(results.settings, **mined.scores)[term] & (mined.column >= 0)
    rng = generator(options.seed, "gallery", term)
    rows = torch.nonzero(accepted.any(1))[:, 0].numpy()
    for row in rng.permutation(rows)[: options.gallery].tolist():
        place = int(rng.choice(torch.nonzero(accepted[row])[:, 0].numpy()))
        caption = int(mined.column[row, place])
        true = None if truths is None else bool(truths(np.array([caption]), np.array([row]))[0, 0])
        yield Pair(row, caption, {name: float(mined.scores[name][row, place]) for name in TERMS}, true)


def _widest(corpus: Corpus, mined: MinedPairs) -> list[int]:
    """The captions mined with the most images, without repeated texts."""
    kept: dict[str, int] = {}
    for caption in mined.per_text.argsort(descending=True, stable=True).tolist():
        if len(kept) == WIDE or not int(mined.per_text[caption]):
            break
        kept.setdefault(corpus.captions[caption], caption)
    return list(kept.values())


def _best(results: MiningResults, caption: int, truths: Truths | None) -> list[tuple[int, float, bool | None]]:
    """The images of largest S_it with a caption, except its own image."""
    corpus = results.corpus
    text = corpus.load(corpus.texts, np.array([caption]))[0]
    parts = np.array_split(np.arange(len(corpus.keys)), -(-len(corpus.keys) // 65536))
    scores = torch.cat([corpus.load(corpus.images, part) @ text for part in parts]).cpu()
    scores[int(corpus.owner[caption])] = -torch.inf
    best = scores.topk(min(BEST, len(scores) - 1))
    rows = best.indices.tolist()
    true = [None] * len(rows) if truths is None else truths(np.array([caption]), np.array(rows))[0].tolist()
    return list(zip(rows, best.values.tolist(), true, strict=True))


def summary(results: MiningResults) -> list[str]:
    """Lines of the terminal summary."""
    mined, table = results.mined, terms(results.mined)
    seconds = ", ".join(f"{name} {value:.1f} s" for name, value in results.seconds.items())
    mean = float(mined.per_image.double().mean())
    lines = [
        f"{len(results.corpus.keys):,} images, {len(results.corpus.captions):,} captions, teacher {results.teacher}",
        f"mined {mined.mined.whole:,} of {mined.pairs:,} pairs, {mean:.3g} an image",
    ]
    lines += [f"warning: {many}"] if (many := warning(mined)) else []
    for name, label in LABELS.items():
        row = table[name]
        judged = [f"{what} {row[what]:.3f}" for what in ("precision", "recall") if row[what] is not None]
        lines.append("  ".join([f"{label:16s}", f"{row['mined']:>12,} pairs", *judged]))
    lines += [f"{seconds}; at most {results.memory_mb:,.0f} MB", f"to train with them: {flags(results.settings)}"]
    return lines
