"""Images and captions of two examples as one, and who goes with whom, against slow, literal references."""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cases import mostly_slow
from kiloword.data.edits import MixtureSource
from kiloword.data.transforms.mix import (
    Compose,
    Cutmix,
    Mixup,
    Stylistic,
    WithPartner,
    as_map,
    blend,
    box,
    cycle,
    either,
    halves,
    joined,
    named,
    paste,
    share,
)
from kiloword.data.transforms.settings import (
    ComposeSettings,
    CutmixSettings,
    MixupSettings,
    StylisticSettings,
)
from kiloword.randomness import Draw
from kiloword.stores.embed import embed
from kiloword.stores.features import FeatureStore
from kiloword.types import BadSample, Example, Record

SIZES = st.integers(1, 12)


def noise(row: int, height: int = 9, width: int = 9) -> Tensor:
    return torch.randint(256, (3, height, width), generator=torch.Generator().manual_seed(row), dtype=torch.uint8)


def literal_halves(first: Tensor, second: Tensor, side_by_side: bool) -> Tensor:
    """Pixel by pixel: the centre crop [H, w] or [h, W] of each, the first one's then the second one's."""
    out, (_, height, width) = torch.zeros_like(first), first.shape
    for y in range(height):
        for x in range(width):
            place, length = (x, width) if side_by_side else (y, height)
            small = length // 2
            large = length - small
            source, at = (first, place) if place < small else (second, place - small)
            at += (length - (small if place < small else large)) // 2
            out[:, y, x] = source[:, y, at] if side_by_side else source[:, at, x]
    return out


@given(height=SIZES, width=SIZES, side_by_side=st.booleans())
def test_half_crops_are_the_centres_put_together(height: int, width: int, side_by_side: bool) -> None:
    first, second = noise(0, height, width), noise(1, height, width)
    made = halves(first, second, side_by_side)
    assert torch.equal(made, literal_halves(first, second, side_by_side))


