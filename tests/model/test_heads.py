"""Pools, scores and ensembles against loops; scale and bias; precision."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from kiloword.config.recipes import HeadConfig, TextConfig, sizes
from kiloword.model.heads import Head, Scale, Single
from kiloword.model.model import Model, initialise
from kiloword.model.pooling import AttentionPool, ImagePool, TextPool
from kiloword.types import Features, Texts
from parts import drawn

DEBUG = sizes()["debug"]


def head(**scale: Any) -> Head:
    made = Head(Single(DEBUG), scale=Scale(**scale)).double()
    initialise(made, 0)
    return made


@pytest.mark.parametrize("kind", ["cls", "mean", "max"])
def test_image_pools(kind: Literal["cls", "mean", "max"]) -> None:
    tokens = drawn(2, 3 + 4, 32)  # class token, two extra ones, four patches
    got = ImagePool(replace(DEBUG.image, extra_tokens=2), HeadConfig(image_pool=kind))(tokens)
    patches = tokens[:, 3:]
    expected = {"cls": tokens[:, 0], "mean": patches.mean(1), "max": patches.max(1).values}[kind]
    assert torch.allclose(got, expected)


def test_attention_pool_is_softmax_of_the_mean_over_patches() -> None:
    """CLIP's: the mean and its patches, with positions; two heads, one at a time."""
    pool = AttentionPool(replace(DEBUG.image, width=8, heads=2, patch=DEBUG.image.size // 2)).double()
    nn.init.normal_(pool.positions)
    patches = drawn(3, 4, 8)
    x = torch.cat([patches.mean(1, keepdim=True), patches], 1) + pool.positions
    q, (k, v) = pool.q(x[:, 0]), pool.kv(x).split(8, -1)
    heads = []
    for part in (slice(0, 4), slice(4, 8)):
        weights = (torch.einsum("nd,npd->np", q[:, part], k[:, :, part]) / 2).softmax(1)
        heads.append(torch.einsum("np,npd->nd", weights, v[:, :, part]))
    assert torch.allclose(pool(patches), torch.cat(heads, 1))


def test_a_decoder_reads_all_queries_but_the_first_of_attentional_pooling() -> None:
    pool: Any = ImagePool(DEBUG.image, HeadConfig(image_pool="attentional", pool_queries=3)).double()
    nn.init.normal_(pool.attentional.probes)
    tokens = drawn(2, 5, DEBUG.image.width)
    every = pool.attentional(tokens, slice(None))
    assert torch.allclose(pool.memory(tokens), every[:, 1:])
    assert torch.allclose(pool(tokens), every[:, 0])


def test_map_pool_against_torch() -> None:
    pool = ImagePool(replace(DEBUG.image, class_token=False), HeadConfig(image_pool="map")).double()
    initialise(pool, 0)
    tokens = drawn(3, 4, 32)
    attend = nn.MultiheadAttention(32, DEBUG.image.heads, batch_first=True).double()
    inner: Any = pool.map
    attend.in_proj_weight.data = torch.cat([inner.q.weight, inner.kv.weight]).detach()
    attend.in_proj_bias.data.zero_()
    attend.out_proj.load_state_dict(inner.out.state_dict())
    x = attend(inner.probe.expand(3, 1, -1), tokens, tokens)[0][:, 0]
    assert torch.allclose(pool(tokens), x + inner.mlp(inner.norm(x)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["last", "mean", "max"])
@pytest.mark.parametrize("extra", [(), ("unc",), ("cls",), ("cls", "unc")])
def test_text_pools(kind: Literal["last", "mean", "max"], extra: tuple[str, ...]) -> None:
    config = TextConfig(width=8, heads=2, extra_tokens=extra)
    texts = Texts.pack([[0] * (n + len(extra)) for n in (3, 1, 5)])
    tokens = drawn(len(texts.ids), 8).requires_grad_()
    rows = []
    for part in tokens.split(texts.starts.diff().tolist()):
        words = part[: len(part) - len(extra)]
        last = part[len(words) + extra.index("cls")] if "cls" in extra else words[-1]
        rows.append({"last": last, "mean": words.mean(0), "max": words.max(0).values}[kind])
    got, expected = TextPool(config, kind)(tokens, texts), torch.stack(rows)
    assert torch.allclose(got, expected)
    weights = drawn(3, 8, seed=3)
    gradients = [torch.autograd.grad((x * weights).sum(), tokens)[0] for x in (got, expected)]
    assert torch.allclose(gradients[0], gradients[1], rtol=0, atol=1e-12)


def test_ensemble_is_the_normalised_mean() -> None:
    h = head()
    vec = torch.nn.functional.normalize(drawn(5, 16), dim=1)
    group, weights = torch.tensor([0, 1, 0, 1, 1]), torch.tensor([0.5, 0.2, 0.5, 0.3, 0.5], dtype=torch.float64)
    for w in (None, weights):
        got = h.ensemble({"vec": vec}, group, 2, w)["vec"]
        for c in range(2):
            some = vec[group == c] if w is None else vec[group == c] * w[group == c, None]
            assert torch.allclose(got[c], some.sum(0) / some.sum(0).norm())


class InBlocks(Single):
    """Two images with three texts at once."""

    def block(self, images: Features, texts: Features) -> tuple[int, int]:
        return 2, 3

    def score(self, images: Features, texts: Features) -> Tensor:
        return images["vec"].abs() @ texts["vec"].T


def test_blocks_do_not_change_scores() -> None:
    images, texts = {"vec": drawn(5, 16)}, {"vec": drawn(7, 16, seed=1)}
    model = Model(DEBUG, Head(InBlocks(DEBUG), scale=Scale()))
    scores = model.score(images, texts)
    assert torch.allclose(scores, images["vec"].abs() @ texts["vec"].T, rtol=0, atol=1e-14)
    assert torch.allclose(model.head.score_pairs(images, {"vec": texts["vec"][:5]}), scores.diagonal())


def test_half_precision_features_are_scored_in_single() -> None:
    h = head().bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        vec = h.image(drawn(2, 5, 32).bfloat16())["vec"]
        assert vec.dtype == torch.float32
        assert h.score({"vec": vec.bfloat16()}, {"vec": vec}).dtype == torch.float32
        assert h.logits(h.score({"vec": vec}, {"vec": vec})).dtype == torch.float32


def test_a_larger_loaded_scale_is_its_own_limit_also_after_a_resume() -> None:
    h = head(limit=100.0)
    foreign = {k: v for k, v in h.state_dict().items() if k != "log_limit"}
    h.load_state_dict({**foreign, "log_scale": torch.tensor([math.log(112.3)])})
    h.clamp_()
    assert h.log_scale.exp().item() == pytest.approx(112.3)
    h.log_scale.data.fill_(math.log(105.0))  # trained down, saved, resumed: the limit is still 112.3
    resumed = head(limit=100.0)
    resumed.load_state_dict(h.state_dict())
    resumed.log_scale.data.fill_(5.0)
    resumed.clamp_()
    assert resumed.log_scale.exp().item() == pytest.approx(112.3)
    head().load_state_dict(h.state_dict())  # which has no limit
