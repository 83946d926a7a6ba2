"""The task uncertainty: values by slow loops; entailment; odd data."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from kiloword.api import Matcher
from kiloword.config.recipes import sizes
from kiloword.data.scenes.captions import parse
from kiloword.data.scenes.query import Pattern, Query, follows
from kiloword.data.scenes.source import parse_scenes
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.evaluation import evaluate, find
from kiloword.evaluation.metrics import spearman
from kiloword.evaluation.task import Inputs
from kiloword.evaluation.uncertainty import buckets, chain_pairs, inclusion_tests, level, of_truth
from kiloword.methods.prolip.gaussian import inclusion
from kiloword.methods.registry import preset
from kiloword.models.build import build
from kiloword.randomness import key
from kiloword.report import Block, Gallery, Page, write_page
from tars import photo, write_tar

WORDS = ["a red dog on a big blue background", "a striped cat left of the circle", "two things, there is an image"]


def matcher(method: str = "prolip", seed: int = 0) -> Matcher:
    made = preset(method)
    model = Matcher(build(made.shape(sizes()["debug"]), made, seed), Tokenizer.train(WORDS, vocab=300))
    with torch.no_grad():  # or all variances would be e^-10 at the start
        for name, value in model.model.named_parameters():
            if name.endswith("log_var.weight"):
                value.normal_(0, 0.3, generator=torch.Generator().manual_seed(seed))
    return model


def test_values_are_those_of_slow_loops() -> None:
    model, source = matcher(), parse_scenes("scenes:test?n=24&levels=0,1,2,3&captions=2", 32)
    found = evaluate(model, "uncertainty", source, batch=7)
    records = [source.record(row) for row in range(24)]
    images = model.encode_image([r.image for r in records])
    captions = [c for r in records for c in r.captions]
    texts, own = model.encode_text(captions), torch.arange(24).repeat_interleave(2)
    u, v = images["log_var"].double().exp().sum(1), texts["log_var"].double().exp().sum(1)
    assert found["image_uncertainty_mean"] == pytest.approx(float(u.mean()))
    assert found["image_uncertainty_std"] == pytest.approx(float(np.std(u.numpy())), rel=1e-4)
    assert found["text_uncertainty_q95"] == pytest.approx(float(np.percentile(v.numpy(), 95)))
    assert found["text_above_image"] == pytest.approx(float((v > u[own]).double().mean()))
    one = {name: value[own] for name, value in images.items()}
    h = inclusion(one, texts).sum(1)
    assert found["image_in_text"] == pytest.approx(float((h > 0).double().mean()))
    assert found["text_in_image"] == pytest.approx(float((h < 0).double().mean()))
    first = [captions.index(c) for c in dict.fromkeys(captions)]
    words = torch.tensor([float(len(captions[i].split())) for i in first])
    assert found["text_uncertainty_words_spearman"] == pytest.approx(spearman(words, v[first]))
    counts = torch.from_numpy(source.relevance([captions[i] for i in first], range(24)).sum(1))
    assert found["truth_spearman"] == pytest.approx(spearman(counts.log(), v[first]))
    levels = torch.tensor([level(query) for i in first if (query := parse(captions[i])) is not None])
    assert found["text_uncertainty_level_spearman"] == pytest.approx(spearman(levels.double(), v[first]))
    for k in (1, 2):
        here = (levels == k) & (counts > 0)
        assert found[f"truth_spearman_level@{k}"] == pytest.approx(spearman(counts[here], v[first][here]))
        assert found[f"text_uncertainty_level@{k}"] == pytest.approx(float(v[first][levels == k].mean()))
    assert "truth_spearman_level@0" not in found  # true of everything: there is nothing to rank
    few = dict(of_truth(source, [captions[i] for i in first], range(3), v[first], torch.tensor([])))
    counts = torch.from_numpy(source.relevance([captions[i] for i in first], range(3)).sum(1))
    assert (few["truth_captions"], few["truth_unmatched"]) == ((counts > 0).sum(), (counts == 0).sum())
    assert few["truth_spearman"] == pytest.approx(spearman(counts[counts > 0], v[first][counts > 0]))
    assert few["truth_unmatched"] > 0
    scores = model.score(images, texts)
    right = [float(scores[:, t].argmax() == own[t]) for t in range(48)]
    expected = [np.mean([right[t] for t in part]) for part in np.array_split(v.argsort().numpy(), 10)]
    assert [found[f"calibration_text_right@{k}"] for k in range(1, 11)] == pytest.approx(expected)


def test_levels_by_words_are_those_that_were_drawn() -> None:
    source = parse_scenes("scenes:test?n=150&levels=0,1,2,3&captions=5")
    for row in range(150):
        record = source.record(row)
        queries = [query for caption in record.captions if (query := parse(caption)) is not None]
        assert [level(query) for query in queries] == record.info["levels"]
    one = Pattern(shape=1)
    by_hand = [Query(), Query((one,)), Query(count=1), Query((one,), count=1), Query((one, one), "left")]
    by_hand += [Query((one,), background=1), Query(background=2), Query((Pattern(*range(6)),))]
    assert [level(query) for query in by_hand] == [0, 1, 1, 2, 2, 2, 1, 3]


def test_pairs_of_scenes_and_their_truth() -> None:
    """Accuracies against the model's own answers, pair by pair; the overlap is chosen on every other chain."""
    source, model = parse_scenes("scenes:test?n=12", 32), matcher()
    chains = [(row, chain) for row in range(12) for chain in source.hierarchies(row)]
    pairs = chain_pairs([chains[n] for n in np.random.Generator(np.random.Philox(key("chains", 12))).permutation(12)])
    count = {f"chain_{k}_in_{k - 1}": 12 for k in (1, 2, 3)} | {"reverse": 36, "unrelated": 36}
    assert Counter(name for name, _, _ in pairs) == count
    found, held = dict(inclusion_tests(Inputs(model, source), chains)), []
    for kind in (*count, "chain"):
        some = [(pair, n) for name, pair, n in pairs if name.startswith(kind)]
        truth = torch.tensor([follows(*map(parse, pair)) for pair, _ in some])  # type: ignore[arg-type]
        assert truth.all() or not kind.startswith("chain")
        a, b = (model.encode_text([pair[side] for pair, _ in some]) for side in (0, 1))
        right = (model.inclusion(a, b).diagonal() > 0) == truth
        assert found[f"inclusion_{kind}"] == pytest.approx(float(right.double().mean()))
        right = model.includes(a, b, overlap=found["inclusion_overlap"]).diagonal() == truth
        rest = torch.tensor([n % 2 == 1 for _, n in some])
        assert found[f"inclusion_{kind}_overlap"] == pytest.approx(float(right[rest].double().mean()))
        if kind in ("chain", "unrelated"):
            overlaps = (found["inclusion_overlap"], *np.arange(0, 5, 0.05).tolist())
            right_at = [model.includes(a, b, overlap=overlap).diagonal() == truth for overlap in overlaps]
            held.append(torch.stack([right[~rest].sum() for right in right_at]))
        assert kind != "unrelated" or found["inclusion_unrelated_true"] == pytest.approx(float(truth.double().mean()))
    assert torch.stack(held).sum(0).argmax() == 0  # no other overlap is right more often


