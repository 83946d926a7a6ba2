"""kiloword bench: what it prints is what was measured, and the work that it divides by is the plan's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kiloword.apps.plan import measured
from kiloword.apps.plan.measured import measure, planner_of, room
from kiloword.cli.main import main
from kiloword.config.recipes import Recipe
from kiloword.methods.defaults import default_recipe


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "LEAST_S", 0.0)
    monkeypatch.setattr(measured, "SIDE", 256)
    monkeypatch.setattr(measured, "MOST", 8)


def recipe(method: str, batch: int, size: str = "debug") -> Recipe:
    return replace(default_recipe(method, size), batch=batch, precision="fp32")


def test_the_table_has_what_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(f"bench siglip --size debug --batch 4 --json {tmp_path / 'b.json'}".split())
    said = capsys.readouterr().out
    product, step = json.loads((tmp_path / "b.json").read_text())
    assert (product["flop"], step["items"]) == (2 * 256**3, 4)
    for line in (product, step):
        assert f"{line['flop'] / line['seconds'] / 1e12:.4f}" in said
    assert f"{4 / step['seconds']:,.1f}" in said
    assert "GiB are free: up to --batch 8 " in said


def test_captions_have_many_lengths() -> None:
    """One length would pad too little."""
    texts = planner_of(recipe("fff", 16, "b32"), "cpu").batch(16).texts
    assert texts.starts.diff().float().mean().item() == pytest.approx(20, abs=0.5)
    assert 1.7 < len(texts) * texts.longest / len(texts.ids) < 2  # captions of Flickr8k, 128 at a time: 1.83


@pytest.mark.parametrize("method", ["sycoca", "prolip", "llip+fff", "clip-c+reinforced", "siglip+exact"])
def test_methods_that_need_more_than_pairs_are_measured(method: str) -> None:
    """Decoders, uncertainty, features of a teacher, ground truth: of noise."""
    _, step = measure(recipe(method, 4), "cpu")
    assert step["seconds"] > 0 < step["flop"]


def test_the_batch_that_is_named_fits_and_twice_of_it_does_not() -> None:
    one, four, eight = (planner_of(recipe("siglip", n), "cpu").option("ddp", "none", 1).bytes for n in (1, 4, 8))
    assert room(recipe("siglip", 1), "cpu", int(one / 0.75) - 2) == (0, one)
    assert room(recipe("siglip", 1), "cpu", int(four / 0.75) + 2) == (4, four)
    assert room(recipe("siglip", 1), "cpu", int(1e9)) == (8, eight)  # the most that is looked at


@pytest.mark.parametrize(
    ("words", "said"), [("--size huge", "unknown size 'huge'"), ("nosuch", "nosuch"), ("--batch 0", "--batch is 0")]
)
def test_unknown_names_are_refused_before_anything_is_printed(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["bench", *words.split()])
    output = capsys.readouterr()
    assert (end.value.code, output.out, said in output.err) == (2, "", True)
