"""Zero-shot classification against literal references and scikit-learn, by groups, its page; names of classes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import kiloword
from class_data import wnids
from kiloword.api import Matcher
from kiloword.cli.main import main
from kiloword.data.classes.names import classnames, prompts, templates
from kiloword.data.open import open_source
from kiloword.evaluation import evaluate
from kiloword.evaluation.features import OTHER, classes_of
from kiloword.evaluation.tasks import PromptOptions, ZeroshotTaskOptions
from kiloword.evaluation.zeroshot import figures
from kiloword.report.blocks import Block, Gallery, Matrix
from kiloword.types import LabelSet, Record, Skipped
from tars import photo, write_tar

PAIRS = ["ripe apple", "cut apple", "ripe pear", "old car", "cut pear", "new car"]
Infos = list[dict[str, Any]]


def scored(seed: int, images: int, classes: int) -> tuple[Tensor, Tensor]:
    """Scores [N, C] that are right more often than by chance, and labels [N] that miss the last class."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes - 1, (images,), generator=g)
    return torch.randn(images, classes, generator=g) + torch.nn.functional.one_hot(labels, classes), labels


def judged(scores: Tensor, labels: Tensor, infos: Infos = [], **options: Any) -> dict[str, float]:  # noqa: B006
    names = PAIRS if scores.shape[1] == len(PAIRS) else [*"abcdefghijka"]
    return dict(figures(scores, labels, ZeroshotTaskOptions(**options), names, infos))


def test_figures_by_hand() -> None:
    """Classes without an image do not count, ties are shared, and acc5 needs five classes."""
    scores = torch.tensor([[3.0, 2, 1], [3, 2, 1], [3, 2, 1], [1, 1, 0]])
    labels = torch.tensor([0, 0, 1, 1])
    assert dict(figures(scores, labels)) == {"acc1": (1 + 1 + 0 + 0.5) / 4, "mean_per_class_recall": (1 + 0.25) / 2}
    scores, labels = scored(0, 70, 9)
    right = (scores.argsort(1, descending=True)[:, :5] == labels[:, None]).double()
    assert dict(figures(scores, labels)) == {
        "acc1": pytest.approx(right[:, 0].mean().item()),
        "acc5": pytest.approx(right.sum(1).mean().item()),
        "mean_per_class_recall": pytest.approx(np.mean([right[labels == c, 0].mean() for c in range(8)])),
    }
    targets = torch.tensor([[1, 0]] * 5)  # the precision of a class without images is 0
    assert dict(figures(torch.rand(5, 2), targets))["mean_average_precision"] == 0.5


def test_prompts_of_classes() -> None:
    assert prompts(["cat", "dog"], ["a {c}", "{c}!"]) == (["a cat", "cat!", "a dog", "dog!"], [0, 0, 1, 1])
    own = {"cat": ["a feline"], "dog": ["a hound", "{c}"]}
    assert prompts(["dog", "cat"], own) == (["a hound", "{c}", "a feline"], [0, 0, 1])
    wrong: list[Any] = [(["cat", "cow"], own), (["cat"], ["a photo"]), (["cat"], "a"), ([], ["a {c}"])]
    for names, written in [*wrong, ("cat", ["{c}"]), ([1, 2], ["{c}"])]:
        with pytest.raises(ValueError):
            prompts(names, written)


def test_accuracy_by_group_is_that_of_the_group_alone() -> None:
    scores, labels = scored(1, 200, 12)
    regions, incomes = ["Africa", "Asia", "Other"], ["low", "high"]
    infos: Infos = [{"place": {"region": regions[n % 3]}, "income": [incomes[n % 2], n]} for n in range(200)]
    infos[7] = {"income": []}
    found = judged(scores, labels, infos, group_by=("place.region", "income.0"))
    order = scores.argsort(1, descending=True)
    for k, name in ((1, "acc"), (5, "acc_top5")):
        right = (order[:, :k] == labels[:, None]).any(1).double()
        worst = {}
        for field, values in (("place.region", regions), ("income.0", incomes)):
            for place, value in enumerate(values):
                rows = [n for n in range(200) if n != 7 and n % len(values) == place]
                expected = right[rows].mean().item()
                assert found[f"{name}_{field}:{value}"] == pytest.approx(expected)
                assert found[f"count_{field}:{value}"] == len(rows)
                if value != "Other":
                    worst[field] = min(worst.get(field, 1.0), expected)
        assert {field: found[f"{name}_worst_{field}"] for field in worst} == pytest.approx(worst)
        assert found[f"{name}_wg"] == pytest.approx(min(worst.values()))
    elsewhere: Infos = [{"npy": [n % 3, n]} if n % 2 else {"region": str(n % 3)} for n in range(200)]
    expected_values = judged(scores, labels, [{"region": n % 3} for n in range(200)], group_by=("region",))
    assert judged(scores, labels, elsewhere, group_by=("region=npy.0",)) == expected_values


