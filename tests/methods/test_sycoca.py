"""SyCoCa's masks and masked images against loops; what is hidden stays hidden (arXiv:2401.02137, section 3)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kiloword.config.recipes import ModelConfig, TextConfig, TrunkConfig
from kiloword.config.settings import parse
from kiloword.methods.coca import masking
from kiloword.methods.coca.masking import MaskSettings, countable, similarity
from kiloword.methods.defaults import MUON
from kiloword.methods.registry import find, preset
from kiloword.model.attention import Packing
from kiloword.models.build import build
from kiloword.randomness import uniform
from kiloword.training.accumulate import backward
from kiloword.training.learner import Learner
from kiloword.training.optimizer import Optimizer
from kiloword.types import Batch, Texts
from kiloword.verify.batch import config
from literal import (
    CAPTIONS,
    assert_equal,
    attentive,
    captions_of,
    highest,
    image_tokens,
    inputs,
    lowest,
    made,
    pairs,
    patch,
    pixels,
    scores,
    small,
    term,
    text_tokens,
)
from tiny_trunks import WIDTH, tiny_trunks

__all__ = ["tiny_trunks"]

# Scores and masks


@pytest.mark.parametrize("similar", ["cosine", "dot"])
@pytest.mark.parametrize("method", ["sycoca", "sycoca+gaussian", "sycoca+contextual"])
def test_scores(method: str, similar: Literal["cosine", "dot"]) -> None:
    """Eq. 7 for each caption of each image: start, words and end, not the class and uncertainty tokens."""
    learner = made(method, {"similarity": similar})
    batch, said = pairs(learner.model, CAPTIONS), MaskSettings(similarity=similar)
    found = masking.scores(learner.model, batch, learner.encode(batch), said)
    assert found.shape == (7, 16)
    for n, row in enumerate(found):
        torch.testing.assert_close(row.tolist(), attentive(learner, batch, n, similar), rtol=1e-12, atol=1e-12)


def test_captions_are_scored_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = made("sycoca")
    batch = pairs(learner.model, CAPTIONS)
    encoded = [learner.encode(batch) for _ in range(2)]
    whole = masking.scores(learner.model, batch, encoded[0], MaskSettings())
    monkeypatch.setattr(masking, "CAPTIONS", 3)
    parts = masking.scores(learner.model, batch, encoded[1], MaskSettings())
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-12)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("similar", ["cosine", "dot"])
def test_tokens_that_do_not_count_do_not_matter(similar: Literal["cosine", "dot"]) -> None:
    """Also where all similarities are negative, and beside a caption of another length."""
    patches, tokens = random(2, 3, 4).abs(), -random(2, 5, 4, seed=1).abs()
    counted = torch.tensor([[True] * 5, [True, False, True, False, False]])
    said = MaskSettings(similarity=similar)
    found = similarity(patches, tokens, counted, said)
    assert bool((found < 0).all())
    for n in range(2):
        torch.testing.assert_close(found[n].tolist(), scores(patches[n], tokens[n][counted[n]], similar))
    tokens[~counted] = 100.0
    assert torch.equal(similarity(patches, tokens, counted, said), found)


def test_what_counts() -> None:
    """Of padded towers too, whose pads may have the end's id; of an empty caption, start and end."""
    special = {"start": 0, "end": 1, "pad": 1, "mask": 3, "cls": 4, "unc": 5}
    text = TextConfig(extra_tokens=("unc", "cls"), special=special, pad_to_context=True)
    texts = Texts.pack([[0, 7, 8, 1, 1, 5, 4], [0, 1, 1, 1, 1, 5, 4], [0, 3, 9, 10, 1, 5, 4]])
    packing = Packing.of(texts)

    def counted(of: Literal["tokens", "words"], config: TextConfig) -> list[list[int]]:
        found = countable(texts, packing, config, MaskSettings(similar_to=of))
        return [[n for n, yes in enumerate(row) if yes] for row in found.view(3, 7).tolist()]

    assert counted("tokens", text) == [[0, 1, 2, 3], [0, 1], [0, 1, 2, 3, 4]]
    assert counted("words", text) == [[1, 2], [0, 1], [2, 3]]
    plain = replace(text, pad_to_context=False, extra_tokens=("cls",), special=special | {"pad": 2})
    assert counted("tokens", plain) == [[0, 1, 2, 3, 4, 5]] * 3
    assert counted("words", plain)[1] == list(range(6))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.lists(st.integers(0, 3), min_size=6, max_size=6), min_size=1, max_size=4), st.integers(1, 5))
