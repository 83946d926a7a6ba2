"""The conformity suite passes for what is right, and fails for what is wrong."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from cases import mostly_slow
from kiloword.cli.main import main
from kiloword.verify.suite import EXACT, Check, compare, verify

MODULE = """
import torch
from dataclasses import replace
from kiloword.methods.method import Part, Term
from kiloword.model.heads import Single
from kiloword.losses.pairs import softmax_loss
from kiloword.methods.registry import preset as built_in
from kiloword.types import Input, Total

def sigmoid(pairs, positives, weigh, count, sign=1):
    def loss(block, rows, columns):
        y, z = positives(block), block.logits
        weight = weigh(rows, columns).to(z)
        value = torch.nn.functional.softplus(z) - y * z - 1  # a loss may be negative
        return (weight * value).sum(1), sign * weight * (z.sigmoid() - y)

    total = pairs.total(loss)
    return Total(total, count)

def height(part):
    return part.stop - part.start

def ones(rows, columns):
    return torch.ones(())

class Own(Term):
    def __init__(self, config):
        super().__init__()

    def count(self, batch):
        return torch.tensor(len(batch))

    def forward(self, model, batch, encoded):
        return self.of(encoded.images["vec"])

class Unlike(Own):
    def of(self, vec):
        return torch.logsumexp(vec @ vec.T, 1).sum()

class Negative(Own):
    def of(self, vec):
        return -(vec + 1).square().sum()

class Half(Own):
    def of(self, vec):
        return (vec - 1).square().sum() * (-100 if torch.is_autocast_enabled("cpu") else 100)

class Forgetful(Single):
    def _load_from_state_dict(self, state, prefix, *more):
        state.update({name: x - 0.5 for name, x in state.items()})
        super()._load_from_state_dict(state, prefix, *more)

def drawn(example, fetch, draw):
    return torch.randint(256, (3, 32, 32), dtype=torch.uint8)
"""
TERM, INPUT = "terms={'own': (1.0, Part(%s))}", "inputs={'view': Input(%s, lambda config: (3, 32, 32))}"


def own(slots: str = "pair_loss=loss", loss: str = "ones, pairs.shape[0]") -> str:
    """A user's module whose preset is siglip with these slots; its loss has this weight, count and sign."""
    return f"""{MODULE}
def loss(pairs, positives):
    return sigmoid(pairs, positives, {loss})

def preset():
    return replace(built_in("siglip"), name="mine", {slots})
"""


# What people get wrong, by the check that must notice.
WRONG = {
    "blocks of 3 x 3 pairs": own(loss="lambda r, c: torch.tensor(1.0 / height(r)), len(list(pairs.blocks()))"),
    "samples in another order": own(loss="lambda r, c: 1 + torch.arange(r.start, r.stop)[:, None] % 2, pairs.shape[0]"),
    "2 ranks, fsdp, 4 micro-batches, whole checkpointing": own(loss="ones, pairs.shape[1]"),  # texts of every rank
    "the same step again": own(loss="lambda r, c: torch.rand(()), pairs.shape[0]"),
    "slope of the loss along its gradient": own(loss="ones, pairs.shape[0], 2"),
    "pair alone: loss left after 40 steps": own(loss="ones, pairs.shape[0], -1"),
    "parameters without a gradient": own("pair_loss=softmax_loss"),  # which teaches no bias
    "term own: sum over the parts of a batch": own(TERM % "Unlike"),
    "own alone: loss left after 40 steps": own(TERM % "Negative"),
    "bf16 against fp32: 1 - cosine of gradients": own(TERM % "Half"),
    "score after save and load": own("pooling=Part(Forgetful)"),
    "bytes of a batch that are made otherwise on other ranks or workers": own(INPUT % "drawn"),
}


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A user's file on PYTHONPATH, which the processes of the ranks see too."""
    name = f"own_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(request.param)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return f"{name}:preset"


@pytest.mark.parametrize(
    ("name", "ranks", "count"), mostly_slow([("siglip", 1, 13), ("siglip", 2, 21), ("clip", 2, 21)], 0)
)
def test_presets_pass(name: str, ranks: int, count: int, capsys: pytest.CaptureFixture[str]) -> None:
    main(["verify", name, "--ranks", str(ranks)])
    said = "".join(capsys.readouterr())
    assert ("one process" in said) == (ranks == 1)
    assert (said.count("ok  "), said.count("FAIL")) == (count, 0)
    assert ("2 ranks, fsdp, 4 micro-batches, whole checkpointing" in said) == (ranks == 2)


@pytest.mark.parametrize(
    ("module", "notices"),
    [(own(), ""), *((code, check) for check, code in WRONG.items())],
    indirect=["module"],
    ids=["right", *WRONG],
)
def test_a_wrong_method_is_noticed_and_a_right_one_passes(module: str, notices: str) -> None:
    failed = [check.name for check in verify(module, (1, 2) if "ranks, " in notices else (1,)) if not check.passed]
    assert notices in failed if notices else not failed


@pytest.mark.parametrize("module", [WRONG["blocks of 3 x 3 pairs"]], indirect=True, ids=["wrong"])
def test_the_command_names_what_failed(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    for ranks in ("3", "8", "0", "1"):
        with pytest.raises(SystemExit) as end:
            main(["verify", module, "--ranks", ranks])
        assert end.value.code == 2
    said = capsys.readouterr()
    assert said.out.count("FAIL  blocks of 3 x 3 pairs") == 1
    assert "blocks of 3 x 3 pairs, blocks of 7 x 7 pairs" in said.err


REFERENCE = {"a": torch.tensor([1.0, -4.0], dtype=torch.float64), "b": torch.zeros(2), "loss:loss": torch.tensor(-8.0)}


@pytest.mark.parametrize(
    ("changes", "value"),
    [
        ({}, 0.0),
        ({"a": torch.tensor([1.0, -4.0 + 0.5])}, 0.125),  # of the largest gradient
        ({"b": torch.tensor([0.0, -0.5])}, 0.125),
        ({"loss:loss": torch.tensor(-6.0)}, 0.25),  # of itself
        ({"b": torch.tensor([0.0, math.nan])}, math.nan),
        ({"c": torch.zeros(1)}, math.inf),
    ],
)
def test_differences_are_relative(changes: dict[str, torch.Tensor], value: float) -> None:
    found = compare("x", REFERENCE | changes, REFERENCE)
    assert found.limit == EXACT
    assert found.value == pytest.approx(value, nan_ok=True)
    assert found.passed == (value == 0)
    assert not compare("x", {"a": REFERENCE["a"]}, REFERENCE).passed  # where a parameter lost its gradient


def test_a_state_that_differs_is_named_and_nan_never_passes() -> None:
    state = {"state:terms.own.centre": torch.ones(2, dtype=torch.float64)}
    found = compare("2 ranks", REFERENCE | {name: 2 * x for name, x in state.items()}, REFERENCE | state)
    assert found.where == "largest in state:terms.own.centre"
    assert [Check("x", value, 0.25).passed for value in (0.25, 0.2500001, math.nan)] == [True, False, False]
