"""The model that is exported: its features on a few inputs, and what architectures it fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from kiloword.config.recipes import ModelConfig, ModelFile
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.interop.names import local_folder
from kiloword.model.encoding import encode_texts, inference
from kiloword.model.heads import Single
from kiloword.model.model import Model
from kiloword.models.model_folder import WEIGHTS, model_files, open_model, read_model_file
from kiloword.models.trust import Trust
from kiloword.types import Features

Precision = Literal["fp32", "fp16", "int8"]
LIMIT = 1e-4  # largest difference of a feature
IMAGES = 5
TEXTS = ["a dog", "A Photo of  two cats", "a red circle left of a blue star " * 40, "!", "a man's 3 dogs, at 10"]


@dataclass(frozen=True)
class Exported:
    """An opened model, the precision of the weights that an export asks for, and notes on what it omits."""

    model: Model
    tokenizer: Tokenizer
    file: ModelFile
    folder: Path
    precision: Precision = "fp32"
    notes: list[str] = field(default_factory=list)

    @staticmethod
    def of(name: str, trust: Trust, precision: Precision = "fp32") -> Exported:
        """The model of a name, on the CPU. Raises: ValueError for a model that cannot be opened."""
        path = local_folder(name)
        model, tokenizer, _ = open_model(path, trust=trust)
        folder = model_files(path)[0].parent
        return Exported(model.eval(), tokenizer, read_model_file(folder, WEIGHTS), folder, precision)

    @property
    def config(self) -> ModelConfig:
        """As `Model.config`."""
        return self.model.config

    def pixels(self) -> Tensor:
        """uint8 [5, 3, H, W], the same in every process."""
        size, generator = self.config.image.size, torch.Generator().manual_seed(0)
        return torch.randint(0, 256, (IMAGES, 3, size, size), dtype=torch.uint8, generator=generator)

    def normalised(self) -> Tensor:
        """The same images as the towers read them, float [5, 3, H, W]."""
        with torch.no_grad():
            return self.model.normalise(self.pixels())

    def images(self) -> Features:
        """Features of `pixels`."""
        with inference(self.model):
            features: Features = self.model.encode_image(self.pixels())[1]
            return features

    def texts(self) -> Features:
        """Features of TEXTS."""
        return encode_texts(self.model, self.tokenizer, TEXTS)


def largest_difference(expected: Mapping[str, Tensor], actual: Mapping[str, Tensor]) -> float:
    """Largest difference of any value in both. Raises: ValueError for values of another shape, NaN or infinite."""
    most = 0.0
    for name, value in expected.items():
        if name in actual:
            if actual[name].shape != value.shape:
                raise ValueError(f"{name} is {list(actual[name].shape)} there: expected {list(value.shape)}.")
            difference = float((value.double() - actual[name].double()).abs().max())
            if difference != difference:
                raise ValueError(f"{name} holds NaN there.")
            most = max(most, difference)
    return most


def check_close(what: str, difference: float) -> str:
    """The line that says how near an export is. Raises: ValueError above LIMIT."""
    if not difference <= LIMIT:
        raise ValueError(
            f"the exported model differs from the source: {what} by up to {difference:.2g}, expected at most "
            f"{LIMIT:g}. Nothing was written."
        )
    return f"{what}: largest difference {difference:.2g}"


def is_siglip(config: ModelConfig) -> bool:
    """Whether the towers pool as SigLIP's: by attention, over texts with pads."""
    return config.head.image_pool == "map" and config.text.pad_to_context


def unlike_graphs(source: Exported) -> list[str]:
    """What of a model no graph of `graphs` expresses."""
    text, below = source.config.text, source.config.image.trunk.name
    other = {
        f"its image tower stands on {below}": bool(below),
        "its text tower stands on another tower": bool(text.trunk.name),
        "its text tower has a second path": bool(text.uncertainty_blocks),
        "its class tokens have places or norms of their own": text.class_place == "last"
        or not (text.class_sees_itself and text.norm_words),
    }
    if not any(other.values()):  # such a model can be run on words
        other["it compares images with every word of a text"] = "words" in source.texts()
    return [what for what, differs in other.items() if differs]


def refusal(target: str, reasons: list[str], source: Exported) -> ValueError:
    """The error that names what a target cannot express, and the nearest target that can."""
    if unlike_graphs(source):
        nearest = (
            "safetensors takes its weights, without the computation. kiloword itself runs it: kiloword.load, and "
            "`kiloword embed`, whose features other programs can read"
        )
    elif source.model.head.uncertainty is not None:
        nearest = "onnx and torch take it: the vectors, and the logarithm of the variances as a second output"
    else:
        nearest = "onnx and torch take it: one vector for each image and text"
    if source.config.image.stem == "conv":
        nearest += ". Models that are trained at --size s16, b32 or larger have a linear stem and pool like a CLIP"
    return ValueError(f"{target} cannot express this model: {'; '.join(reasons)}. {nearest}.")


def check_dual(source: Exported, target: str) -> None:
    """Raises: ValueError where the model is neither a CLIP nor a SigLIP, naming what differs and what to use."""
    image, text, head = source.config.image, source.config.text, source.config.head
    siglip = is_siglip(source.config)
    other = {
        "its head does not make one vector per image and text": type(source.model.head.pooling) is not Single,
        "its features are Gaussians": source.model.head.uncertainty is not None,
        f"its image tower stands on {image.trunk.name}": bool(image.trunk.name),
        "its text tower stands on another tower": bool(text.trunk.name),
        "its image tower is a ResNet": image.tower != "vit",
        "it has a convolutional stem": image.stem == "conv",
        "it has registers or mixture tokens": image.extra_tokens > 0 or image.uncertainty_token,
        "its texts end in tokens of their own": bool(text.extra_tokens),
        f"it pools images by {head.image_pool}": head.image_pool != ("map" if siglip else "cls"),
        f"it pools texts by {head.text_pool}": head.text_pool != "last",
        "its text tower sees later words without pads": not (text.causal or siglip),
        "its image tower has no first norm": not (image.pre_norm or siglip),
        "its projections have biases that CLIP has not": not siglip
        and (image.stem_bias or head.image_projection_bias or head.text_projection_bias),
        "it differs from SigLIP in class token, first norm, projections or biases": siglip
        and (image.class_token, image.pre_norm, head.image_projection, image.stem_bias, head.text_projection_bias)
        != (False, False, False, True, True),
    }
    if reasons := [what for what, differs in other.items() if differs]:
        raise refusal(target, reasons, source)
