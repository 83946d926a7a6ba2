"""How cost grows with work: processor time and peak memory of series of rising amounts, and their exponents.

An exponent is the slope of the logarithm of the cost over that of the work, by least squares over the upper half of a
range. Each point is a process of its own with one thread, forked from this one after its imports: its first call, and
the median where calls are short; memory is the peak beyond what the process holds after a call with the least amount. A
series stops before the point that would take more than --seconds or --gb, by the slope of its last two points. Rows are
JSON lines: the same command, or one with higher limits, goes on where it stopped.

    python bench/growth.py [SERIES ...] [--rows bench/growth.jsonl] [--seconds 20] [--gb 6]
    python bench/growth.py --print [--plot research/results/growth.svg]    tables of all rows, as markdown
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import torch

from growth_points import SERIES, Series
from kiloword.files import write_atomic

Row = dict[str, Any]
FORK = multiprocessing.get_context("fork")
ROWS = Path(__file__).with_name("growth.jsonl")
SHORT, CALLS = 0.2, 3  # seconds of calls that are repeated, and how often
SLACK = 0.1  # of an exponent above what it must be
LEAST_S, LEAST_MB = 1e-3, 4.0  # time and memory of a range below which an exponent says nothing
WIDTH, HEIGHT, LEFT, FOOT, TOP, ACROSS = 330, 210, 56, 34, 30, 4  # of one plot; plots in a row


def point(name: str, amount: int, folder: Path) -> Row:
    """Measure one amount in this process."""
    series = SERIES[name]
    series.ready(series.amounts[0], folder)()  # imports, and what libraries keep
    base = resident_mb("VmRSS")
    call = series.ready(amount, folder)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew (Linux)
    (seconds, wall), figures = timed(call)
    peak = resident_mb("VmHWM") - base
    times = [(seconds, wall)]
    while sum(t for t, _ in times) < SHORT and len(times) < CALLS:
        times.append(timed(call)[0])
    middle = [statistics.median(each) for each in zip(*times, strict=True)]
    taken = {"cpu_s": round(middle[0], 6), "wall_s": round(middle[1], 6), "peak_mb": round(peak, 2)}
    whole = {"process_s": round(time.process_time(), 2)}
    return {"series": name, "amount": amount, "work": amount, **taken, **(figures or {}), **whole}


def timed(call: Callable[[], Any]) -> tuple[tuple[float, float], Any]:
    """Seconds of the processor and of the clock, and what the call returned."""
    began = time.process_time(), time.perf_counter()
    result = call()
    return (time.process_time() - began[0], time.perf_counter() - began[1]), result


def resident_mb(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(x for x in lines if x.startswith(name)).split()[1]) * 1024 / 1e6


def read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run(args: argparse.Namespace) -> None:
    """Measure what the rows lack, and append it."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        for name in args.series or SERIES:
            for amount in SERIES[name].amounts:
                rows = [row for row in read(args.rows) if row["series"] == name]
                if any(row["amount"] == amount for row in rows):
                    continue
                if too_much(rows, amount, args.seconds, args.gb):
                    break
                line = json.dumps(apart(name, amount, args.folder or Path(temporary)))
                with args.rows.open("a") as file:
                    file.write(line + "\n")
                print(line, flush=True)


def apart(name: str, amount: int, folder: Path) -> Row:
    """A point in a process of its own. Raises: RuntimeError where it died."""
    receiving, sending = FORK.Pipe(duplex=False)
    process = FORK.Process(target=lambda: sending.send(point(name, amount, folder)))
    process.start()
    sending.close()
    try:
        row: Row = receiving.recv()
    except EOFError:
        raise RuntimeError(
            f"{name} at {amount} ended without a result: its error is printed above, or the system killed it for memory"
        ) from None
    process.join()
    return row


