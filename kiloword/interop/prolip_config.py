"""Translation of the config.json of ProLIP's weights. Source: the dataclasses of its public code."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kiloword.config.recipes import Activation, HeadConfig, ImageConfig, ModelConfig, TextConfig
from kiloword.config.settings import BaseSettings, read_config

APPENDED = 2  # [UNC] and [CLS], which its context does not count


@dataclass(frozen=True, kw_only=True)
class Vision(BaseSettings):
    """`vision_cfg`; a type with a single value shows what kiloword's towers support."""

    image_size: int = 224
    patch_size: int = 16
    width: int = 768
    layers: int = 12
    head_width: int = 64
    mlp_ratio: float = 4.0
    no_ln_pre: bool = False
    act_kwargs: dict[str, Any] | None = None
    norm_kwargs: dict[str, float] | None = None
    pos_embed_type: str = "learnable"  # or fixed positions, which are stored too
    embed_unc: Literal[True]
    pool_type: Literal["tok"] = "tok"
    ls_init_value: None = None
    attentional_pool: Literal[False] = False
    output_tokens: Literal[False] = False
    timm_model_name: None = None
    # not used, as the weights exist
    init_unc_bias: float = -10.0
    attn_pooler_queries: int = 256
    attn_pooler_heads: int = 8
    timm_model_pretrained: bool = False
    timm_pool: str = "avg"
    timm_proj: str = "linear"
    timm_proj_bias: bool = False
    timm_drop: float = 0.0
    timm_drop_path: float | None = None


@dataclass(frozen=True, kw_only=True)
class Text(BaseSettings):
    """`text_cfg`."""

    context_length: int = 64
    vocab_size: int = 32100
    width: int = 768
    heads: int = 12
    layers: int = 12
    mlp_ratio: float = 4.0
    proj_bias: bool = True
    act_kwargs: dict[str, Any] | None = None
    norm_kwargs: dict[str, float] | None = None
    embed_cls: Literal[True] = True
    embed_unc: Literal[True] = True
    no_causal_mask: Literal[True] = True
    ls_init_value: None = None
    output_tokens: Literal[False] = False
    hf_model_name: None = None
    # not used: the class token is pooled, nothing is masked, and the tokenizer is kiloword's
    pool_type: str = "argmax"
    pad_id: int = 0
    final_ln_after_pool: bool = False
    hf_tokenizer_name: str | None = None
    tokenizer_kwargs: dict[str, Any] | None = None
    hf_model_pretrained: bool = True
    hf_proj_type: str = "mlp"
    hf_pooler_type: str = "mean_pooler"
    init_unc_bias: float = -10.0


@dataclass(frozen=True, kw_only=True)
class Published(BaseSettings):
    """The whole file."""

    embed_dim: int
    vision_cfg: Vision
    text_cfg: Text = field(default_factory=Text)
    quick_gelu: bool = False
    init_logit_scale: float = 0.0
    init_logit_bias: float | None = None
    cast_dtype: None = None
    output_dict: bool = True


def model_config(path: Path) -> ModelConfig:
    """The configuration of the towers of a published config.json, with the vocabulary that its weights have.

    Raises: ValueError when the file is missing, damaged, or describes unsupported towers.
    """
    if not path.is_file():
        raise ValueError(
            f"no {path}: weights do not show heads and activations; put the published config.json into the same folder"
        )
    raw = read_config(path, Published)
    activation: Activation = "quick_gelu" if raw.quick_gelu else "gelu"
    return ModelConfig(
        image=_image(raw.vision_cfg, activation),
        text=_text(raw.text_cfg, activation),
        head=HeadConfig(dim=raw.embed_dim, text_projection_bias=raw.text_cfg.proj_bias),
    )


def _image(vision: Vision, activation: Activation) -> ImageConfig:
    return ImageConfig(
        size=vision.image_size,
        patch=vision.patch_size,
        width=vision.width,
        depth=vision.layers,
        heads=vision.width // vision.head_width,
        mlp=int(vision.width * vision.mlp_ratio),
        pre_norm=not vision.no_ln_pre,
        activation=_activation(vision.act_kwargs, activation),
        norm_eps=(vision.norm_kwargs or {}).get("eps", 1e-5),
    )


def _text(text: Text, activation: Activation) -> TextConfig:
    return TextConfig(
        context=text.context_length + APPENDED,
        vocab=text.vocab_size,
        width=text.width,
        depth=text.layers,
        heads=text.heads,
        mlp=int(text.width * text.mlp_ratio),
        causal=False,
        pad_to_context=True,
        activation=_activation(text.act_kwargs, activation),
        norm_eps=(text.norm_kwargs or {}).get("eps", 1e-5),
    )


def _activation(arguments: dict[str, Any] | None, activation: Activation) -> Activation:
    return "gelu_tanh" if (arguments or {}).get("approximate") == "tanh" else activation
