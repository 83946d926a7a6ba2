"""ProLIP: what towers read, its whole loss, what masked copies see, its parts as components (arXiv:2410.18857)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from kiloword.config.options import RunOptions
from kiloword.config.recipes import TextConfig
from kiloword.data.reading import captions_of
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.methods.defaults import default_recipe
from kiloword.methods.prolip.gaussian import inclusion_loss, vib
from kiloword.methods.prolip.inclusion import drop_words, mask_words
from kiloword.methods.registry import preset
from kiloword.randomness import key
from kiloword.training.resolve import make_loader, open_sources
from kiloword.types import Batch, Encoded, Features, Texts
from kiloword.verify.batch import batch as small_batch
from literal import matching, sigmoid_pairs
from parts import agree, drawn, ids_of, learner, losses, model, size

TERMS = ("image_in_text", "masked_image", "masked_text", "vib_image", "vib_text")
PATCH, PATCHES = 4, 64
SPECIAL = TextConfig().special


def batch() -> Batch:
    """16 images, of one to three captions each."""
    return small_batch(method="prolip")


def made(stem: str = "linear", **said: Any) -> Any:
    """64 patches an image; log variances that differ from row to row."""
    return learner("prolip", {"log_var": -2.0, **said}, size(image__patch=PATCH, image__stem=stem))


class Watched:
    """A model that remembers what a term gave to its towers, and the features of the copies."""

    def __init__(self, inside: Any) -> None:
        self.inside, self.images, self.keep, self.texts = inside, Tensor(), Tensor(), Texts.pack([])
        self.copies: Features = {}

    def encode_image(self, images: Tensor, keep: Tensor) -> Any:
        self.images, self.keep = images, keep
        out = self.inside.encode_image(images, keep=keep)
        self.copies = out[1]
        return out

    def encode_text(self, texts: Texts) -> Any:
        self.texts, out = texts, self.inside.encode_text(texts)
        self.copies = out[1]
        return out


def run(prolip: Any, name: str, some: Batch, features: Encoded | None = None) -> tuple[Tensor, Watched]:
    """The value of a term, and what it asked of the towers."""
    watched = Watched(prolip.model)
    found: Tensor = prolip.terms[name](watched, some, features or prolip.encode(some))
    return found, watched


# What is read


def test_towers_carry_an_uncertainty_token() -> None:
    """[CLS, UNC, patches] and words, UNC, CLS (section 3.1), the words seeing later words too."""
    prolip, some = model("prolip", {"log_var": -1.0}), batch()
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
        assert float(found["log_var"].detach().std(0).min()) > 1e-4
    assert torch.autograd.grad(images["log_var"].sum(), prolip.image_tower.uncertainty_token)[0].abs().max() > 1e-6
    by_word = torch.autograd.grad(texts["log_var"].sum(), prolip.text_tower.tokens)[0]
    assert by_word[some.texts.ids.unique()].abs().amax(1).min() > 0


def test_training_captions_end_with_the_tokens_that_are_read() -> None:
    """A loader that packs for the unshaped tower would have words read as class and uncertainty tokens."""
    recipe = replace(default_recipe("prolip", "debug", ("scenes?n=16",)), batch=8)
    source = open_sources(recipe)
    tokenizer = Tokenizer.train(captions_of(source), 300)
    texts = next(make_loader(recipe, source, preset("prolip"), tokenizer, RunOptions()).batches()).texts
    assert [ids[-3:] for ids in ids_of(texts)] == [[tokenizer.roles.ids()[n] for n in ("end", "unc", "cls")]] * 8


def test_a_text_that_is_not_read_at_a_token_has_no_class_token() -> None:
    """Of size tiny, whose read-outs are maxima: the uncertainty token alone, and no maximum is over it."""
    prolip, some = model("prolip", shape=size(head__text_pool="max")), batch().texts
    assert prolip.config.text.extra_tokens == ("unc",)
    tokens = drawn(len(some.ids), 32)
    before = prolip.head.text(tokens, some)
    tokens[some.starts[1:] - 1] += 10
    after = prolip.head.text(tokens, some)
    torch.testing.assert_close(after["vec"], before["vec"])
    assert float((after["log_var"] - before["log_var"]).detach().abs().min(1).values.max()) > 0


# Losses


@pytest.mark.parametrize(
    ("form", "reduction", "vib_form", "chunk"),
    [
        ("paper", "per_dimension", "textbook", 0),
        ("paper", "per_dimension", "released", 5),
        ("paper", "joint", "textbook", 0),
        ("exact", "joint", "textbook", 0),
    ],
)
def test_the_whole_loss_is_the_paper_s(form: Any, reduction: Any, vib_form: Any, chunk: int) -> None:
    """Eq. 6: PPCL + alpha_1 inc(v in t) + alpha_2 (inc(v in v_masked) + inc(t in t_masked)) + beta VIB.

    With weights that make every part felt, and the copies that the terms made; test_gaussian has inc and VIB.
    """
    said = {"image_in_text": 0.3, "masked": 0.2, "vib": 0.1, "eps": -2.0, "c": 0.5, "log_var": -2.0, "masked_every": 4}
    said |= {"inclusion_form": form, "inclusion_reduction": reduction, "vib_form": vib_form}
    prolip, some = learner("prolip", said | {"bias": -2.0, "scale": 3.0}, chunk=chunk), batch()
    encoded, own = prolip.encode(some), some.image_of_text.tolist()
    images, texts = encoded.images, encoded.texts
    chosen = [i for i in range(16) if i % 4 == 0]
    captions = [t for t, i in enumerate(own) if i in chosen]
    assert len(captions) > len(chosen)

    def outside(wholes: Features, rows: list[int], copies: Features) -> Tensor:
        """The mean of how far each row is from lying within its copy."""
        found = []
        for copy, row in enumerate(rows):
            pair = ({n: x[n][k : k + 1] for n in ("vec", "log_var")} for x, k in ((wholes, row), (copies, copy)))
            found.append(inclusion_loss(*pair, -2.0, 0.5, form, reduction)[0])
        return torch.stack(found).mean()

    few, masked = (run(prolip, name, some, encoded)[1].copies for name in ("masked_image", "masked_text"))
    head, traces = prolip.model.head, [side["log_var"].exp().sum(1) / 2 for side in (images, texts)]
    logits = head.log_scale.exp() * (images["vec"] @ texts["vec"].T - traces[0][:, None] - traces[1]) + head.bias
    expected = sigmoid_pairs(logits, matching(own)) / 16 + 0.3 * outside(images, own, texts)  # eq. 2
    expected = expected + 0.2 * (outside(images, chosen, few) + outside(texts, captions, masked))
    expected = expected + 0.1 * (vib(images, vib_form).mean() + vib(texts, vib_form).mean())
    agree(losses(prolip, some)["loss"], expected, list(prolip.model.parameters()), atol=1e-10)


def test_spread_is_how_likely_a_pair_is_of_one_origin() -> None:
    """-log of the density of the means' gap under the sum of both variances, less its constant; matched pairs alone."""
    some, prolip = batch(), made(spread=3.0)
    images, texts = (
        {"vec": drawn(n, 6, seed=n).requires_grad_(), "log_var": drawn(n, 6).requires_grad_()}
        for n in (16, len(some.texts))
    )
    found = run(prolip, "spread", some, Encoded(torch.empty(0), torch.empty(0), images, texts))[0]
    expected = []
    for t, i in enumerate(some.image_of_text.tolist()):
        variance = images["log_var"][i].exp() + texts["log_var"][t].exp()
        normal = torch.distributions.Normal(torch.zeros(6, dtype=torch.float64), variance.sqrt())
        gap = (images["vec"][i] - texts["vec"][t]).detach()
        expected.append((-normal.log_prob(gap) - 0.5 * torch.tensor(2 * torch.pi, dtype=torch.float64).log()).mean())
    agree(found, torch.stack(expected).sum(), [images["log_var"], texts["log_var"], images["vec"], texts["vec"]])
    assert prolip.counts([some])["spread"] == len(some.texts)
    assert preset("prolip", {"spread": 3.0}).terms["spread"][0] == 3.0


