"""The model of a method, built from a configuration."""

from __future__ import annotations

import torch

from kiloword.config.recipes import ModelConfig
from kiloword.methods.method import Method
from kiloword.model.model import Model, initialise, storage
from kiloword.models.tensors import shapes_of


def build(config: ModelConfig, method: Method, seed: int = 0, bare: bool = False) -> Model:
    """Build and initialise the model of a method.

    Args: bare: build towers and decoders without storage (torch's meta device), which `engine.materialise` allocates.
    """
    model = empty(config, method, bare)
    initialise(model, seed)
    return model


def shapes(config: ModelConfig, method: Method) -> dict[str, tuple[int, ...]]:
    """Shapes of the model's tensors by name, without allocating them."""
    with torch.device("meta"):
        return shapes_of(empty(config, method).state_dict())


def empty(config: ModelConfig, method: Method, bare: bool = False) -> Model:
    """The model of a method with uninitialised parameters. Args: bare: as of `build`."""
    config = method.shape(config)
    with storage(bare):
        more = {name: make(config) for name, make in method.decoders.items()}
    return Model(config, method.head(config), more, bare)
