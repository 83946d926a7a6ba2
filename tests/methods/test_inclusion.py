"""The local terms over Gaussians: what they compare, what their masked copies see, and how they are counted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kiloword.config.recipes import TextConfig
from kiloword.methods.prolip.gaussian import inclusion_loss, vib
from kiloword.methods.prolip.inclusion import drop_words, mask_words
from kiloword.methods.registry import preset
from kiloword.randomness import key
from kiloword.types import Batch, Encoded, Features, Texts
from kiloword.verify.batch import batch as small_batch
from parts import agree, drawn, ids_of, learner, size

FORMS: list[dict[str, Any]] = [
    {"inclusion_form": form, "inclusion_reduction": reduction, "eps": -2.0, "c": 0.5}
    for form in ("paper", "exact")
    for reduction in ("per_dimension", "joint")
]
PATCH, PATCHES = 4, 64
MASK = TextConfig().special["mask"]


def batch() -> Batch:
    """16 images, of one to three captions each."""
    return small_batch(method="prolip")


def made(stem: str = "linear", **said: Any) -> Any:
    """64 patches an image; log variances that differ from row to row."""
    return learner("prolip", {"log_var": -2.0, **said}, size(image__patch=PATCH, image__stem=stem))


class Watched:
    """A model that remembers what its towers were given, and what features they made of it."""

    def __init__(self, inside: Any) -> None:
        self.inside = inside
        self.images: list[tuple[Tensor, Tensor]] = []  # images and the patches kept of them
        self.texts: list[Texts] = []
        self.copies: list[Features] = []

    def encode_image(self, images: Tensor, keep: Tensor) -> Any:
        self.images.append((images, keep))
        out = self.inside.encode_image(images, keep=keep)
        self.copies.append(out[1])
        return out

    def encode_text(self, texts: Texts) -> Any:
        self.texts.append(texts)
        out = self.inside.encode_text(texts)
        self.copies.append(out[1])
        return out


def run(prolip: Any, name: str, some: Batch, features: Encoded | None = None) -> tuple[Tensor, Watched]:
    """The value of a term, and what it asked of the towers."""
    watched, known = Watched(prolip.model), features or prolip.encode(some)
    found: Tensor = prolip.terms[name](watched, some, known)
    return found, watched


def loss(a: Features, n: int, b: Features, m: int, given: dict[str, Any]) -> Tensor:
    """How far row n of a is from lying within row m of b, alone."""
    one, within = ({name: x[name][k : k + 1] for name in ("vec", "log_var")} for x, k in ((a, n), (b, m)))
    how = given["inclusion_form"], given["inclusion_reduction"]
    return inclusion_loss(one, within, given["eps"], given["c"], *how)[0]


# What is compared


@pytest.mark.parametrize("given", FORMS)
def test_images_lie_within_their_captions_and_wholes_within_their_masked_copies(given: dict[str, Any]) -> None:
    """Matched pairs alone, however many captions an image has; a copy is compared with its own whole."""
    some, prolip = batch(), made(**given, masked_every=2)
    features, of = prolip.encode(some), some.image_of_text.tolist()
    assert max(of.count(i) for i in of) == 3
    chosen = [i for i in range(len(some)) if some.position[i] % 2 == 0]
    captions = [t for t, i in enumerate(of) if i in chosen]
    assert len(captions) > len(chosen) > 4
    pairs: dict[str, tuple[Features, list[int]]] = {
        "image_in_text": (features.images, of),
        "masked_image": (features.images, chosen),
        "masked_text": (features.texts, captions),
    }
    for name, (wholes, rows) in pairs.items():
        found, watched = run(prolip, name, some, features)
        copies = watched.copies[0] if watched.copies else features.texts
        expected = [loss(wholes, whole, copies, copy, given) for copy, whole in enumerate(rows)]
        torch.testing.assert_close(found, torch.stack(expected).sum())
        assert prolip.counts([some])[name] == len(rows)


@pytest.mark.parametrize("form", ["textbook", "released"])
def test_bottleneck_of_each_side(form: Any) -> None:
    some, prolip = batch(), made(vib_form=form)
    features = prolip.encode(some)
    for side, own in (("image", features.images), ("text", features.texts)):
        torch.testing.assert_close(run(prolip, f"vib_{side}", some)[0], vib(own, form).sum())
        assert prolip.counts([some])[f"vib_{side}"] == len(own["vec"])


def test_spread_is_how_likely_a_pair_is_of_one_origin() -> None:
    """-log of the density of the means' gap under the sum of both variances, less its constant; matched pairs alone."""
    some, prolip = batch(), made(spread=3.0)
    sides = [{"vec": drawn(n, 6, seed=n), "log_var": drawn(n, 6).requires_grad_()} for n in (16, len(some.texts))]
    for side in sides:
        side["vec"].requires_grad_()
    images, texts = sides
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
    assert "spread" not in preset("prolip").terms


# Masked images


