"""The tasks compositional and winogavil against the benchmarks' evaluators, transcribed item by item."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from kiloword.api import Matcher
from kiloword.cli.main import main
from kiloword.data.open import open_source
from kiloword.evaluation import evaluate
from kiloword.evaluation.compositional import BENCHMARKS, means
from kiloword.evaluation.winogavil import jaccard
from kiloword.types import Skipped

WORDS = ("red circle", "blue star", "green square", "two dogs", "one cat", "a small tree", "the old car")
NAMES = [f"{n:012d}" for n in range(6)]


@pytest.fixture(params=("siglip", "llip", "prolip"))
def each_matcher(request: pytest.FixtureRequest, matcher_of: Callable[[str], Matcher]) -> Matcher:
    return matcher_of(request.param)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of six images without captions."""
    folder, scenes = tmp_path_factory.mktemp("photos"), open_source("scenes:test?n=6", 32)
    for row, name in enumerate(NAMES):
        Image.fromarray(scenes.record(row).image).save(folder / f"{name}.png")
    return folder


def image(photos: Path, n: int) -> Image.Image:
    return Image.open(photos / f"{NAMES[n % 6]}.png")


def write(path: Path, values: Any) -> Path:
    path.write_text(json.dumps(values))
    return path


def caption(n: int) -> str:
    return f"{WORDS[n % 7]} and {WORDS[(3 * n + 1) % 7]}"


def sim(matcher: Matcher, photo: Image.Image, text: str) -> float:
    """One image and one text at a time, as the public evaluators score them."""
    return float(matcher.score(matcher.encode_image(photo), matcher.encode_text(text)))


def entry(n: int) -> dict[str, Any]:
    """Item n as SugarCrepe has it: file names are COCO's, the images' are of another format."""
    return {"filename": f"{NAMES[n % 6]}.jpg", "caption": caption(n), "negative_caption": caption(n + 5)}


VOTES = [3, 2, 1, 0, 3, 3, 2, 2, 3, 1, 2, 0]  # of VALSE's annotators: a foil needs two
BOXES = [(0, 0, 20, 16), (5, 3, 20, 25), (8, 0, 24, 32), (20, 20, 30, 30)]  # the last reaches beyond the image


def true_and_false(benchmark: str, n: int) -> dict[str, Any]:
    """Item n of 12 of two kinds."""
    kind, image = "ab"[n < 5], f"vg/{NAMES[n % 6]}.jpg"
    if benchmark == "valse":
        votes = {"linguistic_phenomena": kind, "mturk": {"caption": VOTES[n], "foil": 0}}
        return {"image_file": image, "caption": caption(n), "foil": caption(n + 5), **votes}
    if benchmark == "order":
        return {"image": image, "caption_options": [caption(n), *(caption(n + k) for k in (1, 2, 3, 5))]}
    box = dict(zip(("bbox_x", "bbox_y", "bbox_w", "bbox_h"), BOXES[n % 4], strict=True))
    return {
        "image_path": image,
        "true_caption": caption(n),
        "false_caption": caption(n + 5),
        "relation_name": kind,
    } | box


@pytest.mark.parametrize("benchmark", ["valse", "boxes", "order"])
def test_valse_and_aro(benchmark: str, each_matcher: Matcher, photos: Path, tmp_path: Path) -> None:
    pairs = write(tmp_path / "pairs.json", {f"item {n}": true_and_false(benchmark, n) for n in range(12)})
    found, counted = evaluate(each_matcher, "compositional", str(photos), pairs=pairs), dict[int, bool]()
    for n in range(12):
        x, y, w, h = BOXES[n % 4]
        photo = image(photos, n).crop((x, y, x + w, y + h)) if benchmark == "boxes" else image(photos, n)
        false = [sim(each_matcher, photo, caption(n + k)) for k in ((1, 2, 3, 5) if benchmark == "order" else (5,))]
        if benchmark != "valse" or VOTES[n] >= 2:
            counted[n] = sim(each_matcher, photo, caption(n)) > max(false)
    assert (found["items"], found["accuracy"]) == (len(counted), pytest.approx(np.mean([*counted.values()])))
    assert found["accuracy_chance"] == pytest.approx(1 / 5 if benchmark == "order" else 1 / 2)
    if benchmark != "order":
        of_kinds = [np.mean([right for n, right in counted.items() if (n < 5) == first]) for first in (False, True)]
        assert [found["accuracy@a"], found["accuracy@b"]] == pytest.approx(of_kinds)


def test_only_aros_orders_count_a_tie_as_right(matcher: Matcher, photos: Path, tmp_path: Path) -> None:
    """As its argmax does, the true caption first."""
    for tied, accuracy in (
        ({"image": NAMES[0], "caption_options": ["a"] * 5}, 1),
        ({**entry(0), "negative_caption": caption(0)}, 0),
    ):
        found = evaluate(matcher, "compositional", str(photos), pairs=write(tmp_path / "tied.json", [tied]))
        assert (found["accuracy"], found["ties"]) == (accuracy, 1)


