"""Validation of a run: its sets, their evaluation, the best model by a metric, and the end of a run that stalls."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kiloword.api import Matcher
from kiloword.config.options import RunOptions
from kiloword.config.recipes import Recipe
from kiloword.data.edits import Selection
from kiloword.data.joins import spread
from kiloword.data.open import open_source
from kiloword.data.reading import captions_at
from kiloword.data.stored import WithTokens
from kiloword.distributed import collectives
from kiloword.distributed.device import precision_of
from kiloword.distributed.sharing import alone, gathered, lockstep, sharing
from kiloword.errors import count, refuse, suggestion
from kiloword.evaluation import TASKS, evaluate, find
from kiloword.evaluation.tasks import CaptionOptions
from kiloword.files import SaveError, atomic, write_json
from kiloword.methods.registry import preset
from kiloword.runs.rows import read_metrics
from kiloword.runs.run import MAIN, read_best
from kiloword.stores.tokens import FoundImages, TokenizerWithTokens, token_stores
from kiloword.types import BadSample, Source

if TYPE_CHECKING:
    from kiloword.training.resolve import Run

TRIED = 32  # rows searched for captions


@dataclass(frozen=True)
class ValSet:
    """A data set that a run is evaluated on."""

    name: str  # in metrics, unique among those of the run
    task: str
    source: Source


def prefix(one: ValSet, every: Sequence[ValSet]) -> str:
    """The beginning of the names of a set's metrics: "val/", or "val/NAME/" where there are several sets."""
    return f"val/{one.name}/" if len(every) > 1 else "val/"


def open_val(recipe: Recipe) -> list[ValSet]:
    """The validation sets of a recipe. Raises: ValueError as `open_sets`."""
    if not recipe.data.val:
        return []
    asks = "questions" in preset(recipe.method, recipe.settings).needs
    return open_sets(recipe.data.val, asks, recipe.model.image.size, "--val")


def open_sets(words: Sequence[str], asks: bool, size: int | None, flag: str) -> list[ValSet]:
    """The data sets that SRC or TASK=SRC name, and the tasks to evaluate them by.

    Args: asks: whether the method answers questions; size: pixels of drawn images; flag: its name in messages.
    Raises: ValueError for an unknown task, one set twice, data without captions or classes, and as `open_source`.
    """
    sets, sources = list[tuple[str, str]](), list[Source]()
    for word in words:
        task, _, src = word.partition("=")
        if src and re.fullmatch(r"[A-Za-z][\w+-]*", task) and not Path(word).exists():
            if find(task).reads == "training data":
                raise ValueError(f"{flag} {word}: {task} needs training data of its own. Use kiloword eval {task}.")
        else:
            task, src = "", word
        source = open_source(src, size=size)
        classes = getattr(source, "classnames", None)
        task = task or ("vqa" if asks else "zeroshot" if classes and not _has_captions(source) else "retrieval")
        reads = find(task).reads
        if reads == "captions" and not _has_captions(source):
            raise ValueError(f"{flag} {src}: no caption in the rows that were tried. Name another task by TASK=SRC.")
        if reads == "classes" and not classes:
            raise ValueError(f"{flag} {src} has no class names: put classnames.txt in its folder or the one above.")
        sets.append((task, src))
        sources.append(source)
    return [ValSet(*one) for one in zip(set_names(sets, flag), [task for task, _ in sets], sources, strict=True)]


def _has_captions(source: Source) -> bool:
    for row in spread(len(source), TRIED):
        with suppress(BadSample):
            if captions_at(source, row):
                return True
    return False


def set_names(sets: Sequence[tuple[str, str]], flag: str) -> list[str]:
    """A short name for each (task, SRC): the end of its path, with as many folders as tell the sources apart; with the
    task where one source is evaluated by several. Raises: ValueError for a set that is given twice."""
    twice = next((pair for pair, count in Counter(sets).items() if count > 1), None)
    if twice is not None:
        raise ValueError(f"{flag} names {twice[1]} twice for the task {twice[0]}: name it once.")
    sources = list(dict.fromkeys(src for _, src in sets))
    short = dict(zip(sources, _told_apart(sources), strict=True))
    tasks = Counter(src for _, src in sets)
    return [f"{task}={short[src]}" if tasks[src] > 1 else short[src] for task, src in sets]


def _told_apart(sources: Sequence[str]) -> list[str]:
    plain = [re.sub(r"\.(tar|csv|tsv|parquet|jsonl?)$", "", src.partition("?")[0].rstrip("/")) for src in sources]
    for parts in range(1, 1 + max((path.count("/") for path in plain), default=0)):
        names = ["/".join(path.split("/")[-parts:]) for path in plain]
        if len(set(names)) == len(names):
            return names
    return [path if plain.count(path) == 1 else src for path, src in zip(plain, sources, strict=True)]


def judged(matcher: Matcher, one: ValSet, train: Source | None) -> dict[str, float]:
    """The metrics of one set that its task prints. Args: train: training data, for the answers that vqa may give."""
    options: dict[str, Any] = {}
    if one.task == "vqa" and not hasattr(one.source, "answers"):
        options["train"] = train
    elif one.task == "caption":
        options["judge"] = CaptionOptions(meteor=False)  # its Java program takes longer than the other metrics
    metrics = evaluate(matcher, one.task, one.source, **options)
    return {name: v for name, v in metrics.items() if isinstance(v, float) and find(one.task).prints(name)}