def test_the_highest_and_the_lowest(rows: list[list[int]], n: int) -> None:
    """Ties go to the first; places ascend; the others are what is left."""
    scored = torch.tensor(rows).float()
    for most, pick in ((True, highest), (False, lowest)):
        found = masking.select(scored, n, most)
        assert found.tolist() == [pick(row, n) for row in rows]
        left = masking.complement(found, 6)
        assert left.tolist() == [[p for p in range(6) if p not in row] for row in found.tolist()]
        assert masking.as_bool(found, 6).nonzero()[:, 1].view(-1, n).tolist() == found.tolist()


@pytest.mark.parametrize(("share", "n"), [(0.5, 8), (0.25, 4), (0.01, 1), (0.999, 15), (0.28, 4), (0.29, 5)])
def test_how_many(share: float, n: int) -> None:
    assert masking.number(share, 16) == n


def test_random_masks_are_a_images_own() -> None:
    """Whatever stands beside it, in whichever micro-batch; captions and images are masked apart."""
    batch = pairs(made("sycoca").model, CAPTIONS)
    whole = masking.noise(batch, "mim.mask", 16)
    assert torch.equal(whole, torch.cat([masking.noise(piece, "mim.mask", 16) for piece in batch.split(4)]))
    assert torch.equal(whole, uniform(batch.seeds, "mim.mask", 16))
    assert not torch.equal(whole, masking.noise(batch, "caption.mask", 16))
    assert len({tuple(row) for row in masking.select(whole, 8, most=True).tolist()}) == 4


def test_scores_are_made_once_for_terms_of_the_same_settings() -> None:
    learner = made("clip+caption+mim", {"caption": {"caption_mask": "attentive"}, "mim": {"similarity": "dot"}})
    batch = pairs(learner.model, CAPTIONS)
    encoded, apart = learner.encode(batch), learner.encode(batch)
    for name in ("caption", "mim"):
        apart.cache.clear()
        assert torch.equal(term(learner, name, batch, encoded), term(learner, name, batch, apart))
    assert len(encoded.cache) == 2
    learner = made("sycoca")
    encoded = learner.encode(batch := pairs(learner.model, CAPTIONS))
    for name in ("caption", "mim"):
        term(learner, name, batch, encoded)
    (found,) = encoded.cache.values()
    assert not found.requires_grad


# Masked images


def expected(learner: Learner, batch: Batch, said: dict[str, Any]) -> Tensor:
    """Eq. 5 and 6, the mean over pixels: one caption (or image) after the other."""
    model, losses, n_hidden = learner.model, [], round(16 * said.get("mim_share", 0.5))
    images, noise = inputs(model, batch), masking.noise(batch, "mim.mask", 16)
    of_tokens = said.get("mim_target") == "tokens"
    guided, random = said.get("guide", "text") == "text", said.get("mim_mask") == "random"
    rows = range(len(batch)) if random and not guided else range(len(batch.texts))
    for n in rows:
        i = n if random and not guided else int(batch.image_of_text[n])
        with torch.no_grad():
            scored = noise[i].tolist() if random else attentive(learner, batch, n)
        hidden = highest(scored, n_hidden)
        seen = image_tokens(images[i], model, hidden, said.get("mim_op", "token"))
        words = text_tokens(captions_of(batch.texts)[n], model) if guided else None
        painted = pixels(seen, words, model, hidden)
        for place in hidden:
            target = images[i][1 + place] if of_tokens else patch(images[i], place, 8).flatten()
            if said.get("norm_pix") or of_tokens:
                target = (target - target.mean()) / (target.var() + 1e-6) ** 0.5
            losses.append((painted[place] - target).abs().mean())
    assert learner.counts([batch])["mim"] == len(losses)
    return torch.stack(losses).sum()


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"mim_op": "drop", "mim_share": 0.3},
        {"guide": "none", "norm_pix": True},
        {"mim_mask": "random", "mim_share": 0.75},
        {"mim_mask": "random", "guide": "none", "mim_op": "drop", "image_decoder_depth": 2},
    ],
)
def test_masked_images(said: dict[str, Any]) -> None:
    """Value and every gradient."""
    learner = made("sycoca", said)
    batch = pairs(learner.model, CAPTIONS)
    assert_equal(learner, term(learner, "mim", batch), expected(learner, batch, said))


