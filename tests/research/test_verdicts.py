"""Tables, verdicts and plots of the rows that are there."""

from __future__ import annotations

import importlib
import json
import shlex
import subprocess
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import tyro

from research.evidence import packed
from research.tables import AGAIN, ROWS, RULED, main, page, plots, read


def row(arm: str, seed: int, mean: float, rate: float = 1.0) -> dict[str, Any]:
    """A row of research.muon."""
    outcomes = mean + 0.01 * np.random.default_rng(seed).normal(size=50)
    row: dict[str, Any] = {"experiment": "muon", "arm": arm, "seed": seed, "rate": rate, "steps": 1, "images": 2}
    row |= {"cpu_s": 3.0, "commit": "0123456789", "dirty": False}
    return row | {"metrics": {"mr1": mean, "outcomes": packed(outcomes)}}


def written(folder: Path, rows: list[dict[str, Any]]) -> Path:
    (folder / "muon").mkdir(parents=True)
    (folder / "muon" / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_tables_need_only_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The newest row of a seed counts; the seed that chose the rates has a table of its own."""
    rows = [row("muon", 100, 0.4, 0.5), row("muon", 100, 0.6, 2.0), row("muon", 0, 0.9)]
    rows += [row(arm, seed, mean) for arm, mean in (("muon", 0.5), ("adamw", 0.3)) for seed in (2, 1, 0)]
    main(rows=written(tmp_path, rows))
    printed = capsys.readouterr().out
    assert "| muon | 0.500 (0.500..0.500) |" in printed
    assert "| mR@1, seed 100 | 0.5 times | 2 times |" in printed
    assert "| muon | 0.400 | 0.600 |" in printed
    assert "at equal processor time: muon over adamw +0.200 (" in printed
    main(rows=tmp_path, write=tmp_path / "made")
    assert (tmp_path / "made" / "tables.md").read_text() == printed
    plot = ElementTree.parse(tmp_path / "made" / "muon.svg").getroot()
    assert "at equal processor time: muon over adamw" in "".join(plot.itertext())
    with pytest.raises(ValueError, match="has no rows: expected NAME"):
        read(tmp_path / "made")


def refused(capsys: pytest.CaptureFixture[str], names: tuple[str, ...] = (), **options: Path) -> str:
    """The one message of a call that ends with code 2."""
    with pytest.raises(SystemExit) as ended:
        main(names, **options)
    message = capsys.readouterr().err
    assert (ended.value.code, message.count("\n")) == (2, 1)
    return message


def test_a_trial_in_the_folder_does_not_pass_for_the_experiment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs of other lengths or rates, and models judged on other data; the seed that chose the rates has several."""
    rows = [row("muon", seed, 0.5) | {"recipe": "a"} for seed in (0, 1, 2)]
    rows += [row("muon", 100, 0.5, rate) | {"recipe": f"{rate}"} for rate in (0.5, 2.0)]
    main(rows=written(tmp_path / "whole", rows))
    assert "| muon | 0.500 (0.500..0.500) |" in capsys.readouterr().out
    trial = [*rows, row("muon", 0, 0.1) | {"recipe": "b"}]
    assert "several recipes (a, b)" in refused(capsys, rows=written(tmp_path / "trial", trial))
    data = [row("muon", 0, 0.5) | {"judged": {"val": val}} for val in ("a/dev", "a/dev", "a/test")]
    main(rows=written(tmp_path / "moved", data[:2]))
    assert "several data" in refused(capsys, rows=written(tmp_path / "other", data))


@pytest.mark.slow
def test_the_pages_have_what_the_rows_say() -> None:
    """research/results holds the tables and plots of the rows, research/results.md the effect of every decision."""
    results, record = read(ROWS), ROWS.parent
    assert (record / "results" / "tables.md").read_text(encoding="utf-8") == page(results, read(AGAIN))
    for name, plot in plots(results).items():
        assert (record / "results" / name).read_text(encoding="utf-8") == plot
    verdicts = " ".join((record / "results.md").read_text(encoding="utf-8").split())
    assert [d for one in results for d in one.decisions if str(d.effect) not in verdicts] == []


def test_the_makefile_names_arms_and_options_of_its_experiments() -> None:
    """`make -n`: each line is one that the shell and the experiment can read; the arms have rows."""
    command = ["make", "-n", "-C", "research", "all", "FLICKR=/flickr", "TINY=/tiny", "OUT=/out", "PYTHON=python"]
    printed = subprocess.run(command, cwd=ROWS.parents[1], check=True, capture_output=True, text=True).stdout
    lines = [line for line in printed.splitlines() if "-m research." in line and ".tables" not in line]
    assert len(lines) > len(RULED)
    arms = {results.name: {row["arm"] for row in results.rows} for results in read(ROWS)}
    for line in lines:
        words = shlex.split(line.rpartition("; do ")[2].removesuffix("; done").replace("$rate", "1"))
        experiment = importlib.import_module(words[2]).EXPERIMENT
        named = tyro.cli(experiment.options, args=words[3:]).arms
        assert set(named) <= arms[words[2].rpartition(".")[2]]
