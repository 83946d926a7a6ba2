"""The figures of a sweep: of each arm in OUT/sweep.json, of each combination of values as a table and page."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from kiloword.api import load
from kiloword.apps.sweep.arms import Arm, SweepOptions, shared
from kiloword.config.recipes import DataConfig
from kiloword.data.open import open_data
from kiloword.distributed.device import choose
from kiloword.errors import sentence_of, suggestion
from kiloword.files import write_json
from kiloword.methods.command import values_of
from kiloword.methods.registry import preset
from kiloword.report import Block, Page, Plot, Table, made_by, say_blocks, write_page
from kiloword.runs.compare import Cell, Group, cells_of, table
from kiloword.runs.rows import read_object
from kiloword.runs.run import MAIN, Run
from kiloword.terminal import say, warn
from kiloword.training import command as train
from kiloword.training.signals import Stopped
from kiloword.training.validation.sets import judged, open_sets

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INTRO = "Mean over n seeds ± standard deviation of the sample. Dots are means, bars one standard deviation."


class Results:
    """What is known of each arm. Args: words: of `train`, which all arms share. Raises: ValueError as `open_sets`."""

    def __init__(self, options: SweepOptions, method: str, words: Sequence[str]) -> None:
        self.options, self.method, self.words = options, method, words
        self.path = options.out / "sweep.json"
        self.sets = open_sets(options.eval, "questions" in preset(method).needs, None, "--eval")

    def run(self, arms: Sequence[Arm]) -> None:
        """Run every arm that is not finished; an arm that fails is named, and the others are run.

        Raises: ValueError where the folder has arms of other settings, and for an unknown metric; SystemExit(1) where
        arms failed; Stopped after a signal.
        """
        self.arms: dict[str, Arm] = {arm["name"]: arm for arm in read_object(self.path).get("arms", [])}
        for stored in self.arms.values():
            there, here = shared(stored), shared(arms[0])
            if differ := [flag for flag in {**there, **here} if there.get(flag) != here.get(flag)]:
                out = self.options.out
                raise ValueError(f"{out} holds a sweep of other settings ({', '.join(differ)}): choose another --out.")
        done = [self._finished(self.arms.get(arm["name"], arm)) for arm in arms]
        say(f"{sum(done)} of {len(arms)} arms are finished, {len(arms) - sum(done)} to do")
        try:
            for arm in (arm for arm, finished in zip(arms, done, strict=True) if not finished):
                self.chosen()  # before hours of work
                say(f"arm {arm['name']}")
                try:
                    self.arms[arm["name"]] = arm | {"metrics": self._metrics(arm)}
                except Stopped:
                    raise
                except Exception as e:
                    error = sentence_of(e) or f"{type(e).__name__}: {e}"
                    warn(f"arm {arm['name']} failed: {error}")
                    self.arms[arm["name"]] = self.arms.get(arm["name"], arm) | {"error": error}
                write_json(self.path, {"format": "kiloword-sweep-1", "arms": [*self.arms.values()]})
                gc.collect()
        finally:
            self.write()
        if failed := [arm["name"] for arm in arms if "error" in self.arms[arm["name"]]]:
            say(f"{len(failed)} of {len(arms)} arms failed: {', '.join(failed)}")
            raise SystemExit(1)

    def _finished(self, arm: Arm) -> bool:
        return "metrics" in arm and arm["eval"] == [*self.options.eval]

    def _metrics(self, arm: Arm) -> dict[str, float]:
        """Train an arm: its last loss and validation, and metrics on --eval; of several sets "NAME/METRIC"."""
        train.read(arm["command"]).run()
        folder = self.options.out / arm["name"]
        metrics = {n: c[1][-1] for n, c in Run(folder).curves.items() if n == "loss" or n.startswith("val/")}
        if not self.sets:
            return metrics
        device = choose((values_of(self.words, "--device") or ("auto",))[0])
        own, trust = self.method if ":" in self.method else None, "--trust-code" in self.words
        matcher = load(folder / "model", device=device, precision="auto", method=own, trust_code=trust)
        asks = any(one.task == "vqa" for one in self.sets)  # and may give the answers of the training data
        data = open_data(DataConfig(sources=values_of(self.words, "--data") or ("scenes",))) if asks else None
        for one in self.sets:
            start = f"{one.name}/" if len(self.sets) > 1 else ""
            metrics |= {f"{start}{name}": value for name, value in judged(matcher, one, data).items()}
        return metrics

    def groups(self) -> list[Group]:
        """The combinations that have a finished arm, in the order of the arms; those of another --eval are omitted."""
        alike: dict[tuple[tuple[str, str], ...], list[dict[str, float]]] = {}
        for arm in filter(self._finished, self.arms.values()):
            alike.setdefault(tuple(arm["values"].items()), []).append(arm["metrics"])
        return [Group(_named(dict(values)), dict(values), cells_of(runs)) for values, runs in alike.items()]

    def chosen(self) -> list[str]:
        """The metrics to show: those asked for, else the main ones of --eval, of --val, else the loss.

        Raises: ValueError for a metric that no arm has, if there are finished arms.
        """
        asked, names = self.options.metric, list(dict.fromkeys(name for group in self.groups() for name in group.cells))
        if names and (missing := next((name for name in asked if name not in names), "")):
            raise ValueError(f"--metric {missing}: expected one of {', '.join(names)}.{suggestion(missing, names)}")
        main = [name for name in names if f"/{name}".endswith(MAIN)]
        evaluated = [name for name in main if not name.startswith("val/")]
        return list(asked) or evaluated or main or ["loss"]

    def write(self) -> None:
        """Write what there is of JSON and page, and print the table. Raises: ValueError as `chosen`."""
        groups, page = self.groups(), self.options.out / "sweep.html"
        plain = [{"values": g.settings, "metrics": {name: asdict(c) for name, c in g.cells.items()}} for g in groups]
        write_json(self.path, {"format": "kiloword-sweep-1", "arms": [*self.arms.values()], "table": plain})
        metrics = self.chosen()
        failed = Table([[arm["name"], arm["error"]] for arm in self.arms.values() if "error" in arm], ["failed", "why"])
        shown = [table(groups, metrics)] if groups else []
        plots = [_plot(groups, metric) for metric in metrics] if groups else []
        sections: dict[str, Sequence[Block]] = {"Table": [*shown, failed], "Plots": plots}
        write_page(page, Page("Sweep", INTRO, sections, made_by()))
        say_blocks(shown)
        say(f"page: {page}")


def _named(values: Mapping[str, str]) -> str:
    return ", ".join(f"{name.rpartition('.')[2]} {value}" for name, value in values.items())


def _plot(groups: Sequence[Group], metric: str) -> Plot:
    """The metric against the first setting, a line for each combination of the others."""
    first = next(iter(groups[0].settings))
    lines: dict[str, list[tuple[str, Cell]]] = {}
    for group in groups:
        others = _named({name: value for name, value in group.settings.items() if name != first})
        if metric in group.cells:
            lines.setdefault(others, []).append((group.settings.get(first, "-"), group.cells[metric]))

    def draw(axes: Axes) -> None:
        for others, points in lines.items():
            means, spreads = [c.mean for _, c in points], [c.std or 0.0 for _, c in points]
            axes.errorbar([x for x, _ in points], means, spreads, marker="o", capsize=3, label=others or None)
        axes.set_xlabel(first)
        axes.set_ylabel(metric)

    return Plot(draw, f"{metric} over {first}")