# Masked copies


@pytest.mark.parametrize("stem", ["linear", "conv"])
def test_a_copy_knows_a_quarter_of_the_patches(stem: str) -> None:
    """Exactly; every image another quarter; no pixel of a dropped patch matters, every kept one does."""
    some, prolip = batch(), made(stem, masked_every=4)
    features = prolip.encode(some)
    before, watched = run(prolip, "masked_image", some, features)
    chosen, keep = (some.position % 4 == 0).nonzero()[:, 0], watched.keep
    assert torch.equal(watched.images, some.images[chosen])
    assert keep.shape == (4, PATCHES // 4)
    assert all(len(set(places)) == PATCHES // 4 and set(places) <= set(range(PATCHES)) for places in keep.tolist())
    assert len({tuple(places) for places in keep.tolist()}) == len(keep)
    dropped, kept = some.images.clone(), some.images.clone()
    for i, places in zip(chosen.tolist(), keep.tolist(), strict=True):
        for place in range(PATCHES):
            y, x = PATCH * (place // 8), PATCH * (place % 8)
            (kept if place in places else dropped)[i, :, y : y + PATCH, x : x + PATCH] ^= 255
    assert torch.equal(run(prolip, "masked_image", replace(some, images=dropped), features)[0], before)
    assert not torch.equal(run(prolip, "masked_image", replace(some, images=kept), features)[0], before)


@pytest.mark.parametrize(("share", "kept"), [(0.25, 48), (0.0, 64), (0.99, 1), (1.0, 1)])
def test_share_of_dropped_patches(share: float, kept: int) -> None:
    """At least one stays; with none dropped a copy is the whole."""
    some, prolip = batch(), made(drop_patches=share)
    features = prolip.encode(some)
    watched = run(prolip, "masked_image", some, features)[1]
    assert watched.keep.shape == (2, kept)
    if share == 0:
        whole = {k: v[some.position % 8 == 0] for k, v in features.images.items()}
        torch.testing.assert_close(watched.copies, whole)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    captions=st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=14), min_size=1, max_size=5),
    share=st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]),
    seed=st.integers(0, 2**62),
)
def test_words_are_masked_or_dropped(captions: list[list[int]], share: float, seed: int) -> None:
    """Of texts of any length exactly the rounded share of the words; special tokens (ids 0 to 5) stay.

    Tokens of a trunk go where their words go, and those of masked words are zeros.
    """
    texts, seeds = Texts.pack(captions), torch.tensor([key(seed, n) for n in range(len(captions))])
    texts = replace(texts, tokens=1 + torch.arange(len(texts.ids))[:, None].float())
    masked, left = (hide(texts, seeds, share, TextConfig(vocab=64)) for hide in (mask_words, drop_words))
    for before, after, copy in zip(captions, ids_of(masked), ids_of(left), strict=True):
        words = [p for p, token in enumerate(before) if token > 5]
        hidden = [p for p in words if after[p] != before[p]]
        assert all(after[p] == SPECIAL["mask"] for p in hidden)
        assert len(hidden) == round(share * len(words))
        assert all(a == b for p, (a, b) in enumerate(zip(after, before, strict=True)) if p not in hidden)
        assert copy == [token for p, token in enumerate(before) if p not in hidden]
    changed = (masked.ids != texts.ids)[:, None]
    assert texts.tokens is not None
    torch.testing.assert_close(masked.tokens, texts.tokens.masked_fill(changed, 0))
    torch.testing.assert_close(left.tokens, texts.tokens[~changed[:, 0]])


