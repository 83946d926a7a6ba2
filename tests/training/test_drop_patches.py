"""`--augment.drop-patches`: which patches an image keeps, and that nothing but the image decides it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kiloword.config.recipes import sizes
from kiloword.methods.defaults import default_recipe
from kiloword.methods.registry import preset
from kiloword.models.build import build
from kiloword.training.setup import make_learner
from kiloword.training.step import Learner, backward, kept
from kiloword.verify.batch import batch
from parts import gradients, size


def made(method: str = "siglip", share: float = 0.5) -> Learner:
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
    whole, some = made(), batch()
    encoded = whole.encode(some)
    for n, image in enumerate(some.images):
        alone = kept(some.seeds[n : n + 1], 16, 0.5)
        tokens, features = whole.model.encode_image(image[None], alone)
        assert torch.allclose(tokens[0], encoded.image_tokens[n], atol=1e-12)
        assert torch.allclose(features["vec"][0], encoded.images["vec"][n], atol=1e-12)
    plain = made(share=0).encode(some)
    assert not torch.allclose(plain.images["vec"], encoded.images["vec"], atol=1e-3)


@pytest.mark.parametrize("method", ["siglip", "llip", "prolip"])
def test_micro_batches_lose_the_same_patches(method: str) -> None:
    whole, cut = (gradients(made(method), batch(method=method), parts) for parts in (1, 2))
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
        backward(made("sycoca"), [batch(method="sycoca")])
