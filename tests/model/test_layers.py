"""Layers of towers: every parameter has one, by depth."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from kiloword.config.recipes import ImageConfig, TextConfig, sizes
from kiloword.model.image import ImageTower
from kiloword.model.layers import depths, layers_of, trunk_layers
from kiloword.model.resnet import ResNet
from kiloword.model.text import TextTower

IMAGE = ImageConfig(size=32, patch=16, width=32, depth=3, heads=2, mlp=64)


def test_image_tower() -> None:
    config = replace(IMAGE, stem="conv", extra_tokens=2, mask_token=True)
    assert layers_of(ImageTower(config)) == [
        ["blocks.0", "class_token", "extra_tokens", "mask_token", "patches", "positions", "pre_norm", "stem"],
        ["blocks.1"],
        ["blocks.2", "norm"],
    ]


def test_blocks_beside_the_last_ones_have_their_depth() -> None:
    tower = ImageTower(replace(IMAGE, uncertainty_token=True, uncertainty_blocks=2))
    assert [layer[:2] for layer in layers_of(tower)[1:]] == [
        ["blocks.1", "uncertainty_blocks.0"],
        ["blocks.2", "uncertainty_blocks.1"],
    ]


def test_every_parameter_is_in_one_layer() -> None:
    """Of eleven blocks, so that "blocks.1" begins the name of another one."""
    with torch.device("meta"):
        towers = [
            ImageTower(replace(IMAGE, depth=11)),
            TextTower(TextConfig(context=8, vocab=600, width=32, depth=11, heads=2, mlp=64)),
            ResNet(sizes()["rn50"].image),
        ]
    for tower in towers:
        layers, of = layers_of(tower), depths(tower)
        assert set(of.values()) == set(range(len(layers)))
        for name, depth in of.items():
            holding = [n for n, layer in enumerate(layers) for p in layer if name == p or name.startswith(f"{p}.")]
            assert holding == [depth], name
    resnet = layers_of(towers[2])
    assert len(resnet) == 16
    assert (resnet[0], resnet[3], resnet[15]) == (["stages.0.0", "stem", "stem_norms"], ["stages.1.0"], ["stages.3.2"])


class Trunk(nn.Module):
    """Two layers; a third parameter that none of them names."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.parts, self.odd = nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 2)]), nn.Linear(2, 2)

    def blocks(self) -> list[list[str]]:
        return [["stem"], ["parts.0"]]


def test_layers_of_a_trunk_are_below_those_of_the_tower() -> None:
    tower = ImageTower(IMAGE)
    tower.trunk = Trunk()  # type: ignore[assignment]
    assert layers_of(tower)[:2] == [["trunk.stem"], ["trunk.parts.0"]]
    assert layers_of(tower)[2:] == layers_of(ImageTower(IMAGE))
    assert trunk_layers(tower) == 2
    of = depths(tower)
    assert [of[name] for name in ("trunk.stem.bias", "trunk.parts.0.bias", "trunk.odd.bias")] == [0, 1, 0]
    names = ("positions", "blocks.0.norm1.bias", "blocks.2.norm1.bias", "norm.bias")
    assert [of[name] for name in names] == [2, 2, 4, 4]
    tower.blocks = nn.ModuleList()
    assert layers_of(tower)[2:] == [["class_token", "patches", "positions", "pre_norm", "norm"]]
