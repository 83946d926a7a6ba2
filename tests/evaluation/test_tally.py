"""Metrics by groups, F1, parts of class names, 11-point precision and means of recalls, against literal code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

import kiloword
from folders import model_folder
from kiloword.cli.main import main
from kiloword.evaluation import evaluate, metrics
from kiloword.evaluation.retrieval import mean_recalls
from kiloword.evaluation.zeroshot import ZeroshotTaskOptions
from kiloword.evaluation.zeroshot.tally import Tally
from kiloword.evaluation.zeroshot.task import zeroshot
from pages import sections
from tars import photo, write_tar

PAIRS = ["ripe apple", "cut apple", "ripe pear", "old car", "cut pear", "new car"]


def scored(seed: int, images: int, classes: int) -> tuple[Tensor, Tensor]:
    """Scores [N, C] that are right more often than by chance, and labels [N] that miss the last class."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes - 1, (images,), generator=g)
    right = torch.nn.functional.one_hot(labels, classes)
    return torch.randn(images, classes, generator=g) + right, labels


def points(relevant: NDArray[np.bool_], scores: NDArray[np.float64]) -> float:
    """11-point average precision, one threshold after the other."""
    best = [0.0] * 11
    for threshold in scores:
        chosen = scores >= threshold
        hits, all_relevant = int((chosen & relevant).sum()), int(relevant.sum())
        for r in range(11):
            if 10 * hits >= r * all_relevant:
                best[r] = max(best[r], hits / int(chosen.sum()))
    return sum(best) / 11


@pytest.mark.parametrize("decimals", [6, 1])
def test_interpolated_average_precision(decimals: int) -> None:
    g = torch.Generator().manual_seed(decimals)
    scores = (torch.rand(6, 50, generator=g) * 10**decimals).round()
    relevant = torch.rand(6, 50, generator=g) < torch.tensor([0.02, 0.1, 0.2, 0.5, 0.9, 1.0])[:, None]
    relevant[0, 0] = True
    computed = metrics.interpolated_average_precision(scores, relevant)
    expected = [points(r.numpy(), s.double().numpy()) for s, r in zip(scores, relevant, strict=True)]
    assert computed.tolist() == pytest.approx(expected)
    assert metrics.interpolated_average_precision(scores, torch.zeros_like(relevant)).tolist() == [0] * 6


def test_precisions_of_scikit_learn() -> None:
    """Per class, also with ties for the 11 points."""
    sklearn = pytest.importorskip("sklearn.metrics", reason="needs scikit-learn")
    g = torch.Generator().manual_seed(0)
    scores, relevant = torch.rand(4, 30, generator=g), torch.rand(4, 30, generator=g) < 0.4
    expected = [sklearn.average_precision_score(r, s) for s, r in zip(scores.numpy(), relevant.numpy(), strict=True)]
    assert metrics.average_precision(scores, relevant).tolist() == pytest.approx(expected)
    coarse = (4 * scores).round()
    for row, (s, r) in enumerate(zip(coarse.numpy(), relevant.numpy(), strict=True)):
        precision, recall, _ = sklearn.precision_recall_curve(r, s)
        points = [precision[:-1][recall[:-1] >= level / 10 - 1e-12].max() for level in range(11)]
        value = metrics.interpolated_average_precision(coarse, relevant)[row].item()
        assert value == pytest.approx(float(np.mean(points)))


def test_macro_f1_of_scikit_learn() -> None:
    """As WILDS calls it: over the classes that occur."""
    sklearn = pytest.importorskip("sklearn.metrics", reason="needs scikit-learn")
    scores, labels = scored(0, 300, 12)
    chosen = scores.argmax(1)
    right = torch.bincount(labels[chosen == labels], minlength=12).double()
    value = metrics.macro_f1(right, torch.bincount(chosen, minlength=12), torch.bincount(labels, minlength=12))
    assert value == pytest.approx(sklearn.f1_score(labels, chosen, average="macro", labels=labels.unique()))


def test_means_of_recalls() -> None:
    values = {f"{side}_retrieval_recall@{k}": k / 100 + (side == "text") for side in ("text", "image") for k in (1, 5)}
    assert dict(mean_recalls(values, (1, 5))) == {
        "mean_recall@1": pytest.approx((1.01 + 0.01) / 2),
        "text_retrieval_mean_recall": pytest.approx(1.03),
        "image_retrieval_mean_recall": pytest.approx(0.03),
        "rsum": pytest.approx(1.01 + 1.05 + 0.01 + 0.05),
    }
    assert "mean_recall@1" not in dict(mean_recalls(values, (5,)))


