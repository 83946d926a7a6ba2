"""Mine a data set: calibrate, search, analyse, and write the pairs, the figures and a page."""

from __future__ import annotations

import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from kiloword.apps.mine import analyses
from kiloword.apps.mine.calibrate import calibrate, candidates, compare, random_pairs
from kiloword.apps.mine.corpus import Corpus, Ints, Truth, corpus_of, split_extra, truth_of
from kiloword.apps.mine.search import TERMS, MinedPairs, by_term, search
from kiloword.config.recipes import DataConfig
from kiloword.config.settings import check
from kiloword.data.open import open_data
from kiloword.distributed.device import choose
from kiloword.distributed.sharing import is_first, together
from kiloword.evaluation.features import tile
from kiloword.files import Lock, atomic, write_json
from kiloword.methods.fff.preset import Mined
from kiloword.randomness import generator
from kiloword.report import (
    Block,
    Gallery,
    Page,
    Plot,
    Table,
    Text,
    Tile,
    distributions,
    made_by,
    say_blocks,
    write_page,
)
from kiloword.runs.alerts import MINED
from kiloword.stores.features import FeatureStore
from kiloword.terminal import say
from kiloword.types import Source

if TYPE_CHECKING:
    from kiloword.apps.mine.command import Mine

IMAGES = 65536  # whose pairs are written at once
HIGHER = 5  # captions of an image that rank above its own
THRESHOLDS = ("p1", "p2", "p3", "p1_text")
LABELS = {"eq. 2": "all terms", "it": "image-text (p1)", "ii": "image-image (p2)", "tt": "text-text (p3)"}


def mine(options: Mine) -> None:
    """Run and print `kiloword mine`; ranks of torchrun share the search, and the first one writes."""
    given = {name: value for name in THRESHOLDS if (value := getattr(options, name)) is not None}
    check(replace(Mined(), **given), prefix="")
    extra, device, seconds = tuple(map(str, options.extra_captions)), choose(options.device), {}
    with together(device):
        table = FeatureStore(options.features)
        source = open_data(DataConfig(sources=options.data, extra_captions=extra))
        table.of(source)
        with Lock(options.out, "writing") if is_first() else nullcontext():
            corpus, rows = corpus_of(source, table, device)
            truth, start = truth_of(source, corpus.captions, rows), time.perf_counter()
            settings, annotated = replace(Mined(teacher=table.name), **given), corpus.annotated()
            sample = random_pairs(corpus, options.seed, truth=truth)
            if options.calibrate:
                settings = replace(calibrate(annotated, sample, settings, options.false_rate or 1e-4), **given)
            choices = compare(corpus, annotated, sample, settings, candidates(annotated, sample, settings.p1))
            seconds["calibration"] = time.perf_counter() - start
            mined = search(corpus, settings, most=options.most, chunk=options.chunk, truth=truth)
            seconds["search"] = time.perf_counter() - start - seconds["calibration"]
            parts = split_extra(corpus, options.extra_captions)
            near = {name: analyses.nearest(part, options.seed) for name, part in parts.items()}
            if not is_first():
                return
            ranks = {name: analyses.ranks(part, options.batch, options.seed) for name, part in parts.items()}
            of_parts = {name: analysed(part, options, near[name], ranks[name]) for name, part in parts.items()}
            seconds["analyses"] = time.perf_counter() - start - sum(seconds.values())
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            found: dict[str, Any] = {
                "data": source.name,
                "teacher": table.file.model,
                "images": len(corpus.keys),
                "captions": len(corpus.captions),
                "thresholds": {name: getattr(settings, name) for name in THRESHOLDS},
                "calibrated": options.calibrate,
                "pairs": mined.pairs,
                "true_pairs": mined.true,
                "terms": terms(mined),
                "mined_per_image": spread(mined.per_image.numpy()),
                "images_without_mined": int((mined.per_image == 0).sum()),
                "choices": [asdict(choice) for choice in choices],
                "similarity": {name: spread(getattr(sample, name).numpy()) for name in TERMS},
                "analyses": of_parts,
                "seconds": seconds,
                "memory_mb": peak / (1 << 20 if sys.platform == "darwin" else 1 << 10),
            }
            write_json(options.out / "thresholds.json", found["thresholds"])
            write_json(options.out / "mine.json", found)
            write_pairs(options.out / "pairs.parquet", corpus, mined, settings, truth)
            short, drawn = list(_short(found, settings)), _Galleries(options, corpus, source, rows, truth)
            sections: dict[str, list[Block]] = {
                "In short": short,
                "Similarities": [
                    distributions({"annotated": annotated, "random": sample.it}, "S_it, image and caption")
                ],
                "Rank of the true caption": [_ranked(ranks)],
                "Pairs that were mined": list(drawn.mined(mined, settings)),
                "Captions above an image's own": list(drawn.above()),
                "Raw captions beside pseudo-captions": list(drawn.beside(parts)),
            }
            intro = (
                f"Which captions of other images eq. 2 of FFF (arXiv:2405.10286) would make positives: {source.name}."
            )
            page = Page("Mined pairs", intro, {k: v for k, v in sections.items() if v}, made_by(data=source.name))
            write_page(options.out / "report.html", page)
            say_blocks(short)
            say(f"report: {options.out / 'report.html'}")


