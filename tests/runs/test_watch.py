"""Runs as their folders show them: what `watch` prints, where alerts begin and end, and what `compare` finds."""

from __future__ import annotations

import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from commands import refused
from kiloword.cli.main import main
from kiloword.files import LOCK, Lock
from kiloword.runs.alerts import RECENT, SECONDS, Alert, Alerts
from kiloword.runs.compare import mean_curve
from kiloword.runs.run import Run, find
from pages import sections
from runs import Row, row, write


def test_curves_hold_the_numbers_of_whole_rows(tmp_path: Path) -> None:
    out = write(tmp_path / "run", [row(1), row(2), row(4, loss=7.0, pairs_per_s=25.0)])
    with (out / "metrics.jsonl").open("a") as file:
        file.write('nonsense\n[1]\n{"step": "x"}\n{"step": 5, "loss": NaN, "words": "x"}\n{"step": 6, "lo')
    run = Run(out)
    assert (run.step, run.curves["loss"], run.losses) == (5, ([1, 2, 4], [10, 5, 7]), ["loss", "pair"])
    assert run.speed == pytest.approx(3 / (2 / 100 + 1 / 25))


def test_states_of_a_run(tmp_path: Path) -> None:
    out = write(tmp_path / "run", [row(n) for n in range(1, 9)], steps=8)
    assert Run(out).state == "finished"
    with Lock(out):
        assert Run(out).state == "running"  # perhaps it validates
    (out / "error.json").write_text('{"error": "no room"}')
    assert Run(out).state == "failed"
    longer = write(tmp_path / "longer", [row(1)])
    assert Run(longer).state == "stopped"
    (longer / LOCK).write_text("process 1 on another machine")
    assert Run(longer).state == "running"
    os.utime(longer / "metrics.jsonl", (0, 0))
    assert Run(longer).state == "stopped"
    assert Run(write(tmp_path / "early", [row(1), {"step": 1, "stopped_early": 1}])).state == "finished"
    (killed := tmp_path / "killed").mkdir()
    with Lock(killed):
        assert Run(killed).state == "running"
    code = f"import os; from pathlib import Path; from kiloword.files import Lock; Lock(Path({str(killed)!r})); "
    subprocess.run([sys.executable, "-c", code + "os.kill(os.getpid(), 9)"], check=False, timeout=60)
    assert (killed / LOCK).exists()
    assert Run(killed).state == "stopped"


def test_a_run_in_a_few_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row(n, truncated=12, skipped_steps=2 * (n > 40), memory=2500.0, lr=5e-4) for n in range(1, 51)]
    rows.append({"step": 50, "val/text_retrieval_recall@1": 0.5, "val/text_retrieval_recall@5": 0.9})
    out = write(tmp_path / "a", rows)
    (out / LOCK).touch()
    write(tmp_path / "b", [row(n) for n in range(1, 5)])
    (tmp_path / "b" / "error.json").write_text('{"error": "no\\u001b room"}')
    main(["watch", str(tmp_path), "--once"])
    first, alert, second, error = capsys.readouterr().out.splitlines()
    for words in ("a  siglip  running  step 50/100  ETA 0:05", "loss 0.2", "lr 5.00e-04", "100 pairs/s"):
        assert words in first
    for words in ("data wait 1%", "memory 2,500 MB", "12 captions cut", "2 steps skipped"):
        assert words in first
    assert first.endswith("text_retrieval_recall@1 0.5")
    assert alert.startswith("  ! skipped steps since step 41: 2 of the last steps")
    assert second.startswith("b  siglip  failed  step 4/100")
    assert error == "  ! the run ended with an error: no\\x1b room"
    for text in ('{"recipe": {"steps":', '{"recipe": [1]}', "null"):
        (tmp_path / "b" / "config.json").write_text(text)
        main(["watch", str(tmp_path / "b")])
        assert "loss 2.5" in capsys.readouterr().out


def test_on_a_terminal_it_follows_the_runs_until_they_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    (write(tmp_path / "a", [row(1)], steps=3) / LOCK).touch()

    def sleep(seconds: float) -> None:
        write(tmp_path / "a", [row(n) for n in range(1, 4)], steps=3)
        write(tmp_path / "b", [row(1), row(2)], steps=2)

    monkeypatch.setattr(time, "sleep", sleep)
    main(["watch", str(tmp_path)])
    said = capsys.readouterr().out
    assert said.index("step 1/3") < said.index("step 3/3")
    assert "b  siglip" in said


