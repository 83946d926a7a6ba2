"""The contract of tasks: what each declares, its flags and help, and what wrong names are told."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import kiloword
from folders import model_folder
from kiloword.cli.main import main
from kiloword.evaluation import TASKS, evaluate, find
from kiloword.evaluation.command import labels, number


@pytest.mark.parametrize("name", TASKS)
def test_a_task_is_declared_whole(name: str) -> None:
    task = find(name)
    assert task.name == name
    assert re.fullmatch(r"[A-Z].{20,110}\.", task.about)
    assert (task.options.__doc__ or "").endswith(".")
    task.options()  # every option has a default
    module = import_module(f"kiloword.evaluation.{name}")
    assert (module.__doc__ or "").startswith(f"The task `{name}`")


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
        ("retreival m --data d", "retrieval"),
        ("runs/a/model retrieval --data d", "task"),
        ("retrieval --data d", "MODEL"),
        ("retrieval m m --data d", "m, m"),
    ],
)
def test_wrong_words_get_one_message(words: str, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["eval", *words.split()])
    assert end.value.code == 2
    output = capsys.readouterr().err
    assert word in output
    assert output.count("\n") == 1


@pytest.mark.parametrize(
    ("task", "options", "word"),
    [("retreival", {}, "retrieval"), ("retrieval", {"shortlst": 5}, "shortlist"), ("retrieval", {}, "needs a model")],
)
def test_wrong_names_from_python(task: str, options: dict[str, int], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        evaluate(None, task, "scenes:test?n=4", **options)


def test_a_page_shows_the_metrics_and_blocks_are_collected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A single evaluation: its JSON, its table and its page say the same."""
    first, second = (str(model_folder(tmp_path / name)) for name in ("first", "second"))
    page, json_file = tmp_path / "page.html", tmp_path / "r.json"
    words = ["eval", "retrieval", first, second, "--data", "scenes:test?n=8", "--html", page, "--json", json_file]
    main(list(map(str, words)))
    metrics = json.loads(json_file.read_text())
    assert metrics["models"] == {"first": first, "second": second}
    assert (metrics["data"], metrics["version"]) == ("scenes:test?n=8", kiloword.__version__)
    shown = f"{metrics['first']['image_retrieval_recall@5']:.4f}"
    assert shown in page.read_text()
    assert shown in capsys.readouterr().out


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0.0000"), (0.01, "0.0100"), (0.00999, "0.00999"), (12.34567, "12.3457"), (1e-9, "1e-09")]
)
def test_small_values_keep_digits_that_count(value: float, text: str) -> None:
    assert number(value) == text


def test_labels_tell_models_apart() -> None:
    assert labels(["runs/a/model", "b/"]) == ["a", "b"]
    assert labels(["x/a/model", "y/a/model"]) == ["x/a/model", "y/a/model"]
    assert labels(["model"]) == ["model"]