@pytest.mark.parametrize("stem", ["linear", "conv"])
def test_a_copy_knows_a_quarter_of_the_patches(stem: str) -> None:
    """Exactly; every image another quarter; no pixel of a dropped patch matters, every kept one does."""
    some, prolip = batch(), made(stem, masked_every=4)
    features = prolip.encode(some)
    before, watched = run(prolip, "masked_image", some, features)
    images, keep = watched.images[0]
    assert torch.equal(images, some.images[some.position % 4 == 0])
    assert keep.shape == (4, PATCHES // 4)
    assert all(len(set(places)) == PATCHES // 4 and set(places) <= set(range(PATCHES)) for places in keep.tolist())
    assert len({tuple(places) for places in keep.tolist()}) == len(keep)
    dropped, kept = some.images.clone(), some.images.clone()
    for i, places in zip((some.position % 4 == 0).nonzero()[:, 0].tolist(), keep.tolist(), strict=True):
        for place in range(PATCHES):
            changed = kept if place in places else dropped
            y, x = PATCH * (place // 8), PATCH * (place % 8)
            changed[i, :, y : y + PATCH, x : x + PATCH] ^= 255
    assert torch.equal(run(prolip, "masked_image", replace(some, images=dropped), features)[0], before)
    assert not torch.equal(run(prolip, "masked_image", replace(some, images=kept), features)[0], before)


@pytest.mark.parametrize(("share", "kept"), [(0.75, 16), (0.25, 48), (0.0, 64), (0.99, 1), (1.0, 1)])
def test_share_of_dropped_patches(share: float, kept: int) -> None:
    """At least one stays; with none dropped a copy is the whole."""
    some, prolip = batch(), made(drop_patches=share)
    features = prolip.encode(some)
    watched = run(prolip, "masked_image", some, features)[1]
    assert watched.images[0][1].shape == (2, kept)
    if share == 0:
        whole = {k: v[some.position % 8 == 0] for k, v in features.images.items()}
        torch.testing.assert_close(watched.copies[0], whole)


# Masked texts


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    captions=st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=14), min_size=1, max_size=5),
    share=st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]),
    seed=st.integers(0, 2**62),
)
def test_words_are_masked_or_dropped(captions: list[list[int]], share: float, seed: int) -> None:
    """Of texts of any length exactly the rounded share of the words; special tokens (ids 0 to 5) stay."""
    ours, seeds = TextConfig(vocab=64), torch.tensor([key(seed, n) for n in range(len(captions))])
    masked, left = (ids_of(hide(Texts.pack(captions), seeds, share, ours)) for hide in (mask_words, drop_words))
    for before, after, copy in zip(captions, masked, left, strict=True):
        words = [p for p, token in enumerate(before) if token > 5]
        hidden = [p for p in words if after[p] != before[p]]
        assert all(after[p] == MASK for p in hidden)
        assert len(hidden) == round(share * len(words))
        assert all(a == b for p, (a, b) in enumerate(zip(after, before, strict=True)) if p not in hidden)
        assert copy == [token for p, token in enumerate(before) if p not in hidden]


def test_captions_of_an_image_get_masks_of_their_own() -> None:
    """Three equal captions, masked differently, and differently again in another epoch; words at all places alike."""
    special = TextConfig().special
    caption = [special["start"], *range(10, 22), special["end"], special["unc"], special["cls"]]
    some, where = batch(), []
    some = replace(some, texts=Texts.pack([caption] * len(some.texts)))
    seen = {}
    for hide in ("mask", "drop"):
        prolip = made(masked_every=1, hide_words=hide)
        features = prolip.encode(some)
        for epoch in range(20):
            seeds = torch.tensor([key(epoch, i) for i in range(len(some))])
            seen[hide, epoch] = ids_of(run(prolip, "masked_text", replace(some, seeds=seeds), features)[1].texts[-1])
    for epoch in range(20):
        where += [tuple(p for p, token in enumerate(ids) if token == MASK) for ids in seen["mask", epoch]]
        assert seen["drop", epoch] == [[token for token in copy if token != MASK] for copy in seen["mask", epoch]]
    assert all(len(places) == 9 for places in where)
    own = some.image_of_text.tolist().index(2)  # the third image has three captions
    assert len(set(where[own : own + 3])) == 3
    assert where[: len(some.texts)] != where[len(some.texts) : 2 * len(some.texts)]
    share = torch.bincount(torch.tensor([p for places in where for p in places]), minlength=16) / len(where)
    assert share[[0, 13, 14, 15]].tolist() == [0, 0, 0, 0]
    assert float((share[1:13] - 0.75).abs().max()) < 0.1


# Which rows, and how they are drawn


@pytest.mark.parametrize("name", ["masked_image", "masked_text"])
def test_a_share_without_chosen_images_still_passes_the_towers(name: str) -> None:
    """One row of weight 0: its loss and gradients are zeros, of every parameter that a chosen row would reach."""
    some, prolip, reached = batch(), made(), []
    for shift in (1, 0):
        piece = replace(some, position=some.position * 8 + shift)
        value, watched = run(prolip, name, piece)
        gradients = torch.autograd.grad(value, list(prolip.model.parameters()), allow_unused=True)
        reached.append([g is not None for g in gradients])
        rows, count = len(watched.copies[0]["vec"]), int(prolip.counts([piece])[name])
        assert rows == max(count, 1) == (1 if shift else max(count, 16))
        assert bool(value.detach()) == any(bool(g.any()) for g in gradients if g is not None) == (shift == 0)
    assert reached[0] == reached[1]
