"""The contract of tasks: what each declares, its flags and help, and what wrong names are told."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from folders import model_folder
from kiloword.cli.main import main
from kiloword.evaluation import TASKS, evaluate
from kiloword.evaluation.command import labels, number


def help_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(["eval", *words, "--help"])
    assert not end.value.code
    return capsys.readouterr().out


def words_of(output: str) -> str:
    return " ".join(output.replace("│", " ").split())


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(["eval", *words])
    assert end.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("name", TASKS)
def test_a_task_is_declared_whole(name: str) -> None:
    task = TASKS[name]
    assert task.name == name
    assert re.fullmatch(r"[A-Z].{20,110}\.", task.help)
    assert (task.options.__doc__ or "").endswith(".")
    task.options()  # every option has a default
    module = sys.modules[task.run.__module__]
    assert (module.__doc__ or "").startswith(f"The task `{name}`")


def test_help_lists_the_tasks_with_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    output = words_of(help_of(capsys))
    assert all(re.search(rf"\b{name} {re.escape(task.help)}", output) for name, task in TASKS.items())
    assert "--shortlist" not in output


def test_help_of_eval_needs_no_torch() -> None:
    code = "import sys, kiloword.evaluation, kiloword.evaluation.suite; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "a task comes first: kiloword eval retrieval runs/first/model --data scenes:test"),
        ("--data d m retrieval", "a task comes first"),
        ("retreival m --data d", "unknown task 'retreival'; known: caption, .*\\. Did you mean retrieval\\?"),
        ("runs/a/model retrieval --data d", "a task comes first"),
        ("retrieval --data d", "MODELS is missing"),
        ("retrieval m m --data d", "one model is named twice: m, m"),
    ],
)
def test_wrong_words_get_one_message(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    output = refused(capsys, *words.split())
    assert re.match(f"kiloword: {message}", output)
    assert output.count("\n") == 1


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("retreival", {}, "unknown task 'retreival'; known: .* Did you mean retrieval\\?"),
        (
            "retrieval",
            {"shortlst": 5},
            "no option shortlst; it has: nearest, shortlist, folds, ks, chunk, batch, workers\\. Did",
        ),
        (
            "spectrum",
            {"shortlist": 5},
            "the task spectrum has no option shortlist; it has: batch, workers\\.$",
        ),
        ("retrieval", {}, "this task needs a model, but matcher is None"),
    ],
)
def test_wrong_names_from_python(task: str, options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate(None, task, "scenes:test?n=4", **options)


def test_a_page_shows_the_metrics_and_blocks_are_collected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A single evaluation: its JSON, its table and its page say the same."""
    first, second = (model_folder(tmp_path / name) for name in ("first", "second"))
    page, json_file = tmp_path / "page.html", tmp_path / "r.json"
    words = ["eval", "retrieval", first, second, "--data", "scenes:test?n=8", "--html", page, "--json", json_file]
    main(list(map(str, words)))
    metrics = json.loads(json_file.read_text())
    assert set(metrics) == {"first", "second"}
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
