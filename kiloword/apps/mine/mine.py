"""Mine a data set: calibrate, search, analyse, and write the pairs, the figures and a page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from kiloword.apps.mine import analyses
from kiloword.apps.mine.calibrate import calibrate, random_pairs
from kiloword.apps.mine.corpus import Corpus, Floats, Ints, Truth, corpus_of, truth_of
from kiloword.apps.mine.search import TERMS, MinedPairs, by_term, search
from kiloword.config.recipes import DataConfig
from kiloword.config.settings import check
from kiloword.data.joins import CaptionTable
from kiloword.data.open import open_data
from kiloword.distributed.device import choose
from kiloword.distributed.sharing import is_first, together
from kiloword.evaluation.features import tile
from kiloword.files import Lock, atomic, is_taken, write_json
from kiloword.methods.fff.preset import Mined
from kiloword.model.encoding import chunks
from kiloword.report import Block, Gallery, Page, Plot, Table, Text, Tile, made_by, say_blocks, write_page
from kiloword.runs.alerts import MINED
from kiloword.stores.features import FeatureStore
from kiloword.types import Source

if TYPE_CHECKING:
    from kiloword.apps.mine.command import Mine

SHOWN, HIGHER = 12, 5  # images of the page; captions of an image that were mined, or rank above its own
HEADINGS = {"captions": "captions", "own": "raw captions", "extra": "pseudo-captions"}
THRESHOLDS = ("p1", "p2", "p3", "p1_text")
LABELS = {"eq. 2": "all terms", "it": "image-text (p1)", "ii": "image-image (p2)", "tt": "text-text (p3)"}
Shares = Mapping[str, float | int | None]


def mine(options: Mine) -> None:
    """Run and print `kiloword mine`; ranks of torchrun share the search, and the first one writes."""
    given, out = {name: value for name in THRESHOLDS if (value := getattr(options, name)) is not None}, options.out
    check(replace(Mined(), **given), prefix="")
    if is_taken(out) and not (out / "mine.json").is_file():
        raise ValueError(f"{out} holds other files: choose a new folder for --out.")
    device = choose(options.device)
    with together(device):
        table = FeatureStore(options.features)
        source = open_data(DataConfig(sources=options.data, extra_captions=tuple(map(str, options.extra_captions))))
        table.of(source)
        with Lock(out, "writing") if is_first() else nullcontext():
            corpus, rows = corpus_of(source, table, device)
            truth, settings = truth_of(source, corpus.captions, rows), replace(Mined(teacher=table.name), **given)
            annotated, sample = corpus.annotated(), random_pairs(corpus, options.seed, truth)
            if options.calibrate:
                settings = replace(calibrate(annotated, sample, settings, options.false_rate), **given)
            mined = search(corpus, settings, most=options.most, truth=truth)
            if not is_first():
                return
            parts = split_extra(corpus, options.extra_captions)
            ranks = {name: analyses.ranks(part, options.batch, options.seed) for name, part in parts.items()}
            found: dict[str, Any] = {
                "data": source.name,
                "teacher": table.file.model,
                "images": len(corpus.keys),
                "captions": len(corpus.captions),
                "thresholds": {name: getattr(settings, name) for name in THRESHOLDS},
                "calibrated": options.calibrate,
                "pairs": int(mined.counts[0, -1]),
                "true_pairs": None if truth is None else int(mined.counts[1, -1]),
                "terms": terms(mined, truth is not None),
                "mined_per_image": spread(mined.per_image.numpy()),
                "analyses": {name: analysed(part, options.seed, *ranks[name]) for name, part in parts.items()},
            }
            write_json(out / "mine.json", found)
            write_json(out / "thresholds.json", found["thresholds"])
            with atomic(out / "pairs.parquet") as file:
                pq.write_table(pairs_table(corpus, mined, settings, truth), file)
            short, tiles = list(_short(found, settings)), list(_pictures(source, rows, parts, corpus, mined, options))
            sections: dict[str, list[Block]] = {
                "In short": short,
                "Rank of the true caption": [_ranked(ranks)],
                "Images and captions": [Gallery(tiles, columns=3)],
            }
            intro = f"Captions of other images that eq. 2 of FFF (arXiv:2405.10286) makes positives: {source.name}."
            page = Page("Mined pairs", intro, sections, made_by(data=source.name))
            write_page(out / "report.html", page)
            say_blocks([*short, Text(f"report: {out / 'report.html'}")])


def split_extra(corpus: Corpus, paths: Sequence[Path]) -> dict[str, Corpus]:
    """All captions ("captions"); or the original captions ("own") and the captions of extra tables ("extra")."""
    tables = [CaptionTable(path) for path in paths]
    of_keys = [{caption for table in tables for caption in table.captions(key)} for key in corpus.keys]
    extra = np.array([caption in of_keys[n] for n, caption in zip(corpus.owner, corpus.captions, strict=True)])
    parts = {"own": corpus.only(~extra), "extra": corpus.only(extra)} if tables else {}
    several = {name: part for name, part in parts.items() if len(np.unique(part.owner[part.paired])) > 1}
    return several or {"captions": corpus}


def terms(mined: MinedPairs, truth: bool) -> dict[str, Shares]:
    """Counts, precision and recall of eq. 2 and of each of its terms."""
    found, right, kept = mined.counts.tolist()
    return {
        name: {
            "mined": found[n],
            "share_of_pairs": found[n] / max(found[-1], 1),
            "annotated_accepted": kept[n] / max(kept[-1], 1),
            "precision": right[n] / found[n] if truth and found[n] else None,
            "recall": right[n] / right[-1] if right[-1] else None,
        }
        for n, name in enumerate(LABELS)
    }


def analysed(corpus: Corpus, seed: int, of_captions: Floats, of_images: Floats) -> dict[str, Any]:
    """The paper's analyses of all captions, of the original or of the extra ones. Args: as of `analyses.ranks`."""
    one, mean = analyses.one_and_mean(corpus, seed)
    return {
        "captions": len(corpus.captions),
        "repeated": len(corpus.captions) - len(set(corpus.captions)),
        "frequent": Counter(corpus.captions).most_common(100),
        "rank_of_own_caption": spread(of_captions),
        "rank_of_own_image": spread(of_images),
        "own_caption_first": float(np.mean(of_captions <= 1)),
        "own_image_first": float(np.mean(of_images <= 1)),
        "annotated_similarity": spread(corpus.annotated()),
        "nearest_captions_similarity": spread(analyses.nearest(corpus, seed)),
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


def pairs_table(corpus: Corpus, mined: MinedPairs, settings: Mined, truth: Truth | None) -> pa.Table:
    """The kept pairs, image by image, best S_it first.

    Columns: key of the image; caption, its index among the captions of its own image (key `owner`); S_it, S_ii and
    S_tt as it, ii, tt, which terms of eq. 2 accept them (by_it, by_ii, by_tt), and whether they are `true`, with
    ground truth. The table is valid input of `kiloword train --extra-captions`.
    """
    kept = mined.column >= 0
    images, captions, values = torch.nonzero(kept)[:, 0].numpy(), mined.column[kept].numpy(), mined.scores[:, kept]
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
        true = [truth(captions[part], images[part]).diagonal().numpy() for part in chunks(len(captions), 512)]
        columns["true"] = np.concatenate([np.zeros(0, bool), *true])
    return pa.table(columns)


def _texts(texts: Sequence[str], places: Ints) -> pa.Array:
    """Texts [n]; lone surrogates (file names that are not UTF-8), which parquet cannot store, are replaced."""
    return pa.array([text.encode("utf-8", "replace").decode() for text in texts], pa.string()).take(pa.array(places))


def _short(found: Mapping[str, Any], settings: Mined) -> Iterator[Block]:
    """What was mined, and how to train with it."""
    whole, of_parts = found["terms"]["eq. 2"], found["analyses"]
    yield Text(f"{found['images']:,} images, {found['captions']:,} captions, teacher {found['teacher']}")
    yield Text(f"mined {whole['mined']:,} of {found['pairs']:,} pairs, {found['mined_per_image']['mean']:.3g} an image")
    if whole["share_of_pairs"] > MINED:
        yield Text(f"warning: {whole['share_of_pairs']:.1%} of all pairs are mined: raise the thresholds.")
    named = [] if settings.teacher == "teacher" else [f"--settings.teacher {settings.teacher}"]
    flags = [f"--settings.{name.replace('_', '-')} {value:g}" for name, value in found["thresholds"].items()]
    yield Text(f"to train with them: {' '.join([*flags, *named])}", "code")
    rows = [[LABELS[name], *row.values()] for name, row in found["terms"].items()]
    yield Table(rows, ["term", *(name.replace("_", " ") for name in whole)], digits=4)
    spreads = [name for name, value in next(iter(of_parts.values())).items() if isinstance(value, dict)]
    means = [[n.replace("_", " "), *((part[n] or {}).get("mean") for part in of_parts.values())] for n in spreads]
    yield Table(means, ["mean", *of_parts])


def _ranked(ranks: Mapping[str, tuple[Floats, Floats]]) -> Plot:
    """Ranks of the own caption and of the own image (Fig. 3)."""

    def draw(axes: Any) -> None:
        for name, of_both in ranks.items():
            for side, values in zip(("own caption", "own image"), of_both, strict=True):
                axes.semilogx(np.sort(values), np.linspace(0, 100, len(values)), label=f"{side}, {name}")
        axes.set(xlabel="rank in a random batch", ylabel="% at this rank or better")

    return Plot(draw, "share of images whose own caption has at most a rank, and of captions")


def _pictures(
    source: Source, rows: Ints, parts: Mapping[str, Corpus], corpus: Corpus, mined: MinedPairs, options: Mine
) -> Iterator[Tile]:
    """Images of a random batch, those with mined captions first, above captions, each list best S_it first.

    Pseudo-captions stand below the raw ones (Fig. 4); then what was mined; then what ranks above a caption of the image
    in the batch (Fig. 5).
    """

    def scored(of: Corpus, captions: Ints, above: float = -2.0) -> list[str]:
        scores = of.load(of.texts, captions) @ of.load(of.images, np.array([image]))[0]
        order = scores.argsort(descending=True, stable=True).tolist()
        return [f"{scores[n]:.2f} {of.captions[captions[n]]}" for n in order if scores[n] > above]

    order, caption = analyses.one_caption_each(corpus, options.seed)
    batch = caption[order[: options.batch]]
    for image in sorted(corpus.owner[batch].tolist(), key=lambda image: not mined.per_image[image])[:SHOWN]:
        lines, own = list[str](), caption[[image]]
        for name, part in parts.items():
            lines += [f"{HEADINGS[name]}:", *scored(part, np.arange(*part.starts[image : image + 2]))]
        column = mined.column[image, :HIGHER]
        higher = scored(corpus, batch[batch != own], float(corpus.annotated(own)[0]))[:HIGHER]
        lines += ["mined:", *scored(corpus, column[column >= 0].numpy()), f"above {scored(corpus, own)[0]}:", *higher]
        yield tile(source, int(rows[image]), corpus.keys[image], *lines)