def tar(path: Path, captions: Sequence[Sequence[str]], chains: Sequence[object] = ()) -> str:
    members = {}
    for n, of_image in enumerate(captions):
        info = {"captions": list(of_image)} | ({"hierarchies": [chains[n]]} if chains else {})
        members |= {f"{n:03d}.png": photo(n), f"{n:03d}.json": json.dumps(info).encode()}
    write_tar(path / "0.tar", members)
    return str(path)


def test_chains_of_json_are_the_truth(tmp_path: Path) -> None:
    chains = [["animal", "dog", "a big dog"], ["animal", "cat", "a cat"], ["cat", "cat", "a cat"]]
    pairs = chain_pairs(list(enumerate(chains)))
    assert sum(name.startswith("chain_") for name, _, _ in pairs) == 5
    assert [pair for name, pair, _ in pairs if name == "unrelated"][:2] == [("a big dog", "cat"), ("dog", "animal")]
    assert not any(name == "unrelated" for name, _, _ in chain_pairs([(0, chains[0])]))
    model = matcher()
    found = evaluate(model, "uncertainty", tar(tmp_path, [["one"], ["two"], ["three"]], chains))
    known = {("dog", "animal"), ("cat", "animal"), ("a cat", "cat"), ("a big dog", "dog"), ("cat", "cat")}
    drawn = np.random.Generator(np.random.Philox(key("chains", 3))).permutation(3)
    unrelated = [pair in known for name, pair, _ in chain_pairs([(n, chains[n]) for n in drawn]) if name == "unrelated"]
    assert found["inclusion_unrelated_true"] == pytest.approx(np.mean(unrelated))
    animal, dog, cat = model.uncertainty(model.encode_text(["animal", "dog", "cat"])).tolist()
    assert found["text_uncertainty_level@0"] == pytest.approx((animal + cat) / 2, rel=1e-4)
    assert found["text_uncertainty_level@1"] == pytest.approx((dog + cat) / 2, rel=1e-4)
    assert not any(name.startswith("truth") for name in found)


