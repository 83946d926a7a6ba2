"""The model that is exported: its features on a few inputs, and what architectures it fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, reduce
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kiloword.config.recipes import ModelConfig, ModelFile
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.interop.names import local_folder
from kiloword.model.encoding import inference
from kiloword.model.heads import Single
from kiloword.model.model import Model
from kiloword.models.model_folder import model_files, open_model, read_model_file
from kiloword.models.trust import Trust
from kiloword.types import Features

Precision = Literal["fp32", "fp16", "int8"]
LIMIT = 1e-4  # largest difference of a feature
TEXTS = ["a dog", "A Photo of  two cats", "a red circle left of a blue star " * 40, "!", "a man's 3 dogs, at 10"]
CLIP = {  # settings that other libraries' CLIP has
    "image.tower": "vit",
    "image.stem": "linear",
    "image.stem_bias": False,
    "image.class_token": True,
    "image.pre_norm": True,
    "image.extra_tokens": 0,
    "image.uncertainty_token": False,
    "text.extra_tokens": (),
    "text.causal": True,
    "head.image_pool": "cls",
    "head.text_pool": "last",
    "head.image_projection": True,
    "head.image_projection_bias": False,
    "head.text_projection_bias": False,
}
SIGLIP = CLIP | {
    "image.stem_bias": True,
    "image.class_token": False,
    "image.pre_norm": False,
    "text.causal": False,
    "head.image_pool": "map",
    "head.image_projection": False,
    "head.text_projection_bias": True,
}
GRAPHS = {  # settings of models that are graphs
    "text.uncertainty_blocks": 0,
    "text.class_place": "next",
    "text.class_sees_itself": True,
    "text.norm_words": True,
}


@dataclass(frozen=True)
class Exported:
    """An opened model, the target and precision that an export asks for, and notes on what it omits."""

    model: Model
    tokenizer: Tokenizer
    file: ModelFile
    folder: Path
    target: str = ""
    precision: Precision = "fp32"
    notes: list[str] = field(default_factory=list)

    @staticmethod
    def of(name: str, trust: Trust, target: str = "", precision: Precision = "fp32") -> Exported:
        """The model of a name, on the CPU. Raises: ValueError for a model that cannot be opened."""
        path = local_folder(name)
        model, tokenizer, _ = open_model(path, trust=trust)
        folder = model_files(path)[0].parent
        return Exported(model.eval(), tokenizer, read_model_file(folder), folder, target, precision)

    @property
    def config(self) -> ModelConfig:
        """As `Model.config`."""
        return self.model.config

    @property
    def siglip(self) -> bool:
        """Whether the towers pool as SigLIP's: by attention, over texts with pads."""
        return self.config.head.image_pool == "map" and self.config.text.pad_to_context

    @cached_property
    def pixels(self) -> Tensor:
        """uint8 [5, 3, H, W], the same in every process."""
        size, generator = self.config.image.size, torch.Generator().manual_seed(0)
        return torch.randint(0, 256, (5, 3, size, size), dtype=torch.uint8, generator=generator)

    def normalised(self) -> Tensor:
        """The same images as the towers read them, float [5, 3, H, W]."""
        with torch.no_grad():
            return self.model.normalise(self.pixels)

    @cached_property
    def images(self) -> Features:
        """Features of `pixels`."""
        with inference(self.model):
            return self.model.encode_image(self.pixels)[1]

    @cached_property
    def texts(self) -> Features:
        """Features of TEXTS."""
        with inference(self.model):  # not by encode_texts, which would warn that a text of TEXTS is truncated
            return self.model.encode_text(self.tokenizer.encode(TEXTS, self.config.text))[1]

    def compared(self, images: Tensor, texts: Tensor) -> list[str]:
        """Lines that say how near features of `normalised` and of TEXTS are. Raises: ValueError as `check_close`."""
        pairs = ("image features", self.images, images), ("text features, from strings", self.texts, texts)
        return [check_close(w, largest_difference(x, {"vec": F.normalize(y)})) for w, x, y in pairs]

    def unlike(self, settings: Mapping[str, object]) -> list[str]:
        """What of the model differs from settings, such as "image.stem is 'conv', not 'linear'"."""
        have = {name: reduce(getattr, name.split("."), self.config) for name in settings}
        return [f"{name} is {have[name]!r}, not {value!r}" for name, value in settings.items() if have[name] != value]

    def check_graphs(self) -> None:
        """Raises: ValueError where no graph computes what the model does."""
        reasons = self.unlike(GRAPHS)
        if reasons or "words" in self.texts:  # which graphs do not return
            reasons = reasons or ["it compares images with every word of a text"]
            raise ValueError(
                f"{self.target} cannot express this model: {'; '.join(reasons)}. safetensors takes its weights, and "
                "`kiloword embed` its features, which other programs can read."
            )

    def check_dual(self) -> None:
        """Raises: ValueError where the model is neither a CLIP nor a SigLIP, naming what differs and what to use."""
        reasons = self.unlike(SIGLIP if self.siglip else CLIP)
        if trunk := self.config.image.trunk.name or self.config.text.trunk.name:
            reasons = [f"it stands on {trunk}, a tower of another library"]
        if self.model.head.uncertainty is not None:
            reasons.insert(0, "its features are Gaussians")
        if type(self.model.head.pooling) is not Single:
            reasons.insert(0, f"its pooling is {type(self.model.head.pooling).__name__}")
        if reasons:
            self.check_graphs()
            raise ValueError(
                f"{self.target} cannot express this model: {'; '.join(reasons)}. onnx and torch take it; "
                "docs/export.md has the flags of a training that fits."
            )


def largest_difference(expected: Mapping[str, Tensor], actual: Mapping[str, Tensor]) -> float:
    """Largest difference of any value in both, NaN where one is. Raises: ValueError for values of another shape."""
    most = [torch.zeros((), dtype=torch.float64)]
    for name in expected.keys() & actual.keys():
        if actual[name].shape != expected[name].shape:
            raise ValueError(f"{name} is {list(actual[name].shape)} there: expected {list(expected[name].shape)}.")
        most.append((expected[name].double() - actual[name].double()).abs().max())
    return float(torch.stack(most).max())


def check_close(what: str, difference: float) -> str:
    """The line that says how near an export is. Raises: ValueError above LIMIT."""
    if not difference <= LIMIT:
        raise ValueError(
            f"the exported model differs from the source: {what} by up to {difference:.2g}, expected at most {LIMIT:g}."
        )
    return f"{what}: largest difference {difference:.2g}"