def test_f1_is_scikit_learns() -> None:
    """As WILDS calls it: over the classes that occur; each of equal scores counts in part."""
    sklearn = pytest.importorskip("sklearn.metrics", reason="needs scikit-learn")
    scores, labels = scored(2, 100, 12)
    expected = sklearn.f1_score(labels, scores.argmax(1), average="macro", labels=labels.unique())
    assert judged(scores, labels, macro_f1=True)["F1-macro_all"] == pytest.approx(expected)
    constant = judged(torch.zeros(100, 12), labels, macro_f1=True)["F1-macro_all"]
    counts = torch.bincount(labels).double()  # each class is predicted for a twelfth of the images
    assert constant == pytest.approx((2 * counts / 12 / (counts + 100 / 12)).mean().item())


def test_parts_of_names_are_right_where_the_prediction_shares_them() -> None:
    scores, labels = scored(3, 90, len(PAIRS))
    words = [[PAIRS[n].split() for n in column] for column in (scores.argmax(1).tolist(), labels.tolist())]
    found = judged(scores, labels, attributes=True)
    for n, part in enumerate(("attribute", "object")):
        expected = float(np.mean([a[n] == b[n] for a, b in zip(*words, strict=True)]))
        assert found[f"{part}_acc1"] == pytest.approx(expected)


def test_images_with_several_classes() -> None:
    """Any of them is right, as in MetaCLIP's evaluation of Dollar Street; the precision of each class."""
    sklearn = pytest.importorskip("sklearn.metrics", reason="needs scikit-learn")
    scores, _ = scored(4, 80, 12)
    targets = (torch.rand(80, 12, generator=torch.Generator().manual_seed(4)) < 0.2).long()
    targets[:, 0] = 1
    found = judged(scores, targets, [{"region": "all"}] * 80, any_label=True, group_by=("region",))
    order = scores.argsort(1, descending=True)
    for k, name in ((1, "acc"), (5, "acc_top5")):
        expected = targets.gather(1, order[:, :k]).any(1).double().mean().item()
        assert found[f"{name}_region:all"] == found[f"acc{k}"] == pytest.approx(expected)
    assert "acc1" not in judged(scores, targets)
    each = [sklearn.average_precision_score(targets[:, c], scores[:, c]) for c in range(12)]
    names = [*"abcdefghijk", "a (11)"]
    assert [found[f"average_precision@{name}"] for name in names] == pytest.approx(each)
    assert found["mean_average_precision"] == pytest.approx(float(np.mean(each)))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tar of 12 images of 6 classes whose json has a region."""
    folder, members = tmp_path_factory.mktemp("data"), {}
    for n in range(12):
        info = json.dumps({"region": ["north", "south"][n % 2], "id": n}).encode()
        members |= {f"{n:02d}.png": photo(n), f"{n:02d}.cls": str(n % 6).encode(), f"{n:02d}.json": info}
    write_tar(folder / "0.tar", members)
    (folder / "classnames.txt").write_text("\n".join(PAIRS))
    return folder


def test_a_data_set_and_its_page(
    folder_of: Callable[[str], Path], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The confusions are those of the model."""
    model = folder_of("prolip")
    page, out = tmp_path / "page.html", tmp_path / "values.json"
    flags = ("--group-by", "region", "--macro-f1", "--attributes", "--html", str(page), "--json", str(out))
    main(["eval", "zeroshot", str(model), "--data", str(data), *flags])
    values = json.loads(out.read_text())
    assert values["count_region:north"] == values["count_region:south"] == 6
    by_region = [values["acc_region:north"], values["acc_region:south"]]
    assert values["acc_wg"] == values["acc_worst_region"] == min(by_region)
    assert sum(by_region) / 2 == pytest.approx(values["acc1"])
    assert values["object_acc1"] >= values["acc1"]
    output = capsys.readouterr().out
    assert "acc_region:north" in output
    assert "count_region" not in output
    assert all(text in page.read_text() for text in (f"{by_region[1]:.4f}", "ripe apple", "<img"))
    blocks = list[Block]()
    found = evaluate(kiloword.load(model), "zeroshot", str(data), prompts="topk", group_by=("region",), blocks=blocks)
    assert {"kept", "acc_wg", "ensemble_acc1"} < found.keys()
    matrix, gallery = blocks
    assert isinstance(matrix, Matrix)
    assert np.trace(matrix.values) == pytest.approx(12 * found["acc1"])
    assert np.asarray(matrix.values).sum(1).tolist() == [2] * 6
    assert isinstance(gallery, Gallery)
    assert len(gallery.tiles) == 12 - np.trace(matrix.values)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"group_by": ("regoin",)}, "regoin"),
        ({"group_by": ("country=npy.2",)}, "country=npy.2"),
        ({"attributes": True, "classnames": ["a b", "c", *"defg"]}, "attribute object"),
        ({"prompts": "bprw", "prompt_options": PromptOptions(shots=2)}, "at least one more"),
    ],
)
def test_refusals(matcher_of: Callable[[str], Matcher], data: Path, options: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        evaluate(matcher_of("prolip"), "zeroshot", str(data), **options)
    with pytest.raises(ValueError, match="one class per image"):
        judged(torch.zeros(2, 12), torch.ones(2, 12), macro_f1=True)


# Class names and templates that the user chooses, and how they are matched with the classes of the data


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
    each = [value for name, value in values.items() if name.startswith("average_precision@")]
    assert (len(each), np.mean(each), values["skipped"]) == (4, pytest.approx(values["mean_average_precision"]), 1)
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