def terms(mined: MinedPairs) -> dict[str, dict[str, float | int | None]]:
    """Counts, precision and recall of eq. 2 and of each of its terms."""
    table: dict[str, dict[str, float | int | None]] = {}
    for name in LABELS:
        column = "whole" if name == "eq. 2" else name
        of_term, right, kept = (mined.count(row, column) for row in ("mined", "right", "annotated"))
        table[name] = {
            "mined": of_term,
            "alone": None if name == "eq. 2" else mined.count("mined", f"{name} alone"),
            "share_of_pairs": of_term / max(mined.pairs, 1),
            "annotated_accepted": kept / max(mined.annotated_pairs, 1),
            "precision": right / of_term if mined.true is not None and of_term else None,
            "recall": right / mined.true if mined.true else None,
        }
    return table


def analysed(corpus: Corpus, options: Mine, nearest: Any, ranks: analyses.Ranks) -> dict[str, Any]:
    """The paper's analyses of all captions, of the original or of the extra ones."""
    one, mean = analyses.one_and_mean(corpus, options.seed)
    return {
        "captions": len(corpus.captions),
        "repeated": len(corpus.captions) - len(set(corpus.captions)),
        "frequent": Counter(corpus.captions).most_common(100),
        "rank_batch": ranks.batch,
        "rank_batches": ranks.batches,
        "rank_of_own_caption": spread(ranks.captions),
        "rank_of_own_image": spread(ranks.images),
        "own_caption_first": float(np.mean(ranks.captions <= 1)),
        "own_image_first": float(np.mean(ranks.images <= 1)),
        "annotated_similarity": spread(corpus.annotated()),
        "nearest_captions_similarity": spread(nearest),
        "similarity_among_captions": spread(analyses.among(corpus)),
        "similarity_with_one_caption": spread(one),
        "similarity_with_mean_caption": spread(mean),
    }


def spread(values: Any) -> dict[str, float] | None:
    """Mean, deviation and quantiles; None without values."""
    if not len(values):
        return None
    array = np.asarray(values, np.float64)
    low, median, high = np.quantile(array, (0.05, 0.5, 0.95)).tolist()
    figures = {"mean": float(array.mean()), "std": float(array.std()), "q05": low, "median": median, "q95": high}
    return {**figures, "max": float(array.max())}


