"""The results of a sweep: mean and standard deviation over seeds, as lines, CSV and a page with plots."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kiloword import report
from kiloword.apps.sweep.run import Results
from kiloword.errors import suggestion
from kiloword.report.page import SERIES
from kiloword.runs.compare import Cell, cell

MAIN = ("text_retrieval_recall@1", "image_retrieval_recall@1", "acc1", "mean_average_precision", "accuracy", "cider")
DEFAULT = "-"  # the value of a setting that another call of the sweep varied
DECADE = 10.0  # ratio of the largest to the smallest value from which an axis is logarithmic


@dataclass(frozen=True)
class Combination:
    """One combination of values."""

    values: Mapping[str, str]
    cells: Mapping[str, Cell]  # by metric


def rows(results: Results) -> list[Combination]:
    """One row for each combination that has a finished arm, in the order of the arms."""
    groups: dict[tuple[tuple[str, str], ...], list[Mapping[str, float]]] = {}
    finished = [arm for arm in results.every if arm.name in results.metrics]
    names = dict.fromkeys(name for arm in finished for name in arm.values)
    for arm in finished:
        values = tuple((name, arm.values.get(name, DEFAULT)) for name in names)
        groups.setdefault(values, []).append(results.metrics[arm.name])
    made = []
    for values, runs in groups.items():
        metrics = dict.fromkeys(name for run in runs for name in run)
        made.append(Combination(dict(values), {name: cell([r[name] for r in runs if name in r]) for name in metrics}))
    return made


def chosen(table: Sequence[Combination], metrics: Sequence[str]) -> list[str]:
    """The metrics to show: those asked for that there are, else the main ones of --eval, of --val, else the loss."""
    names = _metrics(table)
    main = [name for name in names if name.rpartition("/")[2] in MAIN]
    evaluated = [name for name in main if not name.startswith("val/")]
    return (
        [name for name in metrics if name in names] or evaluated or main or [name for name in names if name == "loss"]
    )


def check_metrics(table: Sequence[Combination], metrics: Sequence[str]) -> None:
    """Raises: ValueError for a metric that is asked for and that no arm has, if there are arms."""
    names = _metrics(table)
    missing = next((name for name in metrics if name not in names), None)
    if missing is not None and names:
        known = f"the arms have no such metric: {', '.join(names)}.{suggestion(missing, names)}"
        raise ValueError(f"--metric {missing}: {known} The same command with another --metric goes on.")


def _metrics(table: Sequence[Combination]) -> list[str]:
    return list(dict.fromkeys(name for row in table for name in row.cells))


def lines(table: Sequence[Combination], metrics: Sequence[str]) -> list[str]:
    """The table as text: a line for each combination, mean +- standard deviation."""
    cells = [[*row.values.values(), *(_shown(row, m) for m in metrics), _count(row)] for row in table]
    cells.insert(0, [*(table[0].values if table else ()), *metrics, "n"])
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    return ["  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in cells]


def _shown(row: Combination, metric: str) -> str:
    return str(row.cells[metric]) if metric in row.cells else "-"


def _count(row: Combination) -> str:
    return str(max(one.n for one in row.cells.values()))


def as_csv(table: Sequence[Combination]) -> bytes:
    """A line for each combination and metric: values, metric, mean, std, n."""
    text = io.StringIO()
    out = csv.writer(text, lineterminator="\n")
    out.writerow([*(table[0].values if table else ()), "metric", "mean", "std", "n"])
    for row in table:
        for metric, one in row.cells.items():
            std = "" if one.std is None else repr(one.std)
            out.writerow([*row.values.values(), metric, repr(one.mean), std, one.n])
    return text.getvalue().encode()


def as_plain(table: Sequence[Combination]) -> list[dict[str, Any]]:
    """The rows as JSON holds them."""
    return [
        {"values": dict(row.values), "metrics": {name: asdict(one) for name, one in row.cells.items()}} for row in table
    ]


def page(results: Results, metrics: Sequence[str]) -> str:
    """The page: plots against the first setting with numbers, the table, the arms that failed."""
    table = rows(results)
    heads = [*(table[0].values if table else ()), *metrics, "n"]
    cells = [[*row.values.values(), *(_shown(row, m) for m in metrics), _count(row)] for row in table]
    failed = [f"{name}: {error}" for name, error in results.errors.items()]
    html = report.page(
        "Sweep",
        "Mean over n seeds ± standard deviation of the sample. Dots are means, bars one standard deviation.",
        [
            *(report.section(metric, *_plots(table, metric)) for metric in metrics),
            report.section("Table", report.table(cells, heads) if cells else None),
            report.section("Failed", report.bullets(failed) if failed else None),
        ],
    )
    return report.signed(html, report.made_by())


def _plots(table: Sequence[Combination], metric: str) -> Iterator[report.Html]:
    """The metric against a setting, a line for each combination of the others, at most SERIES lines a plot."""
    numeric = [name for name in (table[0].values if table else ()) if all(_number(r.values[name]) for r in table)]
    if not numeric:
        return
    series: dict[str, list[tuple[float, Cell]]] = {}
    for row in table:
        if metric in row.cells and math.isfinite(row.cells[metric].mean):
            rest = ", ".join(f"{name}={value}" for name, value in row.values.items() if name != numeric[0])
            series.setdefault(rest or metric, []).append((float(row.values[numeric[0]]), row.cells[metric]))
    for points in series.values():
        points.sort(key=lambda point: point[0])
    for first in range(0, len(series), SERIES):
        part = dict(list(series.items())[first : first + SERIES])
        xs = [x for points in part.values() for x, _ in points]
        yield report.line_plot(
            {name: [(x, c.mean) for x, c in points] for name, points in part.items()},
            numeric[0],
            metric,
            log_x=is_log(xs),
            spread={name: [c.std or 0.0 for _, c in points] for name, points in part.items()},
        )


def _number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def is_log(values: Sequence[float]) -> bool:
    """Whether values belong on a logarithmic axis: above 0, and powers of two or over a decade."""
    low, high = min(values), max(values)
    if low <= 0 or low == high:
        return False
    return high / low >= DECADE or (high / low > 2 and all(math.log2(value).is_integer() for value in values))
