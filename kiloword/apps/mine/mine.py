"""Mine a data set: calibrate, search, analyse, and write the pairs, the figures and a page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from kiloword.apps.mine.analyses import analysed, one_caption_each, ranks, spread
from kiloword.apps.mine.corpus import Corpus, Ints, corpus_of, truth_of
from kiloword.apps.mine.search import TERMS, MinedPairs, calibrate, random_pairs, search
from kiloword.config.recipes import DataConfig
from kiloword.config.settings import check
from kiloword.data.open import open_data
from kiloword.distributed.device import choose
from kiloword.distributed.sharing import is_first, together
from kiloword.evaluation.features import tile
from kiloword.files import Lock, atomic, write_json
from kiloword.methods.fff import Mined, matches
from kiloword.report import Block, Gallery, Page, Plot, Table, Text, Tile, made_by, say_blocks, write_page
from kiloword.runs.alerts import MINED
from kiloword.stores.features import FeatureStore
from kiloword.types import Source

if TYPE_CHECKING:
    from kiloword.apps.mine.command import Mine

SHOWN, HIGHER = 12, 5  # images of the page; captions of an image that were mined, or rank above its own
LABELS = {"it": "image-text (p1)", "ii": "image-image (p2)", "tt": "text-text (p3)"}
THRESHOLDS = ("p1", "p2", "p3", "p1_text")


def mine(options: Mine) -> None:
    """Run and print `kiloword mine`; ranks of torchrun share the search, and the first one writes."""
    out, device, seed = options.out, choose(options.device), options.seed
    given: Any = {name: value for name in THRESHOLDS if (value := getattr(options, name)) is not None}
    with together(device):
        table = FeatureStore(options.features)
        settings = replace(Mined(teacher=table.name), **given)
        check(settings, prefix="")
        data = DataConfig(sources=options.data, extra_captions=tuple(map(str, options.extra_captions)))
        source = open_data(data)
        corpus, rows = corpus_of(source, table, device)
        if len(np.unique(corpus.owner)) < 2:
            raise ValueError(f"{source.name} has no two images with captions: there are no pairs to mine.")
        truth = truth_of(source, corpus.captions, rows)
        with Lock(out, "writing") if is_first() else nullcontext():
            if options.calibrate:
                sample, _ = random_pairs(corpus, seed)
                settings = replace(calibrate(corpus.annotated(), sample, settings, options.false_rate), **given)
            mined = search(corpus, settings, most=options.most, truth=truth)
            if not is_first():
                return
            parts = {"captions": corpus}
            if data.extra_captions:
                configs = {"own": replace(data, extra_captions=()), "extra": replace(data, raw_captions=False)}
                every = {name: corpus_of(open_data(one), table, device)[0] for name, one in configs.items()}
                parts = {name: part for name, part in every.items() if len(part.captions) > 1}
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
                "mined_per_image": spread(mined.per_image),
                "analyses": {name: analysed(part, options.batch, seed) for name, part in parts.items()},
            }
            write_json(out / "mine.json", found)
            with atomic(out / "pairs.parquet") as file:
                pairs = pairs_table(corpus, mined, settings)
                pq.write_table(pairs.drop_columns("true") if truth is None else pairs, file)
            short, tiles = list(_short(found, settings)), list(_tiles(source, rows, parts, corpus, mined, options))

            def ranked(axes: Any) -> None:
                for name, part in parts.items():
                    values = np.sort(ranks(part, options.batch, seed))
                    axes.semilogx(values, np.linspace(0, 100, len(values)), label=name)
                axes.set(xlabel="rank in a random batch", ylabel="% of images at this rank or better")

            sections: dict[str, list[Block]] = {
                "In short": short,
                "Rank of the true caption": [Plot(ranked, "share of images whose own caption has at most a rank")],
                "Images and captions": [Gallery(tiles, columns=3)],
            }
            intro = f"Captions of other images that eq. 2 of FFF (arXiv:2405.10286) makes positives: {source.name}."
            write_page(out / "report.html", Page("Mined pairs", intro, sections, made_by(data=source.name)))
            say_blocks([*short, Text(f"report: {out / 'report.html'}")])


def terms(mined: MinedPairs, truth: bool) -> dict[str, dict[str, Any]]:
    """Counts, precision and recall of eq. 2 and of each of its terms."""
    found, right = mined.counts.tolist()
    return {
        name: {
            "mined": found[n],
            "share_of_pairs": found[n] / max(found[-1], 1),
            "precision": right[n] / found[n] if truth and found[n] else None,
            "recall": right[n] / right[-1] if right[-1] else None,
        }
        for n, name in enumerate(("eq. 2", *TERMS))
    }


def pairs_table(corpus: Corpus, mined: MinedPairs, settings: Mined) -> pa.Table:
    """The kept pairs, image by image, best S_it first.

    Columns: key of the image; caption, its index among the captions of its own image (key `owner`); S_it, S_ii and
    S_tt as it, ii, tt, which terms of eq. 2 accept them (by_it, by_ii, by_tt), and whether they are `true`. The table
    is valid input of `kiloword train --extra-captions`.
    """
    owner, names = corpus.owner[mined.caption], (*TERMS, *(f"by_{name}" for name in TERMS))

    def texts(cells: Sequence[str], places: Ints) -> pa.Array:
        """Lone surrogates (file names that are not UTF-8), which parquet cannot store, are replaced."""
        return pa.array([cells[n].encode("utf-8", "replace").decode() for n in places.tolist()], pa.string())

    columns: dict[str, Any] = {
        "key": texts(corpus.keys, mined.image),
        "caption": texts(corpus.captions, mined.caption),
        "caption_index": mined.caption - corpus.starts[owner],
        "owner": texts(corpus.keys, owner),
        **dict(zip(names, map(np.asarray, (*mined.scores, *matches(settings, *mined.scores))), strict=True)),
        "true": np.asarray(mined.true),
    }
    return pa.table(columns)


def _short(found: Mapping[str, Any], settings: Mined) -> Iterator[Block]:
    """What was mined, and how to train with it."""
    of_terms, of_parts = found["terms"], found["analyses"]
    mean = found["mined_per_image"]["mean"]
    yield Text(f"{found['images']:,} images, {found['captions']:,} captions, {mean:.3g} mined an image")
    yield Text(f"teacher {found['teacher']}")
    if (share := of_terms["eq. 2"]["share_of_pairs"]) > MINED:
        yield Text(f"warning: {share:.1%} of all pairs are mined: raise the thresholds.")
    flags = [f"--settings.{name.replace('_', '-')} {value:g}" for name, value in found["thresholds"].items()]
    flags += [f"--settings.teacher {settings.teacher}"] * (settings.teacher != "teacher")
    yield Text(f"to train with them: {' '.join(flags)}", "code")
    header = ["term", *(name.replace("_", " ") for name in of_terms["eq. 2"])]
    yield Table([[LABELS.get(name, name), *row.values()] for name, row in of_terms.items()], header, digits=4)
    means = [
        [name.replace("_", " "), *((part[name] or {}).get("mean") for part in of_parts.values())]
        for name, value in next(iter(of_parts.values())).items()
        if isinstance(value, dict)
    ]
    yield Table(means, ["mean", *of_parts])


def _tiles(
    source: Source, rows: Ints, parts: Mapping[str, Corpus], corpus: Corpus, mined: MinedPairs, options: Mine
) -> Iterator[Tile]:
    """Images of a random batch, those with mined captions first, above captions, each list best S_it first.

    Extra captions stand below the image's own (Fig. 4); then what was mined; then what ranks above a caption of the
    image in the batch (Fig. 5).
    """
    order, caption = one_caption_each(corpus, options.seed)
    batch = caption[order[: options.batch]]
    for image in sorted(corpus.owner[batch].tolist(), key=lambda image: not mined.per_image[image])[:SHOWN]:
        lines = list[str]()
        for name, part in parts.items():
            lines += [f"{name}:", *_scored(part, image, np.arange(*part.starts[image : image + 2]))]
        lines += ["mined:", *_scored(corpus, image, mined.caption[mined.image == image][:HIGHER])]
        scores = corpus.similarities(np.array([image]), batch)[0, 0].cpu().numpy()
        higher = batch[scores > scores[batch == caption[image]]]
        lines += [f"above {_scored(corpus, image, caption[[image]])[0]}:", *_scored(corpus, image, higher)[:HIGHER]]
        yield tile(source, int(rows[image]), corpus.keys[image], *lines)


def _scored(corpus: Corpus, image: int, captions: Ints) -> list[str]:
    """Captions with their S_it, best first."""
    scores = corpus.load(corpus.texts, captions) @ corpus.load(corpus.images, np.array([image]))[0]
    best = scores.argsort(descending=True, stable=True).tolist()
    return [f"{scores[n]:.2f} {corpus.captions[captions[n]]}" for n in best]
