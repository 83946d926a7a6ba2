"""What runs of a recipe show: bands of their metrics over seeds, and whether another run is within them. No torch here.

A band parts the steps into BINS; in each it is the mean over the runs, wide enough for a further run: REACH standard
deviations of a run's mean around it, of the spread of the seeds. `expectations/` holds those of recipes by name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kiloword.errors import suggestion
from kiloword.runs.curves import main_evaluations
from kiloword.runs.groups import ABSENT, flat_settings, groups_of
from kiloword.runs.plot import short
from kiloword.runs.rows import NAME, Columns, Numbers, absurd
from kiloword.runs.runs import Watched, find, read_object

FORMAT = "kiloword-expected-1"
FOLDER = Path(__file__).parent / "expectations"
BINS, NEAR = 40, 5  # parts of the steps; bins whose spreads are averaged, as few seeds tell little of one
REACH, LEAST = 3.0, 0.01  # standard deviations of a band; its least half-width, as a share of the mean
LATE = 2  # newest bins in a row that are outside of the band when a run is off track
ELSEWHERE = ("data.sources", "data.val", "data.features", "data.image_features", "data.text_features", "data.rows")


@dataclass(frozen=True)
class Band:
    """Values of a metric that a run should have, in bins of steps."""

    ends: tuple[float, ...]  # [B] last step of each bin
    low: tuple[float, ...]  # [B]
    high: tuple[float, ...]  # [B]


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What runs of a recipe show."""

    name: str
    runs: int  # that it was measured on
    steps: int
    seconds: float  # of a run's steps, on the machine of the runs
    settings: Mapping[str, Any]  # of the recipe, by dotted name
    bands: Mapping[str, Band]


@dataclass(frozen=True)
class Track:
    """How a run compares with what is expected."""

    outside: tuple[str, ...]  # metrics that are off, with value and band, in words
    compared: int  # metrics with a finished bin
    differs: tuple[str, ...]  # settings that differ, in words


def measured(name: str, runs: Sequence[Watched]) -> Expected:
    """What finished runs of one recipe show.

    Raises: ValueError for fewer than two runs, runs that are not finished, and runs of several recipes.
    """
    if len(runs) < 2:
        raise ValueError(f"{name} holds {len(runs)} run: expected two or more that differ in their seed alone.")
    groups = groups_of(runs)
    if len(groups) > 1:
        differ = ", ".join(dict.fromkeys(path for group in groups for path in group.settings)) or "their config.json"
        raise ValueError(f"the runs of {name} differ in more than their seed ({differ}): expected one recipe.")
    if unfinished := [run.name for run in runs if run.state()[0] != "finished"]:
        raise ValueError(f"{' and '.join(unfinished)} of {name} are not finished: a band needs whole runs.")
    steps = runs[0].config.steps or runs[0].step
    metrics = [name for name in ("loss", *main_evaluations(runs)) if all(name in run.columns for run in runs)]
    return Expected(
        name=name,
        runs=len(runs),
        steps=steps,
        seconds=float(np.mean([run.seconds for run in runs])),
        settings={path: value for path, value in flat_settings(runs[0]).items() if path not in ELSEWHERE},
        bands={metric: _band([run.columns for run in runs], metric, steps) for metric in metrics},
    )


def _band(runs: Sequence[Columns], metric: str, steps: int) -> Band:
    binned = [_binned(*columns.of(metric), _edges(steps)) for columns in runs]
    common = sorted(set.intersection(*(set(bins) for bins in binned)))
    values = np.array([[bins[end] for end in common] for bins in binned])  # [runs, B]
    mean, spread = values.mean(0), _smooth(values.std(0, ddof=1))
    half = np.maximum(REACH * math.sqrt(1 + 1 / len(runs)) * spread, LEAST * abs(mean))
    low, high = (tuple(float(f"{v:.5g}") for v in ends) for ends in (mean - half, mean + half))
    return Band(tuple(common), low, high)


def _edges(steps: int) -> Numbers:
    """[B] the last step of each bin."""
    return np.unique(np.ceil(np.linspace(0, steps, min(BINS, steps) + 1)[1:]))


def _binned(steps: Numbers, values: Numbers, ends: Numbers) -> dict[float, float]:
    """Last step of a bin -> the mean of its values. Args: steps, values: [N]; ends: [B], ascending."""
    places = np.searchsorted(ends, steps)
    return {float(ends[n]): float(values[places == n].mean()) for n in range(len(ends)) if (places == n).any()}


