"""SyCoCa's masks and masked images against loops; what is hidden stays hidden (arXiv:2401.02137, section 3)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

import literal
from kiloword.config.recipes import OptimConfig, TextConfig, TrunkConfig
from kiloword.methods.coca import masking
from kiloword.methods.coca.masking import MaskSettings, countable
from kiloword.methods.registry import preset
from kiloword.model.attention import Packing
from kiloword.models.build import build
from kiloword.randomness import uniform
from kiloword.training.optimizer import Optimizer
from kiloword.training.step import backward
from kiloword.types import Batch, Texts
from tiny_trunks import WIDTH, tiny_trunks

__all__ = ["tiny_trunks"]

# Scores and masks


@pytest.mark.parametrize("similar", ["cosine", "dot"])
@pytest.mark.parametrize("method", ["sycoca", "sycoca+gaussian", "sycoca+contextual"])
def test_scores(method: str, similar: Literal["cosine", "dot"], monkeypatch: pytest.MonkeyPatch) -> None:
    """Eq. 7 for each caption of each image: start, words and end, not the class and uncertainty tokens."""
    sycoca = literal.made(method, {"similarity": similar})
    batch = literal.pairs(sycoca.model, literal.CAPTIONS)
    expected = [literal.attentive(sycoca, batch, n, similar) for n in range(7)]
    for captions in (masking.CAPTIONS, 3):  # all at once, and in parts
        monkeypatch.setattr(masking, "CAPTIONS", captions)
        found = masking.scores(sycoca.model, batch, sycoca.encode(batch), MaskSettings(similarity=similar))
        torch.testing.assert_close(found.tolist(), expected, rtol=1e-12, atol=1e-12)
        assert not found.requires_grad


@pytest.mark.parametrize("method", ["sycoca", "sycoca+gaussian"])
def test_scores_by_the_class_token(method: str) -> None:
    """s_i = <v_i, w_cls> as a cosine (section 3.3), of the class token alone; without one, of the end token."""
    for cls in (True, False):
        sycoca = literal.made(method, {"class_token": cls, "similar_to": "class"})
        model, batch = sycoca.model, literal.pairs(sycoca.model, literal.CAPTIONS)
        measured = masking.scores(model, batch, sycoca.encode(batch), MaskSettings(similar_to="class"))
        token = model.config.text.special["cls" if cls else "end"]
        for n, ids in enumerate(literal.captions_of(batch.texts)):
            word = model.head.pooling.project_text_tokens(literal.text_tokens(ids, model)[ids.index(token)])
            image = model.normalise(batch.images)[batch.image_of_text[n]]
            patches = model.head.pooling.project_image_tokens(literal.image_tokens(image, model)[-16:])
            expected = torch.nn.functional.cosine_similarity(patches, word, dim=1).detach()
            torch.testing.assert_close(measured[n], expected, rtol=1e-10, atol=1e-12)


def test_what_counts() -> None:
    """Of padded towers too, whose pads may have the end's id; of an empty caption, start and end."""
    special = {"start": 0, "end": 1, "pad": 1, "mask": 3, "cls": 4, "unc": 5}
    text = TextConfig(extra_tokens=("unc", "cls"), special=special, pad_to_context=True)
    texts = Texts.pack([[0, 7, 8, 1, 1, 5, 4], [0, 1, 1, 1, 1, 5, 4], [0, 3, 9, 10, 1, 5, 4]])

    def counted(of: Literal["tokens", "words"], config: TextConfig) -> list[list[int]]:
        found = countable(texts, Packing.of(texts), config, MaskSettings(similar_to=of))
        return [[n for n, yes in enumerate(row) if yes] for row in found.view(3, 7).tolist()]

    assert counted("tokens", text) == [[0, 1, 2, 3], [0, 1], [0, 1, 2, 3, 4]]
    assert counted("words", text) == [[1, 2], [0, 1], [2, 3]]
    plain = replace(text, pad_to_context=False, extra_tokens=("cls",), special=special | {"pad": 2})
    assert counted("tokens", plain) == [[0, 1, 2, 3, 4, 5]] * 3
    assert counted("words", plain)[1] == list(range(6))


@pytest.mark.parametrize(("share", "n"), [(0.5, 8), (0.25, 4), (0.01, 1), (0.999, 15), (0.28, 4), (0.29, 5)])
def test_how_many(share: float, n: int) -> None:
    assert masking.number(share, 16) == n


# Masked images


def expected(learner: Any, batch: Batch, said: dict[str, Any]) -> Tensor:
    """Eq. 5 and 6, the mean over pixels: one caption (or image) after the other."""
    model, found, n_hidden = learner.model, [], round(16 * said.get("mim_share", 0.5))
    images, noise = literal.inputs(model, batch), uniform(batch.seeds, "mim.mask", 16)
    of_tokens = said.get("mim_target") == "tokens"
    guided, random = said.get("guide", "text") == "text", said.get("mim_mask") == "random"
    rows = range(len(batch)) if random and not guided else range(len(batch.texts))
    for n in rows:
        i = n if random and not guided else int(batch.image_of_text[n])
        with torch.no_grad():
            scored = noise[i].tolist() if random else literal.attentive(learner, batch, n)
        hidden = literal.highest(scored, n_hidden)
        seen = literal.image_tokens(images[i], model, hidden, said.get("mim_op", "token"))
        words = literal.text_tokens(literal.captions_of(batch.texts)[n], model) if guided else None
        painted = literal.pixels(seen, words, model, hidden)
        for place in hidden:
            target = images[i][1 + place] if of_tokens else literal.patch(images[i], place, 8).flatten()
            if said.get("norm_pix") or of_tokens:
                target = (target - target.mean()) / (target.var() + 1e-6) ** 0.5
            found.append((painted[place] - target).abs().mean())
    assert learner.counts([batch])["mim"] == len(found)
    return torch.stack(found).sum()


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
    """Value and every gradient; test_towers has that no pixel of a masked patch is seen, by any stem."""
    sycoca = literal.made("sycoca", said)
    batch = literal.pairs(sycoca.model, literal.CAPTIONS)
    literal.assert_equal(sycoca, literal.term(sycoca, "mim", batch), expected(sycoca, batch, said))


