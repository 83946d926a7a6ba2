"""CLIP and SigLIP as transformers saves them (`hf:FOLDER`), translated by way of open_clip's names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kiloword.config.recipes import Activation, ModelConfig
from kiloword.interop.folder import Imported
from kiloword.interop.hf_folder import check_strangers, image_processor, json_object, preprocessing, weight_files
from kiloword.interop.open_clip import import_as, read
from kiloword.interop.open_clip_config import translate

KINDS = ("clip", "siglip")
_LAYER = {
    "layer_norm1.": "ln_1.",
    "layer_norm2.": "ln_2.",
    "mlp.fc1.": "mlp.c_fc.",
    "mlp.fc2.": "mlp.c_proj.",
    "self_attn.out_proj.": "attn.out_proj.",
    "self_attn.in_proj_": "attn.in_proj_",
}
_TEXT = {
    "text_model.embeddings.token_embedding.weight": "token_embedding.weight",
    "text_model.embeddings.position_embedding.weight": "positional_embedding",
    "text_model.encoder.layers.": "transformer.resblocks.",
    "text_model.final_layer_norm.": "ln_final.",
}
_CLIP = _TEXT | {
    "vision_model.embeddings.class_embedding": "visual.class_embedding",
    "vision_model.embeddings.patch_embedding.weight": "visual.conv1.weight",
    "vision_model.embeddings.position_embedding.weight": "visual.positional_embedding",
    "vision_model.pre_layrnorm.": "visual.ln_pre.",
    "vision_model.encoder.layers.": "visual.transformer.resblocks.",
    "vision_model.post_layernorm.": "visual.ln_post.",
    "visual_projection.weight": "visual.proj",
    "text_projection.weight": "text_projection",
}
_SIGLIP = _TEXT | {
    "text_model.head.": "text_projection.",
    "vision_model.embeddings.patch_embedding.": "visual.trunk.patch_embed.proj.",
    "vision_model.embeddings.position_embedding.weight": "visual.trunk.pos_embed",
    "vision_model.encoder.layers.": "visual.trunk.blocks.",
    "vision_model.post_layernorm.": "visual.trunk.norm.",
    "vision_model.head.probe": "visual.trunk.attn_pool.latent",
    "vision_model.head.layernorm.": "visual.trunk.attn_pool.norm.",
    "vision_model.head.mlp.": "visual.trunk.attn_pool.mlp.",
    "vision_model.head.attention.out_proj.": "visual.trunk.attn_pool.proj.",
}
_TIMM = {"ln_": "norm", "mlp.c_fc": "mlp.fc1", "mlp.c_proj": "mlp.fc2", "attn.in_proj_": "attn.qkv."}
_TIMM |= {"attn.out_proj": "attn.proj"}


def import_folder(folder: Path) -> tuple[Imported, Path]:
    """A CLIP or SigLIP of transformers, and the file of its weights (the first of several).

    Raises: ValueError for another model, for missing or damaged files, and for weights of other shapes.
    """
    config = json_object(folder / "config.json")
    kind = config.get("model_type")
    if kind not in KINDS:
        raise ValueError(f"{folder} holds a {str(kind)[:60]!r} model: expected one of {' and '.join(KINDS)}.")
    check_strangers(folder)
    files = weight_files(folder)
    state = {name: value for file in files for name, value in read(file).items()}
    try:
        model = _config(config, folder, kind == "siglip")
        translated = dict(names_of_open_clip(state, kind == "siglip"))
    except (KeyError, TypeError, RuntimeError, ZeroDivisionError) as error:
        raise ValueError(f"{folder} does not hold a {kind} that kiloword's towers can be: {error}"[:300]) from error
    return import_as(model, f"{folder}'s config.json", translated), files[0]


def _config(config: Mapping[str, Any], folder: Path, siglip: bool) -> ModelConfig:
    """The configuration of the towers, by way of open_clip's; transformers omits values that are its defaults."""
    vision, text = ({**_DEFAULTS[siglip][n], **(config.get(f"{n}_config") or {})} for n in ("vision", "text"))
    act: dict[str, Activation] = {"quick_gelu": "quick_gelu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
    if vision["hidden_act"] not in act or text["hidden_act"] not in act:
        raise ValueError(f"{folder} has the activation {vision['hidden_act']!r}: expected one of {', '.join(act)}.")
    dim = vision["hidden_size"] if siglip else config.get("projection_dim", 512)
    raw = {
        "embed_dim": dim,
        "vision_cfg": _shared(vision)
        | {"image_size": vision["image_size"], "patch_size": vision["patch_size"]}
        | {"head_width": vision["hidden_size"] // vision["num_attention_heads"]},
        "text_cfg": _shared(text)
        | {"context_length": text["max_position_embeddings"]}
        | {"vocab_size": text["vocab_size"], "heads": text["num_attention_heads"], "no_causal_mask": siglip},
    }
    model = translate(str(folder), raw)
    size, shown = preprocessing(folder, image_processor(folder), clip=not siglip)
    if size != vision["image_size"]:
        raise ValueError(f"{folder} reads images of {size} pixels, but its model has {vision['image_size']}.")
    tower = replace(model.image, mlp=vision["intermediate_size"], activation=act[vision["hidden_act"]])
    words = replace(model.text, mlp=text["intermediate_size"], activation=act[text["hidden_act"]])
    head = model.head
    if siglip:
        tower = replace(tower, class_token=False, pre_norm=False, stem_bias=True)
        head = replace(head, image_pool="map", image_projection=False, text_projection_bias=True)
    return replace(model, image=tower, text=words, head=head, preprocess=shown)


def _shared(tower: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "width": tower["hidden_size"],
        "layers": tower["num_hidden_layers"],
        "norm_kwargs": {"eps": tower["layer_norm_eps"]},
    }


def _defaults(width: int, mlp: int, heads: int, act: str, eps: float, **more: int) -> dict[str, Any]:
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "hidden_act", "layer_norm_eps")
    return dict(zip(names, (width, mlp, heads, act, eps), strict=True)) | {"num_hidden_layers": 12} | more


_DEFAULTS = {
    False: {
        "vision": _defaults(768, 3072, 12, "quick_gelu", 1e-5, image_size=224, patch_size=32),
        "text": _defaults(512, 2048, 8, "quick_gelu", 1e-5, vocab_size=49408, max_position_embeddings=77),
    },
    True: {
        "vision": _defaults(768, 3072, 12, "gelu_pytorch_tanh", 1e-6, image_size=224, patch_size=16),
        "text": _defaults(768, 3072, 12, "gelu_pytorch_tanh", 1e-6, vocab_size=32000, max_position_embeddings=64),
    },
}


def _joined(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Queries, keys and values of each layer in one; the keys of SigLIP's pooling apart from its queries."""
    joined = dict(state)
    for name in [name for name in state if ".self_attn.q_proj." in name]:
        parts = [name.replace("q_proj", f"{part}_proj") for part in "qkv"]
        if all(part in joined for part in parts):
            joined[name.replace("q_proj.", "in_proj_")] = torch.cat([joined.pop(part) for part in parts])
    for kind in ("weight", "bias"):
        if (whole := joined.pop(f"vision_model.head.attention.in_proj_{kind}", None)) is not None:
            width = len(whole) // 3
            joined[f"visual.trunk.attn_pool.q.{kind}"] = whole[:width]
            joined[f"visual.trunk.attn_pool.kv.{kind}"] = whole[width:]
    return joined


def names_of_open_clip(state: Mapping[str, Tensor], siglip: bool) -> Iterator[tuple[str, Tensor]]:
    """Weights of a CLIPModel or SiglipModel under open_clip's names, in its shapes."""
    return _translated(_joined(state), _SIGLIP if siglip else _CLIP)


def _translated(state: Mapping[str, Tensor], names: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
    """open_clip's names and shapes; names that it does not have stay, and are reported as unused."""
    for name, value in state.items():
        if name.endswith("position_ids"):
            continue
        theirs = next((names[start] + name.removeprefix(start) for start in names if name.startswith(start)), name)
        for ours, part in _LAYER.items():
            theirs = re.sub(rf"(blocks\.\d+\.){re.escape(ours)}", rf"\g<1>{part}", theirs)
        if theirs.startswith("visual.trunk.blocks."):
            for clip, timm in _TIMM.items():
                theirs = theirs.replace(f".{clip}", f".{timm}")
        if theirs in ("visual.proj", "text_projection"):
            value = value.T.contiguous()
        yield theirs, value[None] if theirs == "visual.trunk.pos_embed" else value
