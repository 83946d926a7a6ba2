"""ProLIP as preset and as components: shape, settings, the whole loss in loops (arXiv:2410.18857, eq. 6)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kiloword.config.options import RunOptions
from kiloword.data.reading import captions_of
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.methods.defaults import default_recipe
from kiloword.methods.registry import preset
from kiloword.training.resolve import make_loader, open_sources
from kiloword.types import Features
from kiloword.verify.batch import batch
from parts import agree, drawn, learner, losses, model, size

TERMS = ("image_in_text", "masked_image", "masked_text", "vib_image", "vib_text")


# Shape


def test_towers_carry_an_uncertainty_token() -> None:
    """[CLS, UNC, patches] and words, UNC, CLS (section 3.1), the words seeing later words too."""
    prolip, some = model("prolip"), batch(method="prolip")
    image, text = prolip.config.image, prolip.config.text
    assert (image.uncertainty_token, image.class_token) == (True, True)
    assert (text.extra_tokens, text.causal) == (("unc", "cls"), False)
    assert preset("prolip", {"bidirectional": False}).shape(size()).text.causal
    uncertainty, pooling = prolip.head.uncertainty, prolip.head.pooling
    tokens, images = prolip.encode_image(some.images)
    words, texts = prolip.encode_text(some.texts)
    assert tokens.shape == (16, 2 + 4, 32)
    ends = some.texts.starts[1:]
    sides = (
        (images, uncertainty.image_log_var(tokens[:, 1]), pooling.image_projection(tokens[:, 0])),
        (texts, uncertainty.text_log_var(words[ends - 2]), pooling.text_projection(words[ends - 1])),
    )
    for found, log_var, vec in sides:
        torch.testing.assert_close(found["log_var"], log_var)
        torch.testing.assert_close(found["vec"], vec / vec.norm(dim=1, keepdim=True))


def test_training_captions_end_with_the_tokens_that_are_read() -> None:
    """A loader that packs for the unshaped tower would have words read as class and uncertainty tokens."""
    recipe = replace(default_recipe("prolip", "debug", ("scenes?n=16",)), batch=8)
    source = open_sources(recipe)
    tokenizer = Tokenizer.train(captions_of(source), 300)
    texts = next(make_loader(recipe, source, preset("prolip"), tokenizer, RunOptions()).batches()).texts
    last = torch.stack([texts.ids[texts.starts[1:] - place] for place in (3, 2, 1)])
    assert torch.equal(last, torch.tensor([[tokenizer.roles.ids()[n]] * 8 for n in ("end", "unc", "cls")]))


def test_a_text_that_is_not_read_at_a_token_has_no_class_token() -> None:
    """Of size tiny, whose read-outs are maxima: the uncertainty token alone, and no maximum is over it."""
    prolip, some = model("prolip", shape=size(head__text_pool="max")), batch(method="prolip").texts
    assert prolip.config.text.extra_tokens == ("unc",)
    tokens = drawn(len(some.ids), 32)
    before = prolip.head.text(tokens, some)
    tokens[some.starts[1:] - 1] += 10
    after = prolip.head.text(tokens, some)
    torch.testing.assert_close(after["vec"], before["vec"])
    assert float((after["log_var"] - before["log_var"]).detach().abs().min(1).values.max()) > 0


def test_the_uncertainty_token_is_seen_and_sees() -> None:
    """Log variances depend on images and words, and the tokens get gradients."""
    prolip, some = model("prolip", {"log_var": -1.0}), batch(method="prolip")
    images, texts = (
        side["log_var"] for side in (prolip.encode_image(some.images)[1], prolip.encode_text(some.texts)[1])
    )
    assert float(images.detach().std(0).min()) > 1e-4
    assert float(texts.detach().std(0).min()) > 1e-4
    assert torch.autograd.grad(images.sum(), prolip.image_tower.uncertainty_token)[0].abs().max() > 1e-6
    by_word = torch.autograd.grad(texts.sum(), prolip.text_tower.tokens)[0]
    assert by_word[some.texts.ids.unique()].abs().amax(1).min() > 0


# Settings


def weights(name: str, settings: dict[str, Any] | None = None) -> dict[str, Any]:
    return {name: weight for name, (weight, _) in preset(name, settings).terms.items()}


def test_settings_reach_what_they_name_and_have_the_paper_s_defaults() -> None:
    """Where the paper is silent or was corrected, as the authors' code and advice have it."""
    assert weights("prolip") == dict(zip(TERMS, (1e-7, 1e-3, 1e-3, 1e-4, 1e-4), strict=True))
    said = {"log_var": -3.0, "scale": 7.0, "bias": -4.0, "image_in_text": 0.5, "masked": 0.25, "vib": 0.125}
    assert weights("prolip", said) == dict(zip(TERMS, (0.5, 0.25, 0.25, 0.125, 0.125), strict=True))
    for given, (log_var, scale, bias) in (({}, (-10.0, 10.0, -10.0)), (said, (-3.0, 7.0, -4.0))):
        head = model("prolip", given).head
        assert (head.log_scale.exp().item(), head.bias.item()) == (pytest.approx(scale), bias)
        for layer in (head.uncertainty.image_log_var, head.uncertainty.text_log_var):
            assert (layer.bias == log_var).all()
            assert float(layer.weight.detach().std()) > 0


