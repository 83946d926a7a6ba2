"""FFF against its equations, pair by pair; its components; the searched bias."""

from __future__ import annotations

import itertools
import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kiloword.config.recipes import sizes
from kiloword.distributed import collectives
from kiloword.losses.many import Balanced
from kiloword.losses.pairs import Blocks
from kiloword.methods.defaults import default_recipe
from kiloword.methods.fff.bias_search import search
from kiloword.methods.fff.preset import Mined, MinedPositives, Settings, matches
from kiloword.methods.fff.preset import preset as fff
from kiloword.methods.registry import preset
from kiloword.model.heads import Head, Single
from kiloword.model.model import initialise
from kiloword.models.tensors import open_tensors
from kiloword.training.accumulate import backward
from kiloword.training.learner import Learner
from kiloword.training.loop import RunOptions, train
from kiloword.types import Features, Pairs
from kiloword.verify.batch import batch
from kiloword.verify.checks import EXACT
from kiloword.verify.suite import Way, gradients, learner, over_ranks, verify
from threads import over_threads

CAPTIONS = [2, 1, 3, 1, 2]  # of each image
OF = [i for i, n in enumerate(CAPTIONS) for _ in range(n)]  # image of each text
SWITCHES = ("image_text", "image_image", "text_text")
QUICK = ["fff", "siglip+mined", "siglip+exact", "clip+mined", "siglip+supcon"]


def unit(n: int, dim: int, seed: int) -> Tensor:
    return F.normalize(torch.randn(n, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)), dim=1)


def sides(composed: tuple[int, ...] = ()) -> tuple[Features, Features]:
    """Features of five images and their nine texts, with a teacher's beside them; 0 and 3 look and read alike."""
    image, text = unit(5, 3, 132), unit(9, 3, 133)
    image[3], text[OF.index(3)] = image[0], text[:2].mean(0) / text[:2].mean(0).norm()
    means = torch.stack([text[[t for t in range(9) if OF[t] == i]].mean(0) for i in range(5)])
    mineable = torch.tensor([i not in composed for i in range(5)])
    images = {"vec": unit(5, 6, 0).requires_grad_(), "position": torch.arange(5), "mineable": mineable}
    texts = {"vec": unit(9, 6, 1).requires_grad_(), "position": torch.tensor(OF), "mineable": mineable[OF]}
    images |= {"image_features.teacher": image, "image_features.teacher.texts": means}
    texts |= {
        "image_features.teacher": image[OF],
        "text_features.teacher": text,
        "image_features.teacher.texts": means[OF],
    }
    return images, texts


def pairs_of(images: Features, texts: Features) -> Pairs:
    logits = images["vec"] @ texts["vec"].T
    return Pairs(logits, images["position"][:, None] == texts["position"], images, texts)


def dot(a: Tensor, b: Tensor) -> float:
    return sum(float(x) * float(y) for x, y in zip(a, b, strict=True))


def literal_m(settings: Mined, images: Features, texts: Features) -> Tensor:
    """arXiv:2405.10286, eq. 2 and section 4.3, with M as 0 and 1; annotated pairs forced where the settings say so."""
    x, f = images["image_features.teacher"], texts["text_features.teacher"]
    m = torch.zeros(len(x), len(f), dtype=torch.float64)
    for i, (t, j) in itertools.product(range(len(x)), enumerate(OF)):
        own = [f[c] for c in range(len(f)) if OF[c] == i]
        s_it, s_ii, s_tt = dot(x[i], f[t]), dot(x[i], x[j]), sum(dot(c, f[t]) for c in own) / len(own)
        by_image_text = settings.image_text and s_it > settings.p1
        by_image_image = settings.image_image and s_ii > settings.p2
        by_text_text = settings.text_text and s_tt > settings.p3 and s_it > settings.p1_text
        forced = settings.annotated_always and i == j
        m[i, t] = by_image_text or by_image_image or by_text_text or forced
    return m


def literal_loss(scores: Tensor, m: Tensor, tau: Tensor, beta: Tensor) -> Tensor:
    """arXiv:2405.10286, eq. 3, m +-1; beta is added to the logit, as a negative start asks for."""
    total = scores.new_zeros(())
    for i in range(scores.shape[0]):
        for j in range(scores.shape[1]):
            sign = 1 if m[i, j] else -1
            total = total - torch.log(1 / (1 + torch.exp(-sign * (scores[i, j] / tau + beta))))
    return total / scores.shape[1]


def terms(*on: str, **more: Any) -> Mined:
    """Thresholds at which every term finds pairs that no other does."""
    return Mined(**{name: name in on for name in SWITCHES}, **{"p1": 0.5, "p1_text": 0.1, "p3": 0.6, **more})


