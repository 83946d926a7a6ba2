"""The best model of a run by a metric of its validation, kept as OUT/best; and the end of a run that stalls.

What the run knows of it follows from OUT/best/best.json and `metrics.jsonl`, so that a resumed run goes on exactly.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kiloword.config.options import RunOptions
from kiloword.config.recipes import Recipe
from kiloword.distributed import collectives
from kiloword.errors import suggestion
from kiloword.files import SaveError, atomic, write_json
from kiloword.training.log import read_metrics

NAME, FILE = "best", "best.json"
MODEL = ("tokenizer.json", "config.json", "model.safetensors")  # in the order of writing, as in `save_model`
HIGHER = re.compile(
    r"recall|precision|accuracy|acc\d|(^|_)map(@|$)|ndcg|hit$|f1|jaccard|cider|bleu|meteor|rouge|spice|score|right_beats|true(@|$)"
)
LOWER = re.compile(r"loss|(^|_)l1(_|$)|error|(mean|median)_rank")


def direction(metric: str) -> int:
    """1 where a task's metric is better when higher, -1 when lower, 0 where neither is known."""
    return -1 if LOWER.search(metric) else 1 if HIGHER.search(metric) else 0


def check_best(options: RunOptions, recipe: Recipe) -> None:
    """Raises: ValueError for options of validation that need others, or exclude each other."""
    if options.eval_every and options.eval_epochs:
        raise ValueError("--eval-every and --eval-epochs both say how often to validate: give one of them.")
    if (options.eval_every or options.eval_epochs) and not recipe.data.val:
        flag = "--eval-every" if options.eval_every else "--eval-epochs"
        raise ValueError(f"{flag} needs data to evaluate on: add --val SRC.")
    if options.keep_best and not recipe.data.val:
        raise ValueError(f"--keep-best {options.keep_best} needs data to evaluate on: add --val SRC.")
    if options.patience and not options.keep_best:
        raise ValueError("--patience counts validations without a better metric: name the metric by --keep-best.")
    if options.patience and not (options.eval_every or options.eval_epochs):
        raise ValueError("--patience counts validations, but there is only one, at the end: add --eval-every STEPS.")


def check_metric(keep_best: str, names: Mapping[str, str]) -> int:
    """The direction of `--keep-best`, 0 without one.

    Args: names: metrics of the validation, by name in `metrics.jsonl` -> name as of their task.
    Raises: ValueError for a metric that the validation does not compute, or of which neither way is better.
    """
    if not keep_best:
        return 0
    way = direction(names.get(full_name(keep_best), ""))
    if not way:
        problem = "is no metric of this validation" if full_name(keep_best) not in names else "has no better direction"
        usable = [name.removeprefix("val/") for name, metric in names.items() if direction(metric)]
        hint = suggestion(keep_best.removeprefix("val/"), usable)
        raise ValueError(f"--keep-best {keep_best} {problem}: expected one of {', '.join(usable)}.{hint}")
    return way


def full_name(metric: str) -> str:
    """The name in `metrics.jsonl`, which `--keep-best` may shorten by its "val/"."""
    return metric if metric.startswith("val/") else f"val/{metric}"


class Best:
    """The best validation of a run so far. All ranks hold the same; rank 0 reads and writes.

    Args: out: folder of the run; metric: `--keep-best`, "" to keep nothing; way: its `direction`; patience: number of
    validations without a better one that end the run, 0: none do.
    """

    def __init__(self, out: Path, metric: str, way: int, patience: int) -> None:
        self.folder, self.metric, self.way, self.patience = out / NAME, metric and full_name(metric), way, patience
        self.step: int | None = None  # of the best validation
        self.value = 0.0
        self.stale = 0  # number of validations since then

    def resume(self, step: int) -> bool:
        """Continue after `step`. A collective. Returns: whether its validation is the best, but its model not kept."""
        if not self.metric:
            return False
        stored = _read(self.folder / FILE, self.metric) if collectives.rank() == 0 else {}
        rows = self._rows() if collectives.rank() == 0 else []
        stored, rows = collectives.all_lists([stored])[0], collectives.all_lists([rows])[0]
        if stored:
            self.step, self.value = stored["step"], stored["value"]
            self.stale = sum(stored["step"] < at <= step and not self._better(value) for at, value in rows)
        return any(self.take({self.metric: value}, step) for at, value in rows if at == step and self._better(value))

    def _rows(self) -> list[tuple[int, float]]:
        rows = read_metrics(self.folder.parent / "metrics.jsonl")
        return [(row["step"], row[self.metric]) for row in rows if self.metric in row]

    def _better(self, value: float) -> bool:
        """Whether a value is better than all before; NaN is not."""
        return value == value and (self.step is None or self.way * (value - self.value) > 0)

    def take(self, metrics: Mapping[str, float], step: int) -> bool:
        """Take in the validation after `step`. Returns: whether it is the best, so that `keep` is to be called.

        Raises: ValueError where it lacks the metric.
        """
        if not self.metric:
            return False
        if self.metric not in metrics:
            raise ValueError(f"--keep-best {self.metric}: the validation has only {', '.join(metrics)}.")
        if better := self._better(metrics[self.metric]):
            self.step, self.value = step, metrics[self.metric]
        if self.step is None or step > self.step:
            self.stale += 1
        else:  # after a damaged state, the best step may still come
            self.stale = 0
        return better

    @property
    def stalled(self) -> bool:
        """Whether the run ends by `--patience`."""
        return 0 < self.patience <= self.stale

    def keep(self) -> None:
        """Copy OUT/model, which must be of the best step, to OUT/best. A collective. Raises: SaveError on all ranks."""
        problem = self._copy() if collectives.rank() == 0 else ""
        if problems := [one for one in collectives.all_lists([problem]) if one]:
            raise SaveError(problems[0])

    def _copy(self) -> str:
        """Write the files; a reader sees weights that are whole, and `best.json` last. Returns: what went wrong."""
        try:
            for name in MODEL:
                with (self.folder.parent / "model" / name).open("rb") as model, atomic(self.folder / name) as file:
                    shutil.copyfileobj(model, file)
            write_json(self.folder / FILE, {"metric": self.metric, "step": self.step, "value": self.value})
        except OSError as e:
            return f"cannot read {e.filename}: {e.strerror}. {self.folder} is kept as it was."
        except SaveError as e:
            return str(e)
        return ""

    def __str__(self) -> str:
        best = "none" if self.step is None else f"{self.value:.4g} after step {self.step}, in {self.folder}"
        return f"{self.stale} validations without a better {self.metric.removeprefix('val/')} (best: {best})"


def _read(path: Path, metric: str) -> dict[str, Any]:
    """The contents of `best.json`; {} where there is none of this metric."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        fits = stored["metric"] == metric and type(stored["step"]) is int and type(stored["value"]) in (int, float)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}
    return stored if fits else {}
