"""Zero-shot classification: against dense and literal references and scikit-learn, by groups, and its page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import kiloword
from folders import model_folder
from kiloword.cli.main import main
from kiloword.data.classes.names import prompts
from kiloword.evaluation import evaluate, metrics
from kiloword.evaluation.zeroshot import Tally, ZeroshotTaskOptions, zeroshot
from kiloword.report.blocks import Gallery, Matrix, Table
from kiloword.types import Features
from tars import photo, write_tar

PAIRS = ["ripe apple", "cut apple", "ripe pear", "old car", "cut pear", "new car"]
LETTERS = list("abcdefghijkl")


def cosine(images: Features, texts: Features) -> Tensor:
    return images["vec"] @ texts["vec"].T


def features(n: int, seed: int) -> Features:
    g = torch.Generator().manual_seed(seed)
    return {"vec": torch.nn.functional.normalize(torch.randn(n, 8, generator=g, dtype=torch.float64), dim=1)}


def test_batches_equal_all_at_once() -> None:
    images, classes = features(70, 0), features(9, 1)
    labels = torch.randint(9, (70,), generator=torch.Generator().manual_seed(2))
    batches = [({"vec": images["vec"][s : s + 16]}, labels[s : s + 16]) for s in range(0, 70, 16)]
    values = dict(zeroshot(cosine, batches, classes))
    ranked = cosine(images, classes).argsort(1, descending=True)
    found = (ranked[:, :5] == labels[:, None]).double()
    recalls = [found[labels == c, 0].mean().item() for c in labels.unique()]
    assert values["acc1"] == pytest.approx(found[:, 0].mean().item())
    assert values["acc5"] == pytest.approx(found.sum(1).mean().item())
    assert values["mean_per_class_recall"] == pytest.approx(sum(recalls) / len(recalls))


def test_labels_must_be_classes() -> None:
    with pytest.raises(ValueError, match="labels run from 0 to 4, but there are 4 classes"):
        list(zeroshot(cosine, [(features(2, 0), torch.tensor([0, 4]))], features(4, 1)))


def test_prompts_of_classes() -> None:
    assert prompts(["cat", "dog"], ["a {c}", "{c}!"]) == (["a cat", "cat!", "a dog", "dog!"], [0, 0, 1, 1])
    own = {"cat": ["a feline"], "dog": ["a hound", "{c}"]}
    assert prompts(["dog", "cat"], own) == (["a hound", "{c}", "a feline"], [0, 0, 1])
    wrong: list[Any] = [(["cat", "cow"], own), (["cat"], ["a photo"]), (["cat"], "a {c}"), ([], ["a {c}"])]
    for names, templates in [*wrong, ("cat", ["{c}"]), ([1, 2], ["{c}"])]:
        with pytest.raises(ValueError):
            prompts(names, templates)


def scored(seed: int, images: int, classes: int) -> tuple[Tensor, Tensor]:
    """Scores [N, C] that are right more often than by chance, and labels [N] that miss the last class."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes - 1, (images,), generator=g)
    return torch.randn(images, classes, generator=g) + torch.nn.functional.one_hot(labels, classes), labels


def tallied(scores: Tensor, labels: Tensor, infos: list[dict[str, Any]], **options: Any) -> dict[str, float]:
    """What a tally yields after batches of 32 images, besides CLIP_benchmark's metrics."""
    tally = Tally(ZeroshotTaskOptions(**options), PAIRS if scores.shape[1] == len(PAIRS) else LETTERS)
    for s in range(0, len(scores), 32):
        tally.see(list(range(s, s + 32)), infos[s : s + 32])
        tally.add(scores[s : s + 32], labels[s : s + 32])
    values = dict(tally.values(scores.shape[1]))
    return {k: v for k, v in values.items() if options.get("any_label") or k not in ("acc1", "acc5")}


def test_accuracy_by_group_is_that_of_the_group_alone() -> None:
    scores, labels = scored(1, 200, 12)
    regions, incomes = ["Africa", "Asia", "Other"], ["low", "high"]
    infos: list[dict[str, Any]] = [
        {"place": {"region": regions[n % 3]}, "income": [incomes[n % 2], n]} for n in range(200)
    ]
    infos[7] = {}
    found = tallied(scores, labels, infos, group_by=("place.region", "income.0"))
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
    elsewhere: list[dict[str, Any]] = [{"npy": [n % 3, n]} if n % 2 else {"region": str(n % 3)} for n in range(200)]
    named: list[dict[str, Any]] = [{"region": n % 3} for n in range(200)]
    expected_values = tallied(scores, labels, named, group_by=("region",))
    assert tallied(scores, labels, elsewhere, group_by=("region=npy.0",)) == expected_values


def test_f1_is_scikit_learns() -> None:
    """As WILDS calls it: over the classes that occur."""
    sklearn = pytest.importorskip("sklearn.metrics", reason="needs scikit-learn")
    scores, labels = scored(2, 100, 12)
    expected = sklearn.f1_score(labels, scores.argmax(1), average="macro", labels=labels.unique())
    assert tallied(scores, labels, [{}] * 100, macro_f1=True)["F1-macro_all"] == pytest.approx(expected)
    constant = tallied(torch.zeros(100, 12), labels, [{}] * 100, macro_f1=True)["F1-macro_all"]
    counts = torch.bincount(labels).double()  # each class is predicted for a twelfth of the images
    assert constant == pytest.approx((2 * counts / 12 / (counts + 100 / 12)).mean().item())


