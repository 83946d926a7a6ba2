"""Weights from open_clip: the CLIP families, with and without quick GELU, ResNets too, SigLIP and CoCa."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from kiloword.config.recipes import ModelConfig
from kiloword.interop import folder
from kiloword.interop.checkpoint import read
from kiloword.interop.folder import Imported
from kiloword.interop.open_clip_config import raw_config, translate
from kiloword.terminal import say


def import_state(name: str, state: Mapping[str, Tensor]) -> Imported:
    """Translate a state dict of open_clip's model NAME or NAME@TAG.

    Raises: ValueError for an unknown model, an unsupported architecture, and weights that do not fit.
    """
    raw = raw_config(name)
    depth = raw.get("multimodal_cfg", {}).get("layers", 12)
    return folder.import_as(translate(name, raw), f"open_clip's {name}", state, depth)


def assumed(name: str, config: ModelConfig) -> str:
    """What a file of weights does not say, and the name decides, on one line."""
    shown = config.preprocess
    mean, std = (" ".join(f"{x:.3g}" for x in values) for values in (shown.mean, shown.std))
    source = "as its tag says" if "@" in name else "assumed by the name; for published weights, give their tag (@TAG)"
    how = f"resize {shown.resize}, bicubic; mean {mean}, std {std}; activation {config.text.activation}"
    return f"{name}: {how}; {source}."


def main(name: str, path: Path, out: Path) -> None:
    """Write a model folder from a file of open_clip's weights, and print a report. Args: name: NAME or NAME@TAG."""
    imported = import_state(name, read(path))
    folder.bring(imported, path, out, f"open_clip {name}")
    say(assumed(name, imported.config))
