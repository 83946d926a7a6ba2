"""The task hierarchy: both protocols against slow transcriptions, levels, scenes, and data of others."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from torch import Tensor

from kiloword.api import Matcher
from kiloword.data.open import open_source
from kiloword.data.scenes.captions import chain
from kiloword.data.scenes.query import truth_table
from kiloword.data.scenes.source import SceneParts, ScenesSource, parse_scenes
from kiloword.evaluation import evaluate, hierarchy
from kiloword.methods.prolip.gaussian import inclusion, log_inclusion
from kiloword.report import Block, Page, write_page
from kiloword.types import Features, Skipped
from tars import photo, write_tar


def gaussians(n: int, d: int = 6, seed: int = 0) -> Features:
    draw = torch.Generator().manual_seed(seed)
    vec = torch.randn(n, d, generator=draw, dtype=torch.float64)
    log_var = torch.randn(n, d, generator=draw, dtype=torch.float64) - 3
    return {"vec": vec / vec.norm(dim=1, keepdim=True), "log_var": log_var}


def official(texts: Tensor, strings: list[list[str]], photo: list[int], images: Tensor, root: Tensor) -> list[float]:
    """HierarCaps' public evaluator, transcribed slowly: texts [C, 4, D], their strings, images [I, D], root [D]."""
    radius = (texts - root).norm(dim=-1)  # [C, 4]
    measured = []
    for i, image in enumerate(images):
        score, found = texts @ image, list[str]()
        for level in np.linspace(radius.min().item(), radius.max().item(), 50):
            best, said = -np.inf, ""
            for c in range(len(texts)):
                for k in range(4):
                    if radius[c, k] <= level and score[c, k] > best:
                        best, said = score[c, k], strings[c][k]
            found.append(said)
        own = [strings[c] for c in range(len(texts)) if photo[c] == i]
        hits = [text for text in set(found) if any(text in chain for chain in own)]
        recall = sum(any(chain[k] in found for chain in own) for k in range(4)) / 4
        measured.append((len(hits) / len(set(found)), recall))
    return np.mean(measured, 0).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("seed", range(4))
def test_the_protocol_of_hierarcaps_is_its_transcription(seed: int) -> None:
    rng = np.random.default_rng(seed)
    chains = hierarchy.Chains.of(  # one or two chains an image; general texts are shared between images
        {i: [[f"g{rng.integers(3)}", f"h{rng.integers(9)}", f"{i}-{c} c", f"{i}-{c} d"] for c in range(1 + i % 2)]
         for i in range(7)}
    )  # fmt: skip
    texts, images, root = gaussians(len(chains.texts), 3, seed), gaussians(7, 3, seed + 10), gaussians(1, 3, seed + 20)
    radius = (texts["vec"] - root["vec"]).norm(dim=1)
    found = dict(
        hierarchy.measure(hierarchy.radius_paths(images["vec"] @ texts["vec"].T, radius), chains, "hierarcaps")
    )
    strings = [[chains.texts[t] for t in places] for places in chains.places.tolist()]
    expected = official(texts["vec"][chains.places], strings, chains.image.tolist(), images["vec"], root["vec"][0])
    assert [found["hierarcaps_precision"], found["hierarcaps_recall"]] == pytest.approx(expected)
    assert 0 < expected[1] < 1


def test_equal_scores_take_the_first_admitted_text_and_equal_radii_admit_all() -> None:
    radius, scores = gaussians(20, 3)["vec"].abs().sum(1), gaussians(20, 3)["vec"][:2] @ gaussians(20, 3, 1)["vec"].T
    limits = np.linspace(radius.min().item(), radius.max().item(), 50)
    expected = [min(t for t in range(20) if radius[t] <= limit) for limit in limits]
    assert hierarchy.radius_paths(torch.zeros(2, 20), radius).tolist() == [expected, expected]
    assert (hierarchy.radius_paths(scores, torch.ones(20)) == scores.argmax(1, keepdim=True)).all()


