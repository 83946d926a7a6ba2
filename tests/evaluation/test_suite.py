"""Suites: where data sets are found, one table of all, what is kept of a killed run, and the suites of papers."""

from __future__ import annotations

import csv
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import kiloword
from kiloword.cli.main import main
from kiloword.data.classes.names import read_classnames, read_templates
from kiloword.evaluation import evaluate
from kiloword.evaluation.command import data_sets
from kiloword.evaluation.suite import Entry, names, read_suite
from tars import photo

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
files = { pairs = "swaps" }
"""
ABSENT = """
[[dataset]]
name = "absent"
data = ["vtab/absent"]
task = "zeroshot"
metric = "acc1"
groups = ["classes"]
"""


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


def test_one_table_of_all_data_sets(tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each value is that of the task alone; a mean that lacks data sets says so."""
    suite, files = suite_file(tmp_path, COLOURS, PAIRS, ABSENT), [tmp_path / f"r.{end}" for end in ("json", "csv")]
    page = tmp_path / "r.html"
    assert ran(suite, folder, "--data", tmp_path, "--json", files[0], "--csv", files[1], "--html", page) == 1
    matcher = kiloword.load(folder)
    colours = evaluate(matcher, "zeroshot", "scenes:test?task=colour&n=12", templates=["a {c} thing"])
    pairs = evaluate(matcher, "retrieval", "scenes:test?n=8")
    pair_mean = (pairs["image_retrieval_recall@1"] + pairs["text_retrieval_recall@1"]) / 2
    mean = (colours["acc1"] + pair_mean) / 2
    output = capsys.readouterr().out
    assert re.search(rf"colours +acc1 +{colours['acc1']:.4f}\n", output)
    assert re.search(rf"classes +1 of 2, incomplete +{colours['acc1']:.4f}\n", output)
    assert re.search(rf"pairs of all kinds +mean of 1 +{pair_mean:.4f}\n", output)
    assert re.search(rf"average +2 of 3, incomplete +{mean:.4f}\n", output)
    assert f"missing: absent (looked for as {tmp_path}/vtab/absent, {tmp_path}/wds_vtab-absent, " in output
    written = json.loads(files[0].read_text())
    assert written["data_sets"]["colours"]["metrics"] == {"siglip": colours}
    assert written["data_sets"]["pairs"]["metrics"] == {"siglip": pairs}
    assert written["data_sets"]["absent"]["state"] == "missing"
    assert written["averages"]["average"] == {"n": 2, "of": 3, "complete": False, "values": {"siglip": mean}}
    assert written["averages"]["pairs of all kinds"]["complete"]
    rows = {row["data_set"]: float(row["siglip"]) for row in csv.DictReader(files[1].read_text().splitlines())}
    named = {"classes": colours["acc1"], "pairs of all kinds": pair_mean, "average": mean}
    assert rows == {"colours": colours["acc1"], "pairs": pair_mean, **named}
    assert (written["models"], written["version"]) == ({"siglip": str(folder)}, kiloword.__version__)
    assert f"{mean:.4f}" in page.read_text()
    assert ran(suite, folder, "--data", tmp_path, "--dry-run") == 1
    assert "missing: absent" in capsys.readouterr().out


def evaluated(errors: str) -> list[str]:
    """Data sets that were evaluated, not stored, by what is said on stderr."""
    return [name for name, stored in re.findall(r": (\w+) \S+.* [\d.]+( \(stored\))?\n", errors) if not stored]


