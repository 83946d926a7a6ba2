"""Translation of open_clip's model configurations: CLIP's and SigLIP's vision transformers, CLIP's ResNets, and CoCa.

CoCa's published weights were trained with a mask shifted by one: the class token attends to a pad after the end, not to
itself. Two differences remain: open_clip masks a "!" inside a word (the id of the pad), and with the shifted mask the
longest captions lose one more token here, for the pad.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kiloword.config.recipes import Activation, HeadConfig, ImageConfig, ModelConfig, Preprocess, TextConfig
from kiloword.config.settings import parse
from kiloword.interop.hf_folder import json_object
from kiloword.model.trunks.libraries import check_numbers, unusable
from kiloword.model.trunks.library import open_clip_config

_SHARED = {"width", "layers", "mlp_ratio", "norm_kwargs", "act_kwargs"}
_IMAGE = _SHARED | {"image_size", "head_width", "patch_size", "timm_model_name", "timm_model_pretrained", "timm_pool"}
_IMAGE |= {"timm_proj", "timm_drop", "timm_drop_path"}
_TEXT = _SHARED | {"context_length", "vocab_size", "heads", "no_causal_mask", "proj_bias", "pool_type"}
_TEXT |= {"hf_tokenizer_name", "tokenizer_kwargs", "tokenizer_mode"}
_MORE = {  # settings of images and of texts that a family has besides; those of initial weights are among them
    "coca": (
        {"attentional_pool", "attn_pooler_queries", "attn_pooler_heads", "output_tokens"},
        {"embed_cls", "output_tokens", "correct_cls_mask", "pad_id", "eos_id"},
    ),
    "prolip": (
        {"embed_unc", "init_unc_bias", "pos_embed_type", "attn_pooler_queries", "attn_pooler_heads"},
        {"embed_cls", "embed_unc", "init_unc_bias", "pad_id", "hf_model_pretrained", "hf_proj_type", "hf_pooler_type"},
    ),
}
_SIGLIP = {"mean": [0.5] * 3, "std": [0.5] * 3, "resize_mode": "squash"}


class Unlike(ValueError):
    """A model of open_clip that kiloword's towers do not support."""


def translate(name: str, raw: Mapping[str, Any]) -> ModelConfig:
    """Translate a configuration in open_clip's JSON format, or that of a released ProLIP.

    Raises: Unlike, naming what is left over; ValueError for towers beyond all limits.
    """
    check_numbers(raw, name)
    try:
        vision, text = raw["vision_cfg"], raw["text_cfg"]
        resnet, siglip = isinstance(vision.get("layers"), list | tuple), bool(vision.get("timm_model_name"))
        family = "coca" if "multimodal_cfg" in raw else "prolip" if "embed_unc" in vision else ""
        images, texts = _MORE.get(family, (set(), set()))
        if text.get("hf_tokenizer_name") == "local":  # as `export` writes it; the tokenizer knows the ids
            texts = texts | {"eos_id", "pad_id"}
        if family == "prolip" and vision.get("pool_type") == "tok":
            images = images | {"pool_type"}
        foreign = [f"vision_cfg.{k}" for k, v in vision.items() if k not in _IMAGE | images and v not in (None, False)]
        foreign += [f"text_cfg.{k}" for k, v in text.items() if k not in _TEXT | texts and v not in (None, False)]
        decoder = raw.get("multimodal_cfg", {})
        alike = {  # settings of a family that kiloword's towers compute with one value alone
            "coca": {
                "vision_cfg.attentional_pool": vision.get("attentional_pool") is True,
                "text_cfg.embed_cls": text.get("embed_cls") is True,
                "text_cfg.pad_id": text.get("pad_id", 0) == 0,
                "multimodal_cfg.width": decoder.get("width") == text.get("width") == raw["embed_dim"],
                "multimodal_cfg.heads": decoder.get("heads", 8) == text.get("heads"),
                "text_cfg.mlp_ratio": text.get("mlp_ratio", 4) == 4,  # the decoder's is 4, whatever is configured
            },
            "prolip": {
                "vision_cfg.embed_unc": vision.get("embed_unc") is True,
                **{f"text_cfg.{k}": text.get(k) is True for k in ("embed_unc", "embed_cls", "no_causal_mask")},
                "vision_cfg.timm_model_name": not vision.get("timm_model_name"),
            },
            "": {"text_cfg.pool_type": text.get("pool_type", "argmax") in ("argmax", "eos", "last")},
        }
        foreign += [what for what, same in alike[family].items() if not same]
        if not (resnet or siglip or vision.get("patch_size")):
            foreign.append("no vision_cfg.patch_size")
        if foreign:
            raise Unlike(
                f"{name} is built differently from our towers ({', '.join(foreign)}); CLIP's and SigLIP's vision "
                "transformers can be imported, CLIP's ResNets, and CoCa with an attentional pool."
            )
        activation: Activation = "quick_gelu" if raw.get("quick_gelu") else "gelu"
        head = HeadConfig(
            dim=raw["embed_dim"],
            image_pool="attention" if resnet else "map" if siglip else "cls",
            image_projection=not siglip,
            image_projection_bias=resnet,
            text_projection_bias=text.get("proj_bias", family == "prolip"),
        )
        if siglip or resnet:
            image = _timm_image(name, vision) if siglip else _resnet(vision)
        else:
            size, heads = vision["image_size"], vision["width"] // vision.get("head_width", 64)
            image = ImageConfig(size=size, patch=vision["patch_size"], heads=heads, **_shared(vision, activation))
        config = ModelConfig(image=image, text=_text(text, activation), head=head, preprocess=preprocess_of(name, raw))
        return _with_coca(config, raw) if family == "coca" else config
    except (KeyError, TypeError, ArithmeticError, AttributeError) as error:
        raise Unlike(f"{name} has no configuration as open_clip's models have it ({error!r}).") from error


