"""`kiloword eval`: suites, where data sets are found, killed runs, suites of papers; tasks; precision of encoders."""

from __future__ import annotations

import csv
import itertools
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

import kiloword
from commands import refused, said
from kiloword.api import Matcher, load
from kiloword.cli.main import main
from kiloword.config.recipes import sizes
from kiloword.data.classes.names import read_classnames, read_templates
from kiloword.distributed import by_device
from kiloword.evaluation import TASKS, evaluate
from kiloword.evaluation.command import data_sets, labels, number
from kiloword.evaluation.suite import Entry, names, read_suite
from kiloword.evaluation.tasks import ProbeOptions
from kiloword.methods.registry import preset
from kiloword.models.build import build
from kiloword.terminal.progress import showing
from kiloword.types import Texts
from tars import noise_batch, photo
from tests.pretended import placed, pretended

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


# Single tasks: their list, what is shown and written, what is refused; precision of the encoders


def test_help_lists_the_tasks_with_a_line_each_without_torch() -> None:
    code = "import sys; from kiloword.cli.main import main; sys.argv = ['kiloword', 'eval', '--help']\ntry: main()\n"
    code += "finally: print('torch' in sys.modules)"
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert all(re.search(rf"^  {name} +{re.escape(task.about)}$", output, re.MULTILINE) for name, task in TASKS.items())
    assert output.endswith("False\n")


@pytest.mark.parametrize(
    ("words", "word"),
    [
        ("", "task"),
        ("--data d m retrieval", "task"),
        ("retreival m --data d", "Did you mean retrieval?"),
        ("runs/a/model retrieval --data d", "a task comes first"),
        ("retrieval --data d", "MODELS is missing"),
        ("retrieval m m --data d", "m, m"),
    ],
)
def test_refused_words(words: str, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["eval", *words.split()])
    error = capsys.readouterr().err
    assert (end.value.code, word in error, error.count("\n")) == (2, True, 1)


