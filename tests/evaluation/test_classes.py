"""Class names and templates that the user chooses, and how they are matched with the classes of the data."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from class_data import FORMS, drawn
from kiloword.api import Matcher
from kiloword.cli.main import main
from kiloword.data.classes.names import classnames, templates, wnids
from kiloword.data.open import open_source
from kiloword.evaluation import evaluate, metrics
from kiloword.evaluation.features import OTHER, classes_of
from kiloword.types import LabelSet, Record, Skipped


@dataclass
class Photos:
    """12 images of noise with labels and class names."""

    labels: list[int | LabelSet | None]
    classnames: list[str] | None = None
    name: str = "photos"
    fingerprint: str = "photos-v1"

    def __len__(self) -> int:
        return len(self.labels)

    def record(self, row: int) -> Record:
        pixels = np.random.default_rng(row).integers(0, 256, (32, 32, 3), np.uint8)
        return Record(f"k{row}", pixels, [], self.labels[row])


LABELS: list[int | LabelSet | None] = [0, 0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 3]  # as many of no two classes
NAMES = ["dog", "cat", "red circle", "blue star"]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_class_data_gives_equal_figures(matcher: Matcher, form: str, tmp_path: Path) -> None:
    """Those of the images that are in no file."""
    source = "scenes:test?task=count&n=40"
    expected = evaluate(matcher, "zeroshot", source, templates="a photo of {}")
    stored = FORMS[form](tmp_path, *drawn(source))
    assert evaluate(matcher, "zeroshot", stored, templates="a photo of {}") == pytest.approx(expected)
    assert 0 < expected["acc1"] < 1


def test_names_in_another_order_are_matched_by_name(matcher: Matcher) -> None:
    source = Photos(LABELS, NAMES)
    expected = evaluate(matcher, "zeroshot", source)
    shuffled = evaluate(matcher, "zeroshot", source, classnames=["red circle", "cat", "blue star", "dog"])
    assert shuffled == expected
    renamed = evaluate(matcher, "zeroshot", Photos(LABELS), classnames=NAMES)
    with pytest.raises(ValueError, match="classnames"):
        evaluate(matcher, "zeroshot", Photos(LABELS))
    assert renamed == expected == evaluate(matcher, "zeroshot", Photos(LABELS, ["a", "b", "c", "d"]), classnames=NAMES)


def test_a_subset_of_the_names_scores_only_its_classes(matcher: Matcher) -> None:
    skipped: list[Skipped] = []
    subset = evaluate(matcher, "zeroshot", Photos(LABELS, NAMES), classnames=["blue star", "cat"], skipped=skipped)
    two: list[int | LabelSet | None] = [None] * 6 + [1, 1, 1, None, None, 0]
    unlabelled: list[Skipped] = []
    alone = evaluate(matcher, "zeroshot", Photos(two, ["blue star", "cat"]), skipped=unlabelled)
    assert (subset, {s.row for s in unlabelled}) == (alone, {s.row for s in skipped})
    assert {s.row for s in skipped} == {0, 1, 2, 3, 4, 5, 9, 10}


def test_imagenet_labels_score_over_a_subset() -> None:
    names, ids = classnames("imagenet1k"), wnids()
    for subset in ("imagenet-a", "imagenet-r"):
        classes: Any = classes_of(Photos(LABELS, names), subset)
        places = {wnid: place for wnid, place in zip(ids, classes.place.tolist(), strict=True) if place != OTHER}
        assert places == {wnid: place for place, wnid in enumerate(wnids(subset))}
    whole: Any = classes_of(Photos(LABELS, classnames("imagenet-a")), "imagenet1k")
    assert whole.place.tolist() == [ids.index(wnid) for wnid in wnids("imagenet-a")]


def test_several_classes_an_image_give_mean_average_precision(matcher: Matcher) -> None:
    sets = [(0, 2), (1,), (), (3, 1, 0), (2,), (3,), (0, 1, 2, 3), (2, 3)]
    source = Photos([LabelSet(indices, 4) for indices in sets] + [None], NAMES)
    values = evaluate(matcher, "zeroshot", source)
    targets = torch.tensor([[c in indices for c in range(4)] for indices in sets])
    images = matcher.encode_image([source.record(row).image for row in range(8)])
    scores = matcher.score(images, matcher.class_features(NAMES, ["{c}"]))
    expected = metrics.average_precision(scores.T, targets.T.bool()).mean().item()
    assert values["mean_average_precision"] == pytest.approx(expected, abs=1e-9)
    assert values["skipped"] == 1
    assert sum(name.startswith("average_precision@") for name in values) == 4
    shuffled = evaluate(matcher, "zeroshot", source, classnames=["blue star", "cat", "dog", "red circle"])
    assert shuffled["mean_average_precision"] == pytest.approx(values["mean_average_precision"], abs=1e-9)
    with pytest.raises(ValueError, match="one class"):
        evaluate(matcher, "probe", source, train=replace(source, fingerprint="photos-v2"))


@pytest.mark.parametrize(
    ("labels", "names", "word"),
    [
        (LABELS, ["dog", "cat", "bird"], "3 .* photos has 4 .* dog, cat"),
        (LABELS, ["cat", "dog", "bird", "cow"], "photos has 4"),
        ([0, 7], None, "0 to 7.* 4"),
        ([LabelSet((1, 4))], None, "1 to 4.* 4"),
        ([LabelSet((1,), 5)], None, "k0 .* 5 classes, not of 4"),
        ([LabelSet((1,), 4), 2], None, "k1"),
        ([0, *[LabelSet((1,))] * 64], None, "lists?"),  # in two batches
        (LABELS, "cifar", "cifar10"),
        (LABELS, "cifar10", "10 .* photos has 4"),
        ([None, None], None, "no class labels"),
    ],
)
def test_names_that_do_not_fit_are_refused(
    matcher: Matcher, labels: list[int | LabelSet | None], names: list[str] | str | None, word: str
) -> None:
    with pytest.raises(ValueError, match=word):
        evaluate(matcher, "zeroshot", Photos(labels, NAMES), classnames=names)


def test_templates_come_from_the_flag_the_data_or_the_named_set(matcher: Matcher) -> None:
    labels: list[int | LabelSet | None] = [n % 10 for n in range(30)]
    source, names = Photos(labels), classnames("cifar10")
    by_name = evaluate(matcher, "zeroshot", source, classnames="cifar10")
    assert by_name == evaluate(matcher, "zeroshot", source, classnames=names, templates=templates("cifar10"))
    plain = evaluate(matcher, "zeroshot", source, classnames=names)
    assert plain == evaluate(matcher, "zeroshot", source, classnames="cifar10", templates="{}")
    assert plain != by_name


def test_the_command_line_takes_files_and_names(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = open_source("scenes:test?task=colour&n=20").classnames  # type: ignore[attr-defined]
    (tmp_path / "names.txt").write_text("\n".join(reversed(names)))
    call, figures = ["eval", "zeroshot", str(folder), "--data", "scenes:test?task=colour&n=20"], []
    for flags in (["a {c} thing"], ["a {} thing", "--classnames", str(tmp_path / "names.txt")]):
        main([*call, "--templates", *flags, "--json", str(tmp_path / "json")])
        figures.append(json.loads((tmp_path / "json").read_text()))
    assert figures[0] == figures[1]
    assert figures[0]["model"] == str(folder)
    with pytest.raises(SystemExit) as error:
        main([*call, "--templates", "a photo"])
    assert error.value.code == 2
    assert "{c}" in capsys.readouterr().err


def test_a_probe_matches_the_names_of_its_splits(matcher: Matcher) -> None:
    test = Photos([0, 0, 1, 1], ["cat", "dog"])  # lacks a class of the training data
    train = Photos([n % 3 for n in range(12)], ["bird", "cat", "dog"], "train", "train-v1")
    skipped: list[Skipped] = []
    two = evaluate(matcher, "probe", test, train=train, classnames=["cat", "dog"], skipped=skipped)
    assert two["train_rows"] == 8
    assert {s.row for s in skipped} == {0, 3, 6, 9}
    three = evaluate(matcher, "probe", test, train=train, classnames=["bird", "cat", "dog"])
    moved = replace(test, labels=[1, 1, 2, 2], classnames=train.classnames)
    assert three == evaluate(matcher, "probe", moved, train=train)
