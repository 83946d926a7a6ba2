"""HTML report of `kiloword quickstart photos`, from its results and thumbnails of the photos that it shows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from kiloword import report
from kiloword.apps.quickstart.photos.results import (
    Certainty,
    Looks,
    MethodFigures,
    PhotoFacts,
    PhotoQuery,
    PhotoResults,
)
from kiloword.apps.quickstart.words import columns
from kiloword.report import Html, duration, percent, section
from kiloword.report.images import Pixels
from kiloword.report.overlay import overlay

SEEN = 3  # best photos of each method
KS = (1, 5, 10)
SIDES = {"image_retrieval": "caption to photo", "text_retrieval": "photo to caption"}
ABOUT = {  # what a tower has learned from, and its licence
    "efficientnet-lite": "was trained to name the 1,000 classes of ImageNet-1k and has seen no caption (Apache-2.0)",
    "minilm": (
        "is all-MiniLM-L6-v2, a sentence encoder (Apache-2.0). Its training pairs hold captions of COCO and "
        "Flickr30k, and SNLI, which was written from the latter: it has seen captions of photos like these, though no "
        "photo, which favours every figure on this page"
    ),
}

Thumbnails = Mapping[str, Pixels]
"""Photos [H, W, 3] by key."""


def page(results: PhotoResults, photos: Thumbnails) -> str:
    """The whole document. Args: photos: all of `results.figures.keys` that could be read."""
    facts, figures = results.facts, results.figures
    html = report.page(
        "Kiloword on your photos",
        _intro(facts, len(figures.methods)),
        [
            section("In short", _headline(results)),
            section("Methods side by side", *_methods(results)),
            section("Captions and their best photos", *_queries(figures.queries, photos, of_photos=True)),
            section("Free texts and their best photos", *_queries(figures.queries, photos, of_photos=False)),
            section("Where llip looks", *_looks(figures.looks, photos)),
            section("What prolip is certain of", *_certain(figures.certain, figures.uncertain)),
            section("What was run, and how to go on", *_commands(results)),
        ],
    )
    return report.signed(html, report.made_by(data=" ".join(results.facts.data)))


def _intro(f: PhotoFacts, methods: int) -> str:
    held_out = " They were held out by key, a tenth of the data." if f.held_out else ""
    return (
        f"{methods} methods of kiloword learned from {f.photos:,} photos with {f.captions:,} captions. Each trained "
        f"its own top on the same two frozen towers, {f.image_tower} and {f.text_tower}. The page compares "
        f"them on {f.val_photos:,} photos with {f.val_captions:,} captions that none of them was trained on.{held_out}"
    )


def _headline(results: PhotoResults) -> Html:
    methods = results.figures.methods
    best = [
        (max(methods, key=lambda m: m.retrieval[f"{side}_recall@{k}"]), f"{side}_recall@{k}", words)
        for k, words in ((1, "find it first"), (10, "find it among the first ten"))
        for side in SIDES
    ]
    shown = [(percent(m.retrieval[metric]), f"{_sought(metric)} {words}: {m.name}") for m, metric, words in best]
    trained = sum(m.training_s for m in methods)
    times = [(results.facts.extraction_s, "extracting frozen tokens, once"), (trained, f"training {_count(methods)}")]
    return report.headline([*shown, *((duration(seconds), what) for seconds, what in times)])


def _sought(metric: str) -> str:
    return "of captions" if metric.startswith("image") else "of photos (a caption of theirs)"


def _count(methods: Sequence[MethodFigures]) -> str:
    return f"{len(methods)} methods, together" if len(methods) > 1 else methods[0].name


def _methods(results: PhotoResults) -> Iterator[str]:
    f, methods = results.facts, results.figures.methods
    for side, name in SIDES.items():
        rows = [[m.name, *(m.retrieval[f"{side}_recall@{k}"] for k in KS), _seconds(m)] for m in methods]
        header = ["method", *(f"R@{k}" for k in KS), "seconds"]
        yield report.table(rows, header, caption=name.capitalize(), digits=3, best_of_column=range(1, len(KS) + 1))
    yield (
        f"R@k: a right answer is among the first k of {f.val_photos:,} photos or {f.val_captions:,} captions. Seconds "
        "are those of training; the frozen tokens were extracted before, "
        f"in {duration(f.extraction_s)} ({f.stored_mb:,.0f} MB{_views(f)}). Differences of about "
        f"{percent(_noise(f))} at R@1 are within the noise of {f.val_photos:,} photos and one seed ({f.seed})."
    )
    for tower in (f.image_tower, f.text_tower):
        if about := _about(tower):
            yield f"{tower} {about}."


def _seconds(method: MethodFigures) -> str:
    return f"{method.training_s:.0f}"


def _views(f: PhotoFacts) -> str:
    return f", {f.views} augmented views of each photo" if f.views > 1 else ""


def _noise(f: PhotoFacts) -> float:
    """Two standard errors of a share of about a quarter of the photos."""
    return 2 * math.sqrt(0.25 * 0.75 / max(f.val_photos, 1))


def _about(tower: str) -> str:
    return next((about for name, about in ABOUT.items() if tower.startswith(name)), "")


def _queries(queries: Sequence[PhotoQuery], photos: Thumbnails, of_photos: bool) -> Iterator[str]:
    """Each text above a column a method, its best photo on top."""
    chosen = [query for query in queries if (query.of_photo is not None) == of_photos]
    if chosen:
        yield (
            f"A column shows the best {SEEN} photos of a method, the best on top."
            + (" Outlined: the photo that the caption was written for." if of_photos else "")
        )
    for query in chosen:
        yield report.heading(f"“{query.text}”")
        yield _shelf(query, photos)


def _shelf(query: PhotoQuery, photos: Thumbnails) -> Html:
    names = list(query.best)
    cells = [(name, query.best[name][rank].key) for rank in range(min(map(len, query.best.values()))) for name in names]
    matches = [place for place, (_, key) in enumerate(cells) if key == query.of_photo]
    return report.tiles([(_photo(photos, key), name) for name, key in cells], len(names), matches)


def _photo(photos: Thumbnails, key: str) -> Pixels:
    """A photo; a grey square for one that can no longer be read."""
    return photos.get(key, np.full((8, 8, 3), 128, np.uint8))


def _looks(looks: Sequence[Looks], photos: Thumbnails) -> Iterator[str]:
    if looks:
        yield "Each caption mixes the photo's tokens in its own way. Glowing: where the tokens look that it reads."
    for one in looks:
        if one.key in photos:
            photo = photos[one.key]
            maps = [np.array(m, np.float32).reshape(one.side, one.side) for m in one.maps]
            glowing = [np.asarray(overlay(photo, each, photo.shape[0])) for each in maps]
            shown = [(photo, "the photo"), *zip(glowing, (f"“{text}”" for text in one.texts), strict=True)]
            yield report.tiles(shown, columns=len(shown))


def _certain(certain: Sequence[Certainty], uncertain: Sequence[Certainty]) -> Iterator[str]:
    if certain:
        yield (
            "Prolip embeds a caption as a Gaussian. Its uncertainty is the sum of the variances: large where the "
            "caption could mean many photos."
        )
    for name, captions in (("Most certain", certain), ("Least certain", uncertain)):
        rows = [[one.text, f"{one.uncertainty:.4g}"] for one in captions]
        yield report.table(rows, [f"{name} captions", "uncertainty"])


def _commands(results: PhotoResults) -> Iterator[str]:
    yield "These commands repeat what was run, each part of it alone. The same command again resumes or finishes."
    for what, typed in results.commands.items():
        yield what
        yield report.code(typed)


def summary(results: PhotoResults) -> str:
    """What a terminal shows: a row a method."""
    f = results.facts
    header = ("", *(f"{name.split()[2]} R@{k}" for name in SIDES.values() for k in KS), "seconds")
    rows = [
        (m.name, *(f"{m.retrieval[f'{side}_recall@{k}']:.3f}" for side in SIDES for k in KS), _seconds(m))
        for m in results.figures.methods
    ]
    return (
        f"{f.photos:,} photos, {f.image_tower} and {f.text_tower} frozen; tokens extracted in "
        f"{duration(f.extraction_s)}; tested on {f.val_photos:,} photos that no method was trained on\n\n"
        f"{columns([header, *rows])}"
    )
