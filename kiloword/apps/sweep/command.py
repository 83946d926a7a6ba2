"""The verb sweep: runs of `train`, one for each combination of values and each seed, and the table of their figures."""

from __future__ import annotations

import gc
import inspect
import itertools
import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tyro

from kiloword.config.settings import BaseSettings, check, setting
from kiloword.errors import sentence_of
from kiloword.files import Lock, write_json
from kiloword.methods.command import values_of
from kiloword.report import Page, Plot, Table, made_by, say_blocks, write_page
from kiloword.runs.compare import Cell, cells_of
from kiloword.runs.rows import read_object
from kiloword.runs.run import MAIN, Run
from kiloword.terminal import say, warn
from kiloword.training import command as train

Arm = dict[str, Any]
"""An arm as sweep.json holds it: name (of its folder), values (setting -> value), seed and command (words of `train`);
once it has run eval, code (digest of the user's method), and metrics or error."""


@dataclass(frozen=True, kw_only=True)
class SweepOptions(BaseSettings):
    """Train once for every combination of values and every seed, and print means and standard deviations.

    sweep takes all flags of `kiloword train` too (kiloword train METHOD --help). The same command again resumes.

    Examples:
      kiloword sweep llip --vary settings.k=1,16,32,64 --seeds 3 --data scenes --eval retrieval=scenes:test --out runs/k
      kiloword sweep clip-c --vary settings.rho=0.15,0.3 optim.lr=5e-4,1e-3 --data photos/train --out runs/rho
    """

    vary: tuple[str, ...] = setting((), "SETTING=VALUE,VALUE,...; of several settings, every combination of values")
    seeds: int = setting(1, "number of seeds, counted from --seed", 1, 1000)
    eval: tuple[str, ...] = setting((), "data sets to evaluate each model on: SRC or TASK=SRC, as --val of train")
    metric: tuple[str, ...] = setting((), "metrics to print and plot; default: the main ones")
    out: Path = setting(tyro.MISSING, "folder for the runs, sweep.json and sweep.html")
    dry_run: bool = setting(False, "print the commands of the runs, and stop")


def read(argv: Sequence[str]) -> Sweep:
    """Read the words of a command line: the flags that are not the sweep's own are those of `train`."""
    if not values_of(argv, "--out") and not {"-h", "--help"}.intersection(argv):
        raise ValueError("sweep needs --out, the folder of the arms.")
    about = inspect.cleandoc(SweepOptions.__doc__ or "")
    options, words = tyro.cli(
        SweepOptions, args=argv, prog="kiloword sweep METHOD", description=about, return_unknown_args=True
    )
    check(options)
    return Sweep(options, words, {"eval": [*options.eval]})


