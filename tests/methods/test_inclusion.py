"""The local terms over Gaussians: what they compare, what their masked copies see, and how they are counted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kiloword.config.recipes import ImageConfig, TextConfig
from kiloword.methods.prolip.gaussian import inclusion_loss, vib
from kiloword.methods.prolip.inclusion import ImageInText, InclusionSettings, MaskedImage, MaskedText, Vib, mask_words
from kiloword.methods.registry import preset
from kiloword.model.model import Model
from kiloword.models.build import build
from kiloword.randomness import key
from kiloword.training.accumulate import backward
from kiloword.training.learner import Learner
from kiloword.types import Batch, Encoded, Features, Texts
from kiloword.verify.batch import batch as small_batch
from kiloword.verify.batch import config

FORMS: list[dict[str, Any]] = [
    {"inclusion_form": form, "inclusion_reduction": reduction, "eps": -2.0, "c": 0.5}
    for form in ("paper", "exact")
    for reduction in ("per_dimension", "joint")
]
PATCH, PATCHES = 4, 64


def batch() -> Batch:
    """16 images, of one to three captions each."""
    return small_batch(method="prolip")


def model(stem: Literal["linear", "conv"] = "linear") -> Model:
    """64 patches an image; log variances that differ from row to row."""
    size = config()
    made = build(replace(size, image=replace(size.image, patch=PATCH, stem=stem)), preset("prolip", {"log_var": -2.0}))
    return made.double()


class Watched:
    """A model that remembers what its towers were given, and what features they made of it."""

    def __init__(self, inside: Model) -> None:
        self.inside = inside
        self.images: list[tuple[Tensor, Tensor]] = []  # images and the patches kept of them
        self.texts: list[Texts] = []
        self.copies: list[Features] = []

    def encode_image(self, images: Tensor, keep: Tensor) -> tuple[Tensor, Features]:
        self.images.append((images, keep))
        out = self.inside.encode_image(images, keep=keep)
        self.copies.append(out[1])
        return out

    def encode_text(self, texts: Texts) -> tuple[Tensor, Features]:
        self.texts.append(texts)
        out = self.inside.encode_text(texts)
        self.copies.append(out[1])
        return out


def encoded(made: Model, some: Batch) -> Encoded:
    image_tokens, images = made.encode_image(some.images)
    text_tokens, texts = made.encode_text(some.texts)
    return Encoded(image_tokens, text_tokens, images, texts)


def one(features: Features, n: int) -> Features:
    return {name: features[name][n : n + 1] for name in ("vec", "log_var")}


def loss(a: Features, n: int, b: Features, m: int, given: dict[str, Any]) -> Tensor:
    """How far row n of a is from lying within row m of b, alone."""
    how = given["inclusion_form"], given["inclusion_reduction"]
    found = inclusion_loss(one(a, n), one(b, m), given["eps"], given["c"], *how)
    return found[0]


def words_of(texts: Texts) -> list[list[int]]:
    return [part.tolist() for part in texts.ids.split(texts.starts.diff().tolist())]


def in_another_order(some: Batch, order: list[int]) -> Batch:
    """The same images and captions, the images in another order."""
    captions = words_of(some.texts)
    own = [[t for t in range(len(captions)) if some.image_of_text[t] == i] for i in order]
    return replace(
        some,
        images=some.images[order],
        seeds=some.seeds[order],
        position=some.position[order],
        composed=some.composed[order],
        texts=Texts.pack([captions[t] for ts in own for t in ts]),
        image_of_text=torch.repeat_interleave(torch.tensor([len(ts) for ts in own])),
    )


# What is compared


@pytest.mark.parametrize("given", FORMS)
def test_a_image_lies_within_its_own_captions(given: dict[str, Any]) -> None:
    """Matched pairs alone, however many captions an image has; counted by captions."""
    some, made, term = batch(), model(), ImageInText(InclusionSettings(**given))
    features = encoded(made, some)
    of = some.image_of_text.tolist()
    assert max(of.count(i) for i in of) == 3
    expected = [loss(features.images, of[t], features.texts, t, given) for t in range(len(of))]
    torch.testing.assert_close(term(made, some, features), torch.stack(expected).sum())
    assert int(term.count(some)) == len(of)


@pytest.mark.parametrize("given", FORMS)
def test_wholes_lie_within_their_masked_copies(given: dict[str, Any]) -> None:
    """A copy is compared with its own whole, the whole being what is included; of others nothing is asked."""
    some, made = batch(), model()
    features, said = encoded(made, some), InclusionSettings(**given, masked_every=2)
    chosen = [i for i in range(len(some)) if some.position[i] % 2 == 0]
    captions = [t for t, i in enumerate(some.image_of_text.tolist()) if i in chosen]
    assert len(captions) > len(chosen) > 4
    terms: list[tuple[Any, Features, list[int]]] = [
        (MaskedImage(said, made.config), features.images, chosen),
        (MaskedText(said, made.config), features.texts, captions),
    ]
    for term, wholes, rows in terms:
        watched = Watched(made)
        found = term(watched, some, features)
        copies = watched.copies[0]
        expected = [loss(wholes, whole, copies, copy, given) for copy, whole in enumerate(rows)]
        torch.testing.assert_close(found, torch.stack(expected).sum())
        assert int(term.count(some)) == len(rows)


@pytest.mark.parametrize("form", ["textbook", "released"])
def test_bottleneck_of_each_side(form: Literal["textbook", "released"]) -> None:
    some, made = batch(), model()
    features = encoded(made, some)
    for side, own in (("image", features.images), ("text", features.texts)):
        term = Vib(InclusionSettings(vib_form=form), side)  # type: ignore[arg-type]
        torch.testing.assert_close(term(made, some, features), vib(own, form).sum())
        assert int(term.count(some)) == len(own["vec"])


def test_terms_are_means_over_the_whole_batch() -> None:
    """Sums of all micro-batches over counts of all: not a mean of means, whose counts differ here."""
    some, made = batch(), model()
    given = {"masked_every": 3}
    learner = Learner(made, preset("prolip", given))
    features, said = encoded(made, some), InclusionSettings(**given)
    for micro in (1, 4):
        found = backward(learner, some.split(micro))
        for name, term in learner.terms.items():
            expected = term(made, some, features) / term.count(some)  # type: ignore[operator]
            torch.testing.assert_close(torch.as_tensor(found[name], dtype=torch.float64), expected.detach())
    assert int(MaskedText(said, made.config).count(some)) % 4 != 0


# Masked images


@pytest.mark.parametrize("stem", ["linear", "conv"])
def test_a_copy_knows_a_quarter_of_the_patches(stem: Literal["linear", "conv"]) -> None:
    """Exactly; every image another quarter; no pixel of a dropped patch matters, every kept one does."""
    some, made = batch(), model(stem)
    features, watched = encoded(made, some), Watched(made)
    term = MaskedImage(InclusionSettings(masked_every=4), made.config)
    before = term(watched, some, features)  # type: ignore[arg-type]
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
    assert torch.equal(term(made, replace(some, images=dropped), features), before)
    assert not torch.equal(term(made, replace(some, images=kept), features), before)


@pytest.mark.parametrize(("share", "kept"), [(0.75, 16), (0.25, 48), (0.5, 32), (0.0, 64), (0.99, 1), (1.0, 1)])
def test_share_of_dropped_patches(share: float, kept: int) -> None:
    """At least one stays; with none dropped a copy is the whole."""
    some, made = batch(), model()
    features, watched = encoded(made, some), Watched(made)
    MaskedImage(InclusionSettings(drop_patches=share), made.config)(watched, some, features)  # type: ignore[arg-type]
    assert watched.images[0][1].shape == (2, kept)
    if share == 0:
        whole = {k: v[some.position % 8 == 0] for k, v in features.images.items()}
        torch.testing.assert_close(watched.copies[0], whole)


def test_patches_are_dropped_evenly() -> None:
    """Over many images every patch is kept about as often."""
    keeps = []
    some, made, term = batch(), model(), MaskedImage(InclusionSettings(masked_every=1), model().config)
    features, watched = encoded(made, some), Watched(made)
    for epoch in range(40):
        seeds = torch.tensor([key(epoch, i) for i in range(len(some))])
        term(watched, replace(some, seeds=seeds), features)  # type: ignore[arg-type]
        keeps.append(watched.images[-1][1])
    counts = torch.bincount(torch.cat(keeps).flatten(), minlength=PATCHES) / (40 * len(some))
    assert float((counts - 0.25).abs().max()) < 0.08  # 5 deviations of 640 draws are 0.086


# Masked texts

SPECIAL = TextConfig().special


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    captions=st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=14), min_size=1, max_size=5),
    share=st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]),
    seed=st.integers(0, 2**62),
)
def test_words_are_masked(captions: list[list[int]], share: float, seed: int) -> None:
    """Of texts of any length exactly the rounded share of the words; special tokens (ids 0 to 5) stay."""
    ours = TextConfig(vocab=64)
    seeds = torch.tensor([key(seed, n) for n in range(len(captions))])
    masked = mask_words(Texts.pack(captions), seeds, share, ours)
    for before, after in zip(captions, words_of(masked), strict=True):
        words = [p for p, token in enumerate(before) if token > 5]
        hidden = [p for p in words if after[p] != before[p]]
        assert all(after[p] == SPECIAL["mask"] for p in hidden)
        assert len(hidden) == round(share * len(words))
        assert all(a == b for p, (a, b) in enumerate(zip(after, before, strict=True)) if p not in hidden)


def test_captions_of_a_image_get_masks_of_their_own() -> None:
    """Three equal captions, masked differently, and differently again in another epoch; words at all places alike."""
    caption = [SPECIAL["start"], *range(10, 22), SPECIAL["end"], SPECIAL["unc"], SPECIAL["cls"]]
    some, made = batch(), model()
    some = replace(some, texts=Texts.pack([caption] * len(some.texts)))
    features, watched = encoded(made, some), Watched(made)
    term, where = MaskedText(InclusionSettings(masked_every=1), made.config), []
    for epoch in range(20):
        seeds = torch.tensor([key(epoch, i) for i in range(len(some))])
        term(watched, replace(some, seeds=seeds), features)  # type: ignore[arg-type]
        masks = [[p for p, token in enumerate(ids) if token == SPECIAL["mask"]] for ids in words_of(watched.texts[-1])]
        where += [tuple(places) for places in masks]
    assert all(len(places) == 9 for places in where)
    own = torch.searchsorted(some.image_of_text, torch.tensor(2)).item()  # the third image has three captions
    assert len(set(where[own : own + 3])) == 3
    assert where[: len(some.texts)] != where[len(some.texts) : 2 * len(some.texts)]
    share = torch.bincount(torch.tensor([p for places in where for p in places]), minlength=16) / len(where)
    assert share[[0, 13, 14, 15]].tolist() == [0, 0, 0, 0]
    assert float((share[1:13] - 0.75).abs().max()) < 0.1


# Which rows, and how they are drawn


def seen(
    some: Batch, made: Model, every: int = 3
) -> tuple[dict[int, tuple[int, ...]], dict[tuple[int, ...], list[int]]]:
    """Patches kept of each chosen image, by position; and the masked copy of each of its captions, by the caption."""
    said = InclusionSettings(masked_every=every)
    features, watched = encoded(made, some), Watched(made)
    MaskedImage(said, made.config)(watched, some, features)  # type: ignore[arg-type]
    MaskedText(said, made.config)(watched, some, features)  # type: ignore[arg-type]
    chosen = some.position[some.position % every == 0].tolist()
    if not chosen:
        return {}, {}
    own = [ids for ids, i in zip(words_of(some.texts), some.image_of_text, strict=True) if some.position[i] in chosen]
    copies = words_of(watched.texts[0])
    kept = {p: tuple(places) for p, places in zip(chosen, watched.images[0][1].tolist(), strict=True)}
    return kept, {tuple(ids): copy for ids, copy in zip(own, copies, strict=True)}


def test_one_image_in_eight_by_its_place_in_the_global_batch() -> None:
    some, made = batch(), model()
    assert set(seen(some, made, 8)[0]) == {0, 8}
    assert set(seen(replace(some, position=some.position + 3), made, 8)[0]) == {8, 16}


def test_masks_do_not_depend_on_neighbours() -> None:
    """The same in another order and in micro-batches; others when an image's seed is another."""
    some, made = batch(), model()
    reference = seen(some, made)
    order = torch.randperm(len(some), generator=torch.Generator().manual_seed(0)).tolist()
    assert seen(in_another_order(some, order), made) == reference
    parts = [seen(piece, made) for piece in some.split(4)]
    for n in range(2):
        assert {k: v for part in parts for k, v in part[n].items()} == reference[n]
    other = seen(replace(some, seeds=some.seeds + 1), made)
    assert all(other[n][k] != reference[n][k] for n in range(2) for k in list(reference[n])[:1])
    assert sum(other[0][k] == v for k, v in reference[0].items()) == 0


