"""Images and captions of two examples as one, who goes with whom, and edits of captions, against literal references."""

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
from hypothesis import given, strategies as st
from torch import Tensor

from kiloword.data.edits import MixtureSource
from kiloword.data.text import eda
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
    halves,
    named,
    paste,
    share,
)
from kiloword.data.transforms.settings import ComposeSettings, CutmixSettings, MixupSettings, StylisticSettings
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
def test_halves_are_centre_crops_or_whole_images(height: int, width: int, side_by_side: bool) -> None:
    first, second = noise(0, height, width), noise(1, height, width)
    made = halves(first, second, side_by_side)
    assert torch.equal(made, literal_halves(first, second, side_by_side))
    if min(height, width) > 1:
        flat = [torch.full((3, height, width), level, dtype=torch.uint8) for level in (40, 200)]
        squashed = halves(flat[0], flat[1], side_by_side, squash=True)
        assert (squashed.shape, set(squashed.unique().tolist())) == (first.shape, {40, 200})
        assert (squashed == 40).all(0).sum() == (height * (width // 2) if side_by_side else height // 2 * width)


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
        expected = kept * first.double() + (1 - kept) * second.double()
        assert (blend(first, second, kept).double() - expected).abs().max() < 0.501  # halves may round either way


@dataclass
class Rows:
    """N rows of noise, row i with i % 3 + 1 captions; what a transform fetches from, and what it binds to."""

    n: int
    name: str = "rows"
    fingerprint: str = "f"
    bad: tuple[int, ...] = ()
    size: int = 9
    crops: bool = False
    asked: list[tuple[int, Draw]] = field(default_factory=list)

    def __len__(self) -> int:
        return self.n

    def record(self, row: int) -> Record:
        if row in self.bad:
            raise BadSample("truncated image")
        pixels = noise(row, self.size, self.size).permute(1, 2, 0).numpy()
        return Record(f"k{row}", pixels, [f"caption {row} {c}" for c in range(row % 3 + 1)])

    def example(self, row: int, draw: Draw) -> Example:
        self.asked.append((row, draw))
        record = self.record(row)
        return Example(record.key, row, noise(row, self.size, self.size), record.captions)


def draws(n: int, epochs: int) -> list[Draw]:
    return [Draw(0, epoch, row) for epoch in range(epochs) for row in range(n)]


def bound(transform: Any, n: int = 2) -> Any:
    return transform.bind(Rows(n), FeatureStore)


@given(n=st.integers(2, 60), seed=st.integers(0, 5))
def test_fixed_partners_are_one_circle(n: int, seed: int) -> None:
    found, seen = cycle(seed, n), [0]
    while len(seen) < n:
        seen.append(int(found[seen[-1]]))
    assert (sorted(seen), found[seen[-1]]) == (list(range(n)), 0)


def parquet(path: Path, **columns: Any) -> str:
    pa.parquet.write_table(pa.table(columns), path)
    return str(path)


def test_partners_from_a_file(tmp_path: Path) -> None:
    """A key that comes twice stands for its first row; bad rows need none."""
    keys = [f"k{row}" for row in range(4)]
    path = parquet(tmp_path / "p.parquet", key=keys[::-1], partner=["k0", "k0", "k0", "k2"])
    transform = bound(Compose(ComposeSettings(partner="file", partner_file=path)), 4)
    assert transform.partner(0, 4, Draw(0, 0, 0), np.random.default_rng(0)) == 2
    (tmp_path / "p.csv").write_text("partner,key\nk0,k3\nk0,k2\nk0,k1\nk2,k0\n")
    assert named(Rows(4), path).tolist() == named(Rows(4), str(tmp_path / "p.csv")).tolist() == [2, 0, 0, 0]
    assert named(Rows(5, bad=(4,)), path).tolist() == [2, 0, 0, 0, -1]
    assert named(MixtureSource([Rows(4)], [2.0]), path).tolist() == [2, 0, 0, 0] * 2
    for columns, word in (
        ({"key": ["k0", "k1"], "partner": ["k1", "k9"]}, "'k9'"),
        ({"key": ["k0", "k0"], "partner": ["k1", "k1"]}, "'k0' twice"),
        ({"key": ["k0"], "partner": ["k1"]}, "'k1'"),
        ({"key": ["k0", "k1"], "partner": ["k1", None]}, "row 1"),
        ({"key": ["k0", "k1"], "mate": ["k1", "k0"]}, "no column 'partner'"),
    ):
        parquet(Path(path), **columns)
        with pytest.raises(ValueError, match=word):
            bound(Compose(ComposeSettings(partner="file", partner_file=path)))


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
        once, twice = (transform.bind(one, FeatureStore) for one in (data, MixtureSource([data], [2.0])))
        for one in (once, twice, pickle.loads(pickle.dumps(once))):
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
    path = parquet(tmp_path / "r.parquet", key=["k1", "k1", "k9"], partner=["k0"] * 3, caption=["both", "the two", "_"])
    transform = bound(Compose(ComposeSettings(rho=1, rewrites=path)))
    assert "captions of 2 pairs" in transform.note
    for row, expected in ((1, ["both", "the two"]), (0, ["both"])):
        data = Rows(2)
        assert transform(data.example(row, Draw(0, 0, row)), data, Draw(0, 0, row)).captions == expected
    other = Rows(3)
    found = [transform(other.example(2, d), other, d).captions for d in (Draw(0, e, 2) for e in range(5))]
    assert all(" and " in caption for captions in found for caption in captions)  # an unknown pair is joined
    both = replace(transform, rewrites={("k1", "k0"): ["x"], ("k0", "k1"): ["z"]})
    assert both(data.example(0, Draw(0, 0, 0)), data, Draw(0, 0, 0)).captions == ["z"]
    with pytest.raises(ValueError, match="parts images"):
        Compose(ComposeSettings(rewrites=path, parts="images"))
    with pytest.raises(ValueError, match="'k1', 'k0'"):
        bound(Compose(ComposeSettings(rewrites=path)), 1)


def test_rho_by_default_follows_the_size_of_the_data() -> None:
    assert (share(None, 100_000), share(None, 3_318_333), share(None, 12_000_000)) == (0.3, 0.3, 0.15)
    assert share(0.0, 100) == 0.0


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize(("n", "size"), [(1, 8), (3, 33)])
def test_images_or_captions_alone(name: str, n: int, size: int) -> None:
    """Of one row and of odd sizes, too."""
    data = Rows(n, size=size)
    for draw in draws(n, 4):
        own = data.example(draw.row, draw)
        made = [TRANSFORMS[name](rho=1, parts=parts)(own, data, draw) for parts in ("both", "images", "captions")]
        for one in made:
            assert (one.composed, one.image.shape, one.image.dtype) == (True, (3, size, size), torch.uint8)
            assert len(one.captions) == len(own.captions)
        both, images, captions = made
        assert torch.equal(images.image, both.image)
        assert torch.equal(captions.image, own.image)
        assert images.captions == own.captions != both.captions == captions.captions
        assert torch.equal(own.image, noise(draw.row, size, size)), "the own image was changed in place"


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
    with pytest.raises(ValueError, match="two crops of one image"):
        mixed(Stylistic(StylisticSettings(rho=1)), TokenRows(7), 0)


# Easy data augmentation of captions


WORDS = {"dog": ["hound"], "runs": ["sprints", "dashes"], "big": ["large"]}


def said(caption: str, edits: float) -> set[str]:
    """What becomes of a caption by many draws."""
    return {eda.eda(caption, WORDS, edits, np.random.default_rng(seed)) for seed in range(300)}


def test_each_operation() -> None:
    """A word is replaced, a synonym inserted, two words are swapped, words deleted; punctuation and capitals stay."""
    inserted = {"hound the dog", "the hound dog", "the dog hound"}
    assert said("the dog", 0.5) == {"the hound", *inserted, "dog the", "the", "dog", "the dog"}
    replaced = {"A Hound, big, runs.", "A Dog, large, runs.", "A Dog, big, sprints.", "A Dog, big, dashes."}
    assert replaced < said("A Dog, big, runs.", 0.25)
    assert "A Hound, large, sprints." in said("A Dog, big, runs.", 1.0)
    assert said("a", 0.5) == {"a"}
    assert said("a b", 1.0) == {"a b", "a", "b"}
    lengths = [len(text.split()) for text in said(" ".join(map(str, range(100))), 0.2) if len(text.split()) < 100]
    assert abs(np.mean(lengths) - 80) < 1.5


@given(caption=st.text(max_size=40), edits=st.floats(0, 1), seed=st.integers(0, 1000))
def test_no_caption_becomes_empty(caption: str, edits: float, seed: int) -> None:
    changed = eda.eda(caption, eda.read_synonyms(), edits, np.random.default_rng(seed))
    assert changed.split() or changed == caption


def test_synonyms_from_a_file(tmp_path: Path) -> None:
    groups: Sequence[list[str]] = [line.split(", ") for line in eda.BUILT_IN.read_text(encoding="utf-8").splitlines()]
    words = [word for group in groups for word in group]
    assert all(len(group) > 1 for group in groups)
    assert len(words) == len(set(words)) > 600
    synonyms = eda.read_synonyms()
    assert synonyms["dog"] == ["hound", "canine"]
    assert not {"the", "red"} & synonyms.keys()
    path = tmp_path / "words.txt"
    path.write_text("\ufeffDog, hound\n\nalone\ndog, pet animal\n", encoding="utf-8")
    assert eda.read_synonyms(str(path)) == {"dog": ["hound", "pet animal"], "hound": ["dog"], "pet animal": ["dog"]}
    path.with_name("empty.txt").write_text("alone\n")
    path.with_name("bytes.txt").write_bytes(b"\xff\xfe\x00")
    for name, word in (("empty", "no line has two words"), ("bytes", "UTF-8"), ("none", "cannot be read")):
        with pytest.raises(ValueError, match=word):
            eda.read_synonyms(str(tmp_path / f"{name}.txt"))


def test_dropped_words_are_keyed_and_never_all() -> None:
    captions = ["a dog runs over the wide green grass", "dog"]
    first = eda.drop_words(captions, 0.5, Draw(0, 0, 0))
    assert first == eda.drop_words(captions, 0.5, Draw(0, 0, 0)) != eda.drop_words(captions, 0.5, Draw(0, 1, 0))
    assert eda.drop_words(captions, 1.0, Draw(0, 0, 0)) == captions
