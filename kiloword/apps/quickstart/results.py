"""What a finished quickstart on scenes leaves: its figures, and the commands to go on with. No torch at import."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kiloword.data.scenes.world import TASKS
from kiloword.report.blocks import Table
from kiloword.report.render import say_blocks
from kiloword.runs.rows import read_object
from kiloword.terminal import say

RESULTS, REPORT = "results.json", "report.html"
SHOWN = {  # metrics of the table: name, set, metric
    "caption to image, R@1": ("retrieval", "image_retrieval_recall@1"),
    "caption to image, R@5": ("retrieval", "image_retrieval_recall@5"),
    "image to caption, R@1": ("retrieval", "text_retrieval_recall@1"),
    "image to caption, R@5": ("retrieval", "text_retrieval_recall@5"),
    "captions of one fact, mAP": ("one fact", "image_retrieval_true_map"),
    "captions of one thing, mAP": ("one thing", "image_retrieval_true_map"),
    **{f"{name}, {len(task.classnames)} classes": (name, "acc1") for name, task in TASKS.items()},
}
EXPORTS = {"open_clip": "open_clip", "transformers": "transformers", "onnx": "onnxscript", "torch": "torch"}


def finished(out: Path, seed: int, steps: int | None) -> dict[str, Any]:
    """The results of a finished run of this seed and length (None: of any), or {}."""
    results, run = read_object(out / RESULTS), read_object(out / "config.json").get("recipe") or {}
    of = {"seed": seed, "steps": steps or run.get("steps")}
    there = all((out / name).exists() for name in (REPORT, "example.png", "model/model.safetensors"))
    return results if there and results.get("run") == of == {name: run[name] for name in of} else {}


def table(metrics: Mapping[str, Mapping[str, float]]) -> Table:
    """The figures of a run. Args: metrics: by set."""
    return Table([[name, metrics[of][metric]] for name, (of, metric) in SHOWN.items()], ("test", "figure, 0 to 1"))


def sentence(confusion: Mapping[str, Any]) -> str:
    """What a model confuses most, with the counts. Args: confusion: of `results.json`."""
    if not confusion:
        return "It confuses no classes."
    return "Its worst confusion: of {of} images of “{true}”, it calls {count} “{named}”.".format(**confusion)


def export(out: Path) -> str:
    """The command that exports the model to a library of this environment."""
    program = "kiloword" if shutil.which("kiloword") else f"{shlex.quote(sys.executable)} -m kiloword"
    target = next(target for target, package in EXPORTS.items() if find_spec(package))
    return f"{program} export {target} {shlex.quote(str(out / 'model'))} --out {shlex.quote(str(out / target))}"


def tell(out: Path, results: Mapping[str, Any]) -> None:
    """Print the figures of a run, its worst confusion, where its files are, and how to export the model."""
    say_blocks([table(results["metrics"])])
    files = {"model": "model", "figures": RESULTS, "report": REPORT}
    say(sentence(results["confusion"]), *(f"{name:8} {out / file}" for name, file in files.items()))
    say(f"export   {export(out)}")
