"""Figures on data as it is distributed, by group, and result files for servers of hidden tests."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kiloword.api import Matcher
from kiloword.cli.main import main
from kiloword.config.recipes import ModelFile, sizes
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.evaluation import evaluate
from kiloword.evaluation.caption import CaptionOptions
from kiloword.evaluation.caption_metrics import VARIETY, score_captions
from kiloword.evaluation.suite import read_suite
from kiloword.evaluation.vqa import VqaOptions
from kiloword.generation.options import GenerationOptions
from kiloword.methods.registry import preset
from kiloword.models.build import build
from kiloword.models.model_folder import save_model
from kiloword.types import Skipped
from tars import photo

QUIET = CaptionOptions(meteor=False)
GREEDY = GenerationOptions(method="greedy", longest=8)
DOMAINS = ["in", "out", "near", "in", "out", "near"]
CAPTIONS = [[f"a {c} {n}" for c in ("dog on grass", "brown dog", "bus")[: 1 + n % 3]] for n in range(6)]
IDS = [581, 42, 7, 99, 3, 12]
FILES = [f"COCO_val2014_{one:012d}.jpg" for one in IDS]
ANSWERS = [["red"] * 10, ["2"] * 9 + ["two"], ["yes"] * 4 + ["no"] * 6]
TOKENIZER = Tokenizer.train([text for texts in CAPTIONS for text in texts] * 4, 300)


def model(method: str) -> Matcher:
    config = sizes()["debug"]
    text = replace(config.text, vocab=TOKENIZER.vocab, special=TOKENIZER.roles.ids())
    return Matcher(build(replace(config, text=text), preset(method), seed=0), TOKENIZER)


@pytest.fixture(scope="module")
def writer() -> Matcher:
    return model("coca")


def dump(path: Path, data: Any) -> str:
    path.write_text(json.dumps(data))
    return str(path)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """The same images and captions as NoCaps' json, with and without captions, as a csv, and as a folder."""
    (tmp_path / "val2014").mkdir()
    for n, name in enumerate(FILES):
        (tmp_path / "val2014" / name).write_bytes(photo(n))
        (tmp_path / "val2014" / name).with_suffix(".txt").write_text("\n".join(CAPTIONS[n]))
    rows = [{"id": i, "file_name": f, "domain": f"{d}-domain"} for i, f, d in zip(IDS, FILES, DOMAINS, strict=True)]
    texts = [{"image_id": i, "caption": text} for i, of_image in zip(IDS, CAPTIONS, strict=True) for text in of_image]
    dump(tmp_path / "captions.json", {"images": rows, "annotations": texts})
    dump(tmp_path / "test.json", {"images": rows})
    with (tmp_path / "captions.csv").open("w", newline="") as file:
        lines = [(f, text, d, i) for f, c, d, i in zip(FILES, CAPTIONS, DOMAINS, IDS, strict=True) for text in c]
        csv.writer(file).writerows([("file", "text", "domain", "image_id"), *lines])
    return tmp_path


def table_of(data: Path) -> str:
    return f"{data}/captions.csv?image=file&caption=text&images=val2014"


def test_all_forms_of_the_data_give_equal_figures(writer: Matcher, data: Path) -> None:
    sources = (f"{data}/captions.json", table_of(data))
    retrieval = [evaluate(writer, "retrieval", src) for src in (*sources, f"{data}/val2014")]
    assert retrieval[0] == retrieval[1]
    assert retrieval[0] == pytest.approx(retrieval[2])  # the folder has another order, and ties
    one, other = (evaluate(writer, "caption", src, generate=GREEDY, judge=QUIET) for src in sources)
    assert one == other
    assert {"cider", "cider_domain:in", "cider_domain:near", "cider_domain:out"} <= set(one)
    folder = evaluate(writer, "caption", f"{data}/val2014", generate=GREEDY, judge=QUIET)
    assert folder == pytest.approx({name: value for name, value in one.items() if ":" not in name})


