"""The tables, verdicts and plots of all experiments, from the rows that are there: no data, no training.

`python -m research.tables` reads `research/rows`; `--rows FOLDER` reads FOLDER/NAME/results.jsonl, what
`make -C research all` writes; `--again FOLDER` compares them with the rows of a second run of the same experiments;
`--write FOLDER` writes tables.md and a plot for every experiment there.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import tyro

from kiloword.terminal import say
from research.arms import TUNING, Experiment, in_one_message
from research.arms_rows import Row, read_file
from research.arms_table import line, table_of
from research.evidence import Decision, decided
from research.forest import forest

ROWS = Path(__file__).with_name("rows")
AGAIN = ROWS / "again"  # of experiments that were run a second time, from nothing
TREES = ("little_data", "mined", "generality", "scale")  # on class photos
FROZEN = ("conditioning", "captions", "phrase_generality", "sycoca_frozen", "mix", "muon")  # on stored tokens
RULED = (*TREES, *FROZEN)
PROGRAM = "python -m research.tables"


@dataclass(frozen=True, kw_only=True)
class Results:
    """The rows of one experiment."""

    name: str  # its module, and what follows a hyphen: "conditioning-64"
    rows: list[Row]

    @property
    def experiment(self) -> Experiment:
        """What its module says of it."""
        experiment = importlib.import_module(f"research.{self.name.partition('-')[0]}").EXPERIMENT
        assert isinstance(experiment, Experiment)
        return experiment

    @property
    def runs(self) -> dict[str, list[Row]]:
        """Of every arm the newest row of each seed, but that of tuning, in the order of seeds.

        Raises: ValueError for an arm whose rows have several recipes, or were judged on several data.
        """
        reported = [row for row in self.rows if row["seed"] != TUNING]
        self._check(reported)
        newest = {(row["arm"], row["seed"]): row for row in reported}
        arms = dict.fromkeys(row["arm"] for row in self.rows)
        return {arm: [newest[key] for key in sorted(newest) if key[0] == arm] for arm in arms}

    def _check(self, rows: Sequence[Row]) -> None:
        """Raises as `runs`. Rows of older versions lack what they were judged on."""
        for arm in dict.fromkeys(row["arm"] for row in rows):
            of_arm = [row for row in rows if row["arm"] == arm]
            recipes = sorted({row["recipe"] for row in of_arm if "recipe" in row})
            if len(recipes) > 1:
                raise ValueError(
                    f"{self.name}: rows of {arm!r} have several recipes ({', '.join(recipes)}): expected those of one, "
                    "and trials in a folder of their own."
                )
            if len({str(row["judged"]) for row in of_arm if "judged" in row}) > 1:
                raise ValueError(f"{self.name}: rows of {arm!r} were judged on several data: expected those of one.")

    @cached_property
    def answers(self) -> list[Decision | str]:
        """What the rules say; it takes seconds."""
        return [decided(rule, self.runs) for rule in self.experiment.claims]

    @property
    def decisions(self) -> list[Decision]:
        """What is decided."""
        return [answer for answer in self.answers if isinstance(answer, Decision)]

    @property
    def tuned(self) -> set[tuple[str, float]]:
        """The arms and rates of the runs that chose learning rates."""
        return {(row["arm"], row["rate"]) for row in self.rows if row["seed"] == TUNING}

    def tuning(self, what: str = "") -> list[str]:
        """A table of the runs that chose learning rates: the first metric of the experiment by arm and rate.

        Args: what: stands before the name of the metric.
        """
        rows = [row for row in self.rows if row["seed"] == TUNING]
        if not rows:
            return []
        heading, metric = next(iter(self.experiment.columns.items()))
        rates = sorted({row["rate"] for row in rows})
        values = {(row["arm"], row["rate"]): f"{row['metrics'][metric]:.3f}" for row in rows}
        heads = [f"{what}{heading}, seed {TUNING}", *(f"{rate:g} times" for rate in rates)]
        arms = dict.fromkeys(row["arm"] for row in rows)
        return [
            "",
            line(heads),
            line(["---"] * len(heads)),
            *(line([arm, *(values.get((arm, rate), "-") for rate in rates)]) for arm in arms),
        ]


def read(folder: Path) -> list[Results]:
    """The experiments that have rows in a folder, in the order of research/README.md. Raises: ValueError for none."""
    paths = [*folder.glob("*.jsonl"), *folder.glob("*/results.jsonl")]
    named = {path.parent.name if path.name == "results.jsonl" else path.stem: path for path in paths}
    ruled = sorted((name for name in named if name.partition("-")[0] in RULED), key=_place)
    if not ruled:
        raise ValueError(f"{folder} has no rows: expected NAME.jsonl or NAME/results.jsonl of {', '.join(RULED)}.")
    return [Results(name=name, rows=read_file(named[name])) for name in ruled]


def _place(name: str) -> tuple[int, str]:
    return RULED.index(name.partition("-")[0]), name


def markdown(results: Results) -> list[str]:
    """The table of an experiment, what is decided, and how its learning rates were chosen."""
    return [
        f"## {results.name}",
        "",
        *table_of(results.experiment, results.runs),
        *map(str, results.answers),
        *results.tuning(),
        "",
    ]


def repeated(results: Sequence[Results], again: Sequence[Results]) -> list[str]:
    """Each experiment that was run twice: how long both took, all decisions of both, and rates if others were tried.

    Raises: ValueError for one that was not run first.
    """
    runs = [line(["run again", "runs, first", "again", "processor hours, first", "again"]), line(["---"] * 5)]
    claims = [line(["run again", "claim", "first", "again"]), line(["---"] * 4)]
    first = {one.name: one for one in results}
    if unknown := [one.name for one in again if one.name not in first]:
        raise ValueError(f"the second run has rows of {', '.join(unknown)}, of which the first has none.")
    for one in again:
        before = first[one.name]
        both = [{(row["arm"], row["seed"], row["rate"]): row for row in of.rows} for of in (before, one)]
        hours = (f"{sum(row['cpu_s'] for row in rows.values()) / 3600:.2f}" for rows in both)
        runs.append(line([one.name, *(str(len(rows)) for rows in both), *hours]))
        for old, new in zip(before.answers, one.answers, strict=True):
            claims.append(line([one.name, _says(old), _short(old), _short(new)]))
    further = [one for one in again if one.tuned - first[one.name].tuned]
    rates = [text for one in further for text in one.tuning(f"{one.name} again, ")]
    return ["## Run again, from nothing", "", *runs, "", *claims, *rates, ""]


def _says(answer: Decision | str) -> str:
    return f"{answer.says}: {answer.of}" if isinstance(answer, Decision) else answer


def _short(answer: Decision | str) -> str:
    return f"{answer.effect}: {answer.verdict}" if isinstance(answer, Decision) else "-"


def page(results: Sequence[Results], again: Sequence[Results] = ()) -> str:
    """All tables, as research/results/tables.md holds them."""
    lines = [
        "# Tables of the verdicts",
        "",
        "Made by `python -m research.tables --again research/rows/again --write research/results`, of research/rows.",
        "",
    ]
    twice = repeated(results, again) if again else []
    return "\n".join([*lines, *(text for one in results for text in markdown(one)), *twice])


def plots(results: Sequence[Results]) -> dict[str, str]:
    """Of every experiment that has decisions: NAME.svg, and what it holds."""
    decisions = {one.name: one.decisions for one in results}
    return {f"{name}.svg": forest(of_one) for name, of_one in decisions.items() if of_one}


@in_one_message(PROGRAM)
def main(
    names: tyro.conf.Positional[tuple[str, ...]] = (),
    *,
    rows: Path = ROWS,
    again: Path | None = None,
    write: Path | None = None,
) -> None:
    """Print the tables and verdicts of experiments. User errors are one message and exit code 2.

    Args: names: of experiments; default: all that have rows; rows: folder of rows; again: folder of rows of the same
    experiments, run a second time; write: a folder for tables.md and plots, in place of printing.
    """
    chosen, twice = (
        [one for one in (read(folder) if folder else ()) if not names or one.name in names] for folder in (rows, again)
    )
    if unknown := set(names) - {one.name for one in chosen}:
        known = ", ".join(one.name for one in read(rows))
        raise ValueError(f"{rows} has no rows of {', '.join(sorted(unknown))}: expected some of {known}.")
    if write is None:
        say(*page(chosen, twice).splitlines())
        return
    write.mkdir(parents=True, exist_ok=True)
    for name, text in {"tables.md": page(chosen, twice), **plots(chosen)}.items():
        (write / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    tyro.cli(main, prog=PROGRAM)