def test_names_of_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("x/b", "x/a", "y/a"):
        write(Path(name), [row(1)])
    assert [run.name for run in find([Path("x")])] == ["a", "b"]
    assert [run.name for run in find([Path("x"), Path("y/a")])] == ["x/a", "x/b", "y/a"]


def test_a_pipe_gets_plain_text_and_the_verb_needs_no_torch(tmp_path: Path) -> None:
    out = write(tmp_path / "run", [row(n) for n in range(1, 20)])
    code = "import sys; from kiloword.cli.main import main; main(sys.argv[1:]); assert not {'torch'} & set(sys.modules)"
    command = [sys.executable, "-c", code, "watch", str(out)]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, env=environment, check=True, timeout=120)
    assert b"\x1b" not in done.stdout
    assert b"step 19/100" in done.stdout


# Alerts


def alerts(rows: list[Row]) -> list[Alert]:
    run = Alerts(batch=256)
    for values in rows:
        run.add(values)
    return run.all


def rows(number: int = 400, seed: int = 0, **change: Callable[[int], Any]) -> list[Row]:
    """A healthy run of rows a minute apart; `change`: key -> value by row, None: the key is not there."""
    rng = random.Random(seed)
    found = []
    for n in range(number):
        row: Row = {
            "step": 10 * (n + 1),
            "epoch": 10 * (n + 1) * 256 / 1_000_000,
            "loss": 1 + 5 * 0.99**n + rng.gauss(0, 0.05),
            "pairs_per_s": rng.gauss(1500, 60),
            "data_wait": abs(rng.gauss(0.03, 0.02)),
            "skipped": n // 100,
            "truncated": n,
            "captions": 2560,
            "skipped_steps": 0,
            "time": 60.0 * n,
            "restarts": 0,
        }
        row |= {k: f(n) for k, f in change.items()}
        found.append({k: v for k, v in row.items() if v is not None})
    return found


@pytest.mark.parametrize("seed", range(5))
def test_noise_begins_none_and_heavy_tails_few(seed: int) -> None:
    assert alerts(rows(600, seed)) == []
    rng = random.Random(seed)
    noisy = rows(3000, loss=lambda n: 2 + 0.05 * rng.gauss(0, 1) / abs(rng.gauss(0, 1) + 1e-6) ** 0.3)
    assert len(alerts(noisy)) <= 10


@pytest.mark.parametrize(("jump", "deviations"), [(1.2, None), (2.1, 10)])
def test_a_spike_is_measured_in_deviations_of_what_the_loss_moves(jump: float, deviations: int | None) -> None:
    """Of a difference of two losses: a root of two more than one."""
    losses = [1 + 0.2 * (n % 2) for n in range(60)]
    found = alerts([{"step": n, "loss": loss} for n, loss in enumerate([*losses, 1.1 + jump])])
    assert [f"a spike of {deviations} robust" in alert.message for alert in found] == [True] * (deviations is not None)


@pytest.mark.parametrize(
    ("name", "change", "since", "until", "says"),
    [
        ("loss spike", {"loss": lambda n: 4.0 if 200 <= n < 204 else 1 + n % 3 / 100}, 200, 204, r"is 4, it was 1\.01"),
        ("loss spike", {"loss": lambda n: 1.0 + (n % 3) / 100 + max(0, n - 300) / 2}, 301, None, "smaller --optim.lr"),
        ("skipped steps", {"skipped_steps": lambda n: 2 * (n >= 50)}, 50, 70, "2 of the last steps"),
        ("skipped steps", {"loss": lambda n: None if n == 90 else 1.0}, 90, 110, "1 of the last steps"),
        ("skipped steps", {"loss": lambda n: float("inf") if n == 90 else 1.0}, 90, 110, "1 of the last steps"),
        ("data wait", {"data_wait": lambda n: 0.5 if 100 <= n < 200 else 0.02}, 107, 214, "raise --workers"),
        ("data wait", {"data_wait": lambda n: 0.16 if n % 60 < 30 else 0.25}, 38, None, "raise --workers"),
        ("data wait", {"slowest_data_wait": lambda n: 0.3}, 20, None, "30% of the time"),
        ("skipped samples", {"skipped": lambda n: 15 * n}, 6, None, "the run stops above 1.00%"),
        ("truncated captions", {"truncated": lambda n: 50 * n}, 2, None, "raise --model.text.context"),
        ("slower", {"pairs_per_s": lambda n: 900 if 200 <= n < 300 else 1500}, 210, 309, "900 pairs/s, 40% fewer"),
        ("mined positives", {"mined_share": lambda n: 0.3 if 5 <= n < 9 else 0.01}, 5, 9, "30.0% .* --calibrate"),
    ],
)
def test_each_begins_and_ends(
    name: str, change: dict[str, Callable[[int], Any]], since: int, until: int | None, says: str
) -> None:
    found = alerts(rows(**change))
    assert [(a.name, a.since, a.until) for a in found] == [
        (name, 10 * (since + 1), None if until is None else 10 * (until + 1))
    ]
    assert re.search(says, found[0].message)


