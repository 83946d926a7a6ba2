"""Weights of other libraries under kiloword's names: one table, which exports run backwards.

Names are of open_clip (with timm's SigLIP towers, CLIP's ResNets and CoCa), transformers' CLIPModel and SiglipModel,
and the released ProLIP and Llip.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from kiloword.models.model_folder import check_fit
from kiloword.models.tensors import shapes_of

TOWERS = ("visual", "text", "transformer", "text_projection", "text_decoder", "vision_model", "text_model")
UNREAD = ("position_ids", "num_batches_tracked")  # ends of names that no tower computes with
TOKENS, CLASS = "text.token_embedding.weight", "text.cls_emb"
_POOL = "head.pooling.image_pool"
_MAP, _QUERIES, _RESNET_POOL = f"{_POOL}.map.", f"{_POOL}.attentional.", f"{_POOL}.attention."
_DECODER, _TEXT = "more.text_decoder.", "head.pooling.text_projection."
NAMES = {  # the longest beginning that fits is replaced, PARTS in the rest; .T: transposed
    "logit_scale": "head.log_scale",
    "logit_bias": "head.bias",
    # open_clip; of texts without "text.", which one of its two layouts has
    "visual.class_embedding": "image_tower.class_token",
    "visual.positional_embedding": "image_tower.positions",
    "visual.conv1.": "image_tower.patches.",
    "visual.proj": "head.pooling.image_projection.weight.T",
    "visual.ln_pre.": "image_tower.pre_norm.",
    "visual.ln_post.": "image_tower.norm.",
    "visual.transformer.resblocks.": "image_tower.blocks.",
    "token_embedding.weight": "text_tower.tokens",
    "positional_embedding": "text_tower.positions",
    "transformer.resblocks.": "text_tower.blocks.",
    "ln_final.": "text_tower.norm.",
    "text_projection.": _TEXT,
    "text_projection": f"{_TEXT}weight.T",
    # timm
    "visual.trunk.pos_embed": "image_tower.positions",
    "visual.trunk.norm.": "image_tower.norm.",
    "visual.trunk.patch_embed.proj.": "image_tower.patches.",
    "visual.trunk.blocks.": "image_tower.blocks.",
    "visual.trunk.attn_pool.": _MAP,
    "visual.trunk.attn_pool.latent": f"{_MAP}probe",
    "visual.trunk.attn_pool.proj.": f"{_MAP}out.",
    # CLIP's ResNets
    "visual.attnpool.": _RESNET_POOL,
    "visual.attnpool.positional_embedding": f"{_RESNET_POOL}positions",
    "visual.attnpool.c_proj.": "head.pooling.image_projection.",
    **{f"visual.conv{n + 1}.": f"image_tower.stem.{n}." for n in (1, 2)},
    **{f"visual.bn{n + 1}.": f"image_tower.stem_norms.{n}." for n in range(3)},
    **{f"visual.layer{n + 1}.": f"image_tower.stages.{n}." for n in range(4)},
    # CoCa
    "visual.attn_pool.query": f"{_QUERIES}probes",
    "visual.attn_pool.ln_q.": f"{_QUERIES}norm_query.",
    "visual.attn_pool.ln_k.": "image_tower.norm.",
    "visual.attn_pool.": _QUERIES,
    "text_decoder.ln_final.": f"{_DECODER}norm.",
    "text_decoder.text_projection": f"{_DECODER}output.T",
    "text_decoder.resblocks.": f"{_DECODER}own.",
    "text_decoder.cross_attn.": f"{_DECODER}cross.",
    # ProLIP
    "visual.unc_embedding": "image_tower.uncertainty_token",
    "visual.uncertainty_proj.": "head.uncertainty.image_log_var.",
    "text_uncertainty_projection.": "head.uncertainty.mean_log_var.",
    # Llip
    "k_proj": "head.pooling.key",
    "v_proj": "head.pooling.value",
    "q_proj": "head.pooling.query.weight.T",
    "pred.out_proj": "head.pooling.out.weight.T",
    "K_norm.": "head.pooling.key_norm.",
    "V_norm.": "head.pooling.value_norm.",
    "Q_norm.": "head.pooling.query_norm.",
    # transformers
    "text_model.embeddings.token_embedding.weight": "text_tower.tokens",
    "text_model.embeddings.position_embedding.weight": "text_tower.positions",
    "text_model.encoder.layers.": "text_tower.blocks.",
    "text_model.final_layer_norm.": "text_tower.norm.",
    "text_model.head.": _TEXT,
    "vision_model.embeddings.class_embedding": "image_tower.class_token",
    "vision_model.embeddings.patch_embedding.": "image_tower.patches.",
    "vision_model.embeddings.position_embedding.weight": "image_tower.positions",
    "vision_model.pre_layrnorm.": "image_tower.pre_norm.",
    "vision_model.encoder.layers.": "image_tower.blocks.",
    "vision_model.post_layernorm.": "image_tower.norm.",
    "vision_model.head.": _MAP,
    "vision_model.head.attention.": _MAP,
    "vision_model.head.layernorm.": f"{_MAP}norm.",
    "visual_projection.": "head.pooling.image_projection.",
}
FAMILIES = {  # beginning of a name that a family alone has -> what it names otherwise
    "visual.layer1.": {"visual.conv1.": "image_tower.stem.0."},
    "visual.attn_pool.": {"visual.ln_post.": f"{_QUERIES}norm."},
}
PARTS = (  # replaced wherever they are
    (r"\b(self_)?attn\.", "attention."),
    (r"\b([qkv])_proj[._]", r"\1."),
    (r"\bin_proj_", "qkv."),
    (r"\bout_proj\b|(?<=attention\.)proj\b", "out"),
    (r"\b(c_fc|fc1)\b", "fc"),
    (r"\b(c_proj|fc2)\b", "proj"),
    (r"\bln_1_kv\b", "norm_memory"),
    (r"\b(ln_|layer_norm)([12])\b", r"norm\2"),
)


def fitted(
    state: Mapping[str, Tensor], expected: Mapping[str, Tensor], origin: str
) -> tuple[dict[str, Tensor], list[str]]:
    """As `translated`, complete. Args: origin: of `expected`, for messages.

    Raises: ValueError naming tensors that are missing, of another shape or type, and unused ones of the towers, which
    compute something that kiloword's towers do not.
    """
    try:
        out, left = translated(state, expected)
    except (RuntimeError, IndexError) as error:
        raise ValueError(f"weights have shapes that no model of {origin} has: {str(error)[:200]}.") from error
    if not out:
        raise ValueError(f"none of these weights is one of {origin}.")
    for name, value in out.items():
        if not value.is_floating_point():
            raise ValueError(f"the weights of {name} are {value.dtype}: expected floating-point numbers.")
    actual = shapes_of(out) | {name: () for name in left if name.partition(".")[0] in TOWERS}
    check_fit(shapes_of(expected), actual, "these weights", origin)
    return out, left


def translated(state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors of `expected` that `state` holds under another library's names, and the names that are left over.

    Tensors with another number of dimensions get the expected shape; queries, keys and values are joined or split.
    """
    state = {name: value for name, value in state.items() if not name.endswith(UNREAD)}
    if CLASS in state and TOKENS in state:  # CoCa's
        words = state[TOKENS]
        state[TOKENS] = torch.cat([words, words.mean(0, True), state.pop(CLASS)[None]])  # mask, class
    table = dict(NAMES)
    for beginning, differing in FAMILIES.items():
        table |= differing if any(name.startswith(beginning) for name in state) else {}
    found, names, out, used = dict[str, Tensor](), dict[str, str](), dict[str, Tensor](), set[str]()
    for theirs, value in state.items():
        ours = _name(theirs.removeprefix("text."), table)
        name = ours.removesuffix(".T")
        found[name], names[name] = value.T.contiguous() if ours != name and value.ndim == 2 else value, theirs
    for name, wanted in expected.items():
        sources, joined = _joined(name, found)
        if joined is not None:
            used |= {names[source] for source in sources}
            loose = joined.ndim != wanted.ndim and joined.numel() == wanted.numel()
            out[name] = joined.reshape(wanted.shape) if loose else joined
    return out, sorted(state.keys() - used)


def _name(theirs: str, table: Mapping[str, str]) -> str:
    beginning = max((x for x in table if theirs.startswith(x)), key=len, default="")
    if not beginning:
        return theirs
    rest = theirs.removeprefix(beginning)
    for pattern, part in PARTS:
        rest = re.sub(pattern, part, rest)
    return re.sub(r"decoder\.(own|cross)\.(\d+)", r"decoder.layers.\2.\1", table[beginning] + rest)


def _joined(name: str, found: Mapping[str, Tensor]) -> tuple[list[str], Tensor | None]:
    """The sources of a tensor, and its value; of queries, keys and values also together or apart."""
    if name in found:
        return [name], found[name]
    head, part, kind = ["", "", *name.rsplit(".", 2)][-3:]
    pieces, whole = [f"{head}.{letter}.{kind}" for letter in part], f"{head}.qkv.{kind}"
    if part in ("qkv", "kv") and all(piece in found for piece in pieces):
        return pieces, torch.cat([found[piece] for piece in pieces])
    if part in ("q", "kv") and whole in found:
        width = len(found[whole]) // 3
        return [whole], found[whole][:width] if part == "q" else found[whole][width:]
    return [], None
