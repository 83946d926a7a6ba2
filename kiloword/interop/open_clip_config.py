"""Translation of open_clip's model configurations: CLIP's and SigLIP's vision transformers, and CoCa."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kiloword.config.recipes import Activation, HeadConfig, ImageConfig, ModelConfig, Preprocess, TextConfig
from kiloword.interop import open_clip_coca
from kiloword.interop.compat import torchvision_ready

_TEXT_KEYS = {
    *("context_length", "vocab_size", "width", "heads", "layers", "mlp_ratio", "no_causal_mask", "proj_bias"),
    *("pool_type", "norm_kwargs", "act_kwargs", "hf_tokenizer_name", "tokenizer_kwargs", "tokenizer_mode"),
}
_IMAGE_KEYS = {
    *("image_size", "layers", "width", "head_width", "patch_size", "mlp_ratio", "norm_kwargs", "act_kwargs"),
    *("timm_model_name", "timm_model_pretrained", "timm_pool", "timm_proj"),
}


class Unlike(ValueError):
    """A model of open_clip that kiloword's towers do not support."""


def model_config(name: str) -> ModelConfig:
    """The configuration of open_clip's model `name`.

    Raises: ValueError when open_clip is not installed or does not know the name; Unlike for unsupported models.
    """
    return translate(name, _raw_config(name))


def translate(name: str, raw: Mapping[str, Any]) -> ModelConfig:
    """Translate a configuration in open_clip's JSON format. Raises: Unlike as `model_config`."""
    vision, text, coca = raw["vision_cfg"], raw["text_cfg"], "multimodal_cfg" in raw
    pools = {"argmax": "last", "eos": "last", "last": "last"}
    image_keys = _IMAGE_KEYS | open_clip_coca.IMAGE_KEYS if coca else _IMAGE_KEYS
    text_keys = _TEXT_KEYS | open_clip_coca.TEXT_KEYS if coca else _TEXT_KEYS
    foreign = [] if "timm_model_name" in vision or vision.get("patch_size") else ["no patch size"]
    foreign += [k for k in vision if k not in image_keys] + [k for k in text if k not in text_keys]
    foreign += open_clip_coca.unlike(raw) if coca else []
    if foreign or text.get("pool_type", "argmax") not in pools:
        raise Unlike(
            f"open_clip's {name} is built differently from our towers ({', '.join(foreign) or 'text pool'}); "
            "CLIP's and SigLIP's vision transformers can be imported, and CoCa with an attentional pool"
        )
    activation: Activation = "quick_gelu" if raw.get("quick_gelu") else "gelu"
    siglip = "timm_model_name" in vision
    head = HeadConfig(
        dim=raw["embed_dim"],
        image_pool="map" if siglip else "cls",
        image_projection=not siglip,
        text_projection_bias=text.get("proj_bias", False),
    )
    half = (0.5, 0.5, 0.5)
    config = ModelConfig(
        image=_timm_image(name, vision) if siglip else _clip_image(vision, activation),
        text=_text(text, activation),
        head=head,
        preprocess=Preprocess(mean=half, std=half, resize="squash") if siglip else Preprocess(),
    )
    return open_clip_coca.shaped(config, raw) if coca else config


def _raw_config(name: str) -> dict[str, Any]:
    torchvision_ready()
    try:
        import open_clip
    except ImportError as error:
        raise ValueError("open_clip is not installed; pip install 'kiloword[openclip]'") from error
    raw: dict[str, Any] | None = open_clip.get_model_config(name) if name in open_clip.list_models() else None
    if raw is None:
        raise ValueError(f"open_clip knows no model {name!r}; its names are those of open_clip.list_models()")
    return raw


def _activation(config: Mapping[str, Any], activation: Activation) -> Activation:
    return "gelu_tanh" if (config.get("act_kwargs") or {}).get("approximate") == "tanh" else activation


def _eps(config: Mapping[str, Any]) -> float:
    return float((config.get("norm_kwargs") or {}).get("eps", 1e-5))


def _clip_image(vision: Mapping[str, Any], activation: Activation) -> ImageConfig:
    width = vision["width"]
    return ImageConfig(
        size=vision["image_size"],
        patch=vision["patch_size"],
        width=width,
        depth=vision["layers"],
        heads=width // vision.get("head_width", 64),
        mlp=int(width * vision.get("mlp_ratio", 4.0)),
        activation=_activation(vision, activation),
        norm_eps=_eps(vision),
    )


def _timm_image(name: str, vision: Mapping[str, Any]) -> ImageConfig:
    import timm

    with torch.device("meta"):
        trunk = timm.create_model(vision["timm_model_name"], num_classes=0)
    if getattr(trunk, "attn_pool", None) is None or trunk.cls_token is not None:
        raise Unlike(f"open_clip's {name} has timm's {vision['timm_model_name']}; of timm's towers, SigLIP's can")
    first = trunk.blocks[0]
    approximate = getattr(first.mlp.act, "approximate", "none")
    if type(first.mlp.act).__name__ == "GELUTanh":
        approximate = "tanh"
    return ImageConfig(
        size=vision["image_size"],
        patch=trunk.patch_embed.patch_size[0],
        width=trunk.embed_dim,
        depth=len(trunk.blocks),
        heads=first.attn.num_heads,
        mlp=first.mlp.fc1.out_features,
        stem_bias=trunk.patch_embed.proj.bias is not None,
        class_token=False,
        pre_norm=False,
        activation="gelu_tanh" if approximate == "tanh" else "gelu",
        norm_eps=first.norm1.eps,
    )


def _text(text: Mapping[str, Any], activation: Activation) -> TextConfig:
    width = text["width"]
    bidirectional = bool(text.get("no_causal_mask", False))
    return TextConfig(
        context=text["context_length"],
        vocab=text["vocab_size"],
        width=width,
        depth=text["layers"],
        heads=text["heads"],
        mlp=int(width * text.get("mlp_ratio", 4.0)),
        causal=not bidirectional,
        pad_to_context=bidirectional,
        activation=_activation(text, activation),
        norm_eps=_eps(text),
    )
