"""open_clip's CoCa: the parts of its configurations and weights that CLIP lacks.

Its text decoder reads words before the final norm, its class token is at the last position of the context, and its pool
normalises tokens itself, as kiloword's tower does. Published weights were trained with a mask that is shifted by one:
the class token attends to a pad after the end, and not to itself. Two differences remain: open_clip masks a "!" inside
a word (the pad's id), and with the shifted mask the longest captions lose one more token here, for the pad.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kiloword.config.recipes import ModelConfig

TEXT_KEYS = {"embed_cls", "output_tokens", "correct_cls_mask", "pad_id", "eos_id"}
IMAGE_KEYS = {"attentional_pool", "attn_pooler_queries", "attn_pooler_heads", "output_tokens"}

_POOL = "head.pooling.image_pool.attentional."
_DECODER = "more.text_decoder."
_TOKENS, _CLASS = "text.token_embedding.weight", "text.cls_emb"
_BEGINNINGS = {
    "visual.attn_pool.query": _POOL + "probes",
    "visual.attn_pool.ln_q.": _POOL + "norm_query.",
    "visual.attn_pool.ln_k.": "image_tower.norm.",
    "visual.ln_post.": _POOL + "norm.",
    "text_decoder.ln_final.": _DECODER + "norm.",
    "text_decoder.text_projection": _DECODER + "output",
}
_BLOCK = {
    "ln_1_kv.": "norm_memory.",
    "ln_1.": "norm1.",
    "ln_2.": "norm2.",
    "attn.in_proj_": "attention.qkv.",
    "attn.out_proj.": "attention.out.",
    "mlp.c_fc.": "mlp.fc.",
    "mlp.c_proj.": "mlp.proj.",
}


def unlike(raw: Mapping[str, Any]) -> list[str]:
    """Features of a configuration that kiloword's towers do not support."""
    vision, text, decoder = raw["vision_cfg"], raw["text_cfg"], raw["multimodal_cfg"]
    alike = {
        "no attentional pool": vision.get("attentional_pool") is True,
        "no class token": text.get("embed_cls") is True,
        "pads other than 0": text.get("pad_id", 0) == 0,
        "a decoder of another width": decoder["width"] == text.get("width") == raw["embed_dim"],
        "a decoder of other heads": decoder.get("heads", 8) == text.get("heads"),
        "another text MLP": text.get("mlp_ratio", 4) == 4,  # the decoder's is 4, whatever its configuration says
    }
    return [what for what, same in alike.items() if not same]


def shaped(config: ModelConfig, raw: Mapping[str, Any]) -> ModelConfig:
    """Extend a CLIP configuration by the parts of CoCa; special ids are those of CLIP's tokenizer."""
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


def is_coca(state: Mapping[str, Tensor]) -> bool:
    return any(name.startswith("text_decoder.") for name in state)


def decoder_depth(state: Mapping[str, Tensor]) -> int:
    """Number of layers of the text decoder."""
    return len({name.split(".")[2] for name in state if name.startswith("text_decoder.resblocks.")})


def parts(state: Mapping[str, Tensor]) -> tuple[dict[str, tuple[str, Tensor]], dict[str, Tensor]]:
    """Weights that CoCa adds, {name in kiloword: (name in open_clip, value)}, and the rest, unchanged, as in CLIP."""
    rest = dict(state)
    attends = ["visual.attn_pool.attn."]
    attends += [f"text_decoder.cross_attn.{n}.attn." for n in range(decoder_depth(state))]
    translated: dict[str, tuple[str, Tensor]] = {}
    for theirs in attends:
        translated |= _attention(theirs, rest)
    if _TOKENS in rest and _CLASS in rest:
        table, row = rest.pop(_TOKENS), rest.pop(_CLASS)
        translated["text_tower.tokens"] = (_TOKENS, torch.cat([table, table.mean(0, True), row[None]]))  # mask, class
    for theirs in list(rest):
        ours = _name(theirs)
        if ours is not None:
            value = rest.pop(theirs)
            transposed = theirs == "text_decoder.text_projection" and value.ndim == 2
            translated[ours] = (theirs, value.T.contiguous() if transposed else value)
    return translated, rest


def _attention(theirs: str, rest: dict[str, Tensor]) -> dict[str, tuple[str, Tensor]]:
    """Translate an attention to a memory and remove it from `rest`; q, k and v may be separate there."""
    names = [theirs + "in_proj_weight"]
    if names[0] not in rest:
        names = [theirs + f"{kind}_proj_weight" for kind in "qkv"]
    if not all(name in rest for name in (*names, theirs + "in_proj_bias")):
        return {}
    bias = rest.pop(theirs + "in_proj_bias")
    width = len(bias) // 3
    if len(names) == 1:
        weight = rest.pop(names[0])
        q, kv = weight[:width], weight[width:]
    else:
        q, k, v = (rest.pop(name) for name in names)
        kv = torch.cat([k, v])
    ours = _inner(theirs)
    values = {"q.weight": q, "q.bias": bias[:width], "kv.weight": kv, "kv.bias": bias[width:]}
    return {ours + part: (names[0], value.contiguous()) for part, value in values.items()}


def _inner(theirs: str) -> str:
    """Name of an attention in kiloword."""
    if theirs.startswith("visual."):
        return _POOL + "attention."
    return f"{_DECODER}layers.{theirs.split('.')[2]}.cross.attention."


def _name(theirs: str) -> str | None:
    for start, ours in _BEGINNINGS.items():
        if theirs.startswith(start):
            return ours + theirs.removeprefix(start)
    if theirs.startswith("visual.attn_pool.attn.out_proj."):
        return _POOL + "attention.out." + theirs.rpartition(".")[2]
    for start, kind in (("text_decoder.resblocks.", "own"), ("text_decoder.cross_attn.", "cross")):
        if theirs.startswith(start):
            number, _, part = theirs.removeprefix(start).partition(".")
            block = next((ours + part.removeprefix(name) for name, ours in _BLOCK.items() if part.startswith(name)), "")
            return f"{_DECODER}layers.{number}.{kind}.{block}" if block else None
    return None
