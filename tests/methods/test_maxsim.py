"""MaxSim and FILIP, against loops over patches and words (arXiv:2111.07783, arXiv:2004.12832)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kiloword
from folders import model_folder
from kiloword.api.features import check_room
from kiloword.distributed.device import simulated
from kiloword.evaluation.retrieval import shortlisted
from kiloword.losses import maxsim as scores
from kiloword.losses.maxsim import Sides
from kiloword.model.image import extra
from kiloword.types import Features
from kiloword.verify.batch import batch
from literal import CAPTIONS, captions_of, made, matching, pairs, sigmoid_pairs, softmax_pairs
from parts import Largest, agree, drawn, learner, losses

SETTINGS: list[dict[str, Any]] = [{}, {"words": 3}, {"sides": "text"}, {"sides": "text", "reduce": "sum", "words": 2}]


def encoded(settings: dict[str, Any] = SETTINGS[0]) -> tuple[Any, Any, Any]:
    """A learner, a batch and its features; texts end in one class token, which is not read."""
    maxsim = made("coca+maxsim", {"maxsim": settings})
    some = pairs(maxsim.model, CAPTIONS)
    return maxsim, some, maxsim.encode(some)


def literal(maxsim: Any, some: Any, tokens: Any, settings: dict[str, Any]) -> Tensor:
    """Scores [I, T], of one pair, patch and word after the other."""
    pooling, rows, lengths = maxsim.model.head.pooling, [], [len(ids) for ids in captions_of(some.texts)]
    for image in tokens.image_tokens:
        patches = [pooling.image_projection(x) for x in image[extra(maxsim.model.config.image) :]]
        patches = [x / x.norm() for x in patches]
        row = []
        for own in tokens.text_tokens.split(lengths):
            words = [pooling.text_projection(x) for x in own[:-1][: settings.get("words", 32)]]
            words = [x / x.norm() for x in words]
            by_word = torch.stack([torch.stack([p @ w for p in patches]).max() for w in words]).sum()
            by_patch = torch.stack([torch.stack([p @ w for w in words]).max() for p in patches]).sum() / len(patches)
            by_word = by_word if settings.get("reduce") == "sum" else by_word / len(words)
            row.append(by_word if settings.get("sides") == "text" else (by_word + by_patch) / 2)
        rows.append(torch.stack(row))
    return torch.stack(rows)


@pytest.mark.parametrize("settings", SETTINGS)
def test_scores_and_gradients_are_the_literal_ones(settings: dict[str, Any]) -> None:
    maxsim, some, features = encoded(settings)
    head, weights = maxsim.model.head, torch.linspace(-1, 1, 28, dtype=torch.float64).view(4, 7)
    found, expected = head.score(features.images, features.texts), literal(maxsim, some, features, settings)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-13)
    leaves = list(maxsim.model.parameters())
    agree((weights * found).sum(), (weights * expected).sum(), leaves, atol=1e-11)
    alone = head.score_pairs(features.images, {name: value[:4] for name, value in features.texts.items()})
    torch.testing.assert_close(alone, found.diagonal(), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("both", [Sides(0.5, 0.5), Sides(0.0, 1.0)])
def test_tiles_do_not_change_scores_and_gradients(device: str, both: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, features = encoded()
    share = features.texts["share"]
    patches, words = (x.detach().requires_grad_() for x in (features.images["patches"], features.texts["words"]))
    measured = []
    for most in (1 << 20, 40):
        monkeypatch.setitem(scores.TILE, device, most)
        with simulated(device):
            score = scores.similarity(patches, words, share, both)
        measured.append([score.detach(), *torch.autograd.grad(score.square().sum(), (patches, words))])
    for x, y in zip(*measured, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-14)
    of_words = scores.similarity(patches.detach(), words, share, both)  # as of an image tower that is frozen
    torch.testing.assert_close(torch.autograd.grad(of_words.square().sum(), words)[0], measured[0][2])


def test_nothing_larger_than_a_tile_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    images, texts, patches, words, dim = 24, 30, 8, 6, 2
    monkeypatch.setitem(scores.TILE, "cpu", 400)
    p, w = drawn(images, patches, dim).requires_grad_(), drawn(texts, words, dim).requires_grad_()
    share = torch.full((texts, words), 1 / words, dtype=torch.float64)
    with Largest() as seen:
        scores.similarity(p, w, share, Sides(0.5, 0.5)).sum().backward()
    assert seen.numbers <= max(400, images * texts, images * patches * dim, texts * words * dim)
    rows, columns = scores.block(196, 32, "cuda")
    assert rows * columns * (196 + 32) <= scores.SAVED["cuda"]


@pytest.mark.parametrize("settings", [{"sides": "text"}, {}])
def test_a_class_is_the_words_of_its_prompts(settings: dict[str, Any]) -> None:
    maxsim, _, features = encoded(settings)
    head, weights = maxsim.model.head, torch.tensor([3.0, 1.0, 2.0, 5.0], dtype=torch.float64)
    prompts = {name: value[:4] for name, value in features.texts.items()}
    found = head.score(features.images, head.ensemble(prompts, torch.tensor([1, 0, 1, 1]), 2, weights))
    words = features.images["patches"], prompts["words"], prompts["share"]
    of_prompts = scores.similarity(*words, Sides(1.0, 0.0))
    expected = torch.stack([of_prompts[:, 1], of_prompts[:, [0, 2, 3]] @ weights[[0, 2, 3]] / 10], 1)
    if not settings:
        best = torch.einsum("ipd,twd->ipwt", features.images["patches"], prompts["words"])  # [I, P, W, T]
        best = best.masked_fill(~(prompts["share"] > 0).T, -2)
        of_patches = [best[..., own].amax((2, 3)).mean(1) for own in ([1], [0, 2, 3])]
        expected = (expected + torch.stack(of_patches, 1)) / 2
    torch.testing.assert_close(found, expected)


def test_the_loss_of_filip_is_the_literal_one() -> None:
    filip, some = learner("filip"), batch(end=4)
    features, head = filip.encode(some), filip.model.head
    vectors = features.images["patches"], features.texts["words"], features.texts["share"]
    by_word, by_patch = (scores.similarity(*vectors, Sides(*one)) for one in ((1.0, 0.0), (0.0, 1.0)))
    torch.testing.assert_close(head.score(features.images, features.texts), (by_word + by_patch) / 2)
    scale, own, y = head.log_scale.exp(), some.image_of_text, matching(some.image_of_text.tolist())
    of_images = -(y / y.sum(1, keepdim=True) * (scale * by_patch).log_softmax(1)).sum(1).mean()
    of_texts = -(scale * by_word).log_softmax(0)[own, range(len(own))].mean()
    expected = (of_images + of_texts) / 2
    agree(losses(filip, some)["pair"], expected, list(filip.model.parameters()))


@pytest.mark.parametrize("name", ["filip", "siglip+maxsim"])
def test_the_second_loss_is_of_means(name: str) -> None:
    settings: dict[str, Any] = {"whole": 0.5}
    weighted, some = learner(name, {"maxsim": settings} if "+" in name else settings), batch(end=4)
    difference = losses(weighted, some)["pair"] - losses(learner(name), some)["pair"]
    features, whole = weighted.encode(some), weighted.model.head.get_submodule("whole")
    logits = whole.logits(features.images["vec"] @ features.texts["vec"].T)
    y = matching(some.image_of_text.tolist())
    expected = softmax_pairs(logits, y) if name == "filip" else sigmoid_pairs(logits, y) / 4
    torch.testing.assert_close(difference, 0.5 * expected, rtol=1e-10, atol=0)
    assert features.images["vec"].requires_grad


def test_a_model_scores_explains_classifies_and_is_found_by_its_shortlist(tmp_path: Path) -> None:
    matcher = kiloword.load(model_folder(tmp_path / "m", "filip"))
    pixels = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    texts = ["a red star", "two circles", "one star"]
    images, written = matcher.encode_image(pixels), matcher.encode_text(texts)
    maps = matcher.explain(pixels, texts).maps
    torch.testing.assert_close(maps.sum(2), torch.ones(3, 3))
    best = (images["patches"][1] @ written["words"][2].T).argmax(0)
    expected = torch.zeros(maps.shape[2]).index_add(0, best, written["share"][2])
    torch.testing.assert_close(maps[1, 2], expected)
    assert matcher.classify(pixels, ["star", "circle"], ("a {c}.", "one small {c}.")).shape == (3, 2)
    exact, short = (dict(shortlisted(matcher.score_pairs, images, written, torch.arange(3), n, (1,))) for n in (3, 1))
    assert exact["text_retrieval_shortlist_recall@3"] == 1
    assert short.keys() == {name.replace("@3", "@1") for name in exact}


def test_features_beyond_the_memory_are_refused() -> None:
    few: Features = {"vec": torch.zeros(2, 128), "patches": torch.zeros(2, 49, 128)}
    check_room(few, 3_000, "images", torch.device("cpu"))
    with pytest.raises(ValueError, match="kiloword index"):
        check_room(few, 10**12, "images", torch.device("cpu"))