def preprocess_of(name: str, raw: Mapping[str, Any]) -> Preprocess:
    """Preprocessing of a configuration, where it omits it SigLIP's or CLIP's. Raises: Unlike for other resizing."""
    siglip = "siglip" in str(raw["vision_cfg"].get("timm_model_name"))
    published = {**(_SIGLIP if siglip else {}), **raw.get("preprocess_cfg", {})}
    resize, how = published.get("resize_mode", "shortest"), published.get("interpolation", "bicubic")
    if resize not in ("shortest", "squash") or how != "bicubic":
        raise Unlike(f"{name} resizes images by {resize}, {how}: expected shortest or squash, bicubic")
    return parse({**{key: published[key] for key in ("mean", "std") if key in published}, "resize": resize}, Preprocess)


def raw_config(name: str) -> dict[str, Any]:
    """The configuration of open_clip's "NAME", of "NAME@TAG", or in a file, such as FOLDER/open_clip_config.json.

    A tag of published weights gives preprocessing and activation by open_clip's table of them.
    Raises: ValueError for a damaged file, and when open_clip is not installed, or does not know the name or the tag.
    """
    if name.endswith(".json"):
        document = json_object(Path(name))
        with unusable(name):
            return {**document, **document.get("model_cfg", {})}
    name, at, tag = name.partition("@")
    raw = open_clip_config(name)
    if not at:
        return raw
    import open_clip

    if not (published := open_clip.get_pretrained_cfg(name, tag)):
        tags = ", ".join(open_clip.list_pretrained_tags_by_model(name)) or "none, so omit it"
        raise ValueError(f"open_clip has no tag {tag!r} of {name}: it has {tags}.")
    activation = {"quick_gelu": bool(raw.get("quick_gelu") or published.get("quick_gelu"))}
    return {**raw, **activation, "preprocess_cfg": published}


def _with_coca(config: ModelConfig, raw: Mapping[str, Any]) -> ModelConfig:
    """With the parts of CoCa; special ids are those of CLIP's tokenizer."""
    vision, vocab, correct = raw["vision_cfg"], config.text.vocab, raw["text_cfg"].get("correct_cls_mask", False)
    text = replace(
        config.text,
        context=config.text.context + 1,
        vocab=vocab + 2,
        special=dict(start=vocab - 2, end=vocab - 1, pad=0, mask=vocab, cls=vocab + 1, unc=vocab + 2),  # noqa: C408
        extra_tokens=("cls",) if correct else ("pad", "cls"),
        class_place="last",
        class_sees_itself=correct,
        norm_words=False,
    )
    head = replace(
        config.head,
        image_pool="attentional",
        pool_queries=vision.get("attn_pooler_queries", 256) - 1,
        pool_width=raw["embed_dim"],
        pool_heads=vision.get("attn_pooler_heads", 8),
    )
    return replace(config, text=text, head=head)


def _shared(tower: Mapping[str, Any], activation: Activation) -> dict[str, Any]:
    tanh = (tower.get("act_kwargs") or {}).get("approximate") == "tanh"
    return {
        "width": tower["width"],
        "depth": tower["layers"],
        "mlp": int(tower["width"] * tower.get("mlp_ratio", 4.0)),
        "activation": "gelu_tanh" if tanh else activation,
        "norm_eps": float((tower.get("norm_kwargs") or {}).get("eps", 1e-5)),
    }


def _resnet(vision: Mapping[str, Any]) -> ImageConfig:
    width = vision["width"]
    return ImageConfig(
        tower="clip-resnet",
        size=vision["image_size"],
        patch=32,
        width=32 * width,
        depth=sum(vision["layers"]),
        heads=32 * width // vision.get("head_width", 64),
        mlp=4 * 32 * width,
        class_token=False,
        pre_norm=False,
    )


def _timm_image(name: str, vision: Mapping[str, Any]) -> ImageConfig:
    import timm

    with torch.device("meta"):
        trunk = timm.create_model(vision["timm_model_name"], num_classes=0)
    has, siglip = trunk.state_dict().keys(), {"attn_pool.latent", "patch_embed.proj.weight"}
    if type(trunk).__name__ != "VisionTransformer" or siglip - has or {"cls_token", "norm_pre.weight"} & has:
        raise Unlike(f"{name} has timm's {vision['timm_model_name']}, which is no tower of SigLIP.")
    first = trunk.blocks[0]
    tanh = type(first.mlp.act).__name__ == "GELUTanh" or getattr(first.mlp.act, "approximate", "none") == "tanh"
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
        activation="gelu_tanh" if tanh else "gelu",
        norm_eps=first.norm1.eps,
    )


def _text(text: Mapping[str, Any], activation: Activation) -> TextConfig:
    bidirectional = bool(text.get("no_causal_mask", False))
    return TextConfig(
        context=text["context_length"],
        vocab=text["vocab_size"],
        heads=text["heads"],
        causal=not bidirectional,
        pad_to_context=bidirectional,
        **_shared(text, activation),
    )
