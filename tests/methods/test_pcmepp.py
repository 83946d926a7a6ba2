"""The preset pcme++, its components, and what they refuse."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from kiloword.config.recipes import ModelConfig, ModelFile, sizes
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.losses.pairs import Blocks, sigmoid_loss
from kiloword.methods.defaults import MUON, default_recipe
from kiloword.methods.method import annotated
from kiloword.methods.pcmepp.matching import matching_loss
from kiloword.methods.registry import preset
from kiloword.model.heads import Head, cosine_head
from kiloword.models.build import build
from kiloword.models.model_folder import save_model
from kiloword.training import start
from kiloword.training.learner import Learner
from kiloword.training.optimizer import groups
from kiloword.types import Features, PairBlocks, Positives, Total
from kiloword.verify.batch import batch
from kiloword.verify.checks import EXACT
from kiloword.verify.suite import Way, _least, gradients, gradients_over_ranks, learner, verify

DEBUG = sizes()["debug"]


def head_of(name: str, settings: dict[str, Any] | None = None) -> Head:
    return build(DEBUG, preset(name, settings), 0).head.requires_grad_(False)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["pcme++", "pcme+++deterministic"])
def test_conforms_on_one_rank(method: str) -> None:
    assert not [check for check in verify(method, ranks=(1,)) if not check.passed]


def test_thresholds_and_counts_are_those_of_all_ranks() -> None:
    reference, found = (
        gradients("pcme+++deterministic"),
        gradients_over_ranks("pcme+++deterministic", 2, [Way(micro=2)])[Way(micro=2)],
    )
    largest = max(float(g.abs().max()) for g in reference.values())
    assert found.keys() == reference.keys()
    assert max(float((found[name] - g).abs().max()) for name, g in reference.items()) < EXACT * largest


def test_equal_captions_are_equally_near_however_the_pairs_are_cut() -> None:
    """In single precision, where the same product of matrices of other shapes has other last bits."""

    def side(n: int, seed: int) -> Features:
        vec, log_var = torch.randn(2, n, 96, generator=torch.Generator().manual_seed(seed))
        return {"vec": F.normalize(vec, dim=1), "log_var": log_var - 6, "position": torch.arange(n)}

    head, images, texts = head_of("pcme++"), side(48, 0), side(48, 1)
    for name in ("vec", "log_var"):
        texts[name] = texts[name][torch.arange(48) % 5]
    with torch.no_grad():
        losses = [
            float(matching_loss(Blocks(head, images, texts, chunk), annotated, 1.0).sum) for chunk in (0, 3, 5, 7)
        ]
    assert losses == pytest.approx([losses[0]] * 4, rel=2e-5)


def test_settings_reach_their_places() -> None:
    method = preset("pcme++", {"scale": 3.0, "bias": 2.0, "pseudo": 0.0, "reduction": "images", "vib": 0.0})
    head = build(DEBUG, method, 0).head.requires_grad_(False)
    assert head.bias is not None
    assert (head.distance, float(head.log_scale.exp()), float(head.bias)) == (True, pytest.approx(3.0), 2.0)
    assert method.pair_loss.keywords == {"pseudo": 0.0, "reduction": "images"}  # type: ignore[attr-defined]
    assert not method.terms
    assert {name: weight for name, (weight, _) in preset("pcme++").terms.items()} == dict.fromkeys(
        ("vib_image", "vib_text"), 1e-4
    )


def test_text_towers_look_both_ways_by_default() -> None:
    shapes = [preset("pcme++", {"bidirectional": both}).shape(DEBUG).text.causal for both in (True, False)]
    assert shapes == [False, DEBUG.text.causal]
    assert DEBUG.text.causal


@pytest.mark.parametrize("name", ["pcme+++ppcl", "prolip+ppcl", "clip+gaussian+ppcl", "clip+ppcl+gaussian"])
def test_ppcl_scales_scores(name: str) -> None:
    head = head_of(name)
    assert head.bias is not None
    assert (head.distance, float(head.log_scale.exp()), float(head.bias)) == (False, pytest.approx(10), -10)
    assert head.uncertainty is not None


def test_a_deterministic_head_has_its_own_scale_and_limit() -> None:
    head = head_of("prolip+deterministic", {"deterministic": {"max_scale": 50.0}})
    assert head.deterministic.bias is None
    head.deterministic.log_scale.data.fill_(9.0)
    head.log_scale.data.fill_(9.0)
    head.clamp_()
    assert float(head.deterministic.log_scale.exp()) == pytest.approx(50.0)
    assert float(head.log_scale) == 9.0
    sigmoid = head_of("prolip+deterministic", {"deterministic": {"loss": "sigmoid", "bias": -7.0}}).deterministic
    assert (float(sigmoid.log_scale.exp()), float(sigmoid.bias)) == (pytest.approx(10.0), -7.0)
    model = learner("prolip+deterministic")
    scales = [name for name, _ in groups(model, MUON)["scale"]]
    assert scales == [f"model.head.{name}" for name in ("log_scale", "bias", "deterministic.log_scale")]


def test_a_head_in_a_head_may_have_any_name() -> None:
    def head(config: ModelConfig) -> Head:
        made = preset("prolip").head(config)
        made.second = cosine_head(10.0, bias=-10.0)
        return made

    def loss(pairs: PairBlocks, positives: Positives) -> Total:
        return sigmoid_loss(pairs.beside("second"), positives)

    method = replace(preset("prolip"), head=head, pair_loss=loss)
    learned = Learner(build(DEBUG, method), method)
    scales = [name for name, _ in groups(learned, MUON)["scale"]]
    assert scales == [f"model.head.{name}" for name in ("log_scale", "bias", "second.log_scale", "second.bias")]
    assert _least(learned, batch(method="prolip")) == pytest.approx(0, abs=1e-3)


def test_the_weight_of_the_deterministic_loss() -> None:
    def loss(name: str, settings: dict[str, Any] | None = None) -> float:
        model, some = learner(name), batch(method=name)
        model.method = preset(name, settings)
        with torch.no_grad():
            return float(model.pair_loss(model.pair_inputs(model.encode(some), some))["pair"])

    plain, once = loss("pcme++"), loss("pcme+++deterministic")
    twice = loss("pcme+++deterministic", {"deterministic": {"weight": 2.0}})
    assert once - plain > 0.1
    assert twice - plain == pytest.approx(2 * (once - plain), rel=1e-12)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("clip+matching", {}, "matching compares Gaussians, but clip has none: add \\+gaussian"),
        ("siglip+ppcl", {}, "ppcl compares Gaussians, but siglip has none: add \\+gaussian, or use \\+sigmoid"),
        ("clip+deterministic", {}, "on the means of Gaussians, but clip has no Gaussians"),
        ("llip+gaussian+deterministic", {}, r"the pooling of llip\+gaussian does not give one vector"),
        ("prolip+deterministic+contextual", {}, r"the pooling of prolip\+contextual does not give one vector"),
        ("pcme+++gaussian", {}, "pcme\\+\\+ has Gaussians already"),
        ("pcme+++fff", {}, "no sigmoid loss"),
        ("pcme+++matching+ppcl", {}, "matching and ppcl both fill the slot 'pair loss'"),
        ("pcme++", {"scale": 0.0}, "scale is 0.0: expected above 0"),
        ("pcme++", {"pseudo": -0.1}, "pseudo is -0.1: expected at least 0"),
        ("pcme++", {"pseudo": float("nan")}, "pseudo is nan"),
        ("prolip+deterministic", {"deterministic": {"weight": 0.0}}, "deterministic.weight is 0.0: expected above 0"),
        ("prolip+deterministic", {"deterministic": {"scale": -1.0}}, "scale is -1.0: expected at least 0"),
    ],
)
def test_what_cannot_be_gets_a_sentence(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        preset(name, settings)


def test_a_scale_of_scores_is_none_of_distances(tmp_path: Path) -> None:
    """Starting from another method's weights, only a scale of the same kind is taken over."""
    model = build(DEBUG, preset("siglip"), 3)
    file = ModelFile(method="siglip", settings={}, model=model.config, size="debug")
    save_model(tmp_path, model, Tokenizer.train(["a small red star"], 300), file)
    recipe = replace(default_recipe("pcme++", "debug"), init=str(tmp_path))
    for name, taken in (("pcme++", False), ("prolip", True)):
        fresh = build(DEBUG, preset(name), 0)
        said = start.load(fresh, replace(recipe, method=name))
        new = said.split("new: ")[1].split(";")[0]
        assert ("head.log_scale, head.bias" in new) != taken
        assert float(fresh.head.log_scale.detach().exp()) == pytest.approx(10.0 if taken else 5.0)
        weight = "text_tower.blocks.0.attention.qkv.weight"
        assert torch.equal(fresh.state_dict()[weight], model.state_dict()[weight])
