"""The preset pcme++ and its components; variances from a second path through the towers, written out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import literal
from cases import mostly_slow
from kiloword.config.recipes import ModelFile, sizes
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.losses.pairs import sigmoid_loss, softmax_loss, weighted
from kiloword.methods.defaults import MUON, default_recipe
from kiloword.methods.method import annotated
from kiloword.methods.pcmepp import matching_loss
from kiloword.methods.registry import preset
from kiloword.models.build import build
from kiloword.models.model_folder import save_model
from kiloword.training import start
from kiloword.training.optimizer import groups
from kiloword.types import Features, Pairs
from kiloword.verify.batch import batch
from parts import agree, blocks, drawn, learner, losses, mean, model

DEBUG = sizes()["debug"]


def logit_of(name: str, settings: dict[str, Any] | None = None) -> tuple[float, float]:
    """The logits of the scores 0 and 1."""
    head = model(name, settings).head
    score = torch.tensor([0.0, 1.0], dtype=torch.float64)
    low, high = head.logits(score).tolist()
    return low, high


def test_settings_reach_their_places() -> None:
    settings = {"scale": 3.0, "bias": 2.0, "pseudo": 0.0, "reduction": "images", "vib": 0.0}
    assert logit_of("pcme++", settings) == pytest.approx((2 - 3 * 2, 2))  # of a distance 2 - 2 score
    some, made = batch(method="pcme++"), learner("pcme++", settings)
    with_pseudo = learner("pcme++", settings | {"pseudo": 0.1})
    assert losses(made, some)["pair"] != losses(with_pseudo, some)["pair"]
    by_pairs = losses(learner("pcme++", settings | {"reduction": "pairs"}), some)["pair"]
    torch.testing.assert_close(losses(made, some)["pair"], by_pairs * len(some.texts))
    assert not made.terms
    weights = {name: weight for name, (weight, _) in preset("pcme++").terms.items()}
    assert weights == {"vib_image": 1e-4, "vib_text": 1e-4}
    for both in (True, False):
        assert preset("pcme++", {"bidirectional": both}).shape(DEBUG).text.causal != both


@pytest.mark.parametrize("name", ["pcme+++ppcl", "prolip+ppcl", "clip+gaussian+ppcl", "clip+ppcl+gaussian"])
def test_ppcl_scales_scores(name: str) -> None:
    assert logit_of(name) == pytest.approx((-10, 0), abs=1e-5)
    assert model(name).head.uncertainty is not None


def test_a_deterministic_head_has_its_own_scale_and_limit() -> None:
    made = learner("prolip+deterministic", {"deterministic": {"max_scale": 50.0}})
    head, inner = made.model.head, made.model.head.get_submodule("deterministic")
    assert inner.bias is None
    for one in (inner, head):
        one.log_scale.data.fill_(9.0)
    head.clamp_()
    assert (inner.log_scale.exp().item(), head.log_scale.item()) == (pytest.approx(50.0), 9.0)
    sigmoid = model("prolip+deterministic", {"deterministic": {"loss": "sigmoid", "bias": -7.0}}).head.deterministic
    assert (sigmoid.log_scale.exp().item(), sigmoid.bias.item()) == (pytest.approx(10.0), -7.0)
    scales = [name for name, _ in groups(made, MUON)["scale"]]
    assert scales == [f"model.head.{name}" for name in ("log_scale", "bias", "deterministic.log_scale")]


def test_a_scale_of_scores_is_none_of_distances(tmp_path: Path) -> None:
    """Starting from another method's weights, only a scale of the same kind is taken over."""
    old = build(DEBUG, preset("siglip"), 3)
    file = ModelFile(method="siglip", settings={}, model=old.config, size="debug")
    save_model(tmp_path, old, Tokenizer.train(["a small red star"], 300), file)
    recipe = replace(default_recipe("pcme++", "debug"), init=str(tmp_path))
    for name, taken in (("pcme++", False), ("prolip", True)):
        fresh = build(DEBUG, preset(name), 0)
        start.load(fresh, replace(recipe, method=name))
        assert fresh.head.log_scale.exp().item() == pytest.approx(10.0 if taken else 5.0)
        weight = "text_tower.blocks.0.attention.qkv.weight"
        assert torch.equal(fresh.state_dict()[weight], old.state_dict()[weight])


# A second path, "multi-head"