MODEL = ("tokenizer.json", "config.json", "model.safetensors")  # in the order of writing, as in `save_model`


def direction(metric: str) -> int:
    """1 where a task's metric is better when higher, -1 when lower, 0 where neither is known."""
    ways = ((way, pattern) for task in TASKS.values() for way, pattern in ((-1, task.lower), (1, task.higher)))
    return next((way for way, pattern in ways if pattern and re.search(pattern, metric)), 0)


def check_best(options: RunOptions, recipe: Recipe) -> None:
    """Raises: ValueError for options of validation that need others, or exclude each other."""
    often = options.eval_every or options.eval_epochs
    refuse(
        {
            "--eval-every and --eval-epochs exclude each other: give one": options.eval_every and options.eval_epochs,
            "--keep-best and --eval-every need data: add --val SRC": (often or options.keep_best)
            and not recipe.data.val,
            "--patience needs a metric: name it by --keep-best": options.patience and not options.keep_best,
            "--patience needs more than one validation: add --eval-every STEPS": options.patience and not often,
        }
    )


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
        self.out, self.patience = out, patience
        named = [(m, s) for m in (keep, f"val/{keep}") for s in starts if m.startswith(s)]
        ways = [(m, direction(m.removeprefix(s))) for m, s in named]
        self.metric, self.way = next((found for found in ways if found[1]), ("", 0))
        if keep and not self.way:
            raise ValueError(
                f"--keep-best {keep}: expected a metric of --val that is better higher or lower, such as mean_recall@1 "
                "of retrieval; of several data sets, NAME/METRIC."
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


FEW = 16  # rows of each set that are evaluated before the first step


def first_look(run: Run) -> None:
    """Evaluate a few rows before the first step, so that a run does not end after hours.

    Raises: ValueError for data that the validation cannot use, and where it lacks the metric of `--keep-best`.
    """
    few = list[ValSet]()
    for one in run.val:
        rows = np.array(spread(len(one.source), FEW))
        few.append(replace(one, source=Selection(one.source, one.source.name, one.source.fingerprint, rows)))
    if few and (metrics := _metrics(run, few)) and run.best.metric:
        run.best.of(metrics)


def validate(run: Run) -> dict[str, float]:
    """Metrics of all validation sets of a run, by name: "val/METRIC", with several sets "val/NAME/METRIC".

    All ranks share the work and get the result.
    """
    values = _metrics(run, run.val)
    for one in run.val:
        named = f" {one.name}" if len(run.val) > 1 else ""
        run.log.say(f"val{named} at step {run.step}: {_summary(values, one, prefix(one, run.val))}")
    return values


def _metrics(run: Run, sets: Sequence[ValSet]) -> dict[str, float]:
    """The ranks share work on the averaged weights; on CUDA in the precision of the run, on a CPU in fp32, so that runs
    can be compared. Scores are in fp32 everywhere."""
    values: dict[str, float] = {}
    sharded = any(collectives.sharded(p) for p in run.learner.parameters())
    precision: Any = precision_of(run.recipe.precision, "cuda") if run.device.type == "cuda" else nullcontext
    run.learner.eval()
    with run.average.in_place(run.learner), sharing(lockstep=sharded), precision():
        # ranks with shares of the weights all run the trunk
        stored, texts = ([], []) if lockstep() else token_stores(run.recipe.data)
        images = [store for store in stored if not store.file.augmented]
        tokenizer = TokenizerWithTokens(run.tokenizer, texts) if texts else run.tokenizer
        matcher = Matcher(run.learner.model, tokenizer, run.learner.method)
        for one in sets:
            read = one
            task = find(one.task)
            if images and task.encodes:
                with suppress(ValueError):  # tokens of other images
                    read = replace(one, source=WithTokens(one.source, FoundImages(images, one.source)))
            try:
                with alone() if lockstep() and not task.encodes else nullcontext():
                    metrics = judged(matcher, read, run.loader.source)
            except ValueError as e:
                raise ValueError(f"--val {one.source.name}, {one.task}: {e}") from e
            values |= {f"{prefix(one, sets)}{name}": value for name, value in gathered(metrics)[0].items()}
    run.learner.train()
    return values


def _summary(values: dict[str, float], one: ValSet, start: str) -> str:
    """The main metrics of a set, with what chance would give among its images, and how many were skipped."""
    names = [name for name in values if name.startswith(start)]
    chosen = [name for name in names if name.endswith(MAIN)] or names
    metrics = ", ".join(f"{name.removeprefix(start)} {values[name]:.3f}" for name in chosen[:2])
    skipped = int(values.get(f"{start}skipped", 0))
    images = len(one.source) - skipped
    chance = f" of {images:,} images (chance {1 / images:.2g})" if one.task == "retrieval" else ""
    bad = f", {count(skipped, 'sample')} skipped (see `kiloword data check`)" if skipped else ""
    return metrics + chance + bad
