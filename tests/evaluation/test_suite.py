"""Suites: what a file declares, where data sets are found, one table of all, and what is kept of a killed run."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kiloword
from folders import model_folder
from kiloword import evaluation
from kiloword.cli.main import main
from kiloword.data.classes.names import read_classnames, read_templates
from kiloword.evaluation import evaluate
from kiloword.evaluation.suite import Entry, names, read_suite
from kiloword.evaluation.suite.outcomes import located, outcomes, places
from pages import sections
from tars import photo, write_tar

COLOURS = """
[[dataset]]
name = "colours"
data = ["scenes:test?task=colour&n=12"]
task = "zeroshot"
metric = "acc1"
options = { templates = ["a {c} thing"] }
groups = ["classes"]
"""
PAIRS = """
[[dataset]]
name = "pairs"
data = ["scenes:test?n=8"]
task = "retrieval"
metric = ["image_retrieval_recall@1", "text_retrieval_recall@1"]
groups = ["pairs of all kinds"]
"""
COMPOSED = """
[[dataset]]
name = "images"
task = "compositional"
metric = "accuracy_by_category"
files = { pairs = "pairs" }
"""
ABSENT = """
[[dataset]]
name = "absent"
data = ["vtab/absent"]
task = "zeroshot"
metric = "acc1"
groups = ["classes"]
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("suite") / "first")


def suite_file(folder: Path, *parts: str) -> str:
    path = folder / "mine.toml"
    path.write_text('title = "Mine"\nsource = "A table."\n' + "".join(parts))
    return str(path)


def ran(*words: str | Path) -> int:
    """Exit code of `eval suite`."""
    try:
        main(["eval", "suite", *map(str, words)])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the sources that are evaluated from now on."""
    evaluated, run = [], evaluation.run

    def noted(task: Any, inputs: Any, options: Any) -> dict[str, float]:
        evaluated.append(inputs.source.name)
        return run(task, inputs, options)

    monkeypatch.setattr(evaluation, "run", noted)
    return evaluated


def test_one_table_of_all_data_sets(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each value is that of the task alone; a mean that lacks data sets says so; the other files say the same."""
    suite, files = suite_file(tmp_path, COLOURS, PAIRS, ABSENT), [tmp_path / f"r.{end}" for end in ("json", "csv")]
    page = tmp_path / "r.html"
    assert ran(suite, model, "--data", tmp_path, "--json", files[0], "--csv", files[1], "--html", page) == 0
    matcher = kiloword.load(model)
    colours = evaluate(matcher, "zeroshot", "scenes:test?task=colour&n=12", templates=["a {c} thing"])
    pairs = evaluate(matcher, "retrieval", "scenes:test?n=8")
    pair_mean = (pairs["image_retrieval_recall@1"] + pairs["text_retrieval_recall@1"]) / 2
    mean = (colours["acc1"] + pair_mean) / 2
    output = capsys.readouterr().out
    assert re.search(rf"colours +acc1 +{colours['acc1']:.4f}\n", output)
    assert re.search(rf"classes +1 of 2, incomplete +{colours['acc1']:.4f}\n", output)
    assert re.search(rf"pairs of all kinds +mean of 1 +{pair_mean:.4f}\n", output)
    assert re.search(rf"average +2 of 3, incomplete +{mean:.4f}\n", output)
    assert (
        f"missing: absent (looked for {tmp_path}/absent, {tmp_path}/wds_absent, {tmp_path}/wds_absent_test, ...)"
        in output
    )
    written = json.loads(files[0].read_text())
    assert written["data_sets"]["colours"]["metrics"] == {"first": colours}
    assert written["data_sets"]["pairs"]["metrics"] == {"first": pairs}
    assert written["data_sets"]["absent"]["state"] == "missing"
    assert written["averages"]["average"] == {"n": 2, "of": 3, "complete": False, "values": {"first": mean}}
    assert written["averages"]["pairs of all kinds"]["complete"]
    rows = list(csv.DictReader(files[1].read_text().splitlines()))
    assert [row["data_set"] for row in rows] == [
        "colours",
        "pairs",
        "absent",
        "classes",
        "pairs of all kinds",
        "average",
    ]
    assert [float(row["first"] or "nan") for row in rows[:2]] == [colours["acc1"], pair_mean]
    shown = sections(page.read_text())
    assert shown["Averages"].tables[0][-1] == ["average", "2 of 3, incomplete", f"{mean:.4f}"]
    assert shown["Data sets"].tables[0][1] == ["colours", "zeroshot", "acc1", f"{colours['acc1']:.4f}"]
    assert shown["Missing and failed"].tables[0][1][:2] == ["absent", "missing"]
    assert ["pairs", "text_retrieval_recall@5", f"{pairs['text_retrieval_recall@5']:.4f}"] in shown[
        "All metrics"
    ].tables[0]


