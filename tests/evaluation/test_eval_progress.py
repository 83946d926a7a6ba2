"""`eval` and `score` use the device that is there; `eval` shows how far it is, `evaluate` in Python does not."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from pathlib import Path

import pytest

from kiloword.api import Matcher
from kiloword.cli.main import main
from kiloword.config.recipes import ModelFile, sizes
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.evaluation import evaluate
from kiloword.evaluation.probe import ProbeOptions
from kiloword.methods.registry import preset
from kiloword.models.build import build
from kiloword.models.model_folder import save_model
from kiloword.terminal import progress
from kiloword.terminal.progress import showing


@pytest.fixture
def matcher() -> Matcher:
    return Matcher(
        build(sizes()["debug"], preset("siglip"), 0), Tokenizer.train(["a red dog", "a blue cat"], vocab=300)
    )


@pytest.fixture
def folder(matcher: Matcher, tmp_path: Path) -> str:
    file = ModelFile(method="siglip", settings={}, model=sizes()["debug"])
    save_model(tmp_path / "model", matcher.model, matcher.tokenizer, file)
    return str(tmp_path / "model")


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock by which every look at it takes a minute."""
    clock = itertools.count(0, 60)
    monkeypatch.setattr(progress.time, "perf_counter", lambda: next(clock))


@pytest.mark.usefixtures("slow")
def test_eval_shows_share_rate_and_time_left_on_stderr(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["eval", "retrieval", folder, "--data", "scenes:test?n=8", "--batch", "2"])
    said = capsys.readouterr()
    images = [line for line in said.err.splitlines() if line.startswith("images")]
    assert [int(re.search(r"(\d+)%", line)[1]) for line in images] == [25, 50, 75, 100]  # type: ignore[index]
    assert all(re.search(r"images/s  ETA \d+:\d\d", line) for line in images)
    assert not [line for line in said.out.splitlines() if "ETA" in line]


@pytest.mark.usefixtures("slow")
def test_texts_pairs_and_fits_show_progress_too(matcher: Matcher, capsys: pytest.CaptureFixture[str]) -> None:
    probe = ProbeOptions(recipe="sgd", epochs=2, lr=0.1, batch=8, weight_decay=0.0)
    with showing():
        matcher.encode_text(["a dog", "a cat"], batch=1)
        evaluate(matcher, "retrieval", "scenes:test?n=8", chunk=4)
        evaluate(matcher, "probe", "scenes:test?n=8&task=colour", train="scenes:train?n=24&task=colour", probe=probe)
    said = capsys.readouterr().err
    for what in ("texts", "ranks", "probe"):
        assert re.search(rf"^{what} 100% .* ETA 0:00", said, re.MULTILINE), (what, said)


@pytest.mark.usefixtures("slow")
def test_evaluate_from_python_prints_nothing(matcher: Matcher, capsys: pytest.CaptureFixture[str]) -> None:
    evaluate(matcher, "retrieval", "scenes:test?n=8", batch=2)
    assert capsys.readouterr() == ("", "")


def test_short_work_shows_nothing(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["eval", "retrieval", folder, "--data", "scenes:test?n=4"])
    assert capsys.readouterr().err == ""


def test_no_model_is_evaluated_before_all_names_are_read(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["eval", "retrieval", folder, str(tmp_path / "gone"), "--data", "scenes:test?n=8"])
    assert end.value.code == 2
    said = capsys.readouterr()
    assert f"gone: {tmp_path / 'gone'} is not a folder" in said.err
    assert not said.out


def test_results_of_the_models_before_an_error_are_kept(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The weights of the second model are damaged: its name and config are right."""
    shutil.copytree(folder, tmp_path / "damaged")
    (tmp_path / "damaged" / "model.safetensors").write_bytes(b"nothing")
    out = tmp_path / "r.json"
    words = ["eval", "retrieval", folder, str(tmp_path / "damaged"), "--data", "scenes:test?n=8", "--json", str(out)]
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    said = capsys.readouterr()
    assert "kiloword: damaged: " in said.err
    assert "text_retrieval_recall@1" in said.out
    (stored,) = json.loads(out.read_text()).values()
    assert f"{stored['text_retrieval_recall@1']:.4f}" in said.out
