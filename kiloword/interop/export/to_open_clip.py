"""A folder that open_clip loads by `local-dir:`: CLIP's and SigLIP's architectures."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from kiloword.config.recipes import ImageConfig, ModelConfig, TextConfig
from kiloword.errors import needs
from kiloword.files import write_json
from kiloword.interop.export.source import TEXTS, Exported, check_close, check_dual, is_siglip, largest_difference
from kiloword.interop.export.weights import inverted
from kiloword.interop.export.words import write_tokenizer
from kiloword.interop.open_clip import place
from kiloword.interop.open_clip_config import Unlike, torchvision_ready, translate

WEIGHTS = "open_clip_model.safetensors"
NAMES = {768: "base", 1024: "large", 1152: "so400m"}  # of timm's SigLIP towers, by width


def library() -> Any:
    """The library open_clip. Raises: ValueError where it is not installed."""
    torchvision_ready()
    try:
        import open_clip
    except ImportError as error:
        raise ValueError(needs("an export to open_clip", "open_clip_torch", "openclip")) from error
    return open_clip


def write(source: Exported, folder: Path) -> list[str]:
    """Write config, weights and, where it is not open_clip's own, the tokenizer; compare. Returns: lines to print."""
    check_dual(source, "open_clip")
    open_clip = library()
    config, preprocess = model_config(source), source.config.preprocess
    if isinstance(preprocess.resize, int):
        source.notes.append(
            f"Images: kiloword resizes to {preprocess.resize} pixels before it crops; open_clip does not."
        )
    kind = open_clip.CustomTextCLIP if config.get("custom_text") else open_clip.CLIP
    settings = {name: value for name, value in config.items() if name != "custom_text"}
    with torch.device("meta"):
        theirs = kind(**settings).state_dict()
    ours = source.model.state_dict()
    save_file(inverted(theirs, _forward, ours, group=str), folder / WEIGHTS)
    shown = {"mean": list(preprocess.mean), "std": list(preprocess.std), "interpolation": "bicubic"}
    shown["resize_mode"] = "squash" if preprocess.resize == "squash" else "shortest"
    write_json(folder / "open_clip_config.json", {"model_cfg": config, "preprocess_cfg": shown})
    if source.tokenizer.clean != "clip":
        write_tokenizer(source, folder)
        write_json(folder / "config.json", {"model_type": "clip"})  # AutoTokenizer asks for it
    return _compared(source, folder, open_clip)


def model_config(source: Exported) -> dict[str, Any]:
    """open_clip's `model_cfg`. Raises: ValueError for a SigLIP tower of a size that timm does not name."""
    config, bias = source.config, source.model.head.bias
    quick = config.image.activation == "quick_gelu"
    if quick != (config.text.activation == "quick_gelu"):
        raise ValueError("open_clip cannot express this model: quick GELU is in one of its towers alone.")
    siglip = is_siglip(config)
    raw = {
        "embed_dim": config.head.dim,
        "vision_cfg": _siglip_image(config.image) if siglip else _clip_image(config.image),
        "text_cfg": _text(config.text, source),
        **({"quick_gelu": True} if quick else {}),
        **({"custom_text": True} if siglip else {}),
        **({} if bias is None else {"init_logit_bias": float(bias.detach())}),
    }
    _check_same(raw, config)
    return raw


def _clip_image(image: ImageConfig) -> dict[str, Any]:
    return {
        "image_size": image.size,
        "layers": image.depth,
        "width": image.width,
        "head_width": image.width // image.heads,
        "patch_size": image.patch,
        "mlp_ratio": image.mlp / image.width,
        **_norm(image),
    }


def _siglip_image(image: ImageConfig) -> dict[str, Any]:
    name = f"vit_{NAMES.get(image.width, 'unknown')}_patch{image.patch}_siglip_{image.size}"
    return {"image_size": image.size, "timm_model_name": name, "timm_pool": "map", "timm_proj": "none"} | {
        "timm_model_pretrained": False
    }


def _text(text: TextConfig, source: Exported) -> dict[str, Any]:
    is_other = source.tokenizer.clean != "clip"
    words: dict[str, Any] = (
        {"tokenizer_kwargs": {"clean": "whitespace"}, "hf_tokenizer_name": "local"} if is_other else {}
    )
    if text.pad_to_context:
        words |= {"no_causal_mask": True, "proj_bias": True, "pool_type": "last"}
    elif is_other:
        words |= {"pool_type": "eos", "eos_id": source.tokenizer.roles.end, "pad_id": source.tokenizer.roles.pad}
    return {
        "context_length": text.context,
        "vocab_size": text.vocab,
        "width": text.width,
        "heads": text.heads,
        "layers": text.depth,
        "mlp_ratio": text.mlp / text.width,
        **_norm(text),
        **words,
    }


def _norm(tower: ImageConfig | TextConfig) -> dict[str, Any]:
    act = {"act_kwargs": {"approximate": "tanh"}} if tower.activation == "gelu_tanh" else {}
    return {"norm_kwargs": {"eps": tower.norm_eps}, **act}


def _check_same(raw: dict[str, Any], config: ModelConfig) -> None:
    """Raises: ValueError where open_clip's towers would have other sizes, as the import reads them."""
    text = {k: v for k, v in raw["text_cfg"].items() if k not in ("pool_type", "eos_id", "pad_id")}
    try:
        back = translate("export", {**raw, "text_cfg": text})
    except (Unlike, RuntimeError) as error:  # timm has no such name
        raise ValueError(f"open_clip cannot express this model: {str(error)[:200]}.") from error
    for ours, theirs in ((config.image, back.image), (config.text, back.text)):
        for name in ("size", "patch", "width", "depth", "heads", "mlp", "activation", "norm_eps", "context"):
            if getattr(ours, name, None) != getattr(theirs, name, None):
                raise ValueError(
                    f"open_clip cannot express this model: {name} {getattr(ours, name)} would become "
                    f"{getattr(theirs, name)}."
                )


def _forward(state: dict[str, Tensor]) -> Iterable[tuple[str, Tensor]]:
    for theirs, value in state.items():
        ours, reshaped = place(theirs, value)
        if ours is not None:
            yield ours, reshaped


def _compared(source: Exported, folder: Path, open_clip: Any) -> list[str]:
    """The folder as open_clip loads it, against the source: the same pixels, and texts from strings."""
    model = open_clip.create_model(f"local-dir:{folder}").eval()
    tokenizer = open_clip.get_tokenizer(f"local-dir:{folder}")
    with torch.no_grad():
        images = F.normalize(model.encode_image(source.normalised()), dim=-1)
        texts = F.normalize(model.encode_text(tokenizer(TEXTS)), dim=-1)
    return [
        check_close("image features", largest_difference(source.images(), {"vec": images})),
        check_close("text features, from strings", largest_difference(source.texts(), {"vec": texts})),
    ]
