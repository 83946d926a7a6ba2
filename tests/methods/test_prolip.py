"""ProLIP as preset and as components: shape, settings, refusals, the whole loss in loops (arXiv:2410.18857, eq. 6)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kiloword.config.options import RunOptions
from kiloword.config.recipes import sizes
from kiloword.config.settings import parse
from kiloword.data.reading import captions_of
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.methods.defaults import default_recipe
from kiloword.methods.prolip.gaussian import Gaussian
from kiloword.methods.registry import find, preset
from kiloword.model.model import Model
from kiloword.models.build import build
from kiloword.training.learner import Learner
from kiloword.training.resolve import make_loader, open_sources
from kiloword.types import Features
from kiloword.verify.batch import batch, config

TERMS = ("image_in_text", "masked_image", "masked_text", "vib_image", "vib_text")


# Shape


def test_towers_carry_an_uncertainty_token() -> None:
    """[CLS, UNC, patches] and words, UNC, CLS (section 3.1), the words seeing later words too."""
    made = build(config(), preset("prolip"))
    image, text = made.config.image, made.config.text
    assert image.uncertainty_token
    assert image.class_token
    assert text.extra_tokens == ("unc", "cls")
    assert not text.causal
    some = batch(method="prolip")
    tokens, features = made.encode_image(some.images)
    assert tokens.shape == (16, 2 + 4, 32)
    uncertainty, pooling = made.head.uncertainty, made.head.pooling
    assert isinstance(uncertainty, Gaussian)
    torch.testing.assert_close(features["log_var"], uncertainty.image_log_var(tokens[:, 1]))
    mean = pooling.image_projection(tokens[:, 0])  # type: ignore[attr-defined]
    torch.testing.assert_close(features["vec"], mean / mean.norm(dim=1, keepdim=True))
    words, features = made.encode_text(some.texts)
    torch.testing.assert_close(features["log_var"], uncertainty.text_log_var(words[some.texts.starts[1:] - 2]))
    mean = pooling.text_projection(words[some.texts.starts[1:] - 1])  # type: ignore[attr-defined]
    torch.testing.assert_close(features["vec"], mean / mean.norm(dim=1, keepdim=True))


def test_training_captions_end_with_the_tokens_that_are_read() -> None:
    """A loader that packs for the unshaped tower would have words read as class and uncertainty tokens."""
    recipe = replace(default_recipe("prolip", "debug", ("scenes?n=16",)), batch=8)
    source = open_sources(recipe)
    tokenizer = Tokenizer.train(captions_of(source), 300)
    loader = make_loader(recipe, source, preset("prolip"), tokenizer, RunOptions())
    texts = next(loader.batches()).texts
    last = torch.stack([texts.ids[texts.starts[1:] - place] for place in (3, 2, 1)])
    assert torch.equal(last, torch.tensor([[tokenizer.roles.ids()[n]] * 8 for n in ("end", "unc", "cls")]))


def test_a_text_that_is_not_read_at_a_token_has_no_class_token() -> None:
    """Of size tiny, whose read-outs are maxima: the uncertainty token alone, and no maximum is over it."""
    small = config()
    made = build(replace(small, head=replace(small.head, text_pool="max")), preset("prolip")).double()
    assert made.config.text.extra_tokens == ("unc",)
    some = batch(method="prolip").texts
    tokens = torch.randn(len(some.ids), 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    before = made.head.text(tokens, some)
    changed = tokens.clone()
    changed[some.starts[1:] - 1] += 10
    after = made.head.text(changed, some)
    torch.testing.assert_close(after["vec"], before["vec"])
    assert float((after["log_var"] - before["log_var"]).detach().abs().min(1).values.max()) > 0


def test_words_may_see_only_what_is_before() -> None:
    assert preset("prolip", {"bidirectional": False}).shape(config()).text.causal


def test_the_uncertainty_token_is_seen_and_sees() -> None:
    """Log variances depend on images and words, and the tokens get gradients."""
    made = build(config(), preset("prolip", {"log_var": -1.0})).double()
    some = batch(method="prolip")
    images, texts = made.encode_image(some.images)[1], made.encode_text(some.texts)[1]
    assert float(images["log_var"].detach().std(0).min()) > 1e-4
    assert float(texts["log_var"].detach().std(0).min()) > 1e-4
    token = made.image_tower.uncertainty_token
    assert token is not None
    assert float(torch.autograd.grad(images["log_var"].sum(), token)[0].abs().max()) > 1e-6
    by_word = torch.autograd.grad(texts["log_var"].sum(), made.text_tower.tokens)[0]
    assert float(by_word[some.texts.ids.unique()].abs().amax(1).min()) > 0


# Settings


def test_settings_reach_what_they_name() -> None:
    said = {
        "log_var": -3.0,
        "scale": 7.0,
        "bias": -4.0,
        "image_in_text": 0.5,
        "masked": 0.25,
        "vib": 0.125,
        "eps": -1.0,
    }
    method = preset("prolip", said | {"ensemble": "of_average", "drop_patches": 0.5, "masked_every": 2})
    made = Learner(build(config(), method), method)
    head = made.model.head
    assert head.log_scale.exp().item() == pytest.approx(7)
    assert head.bias is not None
    assert head.bias.item() == -4
    assert isinstance(head.uncertainty, Gaussian)
    assert head.uncertainty.settings.ensemble == "of_average"
    assert (head.uncertainty.text_log_var.bias == -3).all()
    weights = dict(zip(TERMS, (0.5, 0.25, 0.25, 0.125, 0.125), strict=True))
    assert {name: weight for name, (weight, _) in method.terms.items()} == weights
    term: Any = made.terms["masked_image"]
    assert (term.kept, term.settings.masked_every, term.settings.eps) == (2, 2, -1.0)


def test_defaults() -> None:
    """The paper's weights; where it is silent or was corrected, as the authors' code and advice have it."""
    method = preset("prolip")
    weights = {name: weight for name, (weight, _) in method.terms.items()}
    assert weights == dict(zip(TERMS, (1e-7, 1e-3, 1e-3, 1e-4, 1e-4), strict=True))
    _, kind = find("prolip")
    assert kind is not None
    said: Any = parse({}, kind)
    assert (said.scale, said.bias, said.log_var, said.eps, said.c) == (10.0, -10.0, -10.0, -10.0, 10.0)
    assert (said.inclusion_form, said.inclusion_reduction, said.vib_form) == ("paper", "per_dimension", "textbook")
    assert (said.masked_every, said.drop_patches, said.mask_words) == (8, 0.75, 0.75)


@pytest.mark.parametrize(("weight", "gone"), [("image_in_text", TERMS[:1]), ("masked", TERMS[1:3]), ("vib", TERMS[3:])])
def test_a_term_of_weight_0_is_skipped(weight: str, gone: tuple[str, ...]) -> None:
    """And with it its tower passes."""
    method = preset("prolip", {weight: 0})
    assert set(method.terms) == set(TERMS) - set(gone)
    passes = {"encode_image": 0, "encode_text": 0}
    learner = Learner(build(config(), method), method)
    for name in passes:
        setattr(learner.model, name, counted(getattr(learner.model, name), name, passes))
    some = batch(method="prolip")
    learner(some, learner.counts([some]))
    assert set(passes.values()) == {1 if weight == "masked" else 2}


def counted(inside: Any, name: str, passes: dict[str, int]) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        passes[name] += 1
        return inside(*args, **kwargs)

    return call


def test_without_any_term_it_is_ppcl() -> None:
    assert not preset("prolip", {"image_in_text": 0, "masked": 0, "vib": 0}).terms


OUT_OF_RANGE = [
    ({"masked": -1.0}, "masked is -1.0: expected at least 0"),
    ({"vib": float("nan")}, "vib is nan"),
    ({"image_in_text": float("inf")}, "image_in_text is inf"),
    ({"drop_patches": 1.5}, "drop_patches is 1.5: expected 0 to 1"),
    ({"mask_words": -0.1}, "mask_words is -0.1"),
    ({"masked_every": 0}, "masked_every is 0: expected at least 1"),
    ({"c": 0.0}, "c is 0.0: expected above 0"),
    ({"spread": -1.0}, "spread is -1.0: expected at least 0"),
    ({"eps": float("nan")}, "eps is nan: expected -50 to 50"),
    ({"log_var": float("nan")}, "log_var is nan: expected -50 to 50"),
    ({"log_var": 1000.0}, "log_var is 1000.0"),
    ({"scale": -1.0}, "scale is -1: expected a number above 0"),
    ({"bias": float("nan")}, "bias is nan: expected"),
    ({"inclusion_form": "printed"}, "inclusion_form"),
    ({"epsilon": -10.0}, "epsilon"),
]


@pytest.mark.parametrize(("said", "sentence"), OUT_OF_RANGE)
def test_settings_out_of_range_are_refused(said: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=f"settings of prolip: .*{sentence}"):
        preset("prolip", said)


# Components


@pytest.mark.parametrize("base", ["siglip", "clip", "llip", "fff", "clip-c"])
def test_any_method_may_have_gaussians_and_inclusion(base: str) -> None:
    """Whatever the order of the components; the method's own slots stay."""
    plain = preset(base)
    for name in (f"{base}+gaussian+inclusion", f"{base}+inclusion+gaussian"):
        method = preset(name, {"inclusion": {"vib": 0.5}, "gaussian": {"log_var": -4.0}})
        assert method.name == name
        assert set(method.terms) == set(plain.terms) | set(TERMS)
        assert method.terms["vib_text"][0] == 0.5
        assert (method.transforms, method.captions, method.positives) == (
            plain.transforms,
            plain.captions,
            plain.positives,
        )
        assert repr(method.pair_loss) == repr(plain.pair_loss)  # a partial is equal to none but itself
        made = build(config(), method)
        assert isinstance(made.head.uncertainty, Gaussian)
        assert (made.head.uncertainty.image_log_var.bias == -4).all()
        assert type(made.head.pooling) is type(plain.head(plain.shape(config())).pooling)


