"""kiloword bench: what it prints is what was measured, and the work that it divides by is the plan's."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kiloword.apps.plan import measured
from kiloword.apps.plan.measured import SAFE, Measured, Room, measure, room
from kiloword.cli.main import main


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "LEAST_S", 0.0)
    monkeypatch.setattr(measured, "SIDE", 256)
    monkeypatch.setattr(measured, "PRODUCT_FLOP", 2.0 * 256**3)


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
    assert [line.startswith(kind) for line, kind in zip(lines[1:6], kinds, strict=True)] == [True] * 5
    assert re.fullmatch(r"memory: [\d.]+ GiB are free: up to --batch \d+ .*", lines[6])
    assert lines[1].split()[-1] == "1.00"
    stored = json.loads((tmp_path / "b.json").read_text())
    assert [line["items"] for line in stored] == [0, 4, 4, 4, 4]
    for line, printed in zip(stored[1:4], lines[2:5], strict=True):
        share = line["flop"] / line["seconds"] / (measured.PRODUCT_FLOP / line["product_s"])
        assert float(printed.split()[-1]) == pytest.approx(share, abs=0.006)


def test_captions_are_measured_at_many_lengths() -> None:
    """One length would pad too little, and a longest of the context would be grouped, or pad too much."""
    bench = measured.Bench(measured._recipe("fff", "b32", 4, "fp32", "cpu", ()), "cpu")
    texts = bench.batch.texts
    assert texts.starts.diff().float().mean().item() == 20
    swapped = measured.Bench(measured._recipe("fff+negatives", "b32", 16, "fp32", "cpu", ()), "cpu").batch
    assert 15 < swapped.inputs["swapped_captions"].texts.starts.diff().float().mean().item() < 25
    assert 1.7 < len(texts) * texts.longest / len(texts.ids) < 2  # captions of Flickr8k, 128 at a time: 1.83


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


def test_short_calls_do_not_wait_for_thousands_of_products(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[float] = []
    monkeypatch.setattr(measured, "LEAST_S", 3.0)
    monkeypatch.setattr(measured, "_seconds", lambda run, device: run())
    assert measured._turns(lambda: calls.append(0.001) or 0.001, lambda: 0.2, "cpu") == (0.001, 0.2)
    assert len(calls) == 16


def test_a_machine_that_slows_down_slows_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call meets the machine of its product: one that takes ten times as long does so at every speed."""
    speed = iter(np.geomspace(1, 8, 100))
    clock = 0.0

    def work(seconds: float) -> None:
        nonlocal clock
        clock += seconds * next(speed)

    def seconds_of(run: Callable[[], None], device: str) -> float:
        start = clock
        run()
        return clock - start

    monkeypatch.setattr(measured, "_seconds", seconds_of)
    monkeypatch.setattr(measured, "LEAST", 20)
    seconds, product_s = measured._turns(lambda: work(10), lambda: work(1), "cpu")
    assert seconds / product_s == pytest.approx(10, rel=0.05)
    assert seconds > 15  # slower than at first


def test_an_unknown_size_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "--size", "huge"])
    assert "unknown size 'huge': expected one of debug" in capsys.readouterr().err


@pytest.mark.parametrize("free", [2e6, 4e8])
def test_the_batch_that_is_named_fits_and_twice_of_it_does_not(free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "free_bytes", lambda device: int(free))
    largest = room("siglip", "debug", "fp32", "cpu")
    recipe = measured._recipe("siglip", "debug", 1, "fp32", "cpu", ())

    def takes(images: int) -> float:
        plan = measured._plan(replace(recipe, batch=images))
        return measured.Planner(plan, measured.preset("siglip"), measured.card("cpu")).option("ddp", "none", 1).bytes

    if largest.images:
        assert largest.takes == takes(largest.images) <= SAFE * free < takes(2 * largest.images)
    else:
        assert largest.takes == takes(1) > SAFE * free
        assert "choose a smaller --size" in str(largest)


def test_a_card_without_room_for_one_image() -> None:
    line = str(Room(0, 2**30, 3.0 * 2**30))
    assert (
        line
        == "1.0 GiB are free; a step of one image takes 3.0 GiB, as `kiloword plan` counts: choose a smaller --size."
    )
