"""The task compositional against the benchmarks' evaluators, transcribed item by item; their files, and bad ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

import kiloword
from folders import model_folder
from kiloword.api import Matcher
from kiloword.cli.main import main
from kiloword.data.open import open_source
from kiloword.evaluation import evaluate
from kiloword.evaluation.compositional import page
from kiloword.evaluation.compositional.images import Cuts
from kiloword.evaluation.compositional.items import BENCHMARKS, Cut
from kiloword.evaluation.compositional.task import Comparisons, Verdict, figures
from kiloword.types import Skipped
from pages import sections

WORDS = ("red circle", "blue star", "green square", "two dogs", "one cat", "a small tree", "the old car")
METHODS = ("siglip", "llip", "prolip")


@pytest.fixture(scope="module", params=METHODS)
def matcher(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Matcher:
    return kiloword.load(model_folder(tmp_path_factory.mktemp("model") / request.param, request.param))


@pytest.fixture(scope="module")
def siglip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model") / "siglip")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of six images without captions."""
    folder, scenes = tmp_path_factory.mktemp("photos"), open_source("scenes:test?n=6", 32)
    for row in range(6):
        Image.fromarray(scenes.record(row).image).save(folder / f"{row:012d}.png")
    return folder


def image(photos: Path, n: int) -> Image.Image:
    return Image.open(photos / f"{n:012d}.png")


def write(path: Path, values: Any) -> Path:
    path.write_text(json.dumps(values))
    return path


def caption(n: int) -> str:
    return f"{WORDS[n % 7]} and {WORDS[(3 * n + 1) % 7]}"


def sim(matcher: Matcher, photo: Image.Image, text: str) -> float:
    """One image and one text at a time, as the public evaluators score them."""
    return float(matcher.score(matcher.encode_image(photo), matcher.encode_text(text)))


def both(matcher: Matcher, photos: Path, entry: dict[str, Any]) -> tuple[float, float]:
    photo = image(photos, int(entry["filename"][:-4]))
    return sim(matcher, photo, entry["caption"]), sim(matcher, photo, entry["negative_caption"])


def entries(n: int, start: int = 0) -> list[dict[str, Any]]:
    return [
        {"filename": f"{i % 6:012d}.jpg", "caption": caption(i), "negative_caption": caption(i + 5)}
        for i in range(start, start + n)
    ]


def test_sugarcrepe_from_a_folder_of_files(matcher: Matcher, photos: Path, tmp_path: Path) -> None:
    """Accuracy of each file: strictly greater counts. File names are those of COCO, the images' are another format."""
    data = {"add_obj": entries(9), "swap_att": entries(4, 20)}
    for name, values in data.items():
        write(tmp_path / f"{name}.json", {str(n): entry for n, entry in enumerate(values)})
    got = evaluate(matcher, "compositional", str(photos), pairs=tmp_path)
    right = {name: [a > b for a, b in (both(matcher, photos, e) for e in values)] for name, values in data.items()}
    shares = {name: sum(values) / len(values) for name, values in right.items()}
    assert {name: got[f"accuracy@{name}"] for name in data} == pytest.approx(shares)
    assert got["accuracy"] == pytest.approx(sum(map(sum, right.values())) / 13)
    assert got["accuracy_by_category"] == pytest.approx(sum(shares.values()) / 2)
    assert got["accuracy_chance"] == 0.5
    by_list = {name: [{**e, "key": e.pop("filename")[:-4]} for e in values] for name, values in data.items()}
    again = evaluate(matcher, "compositional", str(photos), pairs=str(write(tmp_path / "one.txt", by_list)))
    assert again == got


def test_sugarcrepe_pp(matcher: Matcher, photos: Path, tmp_path: Path) -> None:
    values = [{**entry, "id": n, "caption2": caption(n + 2)} for n, entry in enumerate(entries(14))]
    got = evaluate(matcher, "compositional", str(photos), pairs=write(tmp_path / "replace_att.json", values))
    by_image = by_text = 0
    for entry in values:
        p1, n = both(matcher, photos, entry)
        p2 = sim(matcher, image(photos, int(entry["filename"][:-4])), entry["caption2"])
        by_image += p1 > n and p2 > n
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
        s = {
            f"c{c}_i{i}": sim(matcher, image(photos, int(one[f"image_{i}"])), str(one[f"caption_{c}"]))
            for c in (0, 1)
            for i in (0, 1)
        }
        text = s["c0_i0"] > s["c1_i0"] and s["c1_i1"] > s["c0_i1"]
        photo = s["c0_i0"] > s["c0_i1"] and s["c1_i1"] > s["c1_i0"]
        for name, right in zip(counted, (text, photo, text and photo), strict=True):
            counted[name] += right
    assert {name: got[name] for name in counted} == pytest.approx({n: c / 12 for n, c in counted.items()})
    assert got["group_score_chance"] == pytest.approx(1 / 6)
    assert got["text_score_items@Relation"] == 4


