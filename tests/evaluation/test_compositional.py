"""The tasks compositional and winogavil against the benchmarks' evaluators, transcribed item by item."""

from __future__ import annotations

import json
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import kiloword
from folders import model_folder
from kiloword.api import Matcher
from kiloword.cli.main import main
from kiloword.data.open import open_source
from kiloword.evaluation import evaluate
from kiloword.evaluation.compositional import BENCHMARKS, means
from kiloword.evaluation.winogavil import jaccard
from kiloword.types import Skipped

WORDS = ("red circle", "blue star", "green square", "two dogs", "one cat", "a small tree", "the old car")
Entry = dict[str, Any]


@pytest.fixture(scope="module", params=("siglip", "llip", "prolip"))
def matcher(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Matcher:
    return kiloword.load(model_folder(tmp_path_factory.mktemp("model") / request.param, request.param))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model") / "siglip")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of six images without captions."""
    folder, scenes = tmp_path_factory.mktemp("photos"), open_source("scenes:test?n=6", 32)
    for row in range(6):
        Image.fromarray(scenes.record(row).image).save(folder / f"{row:012d}.png")
    return folder


def image(photos: Path, n: int) -> Image.Image:
    return Image.open(photos / f"{n % 6:012d}.png")


def write(path: Path, values: Any) -> Path:
    path.write_text(json.dumps(values))
    return path


def caption(n: int) -> str:
    return f"{WORDS[n % 7]} and {WORDS[(3 * n + 1) % 7]}"


def sim(matcher: Matcher, photo: Image.Image, text: str) -> float:
    """One image and one text at a time, as the public evaluators score them."""
    return float(matcher.score(matcher.encode_image(photo), matcher.encode_text(text)))


def entries(n: int, start: int = 0) -> list[Entry]:
    rows = range(start, start + n)
    return [{"filename": f"{i % 6:012d}.jpg", "caption": caption(i), "negative_caption": caption(i + 5)} for i in rows]


def right(matcher: Matcher, photos: Path, entry: Entry) -> bool:
    photo = image(photos, int(entry["filename"][:-4]))
    return sim(matcher, photo, entry["caption"]) > sim(matcher, photo, entry["negative_caption"])


def test_sugarcrepe_from_a_folder_of_files(matcher: Matcher, photos: Path, tmp_path: Path) -> None:
    """Accuracy of each file: strictly greater counts. File names are those of COCO, the images' are another format."""
    data = {"add_obj": entries(9), "swap_att": entries(4, 20)}
    for name, values in data.items():
        write(tmp_path / f"{name}.json", {str(n): entry for n, entry in enumerate(values)})
    got = evaluate(matcher, "compositional", str(photos), pairs=tmp_path)
    counted = {name: [right(matcher, photos, e) for e in values] for name, values in data.items()}
    shares = {name: sum(values) / len(values) for name, values in counted.items()}
    assert {name: got[f"accuracy@{name}"] for name in data} == pytest.approx(shares)
    assert got["accuracy"] == pytest.approx(sum(map(sum, counted.values())) / 13)
    assert got["accuracy_by_category"] == pytest.approx(sum(shares.values()) / 2)
    assert got["accuracy_chance"] == 0.5
    by_list = {name: [{**e, "key": e.pop("filename")[:-4]} for e in values] for name, values in data.items()}
    assert got == evaluate(matcher, "compositional", str(photos), pairs=str(write(tmp_path / "one.txt", by_list)))


def test_sugarcrepe_pp(matcher: Matcher, photos: Path, tmp_path: Path) -> None:
    values = [{**entry, "caption2": caption(n + 2)} for n, entry in enumerate(entries(14))]
    got = evaluate(matcher, "compositional", str(photos), pairs=write(tmp_path / "replace_att.json", values))
    by_image = by_text = 0
    for entry in values:
        by_image += right(matcher, photos, entry) and right(matcher, photos, {**entry, "caption": entry["caption2"]})
        one, two, other = (matcher.encode_text(entry[k])["vec"] for k in ("caption", "caption2", "negative_caption"))
        by_text += bool(one @ two > one @ other and one @ two > two @ other)
    assert (got["image_to_text"], got["text_only"]) == pytest.approx((by_image / 14, by_text / 14))
    assert (got["image_to_text_chance"], got["text_only_chance"]) == pytest.approx((1 / 3, 1 / 3))


def test_winoground(matcher: Matcher, photos: Path, tmp_path: Path) -> None:
    """The conditions of Winoground's model card, for each example."""
    lines = [
        {"id": n, "image_0": f"{n % 6:012d}", "image_1": f"{(n + 1 + n // 6) % 6:012d}"}
        | {"caption_0": caption(n), "caption_1": caption(n + 3), "collapsed_tag": "Object" if n % 3 else "Relation"}
        for n in range(12)
    ]
    file = tmp_path / "examples.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)) + "\n")
    got = evaluate(matcher, "compositional", str(photos), pairs=file)
    counted = {"text_score": 0, "image_score": 0, "group_score": 0}
    for one in lines:
        c0_i0, c0_i1, c1_i0, c1_i1 = (
            sim(matcher, image(photos, int(str(one[f"image_{i}"]))), str(one[f"caption_{c}"]))
            for c in (0, 1)
            for i in (0, 1)
        )
        text, photo = c0_i0 > c1_i0 and c1_i1 > c0_i1, c0_i0 > c0_i1 and c1_i1 > c1_i0
        for name, is_right in zip(counted, (text, photo, text and photo), strict=True):
            counted[name] += is_right
    assert {name: got[name] for name in counted} == pytest.approx({n: c / 12 for n, c in counted.items()})
    assert got["group_score_chance"] == pytest.approx(1 / 6)
    assert got["text_score_items@Relation"] == 4


def test_aro_cuts_boxes(matcher: Matcher, photos: Path, tmp_path: Path) -> None:
    boxes = [(0, 0, 20, 16), (5, 3, 20, 25), (8, 0, 24, 32), (20, 20, 30, 30)]  # the last reaches beyond the image
    values = [
        {"image_path": f"vg/{n % 6:012d}.jpg", "true_caption": caption(n), "false_caption": caption(n + 4)}
        | dict(zip(("bbox_x", "bbox_y", "bbox_w", "bbox_h"), boxes[n % 4], strict=True))
        | {"relation_name": "riding" if n < 5 else "under"}
        for n in range(12)
    ]
    got = evaluate(matcher, "compositional", str(photos), pairs=write(tmp_path / "vg.json", values))
    counted = []
    for n, one in enumerate(values):
        x, y, w, h = boxes[n % 4]
        part = image(photos, n).crop((x, y, x + w, y + h))
        counted.append(sim(matcher, part, str(one["true_caption"])) > sim(matcher, part, str(one["false_caption"])))
    assert got["accuracy@riding"] == pytest.approx(sum(counted[:5]) / 5)
    assert got["accuracy@under"] == pytest.approx(sum(counted[5:]) / 7)


def test_aro_order_counts_a_tie_as_right(folder: Path, photos: Path, tmp_path: Path) -> None:
    """As its argmax does, the true caption first; elsewhere a tie is wrong."""
    model, same = kiloword.load(folder), caption(0)
    options = [[caption(n), *(caption(n + k) for k in range(1, 5))] for n in range(11)] + [[same] * 5]
    values = [{"image": f"{n % 6:012d}.png", "caption_options": texts} for n, texts in enumerate(options)]
    got = evaluate(model, "compositional", str(photos), pairs=write(tmp_path / "coco.json", values))
    scores = [[sim(model, image(photos, n), text) for text in texts] for n, texts in enumerate(options)]
    assert got["accuracy"] == pytest.approx(sum(row.index(max(row)) == 0 for row in scores) / 12)
    assert (got["accuracy_chance"], got["ties"]) == (pytest.approx(1 / 5), 1)
    tied = [{"filename": f"{0:012d}.png", "caption": same, "negative_caption": same}]
    strict = evaluate(model, "compositional", str(photos), pairs=write(tmp_path / "tied.json", tied))
    assert (strict["accuracy"], strict["ties"]) == (0, 1)


def test_valse_counts_valid_foils_by_phenomenon(matcher: Matcher, photos: Path, tmp_path: Path) -> None:
    votes = [3, 2, 1, 0, 3, 3, 2, 2]
    values = {
        f"item_{n}": {"image_file": f"{n % 6:012d}.jpg", "caption": caption(n), "foil": caption(n + 4)}
        | {"linguistic_phenomena": "plurals" if n % 2 else "actions", "mturk": {"caption": v, "foil": 0}}
        for n, v in enumerate(votes)
    }
    got = evaluate(matcher, "compositional", str(photos), pairs=write(tmp_path / "valse.json", values))
    valid = [{"filename": e["image_file"], "negative_caption": e["foil"], **e} for e in values.values()]
    counted = [right(matcher, photos, e) for v, e in zip(votes, valid, strict=True) if v >= 2]
    assert (got["items"], got["accuracy"]) == (6, pytest.approx(sum(counted) / 6))
    assert {n for n in got if n.startswith("accuracy@")} == {"accuracy@plurals", "accuracy@actions"}


def test_aros_mean_omits_small_categories_of_attributes_and_symmetric_relations() -> None:
    hits = [True] * 30 + [False] * 3
    attributes, relations = BENCHMARKS["attributes"], BENCHMARKS["true_caption"]
    few = dict(means("accuracy", hits, [0.5] * 30 + [0.2] * 3, ["many"] * 30 + ["few"] * 3, attributes))
    assert (few["accuracy_by_category"], few["accuracy@few"], few["accuracy"]) == (1, 0, pytest.approx(30 / 33))
    assert few["accuracy_by_category_chance"] == 0.5
    named = ["riding"] * 30 + ["sitting next to"] * 2 + ["feeding"]
    assert dict(means("accuracy", hits, [0.5] * 33, named, relations))["accuracy_by_category"] == 1 / 2
    assert "accuracy_by_category" not in dict(means("accuracy", hits, [0.5] * 33, ["near"] * 33, relations))


def test_items_without_their_image_are_counted_and_named(folder: Path, photos: Path, tmp_path: Path) -> None:
    for n in range(2):
        (tmp_path / f"{n:012d}.png").write_bytes((photos / f"{n:012d}.png").read_bytes()[: -40 * n or None])
    gone = {**entries(1)[0], "filename": "gone.jpg"}
    skipped: list[Skipped] = []
    file = write(tmp_path / "a.json", [*entries(2), gone, gone])
    got = evaluate(kiloword.load(folder), "compositional", str(tmp_path), pairs=file, skipped=skipped)
    assert (got["items"], got["items_skipped"], got["skipped"]) == (1, 3, 2)
    assert [one.key for one in skipped] == ["gone.jpg", "000000000001"]
    source = open_source("scenes:test?n=2", 32)
    source.key = lambda row: f"{'ab'[row]}/same.png"  # type: ignore[method-assign]
    two = write(tmp_path / "b.json", [{**gone, "filename": name} for name in ("b/same.png", "same.png")])
    got = evaluate(kiloword.load(folder), "compositional", source, pairs=two, skipped=skipped)
    assert (got["items"], skipped[2].key) == (1, "same.png")  # which several images have


GOOD = {"filename": "000000000000.png", "caption": "a", "negative_caption": "b"}


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ([{"caption": "a", "image": "b"}], "entry 0"),
        ([GOOD, 3], "entry 1"),
        ([GOOD, {"foil": "b", "caption": "a", "image_file": "a"}], "several benchmarks"),
        ([{**GOOD, "caption": "  "}], "entry 0"),
        ({"swap": [{**GOOD, "filename": None}]}, "entry 0 of swap"),
        ([{"image": "a", "caption_options": ["a"]}], "entry 0"),
        ([{"image_0": "a", "caption_0": "a", "caption_1": "b"}], "entry 0"),
        ([{"true_caption": "a", "false_caption": "b", "image": "c", "bbox_x": 1}], "entry 0"),
        ([{**GOOD, "filename": "other.png"}], "other.png"),
        (None, "--pairs"),
    ],
)
def test_refused_files(values: Any, word: str, folder: Path, photos: Path, tmp_path: Path) -> None:
    file = None if values is None else write(tmp_path / "bad.json", values)
    with pytest.raises(ValueError, match=word):
        evaluate(kiloword.load(folder), "compositional", str(photos), pairs=file)