def test_traversal_is_the_transcription() -> None:
    texts, roots, start = gaussians(23)["vec"], gaussians(7, seed=2)["vec"], torch.tensor([3, 0, 22, 7, 7, 1, 9])
    paths = hierarchy.traversals(start, texts, roots)
    for i in range(7):
        for n in range(50):
            point = (1 - n / 49) * texts[start[i]] + n / 49 * roots[i]
            assert paths[i, n] == int(np.argmax([float(point @ text) for text in texts])), (i, n)
    paths = hierarchy.traversals(start, texts, texts[[5]])  # one root for all
    assert torch.equal(paths[:, 0], start)
    assert (paths[:, -1] == 5).all()
    near, root = F.normalize(0.1 * gaussians(400, 32)["vec"] + roots[0, 0]).float(), gaussians(1, 32, 1)["vec"].float()
    with torch.autocast("cpu", torch.bfloat16):  # texts that lie close together are one text in bf16
        found = hierarchy.traversals(start, near, root)
    assert torch.equal(found, hierarchy.traversals(start, near, root))


def test_most_inclusive_text_pair_by_pair() -> None:
    texts, images = gaussians(31), gaussians(9, seed=1)
    repeated = [{name: value[[i]].expand(31, -1) for name, value in images.items()} for i in range(9)]
    expected = [int(log_inclusion(one, texts).sum(1).argmax()) for one in repeated]
    assert hierarchy.most_inclusive(images, texts).tolist() == expected
    assert len(set(expected)) > 1


def small(source: object = None) -> hierarchy.Chains:
    return hierarchy.Chains.of({0: [["x", "a", "b"]], 5: [["x", "c", "d"], ["y", "c", "e"]]}, source)


class Knowing:
    """Knows that every text but "b" is true of every image."""

    def relevance(self, texts: list[str], rows: list[int]) -> np.ndarray:
        return np.array([[text != "b"] * len(rows) for text in texts])


def test_measures_by_hand() -> None:
    chains, paths = small(), torch.tensor([[0, 0, 3, 2], [5, 6, 2, 1]])
    assert chains.texts == ["x", "a", "b", "c", "d", "y", "e"]
    chains.truth = torch.zeros(7, 2, dtype=torch.bool)
    chains.truth[[0, 3], 0] = chains.truth[6, 1] = True  # x, c; e
    found = dict(hierarchy.measure(paths.flip(1), chains, "traversal_empty"))
    values = {"precision": (2 / 3 + 2 / 4) / 2, "recall": 2 / 3, "hit": 1, "root_recall": 1, "root_hit": 1}
    values |= {"true_precision": (2 / 3 + 1 / 4) / 2, "true_recall": (2 / 3 + 1 / 3) / 2}
    assert found == pytest.approx({f"traversal_empty_{name}": value for name, value in values.items()})
    found = dict(hierarchy.measure(torch.tensor([[3, 2], [6, 2]]), small(), "traversal_empty"))
    assert (found["traversal_empty_root_recall"], found["traversal_empty_root_hit"]) == (0, 0.5)
    found = dict(hierarchy.measure(torch.tensor([[3, 4], [2, 2]]), small(), "hierarcaps"))
    assert found == {f"hierarcaps_{name}": 0 for name in ("precision", "recall", "hit")}
    wrong = hierarchy.wrong_texts(small()).tolist()
    assert wrong[0] == [5, 3, 4]  # x is the image's own too, so y of the third chain
    assert wrong[1] == [-1, 1, 2]  # the third chain is of the same image
    assert hierarchy.wrong_texts(small(Knowing())).tolist() == [[-1, -1, -1], [-1, -1, 2], [-1, -1, 2]]


@given(st.lists(st.integers(0, 3), min_size=2, max_size=6))
def test_kendall_pair_by_pair_and_ties_count_nothing(values: list[int]) -> None:
    n = len(values)
    signs = [np.sign(values[j] - values[i]) for i in range(n) for j in range(i + 1, n)]
    assert float(hierarchy.kendall(torch.tensor([values]))) == pytest.approx(sum(signs) / len(signs))


