"""One frame: the runs with state and alerts, and below a plot per metric with the curves of all runs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import wrap

import numpy as np
from rich.text import Text

from kiloword.errors import count
from kiloword.runs.curves import main_evaluations, mean_curve
from kiloword.runs.expected import Expected, track
from kiloword.runs.groups import groups_of, kind_of
from kiloword.runs.plot import MARKS, STYLES, Dots, Series, plot, short
from kiloword.runs.rows import smoothed
from kiloword.runs.runs import Watched
from kiloword.terminal import shown
from kiloword.terminal.progress import duration, per_second

COUNTED = {"skipped": "bad samples", "truncated": "captions cut"}
COUNTED |= {"skipped_steps": "steps skipped", "restarts": "restarts"}
COUNTS = ("step", "epoch", "time", "restarts", "skipped", "truncated", "captions", "stopped_early")  # shown in words
HEADLINES = ("recall@1", "/accuracy", "/acc1", "/mean_average_precision", "/cider")  # ends of metrics of validation
SPEED = ("pairs_per_s", "data_wait", "slowest_data_wait")
LAST = ("gradient_norm", *SPEED, "lr", "scale", "bias", "memory", "save_s", "skipped_steps")
STATES = {"waiting": "dim", "running": "green", "finished": "bold green", "stopped": "yellow"}
STATES |= {"silent": "bold red", "failed": "bold red"}
LEAST, MOST, FREE = 4, 10, 7  # rows of a plot: least, most, and without a limit of height
BAND = STYLES.index("bright_black")  # line of the ends of what is expected
FEW = 4  # runs; more get a line each, and curves of the loss and of validation alone
MORE = "..."  # ends a line that is cut
WIDE = 50  # columns of a plot at least
StyledText = tuple[str, str]  # text and its style
Panel = tuple[str, str, Sequence[tuple[Watched, int]]]  # title of a plot, its metric, its runs with their line


@dataclass(frozen=True)
class View:
    """How frames are drawn."""

    width: int
    height: int | None = None  # lines of the window; None: no limit
    dots: Dots = "marks"
    smooth: float = 0.0
    curves: tuple[str, ...] = ()  # starts of the names of metrics; (): the most important
    expected: Expected | None = None  # what the runs are compared with


def page(runs: Sequence[Watched], view: View) -> Text:
    """The frame, at most `view.height` lines of at most `view.width` columns."""
    if len(runs) > FEW:
        places = _places(runs)
        lines = _lines(runs, places, view)
    else:
        places = list(range(len(runs)))
        lines = [line for n, run in enumerate(runs) for line in _about(run, n if len(runs) > 1 else None, view)]
    if view.height is not None and len(lines) > view.height // 2:
        cut = max(view.height // 2 - 1, 1)
        lines = [*lines[:cut], Text(f"... {len(lines) - cut} more lines: a higher window shows them", "dim")]
    names = _chosen(runs, view)
    if names:
        lines += [Text(), *_grid(_panels(runs, places, names), view, len(lines) + 1)]
    elif view.curves:
        lines.append(Text(f"no metric begins with {shown(' or '.join(view.curves))}", "yellow"))
    for line in lines:
        if line.cell_len > view.width:
            line.truncate(max(view.width - len(MORE), 0))
            line.append(MORE)
    return Text("\n", no_wrap=True).join(lines[: view.height])


def _places(runs: Sequence[Watched]) -> list[int]:
    """Of many runs, the line of each: those that differ in their seed alone share one."""
    groups = groups_of(runs)
    return [next(n for n, group in enumerate(groups) if run in group.runs) for run in runs]


def _lines(runs: Sequence[Watched], places: Sequence[int], view: View) -> list[Text]:
    """Many runs: a line each, in columns, and below them the errors and alerts."""
    main = next(iter(main_evaluations(runs)), "")
    cells, notes = [["", "run", "method", "state", "step", "loss", main.removeprefix("val/"), "pairs/s"]], []
    for run, place in zip(runs, places, strict=True):
        last, state, rate = run.columns.last, run.state()[0], run.pace.rate
        values = [short(float(last[name])) if name in run.columns else "" for name in ("loss", main)]
        step = f"{run.step:,}" + (f"/{run.config.steps:,}" if run.config.steps else "")
        speed = per_second(rate) if rate is not None else ""
        cells.append([_mark(place, view), shown(run.name), shown(run.config.method), state, step, *values, speed])
        alerts = [f"! {shown(run.error)}"] if run.error else [f"! {a.name}: {a.message}" for a in run.alerts.current]
        for words, style in [*((alert, "red") for alert in alerts), *_expected(run, view)]:
            notes += [Text(line, style) for line in _wrapped(f"{shown(run.name)} {words}", view)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [Text("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()) for row in cells]
    lines[0].stylize("dim")
    for line, run, place in zip(lines[1:], runs, places, strict=True):
        line.stylize(STYLES[place % len(STYLES)], 0, 1)
        start = sum(widths[:3]) + 6
        line.stylize(STATES[run.state()[0]], start, start + widths[3])
    if len(set(places)) < len(runs):
        notes.append(Text("runs that differ in their seed alone share a curve, their mean", "dim"))
    return [*lines, *notes]


def _mark(place: int, view: View) -> str:
    return MARKS[place % len(MARKS)] if view.dots == "marks" else "\u25cf"


def _about(run: Watched, place: int | None, view: View) -> list[Text]:
    """Text about a run, wrapped. Args: place: of the run among several; None: the only one."""
    indent = "" if place is None else "  "
    lines = _wrap(_parts(run), view.width, indent)
    if place is not None:
        lines[0] = Text.assemble((_mark(place, view), STYLES[place % len(STYLES)]), " ", lines[0][len(indent) :])
    errors = [f"! the run ended with an error: {shown(run.error)}"] if run.error else []
    for alert in errors + [f"! {a.name} since step {a.since}: {a.message}" for a in run.alerts.current]:
        lines += [Text(line, "red") for line in _wrapped(alert, view, indent)]
    for words, style in _expected(run, view):
        lines += [Text(line, style) for line in _wrapped(words, view, indent)]
    over = Counter(a.name for a in run.alerts.all if a.until is not None)
    if over:
        alert = "over: " + ", ".join(name + (f" x{n}" if n > 1 else "") for name, n in over.items())
        lines += [Text(line, "dim") for line in _wrapped(alert, view, indent)]
    return lines


def _wrapped(words: str, view: View, indent: str = "") -> list[str]:
    """The lines of a sentence, the later ones indented."""
    return wrap(words, view.width, initial_indent=indent, subsequent_indent=f"{indent}  ")


def _expected(run: Watched, view: View) -> list[StyledText]:
    """Whether a run is on track, and the settings in which it differs from the expected one."""
    if view.expected is None:
        return []
    result, name = track(run, view.expected), shown(view.expected.name)
    differs = [(f"not the recipe of {name}: " + shown(", ".join(result.differs)), "yellow")] if result.differs else []
    if result.outside:
        return [(f"! off track of {name}: " + shown("; ".join(result.outside)), "red"), *differs]
    if not result.compared:
        return [(f"{name}: nothing to compare yet", "dim"), *differs]
    of = f"{view.expected.runs} runs"
    return [(f"on track of {name}: {count(result.compared, 'metric')} within the band of {of}", "green"), *differs]


def _parts(run: Watched) -> list[StyledText]:
    last, config = run.columns.last, run.config
    state, details = run.state()
    kind = " ".join((config.method, config.size)).strip()
    parts: list[StyledText] = [(run.name, "bold"), (kind, ""), (state, STATES[state]), (details, STATES[state])]
    if "step" in last:
        of = f"/{config.steps:,} ({run.step / config.steps:.0%})" if config.steps else ""
        parts.append((f"step {run.step:,}{of}", ""))
    if state == "running":
        parts.append((f"ETA {duration(run.left)}", "bold"))
    for name, words in (("loss", "loss {}"), ("lr", "lr {}"), ("epoch", "epoch {}")):
        if name in run.columns:
            parts.append((words.format(short(float(last[name]))), ""))
    if run.best:
        parts.append((f"best {run.best[0].removeprefix('val/')} {short(run.best[1])} at step {run.best[2]:,}", "green"))
    if run.pace.rate is not None:
        parts.append((f"{per_second(run.pace.rate)} pairs/s", ""))
    return [part for part in parts + _counts(run) if part[0]]


def _counts(run: Watched) -> list[StyledText]:
    last = run.columns.last
    parts = []
    wait = last.get("slowest_data_wait", last.get("data_wait"))
    if isinstance(wait, int | float):
        parts.append((f"data wait {wait:.0%}", ""))
    if isinstance(last.get("memory"), int | float):
        parts.append((f"memory {last['memory'] / 1000:.1f} GB", ""))
    for name, what in COUNTED.items():
        if isinstance(last.get(name), int):
            parts.append((f"{last[name]:,} {what}", "yellow" if last[name] and name != "restarts" else "dim"))
    return parts


def _wrap(parts: Sequence[StyledText], width: int, indent: str) -> list[Text]:
    """Join parts by two spaces and wrap between them."""
    lines = [Text(indent)]
    for words, style in parts:
        line, words = lines[-1], shown(words)
        gap = "" if len(line) == len(indent) else "  "
        if gap and len(line) + len(gap) + len(words) > width:
            lines.append(Text(indent))
            line, gap = lines[-1], ""
        line.append(gap)
        line.append(words, style or None)
    return lines


def _chosen(runs: Sequence[Watched], view: View) -> list[str]:
    """Metrics to draw: the loss and its terms, validation, the gradient, speed, the rest."""
    names = list(dict.fromkeys(name for run in runs for name in run.columns.names))
    if view.curves:
        return [n for n in names if n.startswith(view.curves) and n not in ("step", "time")]
    names = [n for n in names if n not in COUNTS and not _dull(n, runs)]
    val = [n for n in names if n.startswith("val/")]
    terms = [n for n in names if n not in val and n not in LAST and n != "loss"]
    first = ["loss"] if "loss" in names else []
    best = {run.best[0] for run in runs if run.best}
    val = [n for n in val if n.endswith(HEADLINES) or n in best]
    return first + terms + val + [n for n in LAST if n in names and len(runs) <= FEW]


def _panels(runs: Sequence[Watched], places: Sequence[int], names: Sequence[str]) -> list[Panel]:
    """A panel for each metric; losses and terms have one for each kind, as those of other methods are other things."""
    kinds = list(dict.fromkeys(kind_of(run) for run in runs))
    members = list(zip(runs, places, strict=True))
    panels: list[Panel] = []
    for name in names:
        if len(kinds) == 1 or name.startswith("val/") or name in (*LAST, *COUNTS):
            panels.append((name, name, members))
            continue
        parts = ((kind, [m for m in members if kind_of(m[0]) == kind and name in m[0].columns]) for kind in kinds)
        panels += [(f"{name} of {kind}", name, part) for kind, part in parts if part]
    return panels


def _dull(name: str, runs: Sequence[Watched]) -> bool:
    """Whether a curve is omitted: a count that is always zero, or a pair loss that is the whole loss."""
    columns = [run.columns for run in runs if name in run.columns]
    if name in ("skipped_steps", "save_s"):
        return not any(c.of(name)[1].any() for c in columns)
    return name == "pair" and all(np.array_equal(c.of("pair")[1], c.of("loss")[1]) for c in columns)


def _grid(panels: Sequence[Panel], view: View, above: int) -> list[Text]:
    """Plots side by side as the width allows. Args: above: number of lines above them."""
    across = max(1, min(view.width // WIDE, len(panels), 4))
    width = (view.width - 2 * (across - 1)) // across
    down, height, hidden = math.ceil(len(panels) / across), FREE, 0
    if view.height is not None:
        free = max(view.height - above, LEAST + 3)
        fits = max(1, min(down, free // (LEAST + 2)))
        if fits < down:
            fits = max(1, (free - 1) // (LEAST + 2))
            hidden = len(panels) - fits * across
        down, height = fits, min(MOST, (free - bool(hidden)) // fits - 2)
    runs = [run for _, _, members in panels for run, _ in members]
    ends = [(steps[0], steps[-1]) for run in runs if len(steps := run.columns.of("step")[0])]
    first, last = float(min(a for a, _ in ends)), float(max(b for _, b in ends))
    plots = [_plot(panel, (first, last), view, width, height) for panel in panels[: down * across]]
    lines = [line for n in range(0, len(plots), across) for line in _beside(plots[n : n + across], width)]
    note = f"{hidden} more curves: a larger window shows them, or choose by --curves"
    return [*lines, *([Text(note, "dim")] if hidden > 0 else [])]


def _plot(panel: Panel, steps: tuple[float, float], view: View, width: int, height: int) -> list[Text]:
    title, name, members = panel
    weight = 0.0 if name.startswith("val/") else view.smooth
    series = []
    for place in dict.fromkeys(place for _, place in members):
        at, values = mean_curve([run for run, other in members if other == place], name)
        if len(at):
            series.append(Series(at, smoothed(values, weight), place))
    newest = short(float(series[0].values[-1])) if len(members) == 1 else ""
    band = view.expected.bands.get(name) if view.expected else None
    if band is not None and series:
        ends = np.array(band.ends)
        seen = ends <= steps[1]
        series = [*(Series(ends[seen], np.array(v)[seen], BAND) for v in (band.low, band.high) if seen.any()), *series]
    return list(plot(f"{shown(title)}  {newest}", series, steps, width, height, view.dots).split("\n"))


def _beside(plots: Sequence[list[Text]], width: int) -> list[Text]:
    lines = []
    for row in zip(*plots, strict=True):
        line = Text()
        for n, part in enumerate(row):
            part.truncate(width)
            line.append("  " if n else "").append_text(part)
            if n < len(row) - 1:
                line.append(" " * (width - len(part)))
        line.rstrip()
        lines.append(line)
    return lines
