"""Embeddings of fewer numbers: the first N, normalised again, as of models trained on prefixes. arXiv:2205.13147."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from kiloword.model.heads import Head, Single
from kiloword.model.model import Model
from kiloword.terminal import warn

PREFIX = "prefix_"  # start of the names of the heads that `methods.matryoshka` adds


def check_dim(dim: int, size: int) -> None:
    """Raises: ValueError for a number of dimensions that embeddings of `size` do not have."""
    if not 1 <= dim <= size:
        raise ValueError(f"the dimension {dim} was asked for: expected 1 to {size}, the embedding size of the model.")


def check_prefix(model: Model, dim: int) -> str:
    """What to know of the first `dim` numbers of a model's embedding; "" for all of them, or where it trained on them.

    Raises: ValueError for a model that scores pairs by more than the cosine of one vector each, and a wrong `dim`.
    """
    head, size = model.head, model.config.head.dim
    if type(head.pooling) is not Single or head.uncertainty is not None:
        raise ValueError(
            "a dimension keeps the first numbers of vectors whose cosine is the score. The pooling of this model is "
            f"{type(head.pooling).__name__}, or it has an uncertainty: omit the dimension."
        )
    check_dim(dim, size)
    trained = sorted((int(name.removeprefix(PREFIX)) for name in _prefixes(head)), reverse=True)
    if dim in (size, *trained):
        return ""
    if not trained:
        return f"the model was not trained with +matryoshka: its first {dim} numbers may serve badly."
    return f"the model was trained on its first {', '.join(map(str, trained))} numbers, and not on its first {dim}."


@torch.no_grad()
def keep_prefix_(model: Model, dim: int) -> None:
    """Keep the first `dim` numbers of a model's embedding, normalised again: a model with smaller projections.

    Scale and bias become those that were trained with this prefix, if any. Warns of what `check_prefix` says.
    """
    head, config, note = model.head, model.config, check_prefix(model, dim)
    if dim == config.head.dim:
        return
    trained = getattr(head, f"{PREFIX}{dim}", None)
    if trained is not None:
        for whole, part in zip(head.scales(), trained.scales(), strict=True):
            whole.copy_(part)
    for name in _prefixes(head):
        delattr(head, name)
    pooling = head.pooling
    assert isinstance(pooling, Single)
    image = pooling.image_projection or _identity(pooling.text_projection, config.head.dim)
    pooling.image_projection, pooling.text_projection = _first(image, dim), _first(pooling.text_projection, dim)
    bias = pooling.image_projection.bias is not None
    head_config = replace(config.head, dim=dim, image_projection=True, image_projection_bias=bias)
    model.config = replace(config, head=head_config)
    if note:
        warn(f"note: {note}")


def _prefixes(head: Head) -> list[str]:
    """Names of the heads of prefixes."""
    return [name for name in head.further() if name.startswith(PREFIX)]


def _first(layer: nn.Linear, dim: int) -> nn.Linear:
    """The first outputs of a layer."""
    out = nn.Linear(layer.in_features, dim, layer.bias is not None, layer.weight.device, layer.weight.dtype)
    out.weight.copy_(layer.weight[:dim])
    if layer.bias is not None:
        out.bias.copy_(layer.bias[:dim])
    return out.requires_grad_(layer.weight.requires_grad)


def _identity(like: nn.Linear, dim: int) -> nn.Linear:
    """A projection that changes nothing."""
    out = nn.Linear(dim, dim, False, like.weight.device, like.weight.dtype)
    nn.init.eye_(out.weight)
    return out
