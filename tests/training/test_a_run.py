"""One run in full: which rows it logs, what is in them, when it saves and validates, and what is left at its end."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kiloword.config.recipes import OptimConfig, Recipe
from kiloword.data.open import open_source
from kiloword.methods.defaults import default_recipe
from kiloword.training import loop, saving
from kiloword.training.log import read_metrics
from kiloword.training.loop import RunOptions, train
from kiloword.training.meter import Guard, is_bad
from kiloword.training.optimizer import Optimizer
from kiloword.training.validation import sets
from kiloword.types import Source

LR, SCENES = 0.002, 72


def recipe(**optim: Any) -> Recipe:
    base = default_recipe("siglip", "debug", (f"scenes?n={SCENES}&captions=2",))
    data = replace(base.data, tokenizer_vocab=300, val=("scenes:val?n=12",))
    optim_config = replace(base.optim, lr=LR, warmup=4.0, final_lr=0.25, **optim)
    return replace(base, data=data, optim=optim_config, batch=16, steps=9, seed=3)


@pytest.fixture(scope="module")
def opened() -> list[str]:
    """Validation data that `run` opened."""
    return []


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, opened: list[str]) -> tuple[Path, list[int]]:
    """A run of nine steps, four an epoch, and the steps after which it saved."""
    out, saved = tmp_path_factory.mktemp("run"), list[int]()
    save = saving.Saver.save

    def noted(self: saving.Saver) -> None:
        saved.append(self.run.step)
        save(self)

    def noted_source(src: str, size: int | None = None) -> Source:
        opened.append(src)
        return open_source(src, size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving.Saver, "save", noted)
        patch.setattr(sets, "open_source", noted_source)
        train(recipe(), out, options=RunOptions(log_every=2, save_every=3, eval_every=4, keep_states=2, quiet=True))
    return out, saved


def test_validation_data_is_opened_once_a_run(run: tuple[Path, list[int]], opened: list[str]) -> None:
    rows = read_metrics(run[0] / "metrics.jsonl")
    assert sum("val/image_retrieval_recall@1" in row for row in rows) == 3
    assert opened == ["scenes:val?n=12"]


def test_rows_come_when_they_should(run: tuple[Path, list[int]]) -> None:
    out, saved = run
    rows = read_metrics(out / "metrics.jsonl")
    assert [row["step"] for row in rows if "loss" in row] == [2, 4, 6, 8, 9]
    assert [row["step"] for row in rows if any(name.startswith("val/") for name in row)] == [4, 8, 9]
    assert saved == [3, 4, 6, 8, 9]
    assert all(row["restarts"] == 0 for row in rows)
    states = sorted(path.name for path in (out / "state").glob("*.json"))
    assert len(states) == 2
    assert [int("".join(filter(str.isdigit, name))) for name in states] == [8, 9]


def test_rows_say_where_the_run_stands(run: tuple[Path, list[int]]) -> None:
    """Warm-up over four steps, then half a cosine down to a quarter: the rate of the step just made."""
    out, _ = run
    rows = [row for row in read_metrics(out / "metrics.jsonl") if "loss" in row]
    factors = {2: 0.5, 4: 1.0, 6: 0.25 + 0.75 * 0.904508, 8: 0.25 + 0.75 * 0.345492, 9: 0.25 + 0.75 * 0.095492}
    for row in rows:
        assert row["lr"] == pytest.approx(LR * factors[row["step"]], rel=1e-5)
        assert (row["skipped"], row["skipped_steps"]) == (0, 0)
        assert 0 <= row["data_wait"] <= 1
        assert 0 <= row["save_s"] < 60
        assert row["pairs_per_s"] > 0
        assert 100 < row["memory"] < 100_000  # MB
        assert row["gradient_norm"] > 0
    assert [row["captions"] for row in rows] == [32, 32, 32, 32, 16]
    head = load_file(out / "model" / "model.safetensors")
    assert rows[-1]["scale"] == pytest.approx(float(head["head.log_scale"].exp()), rel=1e-6)
    assert rows[-1]["bias"] == pytest.approx(float(head["head.bias"]), rel=1e-6)
    config = json.loads((out / "model" / "config.json").read_text())
    assert (config["method"], config["steps"], config["size"]) == ("siglip", 9, "debug")
    assert config["data"] == f"scenes?n={SCENES}&captions=2"


def test_a_finished_run_validates_no_more(run: tuple[Path, list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same recipe finds its run done, also where it writes 4 for 4.0."""
    out, _ = run
    before = (out / "metrics.jsonl").read_bytes()
    monkeypatch.setattr(loop, "validate", lambda run: pytest.fail("validated again"))
    same = replace(recipe(), optim=replace(recipe().optim, warmup=4))
    train(same, out, options=RunOptions(log_every=2, save_every=3, eval_every=4, keep_states=2, quiet=True))
    assert (out / "metrics.jsonl").read_bytes() == before


# What a step's numbers mean


def watched(most: int, output: list[str], usual: float = 0.0, device: str = "cpu") -> Any:
    return SimpleNamespace(
        run=SimpleNamespace(
            skipped_steps=0,
            skipped_in_a_row=0,
            log=SimpleNamespace(say=output.append),
            optimizer=SimpleNamespace(usual_norm=usual),
            device=torch.device(device),
            out=Path("nowhere"),
        ),
        most=most,
    )