def test_parts_of_names_are_right_where_the_prediction_shares_them() -> None:
    scores, labels = scored(3, 90, len(PAIRS))
    words = [[PAIRS[n].split() for n in column] for column in (scores.argmax(1).tolist(), labels.tolist())]
    found = tallied(scores, labels, [{}] * 90, attributes=True)
    for n, part in enumerate(("attribute", "object")):
        expected = float(np.mean([a[n] == b[n] for a, b in zip(*words, strict=True)]))
        assert found[f"{part}_acc1"] == pytest.approx(expected)


def test_any_of_several_classes_counts() -> None:
    """As MetaCLIP's evaluation of Dollar Street: right if any true class is among the first k."""
    scores, _ = scored(4, 80, 12)
    targets = (torch.rand(80, 12, generator=torch.Generator().manual_seed(4)) < 0.2).long()
    targets[:, 0] = 1
    found = tallied(scores, targets, [{"region": "all"}] * 80, any_label=True, group_by=("region",))
    order = scores.argsort(1, descending=True)
    for k, name in ((1, "acc"), (5, "acc_top5")):
        expected = targets.gather(1, order[:, :k]).any(1).double().mean().item()
        assert found[f"{name}_region:all"] == pytest.approx(expected)
        assert found[f"acc{k}"] == pytest.approx(expected)
    with pytest.raises(ValueError, match="--macro-f1 needs one class per image"):
        tallied(scores, targets, [{}] * 80, macro_f1=True)


def test_precision_of_each_class() -> None:
    scores, _ = scored(5, 60, 12)
    targets = torch.rand(60, 12, generator=torch.Generator().manual_seed(5)) < 0.3
    tally = Tally(names=[*LETTERS[:-1], "a"])
    found = dict(zeroshot(lambda i, t: i["vec"], [({"vec": scores}, targets)], {"vec": torch.zeros(12, 1)}, tally))
    each = metrics.average_precision(scores.T, targets.T)
    assert [found[f"average_precision@{name}"] for name in [*LETTERS[:-1], "a (11)"]] == each.tolist()
    assert found["mean_average_precision"] == pytest.approx(each.mean().item())
    eleven = metrics.interpolated_average_precision(scores.T, targets.T).mean().item()
    assert found["mean_average_precision_11"] == pytest.approx(eleven)
    assert len(found) == 14


@pytest.fixture(scope="module")
def grouped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and a tar of 12 images of 6 classes whose json has a region."""
    folder = tmp_path_factory.mktemp("tally")
    members = {}
    for n in range(12):
        info = json.dumps({"region": ["north", "south"][n % 2], "id": n}).encode()
        members |= {f"{n:02d}.png": photo(n), f"{n:02d}.cls": str(n % 6).encode(), f"{n:02d}.json": info}
    write_tar(folder / "data" / "0.tar", members)
    (folder / "data" / "classnames.txt").write_text("\n".join(PAIRS))
    return model_folder(folder / "model"), folder / "data"


def test_groups_of_a_data_set_and_the_page(
    grouped: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, data = grouped
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
    shown = page.read_text()
    assert f"{by_region[1]:.4f}" in shown
    assert "ripe apple" in shown
    assert "<img" in shown


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"group_by": ("regoin",)}, "Did you mean region"),
        ({"group_by": ("country=npy.2",)}, "country=npy.2"),
        ({"group_by": ("region", "region=a")}, "twice"),
        ({"group_by": ("region",), "prompts": "topk"}, "topk"),
        ({"attributes": True, "classnames": ["a b", "c", *"defg"]}, "'c'"),
    ],
)
def test_options_that_do_not_fit(grouped: tuple[Path, Path], options: dict[str, Any], word: str) -> None:
    model, data = grouped
    with pytest.raises(ValueError) as error:
        evaluate(kiloword.load(model), "zeroshot", str(data), **options)
    assert word in str(error.value)


SCORES = torch.tensor([[3.0, 1, 0], [2, 1, 0], [0, 5, 1], [1, 0, 2], [2, 2, 0]])
LABELS = torch.tensor([0, 1, 0, 2, 1])


@pytest.mark.parametrize("batch", [1, 5])
def test_confusions_and_the_surest_mistakes(batch: int) -> None:
    """The last image is a tie of two classes, of one name perhaps: no mistake."""
    tally, asked = Tally(page=True), list[list[int]]()
    for n in range(0, 5, batch):
        tally.see(list(range(10 + n, 10 + n + batch)))
        tally.add(SCORES[n : n + batch], LABELS[n : n + batch])

    def images(rows: list[int]) -> list[Any]:
        asked.append(rows)
        return [np.zeros((4, 4, 3), np.uint8)] * len(rows)

    matrix, gallery = tally.blocks(["cat", "dog", "cow"], images)
    assert isinstance(matrix, Matrix)
    assert np.asarray(matrix.values).tolist() == [[1, 1, 0], [2, 0, 0], [0, 0, 1]]
    assert isinstance(gallery, Gallery)
    assert asked == [[12, 11]]  # leads of 5 and 1
    assert [tile.lines for tile in gallery.tiles] == [["cat, called dog"], ["dog, called cat"]]


def test_many_classes_have_a_table_of_confusions() -> None:
    tally = Tally(page=True)
    labels = torch.arange(30).repeat_interleave(3)
    called = labels.clone()
    called[9:11] = 7  # two images of class 3
    tally.see(list(range(90)))
    tally.add(torch.nn.functional.one_hot(called, 30).float(), labels)
    table, _ = tally.blocks([f"c{n}" for n in range(30)], lambda rows: [np.zeros((4, 4, 3), np.uint8)] * len(rows))
    assert isinstance(table, Table)
    assert table.rows == [["c3", "c7", 2, 3]]
    several = Tally(page=True)
    several.add(torch.zeros(1, 2), torch.tensor([[1, 0]]))
    assert list(several.blocks(["a", "b"], lambda rows: [])) == []
