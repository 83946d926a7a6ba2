"""The validation of a run: what it opens, whom it asks, what it writes; and its two rows before the first step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kiloword.config.recipes import DataConfig
from kiloword.distributed import collectives, sharing
from kiloword.training.validation import evaluate, sets
from kiloword.types import BadSample, Record


class Rows:
    name, fingerprint, natural = "rows", "r", True

    def __init__(self, count: int, bad: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        self.count, self.bad, self.read = count, bad, list[int]()

    def __len__(self) -> int:
        return self.count

    def key(self, row: int) -> str:
        return f"k{row}"

    def record(self, row: int) -> Record:
        self.read.append(row)
        if row in self.bad:
            raise BadSample("cut")
        captions = [] if row % 10 == 7 else [f"caption {row}"]
        return Record(key=self.key(row), image=np.zeros((40, 40, 3), np.uint8), captions=captions)


@pytest.mark.parametrize(
    ("count", "bad", "good"),
    [
        (5, set(), [0, 1]),
        (5, {0, 2}, [1, 3]),
        (8, {0, 1, 2, 3, 4, 6}, [5]),  # row 7 has no caption
        (320, set(), [0, 10]),
        (3, {0, 1, 2}, [0, 1, 2]),  # all bad: those that were tried
    ],
)
def test_rows_that_are_tried_before_a_run(count: int, bad: set[int], good: list[int]) -> None:
    source: Any = Rows(count, bad)
    found = sets._good_rows(source, "retrieval")
    assert list(found) == good


def test_no_more_rows_are_tried_than_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    source: Any = Rows(1000, set(range(1000)))
    found = sets._good_rows(source, "retrieval")
    assert len(found) == len(source.read) == sets.TRIED
    assert max(found) < 1000
    source = Rows(5)
    assert list(sets._good_rows(source, "vqa")) == list(range(5))  # none has a question


@pytest.mark.parametrize(
    ("step", "rows", "known"),
    [
        (4, [{"step": 4, "loss": 1.0}], False),
        (4, [{"step": 4, "loss": 1.0}, {"step": 4, "val/a": 0.5}], True),
        (6, [{"step": 4, "val/a": 0.5}, {"step": 6, "loss": 1.0}], False),
        (6, [], False),
    ],
)
def test_whether_the_last_step_was_validated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, rows: list[dict[str, Any]], known: bool
) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run: Any = SimpleNamespace(out=tmp_path, step=step)
    assert evaluate.validated(run) == known
    monkeypatch.setattr(collectives, "rank", lambda: 1)  # rank 0 alone reads
    assert not evaluate.validated(run)


@pytest.mark.parametrize("cuda", [False, True])
@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("answers", [False, True])
@pytest.mark.parametrize("sharded", [False, True])
def test_averaged_weights_are_judged_and_training_goes_on(
    monkeypatch: pytest.MonkeyPatch, cuda: bool, asks: bool, answers: bool, sharded: bool
) -> None:
    """By all ranks, in step where weights are sharded; on CUDA in the precision of the run, on a CPU in fp32."""
    events: list[str] = []
    source, train = Rows(3), Rows(4)
    if answers:
        source.answers = ("yes",)  # type: ignore[attr-defined]

    @contextmanager
    def in_place(learner: Any) -> Iterator[None]:
        events.append("averaged")
        yield
        events.append("live")

    def judge(matcher: Any, task: str, given: Any, **options: Any) -> dict[str, Any]:
        assert matcher == ("model", "tokenizer", learner.method)
        assert given is source
        assert options == ({"train": train} if asks and not answers else {})
        assert sharing.lockstep() == sharded
        assert sharing.share() == (1, 2)
        events.append(task)
        numbers = {"accuracy": 0.25, "text_retrieval_recall@1": 0.5, "image_retrieval_recall@1": 0.125}
        return {**numbers, "by_kind": [1, 2]}

    monkeypatch.setattr(collectives, "rank", lambda: 1)
    monkeypatch.setattr(collectives, "ranks", lambda: 2)
    monkeypatch.setattr(collectives, "sharded", lambda p: sharded and p == "second")
    monkeypatch.setattr("kiloword.api.Matcher", lambda *given: given)
    monkeypatch.setattr("kiloword.evaluation.evaluate", judge)
    monkeypatch.setattr(evaluate, "gathered", lambda mine: [mine])

    def precision_of(name: str, device: str) -> Any:
        events.append(f"{name} on {device}")
        return nullcontext

    monkeypatch.setattr(evaluate, "precision_of", precision_of)
    learner = SimpleNamespace(
        model="model",
        method=SimpleNamespace(needs=("questions",) if asks else ("teacher",)),
        eval=lambda: events.append("eval"),
        train=lambda: events.append("train"),
        parameters=lambda: ["first", "second"],
    )
    run: Any = SimpleNamespace(
        val=[sets.ValSet("rows", "vqa" if asks else "retrieval", source)],
        recipe=SimpleNamespace(precision="bf16", data=DataConfig()),
        device=torch.device("cuda" if cuda else "cpu"),
        learner=learner,
        tokenizer="tokenizer",
        average=SimpleNamespace(in_place=in_place),
        loader=SimpleNamespace(source=train),
        log=SimpleNamespace(say=events.append),
        step=7,
    )
    found = evaluate.validate(run)
    task, output = ("vqa", "accuracy 0.250") if asks else (
        "retrieval", "text_retrieval_recall@1 0.500, image_retrieval_recall@1 0.125 of 3 images (chance 0.33)"
    )  # fmt: skip
    computing = ["bf16 on cuda"] if cuda else []
    assert events == ["eval", *computing, "averaged", task, "live", "train", f"val at step 7: {output}"]
    assert found == {
        "val/accuracy": 0.25,
        "val/text_retrieval_recall@1": 0.5,
        "val/image_retrieval_recall@1": 0.125,
    }
    assert torch.is_grad_enabled()
