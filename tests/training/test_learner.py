"""Losses, learner, accumulation and optimizer against slow, literal references."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from torch import Tensor, nn

from kiloword.config.recipes import OptimConfig, sizes
from kiloword.losses.pairs import sigmoid_loss, softmax_loss
from kiloword.methods.defaults import default_recipe
from kiloword.methods.method import Between, Method, Part, Term, annotated
from kiloword.methods.registry import preset
from kiloword.model.heads import Head, Pooling, Scale
from kiloword.models.build import build
from kiloword.training import optimizer
from kiloword.training.optimizer import Average, Muon, Optimizer, schedule, warmup_steps
from kiloword.training.setup import make_learner
from kiloword.training.step import Learner, backward, kept
from kiloword.types import Batch, Encoded
from kiloword.verify.batch import batch
from kiloword.verify.suite import learner
from parts import blocks, cosine, gradients, size, units

CONFIG = sizes()["debug"]
NAMES = ("clip", "siglip")


@pytest.mark.parametrize("loss", [softmax_loss, sigmoid_loss])
def test_large_logits_stay_finite(loss: Any) -> None:
    vec = units(3, 6).requires_grad_()
    total = loss(blocks(cosine(1e4, 0.0), {"vec": vec}, {"vec": units(3, 6, seed=1)}), annotated)
    assert total.sum.isfinite()
    assert torch.autograd.grad(total.sum, vec)[0].isfinite().all()


# Learner and accumulation


class Words(Term):
    """A term with a parameter, whose count differs between micro-batches: mean square of the text tokens."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))

    def count(self, batch: Batch) -> Tensor:
        return torch.tensor(len(batch.texts.ids))

    def forward(self, model: Any, batch: Batch, encoded: Encoded) -> Tensor:
        return (self.gain * encoded.text_tokens).square().mean(1).sum()


def with_term(name: str, weight: float = 0.3) -> Method:
    return replace(preset(name), terms={"words": (weight, Part(Words))})


def pair_loss(name: str, logits: Tensor, y: Tensor) -> Tensor:
    """Of all pairs at once; several positives share a row's (a column's) probability equally."""
    if name == "siglip":
        return F.binary_cross_entropy_with_logits(logits, y, reduction="sum") / len(logits)
    ways = ((z.log_softmax(1) * t / t.sum(1, keepdim=True)).sum(1).mean() for z, t in ((logits, y), (logits.T, y.T)))
    return -sum(ways, logits.new_zeros(())) / 2


def reference_gradients(name: str, some: Batch) -> tuple[dict[str, Tensor], Tensor]:
    """One plain forward pass, one autograd: no blocks, no replay, no known gradients."""
    learned = Learner(build(CONFIG, with_term(name), 0), with_term(name)).double()
    model = learned.model
    images = model.encode_image(some.images)[1]["vec"]
    tokens, texts = model.encode_text(some.texts)
    y = torch.arange(len(some))[:, None] == some.image_of_text
    logits = model.head.logits(images @ texts["vec"].T)
    pair = pair_loss(name, logits, y.to(logits))
    term = (learned.terms["words"].gain * tokens).square().mean()
    loss = pair + 0.3 * term
    loss.backward()
    return {n: p.grad for n, p in learned.named_parameters() if p.grad is not None}, loss.detach()


