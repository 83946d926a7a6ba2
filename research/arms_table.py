"""The table of an experiment: mean and spread over seeds, and what the rows are of."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from research import arms_rows as rows
from research.arms import Arm, Experiment, Options


def table(experiment: Experiment, options: Options) -> str:
    """Markdown: a line per arm; every figure is the mean over the finished seeds (least..greatest)."""
    done = rows.read(options.out)
    results = [(arm, _of(done, arm, options.seeds)) for arm in experiment.chosen(options)]
    heads = ["arm", *experiment.columns, "minutes", "processor s", "seeds"]
    lines = [experiment.title, "", _line(heads), _line(["---"] * len(heads))]
    lines += [_line(_cells(experiment, arm, runs)) for arm, runs in results]
    commits = {r["commit"][:7] + ("+" if r["dirty"] else "") for _, runs in results for r in runs}
    lengths = {f"{r['steps']} steps, {r['images']} images" for _, runs in results for r in runs}
    lines += ["", f"Mean over seeds (least..greatest). {'; '.join(sorted(lengths))}. Commits: {_listed(commits)}."]
    if any(name.endswith("+") for name in commits):
        lines.append("+: with changes that were not committed.")
    lines += [claim.decided({arm.name: runs for arm, runs in results}) for claim in experiment.claims]
    return "\n".join([*lines, *(experiment.notes(options) if experiment.notes else ())])


def _of(done: Sequence[rows.Row], arm: Arm, seeds: Sequence[int]) -> list[rows.Row]:
    return [row for seed in seeds if (row := rows.finished(done, arm, seed)) is not None]


def _cells(experiment: Experiment, arm: Arm, runs: Sequence[rows.Row]) -> list[str]:
    cells = [spread([r["metrics"][m] for r in runs if m in r["metrics"]]) for m in experiment.columns.values()]
    minutes = spread([r["train_s"] / 60 for r in runs], digits=1)
    seconds = spread([r["cpu_s"] for r in runs], digits=0)
    return [arm.name, *cells, minutes, seconds, str(len(runs))]


def spread(values: Sequence[float], digits: int = 3) -> str:
    """`mean (least..greatest)`; one value stands alone, none is a dash."""
    if not values:
        return "-"
    mean, least, most = (f"{v:.{digits}f}" for v in (fmean(values), min(values), max(values)))
    return mean if len(values) == 1 else f"{mean} ({least}..{most})"


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
