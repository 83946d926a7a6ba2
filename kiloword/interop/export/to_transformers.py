"""A folder that transformers loads as CLIPModel or SiglipModel, and one that SentenceTransformer loads."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from kiloword.config.recipes import ImageConfig, TextConfig
from kiloword.errors import needs
from kiloword.files import write_json
from kiloword.interop.export.source import TEXTS, Exported, check_close, check_dual, is_siglip, largest_difference
from kiloword.interop.export.weights import inverted
from kiloword.interop.export.words import padding_of, write_preprocessor, write_tokenizer
from kiloword.interop.hf_clip import names_of_open_clip
from kiloword.interop.open_clip import place
from kiloword.model.trunks.libraries import quiet, transformers

ACTIVATIONS = {"quick_gelu": "quick_gelu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}
CROPPED = (
    "Photos: transformers 5 resizes tensors (kiloword, like its backend='pil', images), and where a margin of odd size "
    "is cut off, its crop may begin one pixel earlier: features of such photos differ, those of the same pixels do not."
)
OLD_END = 2  # CLIPModel takes a model with this end token for one with the largest id at the end


def write(source: Exported, folder: Path) -> list[str]:
    """Write config, weights, tokenizer and preprocessing, and compare. Returns: lines to print."""
    check_dual(source, "transformers")
    library = transformers()
    siglip = is_siglip(source.config)
    if source.tokenizer.roles.end == OLD_END and not siglip:
        raise ValueError(
            "transformers cannot express this model: its end token has the id 2, which CLIPModel misreads."
        )
    kind = library.SiglipModel if siglip else library.CLIPModel
    config = _config(source, library, siglip)
    with quiet(library):
        with torch.device("meta"):
            theirs = {name: value for name, value in kind(config).state_dict().items() if "position_ids" not in name}

        def forward(state: dict[str, Tensor]) -> Iterable[tuple[str, Tensor]]:
            for name, value in names_of_open_clip(state, siglip):
                ours, reshaped = place(name, value)
                if ours is not None:
                    yield ours, reshaped

        state = inverted(theirs, forward, source.model.state_dict(), group=_joined)
        model = kind(config)
        model.load_state_dict(state, strict=False)
        model.save_pretrained(folder)
    write_tokenizer(source, folder)
    write_preprocessor(source, folder)
    if source.config.preprocess.resize != "squash":
        source.notes.append(CROPPED)
    write_json(folder / "processor_config.json", {"processor_class": f"{'Siglip' if siglip else 'CLIP'}Processor"})
    if source.model.head.bias is not None and not siglip:
        source.notes.append(
            f"Bias: CLIPModel has none; the source adds {float(source.model.head.bias.detach()):.4f} to its logits, "
            "for sigmoid(logit). Features, cosines and rankings are the same."
        )
    return _compared(source, folder, library, kind)


def _joined(name: str) -> str:
    return re.sub(r"\b[qkv]_proj\b", "qkv", name)


def _config(source: Exported, library: Any, siglip: bool) -> Any:
    config, roles = source.config, source.tokenizer.roles
    text = _tower(config.text) | {"vocab_size": config.text.vocab, "max_position_embeddings": config.text.context}
    text |= {"bos_token_id": roles.start, "eos_token_id": roles.end, "pad_token_id": padding_of(source)}
    image = _tower(config.image) | {"image_size": config.image.size, "patch_size": config.image.patch}
    if siglip:
        text["projection_size"] = config.head.dim
        return library.SiglipConfig(text_config=text, vision_config=image)
    for tower in (text, image):
        tower["projection_dim"] = config.head.dim
    return library.CLIPConfig(text_config=text, vision_config=image, projection_dim=config.head.dim)


def _tower(tower: ImageConfig | TextConfig) -> dict[str, Any]:
    return {
        "hidden_size": tower.width,
        "intermediate_size": tower.mlp,
        "num_hidden_layers": tower.depth,
        "num_attention_heads": tower.heads,
        "hidden_act": ACTIVATIONS[tower.activation],
        "layer_norm_eps": tower.norm_eps,
    }


def _compared(source: Exported, folder: Path, library: Any, kind: Any) -> list[str]:
    """The folder as transformers loads it, against the source: the same pixels, and texts from strings."""
    with quiet(library):
        model = kind.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, use_safetensors=True
        ).eval()
        tokenizer = library.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        padding = "max_length" if source.config.text.pad_to_context else True
        words = tokenizer(TEXTS, padding=padding, truncation=True, return_tensors="pt")
    words = {name: words[name] for name in ("input_ids", "attention_mask") if name in words}
    if is_siglip(source.config):
        words.pop("attention_mask", None)  # its tower sees pads
    with torch.no_grad():
        images = _pooled(model.get_image_features(pixel_values=source.normalised()))
        texts = _pooled(model.get_text_features(**words))
    return [
        check_close("image features", largest_difference(source.images(), {"vec": images})),
        check_close("text features, from strings", largest_difference(source.texts(), {"vec": texts})),
    ]


def _pooled(output: Any) -> Tensor:
    """Features of norm 1; transformers 5 returns them as `pooler_output`."""
    return F.normalize(output if isinstance(output, Tensor) else output.pooler_output, dim=-1)


def write_sentence(source: Exported, folder: Path) -> list[str]:
    """A folder that SentenceTransformer loads; `encode` takes strings and Pillow images. Returns: lines to print."""
    check_dual(source, "sentence-transformers")
    if is_siglip(source.config):
        raise ValueError(
            "sentence-transformers cannot express this model: it pads texts to the longest of a batch, and SigLIP's "
            "text tower sees pads. Export it to transformers."
        )
    if find_spec("sentence_transformers") is None:
        raise ValueError(needs("this export", "sentence-transformers", "sentence-transformers"))
    transformers()
    try:
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer.modules import Normalize, Transformer
    except ImportError as error:
        package = error.name or "sentence-transformers"
        raise ValueError(needs("this export", package, "sentence-transformers")) from error
    inner = folder / "transformers"
    inner.mkdir()
    lines = write(source, inner)
    with quiet(transformers()):
        modules = [Transformer(str(inner)), Normalize()]
        SentenceTransformer(modules=modules, device="cpu").save(str(folder), create_model_card=False)
    for path in sorted(inner.iterdir()):
        path.unlink()
    inner.rmdir()
    with quiet(transformers()):
        model = SentenceTransformer(str(folder), device="cpu", local_files_only=True, trust_remote_code=False)
    texts = torch.as_tensor(model.encode(TEXTS))
    lines.append(check_close("encode of texts", largest_difference(source.texts(), {"vec": texts})))
    photos = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in source.pixels()]
    images = torch.as_tensor(model.encode(photos))
    lines.append(check_close("encode of images", largest_difference(source.images(), {"vec": images})))
    return lines
