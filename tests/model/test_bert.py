"""Our packed BERT against a literal transcription, one text at a time, head by head."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from folders import BERT, DISTIL, ROBERTA, state_of
from kiloword.config.recipes import TextConfig, TrunkConfig
from kiloword.model.attention import Packing
from kiloword.model.text import TextTower
from kiloword.model.trunks.bert import Bert, converted
from kiloword.model.trunks.padded import text_trunk
from kiloword.types import Batch, Texts

TEXTS = Texts.pack([[2, 7, 8, 3], [2, 3], [2, 9, 8, 7, 6, 5, 20, 11, 12, 3], [2, 44, 3]])


def literal(state: dict[str, Tensor], config: dict[str, Any], ids: Tensor) -> Tensor:
    """Hidden states [L, W] of one text: the equations of arXiv:1810.04805 and 1706.03762, post-norm."""
    distil, roberta = config["model_type"] == "distilbert", config["model_type"] == "roberta"

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ state[f"{name}.weight"].T + state[f"{name}.bias"]

    def norm(x: Tensor, name: str) -> Tensor:
        mean, variance = x.mean(-1, keepdim=True), x.var(-1, unbiased=False, keepdim=True)
        return (x - mean) / (variance + 1e-12).sqrt() * state[f"{name}.weight"] + state[f"{name}.bias"]

    def gelu(x: Tensor) -> Tensor:
        if roberta:
            return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))

    x = state["embeddings.word_embeddings.weight"][ids]
    for n in range(len(ids)):
        x[n] += state["embeddings.position_embeddings.weight"][n + (config["pad_token_id"] + 1 if roberta else 0)]
        x[n] += 0 if distil else state["embeddings.token_type_embeddings.weight"][0]
    x = norm(x, "embeddings.LayerNorm")
    for n in range(2):
        at = f"transformer.layer.{n}." if distil else f"encoder.layer.{n}."
        q, k, v = (
            linear(x, at + ("attention." + name + "_lin" if distil else f"attention.self.{full}"))
            for name, full in (("q", "query"), ("k", "key"), ("v", "value"))
        )
        heads = []
        for h in range(3):
            part = slice(8 * h, 8 * h + 8)
            heads.append((q[:, part] @ k[:, part].T / math.sqrt(8)).softmax(-1) @ v[:, part])
        mixed = linear(torch.cat(heads, 1), at + ("attention.out_lin" if distil else "attention.output.dense"))
        x = norm(x + mixed, at + ("sa_layer_norm" if distil else "attention.output.LayerNorm"))
        hidden = gelu(linear(x, at + ("ffn.lin1" if distil else "intermediate.dense")))
        out = linear(hidden, at + ("ffn.lin2" if distil else "output.dense"))
        x = norm(x + out, at + ("output_layer_norm" if distil else "output.LayerNorm"))
    return x


@pytest.mark.parametrize("config", [BERT, ROBERTA, DISTIL], ids=lambda c: c["model_type"])
def test_packed_equals_one_by_one(config: dict[str, Any]) -> None:
    state = state_of(config)
    saved = {  # as a model with a head saves it
        f"{config['model_type']}.{name}".replace("LayerNorm.weight", "LayerNorm.gamma"): value
        for name, value in state.items()
    }
    trunk = Bert(config)
    trunk.load_state_dict(converted({**saved, "cls.bias": torch.zeros(3)}, config))
    expected = torch.cat([literal(state, config, TEXTS.cut(t, t + 1).ids) for t in range(len(TEXTS))])
    for packing in (Packing.of(TEXTS), Packing.of(TEXTS, 16)):  # with rows of padding behind all texts, too
        tokens = trunk(TEXTS, packing)[: len(TEXTS.ids)]
        torch.testing.assert_close(tokens, expected, rtol=0, atol=1e-5)
    prefixes = [prefix for block in trunk.blocks() for prefix in block]
    assert all(sum(name.startswith(prefix) for prefix in prefixes) == 1 for name, _ in trunk.named_parameters())
    assert len(trunk.blocks()) == 2


def tower(extra: tuple[str, ...] = (), depth: int = 1, seed: int = 0) -> TextTower:
    torch.manual_seed(seed)
    special = {"start": 2, "end": 3, "pad": 0, "mask": 4, "cls": 90, "unc": 91}
    trunk = TrunkConfig(name="hf", width=24, config=BERT)
    small = TextConfig(trunk=trunk, context=30, width=16, depth=depth, heads=2, mlp=32, causal=False, vocab=92)
    made = TextTower(replace(small, special=special, extra_tokens=extra))
    for name, p in made.named_parameters():
        torch.nn.init.normal_(p, 1.0 if name.endswith("norm.weight") else 0.0, 0.2)
    assert made.trunk is not None
    made.trunk.load_state_dict(converted(state_of(BERT), BERT))
    return made


def with_extra(*extra: int) -> Texts:
    return Texts.pack([[*TEXTS.cut(t, t + 1).ids.tolist(), *extra] for t in range(len(TEXTS))])


def test_a_tower_of_depth_0_is_a_layer_on_the_trunk() -> None:
    made = tower(depth=0)
    assert made.trunk is not None
    assert made.stem is not None
    words = made.trunk(TEXTS, Packing.of(TEXTS))
    places = torch.cat([torch.arange(n) for n in TEXTS.starts.diff().tolist()])
    expected = F.layer_norm(made.stem(words) + made.positions[places], (16,), made.norm.weight, made.norm.bias)
    torch.testing.assert_close(made(TEXTS), expected)


def test_given_tokens_take_the_place_of_the_trunk() -> None:
    made, texts = tower(("unc", "cls")), with_extra(91, 90)
    full = made.with_tokens(texts)
    assert full.tokens is not None
    assert not full.tokens[texts.ids >= 90].any()
    assert made.with_tokens(full) is full
    expected = made(texts)
    made.trunk = torch.nn.Identity()  # type: ignore[assignment]  # not asked
    torch.testing.assert_close(made(full), expected, rtol=0, atol=0)
    stored = Texts(full.ids, full.starts, full.longest, tokens=full.tokens.half())
    torch.testing.assert_close(made(stored), expected, rtol=0, atol=2e-3)
    with pytest.raises(ValueError, match=r"width 7.* 24"):
        made(replace(full, tokens=torch.zeros(len(full.ids), 7)))


def test_extra_tokens_are_learned_and_hidden_words_masked() -> None:
    """The trunk sees neither; each has its own vector, which alone moves the output of a change of it."""
    made, texts = tower(("unc", "cls")), with_extra(91, 90)
    embedded = made.embed(texts, made.packing(texts)) - made.positions[made.packing(texts).place]
    torch.testing.assert_close(embedded[texts.ids == 91], made.tokens[3].expand(4, -1))
    torch.testing.assert_close(embedded[texts.ids == 90], made.tokens[2].expand(4, -1))
    torch.testing.assert_close(tower().with_tokens(TEXTS).tokens, made.with_tokens(texts).tokens[texts.ids < 90])  # type: ignore[index]
    hidden = made.with_tokens(texts)
    hidden.ids = torch.where(hidden.ids == 8, 4, hidden.ids)
    masked = made.embed(hidden, made.packing(hidden)) - made.positions[made.packing(hidden).place]
    torch.testing.assert_close(masked[texts.ids == 8], made.tokens[0].expand(2, -1))
    torch.testing.assert_close(masked[texts.ids != 8], embedded[texts.ids != 8])


def test_a_frozen_trunk_keeps_no_graph() -> None:
    made = tower()
    assert made.trunk is not None
    made.trunk.requires_grad_(False)
    made.train()
    assert not made.with_tokens(TEXTS).tokens.requires_grad  # type: ignore[union-attr]
    made(TEXTS).sum().backward()
    assert made.stem.weight.grad is not None  # type: ignore[union-attr]
    assert all(p.grad is None for p in made.trunk.parameters())
    made.trunk.layers[1].requires_grad_(True)  # type: ignore[index]
    made(TEXTS).square().sum().backward()
    trained = {name for name, p in made.trunk.named_parameters() if p.grad is not None}
    assert trained
    assert all(name.startswith("layers.1.") for name in trained)


def test_tokens_go_where_ids_go() -> None:
    texts = Texts.pack([[0, 7, 8, 1], [0, 9, 1], [0, 6, 7, 8, 1]])
    texts = replace(texts, tokens=torch.arange(12.0)[:, None])
    none = torch.zeros(2).long()
    first, second = Batch(torch.zeros(2, 1), texts, torch.tensor([0, 0, 1]), none, none, none > 0).split(2)
    assert [part.texts.tokens[:, 0].tolist() for part in (first, second)] == [[*range(7)], [*range(7, 12)]]  # type: ignore[index]
    place, spans = texts.spans(torch.tensor([8, 1]), torch.tensor([2, 1]), 3)
    assert spans.tokens is not None
    assert spans.tokens[:, 0].tolist() == place.tolist() == [8, 9, 1]
    assert first.each(torch.Tensor.double).texts.tokens.dtype == torch.float64  # type: ignore[union-attr]


def built(config: dict[str, Any]) -> Callable[[], object]:
    trunk = TrunkConfig(name="hf", width=24, config=config)
    return lambda: text_trunk(TextConfig(trunk=trunk, context=16))


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (built({**BERT, "hidden_size": "many"}), "hidden_size"),
        (built({**BERT, "num_hidden_layers": 1 << 20}), "num_hidden_layers"),
        (built({**BERT, "vocab_size": 1 << 40}), "vocab_size"),
        (built({**BERT, "num_attention_heads": 5}), "5 heads"),
        (built({**BERT, "max_position_embeddings": 8}), "--model.text.context of 8"),
        (built({**ROBERTA, "max_position_embeddings": 2}), "context"),
        (built({**BERT, "model_type": "gpt2"}), "gpt2"),
        (built({**BERT, "model_type": ["bert"]}), "unknown"),
        (lambda: tower(("unc", "cls"), depth=0), "--model.text.depth 1"),  # nothing fills them
        (lambda: TextTower(TextConfig(depth=0)), "needs a trunk"),
    ],
)
def test_what_cannot_be_built(make: Callable[[], object], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        make()
