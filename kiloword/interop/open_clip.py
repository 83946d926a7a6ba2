"""Weights from open_clip: CLIP, with and without quick GELU, ResNets too, SigLIP and CoCa; others run by its code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from kiloword.config.recipes import ModelConfig, TrunkConfig
from kiloword.interop import folder
from kiloword.interop.checkpoint import read
from kiloword.interop.folder import Captions, Imported
from kiloword.interop.open_clip_config import Unlike, preprocess_of, raw_config, translate
from kiloword.model.trunks.libraries import MOST
from kiloword.terminal import say


def config_of(name: str, raw: Mapping[str, Any]) -> ModelConfig:
    """The model of a configuration of open_clip: with towers of kiloword, or else of open_clip, whole.

    Raises: Unlike for a CoCa of another kind, a configuration file of other towers than kiloword's, and a way
    to tokenize that kiloword lacks.
    """
    try:
        return translate(name, raw)
    except Unlike:
        if name.endswith(".json") or "multimodal_cfg" in raw or "tokenizer_mode" in raw["text_cfg"]:
            raise
    text = raw["text_cfg"]
    trunk = TrunkConfig(name=f"open_clip:{name.partition('@')[0]}", width=raw["embed_dim"])
    # a text tower of transformers knows its vocabulary itself
    words = {"context": text.get("context_length", 77), "vocab": text.get("vocab_size", MOST), "pad_to_context": True}
    return folder.whole(trunk, raw["vision_cfg"]["image_size"], preprocess_of(name, raw), **words)


def import_state(name: str, state: Mapping[str, Tensor]) -> Imported:
    """Translate a state dict of a model of open_clip. Args: name: as of `raw_config`.

    Raises: ValueError for an unknown model, as `config_of`, and for weights that do not fit.
    """
    raw, origin = raw_config(name), f"open_clip's {name}"
    config, depth = config_of(name, raw), raw.get("multimodal_cfg", {}).get("layers", 12)
    if not config.image.trunk.whole:
        return folder.import_as(config, origin, state, depth)
    how = raw["text_cfg"].get("tokenizer_kwargs") or {}
    usual = config.text.vocab == folder.CLIP_VOCAB or how.get("clean") == "canonicalize"
    cleaned: Captions = "canonical" if usual else "endless" if how.get("strip_sep_token") else "verbatim"
    return folder.import_whole(config, origin, state, cleaned)


def assumed(name: str, config: ModelConfig) -> str:
    """What a file of weights does not say, and the name or a configuration decides, on one line."""
    shown, told = config.preprocess, raw_config(name).get("preprocess_cfg", {})
    source = "as it says"
    if omitted := ", ".join(key for key in ("mean", "std", "resize_mode") if key not in told):
        source = "assumed by the name; for published weights, give their tag (@TAG)"
        source = f"{omitted} assumed, as it omits them" if name.endswith(".json") else source
    how = f"resize {shown.resize}, bicubic; mean {shown.mean}, std {shown.std}; activation {config.text.activation}"
    return f"{name}: {how}; {source}."


def main(name: str, path: Path, out: Path) -> None:
    """Write a model folder from a file of open_clip's weights, and print a report. Args: name: as of `raw_config`."""
    imported = import_state(name, read(path))
    folder.bring(imported, path, out, f"open_clip {Path(name).name}")
    say(assumed(name, imported.config))