CASES = {"all": terms(*SWITCHES), **{name: terms(name) for name in SWITCHES}}


@pytest.mark.parametrize("forced", [True, False])
@pytest.mark.parametrize("which", list(CASES))
def test_mined_positives_are_those_of_the_equation(which: str, forced: bool) -> None:
    settings = replace(CASES[which], annotated_always=forced)
    images, texts = sides()
    found, expected = MinedPositives(settings)(pairs_of(images, texts)), literal_m(settings, images, texts)
    assert torch.equal(found, expected)
    own = pairs_of(images, texts).annotated
    assert expected[~own].any()
    assert not expected.all()
    assert bool(expected[own].all()) == (forced or which in ("all", "image_image"))  # S_ii is 1 of the image itself


def share_reported(name: str, micro: int) -> float | None:
    """What a step says of this rank's half of a batch, or of all of it where there is one rank."""
    share = 16 // collectives.ranks()
    mine = batch(collectives.rank() * share, (collectives.rank() + 1) * share, method=name)
    report = backward(learner(name, chunk=5), mine.split(micro))
    return float(report["mined_share"]) if "mined_share" in report else None


@pytest.mark.parametrize("name", ["fff", "siglip+mined"])
def test_a_step_reports_the_share_of_mined_pairs(name: str) -> None:
    """Of all pairs, however they are cut into blocks, micro-batches and ranks."""
    made, some = learner(name), batch(method=name)
    inputs = made.pair_inputs(made.encode(some), some)
    pairs = Pairs(torch.empty(0), torch.empty(0), inputs.rows, inputs.gathered())
    pairs.annotated = pairs.images["position"][:, None] == pairs.texts["position"]
    pairs.logits = torch.zeros(pairs.annotated.shape)
    matching = made.method.positives(pairs) > 0
    expected = float((matching & ~pairs.annotated).double().mean())
    assert 0 < expected < 1
    found = [share_reported(name, 1), share_reported(name, 4), *over_threads(2, lambda: share_reported(name, 2))]
    assert found == pytest.approx([expected] * 4)


def test_only_mined_positives_are_counted_also_when_they_are_balanced() -> None:
    assert share_reported("siglip+exact", 1) is None
    balanced, plain = learner("siglip+mined"), batch(method="siglip+mined")
    balanced.method = preset("siglip+mined", {"mined": {"balance": True}})
    assert float(backward(balanced, [plain])["mined_share"]) == pytest.approx(share_reported("siglip+mined", 1))


def test_each_term_finds_pairs_that_no_other_does() -> None:
    images, texts = sides()
    found = {name: literal_m(replace(CASES[name], annotated_always=False), images, texts) for name in SWITCHES}
    for name in SWITCHES:
        others = torch.stack([m for other, m in found.items() if other != name]).amax(0)
        assert (found[name] > others).any(), name


@pytest.mark.parametrize("chunk", [0, 1, 2, 4])
@pytest.mark.parametrize("which", list(CASES))
def test_the_loss_and_its_gradients(which: str, chunk: int) -> None:
    settings = CASES[which]
    images, texts = sides()
    method = fff(Settings(**vars(settings)))
    head = Head(Single(sizes()["debug"]), scale=9.0, bias=-3.0).double()
    initialise(head, 0)
    parameters = [images["vec"], texts["vec"], head.log_scale, head.bias]
    total = method.pair_loss(Blocks(head, images, texts, chunk), method.positives)
    found = torch.autograd.grad(total.sum / total.count, parameters)

    scores, tau = images["vec"] @ texts["vec"].T, 1 / head.log_scale.exp()
    assert head.bias is not None
    expected = literal_loss(scores, literal_m(settings, images, texts), tau, head.bias).squeeze()
    assert float((total.sum / total.count).detach()) == pytest.approx(float(expected.detach()), rel=1e-12)
    for mine, reference in zip(found, torch.autograd.grad(expected, parameters), strict=True):
        assert (mine - reference).abs().max() < 1e-10


@pytest.mark.parametrize("name", ["mined", "exact"])
def test_composed_examples_are_never_mined(name: str) -> None:
    composed = (0, 2)
    images, texts = sides(composed)
    truth = torch.ones(9, 5, dtype=torch.bool)
    texts["text_features.truth"] = truth
    positives = preset(f"siglip+{name}", {"mined": {"p1": 1e-9, "annotated_always": False}} if name == "mined" else {})
    found = positives.positives(pairs_of(images, texts))
    plain = positives.positives(pairs_of(*({**f, "mineable": torch.ones_like(f["mineable"])} for f in (images, texts))))
    for i, (t, j) in itertools.product(range(5), enumerate(OF)):
        if i in composed or j in composed:
            assert found[i, t] == (i == j)  # nobody can judge them, so the annotation stands
        else:
            assert found[i, t] == plain[i, t]
    assert (found != plain).any()