@pytest.mark.parametrize(
    "captions", [[["0"]], [["0"], ["1"]], [[str(n)] for n in range(5)], [["a", "b", "c"], [], ["d"], ["a", "e"], ["f"]]]
)
def test_few_images_with_several_captions_and_none(tmp_path: Path, captions: list[list[str]]) -> None:
    """Of Llip with Gaussians, judged by its score."""
    model, data = matcher("llip+gaussian" if len(captions) == 5 else "prolip"), tar(tmp_path, captions)
    found, retrieval = evaluate(model, "uncertainty", data), evaluate(model, "retrieval", data)
    assert all(np.isfinite(value) for value in found.values())
    assert found["skipped"] == sum(not each for each in captions)
    for kind, metric in (("image", "text_retrieval_recall@1"), ("text", "image_retrieval_recall@1")):
        rights = [value for name, value in found.items() if name.startswith(f"calibration_{kind}_right@")]
        assert len(rights) == sum(len(each) if kind == "text" else bool(each) for each in captions)
        assert np.mean(rights) == pytest.approx(retrieval[metric])


def test_refusals() -> None:
    broken = matcher()
    with torch.no_grad():
        broken.model.head.uncertainty.image_log_var.bias.fill_(1000)  # type: ignore[union-attr]
    for model, word in ((matcher("siglip"), "variance"), (broken, "-inf")):
        with pytest.raises(ValueError, match=word):
            evaluate(model, "uncertainty", "scenes:test?n=4")


def test_buckets_hold_every_length_once_and_the_screen_hides_bins() -> None:
    words = torch.arange(60)
    found = dict(buckets(words))
    assert torch.stack(list(found.values())).sum(0).tolist() == [1] * 60
    ends = {name: words[inside].max().item() for name, inside in found.items()}
    assert ends == {"0-5": 5, "6-10": 10, "11-15": 15, "16-20": 20, "21-30": 30, "31+": 59}
    names = ["text_uncertainty_mean", "calibration_text_pearson", "calibration_text_right@3", "text_uncertainty_q25"]
    assert [find("uncertainty").prints(name) for name in names] == [True, True, False, False]


def test_the_page_shows_pairs_of_the_corners(tmp_path: Path) -> None:
    blocks: list[Block] = []
    found = evaluate(matcher(), "uncertainty", "scenes:test?n=20&levels=0,1,2,3&captions=2", blocks=blocks)
    tiles = {one.title: one.tiles[0] for one in blocks if isinstance(one, Gallery)}
    low, high = (float(tiles[f"Image {side}, text {side}"].lines[1].split()[-1]) for side in ("certain", "uncertain"))
    assert low < found["text_uncertainty_q50"] < high  # variances of the texts
    write_page(tmp_path / "u.html", Page("Uncertain", "", {"a": blocks}))
    assert all(text in (tmp_path / "u.html").read_text(encoding="utf-8") for text in ("6-10", "CSD"))
