"""The verbs import, export and push. No torch at import, so that help is instant."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, get_args

from tyro.conf import Positional, arg

from kiloword.config.execution import REQUIRED
from kiloword.models.trust import NONE, Trust
from kiloword.terminal import say

Format = Literal["open_clip", "prolip"]
Target = Literal["open_clip", "transformers", "onnx", "sentence-transformers", "torch", "safetensors"]
TARGETS = get_args(Target)
Weights = Literal["fp32", "fp16", "int8"]
WEIGHTS = arg(
    help="open_clip: its name of the model, and a .safetensors or .pt file (read with weights_only); prolip: the file, "
    "with config.json and tokenizer.json in the same folder."
)


def export(
    target: Positional[Target],
    model: Positional[str],
    out: Path,
    precision: Weights = "fp32",
    trust: Annotated[Trust, arg(name="")] = NONE,
) -> None:
    """Write a model for another library, and compare both: kiloword export open_clip runs/clip/model --out exported

    open_clip and transformers take CLIP's and SigLIP's architectures, sentence-transformers CLIP's. onnx and torch
    take most others, too: an image and a text graph for batches of any size. safetensors: the weights of any model.
    The export is loaded as its library loads it; features that differ by more than 1e-4 are refused.

    Args:
        target: library or format.
        model: model folder, run folder, or a model of another library (open_clip:NAME:FILE, hf:FOLDER).
        out: new folder for the export and its model card, README.md.
        precision: of the weights of onnx; int8: quantised dynamically. Differences of fp16 and int8 are only printed.
        trust: code that the model folder may run.
    """
    from kiloword.interop.export.run import run

    run(target, model, out, trust, precision)
    if target in ("open_clip", "transformers", "sentence-transformers"):  # which import torchvision
        from kiloword.cli.describe import torchvision_hint

        if hint := torchvision_hint():
            say(f"hint: {hint}")


def push(model: Positional[str], repository: Positional[str], private: bool = False, message: str = "") -> None:
    """Upload a model with its card to the Hugging Face hub: kiloword push runs/clip me/my-clip

    Prints which files go, and their sizes; they go in one commit. No other verb uploads a model or data. Log in by
    `hf auth login` or HF_TOKEN. kiloword.load("hf-hub:me/my-clip") reads it back.

    Args:
        model: model folder, run folder (its model alone goes), or a folder that kiloword export wrote.
        repository: ORG/NAME on the hub, created where it is missing.
        private: create it private; a repository that exists and is public is refused.
        message: of the commit.
    """
    from kiloword.interop.push import run

    run(model, repository, private, message)


def import_(
    format: Positional[Format],
    weights: Annotated[Positional[tuple[str, ...]], REQUIRED, WEIGHTS],
    out: Path,
    tag: str = "",
) -> None:
    """Import weights of another library: kiloword import open_clip ViT-B-32 weights.safetensors --out models/b32

    Import the weights that ProLIP's authors released: kiloword import prolip model.safetensors --out models/prolip

    Args:
        format: format of the weights.
        out: model folder to write.
        tag: open_clip: tag of published weights, such as openai or dfn5b, which says preprocessing and activation.
    """
    if format != "open_clip" and tag:
        raise ValueError(f"--tag {tag} is of import open_clip, not of import {format}.")
    if len(weights) != (2 if format == "open_clip" else 1):
        expected = "NAME PATH" if format == "open_clip" else "PATH"
        raise ValueError(f"import {format} got {' '.join(weights) or 'nothing'}: expected import {format} {expected}.")
    if format == "open_clip":
        from kiloword.interop.open_clip import main as run_open_clip

        run_open_clip(f"{weights[0]}@{tag}" if tag else weights[0], Path(weights[1]), out)
        return
    from kiloword.interop.prolip import main as run_prolip

    run_prolip(Path(weights[0]), out)
