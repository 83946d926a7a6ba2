"""HTML page of `kiloword eval compositional MODEL`: figures by category against chance, some items right and wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from torch import Tensor

from kiloword.evaluation.task import Results
from kiloword.randomness import key
from kiloword.report import bars, card, grid, heading, page, section, table
from kiloword.report.images import Named

if TYPE_CHECKING:
    from kiloword.evaluation.compositional.images import Cuts
    from kiloword.evaluation.compositional.items import Benchmark, Cut, Item
    from kiloword.evaluation.compositional.task import Verdict

EXAMPLES = 6  # items shown that are right, and as many that are wrong
LINES = 60  # categories with bars
INTRO = (
    "An item is right if every true caption scores higher than every false one. Chance is the share of all orders of "
    "the scores that would be right."
)


@dataclass
class Shown:
    """An item with its images and scores."""

    category: str
    images: list[Named]
    lines: list[str]  # each caption with its scores
    right: bool


def drawn(
    benchmark: Benchmark,
    items: Sequence[Item],
    verdicts: Sequence[Verdict],
    scores: Sequence[Tensor],
    cuts: Cuts,
    places: Mapping[Cut, int],
) -> dict[str, Any]:
    """Page data of one model. Args: scores: of each item, [images, captions]; places: as of the readable images."""
    last = verdicts[0] if len(verdicts) < 3 else verdicts[-1]  # of Winoground the group
    rows = {cut: row for row, (_, cut) in enumerate(cuts.places) if cut in places}
    order = sorted(range(len(items)), key=lambda n: key(cuts.fingerprint, "examples", n))
    chosen = [
        n for right in (False, True) for n in [n for n in order if bool(last.right[n]) is right][:EXAMPLES]
    ]  # the same order for every model
    examples = [_example(items[n], scores[n], bool(last.right[n]), cuts, rows) for n in chosen]
    return {"benchmark": benchmark.name, "examples": examples}


def _example(item: Item, scores: Tensor, right: bool, cuts: Cuts, rows: Mapping[Cut, int]) -> Shown:
    images = [(cuts.small(rows[cut]), f"image {n + 1}: {cut.image}") for n, cut in enumerate(item.images)]
    captions = [*((text, "true") for text in item.positives), *((text, "false") for text in item.negatives)]
    if len(images) > 1:
        captions = [(text, f"of image {n + 1}") for n, (text, _) in enumerate(captions)]
    lines = [
        f"{' / '.join(f'{score:.3f}' for score in column)}  {text} ({what})"
        for (text, what), column in zip(captions, scores.T.tolist(), strict=True)
    ]
    return Shown(item.category, images, lines, right)


def report(metrics: Results, data: str, shown: Mapping[str, Mapping[str, Any]]) -> str:
    """A page: each figure by category and model, then examples of each model."""
    benchmarks = " and ".join(dict.fromkeys(more["benchmark"] for more in shown.values()))
    names = dict.fromkeys(
        name.removesuffix("_chance") for values in metrics.values() for name in values if name.endswith("_chance")
    )
    return page(
        f"Composition: {benchmarks}",
        f"On {data}. {INTRO}",
        chain(
            (section(name.replace("_", " ").capitalize(), *_figure(metrics, name)) for name in names),
            (section(f"Examples of {model}", *_examples(more["examples"])) for model, more in shown.items()),
        ),
    )


def _figure(metrics: Results, name: str) -> Iterator[str]:
    """Table and bars of one figure."""
    first = next(iter(metrics.values()))
    categories = [n.partition("@")[2] for n in first if n.startswith(f"{name}@")]
    rows: list[list[Any]] = [
        [category, f"{first[f'{name}_items@{category}']:.0f}"]
        + [values.get(f"{name}@{category}") for values in metrics.values()]
        + [first[f"{name}_chance@{category}"]]
        for category in categories
    ]
    items, chance = f"{first['items']:.0f}", first[f"{name}_chance"]
    rows.append(["all items", items, *(values[name] for values in metrics.values()), chance])
    by_category = f"{name}_by_category"
    guessed = first.get(f"{by_category}_chance")
    rows.append(["mean over categories", "", *(values.get(by_category) for values in metrics.values()), guessed])
    yield table(rows, ["category", "items", *metrics, "chance"], digits=3)
    shown = categories[:LINES]
    values_of = {c: {model: values[f"{name}@{c}"] for model, values in metrics.items()} for c in shown}
    yield bars(values_of, {c: first[f"{name}_chance@{c}"] for c in shown}, "chance")
    if len(categories) > LINES:
        yield f"The first {LINES} of {len(categories)} categories have bars."


def _examples(examples: Sequence[Shown]) -> Iterator[str]:
    """Items that are wrong, and items that are right."""
    for right, title in ((False, "Wrong"), (True, "Right")):
        cards = [card(one.images, one.lines, strong=one.category) for one in examples if one.right is right]
        if cards:
            yield heading(title)
            yield grid(cards)
