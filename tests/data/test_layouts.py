"""Captions and questions as their authors distribute them."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kiloword.data.open import open_source
from kiloword.types import BadSample, LabelSet, NoCaption, Record
from sources import records
from tars import photo

CAPTIONS = [["a dog", "a brown dog, running"], ["two\ncats"], ["a red bus", "a bus"]]
IDS = [42, 7, 581]
FILES = [f"COCO_val2014_{one:012d}.jpg" for one in IDS]
QUESTIONS: list[dict[str, Any]] = [
    {"image_id": 42, "question": "what is it?", "question_id": 42000},
    {"image_id": 7, "question": "how many cats?", "question_id": 7001},
    {"image_id": 42, "question": "is it a dog?", "question_id": 42001},
]
ANSWERS = {42000: ["dog"] * 9 + ["a dog"], 7001: ["2"] * 10, 42001: ["yes"] * 10}
TYPES = {42000: ("what is", "other"), 7001: ("how many", "number"), 42001: ("is it", "yes/no")}


def dump(path: Path, data: Any) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(data))
    return str(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three images in `val2014`."""
    (tmp_path / "val2014").mkdir()
    for seed, name in enumerate(FILES):
        (tmp_path / "val2014" / name).write_bytes(photo(seed))
    return tmp_path


def images(**more: list[Any]) -> list[dict[str, Any]]:
    rows = [{"id": one, "file_name": name, "width": 16} for one, name in zip(IDS, FILES, strict=True)]
    return [row | {key: values[n] for key, values in more.items()} for n, row in enumerate(rows)]


def annotations() -> list[dict[str, Any]]:
    """Captions of several images, not in their order."""
    pairs = [(0, 0), (2, 0), (0, 1), (1, 0), (2, 1)]
    return [{"image_id": IDS[i], "id": n, "caption": CAPTIONS[i][c]} for n, (i, c) in enumerate(pairs)]


def karpathy(folder: Path, splits: list[str], **more: Any) -> str:
    rows = [
        {"filename": name, "sentences": [{"raw": text, "tokens": []} for text in texts], "split": split, "imgid": n}
        for n, (name, texts, split) in enumerate(zip(FILES, CAPTIONS, splits, strict=True))
    ]
    rows = [row | {"filepath": "val2014", "cocoid": one} for row, one in zip(rows, IDS, strict=True)] if more else rows
    return dump(folder / "caption_datasets" / "dataset_coco.json", {"images": rows, "dataset": "coco"})


def vqa(folder: Path, answered: bool = True, subtype: str = "val2014") -> str:
    if answered:
        rows = [
            {
                "question_id": one,
                "answers": [{"answer": a, "answer_confidence": "yes", "answer_id": n} for n, a in enumerate(texts)],
                "question_type": TYPES[one][0],
                "answer_type": TYPES[one][1],
            }
            for one, texts in sorted(ANSWERS.items())
        ]
        dump(folder / "v2_mscoco_val2014_annotations.json", {"annotations": rows})
    questions = {"questions": QUESTIONS, "data_subtype": subtype, "task_type": "Open-Ended"}
    return dump(folder / "v2_OpenEnded_mscoco_val2014_questions.json", questions)


def captions(src: str) -> list[list[str]]:
    return [record.captions for record in records(open_source(src))]


def expected(place: str = "", texts: list[list[str]] = CAPTIONS, **info: Sequence[Any]) -> list[Record]:
    """A record of each image. Args: place: before the names of images; info: values of the three images."""
    return [
        Record(place + name[:-4], photo(n), texts[n], info={key: values[n] for key, values in info.items()})
        for n, name in enumerate(FILES)
    ]


@pytest.mark.parametrize("query", ["", "?images=val2014", "?images=../val2014", "?images={folder}/val2014"])
def test_coco_and_the_domains_of_nocaps(folder: Path, query: str) -> None:
    rows = images(domain=["in-domain", "out-domain", "near-domain"])
    src = dump(folder / "annotations" / "captions_val2014.json", {"images": rows, "annotations": annotations()})
    source = open_source(src + query.format(folder=folder))
    assert records(source) == expected(image_id=IDS, domain=["in", "out", "near"])
    assert records(pickle.loads(pickle.dumps(source))) == records(source)