@pytest.mark.parametrize(
    ("task", "options", "word"),
    [("retreival", {}, "retrieval"), ("retrieval", {"shortlst": 5}, "shortlist"), ("retrieval", {}, "model")],
)
def test_refused_names_from_python(task: str, options: dict[str, int], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        evaluate(None, task, "scenes:test?n=4", **options)


def test_screen_json_and_page_say_the_same(
    folder: Path, matcher: Matcher, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folder, tmp_path / "second")
    models, page, out = {"siglip": str(folder), "second": str(tmp_path / "second")}, tmp_path / "p.html", tmp_path / "r"
    words = ["--data", "scenes:test?n=8", "--html", str(page), "--json", str(out)]
    main(["eval", "retrieval", *models.values(), *words])
    written = json.loads(out.read_text())
    assert (written["models"], written["data"], written["version"]) == (models, words[1], kiloword.__version__)
    assert written["siglip"] == written["second"] == evaluate(matcher, "retrieval", "scenes:test?n=8")
    value = f"{written['siglip']['image_retrieval_recall@5']:.4f}"
    assert value in page.read_text()
    assert value in capsys.readouterr().out


@pytest.mark.parametrize("second", ["gone", "damaged"])
def test_a_wrong_model_beside_another(
    second: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All names are read before a model is evaluated; what was evaluated before damaged weights is kept."""
    other, out = tmp_path / second, tmp_path / "r.json"
    if second == "damaged":
        shutil.copytree(folder, other)
        (other / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(SystemExit) as end:
        main(["eval", "retrieval", str(folder), str(other), "--data", "scenes:test?n=8", "--json", str(out)])
    said = capsys.readouterr()
    assert (end.value.code, second in said.err) == (2, True)
    assert out.exists() == bool(said.out) == (second == "damaged")
    if said.out:
        assert f"{json.loads(out.read_text())['siglip']['text_retrieval_recall@1']:.4f}" in said.out


def test_share_and_time_left_are_shown_on_stderr(
    folder: Path, matcher: Matcher, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["eval", "retrieval", str(folder), "--data", "scenes:test?n=8", "--batch", "2"]
    main(words)
    assert capsys.readouterr().err == ""  # short work shows nothing
    clock = itertools.count(0, 60)  # every look at it takes a minute
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    main(words)
    said = capsys.readouterr()
    assert re.findall(r"^images +(\d+)%.* ETA \d+:\d\d", said.err, re.MULTILINE) == ["25", "50", "75", "100"]
    assert "ETA" not in said.out
    evaluate(matcher, "retrieval", "scenes:test?n=8", batch=2)
    assert capsys.readouterr() == ("", "")  # Python prints nothing
    probe = ProbeOptions(recipe="sgd", epochs=2, lr=0.1, batch=8, weight_decay=0.0)
    with showing():
        matcher.encode_text(["a dog", "a cat"], batch=1)
        monkeypatch.setattr("kiloword.evaluation.retrieval.CHUNK", 4)
        evaluate(matcher, "retrieval", "scenes:test?n=8")
        evaluate(matcher, "probe", "scenes:test?n=8&task=colour", train="scenes:train?n=24&task=colour", probe=probe)
    errors = capsys.readouterr().err
    for what in ("texts", "ranks", "probe"):
        assert re.search(rf"^{what} 100% .* ETA 0:00", errors, re.MULTILINE), what


def test_small_values_keep_digits_that_count() -> None:
    shown = {0.0: "0.0000", 0.01: "0.0100", 0.00999: "0.00999", 12.34567: "12.3457", 1e-9: "1e-09"}
    assert {value: number(value) for value in shown} == shown


def test_labels_tell_models_apart() -> None:
    assert labels(["runs/a/model", "b/"]) == ["a", "b"]
    assert labels(["x/a/model", "y/a/model"]) == ["x/a/model", "y/a/model"]
    assert labels(["model"]) == ["model"]


# Precision of encoders


BF16, FP32 = torch.bfloat16, torch.float32
SCENES = "scenes:test?n=12"
FolderOf = Callable[[str], Path]
IMAGES = noise_batch(3, 32)
TEXTS = ["a red circle", "two blue squares and a star"]


@contextmanager
def kinds(*parts: nn.Module) -> Iterator[set[torch.dtype]]:
    """Types of what the linear layers of modules put out."""
    seen: set[torch.dtype] = set()
    layers = [layer for part in parts for layer in part.modules() if isinstance(layer, nn.Linear)]
    handles = [layer.register_forward_hook(lambda _, given, out: seen.add(out.dtype)) for layer in layers]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("method", ["clip", "llip", "prolip", "sycoca"])
def test_encoders_compute_in_bf16_and_features_and_scores_are_fp32(folder_of: FolderOf, method: str) -> None:
    plain, half = load(folder_of(method)), load(folder_of(method), precision="bf16")
    with kinds(half.model.image_tower) as seeing, kinds(half.model.text_tower) as reading:
        found = [half.encode_image(IMAGES), half.encode_text(TEXTS)]
    assert seeing == reading == {BF16}
    expected = [plain.encode_image(IMAGES), plain.encode_text(TEXTS)]
    for ours, theirs in zip(found, expected, strict=True):
        assert {name: value.dtype for name, value in ours.items()} == dict.fromkeys(theirs, FP32)
        assert float(1 - torch.cosine_similarity(ours["vec"], theirs["vec"]).min()) < 1e-2
        assert not torch.equal(ours["vec"], theirs["vec"])
    assert torch.equal(half.score(*found), plain.score(*found))
    assert torch.equal(half.classify(found[0], ["cat"]), plain.classify(found[0], ["cat"]))


def test_precision_on_a_pretended_device() -> None:
    model = build(sizes()["debug"], preset("llip"), bare=True)
    with pretended():
        placed(model)
        model.precision = "bf16"
        texts = Texts(*(torch.zeros(n, dtype=torch.int64, device="cuda") for n in (7, 3)), 4)
        pixels = torch.zeros(2, 3, 32, 32, dtype=torch.uint8, device="cuda")
        with kinds(model.image_tower, model.text_tower) as computing, torch.no_grad():
            tokens, seen = model.encode_image(pixels)
            words, read = model.encode_text(texts)
            scores = model.score(seen, read)
    assert computing == {BF16}
    made = [tokens, words, scores, *seen.values(), *read.values()]
    assert {(x.device.type, x.dtype) for x in made} == {("cuda", FP32)}


def test_auto_is_bf16_for_large_models_on_cuda(capsys: pytest.CaptureFixture[str]) -> None:
    def chosen(device: str) -> set[str]:
        return {name for name, c in sizes().items() if by_device.encoder_precision("auto", c, device) == "bf16"}

    assert chosen("cpu") == set()
    assert chosen("cuda:1") == set(sizes()) - {"debug", "tiny"}
    tiny = sizes()["tiny"]
    wide = replace(tiny, text=replace(tiny.text, width=512))
    assert by_device.encoder_precision("auto", wide, "cuda") == "bf16"
    assert by_device.encoder_precision("fp32", wide, "cuda") == "fp32"
    assert by_device.encoder_precision("bf16", tiny, "cpu") == "bf16"
    for workers, flags in ((None, "set --precision\n"), (2, "set --precision, --workers\n")):
        by_device.announce("cuda:1", "bf16", "as given", workers)
        assert capsys.readouterr().err.endswith(flags)


def test_eval_takes_a_precision(folder_of: FolderOf, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, words = {}, ("eval", "retrieval", str(folder_of("llip")), "--data", SCENES, "--device", "cpu")
    for precision in ("fp32", "auto", "bf16"):
        said(capsys, *words, "--json", tmp_path / "r.json", "--precision", precision)
        found[precision] = json.loads((tmp_path / "r.json").read_text())
    assert found["auto"] == found["fp32"]
    assert found["bf16"] != found["fp32"]
    bounds = {name: 0.6 if name == "rsum" else 0.1 for name in found["fp32"]}  # rsum is a sum of six recalls
    assert all(found["bf16"][name] == pytest.approx(value, abs=bounds[name]) for name, value in found["fp32"].items())
    with pytest.raises(ValueError, match="fp16"):
        load(folder_of("clip"), precision="fp16")
    assert "fp16" in refused(capsys, *words, "--precision", "fp16")


def test_a_table_of_captions_has_one_precision(
    folder_of: FolderOf, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("caption", folder_of("sycoca"), "--data", SCENES, "--out", tmp_path / "c.parquet", "--device", "cpu")
    said(capsys, *words, "--precision", "bf16")
    assert json.loads(pq.read_schema(tmp_path / "c.parquet").metadata[b"kiloword"])["precision"] == "bf16"
    assert "precision" in refused(capsys, *words)