def test_sugarcrepe_from_a_folder_of_files(each_matcher: Matcher, photos: Path, tmp_path: Path) -> None:
    data = {"add_obj": [entry(n) for n in range(9)], "swap_att": [entry(n) for n in range(20, 24)]}
    for name, values in data.items():
        write(tmp_path / f"{name}.json", {str(n): one for n, one in enumerate(values)})
    found = evaluate(each_matcher, "compositional", str(photos), pairs=tmp_path)
    right = [
        sim(each_matcher, image(photos, n), caption(n)) > sim(each_matcher, image(photos, n), caption(n + 5))
        for n in (*range(9), *range(20, 24))
    ]
    shares = [np.mean(right[:9]), np.mean(right[9:])]
    assert [found["accuracy@add_obj"], found["accuracy@swap_att"]] == pytest.approx(shares)
    assert found["accuracy"] == pytest.approx(np.mean(right))
    assert found["accuracy_by_category"] == pytest.approx(np.mean(shares))
    by_list = {name: [{**one, "key": one.pop("filename")[:-4]} for one in values] for name, values in data.items()}
    one_file = write(tmp_path / "one.txt", by_list)
    assert found == evaluate(each_matcher, "compositional", str(photos), pairs=str(one_file))


def test_sugarcrepe_pp(each_matcher: Matcher, photos: Path, tmp_path: Path) -> None:
    pairs = write(tmp_path / "replace_att.json", [{**entry(n), "caption2": caption(n + 2)} for n in range(14)])
    found = evaluate(each_matcher, "compositional", str(photos), pairs=pairs)
    by_image = by_text = 0
    for n in range(14):
        texts = caption(n), caption(n + 2), caption(n + 5)
        first, second, false = (sim(each_matcher, image(photos, n), text) for text in texts)
        by_image += min(first, second) > false
        one, two, other = (each_matcher.encode_text(text)["vec"] for text in texts)
        by_text += bool(one @ two > one @ other and one @ two > two @ other)
    assert (found["image_to_text"], found["text_only"]) == pytest.approx((by_image / 14, by_text / 14))
    assert (found["image_to_text_chance"], found["text_only_chance"]) == pytest.approx((1 / 3, 1 / 3))