@pytest.mark.parametrize(("weight", "gone"), [("image_in_text", TERMS[:1]), ("masked", TERMS[1:3]), ("vib", TERMS[3:])])
def test_a_term_of_weight_0_is_skipped(weight: str, gone: tuple[str, ...]) -> None:
    """And with it its tower passes."""
    prolip, passes = learner("prolip", {weight: 0}), list[int]()
    assert set(prolip.terms) == set(TERMS) - set(gone)
    for tower in (prolip.model.image_tower, prolip.model.text_tower):
        tower.register_forward_hook(lambda *args: passes.append(1))
    losses(prolip, batch(method="prolip"))
    assert len(passes) == (2 if weight == "masked" else 4)


# Components


@pytest.mark.parametrize("base", ["siglip", "clip", "llip", "fff", "clip-c"])
def test_any_method_may_have_gaussians_and_inclusion(base: str) -> None:
    """Whatever the order of the components; what else the method has stays."""
    plain, alone = preset(base), model(base)
    for name in (f"{base}+gaussian+inclusion", f"{base}+inclusion+gaussian"):
        settings = {"inclusion": {"vib": 0.5}, "gaussian": {"log_var": -4.0}}
        method, made = preset(name, settings), model(name, settings)
        assert method.name == name
        assert set(method.terms) == set(plain.terms) | set(TERMS)
        assert method.terms["vib_text"][0] == 0.5
        for slot in ("transforms", "captions", "positives"):
            assert type(getattr(method, slot)) is type(getattr(plain, slot))
        assert (made.head.uncertainty.image_log_var.bias == -4).all()
        assert set(dict(made.head.named_parameters())) >= set(dict(alone.head.named_parameters()))


def test_siglip_with_the_parts_is_prolip() -> None:
    """The same weights at the start and the same losses, but for what the text tower's words see."""
    mix, prolip = (
        losses(learner(*given), batch(method="prolip"))
        for given in (("siglip+gaussian+inclusion",), ("prolip", {"bidirectional": False}))
    )
    torch.testing.assert_close(mix, prolip)


# The whole loss


def eq3(mu_1: Tensor, var_1: Tensor, mu_2: Tensor, var_2: Tensor, eps: Tensor) -> Tensor:
    inv_1, inv_2 = eps.exp() / var_1, eps.exp() / var_2
    A, B, C = inv_1 + inv_2 / 2, 2 * mu_1 * inv_1 + mu_2 * inv_2, mu_1**2 * inv_1 + mu_2**2 * inv_2 / 2
    return -2 * var_1.log() - var_2.log() - A.log() / 2 + B**2 / (4 * A) - C


def inc(a: Features, i: int, b: Features, j: int, eps: Tensor, c: float) -> Tensor:
    """Eq. 5 with a sigmoid a dimension: how far a_i is from lying within b_j."""
    z = a["vec"][i], a["log_var"][i].exp(), b["vec"][j], b["log_var"][j].exp()
    h = eq3(*z, eps) - eq3(*z[2:], *z[:2], eps)  # eq. 4
    return -torch.log(1 / (1 + torch.exp(-c * h))).mean()


def divergence(side: Features) -> Tensor:
    ours = torch.distributions.Normal(side["vec"], (side["log_var"] / 2).exp())
    return torch.distributions.kl_divergence(ours, torch.distributions.Normal(0.0, 1.0)).mean()


def eq2(head: Any, images: Features, texts: Features, own: list[int]) -> Tensor:
    """Over all pairs, by images; the printed sign of the bias is a typo."""
    total = []
    for i, image in enumerate(images["vec"]):
        for j, text in enumerate(texts["vec"]):
            traces = images["log_var"][i].exp().sum() + texts["log_var"][j].exp().sum()
            z = head.log_scale.exp() * (image @ text - traces / 2) + head.bias
            total.append(torch.log(1 + torch.exp(-z if own[j] == i else z)))
    return torch.stack(total).sum() / len(images["vec"])


@pytest.mark.parametrize("chunk", [0, 5])
def test_the_whole_loss_is_the_paper_s(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """PPCL + alpha_1 inc(v in t) + alpha_2 (inc(v in v_masked) + inc(t in t_masked)) + beta VIB, with all gradients.

    With weights that make every part felt, and the copies that the terms made (their masks have tests of their own).
    """
    said = {"image_in_text": 0.3, "masked": 0.2, "vib": 0.1, "eps": -2.0, "c": 0.5, "log_var": -2.0, "masked_every": 4}
    prolip, some = learner("prolip", said | {"bias": -2.0, "scale": 3.0}, chunk=chunk), batch(method="prolip")
    sides: dict[str, list[Features]] = {"image": [], "text": []}
    head = prolip.model.head
    for name, made_of in sides.items():
        inside = getattr(head, name)
        monkeypatch.setattr(head, name, lambda *args, inside=inside, to=made_of: to.append(inside(*args)) or to[-1])
    found = losses(prolip, some)["loss"]
    (images, few), (texts, masked) = sides["image"], sides["text"]
    own, eps, c = some.image_of_text.tolist(), torch.tensor(-2.0, dtype=torch.float64), 0.5
    chosen = [i for i in range(16) if i % 4 == 0]
    captions = [t for t, i in enumerate(own) if i in chosen]
    in_text = torch.stack([inc(images, i, texts, t, eps, c) for t, i in enumerate(own)]).mean()
    in_few = torch.stack([inc(images, i, few, n, eps, c) for n, i in enumerate(chosen)]).mean()
    in_masked = torch.stack([inc(texts, t, masked, n, eps, c) for n, t in enumerate(captions)]).mean()
    expected = eq2(head, images, texts, own) + 0.3 * in_text + 0.2 * (in_few + in_masked)
    expected = expected + 0.1 * (divergence(images) + divergence(texts))
    agree(found, expected.squeeze(), list(prolip.model.parameters()), atol=1e-10)
