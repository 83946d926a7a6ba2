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
from kiloword.apps.mine.calibrate import RandomPairs, calibrate, candidates, compare, random_pairs
from kiloword.apps.mine.corpus import Corpus, Ints, Truth, corpus_of, split_extra, truth_of
from kiloword.apps.mine.search import TERMS, MinedPairs, by_term, search
from kiloword.config.recipes import DataConfig
from kiloword.config.settings import check
from kiloword.data.images.decode import decode
from kiloword.data.open import open_data
from kiloword.data.reading import read_image
from kiloword.distributed.device import choose
from kiloword.distributed.sharing import is_first, together
from kiloword.files import Lock, atomic, write_json
from kiloword.methods.fff.preset import Mined
from kiloword.randomness import generator
from kiloword.report import Block, Gallery, Page, Plot, Table, Text, Tile, made_by, thumbnail, write_page
from kiloword.runs.alerts import MINED
from kiloword.stores.features import FeatureStore
from kiloword.terminal import say
from kiloword.types import BadSample, Source

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
            short = list(_short(found, settings))
            drawn = {
                **_plots(corpus, sample, ranks),
                **_galleries(options, corpus, parts, mined, settings, truth, source, rows),
            }
            about = f"{source.name}, with features of {table.file.model}. Which captions of other images eq. 2 of FFF "
            intro = f"{about} (arXiv:2405.10286) would make positives in training, and by which term."
            facts = made_by(data=source.name)
            write_page(options.out / "report.html", Page("Mined pairs", intro, {"In short": short, **drawn}, facts))
            for block in short:
                say(*(block.text.split("\n") if isinstance(block, Text) else ()))
            for name, row in found["terms"].items():
                judged = [f"{what} {row[what]:.3f}" for what in ("precision", "recall") if row[what] is not None]
                say("  ".join([f"{LABELS[name]:16}", f"{row['mined']:>12,} pairs", *judged]))
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
    whole, mean = found["terms"]["eq. 2"], found["mined_per_image"]["mean"]
    lines = [
        f"{found['images']:,} images, {found['captions']:,} captions, teacher {found['teacher']}",
        f"mined {whole['mined']:,} of {found['pairs']:,} pairs, {mean:.3g} an image",
        f"{', '.join(f'{k} {v:.1f} s' for k, v in found['seconds'].items())}; at most {found['memory_mb']:,.0f} MB",
    ]
    if whole["share_of_pairs"] > MINED:
        hint = "raise the thresholds, or fit them to the teacher with --calibrate and a lower --false-rate."
        lines.append(f"warning: {whole['share_of_pairs']:.1%} of all pairs are mined: {hint}")
    named = [] if settings.teacher == "teacher" else [f"--settings.teacher {settings.teacher}"]
    flags = [f"--settings.{name.replace('_', '-')} {value:g}" for name, value in found["thresholds"].items()]
    yield Text("\n".join(lines))
    yield Text(f"to train with them: {' '.join([*flags, *named])}", "code")
    header = ["mined", "alone", "share_of_pairs", "annotated_accepted", "precision", "recall"]
    rows = [[LABELS[name], *(row[column] for column in header)] for name, row in found["terms"].items()]
    yield Table(rows, ["term", *(name.replace("_", " ") for name in header)], digits=4)
    of_parts = found["analyses"]
    spreads = [name for name, value in next(iter(of_parts.values())).items() if isinstance(value, dict)]
    means = [[n.replace("_", " "), *((part[n] or {}).get("mean") for part in of_parts.values())] for n in spreads]
    yield Table(means, ["mean", *of_parts])
    choices = [list(choice.values()) for choice in found["choices"]]
    yield Table(choices, ["other p1", *list(found["choices"][0])[1:]], digits=4)


def _plots(corpus: Corpus, sample: RandomPairs, ranks: Mapping[str, analyses.Ranks]) -> dict[str, list[Block]]:
    """Similarities of pairs, and ranks of the own caption (Fig. 3)."""
    sides = {"annotated": corpus.annotated(), "random": sample.it.numpy()}
    low, high = (edge(edge(values) for values in sides.values()) for edge in (min, max))

    def similar(axes: Any) -> None:
        for name, values in sides.items():
            axes.hist(
                values,
                bins=60,
                range=(low, high),
                weights=np.full(len(values), 100 / len(values)),
                histtype="step",
                label=name,
            )
        axes.set(xlabel="S_it, image and caption", ylabel="% of each")

    def ranked(axes: Any) -> None:
        for name, one in ranks.items():
            for side, values in (("own caption", one.captions), ("own image", one.images)):
                axes.semilogx(np.sort(values), np.linspace(0, 100, len(values)), label=f"{side}, {name}")
        axes.set(xlabel="rank in a random batch", ylabel="% at this rank or better")

    return {
        "Similarities": [Plot(similar, "histograms of the similarity of annotated and of random pairs")],
        "Rank of the true caption": [Plot(ranked, "share of images whose own caption has at most a rank, and back")],
    }


