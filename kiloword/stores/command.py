"""The verb embed. No torch at import: help is instant."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tyro.conf import Positional

from kiloword.config.execution import Flat
from kiloword.models.trust import NONE, Trust
from kiloword.stores.options import EmbedOptions


@dataclass(frozen=True, kw_only=True)
class Embed(EmbedOptions):
    """Precompute the features or tokens of a data set. The same command again resumes.

    Examples:
      kiloword embed runs/first/model --data photos/train --out features
      kiloword embed open_clip:ViT-B-32:weights.safetensors --data photos/train --out features
      kiloword embed efficientnet-lite0 --data photos/train --out features --tokens
    """

    # model folder, open_clip:NAME:WEIGHTS or hf:FOLDER (of transformers: a CLIP, or an encoder of texts); with tokens,
    # what --image-tower or --text-tower of train take, or a model folder that has such towers
    model: Positional[str] = field()
    data: tuple[str, ...]  # tars, a table, a folder of images or scenes, as for `kiloword train`
    out: Path  # feature store to write, for `train --features`
    extra_captions: tuple[str, ...] = ()  # parquet tables (key, captions) whose captions are embedded too
    tokens: bool = False  # store all tokens of a tower, for `train --image-features` and `--text-features`
    trust: Flat[Trust] = NONE

    def run(self) -> None:
        """Write the store. Raises: ValueError for features or tokens that cannot be made so."""
        if self.tokens and (self.name != "teacher" or self.resize is not None or self.dim is not None):
            raise ValueError("--name, --resize and --dim are for features, not for tokens: omit them, or --tokens.")
        if self.dtype == "int8" and not self.tokens:
            raise ValueError("--dtype int8 is for tokens: add --tokens, or omit it.")
        from kiloword.stores.embed import run

        run(self)