def image_path(image: Tensor, model: Any, blocks: int) -> tuple[Tensor, Tensor]:
    """The class token of the tower, normed, and that of the second path, which is not.

    naver-ai/pcmepp, hf_models/transformer.py, VisionTransformer: both paths share all blocks but the last ones.
    """
    tower, size = model.image_tower, model.config.image.patch
    rows = [tower.class_token + tower.positions[0]]
    for n in range((model.config.image.size // size) ** 2):
        rows.append(tower.patches.weight @ literal.patch(image, n, size).flatten() + tower.positions[1 + n])
    x = torch.stack(rows)
    x = literal.norm(x, tower.pre_norm) if tower.pre_norm is not None else x
    return two_paths(x, tower, blocks, False, 0)


def text_path(words: list[int], model: Any, blocks: int, causal: bool) -> tuple[Tensor, Tensor]:
    """The same of the last token of a text (hf_models/hf_clip.py, encode_text); `words` without [UNC]."""
    tower = model.text_tower
    x = torch.stack([tower.tokens[i] + tower.positions[n] for n, i in enumerate(words)])
    return two_paths(x, tower, blocks, causal, len(words) - 1)


def two_paths(x: Tensor, tower: Any, blocks: int, causal: bool, place: int) -> tuple[Tensor, Tensor]:
    shared = len(tower.blocks) - blocks
    for block in tower.blocks[:shared]:
        x = literal.self_block(x, block, causal)
    mean = beside = x
    for own, other in zip(tower.blocks[shared:], tower.uncertainty_blocks, strict=True):
        mean, beside = literal.self_block(mean, own, causal), literal.self_block(beside, other, causal)
    return literal.norm(mean, tower.norm)[place], beside[place]


@pytest.mark.parametrize("blocks", [1, 2])
def test_both_paths_written_out(blocks: int) -> None:
    base = literal.small()
    shape = replace(base, image=replace(base.image, depth=2), text=replace(base.text, depth=2))
    model: Any = literal.made("pcme++", {"bidirectional": False, "variance_blocks": blocks}, shape).model
    some, pooling, gaussian = literal.pairs(model, literal.CAPTIONS), model.head.pooling, model.head.uncertainty
    ids, unc = literal.captions_of(some.texts), model.config.text.special["unc"]
    images = [image_path(image, model, blocks) for image in model.normalise(some.images)]
    texts = [text_path(own[: own.index(unc)], model, blocks, True) for own in ids]
    for found, paths, projection, layer in (
        (model.encode_image(some.images)[1], images, pooling.image_projection, gaussian.image_log_var),
        (model.encode_text(some.texts)[1], texts, pooling.text_projection, gaussian.text_log_var),
    ):
        for n, (own, beside) in enumerate(paths):
            projected = own @ projection.weight.T
            torch.testing.assert_close(found["vec"][n], projected / projected.norm(), rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(found["log_var"][n], literal.linear(beside, layer), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_the_means_are_those_of_a_model_without_variances(bidirectional: bool) -> None:
    """No token of a tower attends to [UNC], in a bidirectional one neither."""
    model: Any = literal.made("pcme++", {"variance_blocks": 1, "bidirectional": bidirectional}).model
    some = literal.pairs(model, literal.CAPTIONS)
    before = model.encode_text(some.texts)[1], model.encode_image(some.images)[1]
    with torch.no_grad():
        model.text_tower.tokens[model.config.text.special["unc"]] += 1.0
        for name, p in model.named_parameters():
            if "uncertainty_blocks" in name:
                p += 1.0
    after = model.encode_text(some.texts)[1], model.encode_image(some.images)[1]
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old["vec"], new["vec"])
        assert not torch.equal(old["log_var"], new["log_var"])


CHUNKS = [0, 1, 3]
IMAGES, TEXTS = [0, 1, 2, 3, 4], [0, 0, 0, 1, 2, 2, 3, 4, 4]


def features(n: int, seed: int) -> Features:
    """Gaussians in double precision, wide enough to matter."""
    return {"vec": drawn(n, 6, seed=seed), "log_var": drawn(n, 6, seed=seed + 10) - 2.0}


def sides() -> tuple[Features, Features, list[Tensor]]:
    """Images, texts of which some are equal (of one image, and of several), and what both are made of."""
    images, texts = features(len(IMAGES), 0), features(len(TEXTS), 1)
    for name in ("vec", "log_var"):
        texts[name] = texts[name][[0, 0, 2, 0, 4, 5, 6, 4, 0]]
    leaves = [side[name].requires_grad_() for side in (images, texts) for name in ("vec", "log_var")]
    for side, position in ((images, IMAGES), (texts, TEXTS)):  # a gradient away from the sphere says nothing
        side |= {"vec": F.normalize(side["vec"], dim=1), "position": torch.tensor(position)}
    return images, texts, leaves


def gaussian_head(scale: float = 1.7, bias: float = 1.3, loss: str = "sigmoid") -> Any:
    auxiliary = {"loss": loss, "scale": 4.0, "bias": -1.0}
    return model("pcme+++deterministic", {"scale": scale, "bias": bias, "deterministic": auxiliary}).head


def distance(images: Features, i: int, texts: Features, t: int) -> Tensor:
    """arXiv:2305.18171, eq. 1."""
    total = images["vec"].new_zeros(())
    for d in range(6):
        gap = images["vec"][i, d] - texts["vec"][t, d]
        total = total + gap**2 + torch.exp(images["log_var"][i, d]) + torch.exp(texts["log_var"][t, d])
    return total


def entropy(z: Tensor, y: float) -> Tensor:
    p = 1 / (1 + torch.exp(-z))
    return -y * torch.log(p) - (1 - y) * torch.log(1 - p)


def literal_loss(images: Features, texts: Features, y: Any, a: Tensor, b: Tensor, pseudo: float) -> Tensor:
    """The sum over pairs; y[i][t] is 0 or 1."""
    d = [[distance(images, i, texts, t) for t in range(len(TEXTS))] for i in range(len(IMAGES))]

    def near(i: int, t: int, j: int, u: int) -> bool:
        return float((d[i][t] - d[j][u]).detach()) <= 1e-13

    total = a.new_zeros(())
    for i, image in enumerate(IMAGES):
        for t, of in enumerate(TEXTS):
            z = -a * d[i][t] + b
            own_texts = [u for u in range(len(TEXTS)) if TEXTS[u] == image]
            own_images = [j for j in range(len(IMAGES)) if IMAGES[j] == of]
            of_image = y[i][t] or any(near(i, t, i, u) for u in own_texts)
            of_text = y[i][t] or any(near(i, t, j, t) for j in own_images)
            total = total + entropy(z, float(y[i][t]))
            total = total + pseudo * (entropy(z, float(of_image)) + entropy(z, float(of_text))) / 2
    return total


def other(pairs: Pairs) -> Tensor:
    """Annotated pairs, and some more."""
    more = (pairs.images["position"][:, None] - pairs.texts["position"]) == 2
    return (pairs.annotated | more).to(pairs.logits.dtype)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("positives", [annotated, other])
@pytest.mark.parametrize(("reduction", "count"), [("pairs", 45), ("images", 5)])
@pytest.mark.parametrize("pseudo", mostly_slow([0.0, 0.1, 3.0], 1))
def test_matching_loss_and_its_gradients(pseudo: float, reduction: Any, count: int, positives: Any, chunk: int) -> None:
    (images, texts, leaves), head = sides(), gaussian_head()
    pairs = blocks(head, images, texts, chunk)
    total = matching_loss(pairs, positives, pseudo, reduction)
    assert float(total.count) == count
    torch.testing.assert_close(pairs.rows.sum(), total.sum.detach(), rtol=1e-12, atol=0)
    y = [[int(p == t or (positives is other and p - t == 2)) for t in TEXTS] for p in IMAGES]
    expected = literal_loss(images, texts, y, head.log_scale.exp()[0], head.bias[0], pseudo) / count
    agree(mean(total), expected, [*leaves, head.log_scale, head.bias], atol=1e-10)
    with torch.no_grad():
        free = matching_loss(blocks(head, images, texts, chunk), positives, pseudo, reduction)
    torch.testing.assert_close(free.sum, total.sum.detach(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("chunk", [3, 5, 7])
def test_equal_captions_are_equally_near_however_the_pairs_are_cut(chunk: int) -> None:
    """In single precision, where the same product of matrices of other shapes has other last bits."""

    def loss(chunk: int) -> Tensor:
        images, texts = ({k: v.float() for k, v in features(48, seed).items()} for seed in (0, 1))
        texts = {k: v[torch.arange(48) % 5] for k, v in texts.items()}
        return matching_loss(blocks(gaussian_head().float(), images, texts, chunk), annotated, 1.0).sum

    torch.testing.assert_close(loss(chunk), loss(0), rtol=2e-5, atol=0)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("own", [matching_loss, sigmoid_loss])
@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
def test_a_loss_of_means_beside_that_of_gaussians(loss: Any, own: Any, chunk: int) -> None:
    (images, texts, leaves), head = sides(), gaussian_head(loss=loss)
    pairs, of_means = blocks(head, images, texts, chunk), {"softmax": softmax_loss, "sigmoid": sigmoid_loss}[loss]
    total = weighted(annotated, (1.0, pairs, own), (0.7, pairs.beside("deterministic"), of_means))
    assert total.rows is not None
    torch.testing.assert_close(total.rows.sum(), total.sum.detach(), rtol=1e-12, atol=0)

    first, small = own(blocks(head, images, texts), annotated), head.get_submodule("deterministic")
    z = images["vec"] @ texts["vec"].T * small.log_scale.exp()
    if loss == "sigmoid":
        second = literal.sigmoid_pairs(z + small.bias, literal.matching(TEXTS)) / 5
    else:
        second = literal.softmax_pairs(z, literal.matching(TEXTS))
    parameters = [p for p in (*leaves, head.log_scale, small.log_scale, small.bias) if p is not None]
    agree(mean(total), mean(first) + 0.7 * second, parameters, atol=1e-10)
