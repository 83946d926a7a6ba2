"""Inclusion of texts in texts: which pairs are asked, what is true of them, and when to believe H."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_uncertainty import matcher

from kiloword.data.scenes.source import parse_scenes
from kiloword.evaluation.task import Inputs
from kiloword.evaluation.uncertainty.data import chains, gather
from kiloword.evaluation.uncertainty.inclusion import InclusionAnswers, answers, best_overlap, links, pairwise


def test_pairs_and_their_truth() -> None:
    source = parse_scenes("scenes:test?n=12", 32)
    model = matcher()
    data = gather(Inputs(model, source, 8))
    tested = links(chains(data), exact=True)
    assert {name: len(pairs) for name, pairs in tested.pairs.items()} == {
        "chain_3_in_2": 12, "chain_2_in_1": 12, "chain_1_in_0": 12, "chain": 36, "reverse": 36, "unrelated": 36,
    }  # fmt: skip
    found = answers(model, tested)
    assert bool(found["chain"].truth.all())
    for name, answer in found.items():
        pairs = tested.pairs[name]
        features = model.encode_text(tested.texts)
        a, b = ({k: v[[p[side] for p in pairs]] for k, v in features.items()} for side in (0, 1))
        torch.testing.assert_close(answer.h, model.inclusion(a, b).diagonal().double(), rtol=1e-4, atol=1e-4)
        assert torch.equal(answer.says(1.0), model.includes(a, b, overlap=1.0).diagonal())
    torch.testing.assert_close(found["reverse"].h, -found["chain"].h, rtol=0, atol=0)


def test_chains_of_json_are_the_truth() -> None:
    given_chains = [(0, ["animal", "dog", "a big dog"]), (1, ["animal", "cat", "a cat"]), (2, ["cat", "cat", "a cat"])]
    tested = links(given_chains, exact=False)
    text = tested.texts
    assert sum(len(pairs) for name, pairs in tested.pairs.items() if name.startswith("chain_")) == 5
    for a, b, _ in tested.pairs["unrelated"]:
        known = (text[a], text[b]) in {("dog", "animal"), ("cat", "animal"), ("a cat", "cat"), ("a big dog", "dog")}
        assert bool(tested.right([(a, b, 0)])[0]) == (known or a == b)
    assert not bool(tested.right(tested.pairs["reverse"]).any())
    assert links(given_chains[:1], exact=False).pairs["unrelated"] == []


@given(
    st.lists(st.tuples(st.integers(-1, 1), st.integers(0, 5), st.booleans(), st.booleans()), min_size=1, max_size=25)
)
def test_overlap_is_the_best_of_all(pairs: list[tuple[int, int, bool, bool]]) -> None:
    h, distance, truth, held = (torch.tensor(column) for column in zip(*pairs, strict=True))
    answer = InclusionAnswers(h.double(), distance.double(), truth, held)

    def right(overlap: float) -> int:
        return int((answer.says(overlap) == truth)[held].sum())

    assert right(best_overlap([answer])) == max(right(k + 0.5) for k in range(-1, 6))


def test_inclusion_a_part_at_a_time_is_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.Generator().manual_seed(0)
    a, b = ({"vec": torch.randn(30, 4, generator=g), "log_var": torch.randn(30, 4, generator=g)} for _ in range(2))
    i, j = torch.randperm(30, generator=g), torch.randperm(30, generator=g)
    whole = pairwise(a, b, i, j)
    monkeypatch.setattr("kiloword.evaluation.uncertainty.inclusion.PAIRS", 7)
    for x, y in zip(pairwise(a, b, i, j), whole, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
    assert float(whole[1][3]) == pytest.approx(
        float(
            (a["vec"][i[3]] - b["vec"][j[3]]).square().sum()
            + a["log_var"][i[3]].exp().sum()
            + b["log_var"][j[3]].exp().sum()
        ),
        rel=1e-5,
    )