@pytest.mark.usefixtures("tiny_trunks")
@pytest.mark.parametrize(
    "said", [{}, {"mim_op": "drop", "mim_share": 0.3}, {"guide": "none", "mim_mask": "random"}, {"guide": "none"}]
)
def test_masked_tokens_of_a_frozen_trunk(said: dict[str, Any]) -> None:
    """Value and every gradient; the targets have none. Pixels and their tokens teach alike."""
    said = {"mim_target": "tokens", **said}
    learner = made("sycoca", said, on_trunk())
    learner.model.image_tower.get_submodule("trunk").requires_grad_(False)
    pixels = pairs(learner.model, CAPTIONS)
    batch = learner.above_trunks(pixels)
    assert_equal(learner, term(learner, "mim", batch), expected(learner, batch, said))
    assert batch.images.shape == (4, 17, WIDTH)
    losses = [backward(learner, [of])["mim"] for of in (pixels, batch)]
    assert torch.equal(*losses)


def on_trunk() -> ModelConfig:
    return small(trunk=TrunkConfig(name="tiny", width=WIDTH, prefix=1, grid=4))


@pytest.mark.usefixtures("tiny_trunks")
def test_tokens_need_a_frozen_trunk() -> None:
    with pytest.raises(ValueError, match="frozen trunk, which this image tower lacks: add --image-tower"):
        made("sycoca", {"mim_target": "tokens"})
    with pytest.raises(ValueError, match="norm_pix is about pixels"):
        preset("sycoca", {"mim_target": "tokens", "norm_pix": True})
    learner = made("sycoca", {"mim_target": "tokens"}, on_trunk())
    with pytest.raises(ValueError, match="needs a frozen trunk, but the run trains weights of tiny"):
        term(learner, "mim", learner.above_trunks(pairs(learner.model, CAPTIONS)))


@pytest.mark.parametrize("stem", ["linear", "conv"])
@pytest.mark.parametrize("op", ["drop", "token"])
@pytest.mark.parametrize("mask", ["attentive", "random"])
def test_paint_does_not_see_hidden_patches(mask: str, op: str, stem: Any) -> None:
    """Not one pixel of them, and every patch that is not hidden."""
    learner = made("sycoca", {"mim_mask": mask, "mim_op": op}, small(stem=stem))
    model, batch = learner.model, pairs(learner.model, [[[9, 30, 41]], [[40, 8]]])
    given, painted = model.normalise(batch.images).requires_grad_(), list[tuple[Tensor, Tensor]]()
    model.image_tower.register_forward_pre_hook(lambda tower, args: (given, *args[1:]))
    model.more["image_decoder"].register_forward_hook(lambda module, args, out: painted.append((args[1], out)))
    term(learner, "mim", batch)
    ((hidden, found),) = painted
    (by_pixel,) = torch.autograd.grad(found.sum(), given)
    by_patch = by_pixel.abs().unfold(2, 8, 8).unfold(3, 8, 8).sum((1, 4, 5)).flatten(1)
    assert torch.equal(by_patch == 0, masking.as_bool(hidden, 16))


def test_guides() -> None:
    """What is painted depends on the caption's every token where it guides, and else on none."""
    for guide in ("text", "none"):
        learner = made("sycoca", {"guide": guide, "mim_mask": "random"})
        batch, tokens = pairs(learner.model, [[[9, 30]], [[40]]]), learner.model.text_tower.tokens
        (found,) = torch.autograd.grad(term(learner, "mim", batch), tokens, allow_unused=True)
        read = set() if found is None else set(found.abs().sum(1).nonzero()[:, 0].tolist())
        assert read == (set(batch.texts.ids.tolist()) if guide == "text" else set())


