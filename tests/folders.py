"""Models and encoders of texts that no training made, and their folders as kiloword and transformers write them."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any, Literal

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors
from torch import Tensor

from kiloword.api import Matcher
from kiloword.config.recipes import ModelFile, sizes
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.methods.registry import preset
from kiloword.models.build import build
from kiloword.models.model_folder import save_model

TextPool = Literal["last", "mean", "max"]
CAPTIONS = ["a dog on the grass", "two cats and a dog", "the red circle is left of a blue star"] * 5

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [
    *SPECIAL,
    *"abcdefghijklmnopqrstuvwxyz0123456789.,'",
    *(f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz0123456789"),
]
WORDS += ["red", "green", "blue", "circle", "square", "large", "small", "of", "the", "and", "left"]
BERT: dict[str, Any] = {
    "model_type": "bert",
    "vocab_size": len(WORDS),
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "max_position_embeddings": 40,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
    "pad_token_id": 0,
}
ROBERTA = {**BERT, "model_type": "roberta", "pad_token_id": 1, "hidden_act": "gelu_new"}
DISTIL: dict[str, Any] = {
    "model_type": "distilbert",
    "vocab_size": len(WORDS),
    "dim": 24,
    "n_layers": 2,
    "n_heads": 3,
    "hidden_dim": 40,
    "max_position_embeddings": 40,
    "activation": "gelu",
}


def matcher(method: str = "siglip", seed: int = 0) -> Matcher:
    """A fresh model of size "debug" with a small tokenizer."""
    made = preset(method)
    return Matcher(build(made.shape(sizes()["debug"]), made, seed), Tokenizer.train(CAPTIONS, 300))


def model_folder(
    out: Path, method: str = "siglip", settings: dict[str, Any] | None = None, text_pool: TextPool | None = None
) -> Path:
    """A fresh model of size "debug" with its tokenizer. Args: text_pool: None: that of the size. Returns: `out`."""
    tokenizer, config = Tokenizer.train(CAPTIONS, 400), sizes()["debug"]
    text = replace(config.text, vocab=tokenizer.vocab, special=tokenizer.roles.ids())
    head = replace(config.head, text_pool=text_pool or config.head.text_pool)
    file = ModelFile(method=method, settings=settings or {}, model=replace(config, text=text, head=head), size="debug")
    save_model(out, build(file.model, preset(method, settings), seed=1), tokenizer, file)
    return out


def changed(folder: Path, file: str, **values: Any) -> Path:
    """The folder with other values in one of its json files, by their names; __ stands for the dots between."""
    document = json.loads((folder / file).read_text(encoding="utf-8"))
    for name, value in values.items():
        *parts, last = name.split("__")
        reduce(lambda inner, part: inner[part], parts, document)[last] = value
    (folder / file).write_text(json.dumps(document), encoding="utf-8")
    return folder


def state_of(config: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Random weights of an encoder under the names of transformers."""
    distil = config["model_type"] == "distilbert"
    width, mlp = (config[name] for name in (("dim", "hidden_dim") if distil else ("hidden_size", "intermediate_size")))
    draw = torch.Generator().manual_seed(seed)

    def linear(out: int, into: int) -> dict[str, Tensor]:
        return {"weight": torch.randn(out, into, generator=draw) * 0.2, "bias": torch.randn(out, generator=draw) * 0.1}

    def norm() -> dict[str, Tensor]:
        return {
            "weight": 1 + torch.randn(width, generator=draw) * 0.1,
            "bias": torch.randn(width, generator=draw) * 0.1,
        }

    parts = {"embeddings.LayerNorm": norm()}
    tables = {"word": config["vocab_size"], "position": config["max_position_embeddings"]}
    for name, rows in (tables if distil else {**tables, "token_type": 2}).items():
        parts[f"embeddings.{name}_embeddings"] = {"weight": linear(rows, width)["weight"]}
    for n in range(2):
        at = f"transformer.layer.{n}." if distil else f"encoder.layer.{n}."
        square = (
            "attention.q_lin attention.k_lin attention.v_lin attention.out_lin"
            if distil
            else ("attention.self.query attention.self.key attention.self.value attention.output.dense")
        )
        names = ["sa_layer_norm", "output_layer_norm"] if distil else ["attention.output.LayerNorm", "output.LayerNorm"]
        parts |= {at + name: linear(width, width) for name in square.split()}
        parts |= {at + name: norm() for name in names}
        parts[at + ("ffn.lin1" if distil else "intermediate.dense")] = linear(mlp, width)
        parts[at + ("ffn.lin2" if distil else "output.dense")] = linear(width, mlp)
    return {f"{part}.{kind}": value for part, values in parts.items() for kind, value in values.items()}


def word_pieces() -> tokenizers.Tokenizer:
    """A WordPiece tokenizer that lower-cases, pads to 16 ids and truncates to 12, as published folders do."""
    backend = tokenizers.Tokenizer(models.WordPiece({w: n for n, w in enumerate(WORDS)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    backend.add_special_tokens(SPECIAL)
    backend.enable_padding(length=16)
    backend.enable_truncation(12)
    return backend


def write_encoder(folder: Path, config: dict[str, Any] = BERT, seed: int = 0) -> Path:
    """Write a folder with config.json, model.safetensors and tokenizer.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(state_of(config, seed), folder / "model.safetensors")
    word_pieces().save(str(folder / "tokenizer.json"))
    return folder