def test_unknown_features_match_nothing_and_change_no_annotation() -> None:
    images, texts = sides()
    images["image_features.teacher"][1] = 0
    texts["text_features.teacher"][4] = 0
    found = MinedPositives(terms("image_text", p1=1e-9, annotated_always=False))(pairs_of(images, texts))
    assert found[1].tolist() == [float(j == 1) for j in OF]
    assert found[:, 4].tolist() == [float(i == OF[4]) for i in range(5)]


def test_exact_positives() -> None:
    images, texts = sides()
    images["position"], texts["position"] = images["position"] + 3, texts["position"] + 3  # of the second rank
    known = torch.rand(9, 8, generator=torch.Generator().manual_seed(0)) < 0.3
    texts["text_features.truth"] = known
    found = preset("siglip+exact").positives(pairs_of(images, texts))
    for i, t in itertools.product(range(5), range(9)):
        assert found[i, t] == float(known[t, i + 3] or OF[t] == i)


def test_no_similarity_is_asked_for_that_no_term_needs() -> None:
    images, texts = sides()
    for key in ("image_features.teacher.texts", "image_features.teacher"):
        texts.pop(key)
    images.pop("image_features.teacher.texts")
    settings = terms("image_text")
    assert MinedPositives(settings)(pairs_of(images, texts)).any()
    cosines = torch.tensor([[0.4, 0.6]])
    assert matches(settings, cosines, None, None).tolist() == [[False, True]]
    assert matches(terms(), cosines, cosines, cosines).tolist() == [[False, False]]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"p1": 0.0}, "p1 is 0.0: expected above 0, at most 1, as missing features have cosine 0"),
        ({"p3": 1.5}, "p3 is 1.5"),
        ({"p1_text": math.nan}, "p1_text is nan"),
        (dict.fromkeys(SWITCHES, False), "every term of eq. 2 is off"),
        ({"bias_batches": 0}, "bias_batches is 0: expected at least 1"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        preset("fff", settings)


def test_what_the_presets_need() -> None:
    assert preset("fff").needs == ("teacher",)
    assert preset("fff", {"teacher": "clip"}).needs == ("clip",)
    assert preset("fff", {"positives": "annotated"}).needs == ()
    assert preset("fff+exact").needs == ("truth",)
    assert preset("siglip+exact+many").captions == "all"
    assert isinstance(preset("siglip+mined", {"mined": {"balance": True}}).positives, Balanced)
    assert preset("fff", {"bias_search": "none"}).prepare is None
    assert preset("clip+fff+sigmoid").captions == preset("clip+sigmoid+fff").captions == "all"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("clip+fff", r"has no sigmoid loss, which fff needs: add \+sigmoid"),
        ("siglip+fff+softmax", "has no sigmoid loss"),
        ("clip+bias-search", r"has no bias to search, as softmax gives it no gradient"),
        ("fff+bias-search", "already prepares its parameters"),
        ("siglip+mined+exact", "both fill the slot 'positives'"),
    ],
)
def test_what_cannot_mix_is_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        preset(name)


# Bias search


def flat(shift: float, method: str = "siglip") -> Learner:
    """A learner all of whose scores are the same, for any image and text."""
    made = learner(method)
    with torch.no_grad():
        made.model.head.log_scale.fill_(math.log(abs(shift)))
    made.model.head.score = (  # type: ignore[method-assign]
        lambda images, texts: (
            images["vec"].new_full((len(images["vec"]), len(texts["vec"])), math.copysign(1, shift))
            + 0 * images["vec"].sum()
        )
    )
    return made


@pytest.mark.parametrize("shift", [7.0, -3.0])
@pytest.mark.parametrize("how", ["grid", "gradient"])
def test_bias_of_equal_logits_is_known_exactly(how: Any, shift: float) -> None:
    made = flat(shift)
    search(made, itertools.repeat(batch()), how, 2)
    share = 1 / 16  # each text is of one of the images
    assert float(made.state_dict()["model.head.bias"]) == pytest.approx(math.log(share / (1 - share)) - shift, abs=1e-3)