def tallied(scores: Tensor, labels: Tensor, infos: list[dict[str, Any]], **options: Any) -> dict[str, float]:
    """What a tally yields after batches of 32 images."""
    tally = Tally(ZeroshotTaskOptions(**options), PAIRS if scores.shape[1] == len(PAIRS) else list("abcdefghijkl"))
    for s in range(0, len(scores), 32):
        tally.see(infos[s : s + 32])
        tally.add(scores[s : s + 32], labels[s : s + 32])
    return dict(tally.values())


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


def test_f1_of_a_tally_is_scikit_learns() -> None:
    sklearn = pytest.importorskip("sklearn.metrics", reason="needs scikit-learn")
    scores, labels = scored(2, 100, 12)
    expected = sklearn.f1_score(labels, scores.argmax(1), average="macro", labels=labels.unique())
    assert tallied(scores, labels, [{}] * 100, macro_f1=True) == {"F1-macro_all": pytest.approx(expected)}
    constant = tallied(torch.zeros(100, 12), labels, [{}] * 100, macro_f1=True)["F1-macro_all"]
    counts = torch.bincount(labels).double()  # each class is predicted for a twelfth of the images
    assert constant == pytest.approx((2 * counts / 12 / (counts + 100 / 12)).mean().item())


def test_parts_of_names_are_right_where_the_prediction_shares_them() -> None:
    scores, labels = scored(3, 90, len(PAIRS))
    words = [[PAIRS[n].split() for n in column] for column in (scores.argmax(1).tolist(), labels.tolist())]
    expected = {
        f"{part}_acc1": pytest.approx(float(np.mean([a[n] == b[n] for a, b in zip(*words, strict=True)])))
        for n, part in enumerate(("attribute", "object"))
    }
    assert tallied(scores, labels, [{}] * 90, attributes=True) == expected


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
    names = [*"abcdefghijk", "a"]
    tally = Tally(ZeroshotTaskOptions(), names)
    found = dict(zeroshot(lambda i, t: i["vec"], [({"vec": scores}, targets)], {"vec": torch.zeros(12, 1)}, tally))
    each = metrics.average_precision(scores.T, targets.T)
    assert [found[f"average_precision@{name}"] for name in [*"abcdefghijk", "a (11)"]] == each.tolist()
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
        info = {"region": ["north", "south"][n % 2], "id": n}
        members |= {
            f"{n:02d}.png": photo(n),
            f"{n:02d}.cls": str(n % 6).encode(),
            f"{n:02d}.json": json.dumps(info).encode(),
        }
    write_tar(folder / "data" / "0.tar", members)
    (folder / "data" / "classnames.txt").write_text("\n".join(PAIRS))
    return model_folder(folder / "model"), folder / "data"


def test_groups_of_a_data_set(grouped: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    shown = sections(page.read_text())["Groups and parts"].tables[0]
    assert ["acc_region:south", f"{by_region[1]:.3f}"] in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_by": ("regoin",)}, "--group-by regoin: no image has this field.*id, region. Did you mean region"),
        ({"group_by": ("region", "region")}, "--group-by names a field twice: region, region"),
        ({"group_by": ("region", "region=a")}, "--group-by names a field twice: region, region=a"),
        ({"group_by": ("region",), "prompts": "topk"}, "--group-by counts with --prompts ensemble, but it is topk"),
        ({"attributes": True, "classnames": ["a b", "c", *"defg"]}, "the class 'c' is one word"),
    ],
)  # fmt: skip
def test_options_that_do_not_fit(grouped: tuple[Path, Path], options: dict[str, Any], message: str) -> None:
    model, data = grouped
    with pytest.raises(ValueError, match=message):
        evaluate(kiloword.load(model), "zeroshot", str(data), **options)


def test_a_group_may_be_elsewhere() -> None:
    scores, labels = scored(7, 60, 12)
    infos: list[dict[str, Any]] = [{"npy": [n % 3, n]} if n % 2 else {"region": str(n % 3)} for n in range(60)]
    named: list[dict[str, Any]] = [{"region": n % 3} for n in range(60)]
    assert tallied(scores, labels, infos, group_by=("region=npy.0",)) == tallied(
        scores, labels, named, group_by=("region",)
    )
    with pytest.raises(ValueError, match=r"--group-by country=npy\.2: no image has this field"):
        tallied(scores, labels, infos, group_by=("country=npy.2",))


def test_too_many_groups() -> None:
    scores, labels = scored(6, 501, 12)
    with pytest.raises(ValueError, match="--group-by n has 501 values"):
        tallied(scores, labels, [{"n": n} for n in range(501)], group_by=("n",))