def test_a_share_without_chosen_images_still_passes_the_towers() -> None:
    """One row of weight 0: its loss and gradients are zeros, of every parameter that a chosen row would reach."""
    some, made = batch(), model()
    none, chosen = (replace(some, position=some.position * 8 + shift) for shift in (1, 0))
    for kind in (MaskedImage, MaskedText):
        term: Any = kind(InclusionSettings(), made.config)
        reached = []
        for piece in (none, chosen):
            features, watched = encoded(made, piece), Watched(made)
            value = term(watched, piece, features)
            gradients = torch.autograd.grad(value, list(made.parameters()), allow_unused=True)
            reached.append([g is not None for g in gradients])
            rows = len(watched.copies[0]["vec"])
            if piece is none:
                assert rows == 1
                assert float(value.detach()) == float(term.count(piece)) == 0
                assert all(float(g.abs().max()) == 0 for g in gradients if g is not None)
            else:
                assert rows == int(term.count(piece)) >= 16
        assert reached[0] == reached[1]


def test_patches_are_counted_of_the_model_s_own_size() -> None:
    """The term is made from the model's configuration, whatever the size of the images."""
    size = replace(config(), image=ImageConfig(size=48, patch=8, width=32, depth=1, heads=2, mlp=32))
    term = preset("prolip").terms["masked_image"][1](size)
    assert isinstance(term, MaskedImage)
    assert (term.patches, term.kept) == (36, 9)
