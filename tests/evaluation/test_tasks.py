"""`kiloword eval`: the list of tasks, what is shown and written, and what is refused."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import kiloword
from kiloword.api import Matcher
from kiloword.cli.main import main
from kiloword.evaluation import TASKS, evaluate
from kiloword.evaluation.command import labels, number
from kiloword.evaluation.tasks import ProbeOptions
from kiloword.terminal.progress import showing


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
