"""Tokens as classes, against the published code of SuperClass (arXiv:2411.03313), and what is counted over a run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kiloword.training.step import backward
from kiloword.types import Batch, Texts
from kiloword.verify import suite
from kiloword.verify.batch import batch
from parts import agree, learner

NAME = "clip+superclass"
IDS = [[1, 7, 9, 7, 2], [1, 7, 2], [1, 30, 2], [1, 2], [1, 9, 30, 31, 32, 2], [1, 31, 2]]
OF = [0, 0, 1, 1, 2, 3]


def some() -> Batch:
    """Four images, six captions: with a repeated word, and without words."""
    return replace(batch(0, 4, method=NAME), texts=Texts.pack(IDS), image_of_text=torch.tensor(OF))


def published(logits: Tensor, ids: list[list[int]], seen: Tensor, batches: float) -> Tensor:
    """What loss.py of x-cls/superclass computes in one process, with caption i of row i of logits [T, V]; counts."""
    targets = torch.zeros_like(logits)
    for row, tokens in enumerate(ids):
        targets[row, [t for t in tokens if t < logits.shape[1]]] = 1.0
    seen += targets.sum(0) / len(targets)
    targets = targets * ((batches + 1 / len(targets)) / (seen + 1 / len(targets))).log()
    return -(F.log_softmax(logits, 1) * F.normalize(targets, p=1, dim=1)).sum(1).mean()


def logits_of(made: Any, data: Batch) -> Tensor:
    term, pool = made.terms["superclass"], made.model.head.get_submodule("pooling.image_pool")
    logits: Tensor = term.classes(term.norm(pool(made.encode(data).image_tokens)))
    return logits


def loss_of(made: Any, data: Batch) -> Tensor:
    term = made.terms["superclass"]
    found: Tensor = term(made.model, data, made.encode(data)) / term.count(data)
    return found


def test_the_loss_is_that_of_the_published_code() -> None:
    made, data = learner(NAME), some()
    seen = torch.zeros(made.terms["superclass"].classes.out_features, dtype=torch.float64)
    weights = [made.terms["superclass"].classes.weight, made.model.get_parameter("image_tower.positions")]
    for batches in (1.0, 2.0):
        loss_of(made, data)
        made.after_step(1)  # the published code counts the captions of the step before it weighs them
        theirs = published(logits_of(made, data)[torch.tensor(OF)], IDS, seen, batches)
        with torch.enable_grad():
            agree(loss_of(made, data), theirs, weights)
        made.terms["superclass"].seen_now.zero_()


def test_before_the_first_step_words_weigh_alike_and_equal_ones_always() -> None:
    equal = learner(NAME, {"superclass": {"tokens": "equal"}})
    backward(equal, [some()])
    equal.after_step(1)
    for made in (learner(NAME), equal):
        log_p = logits_of(made, some()).log_softmax(1)
        words = [sorted(set(ids[1:-1])) for ids in IDS]
        expected = -torch.stack([log_p[i, w].mean() for i, w in zip(OF, words, strict=True) if w]).sum() / len(IDS)
        torch.testing.assert_close(loss_of(made, some()), expected, rtol=1e-10, atol=0)


@pytest.mark.parametrize("parts", [1, 4])
def test_captions_are_counted_once_however_the_batch_is_split(parts: int) -> None:
    made, data = learner(NAME), batch(method=NAME)
    backward(made, data.split(parts))
    with torch.no_grad():
        loss_of(made, data)  # a validation
    made.after_step(1)
    counted = made.terms["superclass"].seen
    of = data.texts.ids.split(data.texts.starts.diff().tolist())
    expected = torch.stack([torch.bincount(ids, minlength=len(counted)) > 0 for ids in of]).sum(0)
    assert counted[-1] == len(data.texts)
    assert torch.equal(counted[6:-1], expected[6 : len(counted) - 1])  # behind the special tokens


def test_stored_tokens_of_captions_leave_the_labels() -> None:
    made = suite.learner(NAME, trunks="cached")
    data = batch(method=NAME, trunks="cached")
    above = made.above_trunks(data)
    assert above.texts.tokens is not None
    assert loss_of(made, replace(data, images=above.images)) == loss_of(made, above)
