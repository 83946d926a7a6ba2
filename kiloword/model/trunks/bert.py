"""BERT and its relatives over packed texts: post-norm transformers with learned positions."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kiloword.config.recipes import Activation
from kiloword.model.attention import KeyValueCache, Packing
from kiloword.model.blocks import Block
from kiloword.model.trunks.libraries import MOST, check_numbers, surplus
from kiloword.model.trunks.trunk import Trunk

ACTIVATIONS: dict[str, Activation] = {  # transformers' names
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
}
OFFSET = ("roberta", "xlm-roberta")  # their first position is that after the pad's
TYPES = ("bert", *OFFSET, "distilbert")
DISTIL = {"hidden_size": "dim", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads"}
DISTIL |= {"intermediate_size": "hidden_dim", "hidden_act": "activation"}


def is_bert(config: dict[str, Any]) -> bool:
    """Whether `Bert` computes what a config.json of transformers describes."""
    others = any(config.get(name) for name in ("is_decoder", "add_cross_attention", "sinusoidal_pos_embds"))
    absolute = config.get("position_embedding_type", "absolute") == "absolute" and not others
    return absolute and kind_of(config) in TYPES and str(_value(config, "hidden_act", "gelu")) in ACTIVATIONS


def kind_of(config: dict[str, Any]) -> str:
    """The `model_type` of a config.json, "" without one."""
    return str(config.get("model_type", ""))


def _value(config: dict[str, Any], name: str, default: Any) -> Any:
    return config.get(DISTIL.get(name, name) if kind_of(config) == "distilbert" else name, default)


class PostNorm(Block):
    """Post-norm transformer block over packed texts [S, W]."""

    def forward(
        self,
        x: Tensor,
        packing: Packing | None = None,
        causal: bool = False,
        cache: KeyValueCache | None = None,
        only: Tensor | None = None,
    ) -> Tensor:
        assert cache is None
        assert only is None
        x = self.norm1(x + self.attention(x, packing, causal))
        out: Tensor = self.norm2(x + self.mlp(x))
        return out


class Bert(Trunk):
    """BERT, RoBERTa, XLM-RoBERTa and DistilBERT: packed texts to tokens [S, W'], equal to transformers'.

    Every text is a first segment: that segment's embedding is part of the positions'.
    Source: arXiv:1810.04805; arXiv:1907.11692; arXiv:1910.01108.

    Args: config: a config.json of transformers for which `is_bert` holds.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        check_numbers(config, "the config of the text trunk")
        width, depth, heads = (
            width_of(config),
            _whole(config, "num_hidden_layers", 12),
            _whole(config, "num_attention_heads", 12),
        )
        mlp = _whole(config, "intermediate_size", 3072)
        eps, activation = config.get("layer_norm_eps", 1e-12), ACTIVATIONS[_value(config, "hidden_act", "gelu")]
        self.token_embeddings = nn.Parameter(torch.empty(rows_of(config), width))
        self.position_embeddings = nn.Parameter(torch.empty(positions_of(config), width))
        self.norm = nn.LayerNorm(width, eps)
        self.layers = nn.ModuleList(PostNorm(width, heads, mlp, activation, eps, depth) for _ in range(depth))

    def tokens(self, *inputs: Any) -> Tensor:
        """Tokens [S + tail, W'] of texts and their packing; ids are in the vocabulary, and texts fit the positions."""
        texts, packing = inputs
        x: Tensor = F.embedding(texts.ids, self.token_embeddings) + F.embedding(packing.place, self.position_embeddings)
        x = self.norm(F.pad(x, (0, 0, 0, packing.tail)) if packing.tail else x)
        for layer in self.layers:
            x = layer(x, packing)
        return x

    def blocks(self) -> list[list[str]]:
        first, *rest = [[f"layers.{n}."] for n in range(len(self.layers))]
        return [["token_embeddings", "position_embeddings", "norm.", *first], *rest]


def width_of(config: dict[str, Any]) -> int:
    """Width of the tokens of an encoder of texts."""
    return _whole(config, "hidden_size", 512 if kind_of(config) == "clip_text_model" else 768)


def rows_of(config: dict[str, Any]) -> int:
    """Rows of the table of words of an encoder of texts."""
    return _whole(
        config, "vocab_size", {"clip_text_model": 49408, "siglip_text_model": 32000}.get(kind_of(config), 30522)
    )


def _whole(config: dict[str, Any], name: str, default: int, least: int = 1) -> int:
    """A setting that counts something. Raises: ValueError for anything else."""
    value = _value(config, name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MOST:
        raise ValueError(
            f"{name} of the text trunk is {str(value)[:60]}: expected a whole number from {least} to {MOST}"
        )
    return value


def positions_of(config: dict[str, Any]) -> int:
    """Longest text of an encoder of texts, in tokens. Raises: ValueError for none."""
    kind = kind_of(config)
    usual = {"clip_text_model": 77, "siglip_text_model": 64}.get(kind, 512)
    positions = _whole(config, "max_position_embeddings", usual) - (2 if kind == "mpnet" else first_position(config))
    if positions < 1:
        raise ValueError(f"the text trunk has {positions} positions: expected at least 1")
    return positions


def first_position(config: dict[str, Any]) -> int:
    """The row of the position table that the first token of a text takes."""
    return _whole(config, "pad_token_id", 1, 0) + 1 if kind_of(config) in OFFSET else 0


def converted(state: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    """The weights of `Bert` from those of transformers; heads that follow the encoder are omitted.

    Raises: KeyError naming a tensor that is missing, ValueError naming those of layers beyond the config.
    """
    distil = kind_of(config) == "distilbert"
    state = {_old_name(name): value for name, value in state.items()}
    prefix = _prefix(state)
    table = state.pop(f"{prefix}embeddings.position_embeddings.weight")[first_position(config) :]
    segments = f"{prefix}embeddings.token_type_embeddings.weight"
    out = {
        "token_embeddings": state.pop(f"{prefix}embeddings.word_embeddings.weight"),
        "position_embeddings": table if distil else table + state.pop(segments)[0],
    }
    out |= {f"norm.{kind}": state.pop(f"{prefix}embeddings.LayerNorm.{kind}") for kind in ("weight", "bias")}
    names = DISTIL_NAMES if distil else BERT_NAMES
    for n in range(_value(config, "num_hidden_layers", 12)):
        at = f"{prefix}{'transformer' if distil else 'encoder'}.layer.{n}."
        for kind in ("weight", "bias"):
            parts = {ours: [state.pop(f"{at}{name}.{kind}") for name in theirs] for ours, theirs in names.items()}
            out |= {f"layers.{n}.{ours}.{kind}": torch.cat(values) for ours, values in parts.items()}
    if more := surplus(state, ("embeddings", "encoder", "transformer"), prefix.rstrip(".")):
        raise ValueError(f"the weights hold {', '.join(more[:3])}, which config.json lacks: copy both again.")
    return out


BERT_NAMES = {
    "attention.qkv": [f"attention.self.{name}" for name in ("query", "key", "value")],
    "attention.out": ["attention.output.dense"],
    "norm1": ["attention.output.LayerNorm"],
    "mlp.fc": ["intermediate.dense"],
    "mlp.proj": ["output.dense"],
    "norm2": ["output.LayerNorm"],
}
DISTIL_NAMES = {
    "attention.qkv": [f"attention.{name}" for name in ("q_lin", "k_lin", "v_lin")],
    "attention.out": ["attention.out_lin"],
    "norm1": ["sa_layer_norm"],
    "mlp.fc": ["ffn.lin1"],
    "mlp.proj": ["ffn.lin2"],
    "norm2": ["output_layer_norm"],
}


def _old_name(name: str) -> str:
    """LayerNorm's parameters are named gamma and beta in files converted from TensorFlow."""
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


def _prefix(state: dict[str, Tensor]) -> str:
    """What stands before the encoder's names in a file that was saved with a head, such as "bert."."""
    end = "embeddings.word_embeddings.weight"
    return next((name.removesuffix(end) for name in state if name.endswith(end)), "")
