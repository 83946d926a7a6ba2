"""The best model of a run by a metric of its validation, kept as OUT/best; and the end of a run that stalls."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kiloword.config.options import RunOptions
from kiloword.config.recipes import Recipe
from kiloword.distributed import collectives
from kiloword.errors import suggestion
from kiloword.files import SaveError, atomic, write_json
from kiloword.runs.rows import read_metrics
from kiloword.runs.run import read_best

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
    often = options.eval_every or options.eval_epochs
    for wrong, message in (
        (options.eval_every and options.eval_epochs, "--eval-every and --eval-epochs exclude each other: give one."),
        (
            (often or options.keep_best) and not recipe.data.val,
            "--keep-best and --eval-every need data: add --val SRC.",
        ),
        (options.patience and not options.keep_best, "--patience needs a metric: name it by --keep-best."),
        (options.patience and not often, "--patience needs more than one validation: add --eval-every STEPS."),
    ):
        if wrong:
            raise ValueError(message)


def logged(out: Path, step: int) -> dict[str, float]:
    """The metrics of the validation after `step` in the run's log, {} where there is none. A collective."""
    rows = read_metrics(out / "metrics.jsonl") if collectives.rank() == 0 else []
    pairs = [pair for row in rows if row["step"] == step for pair in row.items() if pair[0].startswith("val/")]
    return dict(collectives.all_lists(pairs))


class Best:
    """The best validation of a run so far, the same on all ranks.

    Args: out: folder of the run; keep: `--keep-best`, "" to keep nothing; patience: number of validations without a
    better one that end the run, 0: none do; starts: how the metrics of each set begin.
    Raises: ValueError for a metric of no set, or of which neither way is better.
    """

    def __init__(self, out: Path, keep: str, patience: int, starts: Sequence[str] = ("val/",)) -> None:
        self.out, self.metric, self.patience = out, keep and f"val/{keep.removeprefix('val/')}", patience
        self.way = max(
            (direction(self.metric.removeprefix(s)) for s in starts if self.metric.startswith(s)), key=abs, default=0
        )
        if keep and not self.way:
            raise ValueError(
                f"--keep-best {keep}: expected a metric of the validation that is better higher or lower, such as "
                "mean_recall@1 or acc1."
            )
        self.step: int | None = None  # of the best validation
        self.value = 0.0
        self.stale = 0  # number of validations since then

    @property
    def state(self) -> list[Any]:
        """What `resume` reads, as JSON holds it."""
        return [self.metric, self.step, self.value, self.stale]

    def resume(self, state: Sequence[Any], step: int) -> None:
        """Continue from a state of `step`, and the validation that came behind it. A collective."""
        if self.metric == state[0]:
            _, self.step, self.value, self.stale = state
        if self.metric and self.step != step and self.metric in (found := logged(self.out, step)):
            self.take(found, step)

    def of(self, metrics: Mapping[str, float]) -> float:
        """The value of the metric. Raises: ValueError where the validation lacks it."""
        if self.metric not in metrics:
            usable = [name.removeprefix("val/") for name in metrics if direction(name)]
            hint = suggestion(self.metric.removeprefix("val/"), usable)
            raise ValueError(
                f"--keep-best {self.metric.removeprefix('val/')}: expected one of {', '.join(usable)}.{hint}"
            )
        return metrics[self.metric]

    def take(self, metrics: Mapping[str, float], step: int) -> bool:
        """Take in the validation after `step`. Returns: whether it is the best, so that `keep` is to be called."""
        if not self.metric:
            return False
        value = self.of(metrics)
        better = value == value and (self.step is None or self.way * (value - self.value) > 0)  # NaN is not
        if better:
            self.step, self.value, self.stale = step, value, 0
        else:
            self.stale += 1
        return better

    @property
    def stalled(self) -> bool:
        """Whether the run ends by `--patience`."""
        return 0 < self.patience <= self.stale

    def kept(self) -> bool:
        """Whether OUT/best holds the best model. A collective."""
        found = (self.metric, self.value, self.step)
        return collectives.any_rank(collectives.rank() == 0 and read_best(self.out) == found)[0]

    def keep(self) -> None:
        """Copy OUT/model, which must be of the best step, to OUT/best. A collective. Raises: SaveError on all ranks."""
        problems = []
        if collectives.rank() == 0:
            try:
                for name in MODEL:
                    with (self.out / "model" / name).open("rb") as model, atomic(self.out / "best" / name) as file:
                        shutil.copyfileobj(model, file)
                values = {"metric": self.metric, "step": self.step, "value": self.value}
                write_json(self.out / "best" / "best.json", values)
            except (OSError, SaveError) as e:
                problems.append(str(e))
        if problems := collectives.all_lists(problems):
            raise SaveError(problems[0])

    def __str__(self) -> str:
        best = "none" if self.step is None else f"{self.value:.4g} after step {self.step}, in {self.out / 'best'}"
        return f"{self.stale} validations without a better {self.metric.removeprefix('val/')} (best: {best})"
