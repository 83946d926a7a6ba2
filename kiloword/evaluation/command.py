"""The verb `eval`: one task on one data set, for one model or several beside each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kiloword import evaluation
from kiloword.checkpoint.trust import NONE, Trust
from kiloword.terminal import say, warn
from kiloword.types import Skipped

if TYPE_CHECKING:
    from kiloword.api import Matcher

Found = Mapping[str, float]


@dataclass(frozen=True)
class How:
    """How a model is opened and fed."""

    device: str
    precision: str
    workers: int | Literal["auto"]
    trust: Trust


def main(
    models: Sequence[str],
    task: str,
    data: str,
    json: Path | None = None,
    html: Path | None = None,
    device: str = "auto",
    trust: Trust = NONE,
    precision: str = "auto",
    workers: int | Literal["auto"] = "auto",
    **options: Any,
) -> None:
    """Evaluate, print, and write what is asked for; ranks that torchrun started share the work.

    Args: models: their folders, or what the task takes in place of one (a table of captions); json: of one model its
    values by name, of several `{model: values}`; html: a page, where the task has one; options of the task's `run`,
    None: its own default; trust: of the first model, whose method the others may have too; precision: of encoders, as
    `by_device.encoder_precision`; workers: as `by_device.workers_of`.
    """
    from kiloword.distributed.device import choose
    from kiloword.distributed.sharing import together
    from kiloword.terminal.progress import showing_progress

    given = {name: value for name, value in options.items() if value is not None}
    evaluation.check(task, given)
    page = getattr(import_module(evaluation.TASKS[task]), "report", None)
    if html is not None and page is None:
        raise ValueError(f"the task {task} has no page to write: leave --html away, or use --json.")
    device = choose(device)
    with together(device), showing_progress():
        _main(models, task, data, json, html, How(device, precision, workers, trust), given)


def _main(
    models: Sequence[str],
    task: str,
    data: str,
    json: Path | None,
    html: Path | None,
    how: How,
    given: dict[str, Any],
) -> None:
    from kiloword.checkpoint.files import write_json
    from kiloword.distributed.sharing import is_first
    from kiloword.report import write

    page = getattr(import_module(evaluation.TASKS[task]), "report", None)
    found: dict[str, Found] = {}
    shown: dict[str, dict[str, Any]] = {}
    for name, folder in zip(labels(models), models, strict=True):
        more = {"shown": shown.setdefault(name, {})} if page is not None and _shows(task) else {}
        try:
            found[name] = _judged(folder, task, data, how, {**given, **more})
        except ValueError as error:
            raise ValueError(f"{name}: {error}" if len(models) > 1 else str(error)) from error
        named = how.trust.method or how.trust.named
        how = replace(how, trust=Trust(named=named, trust_code=how.trust.trust_code))
    if not is_first():
        return
    _print(task, found)
    if json is not None:
        write_json(json, found if len(found) > 1 else next(iter(found.values())))
    if html is not None and page is not None:
        write(html, page(found, data, shown) if _shows(task) else page(found, data))


def _judged(folder: str, task: str, data: str, how: How, options: dict[str, Any]) -> Found:
    """The values of one model; rows that are left out are named on stderr."""
    from kiloword.data.sources.open import open_source

    instead = getattr(import_module(evaluation.TASKS[task]), "instead", None)
    stands = instead(folder) if instead is not None else None
    matcher, feeding = _opened(folder, how, options) if stands is None else (None, stands)
    skipped: list[Skipped] = []
    source = open_source(data, size=None if matcher is None else matcher.model.config.image.size)
    found = evaluation.evaluate(matcher, task, source, skipped=skipped, **{**options, **feeding})
    for one in skipped:
        warn(f"skipped {one.key}: {one.reason}")
    return found


def _opened(folder: str, how: How, options: Mapping[str, Any]) -> tuple[Matcher, dict[str, int]]:
    """A model, and the workers that read for it."""
    from kiloword.api import Matcher
    from kiloword.checkpoint.model_folder import open_model
    from kiloword.config.by_device import announce, image_bytes, reason_of, workers_of
    from kiloword.evaluation.features import IMAGES

    matcher = Matcher(*open_model(folder, how.device, trust=how.trust, precision=how.precision))
    config = matcher.model.config
    workers = workers_of(how.workers, how.device, image_bytes(options.get("batch", IMAGES), config.image.size))
    announce(how.device, matcher.model.precision, reason_of(how.precision, config), workers)
    return matcher, {"workers": workers}


def _shows(task: str) -> bool:
    """Whether a task's `run` fills a dict `shown` with what its page draws beside the values."""
    return "shown" in signature(import_module(evaluation.TASKS[task]).run).parameters


def labels(models: Sequence[str]) -> list[str]:
    """Short names of model folders: the run's folder where that tells them apart, else the whole path."""
    if len(set(models)) < len(models):
        raise ValueError(f"one model is named twice: {', '.join(models)}")
    short = [(path.parent if path.name == "model" else path).name for path in map(Path, models)]
    return short if len(set(short)) == len(short) and all(short) else list(models)


def _print(task: str, found: Mapping[str, Found]) -> None:
    brief = getattr(import_module(evaluation.TASKS[task]), "brief", None)
    width = max(10, *map(len, found))
    names = dict.fromkeys(name for values in found.values() for name in values)
    first = max(36, *map(len, names))
    if len(found) > 1:
        say(" ".join([" " * first, *(f"{name:>{width}s}" for name in found)]))
    for name in names:
        if brief is None or brief(name):
            shown = (number(values[name]) if name in values else "-" for values in found.values())
            say(" ".join([f"{name:{first}s}", *(f"{value:>{width}s}" if len(found) > 1 else value for value in shown)]))


ROUNDING = 1e-12  # what is smaller is shown as 0


def number(value: float) -> str:
    """A value with four digits after the point, or, where these would hide it, three that count."""
    return f"{value:.4f}" if abs(value) < ROUNDING or abs(value) >= 0.01 else f"{value:.3g}"
