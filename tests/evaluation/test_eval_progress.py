"""`eval` shows how far it is, `evaluate` in Python does not; models beside a wrong one."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from pathlib import Path

import pytest

import kiloword
from folders import model_folder
from kiloword.cli.main import main
from kiloword.evaluation import evaluate
from kiloword.evaluation.probe import ProbeOptions
from kiloword.terminal import progress
from kiloword.terminal.progress import showing


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("progress") / "first")


def test_share_rate_and_time_left_are_shown_on_stderr(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words, matcher = (
        ["eval", "retrieval", str(folder), "--data", "scenes:test?n=8", "--batch", "2"],
        kiloword.load(folder),
    )
    main(words)
    assert capsys.readouterr().err == ""  # short work shows nothing
    clock = itertools.count(0, 60)  # every look at it takes a minute
    monkeypatch.setattr(progress.time, "perf_counter", lambda: next(clock))
    main(words)
    said = capsys.readouterr()
    images = [line for line in said.err.splitlines() if line.startswith("images")]
    assert [int(re.search(r"(\d+)%", line)[1]) for line in images] == [25, 50, 75, 100]  # type: ignore[index]
    assert all(re.search(r"images/s  ETA \d+:\d\d", line) for line in images)
    assert "ETA" not in said.out
    evaluate(matcher, "retrieval", "scenes:test?n=8", batch=2)
    assert capsys.readouterr() == ("", "")  # Python prints nothing
    probe = ProbeOptions(recipe="sgd", epochs=2, lr=0.1, batch=8, weight_decay=0.0)
    with showing():
        matcher.encode_text(["a dog", "a cat"], batch=1)
        evaluate(matcher, "retrieval", "scenes:test?n=8", chunk=4)
        evaluate(matcher, "probe", "scenes:test?n=8&task=colour", train="scenes:train?n=24&task=colour", probe=probe)
    errors = capsys.readouterr().err
    for what in ("texts", "ranks", "probe"):
        assert re.search(rf"^{what} 100% .* ETA 0:00", errors, re.MULTILINE), (what, errors)


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
    assert end.value.code == 2
    said = capsys.readouterr()
    assert second in said.err
    assert out.exists() == bool(said.out) == (second == "damaged")
    if said.out:
        stored = json.loads(out.read_text())["first"]
        assert f"{stored['text_retrieval_recall@1']:.4f}" in said.out
