"""The verbs embed and caption: what a model says of a whole data set, for training. No torch at import."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tyro.conf import Positional

from kiloword.config.execution import Execution, Flat
from kiloword.config.recipes import AugmentConfig
from kiloword.generation.options import GenerationOptions
from kiloword.models.trust import NONE, Trust
from kiloword.terminal import say


@dataclass(frozen=True, kw_only=True)
class Embed(Execution):
    """Precompute the features of a data set; the same command again resumes.

    Examples:
      kiloword embed runs/first/model --data photos/train --out features
      kiloword embed open_clip:ViT-B-32:weights.safetensors --data photos/train --out features
      kiloword embed efficientnet-lite0 --data photos/train --out features --tokens
    """

    # model folder, open_clip:NAME:WEIGHTS or hf:FOLDER (of transformers: a CLIP, or an encoder of texts); with tokens,
    # what --image-tower or --text-tower of train take, or a model folder that has such towers
    model: Positional[str]
    data: tuple[str, ...]  # tars, a table, a folder of images or scenes, as for `kiloword train`
    out: Path  # feature store to write, for `train --features`
    name: str = "teacher"  # name of the features, to tell several feature stores of a run apart
    extra_captions: tuple[str, ...] = ()  # parquet tables (key, captions) whose captions are embedded too
    precision: Literal["fp32", "bf16"] = "fp32"  # precision of the computation; recorded in the feature store
    # type of the stored features; int8, of tokens: bytes, with a minimum and a step for every 64 channels
    dtype: Literal["fp16", "fp32", "int8"] = "fp16"
    # pixels of the shorter side before the centre crop, such as 256 for 224; default: as the model has it
    resize: int | Literal["shortest", "squash"] | None = None
    dim: int | None = None  # store the first N numbers of the features, normalised again; default: all
    tokens: bool = False  # store all tokens of a tower, for `train --image-features` and `--text-features`
    views: int = 1  # augmented images of each image, of which training shows one in each epoch
    augment: AugmentConfig = field(default_factory=AugmentConfig)  # augmentation of the images
    seed: int = 0  # seed of the augmentation
    trust: Flat[Trust] = NONE

    def run(self) -> None:
        """Write the store. Raises: ValueError for features or tokens that cannot be made so."""
        if self.tokens and (self.name != "teacher" or self.resize is not None or self.dim is not None):
            raise ValueError("--name, --resize and --dim are for features, not for tokens: omit them, or --tokens.")
        if self.dtype == "int8" and not self.tokens:
            raise ValueError("--dtype int8 is for tokens: add --tokens, or omit it.")
        from kiloword.config.recipes import DataConfig
        from kiloword.data.images.views import Augmented
        from kiloword.stores.embed import EmbedOptions, main

        names = ("model", "name", "precision", "dtype", "batch", "resize", "dim")
        augmented = Augmented(self.views, self.augment, self.seed)
        options = EmbedOptions(augmented=augmented, **{name: getattr(self, name) for name in names})
        data = DataConfig(sources=self.data, extra_captions=self.extra_captions)
        main(data, self.out, options, self.workers, self.device, self.trust, self.tokens)


@dataclass(frozen=True, kw_only=True)
class Caption(Execution):
    """Write captions for images, into a table for `train --extra-captions`; the same command again resumes.

    Examples:
      kiloword caption runs/coca/model --data photos/train --out captions.parquet --num 5
      kiloword caption hf:blip --data photos/train --out captions.parquet --num 5
    """

    # folder of coca, sycoca or any with +caption; open_clip:coca_NAME:FILE; or hf:FOLDER (BLIP, GIT, others)
    model: Positional[str]
    # tars, a table, a folder of images or scenes, as for `kiloword train`; images need no captions
    data: tuple[str, ...]
    out: Path  # parquet table (key, captions, scores)
    options: Flat[GenerationOptions] = field(default_factory=GenerationOptions)
    batch: int = 16  # images in a batch
    # method of the model, instead of that in its config.json: a preset, or your own module:preset
    model_method: str | None = None
    trust_code: bool = False  # import the module named in config.json; only for models that you trust

    def run(self) -> None:
        """Write the table; ranks of torchrun share the rows. Raises: ValueError for options that do not fit, a model
        without text decoder, and as `write_captions`."""
        if self.out.suffix.lower() not in ("", ".parquet", ".pq"):
            raise ValueError(f"{self.out}: captions are written as a parquet table: let --out end in .parquet.")
        from kiloword.config.recipes import DataConfig
        from kiloword.data.open import open_data
        from kiloword.distributed.by_device import announce, workers_of
        from kiloword.distributed.device import choose
        from kiloword.distributed.sharing import together
        from kiloword.generation.captioners import open_captioner
        from kiloword.generation.command import write_captions

        device, trust = choose(self.device), Trust(method=self.model_method, trust_code=self.trust_code)
        with together(device):
            describer = open_captioner(self.model, device, self.precision, trust)
            size = describer.transform.size
            workers = workers_of(self.workers, device, 4 * self.batch, size)  # transformers' own are of floats
            announce(device, describer.precision, "as given or by model and device", workers)
            how: dict[str, Any] = {"model": self.model, "batch": self.batch, "workers": workers, "report": sys.stderr}
            source = open_data(DataConfig(sources=self.data), size)
            if made := write_captions(describer, source, self.out, self.options, **how):
                megabytes = self.out.stat().st_size / 1e6
                say(f"{self.out}: {made[1]:,} captions of {made[0]:,} images, {megabytes:,.1f} MB")
