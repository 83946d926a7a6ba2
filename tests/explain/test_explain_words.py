"""Where a decoder looks for each word, against the attention itself, written out; captions of every kind."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from kiloword.api import Matcher
from kiloword.config.recipes import HeadConfig, ImageConfig, sizes
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.explain.words import END, explain_words, log_probabilities, words_of
from kiloword.methods.coca.coca import caption_loss
from kiloword.methods.registry import preset
from kiloword.model.attention import Packing
from kiloword.model.decoder import TextDecoder
from kiloword.models.build import build
from kiloword.types import Texts
from noise import noise

CAPTIONS = ["a red circle", "two blue squares", "a green star left of a circle", ""]
IMAGE = ImageConfig(size=48, patch=16, width=32, depth=2, heads=2, mlp=64)  # 1 + 9 tokens


def matcher(method: str = "coca", settings: dict[str, Any] | None = None, **head: Any) -> Matcher:
    config = replace(sizes()["debug"], image=IMAGE, head=replace(HeadConfig(dim=16, pool_heads=2), **head))
    made = preset(method, settings or {})
    return Matcher(build(config, made, seed=1), Tokenizer.train(CAPTIONS[:2] * 3, 300), made)


def pixels(n: int = 2) -> Tensor:
    return noise(n, 48)


def literal(model: Matcher, image: Tensor, caption: str) -> tuple[Tensor, Tensor]:
    """One image, one caption, head by head: attention [L, 9] of every predicting place, log probabilities [L]."""
    m, decoder = model.model, model.model.more["text_decoder"]
    assert isinstance(decoder, TextDecoder)
    texts = model.tokenizer.encode([caption], m.config.text)
    end = len(texts.ids) - len(m.config.text.extra_tokens)
    x = m.text_tower(texts)[: end - 1]
    patches = m.image_tokens(image[None])[0]
    memory, pool = patches, torch.eye(10)
    if m.config.head.image_pool == "attentional":
        memory = m.memory(patches[None])[0]
        own: Any = m.head.pooling
        attention = own.image_pool.attentional.attention
        queries = own.image_pool.attentional.norm_query(own.image_pool.attentional.probes[1:])
        pool = heads(attention.q(queries), attention.kv(patches)[:, : queries.shape[1]], attention.heads)
    for layer in decoder.layers:
        part: Any = layer
        whole = Texts(texts.ids[: end - 1], torch.tensor([0, end - 1]), end - 1)
        packing = Packing.of(whole)
        x = part.own(x, packing, True)
        cross = part.cross
        keys = cross.attention.kv(cross.norm_memory(memory))[:, : x.shape[1]]
        looks = heads(cross.attention.q(cross.norm1(x)), keys, cross.attention.heads) @ pool  # the last layer's remain
        x = cross(x, cross.keys(memory[None]), packing)
    log_p = (decoder.norm(x) @ decoder.table(m.text_tower.tokens).T).log_softmax(-1)
    chosen = log_p[torch.arange(end - 1), texts.ids[1:end]]
    return looks[:, 1:], chosen


def heads(q: Tensor, k: Tensor, n: int) -> Tensor:
    """Mean over heads of softmax(q k^T / sqrt(d)): [L, M]."""
    d = q.shape[1] // n
    parts = [(q[:, h * d : h * d + d] @ k[:, h * d : h * d + d].T / d**0.5).softmax(-1) for h in range(n)]
    return sum(parts) / n  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("method", "head"),
    [("coca", {}), ("coca", {"image_pool": "attentional", "pool_queries": 5}), ("llip+caption", {})],
)
def test_maps_are_the_attention_written_out(method: str, head: dict[str, Any]) -> None:
    model = matcher(method, {"k": 1} if "llip" in method else None, **head)
    with torch.no_grad():
        found = explain_words(model, pixels(), CAPTIONS[:3])
        for i, row in enumerate(found):
            for caption, maps in zip(CAPTIONS, row, strict=False):
                looks, log_p = literal(model, pixels()[i], caption)
                ids = model.tokenizer.encode([caption], model.model.config.text).ids.tolist()
                groups = words_of(model.tokenizer, ids[1 : 1 + len(looks) - 1])
                assert maps.words == [*caption.split(), END]
                for n, places in enumerate([*(places for _, places in groups), [len(looks) - 1]]):
                    own = torch.stack([looks[place] / looks[place].sum() for place in places]).mean(0)
                    torch.testing.assert_close(maps.maps[n], own)
                    torch.testing.assert_close(maps.on_patches[n], looks[places].sum(1).mean())
                    torch.testing.assert_close(maps.probabilities[n], log_p[places].sum().exp())
                torch.testing.assert_close(maps.maps.sum(1), torch.ones(len(maps.words)))
    assert not torch.allclose(found[0][0].maps[0], found[1][0].maps[0], rtol=1e-3)


def test_probabilities_are_those_of_the_caption_loss() -> None:
    model = matcher()
    m, decoder = model.model, model.model.more["text_decoder"]
    assert isinstance(decoder, TextDecoder)
    with torch.no_grad():
        texts = model.tokenizer.encode(CAPTIONS, m.config.text)
        tokens, keys = m.text_tower(texts), decoder.remember(m.image_tokens(pixels(4)))
        log_p, packing = log_probabilities(m, decoder, texts, tokens, keys)
        expected = caption_loss(m, texts, tokens, keys)
    torch.testing.assert_close(-log_p.sum(), expected)
    assert len(log_p) == len(packing.text)
    (row,) = explain_words(model, pixels(4)[:1], CAPTIONS[:1])
    torch.testing.assert_close(row[0].probabilities.log().sum(), log_p[packing.text == 0].sum())


def test_captions_of_every_kind(tmp_path: Path) -> None:
    """None of the training words, one word, no word, too many; images of odd sizes and colours."""
    model = matcher()
    Image.new("L", (500, 9), 90).save(tmp_path / "wide.png")
    Image.fromarray(np.zeros((3, 2, 3), np.uint8)).save(tmp_path / "tiny.png")
    captions = ["naïve, 日本!", "x", "", "word " * 200]
    found = explain_words(model, [tmp_path / "wide.png", tmp_path / "tiny.png"], captions)
    assert [len(row) for row in found] == [4, 4]
    assert found[0][0].words == ["naïve,", "日本!", END]
    assert found[0][1].words == ["x", END]
    assert found[0][2].words == [END]
    assert 5 < len(found[0][3].words) < model.model.config.text.context
    for row in found:
        for maps in row:
            assert maps.maps.shape == (len(maps.words), 9)
            torch.testing.assert_close(maps.maps.sum(1), torch.ones(len(maps.words)))
            assert ((maps.probabilities >= 0) & (maps.probabilities <= 1)).all()


def test_words_keep_all_tokens_in_order() -> None:
    tokenizer = Tokenizer.train(["a red circle"] * 3, 300)
    config = sizes()["debug"].text
    for caption in ("a  red\tcircle", "réd", " é日 ", "a.b , c", "🦓 zebra"):
        ids = tokenizer.encode([caption], config).ids.tolist()[1:-1]
        groups = words_of(tokenizer, ids)
        assert [n for _, tokens in groups for n in tokens] == list(range(len(ids))), caption
        assert [word for word, _ in groups] == caption.split()
    assert words_of(tokenizer, []) == []


def test_models_that_do_not_write_are_refused() -> None:
    plain, answers = matcher("clip"), matcher()
    answers.model.more["fuser"] = torch.nn.Identity()
    for model, texts, said in (
        (plain, ["a"], "no text decoder"),
        (answers, ["a"], "answers questions"),
        (matcher(), [], "no texts"),
        (matcher(), "a red circle", "list of strings"),
    ):
        with pytest.raises(ValueError, match=said):
            explain_words(model, pixels(), texts)
