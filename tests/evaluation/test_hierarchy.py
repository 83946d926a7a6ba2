"""What is general and what is specific: both protocols against slow transcriptions, levels, sources, the verb."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kiloword.api import Matcher
from kiloword.cli.main import main
from kiloword.config.recipes import ModelFile, Nearest, sizes
from kiloword.data.open import open_source
from kiloword.data.scenes.captions import chain, describe, parse
from kiloword.data.scenes.query import ANY, Pattern, Query, entails, truth_table
from kiloword.data.scenes.source import SceneParts, ScenesSource, area, parse_scenes
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.evaluation import evaluate
from kiloword.evaluation.hierarchy import paths as hierarchy_paths
from kiloword.evaluation.hierarchy.chains import Chains, complete, gather, read
from kiloword.evaluation.hierarchy.levels import inclusion_by_level, kendall, uncertainty_by_level, wrong_texts
from kiloword.evaluation.hierarchy.page import report
from kiloword.evaluation.hierarchy.paths import (
    mean_root,
    measure,
    measure_root,
    measure_truth,
    most_inclusive,
    radii,
    radius_paths,
    traversals,
)
from kiloword.methods.prolip.gaussian import inclusion, log_inclusion
from kiloword.methods.registry import preset
from kiloword.models.build import build
from kiloword.models.model_folder import save_model
from kiloword.types import Features, Skipped
from tars import photo, write_tar


def gaussians(n: int, d: int = 6, seed: int = 0) -> Features:
    draw = torch.Generator().manual_seed(seed)
    vec = torch.randn(n, d, generator=draw, dtype=torch.float64)
    log_var = torch.randn(n, d, generator=draw, dtype=torch.float64) - 3
    return {"vec": vec / vec.norm(dim=1, keepdim=True), "log_var": log_var}


def cosine(images: Features, texts: Features) -> Tensor:
    return images["vec"] @ texts["vec"].T


def some_chains(images: int = 7, seed: int = 0) -> Chains:
    """One or two chains an image; general texts are shared between images."""
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(images):
        own = [[f"g{rng.integers(3)}", f"h{rng.integers(9)}", f"{i}-{c} c", f"{i}-{c} d"] for c in range(1 + i % 2)]
        rows.append((10 + i, own))
    return gather(rows)


def official(texts: Tensor, strings: list[list[str]], photo: list[int], images: Tensor, root: Tensor) -> tuple:
    """HierarCaps' public evaluator, transcribed slowly: texts [C, 4, D], their strings, images [I, D], root [D]."""
    radius = (texts - root).norm(dim=-1)  # [C, 4]
    levels = np.linspace(radius.min().item(), radius.max().item(), 50)
    precisions, recalls = [], []
    for i, image in enumerate(images):
        score = texts @ image
        found: list[str] = []
        for level in levels:
            best, said = -np.inf, ""
            for c in range(len(texts)):
                for k in range(4):
                    if radius[c, k] <= level and score[c, k] > best:
                        best, said = score[c, k], strings[c][k]
            if not found or found[-1] != said:
                found.append(said)
        own = [strings[c] for c in range(len(texts)) if photo[c] == i]
        hits = [t for t in set(found) if any(t in chain for chain in own)]
        precisions.append(len(hits) / len(set(found)))
        recalls.append(sum(any(chain[k] in found for chain in own) for k in range(4)) / 4)
    return float(np.mean(precisions)), float(np.mean(recalls))


@pytest.mark.parametrize("seed", range(4))
def test_official_protocol_is_the_transcription(seed: int) -> None:
    chains = some_chains(seed=seed)
    texts, images, root = gaussians(len(chains.texts), 3, seed), gaussians(7, 3, seed + 10), gaussians(1, 3, seed + 20)
    radius = radii(texts, root)
    found = dict(measure(radius_paths(cosine, images, texts, radius), chains))
    strings = [[chains.texts[t] for t in places] for places in chains.places.tolist()]
    stacked = texts["vec"][chains.places]
    precision, recall = official(stacked, strings, chains.image.tolist(), images["vec"], root["vec"][0])
    assert found["precision"] == pytest.approx(precision)
    assert found["recall"] == pytest.approx(recall)
    assert 0 < recall < 1


