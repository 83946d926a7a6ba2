"""The conformity suite passes for what is right, and fails for what is wrong."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from cases import mostly_slow
from kiloword.cli.main import main
from kiloword.distributed import collectives
from kiloword.verify.batch import batch
from kiloword.verify.suite import _least, learner, over_ranks, verify

RIGHT = """
from dataclasses import replace
from kiloword.methods.registry import preset as built_in

def preset():
    return replace(built_in("siglip"), name="mine")
"""
HEADER = """
import torch
from dataclasses import replace
from kiloword.model.heads import Head, Single
from kiloword.losses.pairs import softmax_loss
from kiloword.methods.registry import preset as built_in
from kiloword.types import Total

def sigmoid(pairs, positives, weigh, count):
    def loss(block, rows, columns):
        y, z = positives(block), block.logits
        weight = weigh(rows, columns).to(z)
        value = torch.nn.functional.softplus(z) - y * z
        return (weight * value).sum(1), weight * (z.sigmoid() - y)

    total = pairs.total(loss)
    return Total(total, total.new_tensor(float(count)))

def height(part):
    return part.stop - part.start
"""
# What people get wrong, and the check that must notice.
WRONG = {
    "mean of block means": (
        """
def loss(pairs, positives):
    return sigmoid(pairs, positives, lambda r, c: torch.tensor(1.0 / height(r)), len(list(pairs.blocks())))

def preset():
    return replace(built_in("siglip"), pair_loss=loss)
""",
        "blocks of 3 x 3 pairs",
    ),
    "weights by place in the batch": (
        """
def loss(pairs, positives):
    weigh = lambda r, c: 1 + torch.arange(r.start, r.stop)[:, None] % 2
    return sigmoid(pairs, positives, weigh, pairs.shape[0])

def preset():
    return replace(built_in("siglip"), pair_loss=loss)
""",
        "samples in another order",
    ),
    "a bias that softmax cannot teach": (
        """
def preset():
    return replace(built_in("clip"), head=lambda config: Head(Single(config), bias=0.0))
""",
        "parameters without a gradient",
    ),
    "texts counted on every rank": (
        """
def loss(pairs, positives):
    return sigmoid(pairs, positives, lambda r, c: torch.ones(()), pairs.shape[1])

def preset():
    return replace(built_in("siglip"), pair_loss=loss)
""",
        "2 ranks, ddp, 1 micro-batch",
    ),
}


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A user's file on PYTHONPATH, which the processes of the ranks see too."""
    name = f"own_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(request.param)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return f"{name}:preset"


@pytest.mark.parametrize("name", mostly_slow(["clip", "siglip"], 1))
def test_presets_over_two_ranks(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["verify", name, "--ranks", "2"])
    said = capsys.readouterr().out
    assert said.count("ok  ") == len(said.splitlines()) == 21
    assert "2 ranks, fsdp, 4 micro-batches, whole checkpointing" in said


@pytest.mark.parametrize("module", [RIGHT], indirect=True, ids=["right"])
def test_a_user_s_own_method(module: str) -> None:
    assert all(check.passed for check in verify(module, ranks=(1,)))


@pytest.mark.parametrize(
    ("module", "notices"),
    [(HEADER + code, check) for code, check in WRONG.values()],
    indirect=["module"],
    ids=list(WRONG),
)
def test_a_wrong_method_is_noticed(module: str, notices: str) -> None:
    check = next(check for check in verify(module, ranks=(1, 2)) if check.name == notices)
    assert not check.passed


@pytest.mark.parametrize("module", [HEADER + WRONG["mean of block means"][0]], indirect=True, ids=["wrong"])
def test_the_command_names_what_failed(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["verify", module, "--ranks", "1"])
    assert end.value.code == 2
    said = capsys.readouterr()
    assert "FAIL  blocks of 3 x 3 pairs" in said.out
    assert "fails 2 of its checks: blocks of 3 x 3 pairs, blocks of 7 x 7 pairs." in said.err


def write_start(folder: Path) -> None:
    rank = collectives.rank()
    (folder / f"{os.environ['CALL']}-{rank}").write_text(f"{os.getppid()} {collectives.ranks()}")


def test_ranks_are_forks_of_one_server_and_know_what_the_caller_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modules are imported once for all ranks of all calls; the environment is the caller's at the time of the call."""
    for word in ("first", "second"):
        monkeypatch.setenv("CALL", word)
        over_ranks(2, write_start, tmp_path)
    texts = {path.name: path.read_text().split() for path in tmp_path.iterdir() if path.is_file()}
    assert set(texts) == {f"{word}-{rank}" for word in ("first", "second") for rank in (0, 1)}
    assert {text[1] for text in texts.values()} == {"2"}
    (server,) = {int(text[0]) for text in texts.values()}
    assert server != os.getpid()


CONTRAST = """
import torch
from dataclasses import replace
from kiloword.methods.registry import preset as built_in

class Contrast(torch.nn.Module):
    def count(self, batch):
        return torch.tensor(len(batch))

    def forward(self, model, batch, encoded):
        vec = encoded.images["vec"]
        return torch.logsumexp(vec @ vec.T, 1).sum()

def preset():
    return replace(built_in("siglip"), terms={"contrast": (1.0, lambda config: Contrast())})
"""


@pytest.mark.parametrize("module", [CONTRAST], indirect=True, ids=["contrast"])
def test_why_a_contrast_cannot_be_a_term(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kiloword.verify.suite._toy", lambda *_: 0.0)  # slow, and another question
    with pytest.raises(SystemExit) as end:
        main(["verify", module, "--ranks", "1"])
    assert end.value.code == 2
    said = capsys.readouterr()
    assert "FAIL  term contrast: sum over the parts of a batch" in said.out
    assert "fails 3 of its checks: term contrast" in said.err
    assert (
        "4 micro-batches. The value of the term contrast for a batch is not the sum of those for its parts" in said.err
    )
    assert "like a contrast of images with images" in said.err


def test_the_least_loss_of_several_positives_is_their_entropy() -> None:
    captions = [1 + row % 3 for row in range(16)]  # of each image, which share its probability equally
    assert _least(learner("clip"), batch()) == pytest.approx(sum(map(math.log, captions)) / 16 / 2, abs=1e-4)
    assert _least(learner("siglip"), batch()) == pytest.approx(0, abs=1e-3)
