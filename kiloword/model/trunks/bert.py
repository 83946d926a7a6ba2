"""BERT and its relatives over packed texts: post-norm transformers with learned positions."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kiloword.config.recipes import Activation, TextConfig
from kiloword.model.blocks import Block
from kiloword.model.trunks.libraries import check_numbers, surplus
from kiloword.model.trunks.trunk import Trunk

ACTIVATIONS: dict[str, Activation] = {  # transformers' names
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",  # before the other name of it, as exports write the first
    "gelu_new": "gelu_tanh",
    "quick_gelu": "quick_gelu",
}
OFFSET = ("roberta", "xlm-roberta")  # their first position is that after the pad's
TYPES = ("bert", *OFFSET, "distilbert")
DISTIL = {"hidden_size": "dim", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads"}
DISTIL |= {"intermediate_size": "hidden_dim", "hidden_act": "activation"}
USUAL: dict[str, Any] = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
USUAL |= {"intermediate_size": 3072, "vocab_size": 30522, "max_position_embeddings": 512, "pad_token_id": 1}
USUAL |= {"hidden_act": "gelu", "layer_norm_eps": 1e-12}
OTHERS: dict[str, dict[str, Any]] = {  # model_type -> what is usual there
    "clip_text_model": {"hidden_size": 512, "vocab_size": 49408, "max_position_embeddings": 77},
    "siglip_text_model": {"vocab_size": 32000, "max_position_embeddings": 64},
}


def value(config: dict[str, Any], name: str) -> Any:
    """A setting of an encoder of texts, by BERT's name of it. Raises: ValueError for one of another type."""
    kind = str(config.get("model_type", ""))
    usual = OTHERS.get(kind, {}).get(name, USUAL[name])
    found = config.get(DISTIL.get(name, name) if kind == "distilbert" else name, usual)
    if not isinstance(found, type(usual)):
        raise ValueError(f"{name} of the text trunk is {str(found)[:60]}: expected a value such as {usual}")
    return found


def is_bert(config: dict[str, Any]) -> bool:
    """Whether `Bert` computes what a config.json of transformers describes."""
    others = any(config.get(name) for name in ("is_decoder", "add_cross_attention", "sinusoidal_pos_embds"))
    absolute = config.get("position_embedding_type", "absolute") == "absolute" and not others
    return absolute and config.get("model_type") in TYPES and value(config, "hidden_act") in ACTIVATIONS


class Bert(Trunk):
    """BERT, RoBERTa, XLM-RoBERTa and DistilBERT: packed texts to tokens [S, W'], equal to transformers'.

    Every text is a first segment: that segment's embedding is part of the positions'.
    Source: arXiv:1810.04805; arXiv:1907.11692; arXiv:1910.01108.

    Args: config: a config.json of transformers for which `is_bert` holds.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        check_numbers(config, "the config of the text trunk")
        names = ("hidden_size", "num_attention_heads", "intermediate_size", "num_hidden_layers", "layer_norm_eps")
        width, heads, mlp, depth, eps = (value(config, name) for name in names)
        activation = ACTIVATIONS[value(config, "hidden_act")]
        self.token_embeddings = nn.Parameter(torch.empty(value(config, "vocab_size"), width))
        self.position_embeddings = nn.Parameter(torch.empty(positions_of(config), width))
        self.norm = nn.LayerNorm(width, eps)
        shape = TextConfig(width=width, heads=heads, mlp=mlp, activation=activation, norm_eps=eps)
        self.layers = nn.ModuleList(Block(shape, depth, post_norm=True) for _ in range(depth))

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


def positions_of(config: dict[str, Any]) -> int:
    """Longest text of an encoder of texts, in tokens."""
    before = 2 if config.get("model_type") == "mpnet" else first_position(config)
    return int(value(config, "max_position_embeddings")) - before


def first_position(config: dict[str, Any]) -> int:
    """The row of the position table that the first token of a text takes."""
    return int(value(config, "pad_token_id")) + 1 if config.get("model_type") in OFFSET else 0


def converted(state: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    """The weights of `Bert` from those of transformers; heads that follow the encoder are omitted.

    Raises: KeyError naming a tensor that is missing, ValueError naming those of layers beyond the config.
    """
    distil, end = config.get("model_type") == "distilbert", "embeddings.word_embeddings.weight"
    # files converted from TensorFlow name the parameters of LayerNorm gamma and beta
    state = {
        name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias"): x
        for name, x in state.items()
    }
    # of a file that was saved with a head: what stands before the encoder's names, such as "bert."
    prefix = next((name.removesuffix(end) for name in state if name.endswith(end)), "")
    table = state.pop(f"{prefix}embeddings.position_embeddings.weight")[first_position(config) :]
    segments = f"{prefix}embeddings.token_type_embeddings.weight"
    out = {
        "token_embeddings": state.pop(f"{prefix}{end}"),
        "position_embeddings": table if distil else table + state.pop(segments)[0],
    }
    out |= {f"norm.{kind}": state.pop(f"{prefix}embeddings.LayerNorm.{kind}") for kind in ("weight", "bias")}
    names = DISTIL_NAMES if distil else BERT_NAMES
    for n in range(value(config, "num_hidden_layers")):
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
