"""Maps over the tokens of a trunk, also of a tower without blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kiloword.explain.maps import Maps, explain
from kiloword.methods.registry import preset
from kiloword.models.build import build
from kiloword.verify.batch import batch, config


@pytest.mark.parametrize("maps", ["last", "rollout"])
@pytest.mark.parametrize("depth", [0, 2])
def test_contributions_of_a_trunk_s_tokens_are_the_cosine(depth: int, maps: Maps) -> None:
    small = config("frozen")
    image = replace(small.image, depth=depth, class_token=False)
    head = replace(small.head, image_pool="max")
    model = build(replace(small, image=image, head=head), preset("siglip"), seed=0).double()
    data = batch(0, 4, trunks="frozen")
    with torch.no_grad():
        texts = model.encode_text(data.texts)[1]
        shown = explain(model, data.images, texts, maps)
        vectors = model.encode_image(data.images)[1]["vec"]
    assert shown.grid == (2, 2)
    assert shown.maps.shape == (4, len(data.texts), 4)
    assert torch.allclose(shown.maps.sum(-1), vectors @ texts["vec"].T, atol=1e-6)
    assert shown.maps.std() > 0
