"""Class data with captions that name nodes of a tree of the classes: `tree:SRC`."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kiloword import evaluation
from kiloword.api import load
from kiloword.data.open import open_source
from kiloword.data.tree import read_tree
from kiloword.methods.defaults import default_recipe
from kiloword.training.loop import RunOptions, train
from tars import photo, write_tar
from trees import ANIMAL, CAR, CAT, DOG, NODES, THING, TREE, write_photos


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_photos(tmp_path_factory.mktemp("data") / "photos")


def test_captions_name_the_class_or_a_node_above_it(photos: Path) -> None:
    source = open_source(f"tree:{photos}?captions=8")
    seen = [set(source.captions(row)) for row in range(len(source))]  # type: ignore[attr-defined]
    assert set.union(*seen[:12]) == {THING, ANIMAL, DOG}
    assert set.union(*seen[12:24]) == {THING, ANIMAL, CAT}
    assert set.union(*seen[24:]) == {THING, CAR}
    assert source.record(0).captions == source.captions(0)  # type: ignore[attr-defined]
    assert source.hierarchies(30) == [[THING, CAR]]  # type: ignore[attr-defined]


def test_levels_are_drawn_by_their_weights_and_by_key(photos: Path) -> None:
    def named(query: str) -> list[str]:
        source = open_source(f"tree:{photos}?{query}")
        return [source.record(row).captions[0] for row in range(24)]

    assert set(named("levels=1")) == {ANIMAL}
    share = np.mean([caption == ANIMAL for caption in named("levels=1:3,2:1")])
    assert 0.5 < share < 0.95  # of 24 draws at 3/4
    assert named("levels=1:3,2:1") != named("levels=1:3,2:1&seed=1")
    first, again = (open_source(f"tree:{photos}?captions=2") for _ in range(2))
    again = pickle.loads(pickle.dumps(again))  # as a loader worker gets it
    assert [first.record(row).captions for row in range(9)] == [again.record(row).captions for row in range(9)]
    assert first.fingerprint == again.fingerprint != open_source(f"tree:{photos}").fingerprint


def test_truth_is_that_of_the_tree(photos: Path) -> None:
    source: Any = open_source(f"tree:{photos}")
    truth = source.relevance([THING, ANIMAL, DOG, CAR], [0, 12, 24])
    assert truth.tolist() == [[1, 1, 1], [1, 1, 0], [1, 0, 0], [0, 0, 1]]
    with pytest.raises(ValueError, match=r"'this is a doc' names no node of the tree\. Did you mean"):
        source.relevance(["this is a doc"], [0])


def test_a_model_trains_on_it_and_is_judged_by_the_truth(photos: Path, tmp_path: Path) -> None:
    src = f"tree:{photos}?captions=2"
    base = default_recipe("siglip+exact+many", "debug", (src,))
    recipe = replace(base, batch=8, steps=3, data=replace(base.data, tokenizer_vocab=300))
    model = load(train(recipe, tmp_path / "run", options=RunOptions(quiet=True)))
    assert evaluation.evaluate(model, "retrieval", src)["image_retrieval_true_map"] > 0.3
    assert "precision" in " ".join(evaluation.evaluate(model, "hierarchy", src))


def test_a_part_has_the_classes_of_its_rows(tmp_path: Path) -> None:
    members = {}
    for n in range(80):
        members |= {f"{n:03d}.png": photo(n), f"{n:03d}.cls": str(n % 3).encode()}
    write_tar(tmp_path / "photos" / "0.tar", members)
    (tmp_path / "photos" / "tree.json").write_text(json.dumps(TREE))
    for src in (f"tree:val-part:{tmp_path / 'photos'}?levels=2", f"val-part:tree:{tmp_path / 'photos'}?levels=2"):
        source: Any = open_source(src)
        rows = range(len(source))
        named = [(DOG, CAT, CAR)[int(source.key(row)) % 3] for row in rows]
        assert [source.captions(row) for row in rows] == [[caption] for caption in named]
        assert np.diagonal(source.relevance(named, rows)).all()


def test_the_tree_of_tiny_imagenet_has_its_levels(shared: Path) -> None:
    path = shared / "tiny_imagenet" / "tree.json"
    tree, stored = read_tree(path), json.loads(path.read_text())
    ids = list(stored["nodes"])
    named = [[ids[tree.node(label, level)] for label in range(200)] for level in range(7)]
    assert named == stored["levels"]
    assert tree.below.sum(1).tolist() == [node["classes"] for node in stored["nodes"].values()]


FORMS: list[tuple[str, dict[str, Any], str]] = [
    ("levels=0:0", {}, "levels=0:0"),
    ("levels=7", {}, "the tree has levels 0"),
    ("level=1", {}, r"no option 'level'.*Did you mean"),
    ("captions=0", {}, "1 to 100"),
    ("tree=missing.json", {}, r"no missing\.json"),
    ("", {"nodes": {**NODES, "0": {"name": "thing", "parent": "2"}}}, "'2' is its own ancestor"),
    ("", {"classes": ["2", "9", "4"]}, "'9'"),
    ("", {"classes": ["2", "3"]}, "2 classes, but the data names 3"),
    ("", {"classes": []}, "no classes"),
    ("", {"classes": [None, "3", "4"]}, "classes"),
    ("", {"nodes": {"0": "thing"}}, "no tree"),
    ("", {"nodes": {**NODES, "0": {"name": 3, "parent": None}}}, "name"),
    ("", {"templates": {"2": "a photo"}}, "'a photo'"),
    ("", {"templates": {"2": 5}}, "templates"),
]


@pytest.mark.parametrize(("query", "change", "word"), FORMS)
def test_what_is_refused(photos: Path, tmp_path: Path, query: str, change: dict[str, Any], word: str) -> None:
    (tmp_path / "tree.json").write_text(json.dumps(TREE | change))
    with pytest.raises(ValueError, match=word):
        open_source(f"tree:{photos}?{query or f'tree={tmp_path}/tree.json'}")
