"""Weights alone: as they are, or under another library's names, by running its import backwards."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kiloword.interop.export.source import Exported, check_close, largest_difference
from kiloword.interop.export.words import write_readers
from kiloword.interop.state_dicts import translated


def inverted(theirs: Mapping[str, Tensor], ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Values for all of `theirs`, whose names and shapes count, from the weights of kiloword.

    Every element of theirs gets a number; the import moves the numbers to where the elements belong here.
    Raises: ValueError for a weight of theirs that has no source.
    """
    groups: dict[str, list[str]] = defaultdict(list)  # that the import joins; one by one few numbers are held at once
    for name in theirs:
        groups[re.sub(r"\b[qkv]_proj\b", "", name)].append(name)
    values: dict[str, Tensor] = {}
    for names in groups.values():
        shapes = [theirs[name].shape for name in names]
        sizes = [shape.numel() for shape in shapes]
        numbers = torch.split(torch.arange(sum(sizes)), sizes)
        flat = torch.full((sum(sizes),), torch.nan)
        state = {name: x.view(shape) for name, x, shape in zip(names, numbers, shapes, strict=True)}
        for name, places in translated(state, ours)[0].items():
            if places.numel() == ours[name].numel():
                flat[places.flatten()] = ours[name].detach().float().cpu().flatten()
        if flat.isnan().any():
            raise ValueError(f"the model has no weights for {', '.join(names)[:200]}, which the export needs.")
        values |= {n: x.reshape(s).clone() for n, x, s in zip(names, torch.split(flat, sizes), shapes, strict=True)}
    return values


def write_weights(source: Exported, folder: Path) -> list[str]:
    """weights.safetensors under kiloword's names, with tokenizer and preprocessing. Returns: lines to print."""
    state = {name: value.contiguous() for name, value in source.model.state_dict().items()}
    save_file(state, folder / "weights.safetensors", metadata={"format": "pt", "method": source.file.method})
    write_readers(source, folder)
    return [check_close("weights", largest_difference(state, load_file(folder / "weights.safetensors")))]
