"""FFF against its equations, pair by pair; its components; the searched bias."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kiloword.distributed import collectives
from kiloword.methods.defaults import default_recipe
from kiloword.methods.fff import search
from kiloword.methods.registry import PRESETS, preset
from kiloword.models.tensors import open_tensors
from kiloword.training.loop import RunOptions, train
from kiloword.training.step import backward
from kiloword.types import Batch, Features, Pairs
from kiloword.verify.batch import batch
from literal import sigmoid_pairs
from parts import agree, blocks, cosine, learner, mean, units
from threads import over_threads

OF = [i for i, n in enumerate([2, 1, 3, 1, 2]) for _ in range(n)]  # image of each text
SWITCHES = ("image_text", "image_image", "text_text")


def sides(composed: tuple[int, ...] = ()) -> tuple[Features, Features]:
    """Features of five images and their nine texts, with a teacher's beside them; 0 and 3 look and read alike."""
    image, text = units(5, 3, seed=132), units(9, 3, seed=133)
    image[3], text[OF.index(3)] = image[0], text[:2].mean(0) / text[:2].mean(0).norm()
    means = torch.stack([text[[t for t in range(9) if OF[t] == i]].mean(0) for i in range(5)])
    mineable = torch.tensor([i not in composed for i in range(5)])
    images = {"vec": units(5, 6).requires_grad_(), "position": torch.arange(5), "mineable": mineable}
    texts = {"vec": units(9, 6, seed=1).requires_grad_(), "position": torch.tensor(OF), "mineable": mineable[OF]}
    images |= {"image_features.teacher": image, "image_features.teacher.texts": means}
    texts |= {name: images[name][OF] for name in ("image_features.teacher", "image_features.teacher.texts")}
    return images, texts | {"text_features.teacher": text}


def matched(name: str, settings: dict[str, Any], sides: tuple[Features, Features]) -> Tensor:
    """[i, t] of the positives of a method."""
    images, texts = sides
    annotated = images["position"][:, None] == texts["position"]
    return preset(name, settings).positives(Pairs(images["vec"] @ texts["vec"].T, annotated, images, texts))


def dot(a: Tensor, b: Tensor) -> float:
    return sum(float(x) * float(y) for x, y in zip(a, b, strict=True))


def literal_m(settings: dict[str, Any], images: Features, texts: Features) -> Tensor:
    """arXiv:2405.10286, eq. 2 and section 4.3, with M as 0 and 1; annotated pairs forced where the settings say so."""
    x, f = images["image_features.teacher"], texts["text_features.teacher"]
    m = torch.zeros(len(x), len(f), dtype=torch.float64)
    for i, (t, j) in itertools.product(range(len(x)), enumerate(OF)):
        own = [f[c] for c in range(len(f)) if OF[c] == i]
        s_it, s_ii, s_tt = dot(x[i], f[t]), dot(x[i], x[j]), sum(dot(c, f[t]) for c in own) / len(own)
        by_image_text = settings["image_text"] and s_it > settings["p1"]
        by_image_image = settings["image_image"] and s_ii > 0.92
        by_text_text = settings["text_text"] and s_tt > settings["p3"] and s_it > settings["p1_text"]
        forced = settings["annotated_always"] and i == j
        m[i, t] = by_image_text or by_image_image or by_text_text or forced
    return m


def terms(*on: str, forced: bool = True) -> dict[str, Any]:
    """Thresholds at which every term finds pairs that no other does."""
    return {name: name in on for name in SWITCHES} | {"p1": 0.5, "p1_text": 0.1, "p3": 0.6, "annotated_always": forced}


CASES = {"all": SWITCHES, **{name: (name,) for name in SWITCHES}}


@pytest.mark.parametrize("forced", [True, False])
@pytest.mark.parametrize("which", list(CASES))
def test_mined_positives_are_those_of_the_equation(which: str, forced: bool) -> None:
    images, texts = sides()
    expected = literal_m(terms(*CASES[which], forced=forced), images, texts)
    assert torch.equal(matched("fff", terms(*CASES[which], forced=forced), (images, texts)), expected)
    own = images["position"][:, None] == texts["position"]
    assert expected[~own].any()
    assert not expected.all()
    assert bool(expected[own].all()) == (forced or which in ("all", "image_image"))  # S_ii is 1 of the image itself
    others = [literal_m(terms(name, forced=False), images, texts) for name in SWITCHES if name != which]
    assert which == "all" or (expected > torch.stack(others).amax(0)).any()


@pytest.mark.parametrize("chunk", [0, 2])
def test_the_loss_and_its_gradients(chunk: int) -> None:
    (images, texts), method, head = sides(), preset("fff", terms(*SWITCHES)), cosine(9.0, -3.0)
    total = method.pair_loss(blocks(head, images, texts, chunk), method.positives)
    logits = images["vec"] @ texts["vec"].T * head.log_scale.exp() + head.bias  # eq. 3, of a negative bias
    expected = sigmoid_pairs(logits, literal_m(terms(*SWITCHES), images, texts)) / 9
    agree(mean(total), expected, [images["vec"], texts["vec"], head.log_scale, head.bias], atol=1e-10)