def test_images_and_captions_without_the_other(folder: Path) -> None:
    source = open_source(dump(folder / "image_info_test2014.json", {"images": images(), "categories": []}))
    with pytest.raises(NoCaption) as caught:
        source.record(1)
    assert (caught.value.record.image, caught.value.record.info) == (photo(1), {"image_id": 7})
    more = [*annotations(), {"image_id": 99, "id": 9, "caption": "x"}, {"image_id": 7, "caption": {}}]
    other: Any = open_source(dump(folder / "x.json", {"images": images(), "annotations": more}))
    assert "1 captions are of images that `images` does not list" in other.notes[0]
    assert other.captions(0) == CAPTIONS[0]
    with pytest.raises(BadSample, match="a caption is not text"):
        other.record(1)


def test_karpathy(folder: Path) -> None:
    src = karpathy(folder, ["test"] * 3, coco=True)
    assert records(open_source(src)) == expected("val2014/", image_id=IDS)
    src = karpathy(folder, ["test"] * 3)  # as of flickr30k
    assert records(open_source(src)) == expected(image_id=range(3))


def test_splits_of_karpathy(folder: Path) -> None:
    src = karpathy(folder, ["train", "restval", "test"], coco=True)
    for split, expected in (("train", CAPTIONS[:2]), ("restval", CAPTIONS[1:2]), ("test", CAPTIONS[2:])):
        assert captions(f"{src}?split={split}") == expected
    with pytest.raises(ValueError, match="train, restval, test"):
        open_source(src + "?split=tset")


@pytest.mark.parametrize("name", ["results_20130124.token", "Flickr8k.token.txt"])
def test_tokens(folder: Path, name: str) -> None:
    one_line = [[text.replace("\n", " ") for text in texts] for texts in CAPTIONS]
    lines = [f"{f}#{n}\t{text}\n" for f, texts in zip(FILES, one_line, strict=True) for n, text in enumerate(texts)]
    (folder / name).write_text("".join(lines))
    assert records(open_source(str(folder / name))) == expected(texts=one_line)
    (folder / "Flickr_8k.testImages.txt").write_text(f"{FILES[2]}\n{FILES[0]}\n")
    assert captions(f"{folder / name}?split=Flickr_8k.testImages.txt") == [one_line[0], one_line[2]]
    for split in ("dev.txt", "val2014"):  # nothing, and a folder
        with pytest.raises(ValueError, match=f"no file is named split={split}"):
            open_source(f"{folder / name}?split={split}")
    (folder / name).write_text(f"{FILES[0]}#0\tx\nnothing\n")
    source = open_source(str(folder / name))
    assert len(source) == 2
    with pytest.raises(BadSample, match="line is not IMAGE#NUMBER"):
        source.record(1)
    (folder / os.fsdecode(b"caf\xe9.jpg")).write_bytes(photo())
    (folder / name).write_bytes(b"caf\xe9.jpg#0\tx\n")
    assert open_source(str(folder / name)).record(0).image == photo()


@pytest.mark.parametrize("query", ["", "?annotations=v2_mscoco_val2014_annotations.json&images=val2014"])
def test_vqa(folder: Path, query: str) -> None:
    src = vqa(folder)
    source: Any = open_source(src + query)
    for record, asked, image in zip(records(source), QUESTIONS, (0, 1, 0), strict=True):
        answers, (question_type, answer_type) = ANSWERS[asked["question_id"]], TYPES[asked["question_id"]]
        assert (record.image, record.captions) == (photo(image), answers)
        types = {"question_type": question_type, "answer_type": answer_type}
        assert record.info == {**asked, "answers": answers, **types}
    assert source.info(1)["question"] == "how many cats?"
    path = folder / "v2_mscoco_val2014_annotations.json"
    path.write_text(path.read_text().replace('"2"', '"3"'))
    assert open_source(src + query).fingerprint != source.fingerprint


def test_questions_without_answers(folder: Path) -> None:
    (folder / "val2014").rename(folder / "test2015")
    for name in FILES:
        (folder / "test2015" / name).rename(folder / "test2015" / name.replace("val2014", "test2015"))
    source = open_source(vqa(folder, answered=False, subtype="test-dev2015"))
    with pytest.raises(NoCaption) as caught:
        source.record(1)
    record = caught.value.record
    assert (record.image, record.info["question"]) == (photo(1), "how many cats?")
    assert "answers" not in record.info


