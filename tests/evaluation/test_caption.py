"""`eval caption`: captions of a model and of a table, truth of captions, the page; results for servers."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from hypothesis import given, settings, strategies as st

import kiloword
from kiloword.api import Matcher
from kiloword.cli.main import main
from kiloword.data.open import open_source
from kiloword.data.scenes.captions import render
from kiloword.data.scenes.query import Pattern, Query
from kiloword.data.scenes.source import parse_scenes
from kiloword.data.scenes.world import Scene, Thing
from kiloword.evaluation import evaluate
from kiloword.evaluation.caption_metrics import VARIETY, clipscore, score_captions
from kiloword.evaluation.caption_truth import judge, judge_caption
from kiloword.evaluation.suite import read_suite
from kiloword.evaluation.tasks import CaptionOptions, VqaOptions
from kiloword.generation.captioner import Captioner
from kiloword.generation.options import GenerationOptions
from kiloword.types import Skipped
from tars import photo

SCENES = "scenes:test?n=24&captions=4&levels=1,2,3"
QUIET = CaptionOptions(meteor=False)


def table(path: Path, captions: dict[str, list[str]]) -> Path:
    pa.parquet.write_table(pa.table({"key": list(captions), "captions": list(captions.values())}), path)
    return path


def people(n: int = 24) -> dict[str, list[str]]:
    """Each scene's first caption, as if a captioner had said it."""
    source = parse_scenes(SCENES)
    return {source.key(row): [source.captions(row)[0], "and another"] for row in range(n)}


def test_a_models_captions_are_scored_against_the_images_own(matcher_of: Callable[[str], Matcher]) -> None:
    writer = matcher_of("coca")
    source, options = parse_scenes(SCENES, 32), GenerationOptions(method="greedy", longest=8)
    found = evaluate(writer, "caption", source, generate=options, judge=QUIET, batch=10)
    images = torch.stack([torch.from_numpy(source.record(row).image).permute(2, 0, 1) for row in range(24)])
    said = [texts[0].text for texts in Captioner(writer.model, writer.tokenizer).caption(images, options)]
    scored = score_captions(said, [source.captions(row) for row in range(24)]).values
    assert found == {**scored, **judge(said, [source.scene(row) for row in range(24)]), "skipped": 0}


def test_captions_of_a_table_need_no_model(tmp_path: Path) -> None:
    captions = people(20)
    first, second, third = list(captions)[:3]
    captions |= {first: [""], second: ["an image"]}
    del captions[third]
    bad: list[Skipped] = []
    file = table(tmp_path / "said.parquet", captions)
    found = evaluate(None, "caption", SCENES, captions=file, judge=QUIET, skipped=bad)
    assert [s.row for s in bad] == [2, *range(20, 24)]
    assert found["parsable"] == found["wholly_true"] == 18 / 19  # the empty caption is judged too
    assert (found["statements_true"], found["skipped"]) == (1.0, 5)
    assert found["statements_true_elsewhere"] < 0.7
    assert found["bleu_4"] > 0.9


