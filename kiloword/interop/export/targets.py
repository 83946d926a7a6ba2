"""The targets of `kiloword export`, an entry each. No torch here, so that help is instant."""

from __future__ import annotations

from typing import NamedTuple


class Target(NamedTuple):
    """A library or a format."""

    writer: str  # MODULE:FUNCTION of this folder; the function takes the model and a folder, returns lines to print
    load: str  # Python for the card
    packages: str = ""  # that the writer imports


TARGETS = {
    "open_clip": Target(
        "to_open_clip:write",
        """import open_clip  # pip install open_clip_torch transformers
model, _, preprocess = open_clip.create_model_and_transforms("local-dir:FOLDER")
tokenizer = open_clip.get_tokenizer("local-dir:FOLDER")""",
        "open_clip_torch transformers",
    ),
    "transformers": Target(
        "to_transformers:write",
        """from transformers import AutoModel, AutoTokenizer
model = AutoModel.from_pretrained("FOLDER")
tokenizer = AutoTokenizer.from_pretrained("FOLDER")""",
    ),
    "onnx": Target(
        "graphs:write_onnx",
        """import onnxruntime
images = onnxruntime.InferenceSession("FOLDER/image.onnx")
features = images.run(["vec"], {"pixel_values": pixels})  # float32 [I, 3, H, W], normalised
texts = onnxruntime.InferenceSession("FOLDER/text.onnx")  # input_ids, attention_mask: int64 [T, L]""",
        "onnx onnxruntime onnxscript",
    ),
    "sentence-transformers": Target(
        "to_transformers:write_sentence",
        """from sentence_transformers import SentenceTransformer  # pip install sentence-transformers
features = SentenceTransformer("FOLDER").encode(["a dog"])""",
        "sentence-transformers",
    ),
    "torch": Target(
        "graphs:write_torch",
        """import torch
images = torch.export.load("FOLDER/image.pt2").module()
features, *_ = images(pixel_values=pixels)  # float32 [I, 3, H, W], normalised""",
    ),
    "immich": Target(
        "to_immich:write",
        "# copy FOLDER to clip/NAME of Immich's model cache, NAME being one of its list, as ViT-B-32__openai",
        "onnx onnxruntime onnxscript",
    ),
    "safetensors": Target(
        "weights:write_weights",
        """from safetensors.torch import load_file
weights = load_file("FOLDER/weights.safetensors")""",
    ),
}
