"""The towers as graphs: `torch.export` programs and ONNX files, with batches of any size.

Inputs: pixel_values float [I, 3, H, W], resized, cropped and normalised; input_ids and attention_mask int64 [T, L],
padded at the right. Outputs: vec [N, D] of norm 1; of Gaussian heads log_var [N, D], too.
"""

from __future__ import annotations

import copy
import io
import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kiloword.files import write_atomic
from kiloword.interop.export.source import TEXTS, Exported, Precision, check_close, largest_difference
from kiloword.interop.export.words import write_readers
from kiloword.model.attention import Packing
from kiloword.model.heads import Single
from kiloword.model.model import Model
from kiloword.model.pooling import TextPool
from kiloword.types import Features, Texts

OUTPUTS = ("vec", "log_var")
BATCHES = (1, 3, 5)  # compared
Run = Callable[[dict[str, Tensor]], Sequence[Any]]
"""Inputs by name -> outputs in order."""


@dataclass(frozen=True)
class Padded(Packing):
    """Texts that are padded already, x [T, L, ...]: attention excludes what is not `valid`."""

    @property
    def full(self) -> bool:
        """False: the mask is always read."""
        return False

    def pad(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """x as it is."""
        return x

    def unpad(self, x: Tensor) -> Tensor:
        """x as it is."""
        return x


class PaddedPool(nn.Module):
    """The text pool of a head on padded tokens: [T * L, W] -> [T, W]."""

    def __init__(self, pool: TextPool) -> None:
        super().__init__()
        self.pool = pool

    def forward(self, tokens: Tensor, texts: Texts) -> Tensor:
        """Pool text n from rows n * L to starts[n + 1]; those after them are padding. texts.ids are [T, L]."""
        if self.pool.kind == "last":
            last: Tensor = self.pool(tokens, texts)
            return last
        count, longest = texts.ids.shape
        place = torch.arange(longest, device=tokens.device)
        rows = torch.arange(count, device=tokens.device)[:, None] * longest + place  # [T, L]
        padded = tokens[rows]  # a view would limit the sizes that torch.export accepts
        lengths = texts.starts[1:] - rows[:, 0] - self.pool.extra
        words = (place < lengths[:, None])[..., None]
        if self.pool.kind == "mean":
            return (padded * words).sum(1) / lengths[:, None]
        return padded.masked_fill(~words, -torch.inf).amax(1)


class ImageGraph(nn.Module):
    """pixel_values [I, 3, H, W] -> outputs [I, D]."""

    def __init__(self, model: Model, outputs: tuple[str, ...]) -> None:
        super().__init__()
        self.tower, self.head, self.outputs = model.image_tower, model.head, outputs

    def forward(self, pixel_values: Tensor) -> tuple[Tensor, ...]:
        features = self.head.image(self.tower(pixel_values))
        return tuple(features[name] for name in self.outputs)


class TextGraph(nn.Module):
    """input_ids, attention_mask [T, L] -> outputs [T, D]."""

    def __init__(self, model: Model, outputs: tuple[str, ...]) -> None:
        super().__init__()
        self.tower, self.head, self.outputs = model.text_tower, copy.deepcopy(model.head), outputs
        pools = [(name, part) for name, part in self.head.named_modules() if isinstance(part, TextPool)]
        for name, pool in pools:
            self.head.set_submodule(name, PaddedPool(pool))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        tower, (count, longest) = self.tower, input_ids.shape
        trunk: Any = tower.trunk
        place = torch.arange(longest, device=input_ids.device)
        packing = Padded(input_ids, 0, input_ids, place, input_ids, attention_mask > 0)
        # as if packed, with gaps: heads read tokens by their place from the end
        ends = torch.arange(count, device=input_ids.device) * longest + attention_mask.sum(1)
        texts = Texts(input_ids, torch.cat([ends[:1] * 0, ends]), 0)
        if tower.config.trunk.whole:
            x = trunk.vectors(input_ids, attention_mask)[:, None].expand(-1, longest, -1)
        else:
            words = F.embedding(input_ids, tower.tokens) if trunk is None else trunk.tokens(texts, packing)
            x = (words if tower.stem is None else tower.stem(words)) + tower.positions[:longest]
            for block in tower.blocks:
                x = block(x, packing, tower.config.causal)
            x = tower.norm(x)
        features = self.head.text(x.flatten(0, 1), texts)
        return tuple(features[name] for name in self.outputs)


@dataclass(frozen=True)
class Graph:
    """A module, example inputs by name, the sizes that vary, and the features to expect."""

    name: str
    module: nn.Module
    inputs: dict[str, Tensor]
    varies: dict[str, dict[int, Any]]
    outputs: tuple[str, ...]
    expected: Features

    def difference(self, run: Run) -> float:
        """Largest difference from the source at batches of 1, 3 and 5."""
        found = []
        for n in BATCHES:
            out = map(torch.as_tensor, run({name: value[:n] for name, value in self.inputs.items()}))
            expected = {name: self.expected[name][:n] for name in self.outputs}
            found.append(largest_difference(expected, dict(zip(self.outputs, out, strict=True))))
        return float(torch.tensor(found).max())


def graphs(source: Exported) -> list[Graph]:
    """The image and the text graph of a model. Raises: ValueError for a model that no graph expresses."""
    source.check_graphs()
    text, images, texts = source.config.text, source.images, source.texts
    outputs = tuple(name for name in OUTPUTS if name in images and name in texts)
    if type(source.model.head.pooling) is not Single:
        source.notes.append(
            f"Scores: {type(source.model.head.pooling).__name__} computes them; the graphs give one vector for each "
            "side (`vec`), whose cosine may differ from the score."
        )
    if "log_var" in outputs:
        source.notes.append("Uncertainty: the second output, log_var, is the logarithm of the variances.")
    if source.model.more:
        source.notes.append(f"Omitted: {', '.join(source.model.more)}; the graphs hold the image and the text tower.")
    batch, length = torch.export.Dim("batch", min=1), torch.export.Dim("tokens", min=3, max=text.context)
    fixed: dict[int, Any] = {0: batch}
    ids = fixed if text.pad_to_context else {0: batch, 1: length}
    pixels, words = {"pixel_values": source.normalised()}, padded_ids(source)
    image = ImageGraph(source.model, outputs).eval()
    return [
        Graph("image", image, pixels, {"pixel_values": fixed}, outputs, images),
        Graph("text", TextGraph(source.model, outputs).eval(), words, dict.fromkeys(words, ids), outputs, texts),
    ]


def padded_ids(source: Exported) -> dict[str, Tensor]:
    """input_ids and attention_mask [T, L] of TEXTS; towers that see pads see all."""
    texts = source.tokenizer.encode(TEXTS, source.config.text)
    lengths = texts.starts.diff()
    mask = torch.arange(texts.longest) < lengths[:, None]
    ids = torch.full(mask.shape, source.tokenizer.roles.pad).masked_scatter(mask, texts.ids)
    return {"input_ids": ids, "attention_mask": mask.long()}


def write_torch(source: Exported, folder: Path) -> list[str]:
    """image.pt2 and text.pt2 of torch.export."""
    lines = []
    for graph in graphs(source):
        path, buffer = folder / f"{graph.name}.pt2", io.BytesIO()  # torch aborts where a disk is full
        with torch.no_grad():
            torch.export.save(torch.export.export(graph.module, (), graph.inputs, dynamic_shapes=graph.varies), buffer)
            write_atomic(path, buffer.getvalue())
            loaded = torch.export.load(path).module()
            lines.append(check_close(f"{path.name} at batches 1, 3, 5", graph.difference(lambda x: loaded(**x))))  # noqa: B023
    write_readers(source, folder)
    return lines


def write_onnx(source: Exported, folder: Path) -> list[str]:
    """image.onnx and text.onnx, run by onnxruntime."""
    lines = []
    for graph in graphs(source):
        path = folder / f"{graph.name}.onnx"
        lines.append(check_close(f"{path.name} at batches 1, 3, 5", save_onnx(graph, path)))
        if source.precision != "fp32":
            _reduce(path, source.precision)
            least = (
                f"{path.name} at batches 1, 3, 5, {source.precision}: largest difference {run_onnx(graph, path):.2g}"
            )
            source.notes.append(f"Precision: {least}.")
    write_readers(source, folder)
    return lines


def save_onnx(graph: Graph, path: Path, names: Sequence[str] = ()) -> float:
    """Write a graph as ONNX, weights beside it where a file cannot hold them. Returns: its difference.

    Args: names: of inputs.
    """
    import onnxscript  # noqa: F401

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of names of axes, and of its own deprecations
        torch.onnx.export(
            graph.module,
            (),
            str(path),
            kwargs=graph.inputs,
            input_names=list(names or graph.inputs),
            output_names=list(graph.outputs),
            dynamic_shapes=graph.varies,
            dynamo=True,
            verbose=False,
            external_data=sum(p.nbytes for p in graph.module.parameters()) > 2e9,  # bytes that a file holds
        )
    return run_onnx(graph, path)


def run_onnx(graph: Graph, path: Path) -> float:
    """The difference of an ONNX file from the source, by onnxruntime."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]
    return graph.difference(
        lambda inputs: session.run(None, dict(zip(names, (x.numpy() for x in inputs.values()), strict=True)))
    )


def _reduce(path: Path, precision: Precision) -> None:
    """Put a graph with fp16 weights and arithmetic, or with int8 matrices, in the place of one in fp32."""
    import onnx
    from onnxruntime.quantization import quantize_dynamic
    from onnxruntime.transformers.float16 import convert_float_to_float16

    less = path.with_suffix(".less")
    logging.disable(logging.WARNING)  # advice of onnxruntime on shapes, which are known here
    try:
        if precision == "int8":
            quantize_dynamic(str(path), str(less))
        else:
            onnx.save(convert_float_to_float16(onnx.load(str(path)), keep_io_types=True), str(less))
    finally:
        logging.disable(logging.NOTSET)
    path.with_name(f"{path.name}.data").unlink(missing_ok=True)
    less.replace(path)