def test_the_page_has_the_figures_and_examples(folder: Path, photos: Path, tmp_path: Path) -> None:
    pairs, html = write(tmp_path / "add.json", [*entries(12), GOOD]), tmp_path / "page.html"
    main(["eval", "compositional", str(folder), "--data", str(photos), "--pairs", str(pairs), "--html", str(html)])
    text = html.read_text()
    assert all(word in text for word in ("accuracy_by_category", "<img", f" {caption(0)}<"))


# WinoGAViL

NAMES = [f"{n:012d}" for n in range(6)]
ITEMS = [("Nest", 5, [0, 4]), ("open", 6, [1, 3, 5]), ("tea", 5, [2])]


def associations(path: Path) -> Path:
    rows = [[json.dumps(NAMES[:n]), cue, json.dumps([NAMES[k] for k in chosen])] for cue, n, chosen in ITEMS]
    quoted = [",".join('"' + cell.replace('"', '""') + '"' for cell in row) for row in rows]
    path.write_text("\n".join(["candidates,cue,associations", *quoted]))
    return path


def test_winogavil_is_literal_code(folder: Path, photos: Path, tmp_path: Path) -> None:
    matcher, pairs = kiloword.load(folder), associations(tmp_path / "pairs.csv")
    expected = []
    for (_, count, chosen), prompt in zip(ITEMS, ["A nest", "An open", "A tea"], strict=True):
        scores = [sim(matcher, image(photos, n), prompt) for n in range(count)]
        best = set(np.argsort(scores)[-len(chosen) :].tolist())
        expected.append(len(best & set(chosen)) / len(best | set(chosen)))
    assert evaluate(matcher, "winogavil", str(photos), pairs=pairs) == {
        "items": 3,
        "avg_jaccard_score": pytest.approx(sum(expected) / 3),
        "jaccard_score_5-6": pytest.approx(sum(expected) / 3),
        "skipped": 0,
    }
    for n in range(5):
        image(photos, n).save(tmp_path / f"{n:012d}.png")
    assert evaluate(matcher, "winogavil", str(tmp_path), pairs=pairs)["items"] == 2


def test_ties_get_the_mean_over_their_orders() -> None:
    scores, relevant = torch.tensor([3.0, 1, 1, 1, 0]), torch.tensor([False, True, False, True, True])
    values = []
    for order in permutations(range(5)):
        ranked = sorted(order, key=lambda n: -scores[n].item())[:3]
        hits = sum(bool(relevant[n]) for n in ranked)
        values.append(hits / (6 - hits))
    assert jaccard(scores, relevant) == pytest.approx(float(np.mean(values)))


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("cue,candidates\nnest,[]", "associations"),
        ('cue,candidates,associations\nnest,"[""bee""]","[""hat""]"', "associations"),
        ('cue,candidates,associations\nnest,"[""bus""]","[""bus""]"', "'bus'"),
        (None, "--pairs"),
    ],
)
def test_refused_tables(folder: Path, photos: Path, tmp_path: Path, text: str | None, word: str) -> None:
    path = None if text is None else tmp_path / "pairs.csv"
    if path is not None:
        path.write_text(str(text))
    with pytest.raises(ValueError, match=word):
        evaluate(kiloword.load(folder), "winogavil", str(photos), pairs=path)