def test_groups_are_scored_by_themselves(data: Path) -> None:
    captions = [of_image[0] if n % 2 else "a dog" for n, of_image in enumerate(CAPTIONS)]
    results = [{"image_id": one, "caption": text} for one, text in zip(IDS, captions, strict=True)]
    file = Path(dump(data / "results.json", results))
    values = evaluate(None, "caption", f"{data}/captions.json", captions=file, judge=QUIET)
    for domain in ("in", "near", "out"):
        rows = [n for n, one in enumerate(DOMAINS) if one == domain]
        expected = score_captions([captions[n] for n in rows], [CAPTIONS[n] for n in rows]).values
        group = {n.split("_domain")[0]: v for n, v in values.items() if n.endswith(f"_domain:{domain}")}
        assert group == {**{n: v for n, v in expected.items() if n not in VARIETY}, "count": 2.0}
    apart = evaluate(None, "caption", f"{data}/captions.json", captions=file, judge=QUIET, group_by=("image_id",))
    assert apart["count_image_id:42"] == 1.0
    assert "cider_domain:in" not in apart
    with pytest.raises(ValueError, match="region"):
        evaluate(None, "caption", f"{data}/captions.json", captions=file, judge=QUIET, group_by=("region",))


def test_results_of_captions(writer: Matcher, data: Path) -> None:
    """The file is that of COCO's evaluator: integers of the annotation file as ids, each once, and text."""
    out, table = data / "results.json", data / "table.json"
    values = evaluate(writer, "caption", f"{data}/captions.json", generate=GREEDY, judge=QUIET, results=out)
    results = json.loads(out.read_text())
    assert [set(one) for one in results] == [{"image_id", "caption"}] * 6
    assert [one["image_id"] for one in results] == IDS
    assert all(type(one["image_id"]) is int and type(one["caption"]) is str for one in results)
    assert evaluate(None, "caption", f"{data}/captions.json", captions=out, judge=QUIET) == values
    texts = dump(data / "texts.json", [{**one, "image_id": str(one["image_id"])} for one in results])
    assert evaluate(None, "caption", f"{data}/captions.json", captions=Path(texts), judge=QUIET) == values
    evaluate(writer, "caption", table_of(data), generate=GREEDY, judge=QUIET, results=table)
    assert table.read_text() == out.read_text()


def test_images_without_captions_are_captioned(writer: Matcher, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = data / "results.json"
    expected = evaluate(writer, "caption", f"{data}/captions.json", generate=GREEDY, judge=QUIET, results=out)
    text = out.read_text()
    assert expected["skipped"] == 0
    assert evaluate(writer, "caption", f"{data}/test.json", generate=GREEDY, results=out) == {
        "captions": 6.0,
        "skipped": 0,
    }
    assert out.read_text() == text
    pq.write_table(pa.table({"key": [FILES[0][:-4]], "captions": [["a dog"]]}), data / "made.parquet")
    made = evaluate(None, "caption", f"{data}/test.json", captions=data / "made.parquet", results=out)
    assert made == {"captions": 1.0, "skipped": 5}
    assert json.loads(out.read_text()) == [{"image_id": 581, "caption": "a dog"}]
    assert "5 of 6 rows have no result" in capsys.readouterr().err
    (data / "val2014" / FILES[1]).unlink()
    bad: list[Skipped] = []
    evaluate(writer, "caption", f"{data}/test.json", generate=GREEDY, results=out, skipped=bad)
    assert [one.key for one in bad] == [FILES[1][:-4]]
    assert len(json.loads(out.read_text())) == 5


@pytest.mark.parametrize(
    ("src", "results", "message"),
    [
        ("val2014", "results.json", "has no `image_id`, by which result files name a row"),
        ("captions.json", ".", "is a folder. Expected a file"),
        ("twice.csv?images=val2014", "results.json", "has two rows with image_id 5"),
    ],
)
def test_refused_result_files(writer: Matcher, data: Path, src: str, results: str, message: str) -> None:
    (data / "twice.csv").write_text(f"image,caption,image_id\n{FILES[0]},a,5\n{FILES[1]},b,5\n")
    with pytest.raises(ValueError, match=message):
        evaluate(writer, "caption", f"{data}/{src}", generate=GREEDY, judge=QUIET, results=data / results)
    assert not (data / "results.json").exists()


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ({}, "is no list of results. Expected objects with `image_id` and `caption`"),
        ([{"image_id": 42}], "is no list of results"),
        ([{"image_id": 42, "caption": "x"}] * 2, "two results of one image_id"),
        ([{"image_id": 1, "caption": "x"}], "has captions for none of the images .* is 1"),
    ],
)
def test_refused_captions(data: Path, results: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate(None, "caption", f"{data}/captions.json", captions=Path(dump(data / "r.json", results)), judge=QUIET)


@pytest.fixture
def asked(data: Path) -> Path:
    """VQAv2's questions and annotations; the same as a csv."""
    rows = [{"image_id": IDS[n], "question": f"what is {n}?", "question_id": 10 * IDS[n]} for n in range(3)]
    types = [{"question_type": f"what is {n % 2}", "answer_type": "other"} for n in range(3)]
    answers = [
        {"question_id": row["question_id"], "answers": [{"answer": a} for a in texts], **kind}
        for row, texts, kind in zip(rows, ANSWERS, types, strict=True)
    ]
    dump(data / "v2_OpenEnded_mscoco_val2014_questions.json", {"questions": rows, "data_subtype": "val2014"})
    dump(data / "v2_mscoco_val2014_annotations.json", {"annotations": answers})
    with (data / "vqa.csv").open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["image", "question", "answers", "question_type", "answer_type", "question_id"])
        for n, row in enumerate(rows):
            values = (row["question"], json.dumps(ANSWERS[n]), *types[n].values(), row["question_id"])
            out.writerow([FILES[n], *values])
    (data / "list.txt").write_text("red\n2\nno\nyes\n")
    return data