@dataclass(frozen=True)
class Sweep:
    """The words of a command line, read."""

    options: SweepOptions
    words: list[str]  # of `train`, which all arms share
    same: dict[str, Any]  # what else finished arms share with it: eval, and code

    def run(self) -> None:
        """Run the arms that are not finished, and write the figures of all; an arm that fails does not end the others.

        Raises: ValueError for settings that `train` refuses, before anything is written; SystemExit(1) for failed arms.
        """
        arms, options = self.arms(), self.options
        try:
            trainings = [train.read(arm["command"]) for arm in arms[: len(arms) // options.seeds]]
        except ValueError as error:
            if not options.dry_run:
                raise
            warn(f"here the arms would be refused: {error}")  # such as for features that are not on this machine
        if options.dry_run:
            say(f"{len(arms)} arms:")
            say(*(f"{arm['name']}: {shlex.join(['kiloword', 'train', *arm['command']])}" for arm in arms))
            return
        from kiloword.methods.registry import preset
        from kiloword.training.run_folder import code_of
        from kiloword.training.signals import Stopped
        from kiloword.training.validation import open_sets

        method = trainings[0].words.method
        self.same["code"] = code_of(method)
        asks = "questions" in preset(method).needs
        sizes = {training.args.recipe.model.image.size for training in trainings}
        sets = {size: open_sets(options.eval, asks, size, "--eval") for size in sizes}
        with Lock(options.out, "sweeping in"):
            earlier = read_object(options.out / "sweep.json").get("arms", [])
            known = {arm["name"]: arm for arm in earlier}
            todo = [arm for arm in arms if not self._counts(known.get(arm["name"], {}))]
            say(f"{len(arms) - len(todo)} of {len(arms)} arms are finished, {len(todo)} to do")
            for arm in todo:
                say(f"arm {arm['name']}")
                arm |= self.same
                try:
                    arm["metrics"] = _metrics(arm, options.out / arm["name"], sets)
                except Stopped:
                    raise
                except Exception as e:
                    arm["error"] = sentence_of(e) or f"{type(e).__name__}: {e}"
                    warn(f"arm {arm['name']} failed: {arm['error']}")
                known[arm["name"]] = arm
                self._write([*known.values()])
                gc.collect()
            table = self._write([*known.values()])
        say_blocks([table])
        if omitted := sum("metrics" in arm and not self._counts(arm) for arm in known.values()):
            say(f"omitted: {omitted} arms of other flags, another --eval or another file of the method")
        names = dict.fromkeys(name for arm in known.values() if self._counts(arm) for name in arm["metrics"])
        if unknown := [metric for metric in options.metric if metric not in names]:
            warn(f"no arm has --metric {', '.join(unknown)}: expected one of {', '.join(names)}.")
        say(f"page: {options.out / 'sweep.html'}")
        if failed := [arm["name"] for arm in todo if "error" in arm]:
            say(f"{len(failed)} of {len(arms)} arms failed: {', '.join(failed)}")
            raise SystemExit(1)

    def arms(self) -> list[Arm]:
        """All arms, seed by seed, so that a sweep that is not finished has a whole table of fewer seeds."""
        settings: dict[str, list[str]] = {}
        for word in self.options.vary:
            name, _, joined = word.removeprefix("--").partition("=")
            name, values = name.replace("_", "-"), joined.split(",")
            if not joined or name in ("seed", "out", "dry-run"):
                raise ValueError(f"--vary {word}: expected SETTING=VALUES, as settings.k=1,16; --seeds sets the seeds.")
            if name in settings or len({*values}) < len(values):
                raise ValueError(f"--vary {word}: a setting or a value is given twice.")
            settings[name] = values
        if not settings:
            raise ValueError("sweep needs a setting to vary, such as --vary settings.k=1,16,32.")
        first, arms = int((values_of(self.words, "--seed") or ("0",))[0]), list[Arm]()
        combinations = list(itertools.product(*settings.values()))
        for seed, chosen in itertools.product(range(first, first + self.options.seeds), combinations):
            varied, words = dict(zip(settings, chosen, strict=True)), [*self.words]
            for name, value in varied.items():
                path, dot, last = name.rpartition(".")
                switch = {"true": f"--{name}", "false": f"--{path}{dot}no-{last}"}.get(value.lower())
                words += [switch] if switch else [f"--{name}", value]
            name = re.sub(r"[^\w.=,+-]", "_", f"{_named(varied)}, seed={seed}".replace(", ", ","))
            command = [*words, "--seed", str(seed), "--out", str(self.options.out / name)]
            arms.append({"name": name, "values": varied, "seed": seed, "command": command})
        return arms

    def _counts(self, arm: Arm) -> bool:
        """Whether an arm of sweep.json is finished, by the same flags, evaluation and code."""
        same = arm.get("command", [])[: len(self.words)] == self.words and self.same.items() <= arm.items()
        return same and "metrics" in arm

    def _write(self, arms: Sequence[Arm]) -> Table:
        """Write sweep.json and sweep.html. Returns: the table, a row for each combination of values."""
        out, alike = self.options.out, dict[tuple[tuple[str, str], ...], list[dict[str, float]]]()
        for arm in filter(self._counts, arms):
            alike.setdefault(tuple(arm["values"].items()), []).append(arm["metrics"])
        groups = [(dict(values), cells_of(runs)) for values, runs in alike.items()]
        plain = [{"values": values, "metrics": {n: asdict(c) for n, c in cells.items()}} for values, cells in groups]
        write_json(out / "sweep.json", {"format": "kiloword-sweep-1", "arms": arms, "table": plain})
        names = dict.fromkeys(name for _, cells in groups for name in cells)
        metrics = self.options.metric or [name for name in names if f"/{name}".endswith(MAIN)] or ["loss"]
        rows = [
            [_named(values), cells["loss"].n, *(str(cells.get(m, "-")) for m in metrics)] for values, cells in groups
        ]
        table = Table(rows, ["", "n", *metrics])
        plots = [_plot(groups, metric) for metric in metrics if metric in names]
        about = "Mean over n seeds ± standard deviation of the sample."
        write_page(out / "sweep.html", Page("Sweep", about, {"Figures": [table, *plots]}, made_by()))
        return table


def _named(values: dict[str, str]) -> str:
    return ", ".join(f"{name.rpartition('.')[2]}={value}" for name, value in values.items())


def _metrics(arm: Arm, folder: Path, sets_by_size: dict[int, list[Any]]) -> dict[str, float]:
    """Train an arm: its last loss and validation, and metrics on the sets of --eval; of several "NAME/METRIC"."""
    from kiloword.api import load
    from kiloword.data.open import open_data
    from kiloword.distributed.device import choose
    from kiloword.training.validation import judged

    training = train.read(arm["command"])
    training.run()
    metrics = {n: c[1][-1] for n, c in Run(folder).curves.items() if n == "loss" or n.startswith("val/")}
    if sets := sets_by_size[training.args.recipe.model.image.size]:
        args, method = training.args, training.words.method
        own, trust = method if ":" in method else None, "--trust-code" in arm["command"]
        device = choose(args.options.device)
        matcher = load(folder / "model", device=device, precision="auto", method=own, trust_code=trust)
        data = open_data(args.recipe.data)  # the answers that vqa may give
        for one in sets:
            start = f"{one.name}/" if len(sets) > 1 else ""
            metrics |= {f"{start}{name}": value for name, value in judged(matcher, one, data).items()}
    return metrics


def _plot(groups: Sequence[tuple[dict[str, str], dict[str, Cell]]], metric: str) -> Plot:
    """The metric of each combination of values."""

    def draw(axes: Any) -> None:
        known = [(_named(values), cells[metric]) for values, cells in groups if metric in cells]
        names, means, spreads = zip(*((name, cell.mean, cell.std or 0.0) for name, cell in known), strict=True)
        axes.errorbar(names, means, spreads, marker="o", capsize=3)
        axes.set(ylabel=metric)

    return Plot(draw, f"{metric} by setting")
