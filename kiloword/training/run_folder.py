"""The folder of a run: whether it holds a run, and whether that is the same run."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kiloword.addresses import scrubbed
from kiloword.config.recipes import ModelConfig, Recipe
from kiloword.config.settings import BaseSettings, differing, parse, read_config
from kiloword.data.joins import sampled
from kiloword.data.tables import fingerprint
from kiloword.distributed import collectives
from kiloword.errors import of_library, sentence_of
from kiloword.files import SaveError, utf8, write_json
from kiloword.methods.registry import find, modules_of, preset
from kiloword.models.states import steps_done
from kiloword.runs.run import ERROR
from kiloword.stores.features import FeatureStore
from kiloword.stores.tokens import token_stores
from kiloword.training.signals import Stopped
from kiloword.types import Source

FREE = ("micro", "chunk", "data.val", "data.bad_share", "lora.save")  # change no weight: a resumed run may change them
DIGESTS = {  # what it means that they differ
    "data_fingerprint": " (a file of the data is missing, new, cut or replaced)",
    "data_sampled": " (images or texts were changed or replaced)",
    "code": " (the file of the method was changed)",
    "features": " (a feature store was replaced by features of another model)",
}


@dataclass(frozen=True, kw_only=True)
class RunFile(BaseSettings):
    """`config.json` of a run: the whole resolved recipe, and digests of its data."""

    recipe: Recipe
    data_fingerprint: str
    code: str = ""  # digests of the files of the user's methods
    data_sampled: str = ""  # digest of some images (`kiloword.data.joins.sampled`)
    features: tuple[str, ...] = ()  # name, model, precision, type and dimension of each feature store
    model: ModelConfig | None = None  # the model that is trained: recipe.model as the method shapes it
    format: str = "kiloword-run-2"


def run_file(recipe: Recipe, source: Source) -> RunFile:
    """The contents of a run's `config.json`. A collective: rank 0 reads samples of the data for it."""
    digests = collectives.all_lists([sampled(source)] if collectives.rank() == 0 else [])
    return RunFile(
        recipe=recipe,
        data_fingerprint=source.fingerprint,
        code=code_of(recipe.method),
        data_sampled=digests[0],
        features=(
            *(FeatureStore(path).file.origin for path in recipe.data.features),
            *(store.file.origin for stores in token_stores(recipe.data) for store in stores),
        ),
        model=preset(recipe.method, recipe.settings).shape(recipe.model),
    )


def code_of(method: str) -> str:
    """The digests of the modules in the name of a method, and of the user's that they import from."""
    found, names = dict[str, str](), {part.partition(":")[0] for part in modules_of(method)}
    while names:
        module = sys.modules.get(name := names.pop())
        file = getattr(module, "__file__", None)
        if file and name not in found and (f"{name}:" in method or not of_library(file)):
            found[name] = fingerprint(Path(file))
            names |= {str(getattr(x, "__module__", getattr(x, "__name__", ""))) for x in vars(module).values()}
    return "".join(sorted(found.values()))


@contextmanager
def error_kept(out: Path) -> Iterator[None]:
    """Write an error raised inside to the folder of the run, so that `watch` shows it."""
    try:
        yield
    except Stopped:
        raise
    except Exception as e:
        if collectives.rank() == 0:
            message = sentence_of(e) or f"{type(e).__name__}: {e}"
            with suppress(SaveError):  # the first error is the one to report
                write_json(out / ERROR, {"error": scrubbed(message), "time": round(time.time(), 3)})
        raise


def holds_run(out: Path) -> bool:
    """Whether something was trained there; a run that failed before its first save does not count."""
    return (out / "model" / "model.safetensors").exists() or any((out / "state").glob("step-*.json"))


def earlier(out: Path) -> RunFile | None:
    """The file of the run that `out` holds, or None."""
    return read_config(out / "config.json", RunFile) if holds_run(out) else None


def _with_defaults(file: RunFile) -> RunFile:
    """The file with all settings of its method: what a run does not name has its default."""
    kind: Any = find(file.recipe.method)[1]
    return replace(file, recipe=replace(file.recipe, settings=asdict(parse(file.recipe.settings, kind))))


def check_same_run(out: Path, before: RunFile, file: RunFile, extend: bool) -> None:
    """Raises: ValueError when `out` holds a run of another recipe or of other data. Args: before: the file there."""
    files = _with_defaults(before), _with_defaults(file)
    there, here = (json.loads(utf8(json.dumps(asdict(one), ensure_ascii=False))) for one in files)  # as in any locale
    free = {f"recipe.{name}" for name in FREE} | ({"recipe.steps"} if extend else set())
    found = {k: v for k, v in differing(there, here).items() if k not in free and not k.startswith("model")}
    if "data_fingerprint" not in found:
        found.pop("recipe.data.sources", None)  # the same data by another path
    done, steps = steps_done(out / "state"), file.recipe.steps
    if not found and steps < done:
        raise ValueError(f"--out {out} has done {done} steps already: it cannot end after {steps}.")
    if "format" in found:
        raise ValueError(f"--out {out} holds a run that another version of kiloword began: choose another folder.")
    if found:
        told = (
            f"{k.removeprefix('recipe.')} is {a!r} there, {b!r} here{DIGESTS.get(k, '')}" for k, (a, b) in found.items()
        )
        hint = " Use --extend to run it for another length." if {*found} == {"recipe.steps"} and steps >= done else ""
        raise ValueError(
            f"--out {out} holds another run: {'; '.join(told)}. Choose another folder, or repeat its settings.{hint}"
        )
