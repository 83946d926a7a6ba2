"""Class names and templates, shipped and from files; class data whose captions name nodes of a tree: tree:SRC."""

from __future__ import annotations

import hashlib
import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from class_data import ANIMAL, CAR, CAT, DOG, NODES, THING, TREE, wnids, write_photos
from commands import refused, run
from kiloword.data.classes.names import (
    classname_sets,
    classnames,
    names_of_wnids,
    read_classnames,
    read_templates,
    template_sets,
    templates,
)
from kiloword.data.open import open_source
from kiloword.data.tree import read_tree
from sources import records
from tars import photo, write_tar


def test_imagenet_is_in_the_order_of_its_wnids() -> None:
    ids = wnids()
    assert ids == sorted(ids)
    assert names_of_wnids(["n12998815", "n01440764"]) == ["agaric", "tench"]
    assert names_of_wnids(["n01440764", "n00000000"]) is None
    for name in ("imagenet-a", "imagenet-r"):
        assert classnames(name) == names_of_wnids(wnids(name))
    assert wnids("imagenet-a")[:2] == ["n01498041", "n01531178"]
    assert wnids("imagenet-r")[:2] == ["n01443537", "n01484850"]


def test_files_of_users(tmp_path: Path) -> None:
    text, listed, by_set, by_class = (tmp_path / name for name in ("a.txt", "a.json", "b.json", "c.json"))
    text.write_text("a photo of a {}.\n{c}\n")
    listed.write_text('["cat", "dog"]')
    by_set.write_text('{"pets": ["a {c}."], "cars": ["my {}."]}')
    by_class.write_text('{"cat": ["it purrs", "a cat"], "dog": ["{c} barks"]}')
    assert read_templates(str(text)) == ["a photo of a {c}.", "{c}"]
    assert read_classnames(str(listed)) == ["cat", "dog"]
    assert read_templates(f"{by_set}?set=cars") == ["my {c}."]
    assert read_templates(str(by_class)) == {"cat": ["it purrs", "a cat"], "dog": ["{c} barks"]}
    by_class.write_text('{"cat": ["it purrs"], "dog": ["it barks"]}')
    assert read_templates(str(by_class)) == {"cat": ["it purrs"], "dog": ["it barks"]}
    assert read_templates("a {} here") == ["a {c} here"]
    assert read_templates("pets") == templates("pets")
    assert read_classnames("imagenet-r") == classnames("imagenet-r")
    by_set.write_text('{"pets": ["cat", "dog"]}')
    assert read_classnames(str(by_set)) == ["cat", "dog"]
    by_set.write_text('{"imagenet1k": {"tench": ["a fish"]}}')
    assert read_templates(str(by_set)) == {"tench": ["a fish"]}


@pytest.mark.parametrize(
    ("read", "named", "word"),
    [
        (read_templates, "a photo", "{c} or {}"),
        (read_templates, "plain.txt", "'a photo'"),
        (read_templates, "sets.json", "(pets, cars)"),
        (read_templates, "sets.json?set=pet", "Did you mean pets?"),
        (read_templates, "sets.json?st=pet", "no option 'st'"),
        (read_templates, "number.json", "a list of templates"),
        (read_templates, "broken.json", "JSON"),
        (read_templates, "latin.txt", "is not UTF-8"),
        (read_templates, ".", "no such file"),
        (read_classnames, "gap.txt", "line 2 is empty"),
        (read_classnames, "sets.json", "(pets, cars)"),
        (read_classnames, "cifar-10", "Did you mean cifar10"),
    ],
)
def test_files_and_names_that_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[str], object], named: str, word: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("gap.txt").write_text("cat\n\ndog\n")
    Path("plain.txt").write_text("a {c}\na photo\n")
    Path("sets.json").write_text('{"pets": ["a {c}"], "cars": ["{}"]}')
    Path("number.json").write_text("3")
    Path("broken.json").write_text("[" * 100_000)
    Path("latin.txt").write_bytes(b"{c} caf\xe9\n")
    with pytest.raises(ValueError, match=re.escape(word)):
        read(named)


def test_the_command_line_lists_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert re.search(r"imagenet1k +1000 +80", run(capsys, "data", "names")[1])
    assert "1 lymph node containing" in run(capsys, "data", "names", "pcam")[1]
    assert run(capsys, "data", "names", "imagenet7")[1].startswith("templates:"), "it has no classes"
    assert "Did you mean pcam?" in refused(capsys, "data", "names", "pcan")


def test_lists_are_as_their_sources_publish_them() -> None:
    """Digests of all lists, computed from the files of openai/CLIP, CLIP_benchmark and wise-ft."""
    lists = {name: classnames(name) for name in classname_sets()} | {
        f"templates {name}": templates(name) for name in template_sets()
    }
    digest = hashlib.blake2b(json.dumps(lists, sort_keys=True).encode(), digest_size=8).hexdigest()
    assert digest == "a77f3d2d285b48a9"


# Captions that name nodes of a tree


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
        return [record.captions[0] for record in records(open_source(f"tree:{photos}?{query}"))[:24]]

    assert set(named("levels=1")) == {ANIMAL}
    share = np.mean([caption == ANIMAL for caption in named("levels=1:3,2:1")])
    assert 0.5 < share < 0.95  # of 24 draws at 3/4
    assert named("levels=1:3,2:1") != named("levels=1:3,2:1&seed=1")
    first, again = (open_source(f"tree:{photos}?captions=2") for _ in range(2))
    again = pickle.loads(pickle.dumps(again))  # as a loader worker gets it
    assert records(first) == records(again)
    assert first.fingerprint == again.fingerprint != open_source(f"tree:{photos}").fingerprint


def test_truth_is_that_of_the_tree(photos: Path) -> None:
    source: Any = open_source(f"tree:{photos}")
    truth = source.relevance([THING, ANIMAL, DOG, CAR], [0, 12, 24])
    assert truth.tolist() == [[1, 1, 1], [1, 1, 0], [1, 0, 0], [0, 0, 1]]
    with pytest.raises(ValueError, match=r"'this is a doc' names no node of the tree\. Did you mean"):
        source.relevance(["this is a doc"], [0])


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
    ("levels=-1,2", {}, "levels=-1,2"),
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