def too_much(rows: Sequence[Row], amount: int, seconds: float, gb: float) -> str:
    """What an amount would need beyond the limits; "" where it fits."""
    if len(rows) < 2:
        return ""
    before, last = rows[-2:]
    needs = []
    for key, unit, least, limit in (("cpu_s", "s", LEAST_S, seconds), ("peak_mb", "MB", LEAST_MB, 1000 * gb)):
        low, high = max(before[key], least), max(last[key], least)
        slope = math.log(high / low) / math.log(last["work"] / before["work"])
        expected = high * (amount / last["work"]) ** max(slope, 0)
        needs += [f"about {expected:,.0f} {unit}"] if expected > limit else []
    return " and ".join(needs)


def exponent(points: Sequence[tuple[float, float]], least: float) -> float | None:
    """The slope of the upper half of a range of (work, cost), two points at least; None where cost is below `least`."""
    middle = math.sqrt(points[0][0] * points[-1][0])
    upper = [(w, c) for w, c in points if w >= middle * 0.999]
    if len(upper) < 2:
        upper = list(points[-2:])
    if upper[-1][1] < least:
        return None
    work, cost = (np.log([max(x, least / 10) for x in each]) for each in zip(*upper, strict=True))
    return float(np.polyfit(work, cost, 1)[0])


def exponents(rows: Sequence[Row]) -> tuple[float | None, float | None]:
    """Of time and of memory."""
    return (
        exponent([(row["work"], row["cpu_s"]) for row in rows], LEAST_S),
        exponent([(row["work"], row["peak_mb"]) for row in rows], LEAST_MB),
    )