@pytest.mark.parametrize("method", ["siglip", "prolip"])
def test_clipscore_is_that_of_the_named_model(method: str, folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    captions, source, clip = people(5), open_source(SCENES, 32), kiloword.load(folder_of(method))
    file = table(tmp_path / "said.parquet", captions)
    found = evaluate(None, "caption", source, captions=file, judge=QUIET, clipscore=str(folder_of(method)))
    images = clip.encode_image([source.record(row).image for row in range(5)])["vec"]
    said, *known = (
        clip.encode_text([f"A photo depicts {text}" for text in texts])["vec"]
        for texts in ([said for said, _ in captions.values()], *(source.captions(row) for row in range(5)))
    )
    alone, both = clipscore(images, said, known)
    assert found["clipscore"] == pytest.approx(float(alone.mean()), abs=1e-5)
    assert found["refclipscore"] == pytest.approx(float(both.mean()), abs=1e-5)


@pytest.mark.parametrize(
    ("captions", "options", "word"),
    [
        ({"elsewhere": ["a star"]}, {}, "none of its 24 images"),
        (people(1), {"group_by": ("region",)}, "region"),
        (None, {}, "model"),
    ],
)
def test_refusals(
    matcher: Matcher, captions: dict[str, list[str]] | None, options: dict[str, Any], word: str, tmp_path: Path
) -> None:
    file = table(tmp_path / "said.parquet", captions) if captions else None
    with pytest.raises(ValueError, match=word):
        evaluate(None, "caption", SCENES, judge=QUIET, captions=file, **options)
    with pytest.raises(ValueError, match="caption"):  # it cannot write
        evaluate(matcher, "caption", SCENES, judge=QUIET)


def test_the_command_and_its_page(
    folder_of: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = table(tmp_path / "said.parquet", {**people(), "test-000003": ["three red stars"]})
    words = [
        "eval",
        "caption",
        folder_of("coca"),
        file,
        "--data",
        SCENES,
        "--judge.no-meteor",
        "--generate.longest",
        "8",
    ]
    main([*map(str, words), "--json", str(tmp_path / "c.json"), "--html", str(tmp_path / "c.html")])
    values = json.loads((tmp_path / "c.json").read_text())["said.parquet"]
    assert values["wholly_true"] == 23 / 24
    page = (tmp_path / "c.html").read_text()
    assert "three red stars" in page
    assert page.count("<img") == 20
    assert f"{values['cider']:.4f}" in page
    assert f"{values['cider']:.4f}" in capsys.readouterr().out


# Truth of captions of scenes

RED_STAR = Thing(shape=4, colour=0, size=1, fill=0, row=0, column=0)  # large, solid, top left
BLUE_CIRCLE = Thing(shape=0, colour=5, size=0, fill=1, row=2, column=2)  # small, striped, bottom right
TWO = Scene(background=5, things=(RED_STAR, BLUE_CIRCLE))  # navy
ONE = Scene(background=0, things=(RED_STAR,))  # white
COLUMN = Scene(background=0, things=(RED_STAR, BLUE_CIRCLE._replace(column=0)))


def literal(query: Query, scene: Scene) -> tuple[int, int, int]:
    """True statements, statements and mentioned objects: every map of things to objects or to nothing is tried."""
    names = ("shape", "colour", "size", "fill", "row", "column")
    best_true, total, mentioned = -1, 0, 0
    for chosen in product([None, *range(len(scene.things))], repeat=len(query.things)):
        used = [c for c in chosen if c is not None]
        if len(set(used)) < len(used):
            continue  # two things, one object
        truths, named = [], 0
        for pattern, c in zip(query.things, chosen, strict=True):
            said = {name: getattr(pattern, name) for name in names if getattr(pattern, name) is not None}
            own = [c is not None and getattr(scene.things[c], name) == value for name, value in said.items()]
            truths += own or [c is not None]
            named += bool(own) and all(own)
        if query.relation:
            a, b = chosen[:2]
            axis = {"left": "column", "above": "row"}[query.relation]
            there = a is not None and b is not None
            truths.append(there and getattr(scene.things[a], axis) < getattr(scene.things[b], axis))
        if query.count is not None:
            truths.append(query.count == len(scene.things))
        if query.background is not None:
            truths.append(query.background == scene.background)
        best_true, total = max(best_true, sum(truths)), len(truths)
        mentioned = max(mentioned, named)
    return best_true, total, mentioned


def things() -> st.SearchStrategy[Thing]:
    """Few values, so that things are often alike."""
    few = (range(2), range(2), range(2), range(3), range(3), range(3))
    return st.builds(Thing, *map(st.sampled_from, few))


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    found = draw(st.lists(things(), min_size=1, max_size=3, unique_by=lambda t: (t.row, t.column)))
    return Scene(draw(st.integers(0, 1)), tuple(sorted(found, key=lambda t: (t.row, t.column))))


@st.composite
def queries(draw: st.DrawFn) -> Query:
    said = draw(st.lists(things(), max_size=3))
    kept = draw(st.lists(st.tuples(*[st.booleans()] * 6), min_size=len(said), max_size=len(said)))
    both = zip(said, kept, strict=True)
    patterns = [Pattern(*(v if k else None for v, k in zip(t, keep, strict=True))) for t, keep in both]
    relation = draw(st.sampled_from([None, "left", "above"])) if len(patterns) > 1 else None
    count = draw(st.sampled_from([None, 1, 2, 3]))
    return Query(tuple(patterns), relation, count, draw(st.sampled_from([None, 0, 1])))


@given(queries(), scenes(), st.integers(0, 2**40))
@settings(max_examples=100, deadline=None)
def test_truth_equals_a_literal_search(query: Query, scene: Scene, style: int) -> None:
    found = judge_caption(render(query, style), scene)
    assert (found.true, len(found.statements), found.mentioned) == literal(query, scene)


@pytest.mark.parametrize(
    ("caption", "scene", "said", "mentioned"),
    [
        ("A large red star.", TWO, "+shape +colour +size", 1),
        ("a blue star", TWO, "+shape -colour", 0),  # each half is true of another: of equals the first
        ("a circle right of a star", COLUMN, "+shape +shape -relation", 2),
        ("a star and a thing", ONE, "-thing +shape", 1),
        ("three things on a navy background", TWO, "-count +background", 0),
    ],
)
def test_statements_by_hand(caption: str, scene: Scene, said: str, mentioned: int) -> None:
    found = judge_caption(caption, scene)
    assert " ".join(f"{'-+'[true]}{kind}" for kind, true in found.statements) == said
    assert (found.parsable, found.mentioned) == (True, mentioned)


def test_truth_of_the_whole_set() -> None:
    captions = ["a red star", "a blue star", "an image", "star star", "a star and a circle"]
    found = judge(captions, [ONE, ONE, TWO, TWO, TWO])
    assert {name: value for name, value in found.items() if not name.endswith("elsewhere")} == {
        "parsable": 4 / 5,
        "wholly_true": 3 / 5,  # the red star, the image, star and circle
        "objects_mentioned": 3 / 8,
        "statements": 6 / 4,
        "statements_true": 5 / 6,
        "caption_statements_true": (1 + 0.5 + 0 + 1) / 4,  # "an image" states nothing, "star star" nobody knows what
        "statements_true@shape": 1.0,
        "statements_true@colour": 0.5,
    }
    nothing = {"parsable": 0.0, "wholly_true": 0.0, "objects_mentioned": 0.0, "caption_statements_true": 0.0}
    assert judge(["nonsense"], [ONE]) == nothing
    moved = judge(["a circle", "a white background", "nonsense"], [TWO, ONE, ONE])
    assert {name: value for name, value in moved.items() if name.endswith("elsewhere")} == {
        "wholly_true_elsewhere": 1 / 3,  # half of three is one: the first caption goes to the second scene
        "statements_true_elsewhere": 1 / 2,
        "caption_statements_true_elsewhere": 1 / 3,
        "objects_mentioned_elsewhere": 0.0,
    }


# Figures on data as it is distributed, by group, and result files for servers of hidden tests


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
def test_refused_results(writer: Matcher, data: Path, src: str, options: dict[str, Any], word: str) -> None:
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