def write_pairs(path: Path, corpus: Corpus, mined: MinedPairs, settings: Mined, truth: Truth | None) -> None:
    """The kept pairs, image by image, best S_it first; memory is that of IMAGES images, as a row group.

    Columns: key of the image; caption, its index among the captions of its own image (key `owner`); S_it, S_ii and
    S_tt as it, ii, tt, which terms of eq. 2 accept them (by_it, by_ii, by_tt), and whether they are `true`, with
    ground truth. The table is valid input of `kiloword train --extra-captions`.
    """
    with ExitStack() as stack:
        file, writer = stack.enter_context(atomic(path)), None
        for first in range(0, len(mined.column), IMAGES):
            column = mined.column[first : first + IMAGES]
            kept = column >= 0
            images, captions = first + torch.nonzero(kept)[:, 0].numpy(), column[kept].numpy()
            values = mined.scores[:, first : first + IMAGES][:, kept]
            owner = corpus.owner[captions]
            columns: dict[str, Any] = {
                "key": _texts(corpus.keys, images),
                "caption": _texts(corpus.captions, captions),
                "caption_index": captions - corpus.starts[owner],
                "owner": _texts(corpus.keys, owner),
                **{name: value.numpy() for name, value in zip(TERMS, values, strict=True)},
                **{f"by_{n}": hit.numpy() for n, hit in zip(TERMS, by_term(settings, *values), strict=True)},
            }
            if truth is not None:
                columns["true"] = _true(truth, captions, images)
            part = pa.table(columns)
            writer = writer or stack.enter_context(pq.ParquetWriter(file, part.schema))
            writer.write_table(part)


