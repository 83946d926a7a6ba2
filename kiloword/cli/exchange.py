"""The verbs import, export, push and average: models to and from other libraries. No torch at import."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from kiloword.config.execution import Flat, Some
from kiloword.interop.export.targets import TARGETS
from kiloword.models.trust import NONE, Trust


@dataclass(frozen=True, kw_only=True)
class Import:
    """Import weights of another library.

    Examples:
      kiloword import open_clip ViT-B-32 weights.safetensors --out models/b32
      kiloword import prolip model.safetensors --out models/prolip
      kiloword import llip llip-b16-released llip_b16_k32.pt --out models/llip
    """

    format: Positional[Literal["open_clip", "prolip", "llip"]]  # format of the weights
    # open_clip: NAME, NAME@TAG (the tag of published weights gives preprocessing and activation) or CONFIG.json, then a
    # .safetensors or .pt file (read with weights_only); prolip: the file, with config.json and tokenizer.json in the
    # same folder; llip: a recipe of llip, then the file
    weights: Some[str]
    out: Path  # model folder to write

    def run(self) -> None:
        """Write a model folder. Raises: ValueError for weights that cannot be translated."""
        expected = "PATH" if self.format == "prolip" else "NAME PATH"
        if len(self.weights) != len(expected.split()):
            raise ValueError(f"import {self.format} got {' '.join(self.weights)}: expected {expected}.")
        *names, path = self.weights
        import_module(f"kiloword.interop.{self.format}").main(*names, Path(path), self.out)


@dataclass(frozen=True, kw_only=True)
class Export:
    """Export a model to another library, and compare both.

    open_clip and transformers take the architectures of CLIP and SigLIP; sentence-transformers takes CLIP alone. onnx
    and torch take most other models too, as an image graph and a text graph for batches of any size. immich writes what
    the photo server of that name reads; safetensors takes the weights of any model. The export is loaded by its
    library, and refused if a feature differs by more than 1e-4.

    Examples:
      kiloword export open_clip runs/clip/model --out exported
    """

    target: Positional[Literal[tuple(TARGETS)]]  # type: ignore[valid-type]
    """library or format"""
    model: Positional[str]  # model folder, run folder, or a model of another library (open_clip:NAME:FILE, hf:FOLDER)
    out: Path  # new folder for the export and its model card, README.md
    # precision of the weights, for onnx alone; int8: quantised dynamically. With fp16 and int8, differences are
    # printed and not refused
    precision: Literal["fp32", "fp16", "int8"] = "fp32"
    trust: Flat[Trust] = NONE

    def run(self) -> None:
        """Write the export. Raises: ValueError for a model that the target does not have."""
        from kiloword.interop.export.run import run

        run(self.target, self.model, self.out, self.trust, self.precision)


@dataclass(frozen=True, kw_only=True)
class Push:
    """Upload a model with its card to the Hugging Face hub.

    It prints the files and their sizes, and uploads them in one commit. No other verb uploads a model or data. Log in
    by `hf auth login` or HF_TOKEN. kiloword.load("hf-hub:me/my-clip") reads the model back.

    Examples:
      kiloword push runs/clip me/my-clip
    """

    # model folder, run folder (only its model is uploaded), or a folder that kiloword export wrote
    model: Positional[str]
    repository: Positional[str]  # ORG/NAME on the hub, created where it is missing
    private: bool = False  # create a private repository; an existing public one is refused
    message: str = ""  # message of the commit

    def run(self) -> None:
        """Upload. Raises: ValueError for what is no model, and for what the hub refuses."""
        from kiloword.interop.push import run

        run(self.model, self.repository, self.private, self.message)


@dataclass(frozen=True, kw_only=True)
class Average:
    """Average the weights of models.

    Without --alpha, all models get equal shares. Average a tuned model with its start to keep what the start could do
    (WiSE-FT).

    Examples:
      kiloword average models/b32 runs/tuned/model --alpha 0.5 --out runs/average
    """

    # models with one method, shape and tokenizer: model folders, or models of other libraries as for --init of train;
    # of two models, the first is the start
    models: Some[str]
    out: Path  # model folder to write
    alpha: float | None = None  # share of the second of two models, from 0 to 1; default: equal shares

    def run(self) -> None:
        """Write a model folder. Raises: ValueError for models that differ in more than their weights."""
        from kiloword.interop.names import local_folder
        from kiloword.models.average import average

        average([str(local_folder(model)) for model in self.models], self.out, self.alpha)
