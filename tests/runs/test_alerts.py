"""Alerts: each begins where it should, says what to do, ends once; noise begins none."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import pytest

from kiloword.runs.alerts import RECENT, SECONDS, Alert, Alerts

Row = dict[str, Any]


def alerts(rows: list[Row]) -> list[Alert]:
    run = Alerts(batch=256)
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


def test_reported_once_when_it_begins_and_once_when_it_ends() -> None:
    run = Alerts(batch=256)
    said = [s for row in rows(data_wait=lambda n: 0.5 if 100 <= n < 200 else 0.02) for s in run.add(row)]
    assert [s.partition(":")[0] for s in said] == ["alert at step 1080", "over at step 2150"]
    assert run.current == []


def test_speed_is_judged_anew_after_a_restart_and_not_by_seconds() -> None:
    slow = {"pairs_per_s": lambda n: 700 if n >= 200 else 1500}
    assert [a.name for a in alerts(rows(**slow))] == ["slower"]
    assert alerts(rows(**slow, restarts=lambda n: int(n >= 200))) == []
    assert alerts(rows(**slow, time=lambda n: n * SECONDS / RECENT)) == []
