"""eval uncertainty: a model that knows the truth is found honest; exact entailment; odd data; the page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kiloword.api import Matcher
from kiloword.config.recipes import sizes
from kiloword.data.open import open_source
from kiloword.data.scenes.captions import parse
from kiloword.data.scenes.query import Query
from kiloword.data.scenes.source import ScenesSource, parse_scenes
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.evaluation import evaluate
from kiloword.evaluation.calibration import spearman
from kiloword.evaluation.uncertainty import TASK
from kiloword.evaluation.uncertainty.data import buckets, different, level
from kiloword.methods.prolip.gaussian import inclusion
from kiloword.methods.registry import preset
from kiloword.models.build import build
from kiloword.types import Features, Record
from tars import photo, write_tar

WORDS = ["a red dog on a big blue background", "a striped cat left of the circle", "two things, there is an image"]


def matcher(method: str = "prolip", seed: int = 0) -> Matcher:
    made = preset(method)
    config = made.shape(sizes()["debug"])
    tokenizer = Tokenizer.train(WORDS, vocab=300)
    model = Matcher(build(config, made, seed), tokenizer)
    with torch.no_grad():  # or all variances would be e^-10 at the start
        for name, value in model.model.named_parameters():
            if name.endswith("log_var.weight"):
                value.normal_(0, 0.3, generator=torch.Generator().manual_seed(seed))
    return model


class Honest(Matcher):
    """Knows of how many scenes every caption is true: that is its variance. Images are more certain than all."""

    def __init__(self, source: ScenesSource) -> None:
        plain = matcher()
        super().__init__(plain.model, plain.tokenizer)
        self.source = source

    def encode_text(self, texts: Sequence[str], batch: int = 256) -> Features:
        count = torch.tensor(self.source.relevance(texts, range(len(self.source))).sum(1))
        found = super().encode_text(texts, batch)
        return {**found, "log_var": (count + 1.0).log()[:, None].expand_as(found["vec"]) - 12}

    def encode_image(self, images: object, batch: int = 64) -> Features:
        found = super().encode_image(images, batch)  # type: ignore[arg-type]
        return {**found, "log_var": torch.full_like(found["vec"], -13)}


def test_a_model_that_knows_the_truth_is_found_honest() -> None:
    source = parse_scenes("scenes:test?n=80&levels=0,1,2,3&captions=3", 32)
    found = evaluate(Honest(source), "uncertainty", source)
    assert found["truth_spearman"] == pytest.approx(1)
    assert found["truth_spearman_level@1"] == found["truth_spearman_level@2"] == pytest.approx(1)
    assert "truth_spearman_level@0" not in found  # true of everything: there is nothing to rank
    assert found["text_uncertainty_level_spearman"] < -0.9
    means = [found[f"text_uncertainty_level@{k}"] for k in range(4)]
    assert means == sorted(means, reverse=True)
    assert (found["text_above_image"], found["image_in_text"], found["text_in_image"]) == (1, 1, 0)
    assert found["inclusion_chain_2_in_1"] == found["inclusion_chain_1_in_0"] == 1
    assert found["text_uncertainty_words_spearman"] < 0
    captions = [c for row in range(80) for c in source.captions(row)]
    assert found["truth_captions"] == len(set(captions))
    assert found["truth_unmatched"] == 0


def test_values_are_those_of_slow_loops() -> None:
    model, source = matcher(), parse_scenes("scenes:test?n=24&levels=0,1,2,3&captions=2", 32)
    found = evaluate(model, "uncertainty", source, batch=7, chunk=5)
    records = [source.record(row) for row in range(24)]
    images = model.encode_image(torch.stack([model._transform(r.image) for r in records]))
    captions = [c for r in records for c in r.captions]
    texts, own = model.encode_text(captions), torch.arange(24).repeat_interleave(2)
    u, v = images["log_var"].double().exp().sum(1), texts["log_var"].double().exp().sum(1)
    assert found["image_uncertainty_mean"] == pytest.approx(float(u.mean()))
    assert found["image_uncertainty_std"] == pytest.approx(float(np.std(u.numpy())), rel=1e-4)
    assert found["text_uncertainty_q95"] == pytest.approx(float(np.percentile(v.numpy(), 95)))
    assert found["text_above_image"] == pytest.approx(float((v > u[own]).double().mean()))
    one = {name: value[own] for name, value in images.items()}
    assert found["image_in_text"] == pytest.approx(float((inclusion(one, texts).sum(1) > 0).double().mean()))
    first = [captions.index(c) for c in dict.fromkeys(captions)]
    assert different(captions) == first
    words = torch.tensor([float(len(captions[i].split())) for i in first])
    assert found["text_uncertainty_words_spearman"] == pytest.approx(spearman(words, v[first]))
    counts = torch.from_numpy(source.relevance([captions[i] for i in first], range(24)).sum(1))
    assert found["truth_spearman"] == pytest.approx(spearman(counts.log(), v[first]))
    scores = model.score(images, texts)
    right = [float(scores[:, t].argmax() == own[t]) for t in range(48)]
    bins = np.array_split(v.argsort().numpy(), 10)
    expected = [np.mean([right[t] for t in part]) for part in bins]
    assert [found[f"calibration_text_right@{k}"] for k in range(1, 11)] == pytest.approx(expected)


def query(caption: str) -> Query:
    found = parse(caption)
    assert found is not None
    return found


class Foreign(ScenesSource):
    """Scenes with captions of others."""

    def record(self, row: int) -> Record:
        output = parse_scenes("scenes:val?n=30&levels=1,2,3&captions=2").captions(row)
        return replace(super().record(row), captions=output)


def test_captions_true_of_nothing_are_skipped_and_counted() -> None:
    source = Foreign(parse_scenes("scenes:test?n=30", 32).settings, "foreign")
    found = evaluate(matcher(), "uncertainty", source)
    captions = sorted({c for row in range(30) for c in source.record(row).captions})
    true = source.relevance(captions, range(30)).any(1)
    assert 0 < (~true).sum() == found["truth_unmatched"]
    assert found["truth_captions"] == true.sum()


def test_levels_by_words_are_those_that_were_drawn() -> None:
    source = parse_scenes("scenes:test?n=150&levels=0,1,2,3&captions=5")
    for row in range(150):
        record = source.record(row)
        assert [level(query(c)) for c in record.captions] == record.info["levels"]


def sample(n: int, captions: Sequence[str] = (), label: int | None = None, **info: object) -> dict[str, bytes]:
    members = {f"{n:03d}.png": photo(n), f"{n:03d}.json": json.dumps({"captions": list(captions), **info}).encode()}
    return members if label is None else {**members, f"{n:03d}.cls": str(label).encode()}


def tar(path: Path, samples: Sequence[dict[str, bytes]], classes: Sequence[str] = ()) -> str:
    write_tar(path / "0.tar", [item for members in samples for item in members.items()])
    if classes:
        (path / "classnames.txt").write_text("\n".join(classes))
    return str(path)


def test_hierarchies_of_json(tmp_path: Path) -> None:
    chain = lambda n: ["thing", f"animal {n % 2}", f"a cat {n}", f"a big cat {n} on the mat"]  # noqa: E731
    data = tar(tmp_path, [sample(n, [f"one {n}", f"two words {n}"], hierarchies=[chain(n)]) for n in range(12)])
    model = matcher()
    found = evaluate(model, "uncertainty", data)
    uncertainties = {t: float(model.encode_text([t])["log_var"].exp().sum()) for n in range(12) for t in chain(n)}
    assert found["text_uncertainty_level@0"] == pytest.approx(uncertainties["thing"], rel=1e-4)
    assert found["text_uncertainty_level@1"] == pytest.approx(
        (uncertainties["animal 0"] + uncertainties["animal 1"]) / 2, rel=1e-4
    )
    assert {"inclusion_chain_3_in_2", "inclusion_reverse", "inclusion_unrelated_overlap"} <= set(found)
    assert not any(name.startswith("truth") for name in found)


def test_class_data_with_missing_labels_and_no_captions(tmp_path: Path) -> None:
    labels = [n % 3 if n % 4 else None for n in range(16)]
    data = tar(tmp_path, [sample(n, label=label) for n, label in enumerate(labels)], ["red", "green", "blue"])
    found = evaluate(matcher(), "uncertainty", data)
    assert not any(name.startswith(("text", "calibration_text", "calibration_image")) for name in found)
    assert sum(name.startswith("calibration_zeroshot_right@") for name in found) == 10
    model = matcher()
    accuracy = evaluate(model, "zeroshot", data)["acc1"]
    source = open_source(data, 32)
    images = model.encode_image(torch.stack([model._transform(source.record(n).image) for n in range(16) if n % 4]))
    order = images["log_var"].exp().sum(1).argsort()
    sizes_ = [len(part) for part in np.array_split(order.numpy(), 10)]
    mean = np.average([found[f"calibration_zeroshot_right@{k}"] for k in range(1, 11)], weights=sizes_)
    assert mean == pytest.approx(accuracy)


def test_labels_beyond_the_classes_are_refused(tmp_path: Path) -> None:
    data = tar(tmp_path, [sample(n, label=5) for n in range(3)], ["red", "green"])
    with pytest.raises(ValueError, match="labels run from 5 to 5, but there are 2 classes"):
        evaluate(matcher(), "uncertainty", data)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_few_images(tmp_path: Path, n: int) -> None:
    shown: dict[str, object] = {}
    found = evaluate(matcher(), "uncertainty", tar(tmp_path, [sample(i, [f"{i}"]) for i in range(n)]), shown=shown)
    assert sum(name.startswith("calibration_text_right@") for name in found) == n
    assert found["skipped"] == 0
    assert all(np.isfinite(value) for value in found.values())
    assert shown["plane"] is not None


def test_several_captions_and_none(tmp_path: Path) -> None:
    captions = [["a", "b", "c"], [], ["d"], [], ["a", "e"], ["f"]]
    found = evaluate(matcher(), "uncertainty", tar(tmp_path, [sample(i, c) for i, c in enumerate(captions)]))
    retrieval = evaluate(matcher(), "retrieval", str(tmp_path))
    rights = [found[f"calibration_image_right@{k}"] for k in range(1, 5)]
    assert np.mean(rights) == pytest.approx(retrieval["text_retrieval_recall@1"])
    texts = [found[f"calibration_text_right@{k}"] for k in range(1, 8)]
    assert np.mean(texts) == pytest.approx(retrieval["image_retrieval_recall@1"])


def test_llip_with_gaussians_is_judged_by_its_score() -> None:
    model, source = matcher("llip+gaussian"), parse_scenes("scenes:test?n=30", 32)
    found = evaluate(model, "uncertainty", source)
    recall = evaluate(model, "retrieval", source)
    mean = np.mean([found[f"calibration_text_right@{k}"] for k in range(1, 11)])
    assert mean == pytest.approx(recall["image_retrieval_recall@1"])


def test_a_model_without_gaussians_is_refused() -> None:
    made = preset("siglip")
    plain = Matcher(build(sizes()["debug"], made, 0), Tokenizer.train(WORDS, vocab=300))
    with pytest.raises(ValueError, match="no uncertainty to evaluate: train one with"):
        evaluate(plain, "uncertainty", "scenes:test?n=4")


def test_broken_variances_are_refused() -> None:
    model = matcher()
    with torch.no_grad():
        model.model.head.uncertainty.image_log_var.bias.fill_(1000)  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="variances are not finite"):
        evaluate(model, "uncertainty", "scenes:test?n=4")


def test_buckets_hold_every_length_once() -> None:
    words = torch.arange(60)
    found = buckets(words)
    assert torch.stack([inside for _, inside in found]).sum(0).tolist() == [1] * 60
    assert [name for name, _ in found] == ["0-5", "6-10", "11-15", "16-20", "21-30", "31+"]
    assert [words[inside].max().item() for _, inside in found] == [5, 10, 15, 20, 30, 59]


def test_the_screen_hides_bins() -> None:
    assert TASK.prints("text_uncertainty_mean")
    assert TASK.prints("calibration_text_pearson")
    hidden = ["calibration_text_right@3", "calibration_image_uncertainty@1", "text_uncertainty_q25"]
    assert not any(map(TASK.prints, hidden))
