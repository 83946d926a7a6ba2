"""Figures on data as it is distributed, by group, and result files for servers of hidden tests."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kiloword.api import Matcher
from kiloword.evaluation import evaluate
from kiloword.evaluation.caption_metrics import VARIETY, score_captions
from kiloword.evaluation.suite import read_suite
from kiloword.evaluation.tasks import CaptionOptions, VqaOptions
from kiloword.generation.options import GenerationOptions
from tars import photo

DOMAINS = ["in", "out", "near", "in", "out", "near"]
CAPTIONS = [[f"a {c} {n}" for c in ("dog on grass", "brown dog", "bus")[: 1 + n % 3]] for n in range(6)]
IDS = [581, 42, 7, 99, 3, 12]
FILES = [f"COCO_val2014_{one:012d}.jpg" for one in IDS]
ANSWERS = [["red"] * 10, ["2"] * 9 + ["two"], ["yes"] * 4 + ["no"] * 6]
HOW: dict[str, Any] = {"generate": GenerationOptions(method="greedy", longest=8), "judge": CaptionOptions(meteor=False)}


@pytest.fixture
def writer(matcher_of: Callable[[str], Matcher]) -> Matcher:
    return matcher_of("coca")


def dump(path: Path, data: Any) -> Path:
    path.write_text(json.dumps(data))
    return path


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """The same images and captions as NoCaps' json, with and without captions, and as a csv."""
    (tmp_path / "val2014").mkdir()
    for n, name in enumerate(FILES):
        (tmp_path / "val2014" / name).write_bytes(photo(n))
    rows = [{"id": i, "file_name": f, "domain": f"{d}-domain"} for i, f, d in zip(IDS, FILES, DOMAINS, strict=True)]
    texts = [{"image_id": i, "caption": text} for i, of_image in zip(IDS, CAPTIONS, strict=True) for text in of_image]
    dump(tmp_path / "captions.json", {"images": rows, "annotations": texts})
    dump(tmp_path / "test.json", {"images": rows})
    with (tmp_path / "captions.csv").open("w", newline="") as file:
        lines = [(f, text, d, i) for f, c, d, i in zip(FILES, CAPTIONS, DOMAINS, IDS, strict=True) for text in c]
        csv.writer(file).writerows([("image", "caption", "domain", "image_id"), *lines])
    return tmp_path


def test_groups_are_scored_by_themselves(data: Path) -> None:
    captions = [of_image[0] if n % 2 else "a dog" for n, of_image in enumerate(CAPTIONS)]
    results = [{"image_id": one, "caption": text} for one, text in zip(IDS, captions, strict=True)]
    file, judge = dump(data / "results.json", results), HOW["judge"]
    values = evaluate(None, "caption", f"{data}/captions.json", captions=file, judge=judge)
    for domain in ("in", "near", "out"):
        rows = [n for n, one in enumerate(DOMAINS) if one == domain]
        expected = score_captions([captions[n] for n in rows], [CAPTIONS[n] for n in rows]).values
        group = {n.split("_domain")[0]: v for n, v in values.items() if n.endswith(f"_domain:{domain}")}
        assert group == {**{n: v for n, v in expected.items() if n not in VARIETY}, "count": 2.0}
    apart = evaluate(None, "caption", f"{data}/captions.json", captions=file, judge=judge, group_by=("image_id",))
    assert apart["count_image_id:42"] == 1.0
    assert not {"cider_domain:in", "cider_image_id:42"} & set(apart)