@pytest.mark.parametrize("method", ["fff", "siglip+exact"])
def test_grid_and_gradient_agree_and_nothing_else_changes(method: str) -> None:
    found, name = {}, method if method == "fff" else f"{method}+bias-search"
    for how in ("grid", "gradient"):
        made = learner(name)
        before = {k: v.clone() for k, v in made.state_dict().items()}
        output = search(made, itertools.cycle(batch(method=method).split(2)), how, 2)
        after = made.state_dict()
        assert [k for k, v in after.items() if not torch.equal(v, before[k])] == ["model.head.bias"]
        found[how] = float(after["model.head.bias"])
        words, _, above = output.partition("). ")
        assert re.match(rf"bias -10 -> \S+ \({how} over 2 batches, loss \S+ -> [^ )]+", words)
        assert above.startswith("A bias above 0 ") == (found[how] > 0)
        assert bool(above) == (found[how] > 0)
    assert found["grid"] == pytest.approx(found["gradient"], abs=1e-3)


def test_the_bias_found_has_the_least_loss() -> None:
    made, some = learner("fff"), batch(method="fff")
    search(made, itertools.repeat(some), "grid", 1)
    bias = made.model.head.bias
    assert bias is not None
    inputs = made.pair_inputs(made.encode(some), some)
    losses = []
    for move in (-0.01, 0.0, 0.01):
        with torch.no_grad():
            bias += move
            losses.append(float(made.pair_loss(inputs)["pair"]))
            bias -= move
    assert losses[1] == min(losses)


@pytest.mark.parametrize("how", ["grid", "gradient"])
@pytest.mark.parametrize(("value", "word"), [(1.0, "every"), (0.0, "no")])
def test_pairs_of_one_kind_are_warned_of(how: Any, value: float, word: str) -> None:
    made = learner("siglip")
    made.method = replace(made.method, positives=lambda pairs: torch.full_like(pairs.logits, value))
    output = search(made, itertools.repeat(batch()), how, 1)
    assert f"nearly {word} pair matches" in output
    assert "--calibrate" in output


def test_a_method_whose_loss_took_the_bias_away() -> None:
    method = preset("fff+softmax")
    assert method.prepare is not None
    assert method.prepare(learner("fff+softmax"), itertools.repeat(batch())) == (
        "no bias was searched: the pair loss has none."
    )


def test_a_run_searches_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = default_recipe("fff", "debug", ("scenes?n=32&captions=3",))
    run = replace(base, data=replace(base.data, tokenizer_vocab=300), settings={"positives": "annotated"}, batch=8)
    assert run.data.captions == "all"
    train(replace(run, steps=2), tmp_path / "run", options=RunOptions(save_every=1))
    assert re.search(r"bias -10 -> -\S+ \(grid over 4 batches", capsys.readouterr().err)
    train(replace(run, steps=2), tmp_path / "run", options=RunOptions(save_every=1))
    assert "bias" not in capsys.readouterr().err
    bias = open_tensors(tmp_path / "run" / "model" / "model.safetensors")["head.bias"]
    assert -9.5 < float(bias) < 0


def _search_on_a_rank(folder: str) -> None:
    made, rank = learner("fff"), collectives.rank()
    search(made, itertools.repeat(batch(8 * rank, 8 * rank + 8, method="fff")), "grid", 1)
    torch.save(made.model.head.bias, f"{folder}/{rank}.pt")


@pytest.mark.slow
def test_every_rank_finds_the_same_bias(tmp_path: Path) -> None:
    over_ranks(2, _search_on_a_rank, str(tmp_path))
    made = learner("fff")
    search(made, itertools.repeat(batch(method="fff")), "grid", 1)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert torch.equal(first, second)
    assert float(first.detach()) == pytest.approx(float(made.state_dict()["model.head.bias"]), abs=1e-8)


# Conformity

OWN = """
from kiloword.methods.registry import preset as built_in

def balanced_exact():
    return built_in("siglip+exact", {"exact": {"balance": True}})

def balanced_mined():
    return built_in("clip+mined", {"mined": {"balance": True}})

def supcon_in():
    return built_in("siglip+mined+supcon", {"supcon": {"form": "in"}})
"""


@pytest.mark.parametrize("method", QUICK)
def test_no_way_of_cutting_the_batch_shows(method: str) -> None:
    reference = gradients(method)
    for other in (gradients(method, Way(micro=4)), gradients(method, Way(chunk=3)), gradients(method, permute=True)):
        largest = max(float(g.abs().max()) for name, g in reference.items() if not name.startswith("loss:"))
        assert all(float((other[name] - g).abs().max()) <= EXACT * max(largest, 1) for name, g in reference.items())


@pytest.mark.slow
@pytest.mark.parametrize("function", ["balanced_exact", "balanced_mined", "supcon_in"])
def test_conformity_of_other_settings(function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_fff.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_fff", raising=False)
    assert not [check for check in verify(f"own_fff:{function}", ranks=(1, 2)) if not check.passed]