def test_questions_are_answered_and_exported(asked: Path) -> None:
    matcher, out = model("vqa"), asked / "results.json"
    options = VqaOptions(answers=asked / "list.txt")
    src = f"{asked}/v2_OpenEnded_mscoco_val2014_questions.json"
    values = evaluate(matcher, "vqa", src, vqa=options, results=out)
    assert values == evaluate(matcher, "vqa", f"{asked}/vqa.csv?images=val2014", vqa=options)
    assert {"accuracy/question/what is 0", "accuracy/answer/other"} <= set(values)
    results = json.loads(out.read_text())
    assert [set(one) for one in results] == [{"question_id", "answer"}] * 3
    assert [one["question_id"] for one in results] == [10 * one for one in IDS[:3]]
    assert {one["answer"] for one in results} <= {"red", "2", "no", "yes"}
    (asked / "v2_mscoco_val2014_annotations.json").unlink()
    with pytest.raises(ValueError, match=r"--results FILE"):
        evaluate(matcher, "vqa", src, vqa=options)
    unscored = evaluate(matcher, "vqa", src, vqa=options, results=asked / "test.json")
    assert unscored == {"questions": 3.0, "answers": 4.0, "outside": 0.0, "skipped": 0}
    assert json.loads((asked / "test.json").read_text()) == results


def test_on_the_command_line(writer: Matcher, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_model(
        data / "model",
        writer.model,
        TOKENIZER,
        ModelFile(method="coca", settings={}, model=writer.model.config, size="debug"),
    )
    flags = ["--judge.no-meteor", "--generate.method", "greedy", "--generate.longest", "8", "--device", "cpu"]
    page, out = data / "page.html", data / "results.json"
    src = f"{data}/captions.json"
    main(["eval", "caption", str(data / "model"), "--data", src, *flags, "--results", str(out), "--html", str(page)])
    assert "cider_domain:near" in capsys.readouterr().out
    main(["eval", "caption", str(out), "--data", src, "--judge.no-meteor", "--json", str(data / "again.json")])
    assert json.loads((data / "again.json").read_text())["count_domain:in"] == 2
    with pytest.raises(SystemExit) as end:
        main(["eval", "caption", str(out), str(data / "model"), "--data", src, "--results", str(data / "r.json")])
    assert end.value.code == 2
    assert "--results is one file: give one model at a time" in capsys.readouterr().err


def test_suites_find_what_is_distributed(writer: Matcher, data: Path) -> None:
    rows = [
        {"filename": f, "imgid": n, "split": "test", "sentences": [{"raw": text} for text in CAPTIONS[n]]}
        for n, f in enumerate(FILES)
    ]
    dump(data / "dataset_flickr30k.json", {"images": rows, "dataset": "flickr30k"})
    for name in ("retrieval", "captions"):
        entries = {entry.name: entry.located(data, "test") for entry in read_suite(name).dataset}
        assert [src for src in entries.values() if src] == [f"{data}/dataset_flickr30k.json?split=test"]
    entry = next(entry for entry in read_suite("captions").dataset if entry.name == "flickr30k_karpathy")
    src = entry.located(data, "test")
    assert src is not None
    metrics = evaluate(writer, entry.task, src, generate=GREEDY, judge=QUIET)
    assert entry.metrics == ("cider",)
    assert "cider" in metrics