def measured(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The points of each series by rising work, of those that have two."""
    by_series = {
        n: sorted((r for r in rows if r["series"] == n and "cpu_s" in r), key=lambda r: r["work"]) for n in SERIES
    }
    return {name: points for name, points in by_series.items() if len(points) > 1}


def tables(rows: Sequence[Row]) -> list[str]:
    """The summary and each series, as markdown."""
    lines = ["| work | range | CPU s | exponent | must | MB | exponent | must |", "|---|---|---|---|---|---|---|---|"]
    for name, points in measured(rows).items():
        series, (of_time, of_memory) = SERIES[name], exponents(points)
        first, last = points[0], points[-1]
        spans = [f"{short(first[key])} to {short(last[key])}" for key in ("work", "cpu_s", "peak_mb")]
        cells = [series.what, f"{spans[0]} {series.unit}", spans[1], judged(of_time, series.time), f"{series.time:g}"]
        lines.append(
            "| " + " | ".join([*cells, spans[2], judged(of_memory, series.memory), f"{series.memory:g}"]) + " |"
        )
    lines += ["", *left_out(rows)]
    for name, points in measured(rows).items():
        columns = [key for key in ("work", "cpu_s", "wall_s", "peak_mb", "disk_mb") if key in points[0]]
        lines += ["", f"{name}: {SERIES[name].what}", "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
        lines += [f"| {' | '.join(number(row[key]) for key in columns)} |" for row in points]
    return lines


def left_out(rows: Sequence[Row]) -> list[str]:
    """Amounts that were not measured, with what the first of them would need by the slope of the last two points."""
    lines = []
    for name, points in measured(rows).items():
        rest = [n for n in SERIES[name].amounts if n not in {row["amount"] for row in points}]
        if rest:
            lines.append(f"{SERIES[name].what}: {rest[0]:,} would need {too_much(points, rest[0], 0, 0)}.")
    return lines


def judged(slope: float | None, must: float) -> str:
    """An exponent, in bold where it is above what it must be."""
    if slope is None:
        return "-"
    return f"**{slope:.2f}**" if slope > must + SLACK else f"{slope:.2f}"


def short(value: float) -> str:
    """Three digits, thousands and more by a letter."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= size:
            return f"{value / (1e3 if letter == 'k' else size):.3g}{letter}"
    return f"{value:.2g}" if value < 100 else f"{value:.0f}"


def svg(rows: Sequence[Row]) -> str:
    """Time (line) and memory (dashes) of each series over its work, both axes logarithmic."""
    points = measured(rows)
    plots = [
        plot(WIDTH * (n % ACROSS), HEIGHT * (n // ACROSS), SERIES[name], points[name]) for n, name in enumerate(points)
    ]
    size = f"{WIDTH * ACROSS} {HEIGHT * -(-len(plots) // ACROSS)}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" role="img" aria-label="Time and memory over '
        f'work: {len(plots)} series" style="font:12px system-ui,sans-serif;background:#fff">{"".join(plots)}</svg>\n'
    )


def plot(left: int, top: int, series: Series, rows: Sequence[Row]) -> str:
    """One series, with the exponents of the upper half."""
    work = [row["work"] for row in rows]
    costs = {key: [max(row[key], least) for row in rows] for key, least in (("cpu_s", 1e-5), ("peak_mb", 0.01))}
    ends = sorted(value for values in costs.values() for value in values)

    def x(value: float) -> float:
        return round(left + LEFT + (WIDTH - LEFT - 16) * place(value, min(work), max(work)), 1)

    def y(value: float) -> float:
        return round(top + HEIGHT - FOOT - (HEIGHT - FOOT - TOP) * place(value, ends[0] / 1.5, ends[-1] * 1.5), 1)

    marks = "".join(
        f'<path d="M{left + LEFT} {y(tick)}H{left + WIDTH - 16}" stroke="#8884"/>'
        f'<text x="{left + LEFT - 5}" y="{y(tick) + 4}" text-anchor="end" fill="#666">{tick:g}</text>'
        for tick in decades(ends)
    )
    marks += "".join(
        f'<text x="{x(row["work"])}" y="{top + HEIGHT - FOOT + 15}" text-anchor="{anchor}" fill="#666">'
        f"{short(row['work'])}</text>"
        for row, anchor in ((rows[0], "start"), (rows[-1], "end"))
    )
    for (_key, values), colour, dash in zip(costs.items(), ("#2a6fb0", "#b04a2a"), ("none", "5 4"), strict=True):
        line = " ".join(f"{x(row['work'])} {y(value)}" for row, value in zip(rows, values, strict=True))
        marks += f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"/>'
    slopes = ["-" if value is None else f"{value:.2f}" for value in exponents(rows)]
    legend = f'<tspan fill="#2a6fb0">s, {slopes[0]}</tspan>  <tspan fill="#b04a2a">MB, {slopes[1]}</tspan>'
    return (
        f'<text x="{left + 8}" y="{top + 16}" fill="#222">{escape(series.what)}: {legend}</text>{marks}'
        f'<text x="{left + (LEFT + WIDTH) // 2}" y="{top + HEIGHT - FOOT + 15}" text-anchor="middle" fill="#666">'
        f"{escape(series.unit)}</text>"
    )


def place(value: float, low: float, high: float) -> float:
    """Where a value lies on a logarithmic axis, 0 at its low end and 1 at its high end."""
    return math.log(value / low) / math.log(high / low) if high > low else 0.5


def number(value: float) -> str:
    """A cell of the table."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.6g}"


def decades(ends: Sequence[float]) -> tuple[float, ...]:
    """Powers of ten inside a range, about four of them."""
    low, high = math.ceil(math.log10(ends[0] / 1.5)), math.floor(math.log10(ends[-1] * 1.5))
    return tuple(10.0**k for k in range(low, high + 1, max(1, (high - low) // 4 + 1)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "series", nargs="*", choices=[[], *SERIES], default=[], metavar="SERIES", help=", ".join(SERIES)
    )
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--gb", type=float, default=6)
    parser.add_argument("--print", action="store_true", help="measure nothing")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--folder", type=Path, help="where data is made that points share; default: a temporary one")
    args = parser.parse_args()
    if not args.print:
        run(args)
    rows = read(args.rows)
    print("\n".join(tables(rows)))
    if args.plot:
        write_atomic(args.plot, svg(rows).encode())


if __name__ == "__main__":
    main()
