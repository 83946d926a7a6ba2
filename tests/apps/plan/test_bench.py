"""kiloword bench: what it prints is what was measured, and the work that it divides by is the plan's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from torch.utils.benchmark import Measurement, Timer

from commands import refused, said
from kiloword.apps.plan.measured import measure, planner_of, room
from kiloword.config.recipes import Recipe
from kiloword.methods.defaults import default_recipe


def recipe(method: str, batch: int, size: str = "debug") -> Recipe:
    return replace(default_recipe(method, size), batch=batch, precision="fp32")


@pytest.fixture(autouse=True)
def once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is timed runs once, not for seconds."""

    def timed(self: Timer, min_run_time: float) -> Measurement:
        assert min_run_time >= 1
        return self.timeit(1)

    monkeypatch.setattr(Timer, "blocked_autorange", timed)


@pytest.mark.slow
def test_the_table_has_what_was_measured_and_the_batch_that_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    four = planner_of(recipe("siglip", 4), "cpu").option("ddp", "none", 1).bytes
    read, free = Path.read_text, f"MemAvailable: {int(four / 0.75 / 1024) + 1} kB"
    monkeypatch.setattr(
        Path, "read_text", lambda path, *a, **k: free if path.name == "meminfo" else read(path, *a, **k)
    )
    words = ["bench", "siglip", "--size", "debug", "--batch", "4", "--precision", "fp32", "--json"]
    printed = said(capsys, *words, tmp_path / "b.json")
    product, step = json.loads((tmp_path / "b.json").read_text())
    assert (product["flop"], step["items"]) == (2 * 2048**3, 4)
    for line in (product, step):
        assert f"{line['flop'] / line['seconds'] / 1e12:.4f}" in printed
    assert f"{4 / step['seconds']:,.1f}" in printed
    assert "up to --batch 4 " in printed


def test_captions_have_many_lengths() -> None:
    """One length would pad too little."""
    texts = planner_of(recipe("fff", 16, "b32"), "cpu").batch(16).texts
    assert texts.starts.diff().float().mean().item() == pytest.approx(20, abs=0.5)
    assert 1.7 < len(texts) * texts.longest / len(texts.ids) < 2  # captions of Flickr8k, 128 at a time: 1.83


def test_memory_of_a_machine_without_a_gpu() -> None:
    """Too little for one image, which takes no room for the libraries of a GPU."""
    assert (0, 0) < room(recipe("siglip", 1), "cpu", 1 << 19) < (0, 1 << 28)


@pytest.mark.parametrize("method", ["sycoca", "clip-c+reinforced", "siglip+exact"])
def test_methods_that_need_more_than_pairs_are_measured(method: str) -> None:
    """Decoders, features of a teacher, ground truth: of noise."""
    _, step = measure(recipe(method, 4), "cpu")
    assert step["seconds"] > 0 < step["flop"]


@pytest.mark.parametrize(("words", "word"), [("--size huge", "huge"), ("nosuch", "nosuch"), ("--batch 0", "--batch")])
def test_refusals(words: str, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert word in refused(capsys, "bench", *words.split())