@pytest.mark.parametrize("nearest", ["cosine", "csd"])
def test_steps_are_in_full_precision_also_in_a_run_of_half(nearest: Nearest) -> None:
    """Validation on CUDA runs under autocast; texts that lie close together are one text in bf16."""
    texts, images, roots = ({k: v.float() for k, v in gaussians(n, 32, n).items()} for n in (400, 20, 1))
    texts["vec"] = F.normalize(0.1 * texts["vec"] + images["vec"][0], dim=1)

    def paths() -> Tensor:
        return traversals(cosine, images, texts, roots["vec"], nearest)

    full = paths()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(paths(), full)


def test_path_of_equal_scores_takes_the_first_admitted_text() -> None:
    texts, images = gaussians(20, 3), gaussians(2, 3, 1)
    radius = radii(texts, gaussians(1, 3, 2))
    paths = radius_paths(lambda a, b: torch.zeros(2, 20), images, texts, radius)
    limits = np.linspace(radius.min().item(), radius.max().item(), 50)
    expected = [min(t for t in range(20) if radius[t] <= limit) for limit in limits]
    assert paths.tolist() == [expected, expected]


def test_equal_radii_admit_everything_at_once() -> None:
    texts, images = gaussians(5, 3), gaussians(2, 3, 1)
    paths = radius_paths(cosine, images, texts, torch.ones(5, dtype=torch.float64))
    assert (paths == cosine(images, texts).argmax(1, keepdim=True)).all()


def test_order_is_kendalls_tau_as_the_official_evaluator_takes_it() -> None:
    stats = pytest.importorskip("scipy.stats")
    radius = torch.rand(30, 4, generator=torch.Generator().manual_seed(0))
    official = [stats.kendalltau(row.argsort().numpy(), [1, 2, 3, 4]).correlation for row in radius]
    np.testing.assert_allclose(kendall(radius).numpy(), official, atol=1e-12)


@given(st.lists(st.integers(0, 3), min_size=2, max_size=6))
def test_kendall_pair_by_pair_and_ties_count_nothing(values: list[int]) -> None:
    n = len(values)
    signs = [np.sign(values[j] - values[i]) for i in range(n) for j in range(i + 1, n)]
    assert float(kendall(torch.tensor([values]))) == pytest.approx(sum(signs) / len(signs))