def test_siglip_with_the_pieces_is_prolip() -> None:
    """The same weights at the start and the same losses, but for what the text tower's words see."""
    some, found = batch(method="prolip"), []
    for method in (preset("siglip+gaussian+inclusion"), preset("prolip", {"bidirectional": False})):
        learner = Learner(build(config(), method), method).double()
        found.append(learner(some, learner.counts([some])))
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name])


def test_what_cannot_mix_is_refused() -> None:
    with pytest.raises(ValueError, match=r"inclusion compares Gaussians, but siglip has none: add \+gaussian"):
        preset("siglip+inclusion")
    with pytest.raises(ValueError, match=r"prolip has Gaussians already: omit \+gaussian"):
        preset("prolip+gaussian")
    with pytest.raises(ValueError, match=r"prolip has inclusion terms already: omit \+inclusion"):
        preset("prolip+inclusion")
    assert "masked_image" in preset("pcme+++inclusion").terms
    with pytest.raises(ValueError, match=r"masked_every is 0"):
        preset("siglip+gaussian+inclusion", {"inclusion": {"masked_every": 0}})


@pytest.mark.parametrize("size", ["debug", "tiny", "s16", "l14"])
def test_every_size_has_a_shape(size: str) -> None:
    text = preset("prolip").shape(sizes()[size]).text
    assert text.extra_tokens[0] == "unc"


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


