"""A folder that the photo server Immich reads as one of open_clip's models, as its public code reads it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kiloword.files import write_json
from kiloword.interop.export.graphs import graphs, save_onnx
from kiloword.interop.export.source import Exported, check_close
from kiloword.interop.export.words import padding_of, write_tokenizer


class Padded(nn.Module):
    """text int32 [T, context], padded, to vectors [T, D]: what follows the end of a text is not seen."""

    def __init__(self, graph: nn.Module, source: Exported) -> None:
        super().__init__()
        self.inner, text = graph, source.config.text
        self.end, self.more, self.every = source.tokenizer.roles.end, len(text.extra_tokens), text.pad_to_context

    def forward(self, text: Tensor) -> tuple[Tensor, ...]:
        ids = text.long()
        ends = F.pad((ids == self.end).long().cumsum(1), (1 + self.more, 0))[:, : ids.shape[1]]
        out: tuple[Tensor, ...] = self.inner(ids, torch.ones_like(ids) if self.every else (ends == 0).long())
        return out[:1]


def write(source: Exported, folder: Path) -> list[str]:
    """textual/ and visual/, each with model.onnx, and config.json. Returns: lines to print.

    Raises: ValueError as `graphs`, and for images that are resized to another side than they are cropped to.
    """
    shown, size, context = source.config.preprocess, source.config.image.size, source.config.text.context
    if isinstance(shown.resize, int):
        raise ValueError(
            f"Immich resizes photos to the {size} pixels that it crops, this model to {shown.resize}: export to onnx."
        )
    image, text = graphs(source)
    ids, seen = text.inputs.values()
    padded = torch.full((len(ids), context), padding_of(source), dtype=torch.int32)
    padded[:, : ids.shape[1]] = torch.where(seen > 0, ids, padding_of(source))
    words = replace(
        text,
        module=Padded(text.module, source).eval(),
        inputs={"text": padded},
        varies={"text": {0: text.varies["input_ids"][0]}},
    )
    lines = []
    for name, graph, inputs in (("visual", image, ["image"]), ("textual", words, ["text"])):
        (folder / name).mkdir()
        one = replace(graph, outputs=graph.outputs[:1])
        lines.append(check_close(f"{name}/model.onnx", save_onnx(one, folder / name / "model.onnx", inputs)))
    write_tokenizer(source, folder / "textual")
    how = {"tokenizer_kwargs": {"clean": "canonicalize"}} if source.tokenizer.clean == "siglip" else {}
    write_json(
        folder / "config.json", {"embed_dim": source.config.head.dim, "text_cfg": {"context_length": context, **how}}
    )
    preprocess = {"size": size, "mean": list(shown.mean), "std": list(shown.std), "interpolation": "bicubic"}
    write_json(folder / "visual" / "preprocess_cfg.json", preprocess | {"resize_mode": shown.resize})
    return lines
