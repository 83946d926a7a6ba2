"""The verb `eval`: one task on one data set, for one model or several beside each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import arg

from kiloword import evaluation
from kiloword.evaluation.task import TOKEN_TASKS, Inputs, Results, Task
from kiloword.models.trust import NONE, Trust
from kiloword.terminal import say, warn

if TYPE_CHECKING:
    from kiloword.api import Matcher
    from kiloword.types import Source


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How a model is opened and fed: flags of every task."""

    batch: int = 256  # images in a batch
    workers: int | Literal["auto"] = "auto"  # loader processes; auto: none on a CPU, on CUDA the cores but two
    device: str = "auto"  # auto, cpu, cuda, cuda:N
    # precision of encoders and decoders; auto: bf16 on CUDA for models larger than size tiny, else fp32. Features,
    # scores and probes are fp32
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    image_features: tuple[str, ...] = ()  # tokens of the images (`kiloword embed --tokens`): retrieval, zeroshot
    text_features: tuple[str, ...] = ()  # tokens of the captions: retrieval
    dim: int | None = None  # evaluate the first N numbers of the embedding, normalised again; default: all
    trust: Annotated[Trust, arg(name="")] = NONE  # --method is of the first model, and of others where it is the same


def main(
    task: Task,
    models: Sequence[str],
    data: str,
    options: Any,
    execution: Execution,
    json: Path | None = None,
    html: Path | None = None,
) -> None:
    """Evaluate, print, and write what is asked for, after an error for the models before it; ranks share the work.

    Args: models: their folders, or what the task takes in place of one (a table of captions); options of the task;
    json: file for the metrics, of one model by name, of several `{model: metrics}`; html: file for the task's page.
    """
    from kiloword.distributed.device import choose
    from kiloword.distributed.sharing import is_first, together
    from kiloword.terminal.progress import showing

    if len(models) > 1 and getattr(options, "results", None) is not None:
        raise ValueError("--results is one file: give one model at a time.")
    execution, names = replace(execution, device=choose(execution.device)), labels(models)
    for name, folder in zip(names, models, strict=True):
        with _naming(name, models):
            if task.without_model is None or task.without_model(folder, options) is None:
                check_model(folder)  # before the first model is evaluated
    results: dict[str, dict[str, float]] = {}
    shown: dict[str, dict[str, Any]] = {}

    def finish() -> None:
        if results and is_first():
            _print(task, results)
            _write(task, results, models, data, shown, json, html)

    with together(execution.device), showing():
        try:
            for name, folder in zip(names, models, strict=True):
                drawn: dict[str, Any] | None = None if html is None else {}
                with _naming(name, models):
                    results[name] = _metrics(task, folder, data, options, execution, drawn)
                shown[name] = drawn or {}
                named = execution.trust.method or execution.trust.named
                execution = replace(execution, trust=Trust(named=named, trust_code=execution.trust.trust_code))
        except Exception:
            finish()  # an evaluation may have taken hours
            raise
        finish()


@contextmanager
def _naming(name: str, models: Sequence[str]) -> Iterator[None]:
    """Inside, the message of a ValueError begins with the name of a model that is one of several."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{name}: {error}" if len(models) > 1 else str(error)) from error


def check_model(folder: str) -> None:
    """Raises: ValueError for a name that is no model folder, unless it is of a model of another library."""
    from kiloword.interop.names import is_foreign
    from kiloword.models.model_folder import model_files, read_model_file

    if not is_foreign(folder):
        read_model_file(model_files(folder)[0].parent)


def _write(
    task: Task,
    results: Results,
    models: Sequence[str],
    data: str,
    shown: Mapping[str, Any],
    json: Path | None,
    html: Path | None,
) -> None:
    """Write the files that are asked for."""
    from kiloword.files import write_json
    from kiloword.report import made_by, signed, write

    if json is not None:
        write_json(json, results if len(models) > 1 else next(iter(results.values())))
    if html is not None and task.page is not None:
        write(html, signed(task.page(results, data, shown), made_by(models, data)))


def _metrics(
    task: Task, folder: str, data: str, options: Any, execution: Execution, shown: dict[str, Any] | None
) -> dict[str, float]:
    """Metrics of one model; skipped rows are named on stderr."""
    from kiloword.data.reading import left_out

    without_model = None if task.without_model is None else task.without_model(folder, options)
    matcher, workers = opened(folder, execution) if without_model is None else (None, 0)
    source = evaluation.task_data(task, data, None if matcher is None else matcher.model.config.image.size)
    if execution.image_features or execution.text_features:
        matcher, source = _on_tokens(task, matcher, source, execution)
    inputs = Inputs(matcher, source, execution.batch, workers, shown=shown)
    metrics = evaluation.run(task, inputs, options if without_model is None else without_model)
    warn(*left_out(inputs.skipped).lines())
    return metrics


def _on_tokens(task: Task, matcher: Matcher | None, source: Source, execution: Execution) -> tuple[Matcher, Source]:
    """The model and the source, which read stored tokens. Raises: ValueError for a task that does not take them."""
    from kiloword.api import Matcher
    from kiloword.stores.runs import reading_tokens

    if task.name not in TOKEN_TASKS or matcher is None:
        raise ValueError(
            f"the task {task.name} reads images and texts: omit --image-features and --text-features, which "
            f"{' and '.join(TOKEN_TASKS)} take."
        )
    folders = execution.image_features, execution.text_features
    source, tokenizer = reading_tokens(matcher.model, matcher.tokenizer, source, *folders)
    return Matcher(matcher.model, tokenizer, matcher.method), source


def opened(folder: str, execution: Execution) -> tuple[Matcher, int]:
    """A model, and the number of workers that read for it."""
    from kiloword.api import Matcher
    from kiloword.distributed.by_device import announce, reason_of, workers_of
    from kiloword.interop.names import local_folder
    from kiloword.model.prefix import keep_prefix_
    from kiloword.models.model_folder import open_model

    device, precision = execution.device, execution.precision
    matcher = Matcher(*open_model(local_folder(folder), device, trust=execution.trust, precision=precision))
    if execution.dim is not None and (note := keep_prefix_(matcher.model, execution.dim)):
        warn(f"note: {note}")
    config = matcher.model.config
    workers = workers_of(execution.workers, device, execution.batch, config.image.size)
    announce(device, matcher.model.precision, reason_of(precision, config), workers)
    return matcher, workers


def labels(models: Sequence[str]) -> list[str]:
    """Short names of model folders: the run's folder where that tells them apart, else the whole path."""
    if len(set(models)) < len(models):
        raise ValueError(f"one model is named twice: {', '.join(models)}")
    short = [(path.parent if path.name == "model" else path).name for path in map(Path, models)]
    return short if len(set(short)) == len(short) and all(short) else list(models)


def _print(task: Task, results: Results) -> None:
    """A line per metric, with a column per model."""
    names = dict.fromkeys(name for values in results.values() for name in values)
    first, width = max(36, *map(len, names)), max(10, *map(len, results)) if len(results) > 1 else 0
    if len(results) > 1:
        say(" ".join([" " * first, *(f"{name:>{width}s}" for name in results)]))
    for name in filter(task.prints, names):
        shown = (number(values[name]) if name in values else "-" for values in results.values())
        say(" ".join([f"{name:{first}s}", *(f"{value:>{width}s}" for value in shown)]))


ROUNDING = 1e-12  # what is smaller is shown as 0


def number(value: float) -> str:
    """A value with four digits after the point, or, where these would hide it, three that count."""
    return f"{value:.4f}" if abs(value) < ROUNDING or abs(value) >= 0.01 else f"{value:.3g}"