def test_validation_that_falls_three_times_in_a_row() -> None:
    values = [0.3, 0.4, 0.38, 0.39, 0.38, 0.37, 0.36, 0.35, 0.36, 0.35]
    found = alerts([{"step": n, "val/text_retrieval_recall@1": v, "val/rsum": 1} for n, v in enumerate(values)])
    assert [(a.since, a.until) for a in found] == [(6, 8)]
    assert alerts([{"step": n, "val/a/acc1": v, "val/b/acc1": -v} for n, v in enumerate(values)]) == []


def test_speed_is_judged_anew_after_a_restart_and_not_by_seconds() -> None:
    slow = {"pairs_per_s": lambda n: 700 if n >= 200 else 1500}
    assert [a.name for a in alerts(rows(**slow))] == ["slower"]
    assert alerts(rows(**slow, restarts=lambda n: int(n >= 200))) == []
    assert alerts(rows(**slow, time=lambda n: n * SECONDS / RECENT)) == []


# Runs beside each other


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


@pytest.mark.plots
def test_seeds_are_one_group_with_a_spread(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, page = runs.parent / "compared.json", runs.parent / "compared.html"
    main(["compare", str(runs), "--json", str(file), "--html", str(page)])
    by_name = {group["name"]: group for group in json.loads(file.read_text())["groups"]}
    assert list(by_name) == ["fast-0 and 1 more", "other", "slow-0 and 1 more"]
    slow = by_name["slow-0 and 1 more"]
    members = [(Path(run["folder"]).name, run["state"], run["step"]) for run in slow["runs"]]
    assert members == [("slow-0", "finished", 3), ("slow-1", "finished", 3)]
    assert slow["settings"] == {"method": "clip", "optim.lr": 0.001}
    recall = slow["metrics"]["text_retrieval_recall@1"]
    assert recall == {"mean": pytest.approx(0.25), "std": pytest.approx(statistics.stdev([0.2, 0.3])), "n": 2}
    assert by_name["other"]["metrics"]["rsum"] == {"mean": 1.6, "std": None, "n": 1}
    assert slow["metrics"]["loss of clip, batch 10"]["mean"] == pytest.approx(5 / 3 + 0.5)
    assert slow["metrics"]["pairs_per_s"]["mean"] == pytest.approx(100)
    assert "0.25 ± 0.071" in capsys.readouterr().out
    plots = re.findall("<svg.*?</svg>", page.read_text(), re.DOTALL)
    assert not any("other" in plot for plot in plots if "loss of clip" in plot)  # it has another loss
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
    config = json.loads((runs / "slow-1" / "config.json").read_text())
    (runs / "slow-1" / "config.json").write_text(json.dumps(config | {"code": "edited"}))
    main(["compare", str(runs), "--json", str(runs.parent / "c.json"), "--html", str(runs.parent / "c.html")])
    groups = {group["name"]: group for group in json.loads((runs.parent / "c.json").read_text())["groups"]}
    assert list(groups) == ["<script>", "fast-0", "fast-1", "other", "slow-0", "slow-1"]
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
def test_refused_runs(
    runs: Path, words: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(runs.parent)
    if "empty" in words:
        write(Path("empty"), [])
    assert message in refused(capsys, *words.split())
