"""The folder of a run: may it be written, does it hold a run, and is it this one?"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kiloword.addresses import scrubbed
from kiloword.checkpoint.files import SaveError, utf8, write_json
from kiloword.checkpoint.states import steps_done
from kiloword.config.recipes import BaseSettings, ModelConfig, Recipe, read_config
from kiloword.data.sources.digest import sampled, whole
from kiloword.distributed import collectives
from kiloword.errors import sentence_of
from kiloword.features.store import FeatureStore, TableFile
from kiloword.methods.registry import preset
from kiloword.training.signals import Stopped
from kiloword.types import Source
from kiloword.watch.runs import ERROR

FREE = ("micro", "chunk", "data.val", "data.bad_share")  # what changes no weight: a resumed run may have others

CONTENTS = ("data_sampled", "data_digest")  # digests of the data
COMPARED = (*CONTENTS, "features")  # where both runs have them


@dataclass(frozen=True, kw_only=True)
class RunFile(BaseSettings):
    """`config.json` of a run: the whole resolved recipe and what it ran on."""

    recipe: Recipe
    data_fingerprint: str
    data_sampled: str = ""  # digests of images and texts (`kiloword.data.sources.digest`), of some samples and of all;
    data_digest: str = ""  # "" where there was none
    features: tuple[str, ...] = ()  # of each feature store, name, model, precision, type and dimension
    model: ModelConfig | None = None  # what the run really has: recipe.model as the method shapes it
    format: str = "kiloword-run-1"


def run_file(recipe: Recipe, source: Source) -> RunFile:
    """What `config.json` of a run of a recipe on its data says; rank 0 alone reads samples for it."""
    digests = collectives.all_lists([sampled(source), whole(source)] if collectives.rank() == 0 else [])
    return RunFile(
        recipe=recipe,
        data_fingerprint=source.fingerprint,
        data_sampled=digests[0],
        data_digest=digests[1],
        features=tuple(_computed(FeatureStore(path).file) for path in recipe.data.features),
        model=preset(recipe.method, recipe.settings).shape(recipe.model),
    )


def _computed(file: TableFile) -> str:
    """By what the features of a store were computed; not where, nor what the model was called then."""
    by = f"{file.name} of the model {file.teacher_fingerprint} in {file.precision}"
    return f"{by}, {file.dim} dimensions as {file.dtype}"


def make_folder(out: Path) -> None:
    """Raises: ValueError when a run cannot be written there."""
    check_utf8(out)
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file: expected a folder to be made, or one that holds this run.")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ValueError(f"--out {out} cannot be made ({e.strerror}): choose another folder.") from e
    if not os.access(out, os.W_OK | os.X_OK):
        raise ValueError(f"--out {out} cannot be written: choose another folder, or change its permissions.")


def check_utf8(out: Path) -> None:
    """Raises: ValueError for a path that states cannot be read from again: safetensors and pyarrow take UTF-8 alone."""
    try:
        os.fsencode(out.absolute()).decode()
    except UnicodeDecodeError:
        raise ValueError(f"--out {out} is not UTF-8: choose a folder whose path is.") from None


@contextmanager
def error_kept(out: Path) -> Iterator[None]:
    """An error inside is written to the folder of the run, which this process holds, so that `watch` shows it."""
    try:
        yield
    except Stopped:
        raise
    except Exception as e:
        if collectives.rank() == 0:
            said = sentence_of(e) or f"{type(e).__name__}: {e}"
            with suppress(SaveError):  # the first error is the one to tell
                write_json(out / ERROR, {"error": scrubbed(said), "time": round(time.time(), 3)})
        raise


def forget_error(out: Path) -> None:
    """The run goes on."""
    (out / ERROR).unlink(missing_ok=True)


def holds_run(out: Path) -> bool:
    """Something was trained there; a run that failed before it saved anything leaves its folder to any other."""
    return (out / "model" / "model.safetensors").exists() or any((out / "state").glob("step-*.json"))


def earlier(out: Path) -> Recipe | None:
    """The recipe of the run that `out` holds, if it holds one."""
    file = out / "config.json"
    return read_config(file, RunFile).recipe if holds_run(out) and file.is_file() else None


def check_same_run(out: Path, file: RunFile, extend: bool) -> None:
    """Raises: ValueError when `out` holds a run of another recipe or of other data."""
    if not holds_run(out):
        return
    if not (out / "config.json").is_file():
        raise ValueError(f"--out {out} holds a run that lacks its config.json: put it back, or choose another folder.")
    there = read_config(out / "config.json", RunFile)
    differences = _differences(_utf8(asdict(there)), _utf8(asdict(file)))
    free = {f"recipe.{name}" for name in FREE} | ({"recipe.steps"} if extend else set())
    differences = {k: v for k, v in differences.items() if k not in free and not k.startswith("model")}
    if "data_fingerprint" in differences:
        differences = {k: v for k, v in differences.items() if k not in CONTENTS}
    differences = {k: v for k, v in differences.items() if k not in COMPARED or all(v)}
    done, steps = steps_done(out / "state"), file.recipe.steps
    if not differences and steps < done:
        raise ValueError(f"--out {out} has done {done} steps already: it cannot end after {steps}.")
    if not differences:
        return
    shown = "; ".join(f"{k.removeprefix('recipe.')} is {a!r} there, {b!r} here" for k, (a, b) in differences.items())
    longer = set(differences) == {"recipe.steps"} and steps >= done
    hint = " Use --extend to run it for another length." if longer else ""
    raise ValueError(
        f"--out {out} holds another run: {_cause(differences)}{shown}. Choose another folder, or repeat its settings."
        f"{hint}"
    )


def _cause(differences: Mapping[str, Any]) -> str:
    """What digests that differ mean; empty where settings say why."""
    if "recipe.data.sources" in differences:
        return ""
    if "data_fingerprint" in differences:
        return "the data is not what the run began with (a file is missing, new, cut or replaced); "
    if differences.keys() & set(CONTENTS):
        return "the data is not what the run began with (images or texts were replaced by others of the same size); "
    if "features" in differences:
        return "a feature store was replaced at its path by features of another model; "
    return ""


def _utf8(value: Any) -> Any:
    """Plain values with their texts as they are in a locale of UTF-8."""
    if isinstance(value, dict):
        return {_utf8(k): _utf8(v) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_utf8(v) for v in value)
    return utf8(value) if isinstance(value, str) else value


def _differences(a: Any, b: Any, at: str = "") -> dict[str, tuple[Any, Any]]:
    """Where two plain values differ: dotted path -> both."""
    if isinstance(a, dict) and isinstance(b, dict):
        out: dict[str, tuple[Any, Any]] = {}
        for k in [*a, *(k for k in b if k not in a)]:
            out |= _differences(a.get(k), b.get(k), f"{at}.{k}" if at else k)
        return out
    same = a == b or json.dumps(a) == json.dumps(b)  # 4 is 4.0; tuples and lists are one thing on disk
    return {} if same else {at: (a, b)}
