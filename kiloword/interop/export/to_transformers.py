"""A folder that transformers loads as CLIPModel or SiglipModel, and one that SentenceTransformer loads."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from kiloword.config.recipes import ImageConfig, TextConfig
from kiloword.files import write_json
from kiloword.interop.export.source import TEXTS, Exported, check_close, largest_difference
from kiloword.interop.export.weights import inverted
from kiloword.interop.export.words import padding_of, write_readers
from kiloword.interop.hf_clip import FIELDS, SIZES
from kiloword.interop.hf_folder import opened
from kiloword.model.trunks.bert import ACTIVATIONS
from kiloword.model.trunks.libraries import quiet, torchvision_lines, transformers

CROPPED = (
    "Photos: transformers 5 resizes tensors, not images, and its crop may begin one pixel earlier; "
    "features of the same pixels are equal."
)


def write(source: Exported, folder: Path) -> list[str]:
    """Write config, weights, tokenizer and preprocessing, and compare. Returns: lines to print."""
    source.check_dual()
    library = transformers()
    kind, config = library.SiglipModel if source.siglip else library.CLIPModel, _config(source, library)
    with quiet(library):
        with torch.device("meta"):
            theirs = {name: value for name, value in kind(config).state_dict().items() if "position_ids" not in name}
        model = kind(config)
        model.load_state_dict(inverted(theirs, source.model.state_dict()), strict=False)
        model.save_pretrained(folder)
    write_readers(source, folder)
    if source.config.preprocess.resize != "squash":
        source.notes.append(CROPPED)
    write_json(
        folder / "processor_config.json", {"processor_class": f"{'Siglip' if source.siglip else 'CLIP'}Processor"}
    )
    if source.model.head.bias is not None and not source.siglip:
        source.notes.append(
            f"Bias: CLIPModel has none; the source adds {float(source.model.head.bias.detach()):.4f} to its logits, "
            "for sigmoid(logit). Features, cosines and rankings are the same."
        )
    model = opened(kind, folder, use_safetensors=True).eval()
    padding = "max_length" if source.config.text.pad_to_context else True
    with quiet(library):
        words = opened(library.AutoTokenizer, folder)(TEXTS, padding=padding, truncation=True, return_tensors="pt")
    names = ("input_ids",) if source.siglip else ("input_ids", "attention_mask")  # SigLIP's tower sees pads
    with torch.no_grad():
        images = model.get_image_features(pixel_values=source.normalised())
        texts = model.get_text_features(**{name: words[name] for name in names})
    vectors = (x if isinstance(x, Tensor) else x.pooler_output for x in (images, texts))
    return source.compared(*vectors) + torchvision_lines()


def _config(source: Exported, library: Any) -> Any:
    roles, dim = source.tokenizer.roles, source.config.head.dim
    text = _tower(source.config.text) | {"bos_token_id": roles.start, "eos_token_id": roles.end}
    text |= {"pad_token_id": padding_of(source)}
    image = _tower(source.config.image)
    if source.siglip:
        return library.SiglipConfig(text_config=text | {"projection_size": dim}, vision_config=image)
    text["projection_dim"] = image["projection_dim"] = dim
    return library.CLIPConfig(text_config=text, vision_config=image, projection_dim=dim)


def _tower(tower: ImageConfig | TextConfig) -> dict[str, Any]:
    activation = next(theirs for theirs, ours in ACTIVATIONS.items() if ours == tower.activation)
    said = {theirs: getattr(tower, ours) for theirs, ours in (FIELDS | SIZES).items() if hasattr(tower, ours)}
    return said | {"hidden_act": activation}


def write_sentence(source: Exported, folder: Path) -> list[str]:
    """A folder that SentenceTransformer loads; `encode` takes strings and Pillow images. Returns: lines to print."""
    source.check_dual()
    if source.siglip:
        raise ValueError(
            "sentence-transformers cannot express this model: it pads texts to the longest of a batch, and SigLIP's "
            "text tower sees pads. Export it to transformers."
        )
    library, inner = transformers(), folder / "transformers"
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Transformer

    inner.mkdir()
    lines = write(source, inner)
    with quiet(library):
        modules = [Transformer(str(inner)), Normalize()]
        SentenceTransformer(modules=modules, device="cpu").save(str(folder), create_model_card=False)
        shutil.rmtree(inner)
        model = SentenceTransformer(str(folder), device="cpu", local_files_only=True, trust_remote_code=False)
    photos = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in source.pixels]
    pairs = ("encode of texts", source.texts, TEXTS), ("encode of images", source.images, photos)
    for what, expected, inputs in pairs:
        found = {"vec": torch.as_tensor(model.encode(inputs))}
        lines.append(check_close(what, largest_difference(expected, found)))
    return lines