def test_captions_of_an_image_get_masks_of_their_own() -> None:
    """Three equal captions, masked differently, and differently again in another epoch; words at all places alike."""
    caption = [SPECIAL["start"], *range(10, 22), SPECIAL["end"], SPECIAL["unc"], SPECIAL["cls"]]
    some, mask, where = batch(), SPECIAL["mask"], []
    some = replace(some, texts=Texts.pack([caption] * len(some.texts)))
    masking, dropping = (made(masked_every=1, hide_words=hide) for hide in ("mask", "drop"))
    known = masking.encode(some)
    for epoch in range(20):
        now = replace(some, seeds=torch.tensor([key(epoch, i) for i in range(len(some))]))
        masked, dropped = (ids_of(run(one, "masked_text", now, known)[1].texts) for one in (masking, dropping))
        where += [tuple(p for p, token in enumerate(ids) if token == mask) for ids in masked]
        assert dropped == [[token for token in copy if token != mask] for copy in masked]
    assert all(len(places) == 9 for places in where)
    own = some.image_of_text.tolist().index(2)  # the third image has three captions
    assert len(set(where[own : own + 3])) == 3
    assert where[: len(some.texts)] != where[len(some.texts) : 2 * len(some.texts)]
    share = torch.bincount(torch.tensor([p for places in where for p in places]), minlength=16) / len(where)
    assert share[[0, 13, 14, 15]].tolist() == [0, 0, 0, 0]
    assert float((share[1:13] - 0.75).abs().max()) < 0.1


@pytest.mark.parametrize("name", ["masked_image", "masked_text"])
def test_a_share_without_chosen_images_still_passes_the_towers(name: str) -> None:
    """One row of weight 0: its loss and gradients are zeros, of every parameter that a chosen row would reach."""
    some, prolip, reached = batch(), made(), []
    for shift in (1, 0):
        piece = replace(some, position=some.position * 8 + shift)
        value, watched = run(prolip, name, piece)
        gradients = torch.autograd.grad(value, list(prolip.model.parameters()), allow_unused=True)
        reached.append([g is not None for g in gradients])
        rows, count = len(watched.copies["vec"]), int(prolip.counts([piece])[name])
        assert rows == max(count, 1) == (1 if shift else max(count, 16))
        assert bool(value.detach()) == any(bool(g.any()) for g in gradients if g is not None) == (shift == 0)
    assert reached[0] == reached[1]


# Settings and components


def weights(name: str, settings: dict[str, Any] | None = None) -> dict[str, Any]:
    return {name: weight for name, (weight, _) in preset(name, settings).terms.items()}


def test_settings_reach_what_they_name_and_have_the_paper_s_defaults() -> None:
    """Where the paper is silent or was corrected, as the authors' code and advice have it."""
    assert weights("prolip") == dict(zip(TERMS, (1e-7, 1e-3, 1e-3, 1e-4, 1e-4), strict=True))
    said = {"log_var": -3.0, "scale": 7.0, "bias": -4.0, "image_in_text": 0.5, "masked": 0.25, "vib": 0.125}
    assert weights("prolip", said) == dict(zip(TERMS, (0.5, 0.25, 0.25, 0.125, 0.125), strict=True))
    for asked, (log_var, scale, bias) in (({}, (-10.0, 10.0, -10.0)), (said, (-3.0, 7.0, -4.0))):
        head = model("prolip", asked).head
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
    losses(prolip, batch())
    assert len(passes) == (2 if weight == "masked" else 4)


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
        losses(learner(*given), batch())
        for given in (("siglip+gaussian+inclusion",), ("prolip", {"bidirectional": False}))
    )
    torch.testing.assert_close(mix, prolip)
