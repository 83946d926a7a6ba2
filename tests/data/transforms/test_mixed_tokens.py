"""Examples of cached tokens that transforms mix: token by token, against slow, literal references."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kiloword.data.transforms import (
    Compose,
    ComposeSettings,
    Cutmix,
    CutmixSettings,
    Mixup,
    MixupSettings,
    Stylistic,
    StylisticSettings,
)
from kiloword.data.transforms.mix import WithPartner, as_map
from kiloword.randomness import Draw
from kiloword.types import Example

BEFORE, WIDTH = 2, 5


def tokens(row: int, side: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """[2 + side^2, 5] of a class token, a register and a map."""
    return torch.randn(BEFORE + side * side, WIDTH, generator=torch.Generator().manual_seed(row)).to(dtype)


@dataclass
class TokenRows:
    """Four rows of cached tokens."""

    side: int
    dtype: torch.dtype = torch.float32
    crops: bool = True

    def __len__(self) -> int:
        return 4

    def example(self, row: int, draw: Draw) -> Example:
        return Example(f"k{row}", row, tokens(row, self.side, self.dtype), [f"caption {row}"])


def mixed(transform: WithPartner, data: TokenRows, epoch: int, row: int = 1) -> tuple[Tensor, Tensor, Example]:
    """Own tokens, those of the partner, and the mixed example."""
    example = data.example(row, Draw(0, epoch, row))
    done = transform(example, data, Draw(0, epoch, row))  # type: ignore[arg-type]
    (partner,) = {int(word) for word in done.captions[0].split() if word.isdigit()} - {row}
    return example.image, tokens(partner, data.side, data.dtype), done


def literal(own: Tensor, other: Tensor, side: int, source: Callable[[int, int], tuple[Tensor, int, int]]) -> Tensor:
    """Token (y, x) of the mixed map is the token `source` of one of the maps; first ones: the mean over the area."""
    out, own_tokens = torch.zeros_like(own), 0
    for y in range(side):
        for x in range(side):
            of, y_of, x_of = source(y, x)
            out[BEFORE + y * side + x] = of[BEFORE + y_of * side + x_of]
            own_tokens += of is own
    share = own_tokens / side**2
    out[:BEFORE] = (share * own[:BEFORE].double() + (1 - share) * other[:BEFORE].double()).to(out.dtype)
    return out


def literal_halves(
    first: Tensor, second: Tensor, side: int, along: int
) -> Callable[[int, int], tuple[Tensor, int, int]]:
    """The centre half of the first map, then that of the second: along x (1) or y (0)."""
    small = side // 2
    large = side - small

    def source(y: int, x: int) -> tuple[Tensor, int, int]:
        place = (y, x)[along]
        of, at = (first, place) if place < small else (second, place - small)
        at += (side - (small if place < small else large)) // 2
        return (of, y, at) if along else (of, at, x)

    return source


@pytest.mark.parametrize("side", [7, 4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_compose_joins_halves_of_token_maps(side: int, dtype: torch.dtype) -> None:
    transform, seen = Compose(ComposeSettings(rho=1, image_order="follows_caption")), set()
    for epoch in range(12):
        own, other, done = mixed(transform, TokenRows(side, dtype), epoch)
        pair = (own, other) if done.captions[0].startswith("caption 1") else (other, own)
        forms = [literal(own, other, side, literal_halves(*pair, side, along)) for along in (0, 1)]
        equal = [torch.allclose(done.image.float(), form.float(), atol=1e-3, rtol=0) for form in forms]
        assert sum(equal) == 1
        assert done.composed
        assert done.image.dtype == dtype
        seen.add((equal.index(True), pair[0] is own))
    assert len(seen) == 4, "both axes and both orders"


def literal_paste(own: Tensor, other: Tensor, pasted: Tensor) -> Callable[[int, int], tuple[Tensor, int, int]]:
    return lambda y, x: (other if pasted[y, x] else own, y, x)


def test_cutmix_pastes_a_box_of_tokens() -> None:
    for epoch in range(8):
        own, other, done = mixed(Cutmix(CutmixSettings(rho=1)), TokenRows(6), epoch)
        pasted = (as_map(done.image) == as_map(other)).all(0)
        rows, columns = pasted.any(1).nonzero(), pasted.any(0).nonzero()
        if pasted.any():  # a box, whole
            assert pasted[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1].all()
        expected = literal(own, other, 6, literal_paste(own, other, pasted))
        assert torch.allclose(done.image, expected, atol=1e-6)


def test_mixup_is_linear_in_the_tokens() -> None:
    own, other, done = mixed(Mixup(MixupSettings(rho=1)), TokenRows(3), 0)
    share = float(((done.image - other) / (own - other))[-1, 0])
    assert 0 < share < 1
    assert torch.allclose(done.image, share * own + (1 - share) * other, atol=1e-5)
    assert ((done.image % 1) != 0).all(), "not rounded as pixels are"


def test_squashed_halves_hold_the_whole_map() -> None:
    flat = TokenRows(7, torch.float16)
    own, other, done = mixed(Compose(ComposeSettings(rho=1, crop="squash")), flat, 0)
    assert done.image.shape == own.shape
    assert done.image.dtype == torch.float16
    assert not torch.equal(done.image, mixed(Compose(ComposeSettings(rho=1)), flat, 0)[2].image)
    mean = (as_map(own).float().mean((1, 2)) * 3 + as_map(other).float().mean((1, 2)) * 4) / 7
    assert (as_map(done.image).float().mean((1, 2)) - mean).abs().max() < 0.1


def test_two_crops_of_one_view_are_refused() -> None:
    data = TokenRows(7)
    with pytest.raises(ValueError, match=r"two crops of one image.*cached tokens hold one view.*train on images"):
        Stylistic(StylisticSettings(rho=1))(data.example(0, Draw(0, 0, 0)), data, Draw(0, 0, 0))  # type: ignore[arg-type]