def _galleries(
    options: Mine,
    corpus: Corpus,
    parts: Mapping[str, Corpus],
    mined: MinedPairs,
    settings: Mined,
    truth: Truth | None,
    source: Source,
    rows: Ints,
) -> dict[str, list[Block]]:
    """Pairs that each term mined; captions above an image's own (Fig. 5); raw beside pseudo-captions (Fig. 4)."""

    def tile(image: int, *lines: str, right: bool | None = None) -> list[Tile]:
        try:
            pixels = decode(read_image(source, int(rows[image])).image, at_least=320)
        except BadSample:
            return []
        return [Tile(thumbnail(pixels, 160), [corpus.keys[image], *lines], right)]

    def is_true(caption: int, image: int) -> bool | None:
        return None if truth is None else bool(truth(np.array([caption]), np.array([image]))[0, 0])

    def best(part: Corpus, image: int) -> list[str]:
        """The captions of an image, best first."""
        of_image = slice(*part.starts[image : image + 2].tolist())
        scores = part.load(part.texts, of_image) @ part.load(part.images, np.array([image]))[0]
        return [f"{scores[n]:.2f} {part.captions[of_image][n]}" for n in scores.argsort(descending=True).tolist()]

    accepted, drawn = by_term(settings, *mined.scores) & (mined.column >= 0), list[Block]()
    for n, term in enumerate(TERMS):
        rng, tiles = generator(options.seed, "gallery", term), list[Tile]()
        some = rng.permutation(torch.nonzero(accepted[n].any(1))[:, 0].numpy())[: options.gallery].tolist()
        for image in some:
            place = int(rng.choice(torch.nonzero(accepted[n, image])[:, 0].numpy()))
            caption, values = int(mined.column[image, place]), mined.scores[:, image, place].tolist()
            scores = "  ".join(f"S_{name} {value:.2f}" for name, value in zip(TERMS, values, strict=True))
            tiles += tile(image, f"“{corpus.captions[caption]}”", scores, right=is_true(caption, image))
            tiles += tile(int(corpus.owner[caption]), "the caption's image")
        drawn += [Gallery(tiles, LABELS[term], 4)] if tiles else []
    sections = {"Pairs that were mined": drawn, "Captions above an image's own": list[Block]()}
    order, caption_of = analyses.one_caption_each(corpus, options.seed)
    batch = order[: options.batch]
    texts = corpus.load(corpus.texts, caption_of[batch])
    for place, image in enumerate(batch.tolist()):
        similar = texts @ corpus.load(corpus.images, np.array([image]))[0]
        ranked = similar.argsort(descending=True, stable=True)
        higher = ranked[similar[ranked] > similar[place]][:HIGHER].tolist()
        if higher and len(sections["Captions above an image's own"]) < options.gallery:
            lines = [f"{similar[n]:.2f} {corpus.captions[caption_of[batch[n]]]}" for n in (place, *higher)]
            marks = [is_true(int(caption_of[batch[n]]), image) for n in (place, *higher)]
            ticked = [f"{line} ✓" if mark else line for line, mark in zip(lines, marks, strict=True)]
            sections["Captions above an image's own"].append(Gallery(tile(image, *ticked), columns=2))
    if {"own", "extra"} <= set(parts):
        both = np.flatnonzero(np.all([np.diff(parts[name].starts) > 0 for name in ("own", "extra")], axis=0))
        images = generator(options.seed, "gallery", "beside").permutation(both)[: options.gallery].tolist()
        beside = [
            t for i in images for t in tile(i, "raw:", *best(parts["own"], i), "pseudo:", *best(parts["extra"], i))
        ]
        sections["Raw captions beside pseudo-captions"] = [Gallery(beside, columns=2)]
    return {name: blocks for name, blocks in sections.items() if blocks}