def numbers(loss: float, norm: float, skipped: float) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(v) for name, v in (("loss", loss), ("gradient_norm", norm), ("skipped_step", skipped))}


def test_the_guard_counts_bad_steps_in_a_row() -> None:
    """Good steps between them start the count anew; the last one that is allowed ends the run."""
    output: list[str] = []
    made = watched(3, output, usual=2.0)
    guard = Guard(made.run, made.most)
    for step, skipped in enumerate((1.0, 1.0, 0.0, 1.0, 1.0), start=1):
        guard.add(step, numbers(0.5, 50.0, skipped))
    assert (made.run.skipped_steps, made.run.skipped_in_a_row) == (4, 2)
    assert output[0] == "step 1: gradient norm 50 is 25 times the usual: the step was skipped (1 so far)"
    assert [text.split(":")[0] for text in output] == ["step 1", "step 2", "step 4", "step 5"]
    with pytest.raises(ValueError, match=r"step 6: .*; bad steps in a row: 3\. The run stops before its first state"):
        guard.add(6, numbers(float("nan"), 1.0, 1.0))
    guard.look()  # nothing new: nothing is counted twice
    assert made.run.skipped_steps == 5


@pytest.mark.parametrize(
    ("loss", "norm", "usual", "why"),
    [
        (1.5, float("inf"), 2.0, "loss is 1.5 and gradient norm inf"),
        (float("nan"), 3.0, 2.0, "loss is nan"),
        (1.5, 30.0, 2.0, "gradient norm 30 is 15 times the usual"),
        (1.5, 30.0, 0.0, "gradient norm 30 explodes"),
    ],
)
def test_why_a_step_was_skipped(loss: float, norm: float, usual: float, why: str) -> None:
    output: list[str] = []
    made = watched(9, output, usual)
    Guard(made.run, made.most).add(1, numbers(loss, norm, 1.0))
    assert output == [f"step 1: {why}: the step was skipped (1 so far)"]


def test_elsewhere_than_on_the_cpu_steps_wait_for_no_look() -> None:
    output: list[str] = []
    made = watched(2, output, device="meta")
    guard = Guard(made.run, made.most)
    guard.add(1, numbers(0.5, 50.0, 1.0))
    assert output == []
    guard.look()
    assert len(output) == 1


def test_bad_numbers() -> None:
    assert not is_bad(numbers(1.0, 1.0, 0.0))
    assert is_bad(numbers(1.0, 1.0, 1.0))
    assert is_bad(numbers(float("inf"), 1.0, 0.0))
    assert is_bad({"loss": torch.tensor(float("nan"))})
    assert not is_bad({"loss": torch.tensor(1.0)})


def test_what_is_left_of_a_run_that_diverged(tmp_path: Path, run: tuple[Path, list[int]]) -> None:
    before = saving.what_is_left(tmp_path)
    assert before == " before its first state. Start again in another --out with a smaller --optim.lr"
    after = saving.what_is_left(run[0])
    assert f"{run[0] / 'state'} keeps the last state, which is finite" in after
    assert f"from {run[0] / 'model'} by --init" in after


# Groups of parameters


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_what_each_group_of_parameters_is_moved_by(name: Any) -> None:
    """Learning rate and decay of every kind of parameter, at the first step of a warm-up over two."""
    model = torch.nn.ModuleDict(
        {
            tower: torch.nn.ModuleDict({"blocks": torch.nn.Linear(4, 4), "out": torch.nn.Linear(4, 2)})
            for tower in ("image_tower", "text_tower")
        }
    )
    config = OptimConfig(
        name=name, lr=0.5, text_lr=0.1, weight_decay=0.25, muon_lr=0.02, muon_weight_decay=0.125, warmup=2, beta1=0.5,
        beta2=0.75, eps=1e-3,
    )  # fmt: skip
    optimizer = Optimizer(model, config, 10)
    model["text_tower"]["out"](model["image_tower"]["blocks"](torch.ones(1, 4))).sum().backward()
    optimizer.step(0)
    moved = {}
    for part in optimizer.parts:
        for group in part.param_groups:
            for p in group["params"]:
                moved[optimizer.names[p]] = (round(group["lr"], 6), group["weight_decay"])
    hidden = (0.01, 0.125) if name == "muon" else (0.25, 0.25)
    assert moved == {
        "image_tower.blocks.weight": hidden,
        "image_tower.blocks.bias": (0.25, 0.0),
        "image_tower.out.weight": (0.25, 0.25),
        "image_tower.out.bias": (0.25, 0.0),
        "text_tower.blocks.weight": (round(hidden[0] * 0.1, 6), hidden[1]),
        "text_tower.blocks.bias": (0.025, 0.0),
        "text_tower.out.weight": (0.025, 0.25),
        "text_tower.out.bias": (0.025, 0.0),
    }
    adam = optimizer.parts[0].param_groups[0]
    assert (adam["betas"], adam["eps"]) == ((0.5, 0.75), 1e-3)
    assert all(p.grad is None for p in model.parameters())