@pytest.mark.parametrize("name", ["mined", "exact"])
def test_composed_examples_are_never_mined(name: str) -> None:
    composed, settings = (0, 2), {"mined": {"p1": 1e-9, "annotated_always": False}} if name == "mined" else {}
    pairs = sides(composed)
    pairs[1]["text_features.truth"] = torch.ones(9, 5, dtype=torch.bool)
    found = matched(f"siglip+{name}", settings, pairs)
    mineable = [{**f, "mineable": torch.ones_like(f["mineable"])} for f in pairs]
    plain = matched(f"siglip+{name}", settings, (mineable[0], mineable[1]))
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
    for name in ("image_features.teacher.texts", "image_features.teacher"):
        texts.pop(name)  # which no term asks for
    found = matched("fff", terms("image_text", forced=False) | {"p1": 1e-9}, (images, texts))
    assert found[1].tolist() == [float(j == 1) for j in OF]
    assert found[:, 4].tolist() == [float(i == OF[4]) for i in range(5)]


def test_exact_positives() -> None:
    images, texts = sides()
    images["position"], texts["position"] = images["position"] + 3, texts["position"] + 3  # of the second rank
    known = torch.rand(9, 8, generator=torch.Generator().manual_seed(0)) < 0.3
    texts["text_features.truth"] = known
    found = matched("siglip+exact", {}, (images, texts))
    for i, t in itertools.product(range(5), range(9)):
        assert found[i, t] == float(known[t, i + 3] or OF[t] == i)


def mine(name: str) -> Batch:
    """This rank's half of a batch, or all of it where there is one rank."""
    share, rank = 16 // collectives.ranks(), collectives.rank()
    return batch(rank * share, (rank + 1) * share, method=name)


def share_reported(name: str, micro: int, settings: dict[str, Any] | None = None) -> float | None:
    report = backward(learner(name, settings, chunk=5), mine(name).split(micro))
    return float(report["mined_share"]) if "mined_share" in report else None


@pytest.mark.parametrize(("name", "p1"), [("fff", {"p1": 0.6}), ("siglip+mined", {"mined": {"p1": 0.6}})])
def test_a_step_reports_the_share_of_mined_pairs(name: str, p1: dict[str, Any]) -> None:
    """Of all pairs, however they are cut into blocks, micro-batches and ranks."""
    some, of = batch(method=name), batch(method=name).image_of_text
    rows = {f"image_features.{key}": value for key, value in some.image_features.items()}
    columns = {name: value[of] for name, value in rows.items()}
    columns |= {f"text_features.{key}": value for key, value in some.text_features.items()}
    images = {"vec": torch.ones(16, 1), "position": some.position, "mineable": ~some.composed, **rows}
    texts = {"vec": torch.ones(len(of), 1), "position": some.position[of], "mineable": ~some.composed[of], **columns}
    annotated = images["position"][:, None] == texts["position"]
    expected = float((matched(name, p1, (images, texts)).bool() & ~annotated).double().mean())
    assert 0 < expected < 1
    found = [share_reported(name, 1, p1), share_reported(name, 4, p1)]
    found += over_threads(2, lambda: share_reported(name, 2, p1))
    assert found == pytest.approx([expected] * 4)
    assert share_reported("siglip+exact", 1) is None
    plain, balanced = (share_reported("siglip+mined", 1, {"mined": {"balance": b}}) for b in (False, True))
    assert plain == pytest.approx(balanced)


def test_what_the_presets_need() -> None:
    assert [preset(name).name for name in PRESETS] == [*PRESETS]
    assert preset("fff").needs == ("teacher",)
    assert preset("fff", {"teacher": "clip"}).needs == ("clip",)
    assert preset("fff", {"positives": "annotated"}).needs == ()
    assert preset("fff+exact").needs == ("truth",)
    assert preset("siglip+exact+many").captions == "all"
    assert preset("fff", {"bias_search": "none"}).prepare is None
    assert preset("clip+fff+sigmoid").captions == preset("clip+sigmoid+fff").captions == "all"


# Bias search


@pytest.mark.parametrize("method", ["fff", "siglip+exact"])
def test_the_bias_of_least_loss_is_found_and_nothing_else_changes(method: str) -> None:
    made: Any = learner(method if method == "fff" else f"{method}+bias-search")
    before = {k: v.clone() for k, v in made.state_dict().items()}
    parts = batch(method=method).split(2)
    said = search(made, itertools.cycle(parts), 2)
    assert [k for k, v in made.state_dict().items() if not torch.equal(v, before[k])] == ["model.head.bias"]
    assert re.match(r"bias -10 -> \S+ \(grid over 2 batches", said)
    slopes = list[Tensor]()
    for part in parts:
        made.zero_grad()
        backward(made, [part])
        slopes.append(made.model.head.bias.grad)
    assert float(torch.stack(slopes).sum()) == pytest.approx(
        0, abs=1e-3 * float(torch.stack(slopes).abs().sum()) + 1e-4
    )


def test_a_run_searches_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = default_recipe("fff", "debug", ("scenes?n=32&captions=3",))
    run = replace(base, data=replace(base.data, tokenizer_vocab=300), settings={"positives": "annotated"}, batch=8)
    said = []
    for _ in range(2):
        train(replace(run, steps=2), tmp_path / "run", options=RunOptions(save_every=1))
        said.append("bias -10 -> " in capsys.readouterr().err)
    assert said == [True, False]
    bias = open_tensors(tmp_path / "run" / "model" / "model.safetensors")["head.bias"]
    assert -9.5 < float(bias) < 0


def test_every_rank_finds_the_same_bias() -> None:
    def found() -> Tensor:
        made: Any = learner("fff")
        search(made, itertools.repeat(mine("fff")), 1)
        return made.model.head.bias.detach()

    alone, (first, second) = found(), over_threads(2, found)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, alone, rtol=0, atol=1e-8)