def test_passes_that_are_shared() -> None:
    """One clean pass; one a mask: a random mask is of the image, an attentive one of the caption."""
    for said, rows in (({}, [4, 7, 7]), ({"mim_mask": "random"}, [4, 7, 4]), ({"caption_mask": "none"}, [4, 7])):
        learner, passes, texts = made("sycoca", said), list[int](), list[int]()
        batch = pairs(learner.model, CAPTIONS)
        learner.model.image_tower.register_forward_hook(lambda *args, out=passes: out.append(len(args[-1])))
        learner.model.text_tower.register_forward_hook(lambda *args, out=texts: out.append(1))
        learner(batch, learner.counts([batch]))
        assert (passes, len(texts)) == (rows, 1)


# Rows of the paper's tables

TABLE_5 = [
    ("clip", {}),
    ("coca", {}),
    ("coca", {"caption_mask": "attentive"}),
    *(("sycoca", {"guide": guide, "mim_mask": mask}) for guide in ("none", "text") for mask in ("random", "attentive")),
]
TABLE_6 = [("sycoca", {"caption_share": low, "mim_share": high}) for low, high in ((0.25, 0.75), (0.75, 0.25))]
TABLE_7 = [("sycoca", {"mim_weight": weight}) for weight in (0.1, 0.5, 2.0)]
MORE = [("sycoca", {"mim_op": "drop", "caption_op": "token"}), ("siglip+mim", {}), ("llip+caption+mim", {})]


@pytest.mark.parametrize(("method", "said"), [*TABLE_5, *TABLE_6, *TABLE_7, *MORE])
def test_every_row_trains(method: str, said: dict[str, Any]) -> None:
    """Every parameter gets a gradient, and a step on the same images lowers the loss."""
    learner = made(method, said, dtype=torch.float32)
    batch, losses = pairs(learner.model, CAPTIONS), []
    optimizer = Optimizer(learner, replace(MUON, lr=1e-3, muon_lr=2e-3, warmup=0.0), 3)
    for step in range(3):
        losses.append(float(backward(learner, [batch])["loss"]))
        grads = {n: p.grad for n, p in learner.named_parameters()}
        largest = max(float(g.abs().max()) for g in grads.values() if g is not None)
        dead = [n for n, g in grads.items() if g is None or float(g.abs().max()) < 1e-7 * largest]
        assert not dead
        optimizer.step(step)
    assert losses[2] < losses[0]


def test_defaults() -> None:
    """The paper's weights and shares; what it leaves open, as our notes have it."""
    kind = find("sycoca")[1]
    assert kind is not None
    said: Any = parse({}, kind)
    assert (said.caption_weight, said.mim_weight, said.contrast_weight) == (2.0, 1.0, 1.0)
    assert (said.caption_share, said.mim_share) == (0.5, 0.5)
    assert (said.caption_mask, said.caption_op) == ("attentive", "drop")
    assert (said.mim_mask, said.mim_op) == ("attentive", "token")
    assert (said.similarity, said.similar_to, said.guide, said.norm_pix) == ("cosine", "tokens", "text", False)
    assert {name: weight for name, (weight, _) in preset("sycoca").terms.items()} == {"caption": 2.0, "mim": 1.0}


OUT_OF_RANGE = [
    ({"mim_weight": 0.0}, "mim_weight is 0.0: expected above 0; to disable it, choose"),
    ({"mim_weight": float("nan")}, "mim_weight is nan"),
    ({"image_decoder_depth": -2}, "image_decoder_depth is -2: expected 0 to 1024"),
    ({"guide": "image"}, "guide"),
    ({"mim_mask": "none"}, "mim_mask"),
    ({"caption_weight": -1.0}, "caption_weight is -1.0"),
]


@pytest.mark.parametrize(("said", "sentence"), OUT_OF_RANGE)
def test_settings_out_of_range_are_refused(said: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=f"settings of sycoca: .*{sentence}"):
        preset("sycoca", said)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r"mim_share is 1.5: expected above 0 and below 1"):
        made("sycoca", {"mim_share": 1.5})
    with pytest.raises(ValueError, match=r"sycoca predicts patches already: omit \+mim"):
        preset("sycoca+mim")
    head = replace(config().head, image_pool="attentional", pool_width=16)
    with pytest.raises(ValueError, match="attentive masks project patches of width 32"):
        build(replace(config(), head=head), preset("clip+mim"))
    build(replace(config(), head=head), preset("clip+mim", {"mim": {"mim_mask": "random"}}))