def _true(truth: Truth, captions: Ints, images: Ints) -> Ints:
    """Whether each caption is true of the image beside it, bool [n]."""
    true, order = np.zeros(len(captions), bool), np.argsort(captions, kind="stable")
    for block in np.array_split(order, max(1, len(order) // 512)):
        true[block] = truth(captions[block], images[block]).diagonal().numpy()
    return true


def _texts(texts: Sequence[str], places: Ints) -> pa.Array:
    """Texts [n]; lone surrogates (file names that are not UTF-8), which parquet cannot store, are replaced."""
    different, inverse = np.unique(places, return_inverse=True)
    return pa.array([texts[n].encode("utf-8", "replace").decode("utf-8") for n in different], pa.string()).take(inverse)


def _short(found: Mapping[str, Any], settings: Mined) -> Iterator[Block]:
    """What was mined, and how to train with it."""
    whole, of_parts, choices = found["terms"]["eq. 2"], found["analyses"], found["choices"]
    yield Text(f"{found['images']:,} images, {found['captions']:,} captions, teacher {found['teacher']}")
    yield Text(f"mined {whole['mined']:,} of {found['pairs']:,} pairs, {found['mined_per_image']['mean']:.3g} an image")
    if whole["share_of_pairs"] > MINED:
        hint = "raise the thresholds, or fit them to the teacher with --calibrate and a lower --false-rate."
        yield Text(f"warning: {whole['share_of_pairs']:.1%} of all pairs are mined: {hint}")
    named = [] if settings.teacher == "teacher" else [f"--settings.teacher {settings.teacher}"]
    flags = [f"--settings.{name.replace('_', '-')} {value:g}" for name, value in found["thresholds"].items()]
    yield Text(f"to train with them: {' '.join([*flags, *named])}", "code")
    header = ["mined", "alone", "share_of_pairs", "annotated_accepted", "precision", "recall"]
    rows = [[LABELS[name], *(row[column] for column in header)] for name, row in found["terms"].items()]
    yield Table(rows, ["term", *(name.replace("_", " ") for name in header)], digits=4)
    spreads = [name for name, value in next(iter(of_parts.values())).items() if isinstance(value, dict)]
    means = [[n.replace("_", " "), *((part[n] or {}).get("mean") for part in of_parts.values())] for n in spreads]
    yield Table(means, ["mean", *of_parts])
    yield Table([list(choice.values()) for choice in choices], ["other p1", *list(choices[0])[1:]], digits=4)


def _ranked(ranks: Mapping[str, analyses.Ranks]) -> Plot:
    """Ranks of the own caption and of the own image (Fig. 3)."""

    def draw(axes: Any) -> None:
        for name, one in ranks.items():
            for side, values in (("own caption", one.captions), ("own image", one.images)):
                axes.semilogx(np.sort(values), np.linspace(0, 100, len(values)), label=f"{side}, {name}")
        axes.set(xlabel="rank in a random batch", ylabel="% at this rank or better")

    return Plot(draw, "share of images whose own caption has at most a rank, and of captions")


class _Galleries:
    """Images of the page: at most `gallery` of each kind."""

    def __init__(self, options: Mine, corpus: Corpus, source: Source, rows: Ints, truth: Truth | None) -> None:
        self.options, self.corpus, self.source, self.rows, self.truth = options, corpus, source, rows, truth

    def tile(self, image: int, *lines: str) -> Tile:
        """An image of the corpus with lines below it."""
        return tile(self.source, int(self.rows[image]), self.corpus.keys[image], *lines)

    def scored(self, corpus: Corpus, image: int, captions: Ints) -> list[str]:
        """Captions of a corpus, best S_it with an image first; those that are true of it are ticked."""
        scores = corpus.load(corpus.texts, captions) @ corpus.load(corpus.images, np.array([image]))[0]
        known = self.truth if corpus is self.corpus else None  # the truth is of its captions
        true = None if known is None else known(captions, np.array([image]))[:, 0].tolist()
        order = scores.argsort(descending=True, stable=True).tolist()
        return [f"{scores[n]:.2f} {corpus.captions[captions[n]]}{' ✓' if true and true[n] else ''}" for n in order]

    def mined(self, mined: MinedPairs, settings: Mined) -> Iterator[Block]:
        """For each term some images with a caption that it mined, and the image of that caption."""
        accepted = by_term(settings, *mined.scores) & (mined.column >= 0)
        for term, of_term in zip(TERMS, accepted, strict=True):
            rng, tiles = generator(self.options.seed, "gallery", term), list[Tile]()
            for image in rng.permutation(np.flatnonzero(of_term.any(1)))[: self.options.gallery].tolist():
                caption = int(mined.column[image, rng.choice(np.flatnonzero(of_term[image]))])
                tiles.append(self.tile(image, *self.scored(self.corpus, image, np.array([caption]))))
                tiles.append(self.tile(int(self.corpus.owner[caption]), "the caption's image"))
            if tiles:
                yield Gallery(tiles, LABELS[term], 4)

    def above(self) -> Iterator[Block]:
        """Images of a random batch, with the captions that rank above their own (Fig. 5)."""
        corpus, left = self.corpus, self.options.gallery
        order, caption_of = analyses.one_caption_each(corpus, self.options.seed)
        captions = caption_of[order[: self.options.batch]]
        texts = corpus.load(corpus.texts, captions)
        for place, image in enumerate(order[: self.options.batch].tolist()):
            scores = texts @ corpus.load(corpus.images, np.array([image]))[0]
            best = scores.topk(min(HIGHER, len(scores))).indices
            higher = best[scores[best] > scores[place]].cpu().numpy()
            if len(higher) and left:
                left -= 1
                own = f"its own: {scores[place]:.2f} {corpus.captions[captions[place]]}"
                yield Gallery([self.tile(image, own, *self.scored(corpus, image, captions[higher]))], columns=2)

    def beside(self, parts: Mapping[str, Corpus]) -> Iterator[Block]:
        """Raw captions beside pseudo-captions, of images that have both (Fig. 4)."""
        if {"own", "extra"} <= set(parts):
            both = np.flatnonzero(np.all([np.diff(part.starts) > 0 for part in parts.values()], axis=0))
            for image in generator(self.options.seed, "gallery", "beside").permutation(both)[: self.options.gallery]:
                lines = []
                for part in (parts["own"], parts["extra"]):
                    lines.append(self.scored(part, int(image), np.arange(*part.starts[image : image + 2])))
                yield Gallery([self.tile(int(image), *lines[0], "pseudo-captions:", *lines[1])], columns=2)
