"""Runs beside each other: what is one group, what differs, and which figures the table, the JSON and the page hold."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from commands import refused
from kiloword.cli.main import main
from kiloword.runs.compare import mean_curve
from kiloword.runs.run import Run
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
    file, page = runs.parent / "compared.json", runs.parent / "compared.html"
    main(["compare", str(runs), "--json", str(file), "--html", str(page)])
    by_name = {group["name"]: group for group in json.loads(file.read_text())["groups"]}
    assert list(by_name) == ["fast-0 and 1 more", "other", "slow-0 and 1 more"]
    slow = by_name["slow-0 and 1 more"]
    assert [(Path(run["folder"]).name, run["state"], run["step"]) for run in slow["runs"]] == [
        ("slow-0", "finished", 3),
        ("slow-1", "finished", 3),
    ]
    assert slow["settings"] == {"method": "clip", "optim.lr": 0.001}
    recall = slow["metrics"]["text_retrieval_recall@1"]
    assert recall == {"mean": pytest.approx(0.25), "std": pytest.approx(statistics.stdev([0.2, 0.3])), "n": 2}
    assert by_name["other"]["metrics"]["rsum"] == {"mean": 1.6, "std": None, "n": 1}
    assert slow["metrics"]["loss of clip, batch 10"]["mean"] == pytest.approx(5 / 3 + 0.5)
    assert slow["metrics"]["pairs_per_s"]["mean"] == pytest.approx(100)
    said = capsys.readouterr().out
    assert "0.25 ± 0.071" in said
    read = sections(page.read_text())
    differ, last = (read[name].tables[0] for name in ("Settings that differ", "Last values"))
    assert differ == [
        ["setting", "fast-0 and 1 more", "other", "slow-0 and 1 more"],
        ["method", "clip", "siglip", "clip"],
        ["optim.lr", "0.002", "0.001", "0.001"],
    ]
    assert last[:2] == [["", "fast-0 and 1 more", "other", "slow-0 and 1 more"], ["n", "2", "1", "2"]]
    assert ["rsum", "2 ± 0", "1.6", "1 ± 0.28"] in last
    assert ["loss of siglip, batch 10", "–", "1.667", "–"] in last


def test_runs_of_several_batches_and_sizes_are_several_groups(runs: Path) -> None:
    some_run(runs / "<script>", "clip", 1e-3, 0, 0.1, batch=20)
    config = json.loads((runs / "other" / "config.json").read_text())
    config["recipe"] |= {"size": "s16", "model": {"width": 3}}
    (runs / "other" / "config.json").write_text(json.dumps(config))
    (runs / "fast-1" / "config.json").write_text("{")  # is like no other
    main(["compare", str(runs), "--json", str(runs.parent / "c.json"), "--html", str(runs.parent / "c.html")])
    groups = {group["name"]: group for group in json.loads((runs.parent / "c.json").read_text())["groups"]}
    assert list(groups) == ["<script>", "fast-0", "fast-1", "other", "slow-0 and 1 more"]
    assert groups["fast-1"]["settings"] == {}
    assert "model.width" not in groups["other"]["settings"]  # the size implies it
    assert "loss of clip, batch 20" in groups["<script>"]["metrics"]
    assert "<script>" not in (runs.parent / "c.html").read_text()


def test_seeds_alone_have_no_settings_and_curves_are_means_at_the_steps_that_all_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "a", [row(n, loss=float(n)) for n in (1, 2, 3)], seed=0)
    write(tmp_path / "b", [row(n, loss=3.0 * n) for n in (1, 3, 4)], seed=1)
    curve = mean_curve([Run(tmp_path / name) for name in "ab"], "loss of siglip, batch 10")
    assert [list(of) for of in curve] == [[1, 3], [2, 6]]
    main(["compare", str(tmp_path), "--html", str(tmp_path / "c.html")])
    assert "Settings" not in capsys.readouterr().out
    assert [*sections((tmp_path / "c.html").read_text())][1:] == ["Runs", "Last values", "Curves"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("compare", "RUNS"),
        ("compare runs/other", "found 1 run with rows"),
        ("compare runs/none", "is no run"),
        ("compare runs/other empty", "omitted: empty"),
        ("watch", "RUNS"),
        ("watch .", "holds none"),
    ],
)
def test_refusals(
    runs: Path, words: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(runs.parent)
    if "empty" in words:
        write(Path("empty"), [])
    assert message in refused(capsys, *words.split())
