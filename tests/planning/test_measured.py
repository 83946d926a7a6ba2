"""kiloword bench: what it prints is what was measured, and the work that it divides by is the plan's."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from kiloword.cli.main import main
from kiloword.planning import measured
from kiloword.planning.measured import Measured, measure


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "LEAST_S", 0.0)
    monkeypatch.setattr(measured, "SIDE", 256)


def test_the_table_has_a_line_for_every_measurement(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(
        [
            "bench",
            "siglip",
            "--size",
            "debug",
            "--batch",
            "4",
            "--data",
            "scenes:val?n=64",
            "--json",
            f"{tmp_path / 'b.json'}",
        ]
    )
    lines = capsys.readouterr().out.splitlines()
    kinds = ("matrix product", "training step", "encode images", "encode texts", "read, one of")
    assert [line.startswith(kind) for line, kind in zip(lines[1:], kinds, strict=True)] == [True] * 5
    assert lines[1].split()[-1] == "1.00"
    stored = json.loads((tmp_path / "b.json").read_text())
    assert [line["items"] for line in stored] == [0, 4, 4, 4, 4]
    for line, printed in zip(stored[1:4], lines[2:5], strict=True):
        share = line["flop"] / line["seconds"] / (stored[0]["flop"] / stored[0]["seconds"])
        assert float(printed.split()[-1]) == pytest.approx(share, abs=0.006)


@pytest.mark.parametrize("method", ["sycoca", "prolip", "llip+fff", "clip-c+reinforced", "siglip+exact"])
def test_methods_that_need_more_than_pairs_are_measured(method: str) -> None:
    """Decoders, uncertainty, features of a teacher, ground truth: of noise."""
    lines = list(measure(method, "debug", 4, "fp32", "cpu", ()))
    step, images, texts = lines[1:]
    assert step.flop > images.flop + texts.flop > 0


def test_the_first_call_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = iter([0.2, 0.01, 0.01, 0.01])
    assert measured._median(lambda: time.sleep(next(pauses)), "cpu") < 0.1
    assert Measured("step", 2.0, flop=8.0).rate == 4.0


def test_an_unknown_size_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "--size", "huge"])
    assert "unknown size 'huge': expected one of debug" in capsys.readouterr().err