def test_winoground(each_matcher: Matcher, photos: Path, tmp_path: Path) -> None:
    """The conditions of Winoground's model card, for each example."""
    lines, counted = [], {"text_score": 0, "image_score": 0, "group_score": 0}
    for n in range(12):
        i, j = n % 6, (n + 1 + n // 6) % 6
        lines.append({"image_0": NAMES[i], "image_1": NAMES[j], "caption_0": caption(n), "caption_1": caption(n + 3)})
        lines[-1]["collapsed_tag"] = "Object" if n % 3 else "Relation"
        (c0_i0, c0_i1), (c1_i0, c1_i1) = (
            [sim(each_matcher, image(photos, k), text) for k in (i, j)] for text in (caption(n), caption(n + 3))
        )
        text, photo = c0_i0 > c1_i0 and c1_i1 > c0_i1, c0_i0 > c0_i1 and c1_i1 > c1_i0
        for name, right in zip(counted, (text, photo, text and photo), strict=True):
            counted[name] += right
    file = tmp_path / "examples.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)) + "\n")
    found = evaluate(each_matcher, "compositional", str(photos), pairs=file)
    assert {name: found[name] for name in counted} == pytest.approx({n: c / 12 for n, c in counted.items()})
    chances = [found[f"{name}_chance"] for name in counted]
    assert (chances, found["text_score_items@Relation"]) == ([1 / 4, 1 / 4, pytest.approx(1 / 6)], 4)


def test_aros_mean_omits_small_categories_of_attributes_and_symmetric_relations() -> None:
    hits = [True] * 30 + [False] * 3
    attributes, relations = BENCHMARKS["attributes"], BENCHMARKS["true_caption"]
    few = dict(means("accuracy", hits, [0.5] * 30 + [0.2] * 3, ["many"] * 30 + ["few"] * 3, attributes))
    assert (few["accuracy_by_category"], few["accuracy@few"], few["accuracy"]) == (1, 0, pytest.approx(30 / 33))
    assert few["accuracy_by_category_chance"] == 0.5
    named = ["riding"] * 30 + ["sitting next to"] * 2 + ["feeding"]
    assert dict(means("accuracy", hits, [0.5] * 33, named, relations))["accuracy_by_category"] == 1 / 2
    assert "accuracy_by_category" not in dict(means("accuracy", hits, [0.5] * 33, ["near"] * 33, relations))


def test_items_without_their_image_are_counted_and_named(matcher: Matcher, photos: Path, tmp_path: Path) -> None:
    for n in range(2):
        (tmp_path / f"{NAMES[n]}.png").write_bytes((photos / f"{NAMES[n]}.png").read_bytes()[: -40 * n or None])
    gone, skipped = {**entry(0), "filename": "gone.jpg"}, list[Skipped]()
    file = write(tmp_path / "a.json", [entry(0), entry(1), gone, gone])
    found = evaluate(matcher, "compositional", str(tmp_path), pairs=file, skipped=skipped)
    assert (found["items"], found["items_skipped"], found["skipped"]) == (1, 3, 2)
    assert [(one.row, one.key) for one in skipped] == [(-1, "gone.jpg"), (1, NAMES[1])]
    source = open_source("scenes:test?n=2", 32)
    source.key = lambda row: f"{'ab'[row]}/same.png"  # type: ignore[method-assign]
    two = write(tmp_path / "b.json", [{**gone, "filename": name} for name in ("b/same.png", "same.png")])
    found = evaluate(matcher, "compositional", source, pairs=two, skipped=skipped)
    assert (found["items"], skipped[2].key) == (1, "same.png")  # which several images have


def test_the_page_has_the_figures_and_examples(folder: Path, photos: Path, tmp_path: Path) -> None:
    pairs, html = write(tmp_path / "add.json", [entry(n) for n in range(12)]), tmp_path / "page.html"
    main(["eval", "compositional", str(folder), "--data", str(photos), "--pairs", str(pairs), "--html", str(html)])
    assert all(word in html.read_text() for word in ("accuracy_by_category", "<img", f" {caption(0)}<"))


# WinoGAViL

CUES = [("Nest", 5, [0, 4]), ("open", 6, [1, 3, 5]), ("tea", 5, [2])]


def test_winogavil_is_literal_code(matcher: Matcher, photos: Path, tmp_path: Path) -> None:
    lines, expected = ["candidates,cue,associations"], []
    for (cue, count, chosen), prompt in zip(CUES, ["A nest", "An open", "A tea"], strict=True):
        cells = json.dumps(NAMES[:count]), cue, json.dumps([NAMES[k] for k in chosen])
        lines.append(",".join('"' + cell.replace('"', '""') + '"' for cell in cells))
        scores = [sim(matcher, image(photos, n), prompt) for n in range(count)]
        best = set(np.argsort(scores)[-len(chosen) :].tolist())
        expected.append(len(best & set(chosen)) / len(best | set(chosen)))
    (tmp_path / "pairs.csv").write_text("\n".join(lines))
    mean = pytest.approx(sum(expected) / 3)
    found = evaluate(matcher, "winogavil", str(photos), pairs=tmp_path / "pairs.csv")
    assert found == {"items": 3, "avg_jaccard_score": mean, "jaccard_score_5-6": mean, "skipped": 0}
    for n in range(5):
        image(photos, n).save(tmp_path / f"{NAMES[n]}.png")
    assert evaluate(matcher, "winogavil", str(tmp_path), pairs=tmp_path / "pairs.csv")["items"] == 2


def test_ties_get_the_mean_over_their_orders() -> None:
    scores, relevant = torch.tensor([3.0, 1, 1, 1, 0]), torch.tensor([False, True, False, True, True])
    values = []
    for order in permutations(range(5)):
        ranked = sorted(order, key=lambda n: -scores[n].item())[:3]
        hits = sum(bool(relevant[n]) for n in ranked)
        values.append(hits / (6 - hits))
    assert jaccard(scores, relevant) == pytest.approx(float(np.mean(values)))


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ([{"caption": "a", "image": "b"}], "entry 0"),
        ([entry(0), 3], "entry 1"),
        ([entry(0), {"foil": "b", "caption": "a", "image_file": "a"}], "several benchmarks"),
        ([{**entry(0), "caption": "  "}], "entry 0"),
        ({"swap": [{**entry(0), "filename": None}]}, "entry 0 of swap"),
        ([{"image": "a", "caption_options": ["a"]}], "entry 0"),
        ([{"image_0": "a", "caption_0": "a", "caption_1": "b"}], "entry 0"),
        ([{"true_caption": "a", "false_caption": "b", "image": "c", "bbox_x": 1}], "entry 0"),
        ([{**entry(0), "filename": "other.png"}], "other.png"),
        (None, "--pairs"),
        ("cue,candidates\nnest,[]", "associations"),
        ('cue,candidates,associations\nnest,"[""bee""]","[""hat""]"', "associations"),
        ('cue,candidates,associations\nnest,"[""bus""]","[""bus""]"', "'bus'"),
    ],
)
def test_refused_pairs(values: Any, word: str, matcher: Matcher, photos: Path, tmp_path: Path) -> None:
    file, task = tmp_path / "bad", "winogavil" if isinstance(values, str) else "compositional"
    file.write_text(values if isinstance(values, str) else json.dumps(values))
    with pytest.raises(ValueError, match=word):
        evaluate(matcher, task, str(photos), pairs=None if values is None else file)
