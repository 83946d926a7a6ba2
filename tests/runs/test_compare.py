"""Runs beside each other: what is one group, what differs, which losses share a plot."""

from __future__ import annotations

import json
import re
import shutil
import statistics
from pathlib import Path

import pytest

from kiloword.cli.main import main
from kiloword.runs import curves
from pages import sections
from runs import row, write


def some_run(out: Path, method: str, lr: float, seed: int, recall: float, batch: int = 10) -> None:
    rows = [row(n, loss=5.0 / n + seed, pair=5.0 / n + seed) for n in (1, 2, 3)]
    rows.append({"step": 3, "restarts": 0, "val/text_retrieval_recall@1": recall, "val/rsum": 4 * recall})
    write(out, rows, steps=3, method=method, optim={"lr": lr, "name": "adamw"}, seed=seed, batch=batch)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two groups of two seeds, and a run of another method."""
    for seed in (0, 1):
        some_run(tmp_path / "runs" / f"slow-{seed}", "clip", 1e-3, seed, 0.2 + 0.1 * seed)
        some_run(tmp_path / "runs" / f"fast-{seed}", "clip", 2e-3, seed, 0.5)
    some_run(tmp_path / "runs" / "other", "siglip", 1e-3, 0, 0.4)
    return tmp_path / "runs"


def test_seeds_are_one_group_with_a_spread(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = runs.parent / "compared.json"
    main(["compare", str(runs), "--json", str(file)])
    stored = json.loads(file.read_text())
    by_name = {group["name"]: group for group in stored["groups"]}
    assert list(by_name) == ["clip, lr 0.002", "other", "clip, lr 0.001"]
    slow = by_name["clip, lr 0.001"]
    assert [Path(run["folder"]).name for run in slow["runs"]] == ["slow-0", "slow-1"]
    assert slow["settings"] == {"method": "clip", "optim.lr": 0.001}
    recall = slow["metrics"]["text_retrieval_recall@1"]
    assert recall == {"mean": pytest.approx(0.25), "std": pytest.approx(statistics.stdev([0.2, 0.3])), "n": 2}
    assert by_name["other"]["metrics"]["rsum"] == {"mean": 1.6, "std": None, "n": 1}
    assert slow["metrics"]["loss of clip, batch 10"]["mean"] == pytest.approx(5 / 3 + 0.5)
    out = capsys.readouterr().out
    assert "0.25 +- 0.071" in out
    assert "different quantities" in out


def test_groups_that_differ_in_much_have_the_name_of_their_method(tmp_path: Path) -> None:
    for seed in (0, 1):
        some_run(tmp_path / "runs" / f"first-{seed}", "clip", 1e-3, seed, 0.2)
        some_run(tmp_path / "runs" / f"second-{seed}", "mine:preset", 2e-3, seed, 0.3, batch=20)
    main(["compare", str(tmp_path / "runs"), "--json", str(tmp_path / "c.json")])
    names = [group["name"] for group in json.loads((tmp_path / "c.json").read_text())["groups"]]
    assert names == ["clip", "mine:preset"]


def test_a_strangers_settings_are_bounded(tmp_path: Path) -> None:
    for name in ("a", "b"):
        some_run(tmp_path / "runs" / name, "clip", 1e-3, 0, 0.2 if name == "a" else 0.3)
        config = json.loads((tmp_path / "runs" / name / "config.json").read_text())
        config["recipe"] |= {f"{name}{n}": n for n in range(20_000)} | {"x" * 1_000_000: name}
        (tmp_path / "runs" / name / "config.json").write_text(json.dumps(config))
    main(["compare", str(tmp_path / "runs"), "--json", str(tmp_path / "c.json")])
    assert (tmp_path / "c.json").stat().st_size < 1_000_000


def test_a_copied_run_is_no_further_seed(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(runs / "slow-0", runs / "slow-copy")
    file = runs.parent / "compared.json"
    main(["compare", str(runs), "--json", str(file)])
    members = [Path(run["folder"]).name for group in json.loads(file.read_text())["groups"] for run in group["runs"]]
    assert sorted(members) == ["fast-0", "fast-1", "other", "slow-0", "slow-1"]
    assert "slow-copy has the recipe, the seed and the losses of slow-0" in capsys.readouterr().err


def test_a_copy_that_was_made_before_the_run_ended_is_none_either(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(runs / "slow-0", runs / "another")
    rows = (runs / "another" / "metrics.jsonl").read_text().splitlines(keepends=True)
    (runs / "another" / "metrics.jsonl").write_text("".join(rows[:2]))
    main(["compare", str(runs)])
    assert "another has the recipe, the seed and the losses of slow-0" in capsys.readouterr().err


def test_losses_of_other_methods_and_batches_have_plots_of_their_own(runs: Path) -> None:
    some_run(runs / "large", "clip", 1e-3, 0, 0.1, batch=20)
    file = runs.parent / "compared.html"
    main(["compare", str(runs), "--html", str(file)])
    html = file.read_text()
    loss = html.split(">Loss</h2>")[1].split("<h2")[0]
    assert loss.count("<figure") == 3
    (shared,) = [part for part in loss.split("<figure")[1:] if 'class="legend"' in part]
    assert ("fast-0" in shared, "slow-0" in shared) == (True, True)
    assert shared.count("<li>") == 2  # both rates of clip with a batch of 10, and no other
    assert {row[0] for row in sections(html)["Settings that differ"].tables[0][1:]} == {"method", "optim.lr", "batch"}
    assert "kiloword compare" in html.split("<footer")[1]


def test_many_runs_share_axes(tmp_path: Path) -> None:
    for n in range(9):
        some_run(tmp_path / f"run{n}", "clip", 1e-3 * (n + 1), n, 0.1)
    main(["compare", str(tmp_path), "--html", str(tmp_path / "c.html")])
    loss = (tmp_path / "c.html").read_text().split(">Loss</h2>")[1].split("<h2")[0]
    first, second = loss.split("<figure")[1:3]
    ticks = [part.split('class="name"')[0].count("text-anchor") for part in (first, second)]
    assert ticks[0] == ticks[1]
    numbers = [[piece.split("<")[0] for piece in part.split('text-anchor="end">')[1:]] for part in (first, second)]
    assert numbers[0] == numbers[1]


def test_steps_are_whole_numbers() -> None:
    html = curves.plot("lr", [curves.Curve("a", [(10, 1e-3), (12, 1e-4)])])
    assert ">11</text>" in html
    assert ">10.5</text>" not in html


def test_axes_of_amounts_begin_at_zero() -> None:
    for name, values in (("memory", (2390.0, 2650.0)), ("pairs_per_s", (50.0, 61.0)), ("data_wait", (0.02, 0.03))):
        points = [(10, values[0]), (100, values[1])]
        assert ">0</text>" in curves.plot(name, [curves.Curve("a", points)])
        assert ">0</text>" not in curves.plot("gradient_norm", [curves.Curve("a", points)])


def test_a_run_without_settings_has_none_that_differ(runs: Path) -> None:
    (runs / "other" / "config.json").unlink()
    file = runs.parent / "compared.json"
    main(["compare", str(runs / "other"), str(runs / "slow-0"), "--json", str(file)])
    without, other = (group["settings"] for group in json.loads(file.read_text())["groups"])
    assert (without, "" in other) == ({}, False)


@pytest.mark.parametrize(
    ("folders", "message"),
    [((), "compare needs runs"), (("runs/other",), "found 1 run with rows"), (("runs/none",), "does not exist")],
)
def test_refusals(
    runs: Path,
    folders: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(runs.parent)
    with pytest.raises(SystemExit) as end:
        main(["compare", *folders])
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_damaged_files_and_hostile_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    some_run(tmp_path / "a", "<script>\x1b[2J", 1e-3, 0, 0.1)
    some_run(tmp_path / "b", "clip", 1e-3, 0, 0.1)
    (tmp_path / "b" / "config.json").write_text("[" * 5000)
    write(tmp_path / "empty", [])
    main(["compare", str(tmp_path), "--html", str(tmp_path / "c.html")])
    read = capsys.readouterr()
    assert "\x1b" not in read.out
    assert "empty has no row yet" in read.err
    assert "<script>" not in (tmp_path / "c.html").read_text()


@pytest.mark.parametrize("groups", [3, 30])
def test_no_name_and_no_number_is_cut(groups: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Many groups, or long values, have a line each."""
    long = f"photos/{'holiday' * 12}"
    for n in range(groups):
        some_run(tmp_path / f"run{n}", "clip", 1e-3 * (n + 1), 0, 0.12345 + n)
        config = json.loads((tmp_path / f"run{n}" / "config.json").read_text())
        config["recipe"]["data"] = {"sources": [f"{long}-{n}"]}
        (tmp_path / f"run{n}" / "config.json").write_text(json.dumps(config))
    main(["compare", str(tmp_path)])
    printed = capsys.readouterr().out
    assert "\u2026" not in printed
    for n in range(groups):
        assert f"{long}-{n}" in printed
        assert f"{0.12345 + n:.4g}" in printed
    assert bool(re.search(r"\n  1\.123 +b  run1\n", printed)) is (groups == 30)
