"""What the page of zero-shot classification shows of classes and mistakes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kiloword.data.open import open_source
from kiloword.data.stored import WithTokens
from kiloword.evaluation.zeroshot import mistakes, page
from kiloword.evaluation.zeroshot.mistakes import MATRIX, ROWS, SHOWN, Predictions, classes_table, confusions
from kiloword.evaluation.zeroshot.task import zeroshot
from kiloword.report import stack
from pages import sections

SCORES = torch.tensor([[3.0, 1, 0], [2, 1, 0], [0, 5, 1], [1, 0, 2]])
LABELS = torch.tensor([0, 1, 0, 2])


def predicted(batch: int) -> Predictions:
    """Predictions of four images with these scores, and the metrics that they must not change."""
    seen = Predictions()

    def batches() -> Any:
        for n in range(0, 4, batch):
            seen.note(list(range(10 + n, 10 + n + batch)), LABELS[n : n + batch])
            yield {"vec": SCORES[n : n + batch]}, LABELS[n : n + batch]

    score = lambda images, classes: images["vec"]  # noqa: E731
    classes = {"vec": torch.zeros(3, 1)}
    assert dict(zeroshot(seen.scoring(score), batches(), classes)) == dict(zeroshot(score, batches(), classes))
    return seen


@pytest.mark.parametrize("batch", [1, 2, 4])
def test_confusion_and_the_surest_mistakes(batch: int) -> None:
    seen = Predictions()
    for n in range(0, 4, batch):
        seen.note(list(range(10 + n, 10 + n + batch)), LABELS[n : n + batch])
        seen.scoring(lambda images, _: images["vec"])({"vec": SCORES[n : n + batch]}, {})
    assert seen.confusion(3).tolist() == [[1, 1, 0], [1, 0, 0], [0, 0, 1]]
    assert seen.surest() == [(12, 0, 1), (11, 1, 0)]  # leads of 5 and 1
    predicted(batch)


def test_a_tie_is_no_mistake() -> None:
    """Two classes of one name, such as ImageNet's crane: images of the second are not sure mistakes."""
    seen = Predictions()
    seen.note([0, 1], torch.tensor([1, 1]))
    seen.scoring(lambda images, _: images["vec"])({"vec": torch.tensor([[2.0, 2, 0], [1, 0, 0]])}, {})
    assert seen.surest() == [(1, 1, 0)]


def test_images_are_shown_where_the_model_reads_stored_tokens() -> None:
    scenes = open_source("scenes?n=4", 16)
    config = SimpleNamespace(image=SimpleNamespace(size=16), preprocess=SimpleNamespace(resize="shortest"))
    matcher: Any = SimpleNamespace(model=SimpleNamespace(config=config))
    tokens: Any = SimpleNamespace(find=lambda key: SimpleNamespace(tokens=lambda epoch: torch.zeros(9, 4)))
    images = mistakes.images_of(matcher, WithTokens(scenes, [tokens]), [3, 1])
    assert [image.shape for image in images] == [(16, 16, 3)] * 2
    assert np.array_equal(images, mistakes.images_of(matcher, scenes, [3, 1]))


def test_images_of_several_classes_have_none() -> None:
    seen = Predictions()
    seen.note([0], torch.tensor([[1, 0]]))
    seen.scoring(lambda images, _: images["vec"])({"vec": torch.zeros(1, 2)}, {})
    assert int(seen.confusion(2).sum()) == 0
    assert seen.surest() == []
    matcher: Any = SimpleNamespace()
    assert mistakes.mistakes(matcher, matcher, seen, ["a", "b"]) == {}


def test_tables_name_the_worst_class_and_its_confusion() -> None:
    confusion = np.array([[8, 2, 0], [0, 0, 4], [0, 0, 0]])
    (table,) = sections(stack(*classes_table(["cat", "<dog>", "none"], confusion)))[""].tables
    assert table[1:] == [["<dog>", "4", "0.0%", "0.0%", "none (100%)"], ["cat", "10", "80.0%", "100.0%", "<dog> (20%)"]]
    assert "<table>" in stack(*confusions(["a", "b", "c"], confusion))
    many = MATRIX + 1
    large = np.diag(np.full(many, 5)) + np.eye(many, k=1, dtype=int)
    large[3, 7] = 9
    (pairs,) = sections(stack(*confusions([f"c{n}" for n in range(many)], large)))[""].tables
    worst, every = sections(stack(*classes_table([f"<c{n}>" for n in range(many)], large)))[""].tables
    assert (len(worst), len(every)) == (1 + ROWS, 1 + many)
    assert every[: len(worst)] == worst
    html = stack(*classes_table([f"<c{n}>" for n in range(many)], large))
    assert f"<details><summary>The {ROWS} worst of {many} classes; all classes</summary>" in html
    assert pairs[1] == ["c3", "c7", "9", "60.0%"]
    assert SHOWN > 0


def test_the_page_gives_the_interval_of_its_number_of_images() -> None:
    shown = {"m": {"names": ["a", "b"], "confusion": np.array([[8, 2], [4, 6]]), "mistakes": []}}
    read = sections(page.report({"m": {"acc1": 0.7}}, "data", shown))
    assert "14 of 20 images are right, 70.0% (95% interval 48.1% to 85.5%)" in read["Accuracy"].text
    assert "chance among 2 classes is 50.0%" in read["Accuracy"].text
    assert {"Classes", "Confusions"} <= read.keys()