ON_TRUNK = {"trunk": TrunkConfig(name="tiny", width=WIDTH, prefix=1, grid=4)}


@pytest.mark.usefixtures("tiny_trunks")
@pytest.mark.parametrize(
    "said", [{}, {"mim_op": "drop", "mim_share": 0.3}, {"guide": "none", "mim_mask": "random"}, {"guide": "none"}]
)
def test_masked_tokens_of_a_frozen_trunk(said: dict[str, Any]) -> None:
    """Value and every gradient; the targets have none. Pixels and their tokens teach alike."""
    said = {"mim_target": "tokens", **said}
    sycoca = literal.made("sycoca", said, literal.small(**ON_TRUNK))
    raw = literal.pairs(sycoca.model, literal.CAPTIONS)
    with pytest.raises(ValueError, match="tiny"):  # which the run trains
        literal.term(sycoca, "mim", sycoca.above_trunks(raw))
    sycoca.model.image_tower.get_submodule("trunk").requires_grad_(False)
    batch = sycoca.above_trunks(raw)
    literal.assert_equal(sycoca, literal.term(sycoca, "mim", batch), expected(sycoca, batch, said))
    assert batch.images.shape == (4, 17, WIDTH)
    assert torch.equal(*(backward(sycoca, [of])["mim"] for of in (raw, batch)))


def report(
    method: str, said: dict[str, Any], done: float, micro: int = 1
) -> tuple[dict[str, Any], list[int], list[int]]:
    """The losses where a share of the run is done, and how many rows each pass of the image and the text tower has."""
    sycoca = literal.made(method, said)
    sycoca.done = done
    passes: tuple[list[int], list[int]] = ([], [])
    for tower, rows in zip((sycoca.model.image_tower, sycoca.model.text_tower), passes, strict=True):
        tower.register_forward_hook(lambda *args, rows=rows: rows.append(len(args[-1])))
    return backward(sycoca, literal.pairs(sycoca.model, literal.CAPTIONS).split(micro)), *passes


@pytest.mark.parametrize(
    ("said", "rows"), [({}, [4, 7, 7]), ({"mim_mask": "random"}, [4, 7, 4]), ({"caption_mask": "none"}, [4, 7])]
)
def test_passes_that_are_shared(said: dict[str, Any], rows: list[int]) -> None:
    """One clean pass; one a mask: a random mask is of the image, an attentive one of the caption."""
    _, images, texts = report("sycoca", said, 0.5)
    assert (images, len(texts)) == (rows, 1)


# Masks that begin and end within the run

WINDOW = {"masks_from": 0.25, "masks_until": 0.75}


@pytest.mark.parametrize(("done", "micro"), [(0.24, 1), (0.25, 2), (0.74, 1), (0.75, 2)])
def test_images_are_whole_outside_the_window(done: float, micro: int) -> None:
    """There the losses are those of coca, and each image is encoded once."""
    inside = 0.25 <= done < 0.75
    assert report("sycoca", WINDOW, done, micro) == report("sycoca" if inside else "coca", {}, done, micro)
    attentive = {"caption_mask": "attentive"}
    assert report("coca", {**attentive, **WINDOW}, done) == report("coca", attentive if inside else {}, done)


def test_what_is_not_computed_is_as_of_weight_0() -> None:
    """A parameter without a gradient is updated as one whose gradient is zero, with the same state."""
    found = []
    for filled in (False, True):
        sycoca = literal.made("sycoca", WINDOW)
        backward(sycoca, [literal.pairs(sycoca.model, literal.CAPTIONS)])
        for p in sycoca.parameters():
            p.grad = torch.zeros_like(p) if filled and p.grad is None else p.grad
        optimizer = Optimizer(sycoca, OptimConfig(name="muon", lr=1e-2, weight_decay=0.1), 4)
        optimizer.step(1)
        found.append({**dict(sycoca.named_parameters()), **optimizer.state_dict()})
    torch.testing.assert_close(*found, rtol=0, atol=0)
    assert any("image_decoder" in name and name.startswith("momentum") for name in found[0])


# Settings


def test_all_weights_start_with_one_deviation() -> None:
    """Section 4.1: "a Gaussian distribution with a mean of 0 and a standard deviation of 0.01"; norms stay 1."""
    for name, p in build(replace(literal.small(), init_std=0.01), preset("sycoca")).named_parameters():
        p = p.detach()
        if p.dim() > 1 or name.endswith("token"):
            assert float(p.square().mean().sqrt()) == pytest.approx(0.01, rel=0.35 if p.numel() < 200 else 0.15), name
        elif name != "head.log_scale":
            assert (p == (1.0 if "norm" in name and name.endswith("weight") else 0.0)).all(), name
