"""The table of an experiment: mean and spread over seeds, and what the rows are of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from research import arms_rows as rows
from research.arms import TUNING, Arm, Experiment, Options
from research.evidence import Runs, decided


def table(experiment: Experiment, options: Options) -> str:
    """Markdown: a line per arm of the options; every figure is the mean over the finished seeds (least..greatest).

    The seed that chooses learning rates stands in it where it is the only one: it decides no claim.
    """
    done = rows.read(options.out)
    seeds = [seed for seed in options.seeds if seed != TUNING] or options.seeds
    runs = {arm.name: _of(done, arm, seeds, options) for arm in experiment.chosen(options)}
    answers = [str(decided(rule, runs)) for rule in experiment.claims]
    return "\n".join([*table_of(experiment, runs), *answers, *(experiment.notes(options) if experiment.notes else ())])


def table_of(experiment: Experiment, runs: Runs) -> list[str]:
    """The lines of the table of these runs."""
    heads = ["arm", *experiment.columns, "processor s", "seeds"]
    lines = [experiment.title, "", line(heads), line(["---"] * len(heads))]
    lines += [line(_cells(experiment, name, of_arm)) for name, of_arm in runs.items()]
    every = [row for of_arm in runs.values() for row in of_arm]
    commits = {r["commit"][:7] + ("+" if r["dirty"] else "") for r in every}
    lengths = {f"{r['steps']} steps, {r['images']} images" for r in every}
    lines += ["", f"Mean over seeds (least..greatest). {'; '.join(sorted(lengths))}. Commits: {_listed(commits)}."]
    if any(name.endswith("+") for name in commits):
        lines.append("+: with changes that were not committed.")
    return [*lines, *(experiment.summary(runs) if experiment.summary else ())]


def _of(done: Sequence[rows.Row], arm: Arm, seeds: Sequence[int], options: Options) -> list[rows.Row]:
    return [row for seed in seeds if (row := rows.finished(done, arm, seed, options)) is not None]


def _cells(experiment: Experiment, name: str, runs: Sequence[Mapping[str, Any]]) -> list[str]:
    cells = [spread([r["metrics"][m] for r in runs if m in r["metrics"]]) for m in experiment.columns.values()]
    return [name, *cells, spread([r["cpu_s"] for r in runs], digits=0), str(len(runs))]


def spread(values: Sequence[float], digits: int = 3) -> str:
    """`mean (least..greatest)`; one value stands alone, none is a dash."""
    if not values:
        return "-"
    mean, least, most = (f"{v:.{digits}f}" for v in (fmean(values), min(values), max(values)))
    return mean if len(values) == 1 else f"{mean} ({least}..{most})"


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def line(cells: Sequence[str]) -> str:
    """A line of a table in Markdown."""
    return f"| {' | '.join(cells)} |"
