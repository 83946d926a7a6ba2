"""The experiment of noisy prompts: what its prompts say, and its table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from folders import model_folder
from kiloword.data.open import open_source
from kiloword.data.scenes.captions import parse
from kiloword.data.scenes.world import TASKS
from research import bprw as experiment


@pytest.mark.parametrize("task", TASKS)
def test_noisy_prompts_are_right_and_wrong_as_their_kind_says(task: str) -> None:
    source = open_source(f"scenes:test?task={task}&n=60")
    labels = torch.tensor([source.record(row).label for row in range(60)])
    prompts = experiment.noisy(task)
    assert list(prompts) == list(TASKS[task].classnames)
    for c, own in enumerate(prompts.values()):
        kinds = [kind for _, kind in own]
        assert [kinds.count(kind) for kind in experiment.KINDS] == [4, 3, 2, 1]
        output = [prompt for prompt, kind in own if kind != "negated"]
        assert all(parse(prompt) is not None for prompt in output)
        true = torch.from_numpy(source.relevance(output, range(60)))  # type: ignore[attr-defined]  # [prompts, 60]
        assert (true[:4] == (labels == c)).all()
        assert not true[4:7, labels == c].any()
        assert (true[7:] != (labels == c)).any(1).all()


def test_experiment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, numbers = model_folder(tmp_path / "prolip" / "model", "prolip"), tmp_path / "numbers.json"
    words = ["--tasks", "fill", "--n", "40", "--draws", "2", "--json", str(numbers)]
    experiment.main(["--model", str(model), *words])
    output = capsys.readouterr().out
    draws = json.loads(numbers.read_text())["prolip"]["fill"]
    mean = sum(found["bprw, K = 5"]["acc1"] for found in draws) / 2
    assert f"| bprw, K = 5 | {mean:.3f} |" in output
    assert draws[0]["uniform"]["right"] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--model", "siglip"], "which this model does not have"),
        (["--model", "none", "--tasks", "size"], "--tasks got size"),
        (["--model", "none", "--draws", "0"], "--draws is 0"),
        (["--model"], "--model got nothing"),
    ],
)
def test_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str], named: str
) -> None:
    model_folder(tmp_path / "siglip" / "model")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        experiment.main(["--tasks", "fill", "--n", "40", *words] if words == ["--model", "siglip"] else words)
    assert ended.value.code == 2
    assert named in capsys.readouterr().err