@pytest.mark.parametrize("nearest", ["cosine", "csd"])
@pytest.mark.parametrize("steps", [2, 50])
def test_traversal_is_the_transcription(nearest: str, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    texts, images, roots = gaussians(23), gaussians(7, seed=1), gaussians(7, seed=2)["vec"]
    monkeypatch.setattr(hierarchy_paths, "PANEL", 50)  # two images at a time
    paths = traversals(cosine, images, texts, roots, nearest, steps)
    half = 0.5 * texts["log_var"].exp().sum(1) if nearest == "csd" else torch.zeros(23)
    for i in range(7):
        start = max(range(23), key=lambda t: float(images["vec"][i] @ texts["vec"][t]))
        for n in range(steps):
            weight = n / (steps - 1)
            point = (1 - weight) * texts["vec"][start] + weight * roots[i]
            point = point / point.norm()
            score = [float(point @ texts["vec"][t] - half[t]) for t in range(23)]
            assert paths[i, n] == int(np.argmax(score)), (i, n)


def test_traversal_starts_at_the_models_own_best_text_and_ends_at_the_root() -> None:
    texts, images = gaussians(23), gaussians(7, seed=1)
    paths = traversals(lambda a, b: -cosine(a, b), images, texts, texts["vec"][[5]])
    assert (paths[:, 0] == cosine(images, texts).argmin(1)).all()
    assert (paths[:, -1] == 5).all()


@pytest.mark.parametrize("by", ["h", "inc"])
def test_most_inclusive_text_whatever_is_held_at_once(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    texts, images = gaussians(31), gaussians(9, seed=1)
    measure_of = inclusion if by == "h" else log_inclusion
    expected = []
    for i in range(9):
        one = {name: value[[i]].expand(31, -1) for name, value in images.items()}
        expected.append(int(measure_of(one, texts).sum(1).argmax()))
    assert most_inclusive(images, texts, by).tolist() == expected
    assert len(set(expected)) > 1
    monkeypatch.setattr(hierarchy_paths, "PAIRS", 40)
    assert most_inclusive(images, texts, by).tolist() == expected


def four_levels(chains: int = 6, d: int = 64) -> tuple[Features, Features]:
    """Images and their chains of four texts each, of small variances: 4 i + k is of image i; wide, far ones first."""
    draw = torch.Generator().manual_seed(0)
    image = torch.nn.functional.normalize(torch.randn(chains, d, generator=draw, dtype=torch.float64))
    away = torch.nn.functional.normalize(torch.randn(chains, 4, d, generator=draw, dtype=torch.float64), dim=2)
    text = torch.tensor([0.2, 0.25, 0.3, 0.35], dtype=torch.float64)[:, None] * image[:, None] + away
    widths = torch.tensor([-8.0, -9.0, -10.0, -11.0], dtype=torch.float64).repeat(chains)[:, None].expand(-1, d)
    texts = {"vec": torch.nn.functional.normalize(text, dim=2).flatten(0, 1), "log_var": widths}
    return {"vec": image, "log_var": torch.full_like(image, -13)}, texts


def test_most_inclusive_text_of_small_variances_is_a_general_one() -> None:
    images, texts = four_levels()
    assert (most_inclusive(images, texts) % 4 == 0).all()
    assert (most_inclusive(images, texts, "h") % 4 == 3).all()  # distances decide: the narrowest
    assert (most_inclusive(images, texts, "h", eps=-10) % 4 == 0).all()  # widths decide


@pytest.mark.parametrize("option", [{"includes": "wide"}, {"eps": float("nan")}, {"eps": 1000.0}])
def test_unusable_inclusion_options_are_refused(option: dict[str, object]) -> None:
    with pytest.raises(
        ValueError, match=r"includes is 'wide': expected inc or h|eps is .*: expected a number from -100"
    ):
        evaluate(matcher(), "hierarchy", "scenes:test?n=5", **option)


def test_traversals_go_to_the_root_of_inc_by_default() -> None:
    model = matcher()
    default, inc, h, wide = (
        evaluate(model, "hierarchy", "scenes:test?n=23", **more)
        for more in ({}, {"includes": "inc"}, {"includes": "h"}, {"includes": "h", "eps": -10.0})
    )
    roots = [[value for name, value in found.items() if "inclusive" in name] for found in (default, inc, h, wide)]
    assert roots[0] == roots[1]
    assert roots[0] != roots[2] != roots[3]


def test_mean_root_has_norm_1() -> None:
    a, b = gaussians(1)["vec"], gaussians(4, seed=1)["vec"]
    torch.testing.assert_close(mean_root(a, b)[2], (a[0] + b[2]) / (a[0] + b[2]).norm())


def small() -> Chains:
    return gather([(0, [["x", "a", "b"]]), (5, [["x", "c", "d"], ["y", "c", "e"]])])


def test_measures_by_hand() -> None:
    chains = small()
    assert chains.texts == ["x", "a", "b", "c", "d", "y", "e"]
    paths = torch.tensor([[0, 0, 3, 2], [5, 6, 2, 1]])
    found = dict(measure(paths, chains))
    assert found == pytest.approx({"precision": (2 / 3 + 2 / 4) / 2, "recall": (2 / 3 + 2 / 3) / 2, "hit": 1})
    assert dict(measure_root(paths[:, 0], chains)) == {"root_recall": 1, "root_hit": 1}
    assert dict(measure_root(torch.tensor([2, 2]), chains)) == {"root_recall": 0, "root_hit": 0.5}
    assert dict(measure(torch.tensor([[3, 4], [2, 2]]), chains)) == {"precision": 0, "recall": 0, "hit": 0}


@pytest.mark.parametrize("batch", [1, 2])
def test_true_texts_count_wherever_they_stand(batch: int) -> None:
    table = torch.zeros(7, 2, dtype=torch.bool)
    table[[0, 3], 0] = True  # x and c are true of the first image, e of the second
    table[6, 1] = True

    def truth(some: list[int], part: slice) -> Tensor:
        return table[some][:, part]

    found = dict(measure_truth(torch.tensor([[0, 0, 3, 2], [5, 6, 2, 1]]), small(), truth, batch))
    assert found == pytest.approx({"true_precision": (2 / 3 + 1 / 4) / 2, "true_recall": (2 / 3 + 1 / 3) / 2})


def test_uncertainty_by_level_by_hand() -> None:
    found = dict(uncertainty_by_level(torch.tensor([[4.0, 3.0, 1.0], [5.0, 2.0, 2.5]])))
    assert [found[f"chain_uncertainty@{k}"] for k in range(3)] == [4.5, 2.5, 1.75]
    assert found["chain_uncertainty_order"] == pytest.approx((1 + 1 / 3) / 2)
    assert found["chain_uncertainty_spearman"] == pytest.approx(
        -14 / (4 * 17.5**0.5)
    )  # ranks less their means: x . y / |x| |y|


def test_constant_uncertainty_has_no_correlation() -> None:
    found = dict(uncertainty_by_level(torch.ones(2, 3)))
    assert "chain_uncertainty_spearman" not in found
    assert found["chain_uncertainty_order"] == 0


def test_inclusion_by_level_of_known_gaussians() -> None:
    vec = torch.eye(4, dtype=torch.float64)[[0, 0, 1, 2]]
    features = {
        "vec": vec,
        "log_var": torch.tensor([-2.0, -5.0, -2.0, -2.0], dtype=torch.float64)[:, None].expand(4, 4),
    }
    chains = torch.tensor([[0, 1], [1, 0], [2, 2]])  # narrow in wide, wide in narrow, equal
    found = dict(inclusion_by_level(features, chains, torch.tensor([[3, -1], [-1, -1], [3, -1]])))
    assert found == {"inclusion_h@1": 0.5, "inclusion_inc@1": 1.0}
    found = dict(inclusion_by_level(features, torch.tensor([[3, 1]]), torch.tensor([[0, -1]])))
    assert found == {"inclusion_h@1": 1.0, "inclusion_inc@1": 0.0}  # wide and far: H is content, inc is not
    assert not dict(inclusion_by_level(features, torch.tensor([[2, 2]]), torch.tensor([[3, 3]])))


def test_wrong_texts_are_of_other_images_and_false() -> None:
    chains = small()
    found = wrong_texts(chains).tolist()
    assert found[0] == [5, 3, 4]  # x is the image's own too, so y of the third chain
    assert found[1] == [-1, 1, 2]  # the third chain is of the same image
    everything_but_b = torch.tensor([t != 2 for t in range(7)])[:, None].expand(7, 2)
    found = wrong_texts(chains, lambda some, part: everything_but_b[some][:, part], batch=1).tolist()
    assert found == [[-1, -1, -1], [-1, -1, 2], [-1, -1, 2]]


@pytest.mark.parametrize("inner", [False, True])
def test_scenes_chains_entail_level_by_level(inner: bool) -> None:
    source = parse_scenes("scenes")
    others = source.rows[:4000]
    for row in range(40):
        queries = chain(source.scene(row), 1000 + row, inner)
        table = truth_table(queries, others)
        assert table[:, row].all()
        for general, specific in pairwise(table):
            assert (general | ~specific).all()
        assert (table.sum(1)[:-1] >= table.sum(1)[1:]).all()
        assert table.sum(1)[0] == 4000


def test_entails_is_sound_on_unrelated_queries() -> None:
    source = parse_scenes("scenes")
    queries = [describe(source.scene(row), level, 7 * row) for row in range(40) for level in (1, 2, 3)]
    table = truth_table(queries, source.rows[:8000])
    proven = 0
    for a, of_a in zip(queries, table, strict=True):
        for b, of_b in zip(queries, table, strict=True):
            if entails(a, b):
                proven += a != b
                assert (of_b | ~of_a).all(), (a, b)
    assert proven > 50


def test_entails_knows_places_relations_and_counts() -> None:
    left, right = Pattern(shape=1, column=0), Pattern(shape=2, column=2)
    assert entails(Query((left, right)), Query((Pattern(shape=1), Pattern(shape=2)), "left"))
    assert not entails(Query((left, right)), Query((Pattern(shape=2), Pattern(shape=1)), "left"))
    assert not entails(Query((Pattern(shape=1), right)), Query((Pattern(shape=1), Pattern(shape=2)), "left"))
    assert entails(Query((ANY, ANY, ANY)), Query(count=3))
    assert not entails(Query((ANY, ANY)), Query(count=2))
    assert not entails(Query((ANY,)), Query((ANY, ANY)))


def test_scenes_chains_are_captions_and_fixed() -> None:
    source = open_source("scenes:test?n=9", 32)
    assert isinstance(source, ScenesSource)
    (found,) = source.hierarchies(4)
    assert found == open_source("scenes:test?n=9", 64).hierarchies(4)[0]
    assert len(found) == 4
    assert all(parse(text) for text in found)
    assert source.relevance(found, [4]).all()


def test_scene_parts_grow_from_the_largest_thing() -> None:
    source = open_source("scenes:test?n=60", 48)
    assert isinstance(source, ScenesSource)
    parts = source.image_levels()
    assert parts.levels == 3
    assert len(parts) % 3 == 0
    assert 0 < len(parts) < 180
    stored = complete(read(parts).groups)
    assert stored.tolist() == torch.arange(len(parts)).view(-1, 3).tolist()
    record, last = parts.record(3), parts.record(5)
    group = record.info["group"]
    row = next(row for row in range(60) if source.key(row) == group)
    assert (record.key, record.info["parent"], last.info["parent"]) == (f"{group}-0", None, f"{group}-1")
    np.testing.assert_array_equal(last.image, source.record(row).image)
    drawn = [(np.asarray(parts.record(3 + k).image) != np.asarray(last.image)[0, 0]).any(-1).sum() for k in range(3)]
    assert drawn == sorted(drawn)
    largest = max(map(area, source.scene(row).things))
    assert drawn[0] == pytest.approx(largest / 4, rel=0.2)  # at half the side


def matcher(method: str = "prolip", seed: int = 0) -> Matcher:
    tokenizer = Tokenizer.train(["a red dog", "a blue cat", "green"], vocab=300)
    return Matcher(build(sizes()["debug"], preset(method), seed), tokenizer)


OFFICIAL = ["hierarcaps_precision", "hierarcaps_recall", "hierarcaps_hit", "hierarcaps_order"]
ROOTED = ["precision", "recall", "hit", "root_recall", "root_hit"]


def test_task_on_scenes_whatever_the_batch() -> None:
    model = matcher()
    found = evaluate(model, "hierarchy", "scenes:test?n=23", batch=7)
    assert found == pytest.approx(evaluate(model, "hierarchy", "scenes:test?n=23", batch=64), abs=1e-6)
    expected = [*OFFICIAL, "hierarcaps_true_precision", "hierarcaps_true_recall"]
    for root in ("empty", "inclusive", "mean"):
        expected += [f"traversal_{root}_{name}" for name in (*ROOTED, "true_precision", "true_recall")]
    for kind, levels in (("text", 4), ("image", 3)):
        expected += [f"{kind}_chain_uncertainty@{k}" for k in range(levels)]
        expected += [f"{kind}_chain_uncertainty_spearman", f"{kind}_chain_uncertainty_order"]
        expected += [f"{kind}_inclusion_h@{k}" for k in range(1, levels)]
    expected += ["text_inclusion_inc@2", "text_inclusion_inc@3"]  # level 0 is true of every image
    expected += [f"image_inclusion_whole_h@{k}" for k in range(2)]
    assert set(found) == {*expected, "skipped"}


def test_uncertainty_of_scenes_is_that_of_their_chains() -> None:
    model, source = matcher(), open_source("scenes:test?n=11", 32)
    assert isinstance(source, ScenesSource)
    found = evaluate(model, "hierarchy", source)
    general = model.encode_text([source.hierarchies(row)[0][0] for row in range(11)])
    assert found["text_chain_uncertainty@0"] == pytest.approx(float(general["log_var"].exp().sum(1).mean()))
    parts = SceneParts(source)
    alone = model.encode_image([np_image(parts, row) for row in range(0, len(parts), 3)])
    assert found["image_chain_uncertainty@0"] == pytest.approx(float(alone["log_var"].exp().sum(1).mean()), rel=1e-5)


def np_image(source: SceneParts, row: int):  # type: ignore[no-untyped-def]
    from PIL import Image

    return Image.fromarray(source.record(row).image)


def test_models_without_gaussians_have_one_root(capsys: pytest.CaptureFixture[str]) -> None:
    found = evaluate(matcher("clip"), "hierarchy", "scenes:test?n=9")
    assert "note" not in capsys.readouterr().err
    assert evaluate(matcher("clip"), "hierarchy", "scenes:test?n=9", includes="h") == found
    assert "note: --includes and --eps have no effect" in capsys.readouterr().err
    assert not [name for name in found if "uncertainty" in name or "inclusive" in name or "image" in name]
    assert {f"traversal_empty_{name}" for name in ROOTED} < set(found)
    with pytest.raises(ValueError, match="csd needs a model with uncertainty"):
        evaluate(matcher("clip"), "hierarchy", "scenes:test?n=9", nearest="csd")


def test_scenes_of_one_thing_have_no_image_levels() -> None:
    found = evaluate(matcher(), "hierarchy", "scenes:test?n=9&objects=1")
    assert "text_chain_uncertainty@0" in found
    assert not [name for name in found if name.startswith("image")]


def with_chains(folder: Path, chains: list[object]) -> str:
    members = {}
    for i, found in enumerate(chains):
        info = {"captions": [f"image {i}"]} | ({} if found is None else {"hierarchies": found})
        members |= {f"{i}.png": photo(i), f"{i}.json": json.dumps(info).encode()}
    write_tar(folder / "0.tar", members)
    return str(folder)


def test_chains_of_json_and_rows_that_have_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILOWORD_CACHE", str(tmp_path / "cache"))
    data = with_chains(
        tmp_path / "data",
        [[["dog", " a red dog "]], None, [["cat", ""]], [["dog", "a", "b"]], "dog", [["cat", "a cat"], ["dog", "x"]]],
    )
    stored = read(open_source(data))
    assert stored.chains == {0: [["dog", "a red dog"]], 5: [["cat", "a cat"], ["dog", "x"]]}
    skipped: list[Skipped] = []
    found = evaluate(matcher(), "hierarchy", data, skipped=skipped)
    assert {one.key: one.reason for one in skipped} == {
        "1": "no hierarchies",
        "2": "a chain of hierarchies has an entry that is not a text",
        "3": "a chain of 3 texts, 2 expected",
        "4": "hierarchies is not a list of chains",
    }
    assert found["skipped"] == 4
    assert set(OFFICIAL) < set(found)
    assert "hierarcaps_true_recall" not in found


def test_data_without_levels_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILOWORD_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ValueError, match="has no levels: give each image's json `hierarchies`"):
        evaluate(matcher(), "hierarchy", with_chains(tmp_path / "none", [None, None]))
    with pytest.raises(ValueError, match=r"has no levels \(row 1: hierarchies is not a list"):
        evaluate(matcher(), "hierarchy", with_chains(tmp_path / "bad", [None, "x"]))


def test_verb_writes_numbers_and_a_page(tmp_path: Path) -> None:
    for name in ("prolip", "clip"):
        model = matcher(name)
        save_model(
            tmp_path / name, model.model, model.tokenizer, ModelFile(method=name, settings={}, model=sizes()["debug"])
        )
    models = [str(tmp_path / "prolip"), str(tmp_path / "clip")]
    files = ["--json", str(tmp_path / "a.json"), "--html", str(tmp_path / "a.html")]
    main(["eval", "hierarchy", *models, "--data", "scenes:test?n=9", "--includes", "inc", *files])
    found = json.loads((tmp_path / "a.json").read_text())
    assert set(found) == {"prolip", "clip"}
    html = (tmp_path / "a.html").read_text()
    for said in ("clip, traversal, root empty", "texts: level 1 in level 0", "level of images", "Examples of prolip"):
        assert said in html, said
    assert html.count('class="ladder"') == 16


def test_levels_are_whole_numbers_on_the_page() -> None:
    found = {"a": {f"text_chain_uncertainty@{k}": 3.0 - k for k in range(3)} | {"text_chain_uncertainty_order": 1.0}}
    html = report(found, "scenes", {"a": {}})
    ticks = re.findall(r'text-anchor="middle">([^<]*)<', html)
    assert ticks == ["0", "1", "2"]


def test_no_more_is_held_at_once_than_the_limits_say(monkeypatch: pytest.MonkeyPatch) -> None:
    texts, images, root = gaussians(23), gaussians(40, seed=1), gaussians(1, seed=2)
    held: list[int] = []

    def noted(score: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def noting(*args: Features) -> Tensor:
            out = score(*args)
            held.append(out.numel())
            return out

        return noting

    monkeypatch.setattr(hierarchy_paths, "PANEL", 100)
    radius_paths(noted(cosine), images, texts, radii(texts, root))
    traversals(noted(cosine), images, texts, root["vec"])
    assert max(held) == 4 * 23  # as many images as fit into a panel
    held.clear()
    monkeypatch.setattr(hierarchy_paths, "PAIRS", 600)  # of 6 dimensions
    monkeypatch.setattr(hierarchy_paths, "log_inclusion", noted(log_inclusion))
    most_inclusive(images, texts)
    assert 300 < max(held) <= 600


@pytest.mark.slow
def test_real_chains(shared: Path) -> None:
    found = evaluate(matcher(), "hierarchy", str(shared / "coco_hier" / "dev"))
    assert found["skipped"] == 0
    assert set(OFFICIAL) < set(found)
