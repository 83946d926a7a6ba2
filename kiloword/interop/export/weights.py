"""Weights alone: as they are, or under another library's names, by running its import backwards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kiloword.interop.export.source import Exported, check_close, largest_difference
from kiloword.interop.export.words import write_preprocessor, write_tokenizer

Forward = Callable[[dict[str, Tensor]], Iterable[tuple[str, Tensor]]]
"""Weights of the other library -> (name in kiloword, value), a permutation of their elements."""


def inverted(
    theirs: Mapping[str, Tensor], forward: Forward, ours: Mapping[str, Tensor], group: Callable[[str], str]
) -> dict[str, Tensor]:
    """Values for all of `theirs`, whose shapes count, from the weights of kiloword.

    Every element of theirs gets a number; the import moves the numbers to where the elements belong here.
    Args: group: the same text for names that the import joins, so that few numbers are held at once.
    Raises: ValueError for a weight of theirs that has no source.
    """
    groups: dict[str, list[str]] = defaultdict(list)
    for name in theirs:
        groups[group(name)].append(name)
    values: dict[str, Tensor] = {}
    for names in groups.values():
        values |= _group({name: theirs[name].shape for name in names}, forward, ours)
    return values


def _group(shapes: Mapping[str, torch.Size], forward: Forward, ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    sizes = [shape.numel() for shape in shapes.values()]
    numbers = torch.split(torch.arange(sum(sizes)), sizes)
    flat, filled = torch.zeros(sum(sizes)), torch.zeros(sum(sizes), dtype=torch.bool)
    for name, places in forward({n: x.view(s) for (n, s), x in zip(shapes.items(), numbers, strict=True)}):
        if name in ours and ours[name].numel() == places.numel():
            flat[places.flatten()] = ours[name].detach().float().cpu().flatten()
            filled[places.flatten()] = True
    if not filled.all():
        raise ValueError(f"the model has no weights for {', '.join(shapes)[:200]}, which the export needs.")
    parts = torch.split(flat, sizes)
    return {name: x.reshape(shape).clone() for (name, shape), x in zip(shapes.items(), parts, strict=True)}


def write_weights(source: Exported, folder: Path) -> list[str]:
    """weights.safetensors under kiloword's names, tokenizer and preprocessing of transformers.

    Returns: lines to print.
    """
    state = {name: value.contiguous() for name, value in source.model.state_dict().items()}
    save_file(state, folder / "weights.safetensors", metadata={"format": "pt", "method": source.file.method})
    write_tokenizer(source, folder)
    write_preprocessor(source, folder)
    return [check_close("weights", largest_difference(state, load_file(folder / "weights.safetensors")))]
