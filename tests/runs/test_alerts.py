"""Alerts: each begins where it should, says what to do, ends once; noise begins none."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from typing import Any

import pytest

from kiloword.runs.alerts import RECENT, SECONDS, Alert, Alerts

Row = dict[str, Any]


def alerts(rows: list[Row]) -> list[Alert]:
    run = Alerts(batch=256, max_scale=100.0)
    for row in rows:
        run.add(row)
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
            "gradient_norm": 1 + rng.random() + 10 * 0.9**n,
            "scale": 10 + n / 10,
            "pairs_per_s": rng.gauss(1500, 60),
            "data_wait": abs(rng.gauss(0.03, 0.02)),
            "skipped": n // 100,
            "truncated": n,
            "captions": 2560,
            "skipped_steps": 0,
            "memory": 2000.0 + min(n, 30),
            "time": 60.0 * n,
            "restarts": 0,
        }
        row |= {k: f(n) for k, f in change.items()}
        found.append({k: v for k, v in row.items() if v is not None})
    return found


@pytest.mark.parametrize("seed", range(10))
def test_a_healthy_run_has_none(seed: int) -> None:
    assert alerts(rows(600, seed)) == []


def test_heavy_tails_are_not_spam() -> None:
    rng = random.Random(0)
    noisy = rows(5000, loss=lambda n: 2 + 0.05 * rng.gauss(0, 1) / abs(rng.gauss(0, 1) + 1e-6) ** 0.3)
    assert len(alerts(noisy)) <= 10


@pytest.mark.parametrize(("jump", "deviations"), [(1.2, None), (2.1, 10)])
def test_a_spike_is_measured_in_deviations_of_what_the_loss_moves(jump: float, deviations: int | None) -> None:
    """Of a difference of two losses: a root of two more than one."""
    losses = [1 + 0.2 * (n % 2) for n in range(60)]
    found = alerts([{"step": n, "loss": loss} for n, loss in enumerate([*losses, 1.1 + jump])])
    assert [f"a spike of {deviations} robust" in alert.message for alert in found] == [True] * (deviations is not None)


def step_of(n: int) -> int:
    return 10 * (n + 1)


@pytest.mark.parametrize(
    ("name", "change", "since", "until", "says"),
    [
        ("loss spike", {"loss": lambda n: 4.0 if 200 <= n < 204 else 1 + n % 3 / 100}, 200, 208, r"is 4, it was 1\.01"),
        ("loss spike", {"loss": lambda n: 1.0 + (n % 3) / 100 + max(0, n - 300) / 2}, 301, None, "smaller --optim.lr"),
        ("skipped steps", {"skipped_steps": lambda n: 2 * (n >= 50)}, 50, 70, "2 of the last steps"),
        ("skipped steps", {"loss": lambda n: None if n == 90 else 1.0}, 90, 110, "1 of the last steps"),
        ("skipped steps", {"loss": lambda n: float("inf") if n == 90 else 1.0}, 90, 110, "1 of the last steps"),
        ("data wait", {"data_wait": lambda n: 0.5 if 100 <= n < 200 else 0.02}, 107, 218, "raise --workers"),
        ("data wait", {"slowest_data_wait": lambda n: 0.3}, 20, None, "30% of the time"),
        ("skipped samples", {"skipped": lambda n: 15 * n}, 6, None, "the run stops above 1.00%"),
        ("truncated captions", {"truncated": lambda n: 50 * n}, 2, None, "raise --model.text.context"),
        ("slower", {"pairs_per_s": lambda n: 900 if 200 <= n < 300 else 1500}, 210, 313, "900 pairs/s, 40% fewer"),
        ("scale", {"scale": lambda n: min(100.0, 50.0 + n)}, 69, None, "sits at its limit 100"),
        ("gradient norm", {"gradient_norm": lambda n: 1.0 if n < 300 else 4.0}, 310, None, "4.0 times what it was"),
        ("mined positives", {"mined_share": lambda n: 0.3 if 5 <= n < 9 else 0.01}, 5, 13, "30.0% .* --calibrate"),
        ("memory", {"memory": lambda n: 2000.0 + 5 * n}, 199, None, "still grows"),
    ],
)
def test_each_begins_and_ends(
    name: str, change: dict[str, Callable[[int], Any]], since: int, until: int | None, says: str
) -> None:
    found = alerts(rows(**change))
    assert [a.name for a in found] == [name]
    assert found[0].since == step_of(since)
    assert found[0].until == (None if until is None else step_of(until))

    assert re.search(says, found[0].message)


def test_validation_that_falls_three_times_in_a_row() -> None:
    values = [0.3, 0.4, 0.38, 0.39, 0.38, 0.37, 0.36, 0.35, 0.36, 0.35]
    found = alerts([{"step": n, "val/text_retrieval_recall@1": v} for n, v in enumerate(values)])
    assert [(a.since, a.until) for a in found] == [(6, 8)]
    assert "fell 3 times in a row, from 0.390 to 0.360" in found[0].message
    two = {"the mean acc1 on": ("a/acc1", "b/acc1"), "the mean of 2 metrics on": ("a/acc1", "image_retrieval_recall@1")}
    for what, names in two.items():
        (fall,) = alerts(
            [{"step": n, **dict.fromkeys([f"val/{k}" for k in names], v)} for n, v in enumerate(values[:8])]
        )
        assert fall.message.startswith(what)
    both = [
        {"step": n, "val/text_retrieval_recall@1": v, "val/image_retrieval_recall@1": -v} for n, v in enumerate(values)
    ]
    assert alerts(both) == []


def test_reported_once_when_it_begins_and_once_when_it_ends() -> None:
    run = Alerts(batch=256, max_scale=100.0)
    said = [s for row in rows(data_wait=lambda n: 0.5 if 100 <= n < 200 else 0.02) for s in run.add(row)]
    assert [s.partition(":")[0] for s in said] == ["alert at step 1080", "over at step 2190"]
    assert run.current == []


def test_between_both_thresholds_nothing_changes() -> None:
    """A value that crosses the first threshold again and again is one alert."""
    found = alerts(rows(data_wait=lambda n: 0.16 if n % 60 < 30 else 0.25))
    assert [a.name for a in found] == ["data wait"]


def test_speed_is_judged_anew_after_a_restart_and_not_by_seconds() -> None:
    slow = {"pairs_per_s": lambda n: 700 if n >= 200 else 1500}
    assert [a.name for a in alerts(rows(**slow))] == ["slower"]
    assert alerts(rows(**slow, restarts=lambda n: int(n >= 200))) == []
    assert alerts(rows(**slow, time=lambda n: n * SECONDS / RECENT)) == []


def test_memory_that_settles_is_no_leak() -> None:
    assert alerts(rows(memory=lambda n: 2000.0 + 10 * min(n, 60))) == []
    assert alerts(rows(memory=lambda n: 2000.0 if n < 200 else 3000.0)) == []
    assert alerts(rows(memory=lambda n: 1000.0 * (1 + math.log1p(n / 10)))) == []


def test_rows_of_another_version_raise_nothing() -> None:
    assert alerts([{"step": n, "loss": 1.0, "pairs_per_s": 10.0, "text": "x"} for n in range(50)]) == []