@pytest.mark.parametrize("micro", [1, 2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_step_against_plain_autograd(name: str, micro: int) -> None:
    some = batch(0, 8)
    expected, loss = reference_gradients(name, some)
    learned = Learner(build(CONFIG, with_term(name), 0), with_term(name), chunk=3).double()
    found = gradients(learned, some, micro)
    report = {name: float(found.pop(f"loss:{name}")) for name in ("loss", "pair", "words")}
    assert report["loss"] == pytest.approx(float(loss), rel=1e-12)
    assert report["pair"] + 0.3 * report["words"] == pytest.approx(float(loss), rel=1e-12)
    assert found.keys() == expected.keys()
    largest = max(float(g.abs().max()) for g in expected.values())
    for n, gradient in expected.items():
        assert (found[n] - gradient).abs().max() < 1e-10 * largest, n


def test_a_term_that_counts_nothing_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Words, "count", lambda self, batch: torch.tensor(0))
    monkeypatch.setattr(Words, "forward", lambda self, model, batch, encoded: 0 * self.gain)
    found = gradients(Learner(build(CONFIG, with_term("clip"), 0), with_term("clip")).double(), batch(0, 8), 2)
    assert float(found["loss:words"]) == 0
    assert all(bool(g.isfinite().all()) for g in found.values())


def test_a_pair_loss_outside_its_window_is_not_computed() -> None:
    method = replace(with_term("clip"), pair_weight=Between(1.0, 0.5))
    assert "loss:pair" not in gradients(Learner(build(CONFIG, method, 0), method), batch(0, 8), 2)


# How weights change


@pytest.mark.parametrize("half", [False, True])
def test_muon_is_torch_s_muon(half: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the rounding of products in bfloat16, of a fused [3 W, W], an MLP of that shape, several with inputs first."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": half})

    def pieces(x: Tensor, n: int) -> list[Tensor]:
        return [matrix.T for matrix in x] if x.dim() == 3 else list(x.chunk(3 if n == 5 else 1))

    shapes = [(32, 32), (32, 32), (64, 32), (32, 64), (96, 32), (96, 32), (3, 32, 64)]
    generator = torch.Generator().manual_seed(0)
    ours = [nn.Parameter(torch.randn(shape, generator=generator) / 8) for shape in shapes]
    theirs = [nn.Parameter(piece.clone()) for n, p in enumerate(ours) for piece in pieces(p.detach(), n)]
    settings = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.1}
    mine, reference = Muon(ours, **settings, stacked={ours[5]: 3}), torch.optim.Muon(theirs, **settings)
    start = [p.detach().clone() for p in theirs]
    for _ in range(3):
        for p in ours:
            p.grad = torch.randn(p.shape, generator=generator)
        split = [piece for n, p in enumerate(ours) for piece in pieces(p.grad, n)]  # type: ignore[arg-type]
        for p, g in zip(theirs, split, strict=True):
            p.grad = g.clone()
        mine.step()
        reference.step()
    flat = [piece for n, p in enumerate(ours) for piece in pieces(p.detach(), n)]
    for a, b, s in zip(flat, theirs, start, strict=True):
        moved = (b.detach() - s).abs().max()
        assert moved > 0.01
        assert (a - b.detach()).abs().max() < 0.03 * moved


@given(share=st.floats(0, 0.99), steps=st.integers(1, 3000), own=st.booleans())
def test_the_warmup_rises_to_the_learning_rate_and_not_above(share: float, steps: int, own: bool) -> None:
    """Also where a share of the steps is no whole number: 0.05 of 21 steps is 1.05."""
    config = OptimConfig(warmup=1 + share * steps if own else share)
    factors = [schedule(step, steps, config) for step in range(steps)]
    assert max(factors) <= 1
    rising = factors[: math.ceil(warmup_steps(steps, config))]
    assert rising == sorted(rising)


def test_positions_of_any_library_do_not_decay_and_kernels_do() -> None:
    trunk, out = nn.Module(), nn.Module()
    for name in ("pos_embed", "position_embedding", "cls_token", "reg_token"):
        trunk.register_parameter(name, nn.Parameter(torch.zeros(1, 5, 8)))
    trunk.patch_embeddings, trunk.tokens, trunk.embedding = nn.Conv2d(3, 8, 4), nn.Linear(8, 8), nn.Embedding(9, 8)
    out.trunk = trunk
    kinds = optimizer.groups(out, OptimConfig())
    assert [name for name, _ in kinds["decay"]] == ["trunk.patch_embeddings.weight", "trunk.tokens.weight"]


