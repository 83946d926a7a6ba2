"""Tokens as classes, against the published code of SuperClass (arXiv:2411.03313), and what is counted over a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kiloword.methods.defaults import default_recipe
from kiloword.methods.superclass import ClassTerm, count_step
from kiloword.training.accumulate import backward
from kiloword.training.learner import Learner
from kiloword.types import Batch, Texts
from kiloword.verify.batch import MethodChoice, batch
from kiloword.verify.suite import learner, verify
from states import whole_and_cut

IDS = [[1, 7, 9, 7, 2], [1, 7, 2], [1, 30, 2], [1, 2], [1, 9, 30, 31, 32, 2], [1, 31, 2]]
OF = [0, 0, 1, 1, 2, 3]


def some() -> Batch:
    """Four images, six captions: with a repeated word, and without words."""
    made = batch(0, 4, method="clip+superclass")
    return replace(made, texts=Texts.pack(IDS), image_of_text=torch.tensor(OF))


def published(logits: Tensor, ids: list[list[int]], seen: Tensor, batches: float) -> Tensor:
    """What loss.py of x-cls/superclass computes in one process, with caption i of row i of logits [T, V]; counts."""
    targets = torch.zeros_like(logits)
    for row, tokens in enumerate(ids):
        targets[row, [t for t in tokens if t < logits.shape[1]]] = 1.0
    seen += targets.sum(0) / len(targets)
    targets = targets * ((batches + 1 / len(targets)) / (seen + 1 / len(targets))).log()
    return -(F.log_softmax(logits, 1) * F.normalize(targets, p=1, dim=1)).sum(1).mean()


def term_of(made: Learner) -> ClassTerm:
    term = made.terms["superclass"]
    assert isinstance(term, ClassTerm)
    return term


def logits_of(made: Learner, term: ClassTerm, data: Batch) -> Tensor:
    tokens = made.encode(data).image_tokens
    pool = made.model.head.get_submodule("pooling.image_pool")
    logits: Tensor = term.classes(term.norm(pool(tokens)))
    return logits


def test_the_loss_is_that_of_the_published_code() -> None:
    made, data = learner("clip+superclass"), some()
    term = term_of(made)
    seen = torch.zeros(len(term.seen), dtype=torch.float64)
    for batches in (1.0, 2.0):
        term(made.model, data, made.encode(data))
        count_step(made, 1)  # the published code counts the captions of the step before it weighs them
        logits = logits_of(made, term, data)
        theirs = published(logits[torch.tensor(OF)], IDS, seen, batches)
        with torch.enable_grad():
            ours = term(made.model, data, made.encode(data)) / term.count(data)
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=0)
        weights = [term.classes.weight, made.model.get_parameter("image_tower.positions")]
        for a, b in zip(*(torch.autograd.grad(loss, weights) for loss in (ours, theirs)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
        term.seen_now.zero_()
        term.captions_now.zero_()


def test_before_the_first_step_words_weigh_alike() -> None:
    made, data = learner("clip+superclass"), some()
    term = term_of(made)
    log_p = logits_of(made, term, data).log_softmax(1)
    words = [sorted(set(ids[1:-1])) for ids in IDS]
    expected = -torch.stack([log_p[i, w].mean() for i, w in zip(OF, words, strict=True) if w]).sum()
    torch.testing.assert_close(term(made.model, data, made.encode(data)), expected, rtol=1e-10, atol=0)


def test_equal_tokens_stay_equal() -> None:
    made = learner(MethodChoice("clip+superclass", {"superclass": {"tokens": "equal"}}))
    backward(made, [some()])
    count_step(made, 1)
    assert (term_of(made).weights(torch.float64) == 1).all()


def test_captions_are_counted_once_however_the_batch_is_split() -> None:
    counted = []
    for parts in (1, 4):
        made, data = learner("clip+superclass"), batch(method="clip+superclass")
        backward(made, data.split(parts))
        with torch.no_grad():  # a validation
            term_of(made)(made.model, data, made.encode(data))
        count_step(made, 1)
        counted.append((term_of(made).seen, term_of(made).captions))
    assert torch.equal(counted[0][0], counted[1][0])
    assert counted[0][1] == counted[1][1] == len(data.texts)


def test_a_cut_run_ends_as_a_whole_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = default_recipe("clip+superclass", "debug", ("scenes?n=64",))
    run = replace(base, batch=8, micro=4, steps=4, data=replace(base.data, tokenizer_vocab=300))
    whole, cut = whole_and_cut(run, tmp_path, monkeypatch)
    assert whole["learner/terms.superclass.captions"] == 32
    assert whole["learner/terms.superclass.seen"].max() > 4
    assert whole.keys() == cut.keys()
    assert all(torch.equal(whole[name], cut[name]) for name in whole)


def test_stored_tokens_of_captions_leave_the_labels() -> None:
    made = learner("clip+superclass", trunks="cached")
    data = batch(method="clip+superclass", trunks="cached")
    above = made.above_trunks(data)
    assert above.texts.tokens is not None
    term = term_of(made)
    values = [term(made.model, one, made.encode(above)) for one in (data, above)]
    assert torch.equal(*values)
    assert term.captions_now == 2 * len(data.texts)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["llip+superclass", "prolip+superclass", "siglip+compose+superclass"])
def test_it_is_verified(method: str) -> None:
    assert not [check for check in verify(method, (1, 2)) if not check.passed]