def test_aro_cuts_boxes(matcher: Matcher, photos: Path, tmp_path: Path) -> None:
    boxes = [(0, 0, 20, 16), (5, 3, 20, 25), (8, 0, 24, 32), (20, 20, 30, 30)]  # the last reaches beyond the image
    values = [
        {"image_path": f"vg/{n % 6:012d}.jpg", "true_caption": caption(n), "false_caption": caption(n + 4)}
        | dict(zip(("bbox_x", "bbox_y", "bbox_w", "bbox_h"), boxes[n % 4], strict=True))
        | {"relation_name": "on" if n < 5 else "under"}
        for n in range(12)
    ]
    got = evaluate(matcher, "compositional", str(photos), pairs=write(tmp_path / "vg.json", values))
    right = []
    for n, one in enumerate(values):
        x, y, w, h = boxes[n % 4]
        part = image(photos, n % 6).crop((x, y, x + w, y + h))
        right.append(sim(matcher, part, str(one["true_caption"])) > sim(matcher, part, str(one["false_caption"])))
    assert got["accuracy@on"] == pytest.approx(sum(right[:5]) / 5)
    assert got["accuracy@under"] == pytest.approx(sum(right[5:]) / 7)


def test_aro_order_counts_a_tie_as_right(siglip: Path, photos: Path, tmp_path: Path) -> None:
    """As its argmax does, the true caption first; elsewhere a tie is wrong."""
    model, same = kiloword.load(siglip), caption(0)
    options = [[caption(n), *(caption(n + k) for k in range(1, 5))] for n in range(11)] + [[same] * 5]
    values = [{"image": f"{n % 6:012d}.png", "caption_options": texts} for n, texts in enumerate(options)]
    got = evaluate(model, "compositional", str(photos), pairs=write(tmp_path / "coco.json", values))
    predicted = [
        max(range(5), key=lambda k, n=n, t=texts: (sim(model, image(photos, n % 6), t[k]), -k))  # type: ignore[misc]
        for n, texts in enumerate(options)
    ]
    assert got["accuracy"] == pytest.approx(predicted.count(0) / 12)
    assert got["accuracy_chance"] == pytest.approx(1 / 5)
    assert got["ties"] == 1
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
    rows = []
    for v, e in zip(votes, values.values(), strict=True):
        entry = {"filename": e["image_file"], "caption": e["caption"], "negative_caption": e["foil"]}
        rows.append((v, *both(matcher, photos, entry)))
    right = [a > b for v, a, b in rows if v >= 2]
    assert got["items"] == 6
    assert got["accuracy"] == pytest.approx(sum(right) / 6)
    assert {n for n in got if n.startswith("accuracy@")} == {"accuracy@plurals", "accuracy@actions"}


def test_aros_mean_omits_small_categories_of_attributes_and_symmetric_relations() -> None:
    right = torch.tensor([True] * 30 + [False] * 3)
    verdict = Verdict("accuracy", right, ~right, torch.full((33,), 0.5))
    attributes, relations = BENCHMARKS["attributes"], BENCHMARKS["true_caption"]
    got = dict(figures(verdict, ["many"] * 30 + ["few"] * 3, attributes))
    assert (got["accuracy_by_category"], got["accuracy@few"]) == (1, 0)
    assert got["accuracy"] == pytest.approx(30 / 33)
    verdict.chance[30:] = 0.2  # of five options in place of two
    assert dict(figures(verdict, ["many"] * 30 + ["few"] * 3, attributes))["accuracy_by_category_chance"] == 0.5
    of_relations = ["riding"] * 30 + ["sitting next to"] * 2 + ["feeding"]
    assert dict(figures(verdict, of_relations, relations))["accuracy_by_category"] == 1 / 2
    assert "accuracy_by_category" not in dict(figures(verdict, ["near"] * 33, relations))