def test_a_killed_run_continues(
    tmp_path: Path, model: Path, runs: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    suite, out = suite_file(tmp_path, COLOURS, PAIRS), tmp_path / "out"
    ran(suite, model, "--data", tmp_path)
    whole = capsys.readouterr().out
    counting = evaluation.run

    def killed(task: Any, inputs: Any, options: Any) -> dict[str, float]:
        if task.name == "retrieval":
            raise KeyboardInterrupt
        return counting(task, inputs, options)

    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "run", killed)
        assert ran(suite, model, "--data", tmp_path, "--out", out) == 130
    runs.clear()
    assert ran(suite, model, "--data", tmp_path, "--out", out) == 0
    assert runs == ["scenes:test?n=8"]
    output = capsys.readouterr()
    assert output.out == whole
    assert re.search(r"\[1 of 2\] first: colours acc1 [\d.]+ \(stored\)\n", output.err)
    runs.clear()
    assert ran(suite, model, "--data", tmp_path, "--out", out) == 0
    assert runs == []
    assert capsys.readouterr().out == whole
    for file in out.iterdir():
        file.write_text('{"metrics": {}}')  # damaged
    assert ran(suite, model, "--data", tmp_path, "--out", out) == 0
    assert capsys.readouterr().out == whole


def test_other_options_data_or_models_are_evaluated_again(tmp_path: Path, model: Path, runs: list[str]) -> None:
    out = tmp_path / "out"
    words = ("--data", tmp_path, "--out", out)
    ran(suite_file(tmp_path, COLOURS, PAIRS), model, *words)
    runs.clear()
    ran(suite_file(tmp_path, COLOURS.replace("a {c} thing", "the {c} thing"), PAIRS), model, *words)
    assert runs == ["scenes:test?task=colour&n=12"]
    ran(suite_file(tmp_path, COLOURS, PAIRS.replace("n=8", "n=9")), model, *words)
    assert runs[1:] == ["scenes:test?n=9"]
    runs.clear()
    ran(suite_file(tmp_path, COLOURS, PAIRS), model_folder(tmp_path / "clip", "clip"), *words)
    assert len(runs) == 2
    runs.clear()
    for stored in out.glob("pairs-*.json"):
        stored.write_text(stored.read_text()[:20])
    ran(suite_file(tmp_path, COLOURS, PAIRS), model, model_folder(tmp_path / "other", "clip"), *words)
    assert runs == ["scenes:test?n=8"] * 2


def test_a_model_is_named_by_the_folder_of_its_run(tmp_path: Path, model: Path, runs: list[str]) -> None:
    shutil.copytree(model, tmp_path / "run" / "model")
    suite, out = suite_file(tmp_path, COLOURS), tmp_path / "out"
    assert ran(suite, tmp_path / "run", "--data", tmp_path, "--out", out) == 0
    assert ran(suite, tmp_path / "run" / "model", "--data", tmp_path, "--out", out) == 0
    assert len(runs) == 1  # the second was stored: they are one model


def test_a_data_set_that_fails_does_not_end_the_others(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "colours").mkdir()
    wrong = PAIRS.replace("recall@1", "recall@7").replace('"pairs"', '"wrong"')
    suite = suite_file(tmp_path, COLOURS, wrong, PAIRS)
    other = model_folder(tmp_path / "second", "clip")
    assert ran(suite, model, other, "--data", tmp_path, "--json", tmp_path / "r.json") == 1
    output = capsys.readouterr()
    assert "failed: colours with first: " in output.out
    assert "is an empty folder" in output.out
    assert "yields no image_retrieval_recall@7 on wrong" in output.out
    assert re.search(r"^ +first +second\npairs +image_retrieval_recall@1 and text", output.out)
    written = json.loads((tmp_path / "r.json").read_text())
    assert {name: one["state"] for name, one in written["data_sets"].items()} == {
        "colours": "failed",
        "wrong": "failed",
        "pairs": "evaluated",
    }
    assert written["averages"]["average"]["n"] == 1


