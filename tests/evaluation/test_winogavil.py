"""WinoGAViL: Jaccard index of chosen and associated images, as DataComp's evaluation computes it."""

from __future__ import annotations

import json
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
import torch

import kiloword
from folders import model_folder
from kiloword.evaluation import evaluate
from kiloword.evaluation.winogavil.task import jaccard
from tars import noise, photo, write_tar

NAMES = ["bee", "hat", "tea party", "sky", "ash", "owl"]
ITEMS = [("Nest", 5, ["bee", "ash"]), ("open", 6, ["hat", "sky", "owl"]), ("tea", 5, ["tea party"])]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, images named as candidates, and the table of associations as it is distributed."""
    folder = tmp_path_factory.mktemp("winogavil")
    model_folder(folder / "model")
    write_tar(folder / "images.tar", {f"{name}.png": photo(n) for n, name in enumerate(NAMES)})
    write_pairs(folder / "pairs.csv")
    return folder


def write_pairs(path: Path, items: list[tuple[str, int, list[str]]] = ITEMS) -> Path:
    quoted = [f"0,{_quoted(NAMES[:n])},{cue},{_quoted(right)},67" for cue, n, right in items]
    path.write_text("\n".join([",candidates,cue,associations,score_fool_the_ai", *quoted]))
    return path


def _quoted(names: list[str]) -> str:
    return '"' + json.dumps(names).replace('"', '""') + '"'


def test_the_figures_are_those_of_literal_code(data: Path) -> None:
    matcher = kiloword.load(data / "model")
    found = evaluate(matcher, "winogavil", str(data / "images.tar"), pairs=data / "pairs.csv")
    images = matcher.encode_image([noise(12, 16, n) for n in range(6)])
    expected = []
    for (_, count, right), prompt in zip(ITEMS, ["A nest", "An open", "A tea"], strict=True):
        scores = matcher.score(images, prompt)[:count, 0].numpy()
        chosen = {NAMES[i] for i in np.argsort(scores)[-len(right) :]}
        expected.append(len(chosen & set(right)) / len(chosen | set(right)))
    assert found == {
        "items": 3,
        "avg_jaccard_score": pytest.approx(sum(expected) / 3),
        "jaccard_score_5": pytest.approx((expected[0] + expected[2]) / 2),
        "jaccard_score_6": pytest.approx(expected[1]),
        "jaccard_score_5-6": pytest.approx(sum(expected) / 3),
        "skipped": 0,
    }


def test_ties_get_the_mean_over_their_orders() -> None:
    scores, relevant = torch.tensor([3.0, 1, 1, 1, 0]), torch.tensor([False, True, False, True, True])
    values = []
    for order in permutations(range(5)):
        ranked = sorted(order, key=lambda n: -scores[n].item())[:3]
        hits = sum(bool(relevant[n]) for n in ranked)
        values.append(hits / (6 - hits))
    assert jaccard(scores, relevant) == pytest.approx(float(np.mean(values)))


def test_items_without_their_images_are_omitted(data: Path, tmp_path: Path) -> None:
    write_tar(tmp_path / "five.tar", {f"{name}.png": photo(n) for n, name in enumerate(NAMES[:5])})
    found = evaluate(kiloword.load(data / "model"), "winogavil", str(tmp_path / "five.tar"), pairs=data / "pairs.csv")
    assert found["items"] == 2
    assert "jaccard_score_6" not in found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cue,candidates\nnest,[]", "has no column associations. Expected cue, candidates, associations"),
        ('cue,candidates,associations\nnest,bee hat,"[""bee""]"', "line 2: candidates is 'bee hat'. Expected"),
        ('cue,candidates,associations\nnest,"[""bee""]","[""hat""]"', "line 2: the association 'hat' is not among"),
        ('cue,candidates,associations\n,"[""bee""]","[""bee""]"', "line 2 has no cue"),
        ('cue,candidates,associations\nnest,"[""bus""]","[""bus""]"', "images.tar has none of the 1 images that"),
        ("", "has no column cue"),
    ],
)  # fmt: skip
def test_tables_that_do_not_fit(data: Path, tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "pairs.csv"
    path.write_text(text)
    with pytest.raises(ValueError) as error:
        evaluate(kiloword.load(data / "model"), "winogavil", str(data / "images.tar"), pairs=path)
    assert message in str(error.value)


def test_a_missing_table(data: Path) -> None:
    for pairs, message in ((None, "--pairs is missing"), (data / "none.csv", "No such file")):
        with pytest.raises(ValueError, match=message):
            evaluate(kiloword.load(data / "model"), "winogavil", str(data / "images.tar"), pairs=pairs)