def test_results_of_captions(writer: Matcher, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file is that of COCO's evaluator: integers of the annotation file as ids, each once, and text."""
    src, out, table = f"{data}/captions.json", data / "results.json", data / "table.json"
    values = evaluate(writer, "caption", src, **HOW, results=out)
    results = json.loads(out.read_text())
    assert [list(one) for one in results] == [["image_id", "caption"]] * 6
    assert [one["image_id"] for one in results] == IDS
    texts = dump(data / "texts.json", [{**one, "image_id": str(one["image_id"])} for one in results])
    for file in (out, texts):
        assert evaluate(None, "caption", src, captions=file, judge=HOW["judge"]) == values
    assert evaluate(writer, "caption", f"{data}/captions.csv?images=val2014", **HOW, results=table) == values
    (data / "val2014" / FILES[1]).unlink()
    found = evaluate(writer, "caption", f"{data}/test.json", generate=HOW["generate"], results=data / "test-out.json")
    assert found == {"captions": 5.0, "skipped": 1}  # images without captions are described, too
    assert json.loads((data / "test-out.json").read_text()) == json.loads(table.read_text())[:1] + results[2:]
    assert "1 of 6 rows" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("src", "options", "word"),
    [
        ("val2014", {"results": "results.json"}, "image_id"),
        ("twice.csv?images=val2014", {"results": "results.json"}, "two rows"),
        ("captions.json", {"captions": {"a": 1}}, "no list"),
        ("captions.json", {"captions": [{"image_id": 42}]}, "caption"),
        ("captions.json", {"captions": [{"image_id": 1, "caption": "x"}]}, "none of its 6 images"),
    ],
)
def test_refusals(writer: Matcher, data: Path, src: str, options: dict[str, Any], word: str) -> None:
    (data / "twice.csv").write_text(f"image,caption,image_id\n{FILES[0]},a,5\n{FILES[1]},b,5\n")
    (data / "val2014" / FILES[0]).with_suffix(".txt").write_text("a dog")
    if "captions" in options:
        options = {"captions": dump(data / "said.json", options["captions"]), "judge": HOW["judge"]}
    else:
        options = {"results": data / options["results"], **HOW}
    with pytest.raises(ValueError, match=word):
        evaluate(None if "captions" in options else writer, "caption", f"{data}/{src}", **options)
    assert not (data / "results.json").exists()


def test_questions_are_answered_and_exported(matcher_of: Callable[[str], Matcher], data: Path) -> None:
    """VQAv2's questions and annotations, and the same as a csv."""
    rows = [{"image_id": IDS[n], "question": f"what is {n}?", "question_id": 10 * IDS[n]} for n in range(3)]
    kinds = [{"question_type": f"what is {n % 2}", "answer_type": "other"} for n in range(3)]
    answers = [
        {"question_id": row["question_id"], "answers": [{"answer": a} for a in texts], **kind}
        for row, texts, kind in zip(rows, ANSWERS, kinds, strict=True)
    ]
    src = dump(data / "v2_OpenEnded_mscoco_val2014_questions.json", {"questions": rows, "data_subtype": "val2014"})
    known = dump(data / "v2_mscoco_val2014_annotations.json", {"annotations": answers})
    lines = [
        (name, row["question"], json.dumps(texts), *kind.values(), row["question_id"])
        for name, row, texts, kind in zip(FILES, rows, ANSWERS, kinds, strict=False)
    ]
    with (data / "vqa.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["image", "question", "answers", *kinds[0], "question_id"], *lines])
    (data / "list.txt").write_text("red\n2\nno\nyes\n")
    matcher, out, options = matcher_of("vqa"), data / "results.json", VqaOptions(answers=data / "list.txt")
    found = evaluate(matcher, "vqa", str(src), vqa=options, results=out)
    assert found == evaluate(matcher, "vqa", f"{data}/vqa.csv?images=val2014", vqa=options)
    assert {"accuracy", "accuracy/question/what is 0", "accuracy/answer/other"} <= set(found)
    results = json.loads(out.read_text())
    assert [list(one) for one in results] == [["question_id", "answer"]] * 3
    assert [one["question_id"] for one in results] == [10 * one for one in IDS[:3]]
    assert {one["answer"] for one in results} <= {"red", "2", "no", "yes"}
    usual = evaluate(matcher, "vqa", str(src), train=str(src), vqa=VqaOptions(most=1))  # red, of 10 annotators
    assert (usual["answers"], usual["majority_accuracy/question/what is 0"]) == (1, 0.5)
    known.unlink()
    with pytest.raises(ValueError, match="--results"):
        evaluate(matcher, "vqa", str(src), vqa=options)
    unscored = evaluate(matcher, "vqa", str(src), vqa=options, results=data / "test-out.json")
    assert unscored == {"questions": 3.0, "answers": 4.0, "outside": 0.0, "skipped": 0}
    assert json.loads((data / "test-out.json").read_text()) == results


def test_suites_find_what_is_distributed(data: Path) -> None:
    rows = [{"filename": f, "split": "test", "sentences": [{"raw": "a"}]} for f in FILES]
    dump(data / "dataset_flickr30k.json", {"images": rows, "dataset": "flickr30k"})
    for name in ("retrieval", "captions"):
        found = [entry.located(data) for entry in read_suite(name).dataset]
        assert list(filter(None, found)) == [f"{data}/dataset_flickr30k.json?split=test"]
