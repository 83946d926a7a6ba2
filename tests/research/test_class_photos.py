"""Class data in experiments: its judge by captions of the tree, noisy prompts and their table, phrases of captions."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from class_data import ANIMAL, CAR, CAT, DOG, write_photos
from folders import matcher, model_folder
from kiloword.config.recipes import DataConfig, Recipe
from kiloword.data.open import open_source
from kiloword.data.scenes.captions import parse
from kiloword.data.scenes.world import TASKS
from kiloword.evaluation.prompts import Prompts
from research import bprw, classes
from research.classes import tree_of
from research.phrases import phrases
from research.prompts import nearest, noisy


def test_a_photo_counts_where_the_caption_of_its_class_is_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = matcher()
    photos = write_photos(tmp_path / "data" / "photos")
    best = torch.tensor([0] * 12 + [2, 1] * 6 + [0] * 12)  # of dogs all are right, of cats half, of cars none
    shown = iter([best])

    def score(images: list[torch.Tensor], texts: dict[str, torch.Tensor]) -> torch.Tensor:
        assert len(texts["vec"]) == 3
        return torch.nn.functional.one_hot(next(shown)[: len(images)], 3)

    monkeypatch.setattr(model, "score", score)
    options = classes.ClassOptions(out=tmp_path, data=str(photos), val=str(photos), level=2)
    judged = classes.classified(options, model)
    assert judged["top1"] == 0.5
    np.testing.assert_array_equal(judged["outcomes"], [1] * 12 + [0, 1] * 6 + [0] * 12)


def test_a_part_needs_as_many_photos_as_it_names(tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "data" / "photos")  # 36
    recipe = Recipe(method="siglip", data=DataConfig(sources=(f"tree:{photos}?levels=2",)))
    assert [len(classes.part(rows)(recipe)) for rows in (slice(36), slice(20), slice(20, None))] == [36, 20, 16]
    for rows, least in ((slice(37), 37), (slice(36, None), 37), (slice(40_000), "40,000")):
        with pytest.raises(ValueError, match=f"has 36 rows: expected {least} or more"):
            classes.part(rows)(recipe)


def test_a_class_has_its_caption_those_above_it_and_those_of_other_classes(tmp_path: Path) -> None:
    tree = tree_of(str(write_photos(tmp_path / "data" / "photos"))).tree
    assert noisy(tree) == {
        DOG: [DOG, ANIMAL, CAT, CAR],
        CAT: [CAT, ANIMAL, CAR, DOG],
        CAR: [CAR, DOG, CAT],  # only the root is above it, which says nothing
    }


def test_the_nearest_prompt_of_a_class_is_that_of_its_own() -> None:
    texts = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8], [0.0, -1.0]])
    asked = Prompts({"vec": texts}, torch.tensor([0, 0, 1, 1]), 2)
    photos = torch.tensor([[[0.0, 1.0], [0.6, 0.8]], [[1.0, 0.0], [0.0, 1.0]]])  # class b is nearer to texts of a
    assert torch.equal(nearest(asked, photos)["vec"], texts[[1, 2]])


def test_a_phrase_is_true_of_every_photo_with_a_caption_that_has_it() -> None:
    captions = [
        ["A brown dog on wet sand .", "the brown dog"],
        ["A brown dog in a very long row of red tall wide old houses"],  # a run of five words is no phrase
        ["Wet sand", "sand"],
        ["a large brown dog"],  # also a brown dog
    ]
    made = phrases(captions)
    assert dict(zip(made.texts, made.photos, strict=True)) == {
        "brown dog": [0, 1, 3],
        "large brown dog": [3],
        "long row": [1],
        "wet sand": [0, 2],
    }
    assert made.of_at_most(1).texts == ["large brown dog", "long row"]


@pytest.mark.parametrize("task", TASKS)
def test_noisy_prompts_are_right_and_wrong_as_their_kind_says(task: str) -> None:
    source = open_source(f"scenes:test?task={task}&n=60")
    labels = torch.tensor([source.record(row).label for row in range(60)])
    prompts = bprw.noisy(task)
    assert list(prompts) == list(TASKS[task].classnames)
    for c, own in enumerate(prompts.values()):
        kinds = [kind for _, kind in own]
        assert [kinds.count(kind) for kind in bprw.KINDS] == [4, 3, 2, 1]
        output = [prompt for prompt, kind in own if kind != "negated"]
        assert all(parse(prompt) is not None for prompt in output)
        true = torch.from_numpy(source.relevance(output, range(60)))  # type: ignore[attr-defined]  # [prompts, 60]
        assert (true[:4] == (labels == c)).all()
        assert not true[4:7, labels == c].any()
        assert (true[7:] != (labels == c)).any(1).all()


def test_the_experiment_of_noisy_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, numbers = model_folder(tmp_path / "prolip" / "model", "prolip"), tmp_path / "numbers.json"
    words = ["--tasks", "fill", "--n", "40", "--draws", "2", "--json", str(numbers)]
    bprw.main(["--model", str(model), *words])
    output = capsys.readouterr().out
    draws = json.loads(numbers.read_text())["prolip"]["fill"]
    mean = sum(found["bprw, K = 5"]["acc1"] for found in draws) / 2
    assert f"| bprw, K = 5 | {mean:.3f} |" in output
    assert draws[0]["uniform"]["right"] == pytest.approx(0.1)