def test_uncertainty_by_level_by_hand() -> None:
    found = dict(hierarchy.uncertainty_by_level(torch.tensor([[4.0, 3.0, 1.0], [5.0, 2.0, 2.5]]), "text"))
    assert [found[f"text_chain_uncertainty@{k}"] for k in range(3)] == [4.5, 2.5, 1.75]
    assert found["text_chain_uncertainty_order"] == pytest.approx((1 + 1 / 3) / 2)
    # ranks less their means: x . y / |x| |y|
    assert found["text_chain_uncertainty_spearman"] == pytest.approx(-14 / (4 * 17.5**0.5))
    found = dict(hierarchy.uncertainty_by_level(torch.ones(2, 3), "text"))
    assert "text_chain_uncertainty_spearman" not in found
    assert found["text_chain_uncertainty_order"] == 0


def test_inclusion_by_level_of_known_gaussians() -> None:
    vec = torch.eye(4, dtype=torch.float64)[[0, 0, 1, 2]]
    widths = torch.tensor([-2.0, -5.0, -2.0, -2.0], dtype=torch.float64)[:, None].expand(4, 4)
    features = {"vec": vec, "log_var": widths}

    def found(chains: list[list[int]], others: list[list[int]]) -> dict[str, float]:
        return dict(hierarchy.inclusion_by_level(features, torch.tensor(chains), torch.tensor(others), "text"))

    # narrow in wide, wide in narrow, equal
    assert found([[0, 1], [1, 0], [2, 2]], [[3, -1], [-1, -1], [3, -1]]) == {
        "text_inclusion_h@1": 0.5, "text_inclusion_inc@1": 1.0,
    }  # fmt: skip
    # wide and far: H is content, inc is not
    assert found([[3, 1]], [[0, -1]]) == {"text_inclusion_h@1": 1.0, "text_inclusion_inc@1": 0.0}
    assert not found([[2, 2]], [[3, 3]])


@pytest.mark.parametrize("inner", [False, True])
def test_scenes_chains_entail_level_by_level(inner: bool) -> None:
    source = parse_scenes("scenes")
    for row in range(40):
        table = truth_table(chain(source.scene(row), 1000 + row, inner), source.rows[:4000])
        assert table[:, row].all()
        assert table[0].all()
        assert all((general | ~specific).all() for general, specific in pairwise(table))


def scenes(n: int) -> ScenesSource:
    return parse_scenes(f"scenes:test?n={n}", 32)


OFFICIAL = {f"hierarcaps_{name}" for name in ("precision", "recall", "hit", "order")}
ROOTED = ["precision", "recall", "hit", "root_recall", "root_hit"]