def test_a_killed_run_continues_and_changes_are_evaluated_again(
    tmp_path: Path, folder_of: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Options, data and models count, a model by its weights; and the contents of files and folders that are named."""
    model = folder_of("siglip")
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "0.png").write_bytes(photo())
    (tmp_path / "swaps").mkdir()
    composed, classes = tmp_path / "swaps" / "swap.json", tmp_path / "names.json"
    colour_names = ["red", "orange", "yellow", "green", "cyan", "blue", "purple", "pink"]
    pair = {"filename": "0.png", "caption": "a cat", "negative_caption": "a bird"}
    composed.write_text(json.dumps([pair]))
    classes.write_text(json.dumps({"one": colour_names, "two": ["a"]}))
    colours = COLOURS.replace("groups =", 'files = { classnames = "names.json?set=one" }\ngroups =')

    def found(folder: Path, *parts: str, more: tuple[str, ...] = ()) -> tuple[str, list[str]]:
        assert ran(suite_file(tmp_path, *parts), folder, "--data", tmp_path, "--out", tmp_path / "out", *more) == 0
        said = capsys.readouterr()
        return said.out, evaluated(said.err)

    found(model, colours)  # as if killed after it
    out, names = found(model, colours, PAIRS, COMPOSED)
    assert names == ["pairs", "images"]
    assert found(model, colours, PAIRS, COMPOSED) == (out, [])
    shutil.copytree(model, tmp_path / "run" / "model")
    assert found(tmp_path / "run", colours, PAIRS, COMPOSED) == (out, [])
    colours = colours.replace("a {c} thing", "the {c} thing")
    assert found(model, colours, PAIRS, COMPOSED)[1] == ["colours"]
    assert found(model, colours, PAIRS.replace("n=8", "n=9"), COMPOSED)[1] == ["pairs"]
    composed.write_text(json.dumps([{**pair, "caption": "a dog"}]))
    assert found(model, colours, COMPOSED)[1] == ["images"]
    classes.write_text(json.dumps({"one": colour_names[::-1], "two": ["a"]}))
    assert found(model, colours, COMPOSED)[1] == ["colours"]
    assert found(model, colours, more=("--dim", "8"))[1] == ["colours"]
    assert found(folder_of("clip"), colours, COMPOSED)[1] == ["colours", "images"]
    assert found(model, colours, PAIRS, more=("--only", "classes"))[1] == []
    planned = found(model, colours, PAIRS.replace("n=8", "n=7"), more=("--dry-run",))[0].splitlines()
    assert [line.endswith("(stored: siglip)") for line in planned] == [True, False]


def test_a_data_set_that_fails_does_not_end_the_others(
    tmp_path: Path, folder: Path, folder_of: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "colours").mkdir()
    wrong = PAIRS.replace("recall@1", "recall@7").replace('"pairs"', '"wrong"')
    suite = suite_file(tmp_path, COLOURS.replace("scenes:test?task=colour&n=12", "colours"), wrong, PAIRS)
    assert ran(suite, folder, folder_of("clip"), "--data", tmp_path, "--json", tmp_path / "r.json") == 1
    output = capsys.readouterr().out
    assert "failed: colours with siglip: " in output
    assert "image_retrieval_recall@7" in output
    assert re.search(r"^ +siglip +clip\npairs +", output)
    written = json.loads((tmp_path / "r.json").read_text())
    states = {name: one["state"] for name, one in written["data_sets"].items()}
    assert states == {"colours": "failed", "wrong": "failed", "pairs": "evaluated"}
    assert written["averages"]["average"]["n"] == 1


@pytest.mark.parametrize(
    ("text", "words", "word"),
    [
        (COLOURS * 2, "", "colours"),
        (COLOURS.replace("zeroshot", "zeroshots"), "", "zeroshot"),
        (COLOURS.replace("templates", "tempaltes"), "", "templates"),
        (COLOURS.replace('["a {c} thing"]', "3"), "", "templates"),
        (COLOURS.replace("metric", "metrics"), "", "metric"),
        (COLOURS.replace('"acc1"', "[]"), "", "metric"),
        (COLOURS.replace('"colours"', '"../colours"'), "", "../colours"),
        (COLOURS.replace('"classes"', '"average"'), "", "average"),
        (COLOURS.replace('"classes"', '"colours"'), "", "group"),
        ("dataset = []", "", "dataset"),
        ("x = ", "", "mine.toml"),
        (ABSENT, "", "wds_vtab-absent"),
        (COLOURS, "--only colors", "colours"),
        (COLOURS, "--data nowhere", "nowhere"),
        (COLOURS, "--out {folder}/mine.toml/x", "cannot write"),
    ],
)
def test_refused_suites(
    text: str, words: str, word: str, tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = words.format(folder=tmp_path).split()
    more += [] if "--data" in more else ["--data", str(tmp_path)]
    assert ran(suite_file(tmp_path, text), folder, *more) == 2
    assert word in capsys.readouterr().err


@pytest.mark.parametrize(
    "place", ["vtab/dtd/test", "wds_vtab-dtd/test", "wds_vtab-dtd_test/test", "wds/vtab/dtd/test", "wds_dtd", "dtd.csv"]
)
def test_where_data_sets_are_found(place: str, tmp_path: Path) -> None:
    data = ("vtab/dtd", "dtd.csv?label=class")
    entry = Entry(name="dtd", data=data, split="test", task="zeroshot", metric="acc1")
    assert entry.located(tmp_path) is None
    path = tmp_path / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch() if path.suffix else path.mkdir()
    assert entry.located(tmp_path) == (f"{path}?label=class" if path.suffix else str(path))
    split = tmp_path / "wds_dtd" / "val"  # a folder with the split has precedence
    split.mkdir(parents=True)
    assert replace(entry, split="val").located(tmp_path) == str(split)
    assert replace(entry, name="scenes", data=("scenes:test?n=60",)).located(tmp_path) == "scenes:test?n=60"


def test_options_that_name_files_are_found_below_the_root(tmp_path: Path) -> None:
    part = COLOURS.replace('options = { templates = ["a {c} thing"] }', 'files = { templates = ["a/t.txt", "t.txt"] }')
    suite = read_suite(suite_file(tmp_path, part, PAIRS))
    missing = data_sets(suite, tmp_path)[0]
    assert (missing.state, missing.places) == ("missing", [f"{tmp_path}/a/t.txt", f"{tmp_path}/t.txt"])
    (tmp_path / "t.txt").write_text("the {c}")
    assert data_sets(suite, tmp_path)[0].options.templates == f"{tmp_path}/t.txt"


SIZES = {
    "datacomp38": {"VTAB": 13, "ImageNet": 1, "ImageNet shifts": 6, "Retrieval": 3, "average": 38},
    "llip22": {"average": 22},
    "fff11": {"average": 11},
    "vtab+": {"VTAB": 19, "average": 35},
    "robustness": {"shifts": 5, "average": 6},
}


@pytest.mark.parametrize("name", names())
def test_the_suites_of_the_package(name: str) -> None:
    """Class names and templates that they name exist; suites of papers have their numbers of data sets."""
    suite = read_suite(name)
    for options in (entry.options for entry in suite.dataset):
        assert "classnames" not in options or read_classnames(options["classnames"])
        assert "templates" not in options or read_templates(options["templates"])
    assert name not in SIZES or {group: len(entries) for group, entries in suite.groups().items()} == SIZES[name]


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
