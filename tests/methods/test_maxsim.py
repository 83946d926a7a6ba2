"""MaxSim and FILIP, against loops over patches and words (arXiv:2111.07783, arXiv:2004.12832)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import kiloword
from folders import model_folder
from kiloword.api import batches
from kiloword.distributed.device import simulated
from kiloword.evaluation.retrieval.shortlist import shortlisted
from kiloword.methods.maxsim import scores
from kiloword.methods.maxsim.pooling import MaxSim, MaxSimSettings
from kiloword.methods.maxsim.scores import Sides
from kiloword.methods.registry import preset
from kiloword.model.heads import unit
from kiloword.model.image import extra
from kiloword.model.model import initialise
from kiloword.types import Features, Texts
from kiloword.verify.batch import MethodChoice, batch, config
from kiloword.verify.suite import learner

SETTINGS = [
    MaxSimSettings(),
    MaxSimSettings(words=3),
    MaxSimSettings(sides="text"),
    MaxSimSettings(sides="text", reduce="sum", words=2),
]


def literal(made: MaxSim, tokens: Tensor, packed: Tensor, texts: Texts) -> Tensor:
    """Scores [I, T], of one pair, patch and word after the other. Texts end in one class token, which is not read."""
    settings, rows = made.settings, []
    for image in tokens:
        patches = [made.image_projection(x) for x in image[made.extra :]]
        patches = [x / x.norm() for x in patches]
        row = []
        for t in range(len(texts)):
            own = packed[int(texts.starts[t]) : int(texts.starts[t + 1]) - 1][: settings.words]
            words = [made.text_projection(x) for x in own]
            words = [x / x.norm() for x in words]
            by_word = torch.stack([torch.stack([p @ w for p in patches]).max() for w in words]).sum()
            by_patch = torch.stack([torch.stack([p @ w for w in words]).max() for p in patches]).sum() / len(patches)
            by_word = by_word if settings.reduce == "sum" else by_word / len(words)
            row.append(by_word if settings.sides == "text" else (by_word + by_patch) / 2)
        rows.append(torch.stack(row))
    return torch.stack(rows)


def sides(settings: MaxSimSettings = SETTINGS[0]) -> tuple[MaxSim, Tensor, Tensor, Texts]:
    """A pooling, tokens of images, and packed tokens of texts, each of which ends in a class token."""
    generator, size = torch.Generator().manual_seed(0), config()
    size = replace(size, text=replace(size.text, extra_tokens=("cls",)))
    made = MaxSim(size, settings).double()
    initialise(made, 3)
    count = extra(size.image) + (size.image.size // size.image.patch) ** 2
    tokens = torch.randn(3, count, size.image.width, generator=generator, dtype=torch.float64)
    texts = Texts.pack([[7, 8, 5], [9, 7, 8, 6, 5], [8, 5], [7, 7, 9, 5]])
    packed = torch.randn(len(texts.ids), size.text.width, generator=generator, dtype=torch.float64)
    return made, tokens, packed, texts


@pytest.mark.parametrize("settings", SETTINGS)
def test_scores_and_gradients_are_the_literal_ones(settings: MaxSimSettings) -> None:
    made, tokens, packed, texts = sides(settings)
    weight, measured = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4), []
    for fast in (True, False):
        a, b = tokens.clone().requires_grad_(), packed.clone().requires_grad_()
        score = made.score(made.image(a), made.text(b, texts)) if fast else literal(made, a, b, texts)
        measured.append([score.detach(), *torch.autograd.grad((weight * score).sum(), [a, b, *made.parameters()])])
    for x, y in zip(*measured, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("both", [Sides(0.5, 0.5), Sides(0.0, 1.0)])
def test_tiles_do_not_change_scores_and_gradients(device: str, both: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    made, tokens, packed, texts = sides()
    images, written = made.image(tokens), made.text(packed, texts)
    patches, words = (x.detach().requires_grad_() for x in (images["patches"], written["words"]))
    measured = []
    for most in (1 << 20, 40):
        monkeypatch.setitem(scores.TILE, device, most)
        with simulated(device):
            score = scores.similarity(patches, words, written["share"], both)
        measured.append([score.detach(), *torch.autograd.grad(score.square().sum(), (patches, words))])
    for x, y in zip(*measured, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-14)


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that anything returns."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.most = max(self.most, *(x.numel() for x in tree_leaves(out) if isinstance(x, Tensor)), 0)
        return out


def test_nothing_larger_than_a_tile_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    images, texts, patches, words, dim = 24, 30, 8, 6, 2
    monkeypatch.setitem(scores.TILE, "cpu", 400)
    generator = torch.Generator().manual_seed(0)
    p = torch.randn(images, patches, dim, generator=generator).requires_grad_()
    w = torch.randn(texts, words, dim, generator=generator).requires_grad_()
    with Largest() as seen:
        scores.similarity(p, w, torch.full((texts, words), 1 / words), Sides(0.5, 0.5)).sum().backward()
    assert seen.most <= max(400, images * texts, images * patches * dim, texts * words * dim)
    assert seen.most < images * texts * patches * words // 40
    rows, columns = scores.block(196, 32, "cuda")
    assert rows * columns * (196 + 32) <= scores.SAVED["cuda"]


def test_pairs_one_by_one_agree() -> None:
    made, tokens, packed, texts = sides()
    images, written = made.image(tokens), made.text(packed, texts)
    alone = made.score_pairs(images, {name: value[:3] for name, value in written.items()})
    torch.testing.assert_close(alone, made.score(images, written).diagonal(), rtol=1e-12, atol=1e-13)


def test_vectors_of_shortlists_are_means() -> None:
    made, tokens, packed, texts = sides()
    images, written = made.image(tokens), made.text(packed, texts)
    torch.testing.assert_close(images["vec"], unit(images["patches"].mean(1)))
    torch.testing.assert_close(written["vec"][2], written["words"][2, 0])  # of one word
    assert not images["vec"].requires_grad


def test_a_class_is_the_words_of_its_prompts() -> None:
    made, tokens, packed, texts = sides(MaxSimSettings(sides="text"))
    images, written = made.image(tokens), made.text(packed, texts)
    one = written["vec"].new_tensor([3.0, 1.0, 2.0, 5.0])
    classes = made.ensemble(written, torch.tensor([1, 0, 1, 1]), 2, one)
    of_prompts = made.score(images, written)
    expected = torch.stack([of_prompts[:, 1], of_prompts[:, [0, 2, 3]] @ one[[0, 2, 3]] / 10], 1)
    torch.testing.assert_close(made.score(images, classes), expected)
    both = sides()[0]
    made.sides = both.sides
    patches = torch.einsum("ipd,twd->ipwt", images["patches"], written["words"])  # [I, P, W, T]
    there = (written["share"] > 0).T
    best = patches.masked_fill(~there, -2)[..., [0, 2, 3]].amax((2, 3)).mean(1)
    torch.testing.assert_close(made.score(images, classes)[:, 1], (expected[:, 1] + best) / 2)


def test_the_loss_of_filip_is_the_literal_one() -> None:
    made, some = learner("filip"), batch(end=4)
    encoded, head = made.encode(some), made.model.head
    pooling: Any = head.pooling
    by_word = pooling.side(encoded.images, encoded.texts, Sides(1.0, 0.0))
    by_patch = pooling.side(encoded.images, encoded.texts, Sides(0.0, 1.0))
    torch.testing.assert_close(head.score(encoded.images, encoded.texts), (by_word + by_patch) / 2)
    own, scale = some.image_of_text.tolist(), head.log_scale.exp()
    of_images = []
    for i in range(4):
        row = (scale * by_patch[i]).exp()
        of_images.append(torch.stack([-(row[t] / row.sum()).log() for t in range(len(own)) if own[t] == i]).mean())
    of_texts = []
    for t, image in enumerate(own):
        column = (scale * by_word[:, t]).exp()
        of_texts.append(-(column[image] / column.sum()).log())
    expected = (torch.stack(of_images).mean() + torch.stack(of_texts).mean()) / 2
    measured = made.pair_losses(made.all_inputs(encoded, some))["pair"]
    torch.testing.assert_close(measured, expected, rtol=1e-12, atol=0)
    weights = [head.log_scale, pooling.image_projection.weight, pooling.text_projection.weight]
    gradients = [torch.autograd.grad(value, weights, retain_graph=True) for value in (measured, expected)]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-15)


@pytest.mark.parametrize("name", ["filip", "siglip+maxsim"])
def test_the_second_loss_is_of_means(name: str) -> None:
    settings: dict[str, Any] = {"whole": 0.5}
    weighted = learner(MethodChoice(name, {"maxsim": settings} if "+" in name else settings))
    plain, some = learner(name), batch(end=4)
    losses = []
    for made in (weighted, plain):
        encoded = made.encode(some)
        losses.append(made.pair_losses(made.all_inputs(encoded, some))["pair"])
        assert encoded.images["vec"].requires_grad == (made is weighted)
    whole: Any = weighted.model.head.whole
    encoded = weighted.encode(some)
    logits = whole.logits(encoded.images["vec"] @ encoded.texts["vec"].T)
    own = torch.arange(4)[:, None] == some.image_of_text
    if name == "filip":
        share = own.double() / own.sum(1, keepdim=True)
        means = -(share * logits.log_softmax(1)).sum() / 4 - (own * logits.log_softmax(0)).sum() / len(some.texts)
        expected = means / 2
    else:
        expected = -torch.nn.functional.logsigmoid((2.0 * own - 1) * logits).sum() / 4
    torch.testing.assert_close(losses[0] - losses[1], 0.5 * expected, rtol=1e-10, atol=0)


def test_a_model_scores_explains_classifies_and_is_found_by_its_shortlist(tmp_path: Path) -> None:
    matcher = kiloword.load(model_folder(tmp_path / "m", "filip"))
    pixels = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    texts = ["a red star", "two circles", "one star"]
    found = matcher.score(pixels, texts)
    images, written = matcher.encode_image(pixels), matcher.encode_text(texts)
    torch.testing.assert_close(matcher.score(images, written), found)
    explained = matcher.explain(pixels, texts)
    assert explained.about == MaxSim.attends_to_patches
    torch.testing.assert_close(explained.maps.sum(2), torch.ones(3, 3))
    best = (images["patches"][1] @ written["words"][2].T).argmax(0)
    expected = torch.zeros(explained.maps.shape[2]).index_add(0, best, written["share"][2])
    torch.testing.assert_close(explained.maps[1, 2], expected)
    assert matcher.classify(pixels, ["star", "circle"], ("a {c}.", "one small {c}.")).shape == (3, 2)
    exact, short = (dict(shortlisted(matcher.score_pairs, images, written, torch.arange(3), n, (1,))) for n in (3, 1))
    assert exact["text_retrieval_shortlist_recall@3"] == 1
    assert short.keys() == {name.replace("@3", "@1") for name in exact}


def test_features_beyond_the_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    few: Features = {"vec": torch.zeros(2, 128), "patches": torch.zeros(2, 49, 128)}
    monkeypatch.setattr(batches, "free_bytes", lambda device: 8 << 30)
    device = torch.device("cpu")
    batches.check_room(few, 300_000, "images", device)
    with pytest.raises(ValueError, match=r"1,000,000 images take 23\.8 GiB, mostly patches of 49 x 128 .*shortlist"):
        batches.check_room(few, 1_000_000, "images", device)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("llip+maxsim", {}, "does not pool images and texts into one vector"),
        ("prolip+maxsim", {}, "does not pool images and texts into one vector"),
        ("siglip+gaussian+maxsim", {}, "does not pool images and texts into one vector"),
        ("filip+gaussian", {}, "scores pairs in several ways, of which gaussian"),
        ("siglip+maxsim+matryoshka", {}, "of which matryoshka would take prefixes"),
        ("vqa+maxsim", {}, "has no pair loss, whose score maxsim"),
        ("fff+maxsim", {"maxsim": {"whole": 1.0}}, "prepares one head before training"),
        ("siglip+maxsim", {"maxsim": {"reduce": "sum"}}, "expected sides text"),
    ],
)
def test_what_does_not_mix_is_refused(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        preset(name, settings)
