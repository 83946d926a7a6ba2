"""Weights of the released ProLIP models, with the names of open_clip and a few more. Source: its public code."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator
from torch import Tensor

from kiloword.config.recipes import Activation, HeadConfig, ModelConfig
from kiloword.config.settings import BaseSettings, read_config
from kiloword.data.text.tokenizer import Roles
from kiloword.interop import folder
from kiloword.interop.folder import Imported, ImportReport
from kiloword.interop.open_clip import check_translated, place, read
from kiloword.interop.open_clip_config import image_config, text_config
from kiloword.methods.registry import preset
from kiloword.model.image import grid
from kiloword.model.model import Model

_TOKENS = "text.token_embedding.weight"
_POSITIONS = "visual.positional_embedding"  # of [CLS], [UNC] and the patches
_UNC = "visual.unc_embedding"
_ROWS = {"unc": "text.unc_emb", "cls": "text.cls_emb"}  # tokens of the vocabulary in kiloword
_MORE = {
    _UNC: "image_tower.uncertainty_token",
    "visual.uncertainty_proj.weight": "head.uncertainty.image_log_var.weight",
    "visual.uncertainty_proj.bias": "head.uncertainty.image_log_var.bias",
    "text.text_uncertainty_projection.weight": "head.uncertainty.mean_log_var.weight",
    "text.text_uncertainty_projection.bias": "head.uncertainty.mean_log_var.bias",
}
APPENDED = 2  # [UNC] and [CLS], which its context does not count
_UNUSED = {  # settings of initial weights, of other towers, and of the tokenizer, which is kiloword's
    *("init_unc_bias", "pos_embed_type", "attn_pooler_queries", "attn_pooler_heads", "pad_id", "final_ln_after_pool"),
    *("timm_model_pretrained", "timm_pool", "timm_proj", "timm_proj_bias", "timm_drop", "timm_drop_path"),
    *("hf_tokenizer_name", "tokenizer_kwargs", "hf_model_pretrained", "hf_proj_type", "hf_pooler_type"),
}


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
    embed_unc: Literal[True]
    pool_type: Literal["tok"] = "tok"
    ls_init_value: None = None
    attentional_pool: Literal[False] = False
    output_tokens: Literal[False] = False
    timm_model_name: None = None


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
    pool_type: str = "argmax"  # not used: the class token is pooled


def _used(value: Any) -> Any:
    return {key: v for key, v in value.items() if key not in _UNUSED} if isinstance(value, dict) else value


@dataclass(frozen=True, kw_only=True)
class Published(BaseSettings):
    """The whole file."""

    embed_dim: int
    vision_cfg: Annotated[Vision, BeforeValidator(_used)]
    text_cfg: Annotated[Text, BeforeValidator(_used)] = field(default_factory=Text)
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
    text = text_config(asdict(raw.text_cfg), activation)
    return ModelConfig(
        image=image_config(asdict(raw.vision_cfg), activation),
        text=replace(text, context=text.context + APPENDED),
        head=HeadConfig(dim=raw.embed_dim, text_projection_bias=raw.text_cfg.proj_bias),
    )


def import_state(config: ModelConfig, state: Mapping[str, Tensor], roles: Roles) -> Imported:
    """Translate a released state dict.

    Args: config: of `model_config`; roles: of the tokenizer, whose mask token the weights lack.
    Raises: ValueError when weights are missing or have another shape.
    """
    vocab = max(config.text.vocab, 1 + max(roles.ids().values()))
    method = preset("prolip-released")
    shaped = method.shape(replace(config, text=replace(config.text, vocab=vocab, special=roles.ids())))
    with torch.device("meta"):
        expected = Model(shaped, method.head(shaped)).state_dict()
    _check_folded(config, state)
    placed, unused = _named(_folded(state, roles, vocab), expected)
    check_translated("config.json", expected, placed, unused)
    new = [f"text_tower.tokens[{i}]" for i in range(config.text.vocab, vocab) if i not in (roles.cls, roles.unc)]
    report = ImportReport({ours: theirs for ours, (theirs, _) in sorted(placed.items())}, new, unused)
    return Imported(shaped, "prolip-released", {ours: value for ours, (_, value) in placed.items()}, report)


def _check_folded(config: ModelConfig, state: Mapping[str, Tensor]) -> None:
    """Check weights that `_folded` moves. Raises: ValueError naming missing ones, or those of another shape."""
    image, text = config.image.width, config.text.width
    places = grid(config.image) ** 2 + 2
    shapes = {_TOKENS: [config.text.vocab, text], _POSITIONS: [places, image], _UNC: [image]}
    shapes |= {name: [text] for name in _ROWS.values()}
    missing = [name for name in shapes if name not in state]
    if missing:
        raise ValueError(f"these weights have no {' and no '.join(missing)}: are they a released ProLIP's?")
    for name, shape in shapes.items():
        if not state[name].is_floating_point():
            raise ValueError(f"{name} holds {state[name].dtype}: expected floating-point weights")
        if list(state[name].shape) != shape:
            raise ValueError(f"{name} has shape {list(state[name].shape)}, but config.json says {shape}")


def _folded(state: Mapping[str, Tensor], roles: Roles, vocab: int) -> dict[str, Tensor]:
    """The weights in open_clip's layout: [UNC] plus its position, and special text tokens in the vocabulary.

    Tokens without an embedding (the mask) get the mean of all embeddings.
    """
    places, table = state[_POSITIONS], state[_TOKENS]
    table = torch.cat([table, table.mean(0).expand(vocab - len(table), -1)])
    for role, name in _ROWS.items():
        table[roles.ids()[role]] = state[name]
    rest = {name: value for name, value in state.items() if name not in _ROWS.values()}
    return {**rest, _UNC: state[_UNC] + places[1], _POSITIONS: torch.cat([places[:1], places[2:]]), _TOKENS: table}


def _named(state: Mapping[str, Tensor], expected: Collection[str]) -> tuple[dict[str, tuple[str, Tensor]], list[str]]:
    """As `open_clip.placed`. The final norm of images is used twice."""
    placed, unused = {}, []
    for theirs, value in state.items():
        ours, reshaped = (_MORE[theirs], value) if theirs in _MORE else place(theirs, value)
        if ours is None or ours not in expected:
            unused.append(theirs)
            continue
        placed[ours] = (theirs, reshaped)
        if ours.startswith("image_tower.norm."):
            placed[ours.replace("image_tower", "head.pooling")] = (theirs, reshaped.clone())
    return placed, sorted(unused)


def main(path: Path, out: Path) -> None:
    """Write a model folder from released weights, and print a report.

    Args: path: of the weights; their config.json and SigLIP's tokenizer.json must be in the same folder.
    Raises: ValueError when one of the three is missing or does not fit the others.
    """
    state, config = read(path), model_config(path.with_name("config.json"))
    if config.text.vocab == folder.CLIP_VOCAB:
        raise ValueError(
            f"{path} has CLIP's vocabulary: which token its captions were padded with is not known, and the model sees "
            "its pads. Released models with SigLIP's vocabulary can be imported."
        )
    imported = import_state(config, state, folder.tokenizer(config, path).roles)
    folder.write(imported, path, out, f"ProLIP {path.parent.name}")
    folder.show(imported.report, out)