@pytest.mark.parametrize("lines", [False, True])
def test_a_list_of_objects(folder: Path, lines: bool) -> None:
    def objects(rows: list[dict[str, Any]]) -> list[Record]:
        path = folder / ("x.jsonl" if lines else "x.json")
        path.write_text("\n".join(map(json.dumps, rows)) if lines else json.dumps(rows))
        return records(open_source(str(path)))

    rows = [{"image": f"val2014/{name}", "caption": texts} for name, texts in zip(FILES, CAPTIONS, strict=True)]
    assert [r.captions for r in objects(rows)] == CAPTIONS
    assert objects([{"image": FILES[0], "caption": {"raw": "x", "tokens": ["x"]}, "n": 1.5}])[0].captions == ["x"]
    vizwiz = [{"image": FILES[1], "question": "how many?", "answers": [{"answer": "2"}, {"answer": "two"}]}]
    assert objects(vizwiz)[0].info["answers"] == ["2", "two"]
    for given, expected in (([[0, 2], [], [1]], [(0, 2), (), (1,)]), ([["b", "c"], ["a"], []], [(1, 2), (0,), ()])):
        found = objects([{"image": FILES[row], "label": label} for row, label in enumerate(given)])
        assert [r.label for r in found] == [LabelSet(indices) for indices in expected]
    surrogate = [rows[0], {**rows[1], "caption": "\ud800"}]
    with pytest.raises(BadSample, match="caption is not UTF-8"):
        objects(surrogate)


def test_where_images_are(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    src = dump(folder / "annotations" / "x.json", {"images": images(), "annotations": annotations()})
    (folder / "copy").mkdir()
    (folder / "copy" / FILES[0]).write_bytes(photo())
    with pytest.raises(ValueError, match=r"its images are in .*copy and in .*val2014. Choose one: x.json\?images="):
        open_source(src)
    with pytest.raises(BadSample, match="image cannot be read"):  # missing images are bad samples
        open_source(src + "?images=copy").record(1)
    nearer = folder / "annotations" / FILES[0]  # goes before the folders beside that of the file
    nearer.write_bytes(photo(9))
    assert open_source(src).record(0).image == photo(9)
    nearer.unlink()
    (folder / FILES[0]).write_bytes(photo(8))
    assert open_source(src).record(0).image == photo(8)
    (folder / FILES[0]).unlink()
    many = images() + [{"id": n, "file_name": f"{n}.jpg"} for n in range(100, 104)]
    later = dump(folder / "annotations" / "later.json", {"images": many[::-1], "annotations": annotations()})
    (folder / "copy" / FILES[0]).unlink()
    assert open_source(later).record(4).image == photo(2)  # the first images are not there
    for name in ("copy", "val2014"):
        (folder / name).rename(folder / f".{name}")
    with pytest.raises(ValueError, match=r"none of its images, .* is in .*annotations, .* their folders"):
        open_source(src)
    monkeypatch.chdir(folder / ".val2014")
    assert open_source(src).record(0).image == photo()


BAD: list[tuple[Any, str]] = [
    (3, "COCO"),
    ({"images": ["x"]}, "COCO"),
    ({"images": [*images(), {"file_name": "x"}]}, "'id'"),
    ({"images": images(), "annotations": [{"image_id": 42}]}, "'caption'"),
    ({"images": [images()[0]] * 2}, "same id"),
    ({"images": [{"filename": "x", "sentences": [{}], "split": "test"}]}, "'raw'"),
    ({"questions": [{"question_id": 1, "image_id": 1}]}, "'question'"),
    ({"annotations": [{"question_id": 1, "answers": []}]}, "annotations="),
    ({"images": []}, "no rows"),
    (b"{", "no JSON"),
    (b"[" * 100_000, "no JSON"),
]


@pytest.mark.parametrize(("data", "word"), BAD)
def test_json_that_is_not_what_it_claims(folder: Path, data: Any, word: str) -> None:
    (folder / "x.json").write_bytes(data if isinstance(data, bytes) else json.dumps(data).encode())
    with pytest.raises(ValueError, match=word):
        open_source(f"{folder}/x.json")


def test_bad_answers(folder: Path) -> None:
    src, path = vqa(folder), folder / "v2_mscoco_val2014_annotations.json"
    rows = json.loads(path.read_text())["annotations"]
    other = dump(folder / "x.json", {"images": images()})
    wrong = {"annotations": [{**rows[0], "answers": [{"text": "x"}]}, *rows[1:]]}
    dump(path, wrong)
    with pytest.raises(BadSample, match="answers are not strings"):
        open_source(src).record(1)
    dump(path, {"annotations": rows[:1]})
    for name, word in (
        (src, "42000"),
        (src + "?annotations=none.json", "annotations=none"),
        (other + "?annotations=x.json", "annotations= is not read"),
    ):
        with pytest.raises(ValueError, match=word):
            open_source(name)
