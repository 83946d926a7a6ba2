"""One run in full: which rows it logs, what is in them, when it saves and validates, and what is left at its end."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.modules.module import register_module_forward_pre_hook

from kiloword.config.recipes import Recipe
from kiloword.data.open import open_source
from kiloword.methods.defaults import default_recipe
from kiloword.training.log import read_metrics
from kiloword.training.loop import RunOptions, train
from kiloword.types import Record

LR, SCENES = 0.002, 72
EVERY = RunOptions(log_every=2, save_every=3, eval_every=4, keep_states=9, quiet=True)


def recipe(**optim: Any) -> Recipe:
    base = default_recipe("siglip", "debug", (f"scenes?n={SCENES}&captions=2",))
    data = replace(base.data, tokenizer_vocab=300, val=("scenes:val?n=12",))
    optim_config = replace(base.optim, lr=LR, warmup=4.0, final_lr=0.25, **optim)
    return replace(base, data=data, optim=optim_config, batch=16, steps=9, seed=3)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of nine steps, four an epoch."""
    out = tmp_path_factory.mktemp("run")
    train(recipe(), out, options=EVERY)
    return out


def test_rows_come_when_they_should(run: Path) -> None:
    rows = read_metrics(run / "metrics.jsonl")
    assert [row["step"] for row in rows if "loss" in row] == [2, 4, 6, 8, 9]
    assert [row["step"] for row in rows if "val/image_retrieval_recall@1" in row] == [4, 8, 9]
    assert all(row["restarts"] == 0 for row in rows)
    states = sorted(path.stem for path in (run / "state").glob("*.json"))
    assert [int("".join(filter(str.isdigit, name))) for name in states] == [3, 4, 6, 8, 9]


@pytest.mark.parametrize(("epochs", "at"), [(0.5, [2, 4, 5]), (1.0, [4, 5]), (9.0, [5])])
def test_validation_by_epochs(tmp_path: Path, epochs: float, at: list[int]) -> None:
    """Of four steps each; and at the end."""
    train(replace(recipe(), steps=5), tmp_path, options=RunOptions(eval_epochs=epochs, workers=0, quiet=True))
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows if any(name.startswith("val/") for name in row)] == at


class Slow:
    """Scenes, each of which takes a second to read."""

    def __init__(self, clock: list[float]) -> None:
        self.inner, self.clock = open_source(f"scenes?n={SCENES}", 32), clock
        self.name = self.fingerprint = "slow"

    def __len__(self) -> int:
        return SCENES

    def record(self, row: int) -> Record:
        self.clock[0] += 1
        return self.inner.record(row)


def test_time_that_is_spent_waiting_for_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    with register_module_forward_pre_hook(lambda *_: clock.append(clock.pop() + (not torch.is_grad_enabled()))):
        options = RunOptions(log_every=1, eval_every=1, workers=0, quiet=True)  # validation takes time too
        train(replace(recipe(), steps=2), tmp_path, Slow(clock), options)
    for row in (row for row in read_metrics(tmp_path / "metrics.jsonl") if "loss" in row):
        assert [row[name] for name in ("data_wait", "pairs_per_s", "loader_pairs_per_s")] == pytest.approx([1, 1, 1])


def test_rows_say_where_the_run_stands(run: Path) -> None:
    """Warm-up over four steps, then half a cosine down to a quarter: the rate of the step just made."""
    rows = [row for row in read_metrics(run / "metrics.jsonl") if "loss" in row]
    factors = {2: 0.5, 4: 1.0, 6: 0.25 + 0.75 * 0.904508, 8: 0.25 + 0.75 * 0.345492, 9: 0.25 + 0.75 * 0.095492}
    for row in rows:
        assert row["lr"] == pytest.approx(LR * factors[row["step"]], rel=1e-5)
        assert (row["skipped"], row["skipped_steps"], "slowest_data_wait" in row) == (0, 0, False)
        assert 0 <= row["data_wait"] <= 1
        assert 0 <= row["save_s"] < 60
        assert 100 < row["memory"] < 100_000  # MB
        assert row["gradient_norm"] > 0
    assert [row["captions"] for row in rows] == [32, 32, 32, 32, 16]
    assert [row["epoch"] for row in rows] == [0.5, 1, 1.5, 2, 2.25]  # 72 rows are four batches and a remainder
    head = load_file(run / "model" / "model.safetensors")
    assert rows[-1]["scale"] == pytest.approx(float(head["head.log_scale"].exp()), rel=1e-6)
    assert rows[-1]["bias"] == pytest.approx(float(head["head.bias"]), rel=1e-6)
    config = json.loads((run / "model" / "config.json").read_text())
    assert (config["method"], config["steps"], config["size"]) == ("siglip", 9, "debug")
    assert config["data"] == f"scenes?n={SCENES}&captions=2"
