"""The oracle of mined positives: as precise and as complete as it says; pairs that it makes the loss ignore."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from class_data import write_photos
from kiloword.data.open import open_source
from kiloword.data.tree import ClassTree, TreeSource
from kiloword.losses.pairs import Blocks
from kiloword.methods.registry import preset
from kiloword.model.heads import Head, Pooling, Scale, unit
from kiloword.model.model import initialise
from research.mined import IGNORED, Oracle


@pytest.fixture
def photos(tmp_path: Path) -> TreeSource:
    source = open_source(f"tree:{write_photos(tmp_path / 'data' / 'photos')}?levels=2")
    assert isinstance(source, TreeSource)
    return source


def test_an_exact_oracle_tells_the_truth(photos: TreeSource) -> None:
    captions, rows = photos.tree.captions, range(len(photos))
    oracle = Oracle(photos, precision=1.0, recall=1.0)
    np.testing.assert_array_equal(oracle.relevance(captions, rows), photos.relevance(captions, rows))
    assert oracle.record(3).captions == photos.record(3).captions


def test_an_oracle_knows_a_share_of_the_photos(photos: TreeSource) -> None:
    captions, rows = photos.tree.captions, range(len(photos))
    oracle = Oracle(photos, precision=1.0, recall=0.5)
    opinion = oracle.relevance(captions, rows)
    np.testing.assert_array_equal(opinion[:, oracle.known], photos.relevance(captions, rows)[:, oracle.known])
    assert not opinion[:, ~oracle.known].any()
    assert 0.2 < oracle.known.mean() < 0.8


@pytest.mark.parametrize("precision", [0.8, 0.5])
def test_an_oracle_takes_neighbours_for_one_class(precision: float) -> None:
    below = np.eye(201, 200, k=-1, dtype=bool)  # node 0 is the root
    below[0] = True
    names = [f"class {c}" for c in range(200)]
    paths, nodes_of = [[0, 1 + c] for c in range(200)], {name: [1 + c] for c, name in enumerate(names)}
    tree = ClassTree(["thing", *names], paths, below, "", nodes_of)
    source = SimpleNamespace(tree=tree, fingerprint="", class_of=np.arange(200))
    opinion = Oracle(source, precision, 1.0).relevance(names, range(200))  # type: ignore[arg-type]
    assert opinion.diagonal().all()
    assert opinion.diagonal().sum() / opinion.sum() == pytest.approx(precision, abs=0.01)
    assert not (opinion & (abs(np.subtract.outer(range(200), range(200))) > 1)).any()


def test_ignored_pairs_do_not_count() -> None:
    """Against the mean over images of all pairs but those that are true and not annotated, fp64."""
    generator = torch.Generator().manual_seed(0)
    rows, columns = ({"vec": unit(torch.randn(n, 4, generator=generator).double())} for n in (3, 5))
    rows["position"], columns["position"] = torch.arange(3), torch.tensor([0, 0, 1, 2, 2])
    true = torch.tensor([[1, 1, 1, 0, 0], [1, 0, 1, 0, 0], [0, 0, 0, 1, 1]], dtype=torch.bool)
    columns["text_features.truth"] = true.T
    rows["mineable"], columns["mineable"] = torch.ones(3, dtype=torch.bool), torch.ones(5, dtype=torch.bool)
    rows["vec"].requires_grad_()
    head = Head(Pooling(), scale=Scale(10.0, -3.0)).double()
    initialise(head, 0)
    method = preset(IGNORED)
    total = method.pair_loss(Blocks(head, rows, columns, chunk=2), method.positives)
    logits = head.logits(rows["vec"] @ columns["vec"].T)
    annotated = rows["position"][:, None] == columns["position"]
    expected = torch.stack(
        [
            F.softplus(-logits[i, t] if annotated[i, t] else logits[i, t])
            for i in range(3)
            for t in range(5)
            if annotated[i, t] or not true[i, t]
        ]
    ).sum()
    assert total.sum.item() == pytest.approx(expected.item(), abs=1e-12)
    (fast,) = torch.autograd.grad(total.sum, rows["vec"], retain_graph=True)
    (slow,) = torch.autograd.grad(expected, rows["vec"])
    torch.testing.assert_close(fast, slow, rtol=0, atol=1e-12)