@given(height=st.integers(2, 12), width=st.integers(2, 12), side_by_side=st.booleans())
def test_squashed_halves_keep_each_whole_image(height: int, width: int, side_by_side: bool) -> None:
    flat = [torch.full((3, height, width), level, dtype=torch.uint8) for level in (40, 200)]
    made = halves(flat[0], flat[1], side_by_side, squash=True)
    lengths = (height, width // 2) if side_by_side else (height // 2, width)
    assert made.shape == flat[0].shape
    assert (made == 40).all(0).sum() == lengths[0] * lengths[1]
    assert ((made == 40) | (made == 200)).all()


@given(kept=st.floats(0, 1), height=SIZES, width=SIZES, down=st.floats(0, 0.999), right=st.floats(0, 0.999))
def test_cutmix_s_box_lies_inside_and_has_its_size(
    kept: float, height: int, width: int, down: float, right: float
) -> None:
    top, left, high, wide = box(height, width, kept, down, right)
    assert (high, wide) == (round(height * math.sqrt(1 - kept)), round(width * math.sqrt(1 - kept)))
    assert 0 <= top <= height - high
    assert 0 <= left <= width - wide
    onto, source = noise(0, height, width), noise(1, height, width)
    made, inside = paste(onto, source, (top, left, high, wide)), torch.zeros(height, width, dtype=torch.bool)
    inside[top : top + high, left : left + wide] = True
    assert torch.equal(made, torch.where(inside, source, onto))


def test_a_blend_is_the_weighted_sum() -> None:
    first, second = noise(0), noise(1)
    for kept in (0.0, 0.31, 1.0):
        expected = (kept * first.double() + (1 - kept) * second.double()).round()
        assert (blend(first, second, kept).double() - expected).abs().max() <= 1  # halves may round either way


def test_captions_are_joined_as_they_are() -> None:
    assert joined(["A dog ."], ["A cat ."], " and ", True) == ["A dog . and A cat ."]
    assert joined(["A dog ."], ["A cat ."], " and ", False) == ["A cat . and A dog ."]
    assert joined(["a", "b", "c"], ["x", "y"], " ", True) == ["a x", "b y", "c x"]
    assert joined(["a"], ["x", "y"], " and ", False) == ["x and a"]


@dataclass
class Rows:
    """N rows of noise, row i with i % 3 + 1 captions; what a transform fetches from, and what it binds to."""

    n: int
    name: str = "rows"
    fingerprint: str = "f"
    bad: tuple[int, ...] = ()
    silent: tuple[int, ...] = ()  # rows without captions
    size: int = 9
    crops: bool = False
    asked: list[tuple[int, Draw]] = field(default_factory=list)

    def __len__(self) -> int:
        return self.n

    def record(self, row: int) -> Record:
        if row in self.bad:
            raise BadSample("truncated image")
        pixels = noise(row, self.size, self.size).permute(1, 2, 0).numpy()
        captions = [] if row in self.silent else [f"caption {row} {c}" for c in range(row % 3 + 1)]
        return Record(f"k{row}", pixels, captions)

    def example(self, row: int, draw: Draw) -> Example:
        self.asked.append((row, draw))
        record = self.record(row)
        return Example(record.key, row, noise(row, self.size, self.size), record.captions)


def draws(n: int, epochs: int, seed: int = 0) -> list[Draw]:
    return [Draw(seed, epoch, row) for epoch in range(epochs) for row in range(n)]


@given(n=st.integers(2, 60), seed=st.integers(0, 5))
def test_fixed_partners_are_one_circle(n: int, seed: int) -> None:
    found = cycle(seed, n)
    row, seen = 0, []
    for _ in range(n):
        seen.append(row)
        row = int(found[row])
    assert row == 0
    assert sorted(seen) == list(range(n))


def parquet(path: Path, **columns: list[str | None]) -> str:
    pa.parquet.write_table(pa.table(columns), path)
    return str(path)


def test_partners_from_a_file(tmp_path: Path) -> None:
    """A key that comes twice stands for its first row; bad rows need none."""
    keys = [f"k{row}" for row in range(4)]
    path = parquet(tmp_path / "p.parquet", key=keys[::-1], partner=["k0", "k0", "k0", "k2"])
    bound = Compose(ComposeSettings(partner="file", partner_file=path)).bind(Rows(4), FeatureStore)
    assert bound.partner(0, 4, Draw(0, 0, 0), np.random.default_rng(0)) == 2
    assert named(Rows(4), path).tolist() == [2, 0, 0, 0]
    (tmp_path / "p.csv").write_text("partner,key\nk0,k3\nk0,k2\nk0,k1\nk2,k0\n")
    assert named(Rows(4), str(tmp_path / "p.csv")).tolist() == [2, 0, 0, 0]
    assert named(Rows(5, bad=(4,)), path).tolist() == [2, 0, 0, 0, -1]
    assert named(MixtureSource([Rows(4)], [2.0]), path).tolist() == [2, 0, 0, 0] * 2


REFUSED: list[tuple[dict[str, list[Any]] | bytes, str]] = [
    ({"key": ["k0", "k1"], "partner": ["k1", "k9"]}, "'k9'"),
    ({"key": ["k0", "k0"], "partner": ["k1", "k1"]}, "'k0' twice"),
    ({"key": ["k0"], "partner": ["k1"]}, "'k1'"),
    ({"key": ["k0", "k1"], "partner": ["k1", None]}, "row 1"),
    ({"key": ["k0", "k1"], "mate": ["k1", "k0"]}, "partner"),
    (b"no parquet", "cannot be read"),
]


@pytest.mark.parametrize(("columns", "word"), REFUSED, ids=range(len(REFUSED)))
def test_files_of_partners_that_cannot_be_used(
    tmp_path: Path, columns: dict[str, list[Any]] | bytes, word: str
) -> None:
    path = tmp_path / "p.parquet"
    path.write_bytes(columns) if isinstance(columns, bytes) else parquet(path, **columns)
    with pytest.raises(ValueError, match=word):
        Compose(ComposeSettings(partner="file", partner_file=str(path))).bind(Rows(2), FeatureStore)


class Angles:
    """A teacher whose feature of "caption R C" is the direction of row R, a little turned by C."""

    size, resize, fingerprint = 9, "squash", "angles"

    def encode_images(self, images: Tensor) -> Tensor:
        return torch.ones(len(images), 2) / math.sqrt(2)

    def encode_texts(self, texts: Sequence[str]) -> Tensor:
        numbers = [[int(word) for word in text.split()[1:]] or [0, 0] for text in texts]
        angles = torch.tensor([row**2 / 100 + c / 10000 for row, c in numbers])
        return torch.stack([angles.cos(), angles.sin()], 1)


def test_nearest_and_farthest_by_a_table_that_embed_wrote(tmp_path: Path) -> None:
    """A row that cannot be read has any partner; a sample that comes twice is not its own nearest."""
    folder, data = tmp_path / "table", Rows(12, bad=(4,))
    embed(Angles(), data, folder, dtype="fp32", part=5)  # type: ignore[arg-type]
    near, far = [1, 0, 1, 2, -1, 6, 5, 6, 7, 8, 9, 10], [11, 11, 11, 11, -1, 11, 11, 11, 0, 0, 0, 0]
    for how, expected in (("nearest", near), ("farthest", far)):
        transform = Compose(ComposeSettings(rho=1, partner=how, partner_table=str(folder)))
        bound, twice = (transform.bind(one, FeatureStore) for one in (data, MixtureSource([data], [2.0])))
        for one in (bound, twice, pickle.loads(pickle.dumps(bound))):
            found = [one.partner(row, 12, Draw(0, 0, row), np.random.default_rng(0)) % 12 for row in range(12)]
            assert found[:4] + found[5:] == expected[:4] + expected[5:]
            assert found[4] != 4
        with pytest.raises(ValueError, match="'k12'"):
            transform.bind(Rows(13, bad=(4,)), FeatureStore)
    with pytest.raises(ValueError, match="whole weights"):
        Compose(ComposeSettings(partner="fixed")).bind(MixtureSource([data], [1.4]), FeatureStore)


TRANSFORMS = {
    "compose": lambda **s: Compose(ComposeSettings(**s)),
    "mixup": lambda **s: Mixup(MixupSettings(**s)),
    "cutmix": lambda **s: Cutmix(CutmixSettings(**s)),
    "stylistic": lambda **s: Stylistic(StylisticSettings(**s)),
}


def test_transforms_from_a_file_of_rewrites(tmp_path: Path) -> None:
    """A pair has the captions of its own order before those of the other."""
    path = parquet(tmp_path / "r.parquet", key=["k1", "k1"], partner=["k0", "k0"], caption=["both", "the two"])
    transform = Compose(ComposeSettings(rho=1, rewrites=path)).bind(Rows(2), FeatureStore)
    assert "captions of 1 pairs" in (transform.note or "")
    for row, expected in ((1, ["both", "the two"]), (0, ["both"])):
        data = Rows(2)
        assert transform(data.example(row, Draw(0, 0, row)), data, Draw(0, 0, row)).captions == expected
    other = Rows(3)
    found = [transform(other.example(2, d), other, d).captions for d in (Draw(0, e, 2) for e in range(5))]
    assert all(" and " in caption for captions in found for caption in captions)  # an unknown pair is joined
    assert either({("a", "b"): ["x"], ("b", "a"): ["z"]}, "b", "a") == ["z"]
    with pytest.raises(ValueError, match="parts images"):
        Compose(ComposeSettings(rewrites=path, parts="images"))
    with pytest.raises(ValueError, match="'k1', 'k0'"):
        Compose(ComposeSettings(rewrites=path)).bind(Rows(1), FeatureStore)


@pytest.mark.parametrize("name", mostly_slow(TRANSFORMS, 0, 1))
def test_the_share_of_composed_examples_is_rho(name: str) -> None:
    data = Rows(40)
    for rho, low, high in ((0.0, 0, 0), (0.3, 0.27, 0.33), (1.0, 1, 1)):
        transform = TRANSFORMS[name](rho=rho)
        made = [(d, transform(data.example(d.row, d), data, d)) for d in draws(40, 50)]
        assert low <= sum(e.composed for _, e in made) / len(made) <= high
        for draw, example in made:
            if not example.composed:
                assert torch.equal(example.image, noise(draw.row))
                assert example.captions == data.record(draw.row).captions


def test_rho_by_default_follows_the_size_of_the_data() -> None:
    assert (share(None, 100_000), share(None, 3_318_333), share(None, 12_000_000)) == (0.3, 0.3, 0.15)
    assert share(0.0, 100) == 0.0


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize(("n", "size"), [(1, 8), (3, 33)])
def test_tiny_data_and_odd_sizes(name: str, n: int, size: int) -> None:
    data, transform = Rows(n, size=size), TRANSFORMS[name](rho=1)
    for draw in draws(n, 4):
        own = data.example(draw.row, draw)
        made = transform(own, data, draw)
        assert (made.composed, made.image.shape, made.image.dtype) == (True, (3, size, size), torch.uint8)
        assert len(made.captions) == len(own.captions)
        assert torch.equal(own.image, noise(draw.row, size, size)), "the own image was changed in place"


@pytest.mark.parametrize("name", TRANSFORMS)
def test_images_or_captions_alone(name: str) -> None:
    for draw in draws(6, 3):
        made = {}
        for parts in ("both", "images", "captions"):
            data = Rows(6)
            own = data.example(draw.row, draw)
            made[parts] = TRANSFORMS[name](rho=1, parts=parts)(own, data, draw)
            assert made[parts].composed
        assert torch.equal(made["images"].image, made["both"].image)
        assert made["images"].captions == own.captions
        assert torch.equal(made["captions"].image, own.image)
        assert made["captions"].captions == made["both"].captions != own.captions


def test_partners_are_augmented_by_draws_of_their_own() -> None:
    data, draw = Rows(10), Draw(3, 4, 5)
    TRANSFORMS["compose"](rho=1)(data.example(5, draw), data, draw)
    row, used = data.asked[-1]
    assert row != 5
    assert (used.epoch, used.row) == (4, 5)
    assert used.rng("crop").random() not in (draw.rng("crop").random(), replace(draw, row=row).rng("crop").random())


def test_mixup_and_cutmix_are_a_share_of_each_image() -> None:
    dark, light = (torch.full((3, 40, 40), level, dtype=torch.uint8) for level in (0, 250))

    class Two(Rows):
        def example(self, row: int, draw: Draw) -> Example:
            return Example(f"k{row}", row, light if row else dark, ["x"])

    data = Two(2)
    for name in ("mixup", "cutmix"):
        own = [
            1 - TRANSFORMS[name](rho=1, alpha=1.0)(data.example(0, d), data, d).image.float().mean().item() / 250
            for d in (Draw(0, e, 0) for e in range(400))
        ]
        found = np.quantile(own, [0.1, 0.25, 0.5, 0.75, 0.9])
        assert np.abs(found - [0.1, 0.25, 0.5, 0.75, 0.9]).max() < 0.06, "Beta(1, 1) is uniform"
    sharp = [TRANSFORMS["mixup"](rho=1, alpha=0.1)(data.example(0, d), data, d).image.max() for d in draws(1, 200)]
    assert np.mean([20 < s < 230 for s in sharp]) < 0.35, "Beta(0.1, 0.1) lies at the ends"


def test_the_stylistic_control_shows_one_image_twice_and_edits_its_caption() -> None:
    data, transform = Rows(4, size=32), TRANSFORMS["stylistic"](rho=1, edits=0.4)
    crops = set()
    for draw in draws(4, 8):
        made = transform(data.example(draw.row, draw), data, draw)
        own = data.record(draw.row).captions
        for caption, said in zip(own, made.captions, strict=True):
            assert said.startswith(caption + " and ") or said.endswith(" and " + caption)
        assert {row for row, _ in data.asked[-2:]} == {draw.row}
        crops.add(made.image.float().mean().item())
        assert not torch.equal(made.image, halves(noise(draw.row, 32, 32), noise(draw.row, 32, 32), True))
    assert len(crops) == 32, "other crops in every epoch"
    cropped, draw = Rows(4, size=32, crops=True), Draw(0, 0, 0)  # two equal looks are no reason to crop again
    both = [halves(noise(0, 32, 32), noise(0, 32, 32), way) for way in (True, False)]
    assert any(torch.equal(transform(cropped.example(0, draw), cropped, draw).image, one) for one in both)


# Cached tokens: maps are mixed as pixels are, and the tokens before them by the share of the area

BEFORE, WIDTH = 2, 5


@dataclass
class TokenRows:
    """Four rows of cached tokens [2 + side^2, 5]: a class token, a register and a map."""

    side: int
    dtype: torch.dtype = torch.float32
    crops: bool = True

    def __len__(self) -> int:
        return 4

    def example(self, row: int, draw: Draw) -> Example:
        drawn = torch.randn(BEFORE + self.side**2, WIDTH, generator=torch.Generator().manual_seed(row))
        return Example(f"k{row}", row, drawn.to(self.dtype), [f"caption {row}"])


def mixed(transform: WithPartner, data: TokenRows, epoch: int) -> tuple[Tensor, Tensor, Example]:
    """Own tokens, those of the partner, and the mixed example."""
    draw = Draw(0, epoch, 1)
    example = data.example(1, draw)
    done = transform(example, data, draw)  # type: ignore[arg-type]
    (partner,) = {int(word) for word in done.captions[0].split() if word.isdigit()} - {1}
    assert (done.composed, done.image.dtype) == (True, data.dtype)
    return example.image, data.example(partner, draw).image, done


def expected(own: Tensor, other: Tensor, of_map: Tensor, share: float) -> Tensor:
    """The mixed map, and the mean of the first tokens. Args: share: of the map that is the example's own."""
    first = share * own[:BEFORE].double() + (1 - share) * other[:BEFORE].double()
    return torch.cat([first.to(own.dtype), of_map.flatten(1).T])


@pytest.mark.parametrize(("side", "dtype"), [(7, torch.float16), (4, torch.float32)])
def test_compose_joins_halves_of_token_maps(side: int, dtype: torch.dtype) -> None:
    transform, seen = Compose(ComposeSettings(rho=1, image_order="follows_caption")), set()
    for epoch in range(12):
        own, other, done = mixed(transform, TokenRows(side, dtype), epoch)
        own_first = done.captions[0].startswith("caption 1")
        pair, small = (own, other) if own_first else (other, own), side // 2
        share = (small if own_first else side - small) / side
        forms = [expected(own, other, halves(*map(as_map, pair), way), share) for way in (True, False)]
        equal = [torch.allclose(done.image.float(), form.float(), atol=1e-3, rtol=0) for form in forms]
        assert sum(equal) == 1
        seen.add((equal.index(True), own_first))
    assert len(seen) == 4, "both axes and both orders"


def test_cutmix_pastes_a_box_of_tokens() -> None:
    for epoch in range(8):
        own, other, done = mixed(Cutmix(CutmixSettings(rho=1)), TokenRows(6), epoch)
        pasted = (as_map(done.image) == as_map(other)).all(0)
        rows, columns = pasted.any(1).nonzero(), pasted.any(0).nonzero()
        if pasted.any():  # a box, whole
            assert pasted[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1].all()
        whole = torch.where(pasted, as_map(other), as_map(own))
        assert torch.allclose(done.image, expected(own, other, whole, 1 - pasted.double().mean().item()), atol=1e-6)


def test_mixup_is_linear_in_the_tokens() -> None:
    own, other, done = mixed(Mixup(MixupSettings(rho=1)), TokenRows(3), 0)
    share = float(((done.image - other) / (own - other))[-1, 0])
    assert 0 < share < 1
    assert torch.allclose(done.image, share * own + (1 - share) * other, atol=1e-5)
    assert ((done.image % 1) != 0).all(), "not rounded as pixels are"


def test_two_crops_of_one_view_are_refused() -> None:
    data, draw = TokenRows(7), Draw(0, 0, 0)
    with pytest.raises(ValueError, match=r"two crops of one image"):
        Stylistic(StylisticSettings(rho=1))(data.example(0, draw), data, draw)  # type: ignore[arg-type]
