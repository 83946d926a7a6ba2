"""`kiloword compare`: runs beside each other in the terminal, as JSON, and on a page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rich.cells import cell_len
from rich.text import Text

from kiloword import report
from kiloword.errors import count
from kiloword.files import write_json
from kiloword.report import Html, grid, section, stack, table
from kiloword.runs.curves import Curve, evaluations, losses, main_evaluations, plot, points_of
from kiloword.runs.groups import RunGroup, as_plain, groups_of, main_metrics, paths_of, state_of, value_of
from kiloword.runs.runs import Watched, find, settings_of
from kiloword.terminal import LONGEST, say, shown, warn
from kiloword.terminal.screen import Screen, plain_table

FORMAT = "kiloword-compare-1"
WIDE = 160  # columns where the output is no terminal
LETTERS = "abcdefghijklmnopqrstuvwxyz"
OTHER = ("gradient_norm", "lr", "pairs_per_s", "memory")


def main(runs: Sequence[Path], json: Path | None = None, html: Path | None = None) -> None:
    """Run `kiloword compare`. Raises: ValueError for paths without runs, and for fewer than two runs."""
    if not runs:
        raise ValueError("compare needs runs: kiloword compare runs/a runs/b, or a folder that holds them.")
    watched = [Watched(folder, name) for folder, name in find(runs).items()]
    for run in watched:
        run.update()
    begun = [run for run in watched if run.columns.rows]
    for run in watched:
        if run not in begun:
            warn(f"{run.name} has no row yet: it is omitted.")
    begun = list(without_copies(begun))
    if len(begun) < 2:
        raise ValueError(f"compare found {count(len(begun), 'run')} with rows: expected at least two.")
    made = groups_of(begun)
    _print(made)
    if json is not None:
        write_json(json, {"format": FORMAT, "groups": [as_plain(group) for group in made]})
    if html is not None:
        report.write(html, page(made))


def without_copies(runs: Sequence[Watched]) -> Iterator[Watched]:
    """The runs without copies of one of them, which are no further seeds: the same recipe, seed and losses.

    A copy may have been made before the run ended, or gone on after it: of both the one with more rows stays.
    """
    recipes = [settings_of(run.folder) for run in runs]
    losses = [run.columns.of("loss")[1].tobytes() for run in runs]
    for n, run in enumerate(runs):
        same = (
            other.name
            for m, other in enumerate(runs)
            if recipes[m] == recipes[n] != {} and losses[m].startswith(losses[n])
            if (-len(losses[m]), m) < (-len(losses[n]), n)
        )
        if (other := next(same, None)) is None:
            yield run
        else:
            warn(f"{run.name} has the recipe, the seed and the losses of {other}: it is omitted, as a copy.")


def _print(every: Sequence[RunGroup]) -> None:
    """The groups by letters, then the settings that differ and the main metrics with a column for each."""
    letters = [LETTERS[n] if n < len(LETTERS) else str(n + 1) for n in range(len(every))]
    named = [f"{letter}  {group.name}" for letter, group in zip(letters, every, strict=True)]
    for name, group in zip(named, every, strict=True):
        say(f"{name}: {state_of(group)}")
    metrics = "last value, mean +- std over seeds"
    for rows, first in ((list(_setting_rows(every)), "setting"), (list(_metric_rows(every)), metrics)):
        table = plain_table(first, *letters)
        for row in rows:
            table.add_row(*row)
        if table.row_count:
            say("")
            Screen(WIDE).print_table(table, _lines(rows, named))
    if len({group.loss for group in every}) > 1:
        say("", "Losses of different methods or batches are different quantities: compare the metrics.")
        if not any(evaluations(group.runs) for group in every):
            say("These runs were not evaluated while they trained: kiloword eval retrieval RUN RUN --data SRC does it.")


def _setting_rows(every: Sequence[RunGroup]) -> Iterator[list[str]]:
    for path in paths_of(every):
        values = (value_of(group.settings[path]) if path in group.settings else "-" for group in every)
        yield [path, *(value if len(value) <= LONGEST else f"{value[:LONGEST]}..." for value in values)]


def _lines(rows: Iterable[Sequence[str]], groups: Sequence[str]) -> Iterator[Text]:
    """A table that is too wide: a heading for each row, and a line for each group."""
    for name, *values in rows:
        yield Text(shown(name), "bold")
        width = max(cell_len(shown(value)) for value in values)
        for value, group in zip(values, groups, strict=True):
            yield Text(f"  {shown(value)}{' ' * (width - cell_len(shown(value)))}  {shown(group)}")


def _metric_rows(every: Sequence[RunGroup]) -> Iterator[list[str]]:
    for name in main_metrics(every):
        yield [name, *(str(group.cells[name]) if name in group.cells else "-" for group in every)]


def page(groups: Sequence[RunGroup]) -> str:
    """The whole document."""
    runs = [run for group in groups for run in group.runs]
    html = report.page(
        f"{len(runs)} runs beside each other",
        "Runs that differ in their seed alone are one group: its figures are means ± the standard deviation of the "
        "sample over its n runs, its curves are means. Losses of different methods or batch sizes are different "
        "quantities, so each has a plot of its own.",
        [
            section("Runs", _runs(groups)),
            section("Settings that differ", *_settings(groups)),
            section("Metrics", *_metrics(groups)),
            section("Loss", *_losses(groups)),
            section("Validation", grid(_plots(groups, main_evaluations(runs)))),
            section("Optimization and speed", grid(_plots(groups, OTHER))),
        ],
    )
    return report.signed(html, report.made_by())


def _runs(groups: Sequence[RunGroup]) -> Html:
    rows = [[group.name, state_of(group), ", ".join(run.name for run in group.runs)] for group in groups]
    return table(rows, ["group", "state", "runs"])


def _settings(groups: Sequence[RunGroup]) -> Iterator[str]:
    rows = [
        [path, *(value_of(g.settings[path]) if path in g.settings else None for g in groups)]
        for path in paths_of(groups)
    ]
    yield table(rows, ["setting", *(group.name for group in groups)]) or "The groups have the same settings."


def _metrics(groups: Sequence[RunGroup]) -> Iterator[str]:
    """The main metrics first."""
    names = dict.fromkeys([*main_metrics(groups), *(name for group in groups for name in group.cells)])
    rows = [[name, *(_shown(group, name) for group in groups)] for name in names]
    yield table(rows, ["last value", *(f"{group.name} (n {len(group.runs)})" for group in groups)])


def _shown(group: RunGroup, name: str) -> str | None:
    return str(group.cells[name]).replace("+-", "±") if name in group.cells else None


def _losses(groups: Sequence[RunGroup]) -> Iterator[str]:
    """Each kind of loss with its terms."""
    for kind in dict.fromkeys(group.loss for group in groups):
        alike = [group for group in groups if group.loss == kind]
        names = losses([run for group in alike for run in group.runs])
        if len(alike) < len(groups):
            yield report.heading(kind[0].upper() + kind[1:])
        yield grid(_plots(alike, names))


def _plots(groups: Sequence[RunGroup], names: Sequence[str]) -> list[Html]:
    """A plot of each metric with a line for each group."""
    return [stack(plot(name, [Curve(group.name, points_of(group.runs, name)) for group in groups])) for name in names]
