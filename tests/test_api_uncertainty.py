"""Matcher over Gaussians: uncertainty, distance and inclusion; models that have none are refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from kiloword.api import Matcher
from kiloword.config.recipes import sizes
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.evaluation import evaluate
from kiloword.methods.prolip import gaussian
from kiloword.methods.registry import preset
from kiloword.models.build import build
from kiloword.types import Features

CAPTIONS = ["a red circle", "two blue squares", "a green star left of a circle"]


def matcher(method: str = "prolip") -> Matcher:
    return Matcher(build(sizes()["debug"], preset(method)), Tokenizer.train(CAPTIONS, 300))


def photos(n: int) -> torch.Tensor:
    return torch.randint(256, (n, 3, 32, 32), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


def at(cosine: float, log_var: float, dim: int = 16) -> Features:
    """One Gaussian whose mean has this cosine with the first axis, equally wide in all dimensions."""
    vec = torch.zeros(1, dim)
    vec[0, :2] = torch.tensor([cosine, (1 - cosine**2) ** 0.5])
    return {"vec": vec, "log_var": torch.full((1, dim), log_var)}


@pytest.mark.parametrize("method", ["prolip", "pcme++", "llip+gaussian"])
def test_either_side_in_either_side(method: str) -> None:
    m = matcher(method)
    images, texts = m.encode_image(photos(4)), m.encode_text(CAPTIONS)
    for a in (images, texts):
        torch.testing.assert_close(m.uncertainty(a), a["log_var"].exp().sum(1))
        for b in (images, texts):
            h, distance = m.inclusion(a, b), m.distance(a, b)
            assert h.shape == distance.shape == (len(a["vec"]), len(b["vec"]))
            torch.testing.assert_close(h, -m.inclusion(b, a).T)
            torch.testing.assert_close(distance, m.distance(b, a).T)
            for i in range(len(a["vec"])):
                one = {k: v[[i]].expand_as(b[k]) for k, v in a.items() if k in ("vec", "log_var")}
                torch.testing.assert_close(h[i], gaussian.inclusion(one, b).sum(1))
                torch.testing.assert_close(distance[i], gaussian.csd(one, b))
            assert torch.equal(m.includes(a, b, overlap=9.0), h > 0)
            assert not m.includes(a, b, overlap=0.0).any()
            assert not (m.includes(a, b, overlap=9.0) & m.includes(b, a, overlap=9.0).T).any()
    if method == "prolip":
        torch.testing.assert_close(m.score(images, texts), 1 - m.distance(images, texts) / 2)
    none = {name: value[:0] for name, value in texts.items()}
    assert m.uncertainty(none).shape == (0,)
    assert m.distance(none, texts).shape == m.inclusion(none, texts).shape == (0, 3)


def test_inclusion_needs_overlap_and_its_forms_differ() -> None:
    """H is larger the farther a narrow Gaussian is from a wide one; `includes` asks for overlap. Of the last two, the
    wider in most dimensions by the paper is the narrower by the integral."""
    m, narrow, wide, far = matcher(), at(1.0, -6.0), at(1.0, -4.0), at(-1.0, -6.0)
    assert float(m.inclusion(far, wide)) > float(m.inclusion(narrow, wide)) > 0
    for form in ("paper", "exact"):
        assert m.includes(narrow, wide, overlap=1.0, form=form).item()
        assert not m.includes(wide, narrow, overlap=1.0, form=form).item()
        assert not m.includes(far, wide, overlap=1.0, form=form).item()
    assert m.includes(far, wide, overlap=5.0).item()
    a = {"vec": torch.zeros(1, 2), "log_var": torch.tensor([[-1.0, 1.0]])}
    b = {"vec": torch.tensor([[0.0, 7.0]]), "log_var": torch.tensor([[4.0, 0.0]])}
    assert float(m.inclusion(a, b)) > 0 > float(m.inclusion(a, b, form="exact"))
    assert m.includes(a, b, overlap=1e3).item()
    assert not m.includes(a, b, overlap=1e3, form="exact").item()


@pytest.mark.parametrize("method", ["prolip", "pcme++"])
def test_overlap_is_what_the_model_calls_a_match(method: str) -> None:
    """Images at all cosines within one wide text: included exactly where the match's probability is above 1/2."""
    m = matcher(method)
    head = m.model.head
    assert head.bias is not None
    with torch.no_grad():
        head.log_scale.fill_(2.5)
        head.bias.fill_(-5.0 if method == "prolip" else 12.0)
    parts = [at(0.05 * n, -6.0) for n in range(21)]
    images = {k: torch.cat([part[k] for part in parts]) for k in ("vec", "log_var")}
    text = at(1.0, -5.0)
    found = m.includes(images, text)[:, 0]
    with torch.inference_mode():
        likely = head.logits(m.score(images, text)).sigmoid()[:, 0] > 0.5
    assert torch.equal(found, likely)
    assert 3 < int(found.sum()) < 18