def test_only_names_data_sets_and_groups(tmp_path: Path, model: Path, runs: list[str]) -> None:
    suite = suite_file(tmp_path, COLOURS, PAIRS)
    ran(suite, model, "--data", tmp_path, "--only", "classes", "--json", tmp_path / "r.json")
    assert runs == ["scenes:test?task=colour&n=12"]
    assert json.loads((tmp_path / "r.json").read_text())["averages"]["average"]["of"] == 2
    runs.clear()
    assert ran(suite, model, "--data", tmp_path, "--dry-run") == 0
    assert runs == []


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        (COLOURS * 2, "", "two data sets are named 'colours'"),
        (COLOURS.replace("zeroshot", "zeroshots"), "", "unknown task 'zeroshots'; .* Did you mean zeroshot\\?"),
        (COLOURS.replace("templates", "tempaltes"), "", "no option tempaltes; .* Did you mean templates\\?"),
        (COLOURS.replace('["a {c} thing"]', "3"), "", "colours: templates"),
        (COLOURS.replace("metric", "metrics"), "", "mine.toml is no suite: dataset.0.metric: field required"),
        (COLOURS.replace('"acc1"', "[]"), "", "colours has no metric"),
        (COLOURS.replace('"colours"', '"../colours"'), "", "a data set is named '../colours': expected letters"),
        (COLOURS.replace('"classes"', '"average"'), "", "in the group 'average', which always has all"),
        (COLOURS.replace('"classes"', '"colours"'), "", "'colours' is both a data set and a group"),
        ("dataset = []", "", "it has no data sets"),
        ("x = ", "", "mine.toml is no suite: it is not TOML"),
        (ABSENT, "", "has none of the 1 data sets of mine: absent, for example, was looked for as absent, wds_absent"),
        (COLOURS, "--only colors", "--only names 'colors', which is no data set .* Did you mean colours\\?"),
        (COLOURS, "--data nowhere", "--data nowhere: no such folder"),
        (COLOURS, "--out {folder}/mine.toml/x", "cannot write"),
    ],
)  # fmt: skip
def test_wrong_suites_get_one_message(
    text: str, words: str, message: str, tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    suite = suite_file(tmp_path, text)
    more = words.format(folder=tmp_path).split()
    more += [] if "--data" in more else ["--data", str(tmp_path)]
    assert ran(suite, model, *more, "--json", tmp_path / "r.json") == 2
    output = capsys.readouterr()
    assert re.search(message, output.err)
    assert "Traceback" not in output.err


def test_a_model_of_another_library_is_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before: `hf:FOLDER` was looked for as a folder of that name."""
    assert ran(suite_file(tmp_path, COLOURS), "hf:no/such", "--data", tmp_path) == 2
    assert "there is no no/such/config.json: expected a folder that transformers'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("retreival m --data d", "unknown suite 'retreival': expected .*retrieval.* or a TOML file. Did you mean retr"),
        ("retrieval --data d", "eval suite needs a model: kiloword eval suite SUITE MODEL --data ROOT"),
        ("retrieval m --data .", "--data . has none of the|m is not a folder"),
    ],
)
def test_wrong_words_get_one_message(
    words: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert ran(*words.split()) == 2
    output = capsys.readouterr().err
    assert re.search(message, output)
    assert output.count("\n") == 1


@pytest.mark.parametrize(
    "folder",
    ["vtab/dtd/test", "wds_vtab-dtd/test", "wds_vtab-dtd_test/test", "wds/vtab/dtd/test", "wds_dtd", "dtd.csv"],
)
def test_where_data_sets_are_found(folder: str, tmp_path: Path) -> None:
    entry = Entry(name="dtd", data=("vtab/dtd", "dtd.csv?label=class"), task="zeroshot", metric="acc1")
    assert located(tmp_path, entry, "test") is None
    place = tmp_path / folder
    place.parent.mkdir(parents=True, exist_ok=True)
    place.touch() if place.suffix else place.mkdir()
    expected = f"{place}?label=class" if place.suffix else str(place)
    assert located(tmp_path, entry, "test") == expected
    assert expected.removesuffix("/test") in places(tmp_path, entry, "test")


def test_a_folder_with_the_split_has_precedence(tmp_path: Path) -> None:
    entry = Entry(name="dtd", task="zeroshot", metric="acc1")
    (tmp_path / "dtd").mkdir()
    (tmp_path / "wds_dtd" / "val").mkdir(parents=True)
    assert located(tmp_path, entry, "test") == str(tmp_path / "dtd")
    assert located(tmp_path, entry, "val") == str(tmp_path / "wds_dtd" / "val")


@pytest.mark.parametrize("name", names())
def test_the_suites_of_the_package_are_declared_whole(name: str) -> None:
    suite = read_suite(name)
    assert suite.name == name
    assert suite.title
    assert suite.source
    for options in (entry.options for entry in suite.dataset):
        assert "classnames" not in options or read_classnames(options["classnames"])
        assert "templates" not in options or read_templates(options["templates"])


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("datacomp38", {"VTAB": 13, "ImageNet": 1, "ImageNet shifts": 6, "Retrieval": 3, "average": 38}),
        ("llip22", {"average": 22}),
        ("fff11", {"average": 11}),
        ("vtab+", {"VTAB": 19, "average": 35}),
        ("robustness", {"shifts": 5, "average": 6}),
    ],
)
def test_suites_of_papers_have_their_numbers_of_data_sets(name: str, groups: dict[str, int]) -> None:
    assert {group: len(entries) for group, entries in read_suite(name).groups().items()} == groups


def test_datacomp_counts_the_metrics_of_its_list() -> None:
    counted = {entry.name: entry.metric for entry in read_suite("datacomp38").dataset if entry.metric != "acc1"}
    recalls = dict.fromkeys(("caltech101", "fgvc_aircraft", "flowers", "pets"), "mean_per_class_recall")
    assert counted == recalls | {
        "flickr30k": "mean_recall@1",
        "mscoco_captions": "mean_recall@1",
        "winogavil": "jaccard_score_10-12",
        "iwildcam": "F1-macro_all",
        "fmow": "acc_worst_region",
        "dollar_street": "acc_top5_wg",
        "geode": "acc_wg",
    }


def test_changed_files_of_options_are_read_again(tmp_path: Path, model: Path, runs: list[str]) -> None:
    """A folder of pairs as the suite `compositional` names it, and class names from a file with parameters."""
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "0.png").write_bytes(photo())
    (tmp_path / "pairs").mkdir()
    pairs, names = tmp_path / "pairs" / "swap.json", tmp_path / "names.json"
    colours = COLOURS.replace("groups =", 'files = { classnames = "names.json?set=one" }\ngroups =')
    suite = suite_file(tmp_path, colours, COMPOSED)
    classes = ["red", "orange", "yellow", "green", "cyan", "blue", "purple", "pink"]
    pair = {"filename": "0.png", "caption": "a cat", "negative_caption": "a bird"}

    def evaluated() -> list[str]:
        runs.clear()
        assert ran(suite, model, "--data", tmp_path, "--out", tmp_path / "out") == 0
        return list(runs)

    pairs.write_text(json.dumps([pair]))
    names.write_text(json.dumps({"one": classes, "two": ["a"]}))
    assert (len(evaluated()), evaluated()) == (2, [])
    pairs.write_text(json.dumps([{**pair, "caption": "a dog"}]))
    assert evaluated() == [str(tmp_path / "images")]
    names.write_text(json.dumps({"one": classes[::-1], "two": ["a"]}))
    assert evaluated() == ["scenes:test?task=colour&n=12"]


def test_datacomp_groups_are_numbers_beside_labels(tmp_path: Path, model: Path) -> None:
    for name in ("wilds-fmow", "fairness-dollar_street", "fairness-geode"):
        folder = tmp_path / f"wds_{name}_test"
        (folder / "test").mkdir(parents=True)
        (folder / "classnames.txt").write_text("\n".join(f"class {n}" for n in range(62)))
        members: list[tuple[str, bytes]] = []
        for row in range(6):
            array = io.BytesIO()
            np.save(array, np.array([row % 2, row, 7]))
            members += [(f"{row}.cls", b"3"), (f"{row}.npy", array.getvalue()), (f"{row}.png", photo(row))]
        write_tar(folder / "test" / "0.tar", members)
    found = tmp_path / "found.json"
    words = ["datacomp38", model, "--data", tmp_path, "--json", found, "--only", "fmow", "dollar_street", "geode"]
    assert ran(*words) == 0
    sets = json.loads(found.read_text())["data_sets"]
    assert {name: one["state"] for name, one in sets.items()} == dict.fromkeys(words[-3:], "evaluated")
    metrics = next(iter(sets["dollar_street"]["metrics"].values()))
    assert [metrics[f"count_income_ds:{group}"] for group in "01"] == [3, 3]
    assert metrics["acc_top5_wg"] == min(metrics[f"acc_top5_income_ds:{group}"] for group in "01")


def test_options_that_name_files_are_found_below_the_root(tmp_path: Path) -> None:
    part = COLOURS.replace('options = { templates = ["a {c} thing"] }', 'files = { templates = ["a/t.txt", "t.txt"] }')
    suite = read_suite(suite_file(tmp_path, part, PAIRS))
    missing = outcomes(suite, tmp_path)[0]
    assert (missing.state, missing.places) == ("missing", [f"{tmp_path}/a/t.txt", f"{tmp_path}/t.txt"])
    (tmp_path / "t.txt").write_text("the {c}")
    found = outcomes(suite, tmp_path)[0]
    assert found.source is not None
    assert found.entry.task_options().templates == f"{tmp_path}/t.txt"