def eq2(made: Model, images: Features, texts: Features, own: list[int]) -> Tensor:
    """Over all pairs, by images."""
    total, head = [], made.head
    assert head.bias is not None
    for i, image in enumerate(images["vec"]):
        for j, text in enumerate(texts["vec"]):
            traces = images["log_var"][i].exp().sum() + texts["log_var"][j].exp().sum()
            z = head.log_scale.exp() * (image @ text - traces / 2) + head.bias
            total.append(torch.log(1 + torch.exp(-z if own[j] == i else z)))
    return torch.stack(total).sum() / len(images["vec"])


def test_the_whole_loss_is_the_paper_s() -> None:
    """PPCL + alpha_1 inc(v in t) + alpha_2 (inc(v in v_masked) + inc(t in t_masked)) + beta VIB, with all gradients.

    With weights that make every part felt, and the copies that the terms made (their masks have tests of their own).
    """
    said = {"image_in_text": 0.3, "masked": 0.2, "vib": 0.1, "eps": -2.0, "c": 0.5, "log_var": -2.0, "masked_every": 4}
    method = preset("prolip", said | {"bias": -2.0, "scale": 3.0})
    learner = Learner(build(config(), method), method).double()
    made, some = learner.model, batch(method="prolip")
    sides: dict[str, list[Features]] = {"encode_image": [], "encode_text": []}
    for name, made_of in sides.items():
        setattr(made, name, remembered(getattr(made, name), made_of))
    found = learner(some, learner.counts([some]))["loss"]
    (images, few), (texts, masked) = sides["encode_image"], sides["encode_text"]
    own, eps, c = some.image_of_text.tolist(), torch.tensor(-2.0, dtype=torch.float64), 0.5
    chosen = [i for i in range(16) if i % 4 == 0]
    captions = [t for t, i in enumerate(own) if i in chosen]
    in_text = torch.stack([inc(images, i, texts, t, eps, c) for t, i in enumerate(own)]).mean()
    in_few = torch.stack([inc(images, i, few, n, eps, c) for n, i in enumerate(chosen)]).mean()
    in_masked = torch.stack([inc(texts, t, masked, n, eps, c) for n, t in enumerate(captions)]).mean()
    expected = eq2(made, images, texts, own) + 0.3 * in_text + 0.2 * (in_few + in_masked)
    expected = expected + 0.1 * (divergence(images) + divergence(texts))
    assert abs(float((found - expected).detach())) < 1e-10
    weights = list(made.parameters())
    by_found = torch.autograd.grad(found, weights, retain_graph=True, allow_unused=True)
    by_expected = torch.autograd.grad(expected, weights, allow_unused=True)
    for got, want in zip(by_found, by_expected, strict=True):
        assert (got is None) == (want is None)
        assert got is None or float((got - want).abs().max()) < 1e-10


def remembered(inside: Any, into: list[Features]) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        out = inside(*args, **kwargs)
        into.append(out[1])
        return out

    return call
