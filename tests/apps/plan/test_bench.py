"""kiloword bench: what it prints is what was measured, and the work that it divides by is the plan's."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kiloword.apps.plan import measured
from kiloword.apps.plan.command import Bench
from kiloword.apps.plan.measured import SAFE, measure, planner_of, recipe_of, room
from kiloword.cli.main import main


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "LEAST_S", 0.0)
    monkeypatch.setattr(measured, "SIDE", 256)
    monkeypatch.setattr(measured, "MOST", 8)


def test_the_table_has_a_line_for_every_measurement(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(f"bench siglip --size debug --batch 4 --data scenes:val?n=64 --json {tmp_path / 'b.json'}".split())
    lines = capsys.readouterr().out.splitlines()
    kinds = ("matrix product", "training step", "encode images", "encode texts", "read, one of")
    assert [line.startswith(kind) for line, kind in zip(lines[1:6], kinds, strict=True)] == [True] * 5
    assert re.search(r"GiB are free: up to --batch 8 ", lines[6])
    stored = json.loads((tmp_path / "b.json").read_text())
    assert [line["items"] for line in stored] == [0, 4, 4, 4, 4]
    for line, printed in zip(stored[1:4], lines[2:5], strict=True):
        share = line["flop"] / line["seconds"] / (2 * 256**3 / line["product_s"])
        assert float(printed.split()[-1]) == pytest.approx(share, abs=0.006)


def test_captions_have_many_lengths() -> None:
    """One length would pad too little."""
    texts = planner_of(recipe_of(Bench(method="fff", size="b32"), 16), "cpu").batch(16).texts
    assert texts.starts.diff().float().mean().item() == pytest.approx(20, abs=0.5)
    assert 1.7 < len(texts) * texts.longest / len(texts.ids) < 2  # captions of Flickr8k, 128 at a time: 1.83


@pytest.mark.parametrize("method", ["sycoca", "prolip", "llip+fff", "clip-c+reinforced", "siglip+exact"])
def test_methods_that_need_more_than_pairs_are_measured(method: str) -> None:
    """Decoders, uncertainty, features of a teacher, ground truth: of noise."""
    _, step, images, texts = measure(Bench(method=method, size="debug", batch=4, precision="fp32", device="cpu"))
    assert step.flop > images.flop + texts.flop > 0


@pytest.mark.parametrize("free", [1e6, 2.5e6])
def test_the_batch_that_is_named_fits_and_twice_of_it_does_not(free: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "free_bytes", lambda device: int(free))
    options = Bench(size="debug", precision="fp32", device="cpu")
    images, takes, _ = room(options)

    def counted(batch: int) -> float:
        return planner_of(recipe_of(options, batch), "cpu").option("ddp", "none", 1).bytes

    if images:
        assert takes == counted(images) <= SAFE * free < counted(2 * images)
    else:
        assert takes == counted(1) > SAFE * free


def test_an_unknown_size_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "--size", "huge"])
    assert "unknown size 'huge'" in capsys.readouterr().err
