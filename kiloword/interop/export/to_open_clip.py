"""A folder that open_clip loads by `local-dir:`: CLIP's and SigLIP's architectures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from kiloword.config.recipes import ImageConfig, TextConfig
from kiloword.files import write_json
from kiloword.interop.export.source import TEXTS, Exported
from kiloword.interop.export.weights import inverted
from kiloword.interop.export.words import write_tokenizer
from kiloword.model.trunks.libraries import torchvision_lines, torchvision_ready

NAMES = {768: "base", 1024: "large", 1152: "so400m"}  # of timm's SigLIP towers, by width


def write(source: Exported, folder: Path) -> list[str]:
    """Write config, weights and, where it is not open_clip's own, the tokenizer; compare. Returns: lines to print."""
    source.check_dual()
    torchvision_ready()
    import open_clip

    config, preprocess = model_config(source), source.config.preprocess
    if isinstance(preprocess.resize, int):
        source.notes.append(
            f"Images: kiloword resizes to {preprocess.resize} pixels before it crops; open_clip does not."
        )
    kind = open_clip.CustomTextCLIP if source.siglip else open_clip.CLIP
    try:
        with torch.device("meta"):
            theirs = kind(**{name: value for name, value in config.items() if name != "custom_text"}).state_dict()
    except RuntimeError as error:  # timm has no such name
        raise ValueError(f"open_clip cannot express this model: {str(error)[:200]}") from error
    save_file(inverted(theirs, source.model.state_dict()), folder / "open_clip_model.safetensors")
    shown = {"mean": list(preprocess.mean), "std": list(preprocess.std), "interpolation": "bicubic"}
    shown["resize_mode"] = "squash" if preprocess.resize == "squash" else "shortest"
    write_json(folder / "open_clip_config.json", {"model_cfg": config, "preprocess_cfg": shown})
    if source.tokenizer.clean != "clip":
        write_tokenizer(source, folder)
        write_json(folder / "config.json", {"model_type": "clip"})  # AutoTokenizer asks for it
    model = open_clip.create_model(f"local-dir:{folder}").eval()
    tokenizer = open_clip.get_tokenizer(f"local-dir:{folder}")
    with torch.no_grad():
        lines = source.compared(model.encode_image(source.normalised()), model.encode_text(tokenizer(TEXTS)))
    return lines + torchvision_lines()


def model_config(source: Exported) -> dict[str, Any]:
    """open_clip's `model_cfg`."""
    config, bias = source.config, source.model.head.bias
    image, text, quick = config.image, config.text, config.image.activation == "quick_gelu"
    vision: dict[str, Any] = {"image_size": image.size}
    if source.siglip:
        name = f"vit_{NAMES.get(image.width, 'unknown')}_patch{image.patch}_siglip_{image.size}"
        vision |= {"timm_model_name": name, "timm_pool": "map", "timm_proj": "none", "timm_model_pretrained": False}
    else:
        vision |= {"patch_size": image.patch, "head_width": image.width // image.heads, **_tower(image)}
    words: dict[str, Any] = {"no_causal_mask": True, "proj_bias": True, "pool_type": "last"} if source.siglip else {}
    if source.tokenizer.clean != "clip":
        words |= {"tokenizer_kwargs": {"clean": "whitespace"}, "hf_tokenizer_name": "local"}
        pooled = {"pool_type": "eos", "eos_id": source.tokenizer.roles.end, "pad_id": source.tokenizer.roles.pad}
        words |= {} if source.siglip else pooled
    return {
        "embed_dim": config.head.dim,
        "vision_cfg": vision,
        "text_cfg": {"context_length": text.context, "vocab_size": text.vocab, "heads": text.heads}
        | _tower(text)
        | words,
        **({"quick_gelu": True} if quick else {}),
        **({"custom_text": True} if source.siglip else {}),
        **({} if bias is None else {"init_logit_bias": float(bias.detach())}),
    }


def _tower(tower: ImageConfig | TextConfig) -> dict[str, Any]:
    return {
        "layers": tower.depth,
        "width": tower.width,
        "mlp_ratio": tower.mlp / tower.width,
        "norm_kwargs": {"eps": tower.norm_eps},
        **({"act_kwargs": {"approximate": "tanh"}} if tower.activation == "gelu_tanh" else {}),
    }