def test_only_pairs_of_items_are_scored(
    siglip: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs: list[int] = []
    plain = Comparisons.scores

    def counted(self: Comparisons, score: Any, images: Any, texts: Any) -> Tensor:
        pairs.append(len(self.pairs))
        return plain(self, score, images, texts)

    monkeypatch.setattr(Comparisons, "scores", counted)
    monkeypatch.setattr(Matcher, "score", None)
    file = write(tmp_path / "x.json", dict(enumerate(entries(20))))
    evaluate(kiloword.load(siglip), "compositional", str(photos), pairs=file)
    assert pairs == [40]


def test_items_without_image_are_counted_and_named(siglip: Path, photos: Path, tmp_path: Path) -> None:
    values = [*entries(4), {**entries(1)[0], "filename": "gone.jpg"}, {**entries(1)[0], "filename": "gone.jpg"}]
    skipped: list[Skipped] = []
    file = write(tmp_path / "a.json", values)
    got = evaluate(kiloword.load(siglip), "compositional", str(photos), pairs=file, skipped=skipped)
    assert (got["items"], got["items_skipped"], got["skipped"]) == (4, 2, 1)
    assert [(one.key, one.reason) for one in skipped] == [("gone.jpg", f"not in {photos}, 2 uses")]


def test_an_unreadable_image_is_skipped(siglip: Path, photos: Path, tmp_path: Path) -> None:
    for n in range(2):
        (tmp_path / f"{n:012d}.png").write_bytes((photos / f"{n:012d}.png").read_bytes()[: -40 * n or None])
    file = write(tmp_path / "a.json", entries(2))
    got = evaluate(kiloword.load(siglip), "compositional", str(tmp_path), pairs=file)
    assert (got["items"], got["items_skipped"], got["skipped"]) == (1, 1, 1)


GOOD = {"filename": "000000000000.png", "caption": "a", "negative_caption": "b"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], "holds no items"),
        ("text", "holds one str: expected a list of items"),
        ([3], "the first item has the keys of nothing, none of: caption_0 (Winoground), foil (VALSE)"),
        ([{"caption": "a", "image": "b"}], "the first item has the keys caption, image, none of: "),
        ([GOOD, 3], "item 1: expected an object with captions, got int"),
        ([GOOD, {"filename": "a"}], "item 1 has no caption; its keys are filename. SugarCrepe needs it"),
        ([{**GOOD, "caption": 7}], "item 0 has caption that is no text"),
        ([{**GOOD, "caption": "  "}], "item 0 has caption that is no text"),
        ([{**GOOD, "caption": "\ud800"}], "item 0 has caption that is no text"),
        ({"swap": [{**GOOD, "filename": None}]}, "item 0 of swap has filename that is no text"),
        ([{"caption_options": ["a"]}], "caption_options that are no list of at least two captions"),
        ([{"true_caption": "a", "false_caption": "b", "image": "c", "bbox_x": 1}], "bbox_h that are no box"),
        ([{"foil": "b", "caption": "a"}], "item 0 has no image_file"),
        ([{**GOOD, "filename": "other.png"}], "has none of the 1 images that --pairs names, such as 'other.png'"),
    ],
)
def test_bad_files(values: Any, message: str, siglip: Path, photos: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "bad.json", values)
    with pytest.raises(ValueError) as error:
        evaluate(kiloword.load(siglip), "compositional", str(photos), pairs=file)
    assert message in str(error.value)


def test_bad_paths(siglip: Path, photos: Path, tmp_path: Path) -> None:
    model = kiloword.load(siglip)
    (tmp_path / "broken.json").write_text("[" * 100_000)
    for pairs, message in (
        (None, "--pairs is missing"),
        (tmp_path / "none.json", "no such file or folder"),
        (photos, "holds no .json or .jsonl file"),
        (tmp_path / "broken.json", "broken.json is not json"),
    ):
        with pytest.raises(ValueError, match=message):
            evaluate(model, "compositional", str(photos), pairs=pairs)
    write(tmp_path / "broken.json", [GOOD])
    write(tmp_path / "z.json", [{**GOOD, "foil": "b", "image_file": "a"}])
    with pytest.raises(ValueError, match="holds files of SugarCrepe and VALSE: give each benchmark its own"):
        evaluate(model, "compositional", str(photos), pairs=tmp_path)


def test_one_name_of_several_images(siglip: Path, tmp_path: Path) -> None:
    source = open_source("scenes:test?n=2", 32)
    source.key = lambda row: f"{'ab'[row]}/same.png"  # type: ignore[method-assign]
    file = write(tmp_path / "a.json", [{**GOOD, "filename": "same.png"}])
    with pytest.raises(ValueError, match=r"several images that 'same\.png' can mean"):
        evaluate(kiloword.load(siglip), "compositional", source, pairs=file)
    whole = write(tmp_path / "b.json", [{**GOOD, "filename": "b/same.png"}])
    assert evaluate(kiloword.load(siglip), "compositional", source, pairs=whole)["items"] == 1


def test_files_of_remote_images_are_those_of_their_rows() -> None:
    source: Any = open_source("scenes:test?n=4", 32)
    assert [Cuts(source, [(3, Cut("c")), (1, Cut("b"))]).locate(row) for row in range(2)] == [(source, 3), (source, 1)]


def test_page(siglip: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Table and bars by category with chance; items right and wrong; text of the data is escaped."""
    values = [*entries(12), {**GOOD, "caption": "<script>alert(1)</script> red", "negative_caption": "blue"}]
    pairs = write(tmp_path / "add<i>.json", values)
    html = tmp_path / "page.html"
    main(["eval", "compositional", str(siglip), "--data", str(photos), "--pairs", str(pairs), "--html", str(html)])
    assert "accuracy_chance" in capsys.readouterr().out
    text = html.read_text()
    assert "<script" not in text
    assert "<i>.json" not in text
    read = sections(text)
    assert read["Accuracy"].tables[0][0] == ["category", "items", "siglip", "chance"]
    assert [row[0] for row in read["Accuracy"].tables[0][1:]] == ["add<i>", "all items", "mean over categories"]
    assert text.count('class="bar"') == 1
    assert 'class="mark" style="left:50.0%"' in text
    example = next(name for name in read if name.startswith("Examples"))
    assert "Wrong" in read[example].words
    assert text.count('<figure class="card">') == 2 * page.EXAMPLES or "Right" in read[example].words