def test_all_metrics_on_scenes_whatever_the_batch(matcher_of: Callable[[str], Matcher], tmp_path: Path) -> None:
    model, source, blocks = matcher_of("prolip"), scenes(23), list[Block]()
    found = evaluate(model, "hierarchy", source, batch=7, blocks=blocks)
    assert found == pytest.approx(evaluate(model, "hierarchy", source, batch=64), abs=1e-6)
    expected = [*OFFICIAL, "hierarcaps_true_precision", "hierarcaps_true_recall"]
    for root in ("empty", "inclusive", "mean"):
        expected += [f"traversal_{root}_{name}" for name in (*ROOTED, "true_precision", "true_recall")]
    for kind, levels in (("text", 4), ("image", 3)):
        expected += [f"{kind}_chain_uncertainty@{k}" for k in range(levels)]
        expected += [f"{kind}_chain_uncertainty_spearman", f"{kind}_chain_uncertainty_order"]
        expected += [f"{kind}_inclusion_h@{k}" for k in range(1, levels)]
    expected += ["text_inclusion_inc@2", "text_inclusion_inc@3"]  # level 0 is true of every image
    assert set(found) == {*expected, "image_inclusion_whole_h@0", "image_inclusion_whole_h@1", "skipped"}
    chains = hierarchy.Chains.of({row: source.hierarchies(row) for row in range(23)}, source)
    texts, root = model.encode_text(chains.texts), model.encode_text([""])["vec"]  # the root is the empty text
    radius = (texts["vec"] - root).norm(dim=1)
    assert found["hierarcaps_order"] == pytest.approx(float(hierarchy.kendall(radius[chains.places]).mean()))
    images = model.encode_image([source.record(row).image for row in range(23)])
    start, inclusive = model.score(images, texts).argmax(1), texts["vec"][hierarchy.most_inclusive(images, texts)]
    for name, vec in {"empty": root, "inclusive": inclusive, "mean": F.normalize(root + inclusive)}.items():
        for metric, value in hierarchy.measure(
            hierarchy.traversals(start, texts["vec"], vec), chains, f"traversal_{name}"
        ):
            assert found[metric] == pytest.approx(value), metric
    general = model.encode_text([source.hierarchies(row)[0][0] for row in range(23)])
    assert found["text_chain_uncertainty@0"] == pytest.approx(float(general["log_var"].exp().sum(1).mean()))
    parts = SceneParts(source)
    of_levels = [model.encode_image([parts.record(row).image for row in range(k, len(parts), 3)]) for k in range(3)]
    pairs = {"h@1": (1, 0), "h@2": (2, 1), "whole_h@0": (2, 0), "whole_h@1": (2, 1)}
    for name, (narrow, wide) in pairs.items():
        h = inclusion(of_levels[narrow], of_levels[wide]).sum(1)
        assert found[f"image_inclusion_{name}"] == pytest.approx(float((h > 0).double().mean()))
    assert found["image_inclusion_whole_h@0"] != 0.5  # or the other direction would say the same
    sums = of_levels[0]["log_var"].exp().sum(1)
    assert found["image_chain_uncertainty@0"] == pytest.approx(float(sums.mean()), rel=1e-5)
    write_page(tmp_path / "a.html", Page("General", "", {"prolip": blocks}))
    html = (tmp_path / "a.html").read_text(encoding="utf-8")
    for text in (source.hierarchies(0)[0][-1], "level 0", "traversal_mean"):
        assert text in html, text


def test_models_without_gaussians_and_scenes_of_one_thing(matcher_of: Callable[[str], Matcher]) -> None:
    found = evaluate(matcher_of("clip"), "hierarchy", scenes(9))
    true = {f"{path}_true_{name}" for path in ("hierarcaps", "traversal_empty") for name in ("precision", "recall")}
    assert set(found) == {*OFFICIAL, *true, *(f"traversal_empty_{name}" for name in ROOTED), "skipped"}
    found = evaluate(matcher_of("prolip"), "hierarchy", "scenes:test?n=9&objects=1")
    assert "text_chain_uncertainty@0" in found
    assert not [name for name in found if name.startswith("image")]


def test_chains_of_json_and_rows_that_have_none(matcher: Matcher, tmp_path: Path) -> None:
    def tar(name: str, chains: list[object]) -> str:
        members = {}
        for i, found in enumerate(chains):
            info = {"captions": [f"image {i}"]} | ({} if found is None else {"hierarchies": found})
            members |= {f"{i}.png": photo(i), f"{i}.json": json.dumps(info).encode()}
        write_tar(tmp_path / name / "0.tar", members)
        return str(tmp_path / name)

    several = [["cat", "a cat"], ["dog", "x"]]
    data = tar("data", [[["dog", " a red dog "]], None, [["cat", ""]], [["dog", "a", "b"]], "dog", several])
    assert hierarchy.read(open_source(data))[0] == {0: [["dog", "a red dog"]], 5: several}
    skipped: list[Skipped] = []
    found = evaluate(matcher, "hierarchy", data, skipped=skipped)
    assert ([one.key for one in skipped], found["skipped"]) == (["1", "2", "3", "4"], 4)
    assert set(found) > OFFICIAL
    assert "hierarcaps_true_recall" not in found
    for name, chains in (("none", [None, None]), ("bad", [None, "x"])):
        with pytest.raises(ValueError, match="levels"):
            evaluate(matcher, "hierarchy", tar(name, chains))