def test_the_default_warmup_is_a_share_of_the_run_and_at_most_2000_steps() -> None:
    config = default_recipe("clip", "b32").optim
    assert schedule(0, 3, config) == 1  # three steps of fine-tuning
    for steps, warmup in ((1000, 50), (40_000, 2000), (400_000, 2000)):
        assert schedule(warmup // 2 - 1, steps, config) == pytest.approx(0.5)
        assert schedule(warmup - 1, steps, config) == 1 > schedule(warmup + 1, steps, config)
    assert schedule(4999, 400_000, replace(config, warmup=10_000)) == pytest.approx(0.5)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_who_decays_and_who_is_orthogonalised(name: Any) -> None:
    learned = learner("siglip", dtype=torch.float32)
    config = OptimConfig(name=name, lr=1e-3, muon_lr=0.02, weight_decay=0.1, muon_weight_decay=0.05, scale_lr=3.0)
    optimizer = Optimizer(learned, config, 10)
    seen: dict[str, tuple[str, float, float]] = {}
    for part in optimizer.parts:
        for group in part.param_groups:
            for p in group["params"]:
                assert optimizer.names[p] not in seen
                seen[optimizer.names[p]] = type(part).__name__, group["base_lr"], group["weight_decay"]
    assert seen.keys() == {n for n, _ in learned.named_parameters()}
    for n, p in learned.named_parameters():
        plain = p.dim() < 2 or n.endswith(("positions", "class_token", "text_tower.tokens"))
        hidden = ".blocks." in n and p.dim() == 2
        if n in ("model.head.log_scale", "model.head.bias"):
            assert seen[n] == ("AdamW", pytest.approx(3e-3), 0)
        elif hidden and name == "muon":
            assert seen[n] == ("Muon", 0.02, 0.05)
        else:
            assert seen[n] == ("AdamW", 1e-3, 0 if plain else 0.1), n


@pytest.mark.parametrize(("clip", "left"), [(0.5, 0.5), (0, None), (1e12, None)])
def test_clipping(clip: float, left: float | None) -> None:
    learned = learner("clip", dtype=torch.float32)
    for p in learned.parameters():
        p.grad = torch.ones_like(p)
    before = sum(p.numel() for p in learned.parameters()) ** 0.5
    assert float(Optimizer(learned, OptimConfig(clip=clip), 10).clip()) == pytest.approx(before, rel=1e-5)
    after = torch.cat([p.grad.flatten() for p in learned.parameters() if p.grad is not None])
    assert float(after.norm()) == pytest.approx(left or before, rel=1e-4)


def test_scales_of_contrasts_are_held_to_their_limits() -> None:
    made = learner("clip+simclr", dtype=torch.float32)
    made.contrasts["simclr"].head = Head(Pooling(), scale=Scale(limit=100.0))
    heads = [made.model.head, made.contrasts["simclr"].head]
    for head in heads:
        head.log_scale.data.fill_(9.0)  # type: ignore[operator, union-attr]
    made.clamp_()
    scales = [float(head.log_scale.detach().exp()) for head in heads]  # type: ignore[operator, union-attr]
    assert scales == pytest.approx([100.0, 100.0])


def test_average_of_weights() -> None:
    module = nn.Linear(3, 2, bias=False)
    average = Average(module, decay=0.5)
    expected = module.weight.detach().clone()
    for step in range(8):
        with torch.no_grad():
            module.weight.fill_(float(step))
        average.update(step)
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * step
    assert average.shadow["weight"] == pytest.approx(expected)
    with suppress(KeyError), average.in_place(module):
        assert module.weight.detach() == pytest.approx(expected)
        raise KeyError
    assert (module.weight == 7).all()
    assert average.shadow["weight"] == pytest.approx(expected)
    assert not Average(module, 0.0).shadow


# Dropped patches


def dropping(method: str = "siglip", share: float = 0.5) -> Learner:
    """Of sixteen patches an image."""
    slots = preset(method)
    return Learner(build(size(image__patch=8), slots), slots, drop_patches=share).double()


@pytest.mark.parametrize(("share", "count"), [(0.25, 12), (0.5, 8), (0.97, 1)])
def test_each_image_keeps_a_share_of_its_patches_in_order(share: float, count: int) -> None:
    seeds = torch.arange(200) * 7919
    keep = kept(seeds, 16, share)
    assert keep.shape == (200, count)
    assert (keep.diff(dim=1) > 0).all()
    assert keep.min() >= 0
    assert keep.max() < 16
    assert torch.equal(kept(seeds[50:60], 16, share), keep[50:60])
    assert len({tuple(row) for row in keep.tolist()}) > (10 if count == 1 else 150)
    assert torch.bincount(keep.flatten(), minlength=16).min() > 200 * count / 16 / 2


def test_an_image_is_encoded_from_the_patches_that_it_keeps() -> None:
    whole, some = dropping(), batch()
    encoded = whole.encode(some)
    for n, image in enumerate(some.images):
        alone = kept(some.seeds[n : n + 1], 16, 0.5)
        tokens, features = whole.model.encode_image(image[None], alone)
        assert torch.allclose(tokens[0], encoded.image_tokens[n], atol=1e-12)
        assert torch.allclose(features["vec"][0], encoded.images["vec"][n], atol=1e-12)
    plain = dropping(share=0).encode(some)
    assert not torch.allclose(plain.images["vec"], encoded.images["vec"], atol=1e-3)


@pytest.mark.parametrize("method", ["siglip", "llip", "prolip"])
def test_micro_batches_lose_the_same_patches(method: str) -> None:
    whole, cut = (gradients(dropping(method), batch(method=method), parts) for parts in (1, 2))
    for name, gradient in whole.items():
        torch.testing.assert_close(cut[name], gradient, rtol=0, atol=1e-10, msg=name)


def test_the_setting_reaches_the_learner() -> None:
    recipe = default_recipe("siglip", "debug")
    assert make_learner(recipe, preset("siglip"))[0].drop_patches == 0
    augment = replace(recipe.data.augment, drop_patches=0.5)
    assert make_learner(replace(recipe, data=replace(recipe.data, augment=augment)), preset("siglip"))[0].drop_patches


def test_towers_and_terms_that_need_all_patches_are_refused() -> None:
    slots, resnet = preset("clip"), sizes()["rn50-plain"]
    with pytest.raises(ValueError, match="drop-patches needs a vision transformer"):
        Learner(build(resnet, slots, bare=True), slots, drop_patches=0.5)
    with pytest.raises(ValueError, match="drop-patches"):
        backward(dropping("sycoca"), [batch(method="sycoca")])
