"""`kiloword export`: write, compare, name what is omitted, and only then put the folder in its place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kiloword.files import new_folder, write_atomic
from kiloword.interop.export import graphs, to_immich, to_open_clip, to_transformers
from kiloword.interop.export.source import Exported, Precision
from kiloword.interop.export.weights import write_weights
from kiloword.model.trunks.libraries import torchvision_lines
from kiloword.models.card import CARD, card
from kiloword.models.trust import NONE, Trust
from kiloword.terminal import say

WRITERS: dict[str, Callable[[Exported, Path], list[str]]] = {
    "open_clip": to_open_clip.write,
    "transformers": to_transformers.write,
    "onnx": graphs.write_onnx,
    "sentence-transformers": to_transformers.write_sentence,
    "torch": graphs.write_torch,
    "immich": to_immich.write,
    "safetensors": write_weights,
}
PHOTOS = (
    "Photos: kiloword turns them by their EXIF orientation, blends transparency with white, divides 16 bits by 257 and "
    "makes palettes and 1 bit RGB, all before it resizes. Give other libraries upright RGB of 8 bits."
)
LOAD = {  # lines of Python for the card
    "open_clip": (
        "import open_clip  # pip install open_clip_torch transformers",
        'model, _, preprocess = open_clip.create_model_and_transforms("local-dir:FOLDER")',
        'tokenizer = open_clip.get_tokenizer("local-dir:FOLDER")',
    ),
    "transformers": (
        "from transformers import AutoModel, AutoTokenizer",
        'model = AutoModel.from_pretrained("FOLDER")',
        'tokenizer = AutoTokenizer.from_pretrained("FOLDER")',
    ),
    "onnx": (
        "import onnxruntime",
        'images = onnxruntime.InferenceSession("FOLDER/image.onnx")',
        'features = images.run(["vec"], {"pixel_values": pixels})  # float32 [I, 3, H, W], normalised',
        'texts = onnxruntime.InferenceSession("FOLDER/text.onnx")  # input_ids, attention_mask: int64 [T, L]',
    ),
    "sentence-transformers": (
        "from sentence_transformers import SentenceTransformer  # pip install sentence-transformers",
        'features = SentenceTransformer("FOLDER").encode(["a dog"])',
    ),
    "torch": (
        "import torch",
        'images = torch.export.load("FOLDER/image.pt2").module()',
        "features, *_ = images(pixel_values=pixels)  # float32 [I, 3, H, W], normalised",
    ),
    "immich": ("# copy FOLDER to clip/NAME of Immich's model cache, NAME being one of its list, as ViT-B-32__openai",),
    "safetensors": ("from safetensors.torch import load_file", 'weights = load_file("FOLDER/weights.safetensors")'),
}


def run(target: str, name: str, out: Path, trust: Trust = NONE, precision: Precision = "fp32") -> None:
    """Export a model.

    Args: name: a model folder, or another library's model by name; precision: of the weights, for onnx alone.
    Raises: ValueError for an `out` that is not empty, a model that the target cannot express, a target that is not
    installed, or features that differ by more than LIMIT; nothing is written then.
    """
    if precision != "fp32" and target != "onnx":
        raise ValueError(f"--precision {precision} is for onnx; {target} gets the weights as they are: omit it.")
    with new_folder(out, "exporting to") as work:
        source = Exported.of(name, trust, precision)
        source.notes.append(PHOTOS)
        lines = WRITERS[target](source, work)
        write_atomic(work / CARD, card(source.file, source.folder, LOAD[target], source.notes, target).encode())
        for path in filter(Path.is_file, work.rglob("*")):
            path.chmod((work / CARD).stat().st_mode)  # safetensors lets the owner alone read its files
    fits = torchvision_lines() if target in ("open_clip", "transformers", "sentence-transformers") else []
    say(*lines, *source.notes, f"written: {out}", *fits)