def _smooth(spread: Numbers) -> Numbers:
    """[B] the root of the mean square of neighbouring spreads."""
    near = [slice(max(n - NEAR // 2, 0), n + NEAR // 2 + 1) for n in range(len(spread))]
    return np.sqrt([(spread[place] ** 2).mean() for place in near])


def track(run: Watched, expected: Expected) -> Track:
    """Whether a run's newest finished bins are within the bands: a metric is off when LATE of them in a row are not."""
    outside, compared = [], 0
    for metric, band in expected.bands.items():
        bins = _binned(*run.columns.of(metric), np.array(band.ends))
        done = [n for n, end in enumerate(band.ends) if end in bins and run.step >= end]
        compared += bool(done)
        sides = [_side(bins[band.ends[n]], band.low[n], band.high[n]) for n in done[-LATE:]]
        if sides and abs(sum(sides)) == min(LATE, len(band.ends)):
            n, what = done[-1], metric.removeprefix("val/")
            outside.append(
                f"{what} is {short(bins[band.ends[n]])} at step {band.ends[n]:,.0f}, "
                f"{'above' if sides[0] > 0 else 'below'} the expected {short(band.low[n])} to {short(band.high[n])}"
            )
    return Track(tuple(outside), compared, tuple(_differences(flat_settings(run), expected.settings)))


def _side(value: float, low: float, high: float) -> int:
    return (value > high) - (value < low)


def _differences(settings: Mapping[str, Any], expected: Mapping[str, Any]) -> Iterator[str]:
    """Settings that differ, in words; none where a run's recipe cannot be read."""
    for path, value in expected.items() if settings else ():
        if (actual := settings.get(path, ABSENT)) != value:
            yield f"{path} {'unset' if actual == ABSENT else actual} (expected {value})"


def read(what: str) -> Expected:
    """What is expected, by the name of a recipe, from a file that `write` wrote, or measured on a folder of runs.

    Raises: ValueError for an unknown name, a damaged file, and runs that `measured` refuses.
    """
    path = Path(what)
    if path.is_dir():
        runs = [Watched(folder, name) for folder, name in find([path]).items()]
        for run in runs:
            run.update()
        return measured(what, runs)
    if not path.is_file():
        path = FOLDER / f"{what}.json"
        if what not in names():
            raise ValueError(
                f"--expected {what} is no file, folder or recipe with expected curves: expected one of "
                f"{', '.join(names())}, or the folder of finished runs.{suggestion(what, names())}"
            )
    try:
        return _parse(read_object(path))
    except (KeyError, TypeError, ValueError, OverflowError) as e:
        raise ValueError(f"{path} holds no expected curves: expected a file of tools/curves.py.") from e


def names() -> list[str]:
    """The recipes whose curves are known."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def _parse(raw: Mapping[str, Any]) -> Expected:
    if raw.get("format") != FORMAT or not isinstance(raw["settings"], dict):
        raise ValueError("another format")
    if any(absurd(raw[name]) for name in ("runs", "steps", "seconds")):
        raise ValueError("not a number")
    bands = {str(name)[:NAME]: _parse_band(band) for name, band in raw["bands"].items()}
    return Expected(
        name=str(raw["name"]),
        runs=int(raw["runs"]),
        steps=int(raw["steps"]),
        seconds=float(raw["seconds"]),
        settings=raw["settings"],
        bands=bands,
    )


def _parse_band(raw: Mapping[str, Any]) -> Band:
    """Raises: ValueError for columns of unequal lengths, or numbers that are NaN or infinite."""
    columns = [tuple(map(float, raw[name])) for name in ("ends", "low", "high")]
    if len({len(column) for column in columns}) > 1 or not np.isfinite(columns).all():
        raise ValueError("a damaged band")
    return Band(*columns)


def as_json(expected: Expected) -> str:
    """The file that `read` reads: a line for each metric's values."""
    plain = {"format": FORMAT, **asdict(expected)}
    bands = plain.pop("bands")
    lines = [f'  "{name}": {json.dumps(value)}' for name, value in plain.items()]
    rows = ",\n".join(f"    {json.dumps(metric)}: {json.dumps(band)}" for metric, band in bands.items())
    return "{\n" + ",\n".join([*lines, '  "bands": {\n' + rows + "\n  }"]) + "\n}\n"
