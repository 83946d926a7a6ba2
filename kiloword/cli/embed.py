"""The verb caption: what a model says of a whole data set, for training. No torch at import."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tyro.conf import Positional

from kiloword.config.execution import Execution, Flat
from kiloword.generation.options import GenerationOptions
from kiloword.models.trust import Trust
from kiloword.terminal import say


@dataclass(frozen=True, kw_only=True)
class Caption(Execution):
    """Write captions for images to a table, for `train --extra-captions`. The same command again resumes.

    Examples:
      kiloword caption runs/coca/model --data photos/train --out captions.parquet --num 5
      kiloword caption hf:blip --data photos/train --out captions.parquet --num 5
    """

    # model with a text decoder: folder of coca, sycoca or METHOD+caption; open_clip:coca_NAME:FILE; hf:FOLDER (BLIP,
    # GIT, others)
    model: Positional[str]
    # tars, a table, a folder of images or scenes, as for `kiloword train`; images need no captions
    data: tuple[str, ...]
    out: Path  # parquet table (key, captions, scores)
    options: Flat[GenerationOptions] = field(default_factory=GenerationOptions)
    batch: int = 16  # images in a batch
    # method to use in place of the one in config.json: a preset, or your own module:preset
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