WRONG: list[tuple[Any, str]] = [
    (["a dog"], "vec"),
    ({"log_var": torch.zeros(2, 16)}, "vec"),
    ({"vec": torch.zeros(2, 16)}, r"log_var.*\+gaussian"),
    ({"vec": torch.zeros(2, 16), "log_var": torch.zeros(1, 16)}, "log_var"),
    ({"vec": torch.zeros(1, 2, 16), "log_var": torch.zeros(1, 2, 16)}, "vec"),
    (at(1.0, -5.0, dim=4), "dimensions"),
]


def test_what_are_no_features_of_this_model_is_refused() -> None:
    m, softmax, good = matcher(), matcher("clip+gaussian"), at(1.0, -5.0)
    for given, word in WRONG:
        for measure in (m.distance, m.inclusion, m.includes):
            for a, b in ((given, good), (good, given)):
                with pytest.raises(ValueError, match=word):
                    measure(a, b)
    with pytest.raises(ValueError, match="printed"):
        m.inclusion(good, good, form="printed")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="softmax"):  # which learned no overlap
        softmax.includes(good, good)
    assert softmax.includes(good, good, overlap=1.0).shape == (1, 1)


def literal_csd(a: Features, b: Features, i: int, j: int) -> float:
    """Eq. 1, dimension by dimension, in double precision."""
    pairs = zip(a["vec"][i].tolist(), b["vec"][j].tolist(), strict=True)
    variances = [math.exp(x) for x in (*a["log_var"][i].tolist(), *b["log_var"][j].tolist())]
    return sum((x - y) ** 2 for x, y in pairs) + sum(variances)


def test_nearest_is_the_literal_distance_or_the_cosine() -> None:
    m = matcher("pcme++")
    images, texts = m.encode_image(photos(4)), m.encode_text(CAPTIONS)
    images["log_var"], texts["log_var"] = torch.randn(4, 16) - 3, torch.randn(3, 16) - torch.tensor([[1.0], [5], [3]])
    by_distance, by_cosine = m.score(images, texts, "csd"), m.score(images, texts, "cosine")
    for i in range(4):
        for t in range(3):
            assert float(by_distance[i, t]) == pytest.approx(1 - literal_csd(images, texts, i, t) / 2, abs=1e-5)
            cosine = sum(x * y for x, y in zip(images["vec"][i].tolist(), texts["vec"][t].tolist(), strict=True))
            assert float(by_cosine[i, t]) == pytest.approx(cosine, abs=1e-5)
    assert not torch.equal(by_distance.argsort(1), by_cosine.argsort(1))  # variances matter here
    first = {name: value[:3] for name, value in images.items()}
    for nearest, whole in (("csd", by_distance), ("cosine", by_cosine), (None, m.score(images, texts))):
        torch.testing.assert_close(m.score_pairs(first, texts, nearest), whole[:3].diagonal())  # type: ignore[arg-type]


def test_retrieval_ranks_by_what_is_chosen() -> None:
    m, found = matcher("prolip"), {}
    drawn = torch.Generator().manual_seed(0)  # ranks of near ties differ by rounding between the two scores
    with torch.no_grad():
        m.model.head.uncertainty.text_log_var.weight.normal_(0, 2, generator=drawn)  # type: ignore[union-attr, operator]
        m.model.head.uncertainty.text_log_var.bias.fill_(-3)  # type: ignore[union-attr, operator]
    for nearest in (None, "cosine", "csd"):
        found[nearest] = evaluate(m, "retrieval", "scenes:test?n=12", nearest=nearest)
    assert found["csd"] == found[None] != found["cosine"]  # the score of prolip is 1 - CSD / 2
    listed = evaluate(m, "retrieval", "scenes:test?n=12", nearest="cosine", shortlist=99)
    assert {name: listed[name] for name in found["cosine"]} == pytest.approx(found["cosine"])
    for method, nearest, word in (("prolip", "near", "near"), ("siglip", "csd", "log_var")):
        with pytest.raises(ValueError, match=word):
            evaluate(matcher(method), "retrieval", "scenes:test?n=12", nearest=nearest)
