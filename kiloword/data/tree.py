"""`tree:SRC`: class data whose captions name nodes of a tree of classes, such as WordNet's, with their exact truth.

A caption that names a node is true of an image if the class of the image is the node or lies below it. So photos with
class labels become image-text data of which every match is known, at any level of generality.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kiloword.data.edits import Selection, digest
from kiloword.data.query import Readers, read_options
from kiloword.errors import article, suggestion
from kiloword.randomness import generator
from kiloword.terminal import shown
from kiloword.types import BadSample, NoCaption, Record, Source

FILE = "tree.json"
FORM = "tree:SRC?levels=0:1,3:2&captions=2"
PLAIN = "a photo of {}"


@dataclass(frozen=True)
class TreeOptions:
    """What follows the question mark. `levels`: depths of the named nodes and their weights; (): all depths alike."""

    levels: tuple[tuple[int, float], ...] = ()
    captions: int = 1  # drawn for an image; equal ones count once
    seed: int = 0  # of the nodes that are drawn
    tree: str = ""  # the file; "": tree.json in the folder of the data, or beside it


@dataclass(frozen=True)
class ClassTree:
    """Nodes and what lies below them.

    Attributes: captions: one of each node; paths: of each class, the nodes
    from the root to its own; below [N, C] bool: which classes each node covers; nodes_of: the nodes of a caption.
    """

    captions: list[str]
    paths: list[list[int]]
    below: NDArray[np.bool_]
    digest: str
    nodes_of: dict[str, list[int]] = field(default_factory=dict)

    @property
    def depth(self) -> int:
        """Of the deepest class; the root has depth 0."""
        return max(map(len, self.paths)) - 1

    def node(self, label: int, level: int) -> int:
        """The node of a class at a level: the class itself where it lies higher."""
        path = self.paths[label]
        return path[min(level, len(path) - 1)]

    def truth(self, captions: Sequence[str], labels: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which captions [T] are true of which labels [I], -1: of nothing. Raises: ValueError for another caption."""
        unknown = [caption for caption in captions if caption not in self.nodes_of]
        if unknown:
            hint = suggestion(unknown[0], self.nodes_of)
            raise ValueError(f"the caption {shown(unknown[0][:100])!r} names no node of the tree.{hint}")
        rows = np.array([self.below[self.nodes_of[caption]].any(0) for caption in captions])
        return rows[:, labels] & (labels >= 0)


def read_tree(path: Path) -> ClassTree:
    """A tree from json: `nodes`, {id: {"name", "parent": id or null, "phrase"}}, and `classes`, the node of each class.

    `phrase` is the name with its article, "a" or "an" by default. `templates`, {number of words of a phrase: template
    with {}}, lets captions of all nodes have one length; "a photo of {}" otherwise.
    Raises: ValueError for a file of another form.
    """
    try:
        raw = path.read_bytes()
        stored = json.loads(raw)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as a tree of classes: {error}") from None
    try:
        return _parsed(stored, hashlib.blake2b(raw, digest_size=16).hexdigest())
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is no tree of classes ({type(error).__name__}: {shown(str(error)[:60])}). Expected nodes, "
            '{id: {"name": ..., "parent": id or null}}, and classes, [id, ...].'
        ) from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _parsed(stored: Any, digest: str) -> ClassTree:
    nodes, classes = dict(stored["nodes"]), list(stored["classes"])
    phrases = [_phrase(name, node) for name, node in nodes.items()]
    place = {name: n for n, name in enumerate(nodes)}
    if not classes or None in classes:
        raise ValueError("a class is null: expected the id of its node." if classes else "the tree has no classes.")
    paths = [[place[node] for node in _path(nodes, name)] for name in classes]
    below = np.zeros((len(nodes), len(classes)), dtype=bool)
    for label, path in enumerate(paths):
        below[path, label] = True
    templates = dict(stored.get("templates") or {})
    for template in templates.values():
        if not isinstance(template, str) or template.count("{}") != 1:
            raise ValueError(f"the template {shown(str(template)[:60])!r} has not one place {{}} for the phrase.")
    captions = [templates.get(str(len(phrase.split())), PLAIN).replace("{}", phrase) for phrase in phrases]
    tree = ClassTree(captions, paths, below, digest)
    for node, caption in enumerate(captions):
        tree.nodes_of.setdefault(caption, []).append(node)
    return tree


def _phrase(name: str, node: dict[str, Any]) -> str:
    """The name of a node with its article. Raises: ValueError where it is no text."""
    phrase = node.get("phrase") or node["name"]
    if not isinstance(phrase, str) or not phrase.strip() or not phrase.isprintable():
        raise ValueError(f"the node {shown(name[:60])!r} has the name {shown(str(phrase)[:60])!r}: expected words.")
    return phrase if node.get("phrase") else article(phrase)


def _path(nodes: dict[str, Any], name: str) -> list[str]:
    """From the root to a node. Raises: ValueError for a parent that is missing, and for a cycle."""
    path = list[str]()
    at: str | None = name
    while at is not None:
        if at not in nodes:
            raise ValueError(f"the node {shown(str(at)[:60])!r} is a parent or a class, but not among the nodes.")
        if len(path) > len(nodes):
            raise ValueError(f"the node {shown(name[:60])!r} is its own ancestor.")
        path.append(at)
        at = nodes[at]["parent"]
    return path[::-1]


class TreeSource(Selection):
    """Class data with captions that name the class of an image or a node above it, drawn by the key of the image.

    `relevance` is exact; `hierarchies` are the captions from the root to the class. An image without one class of the
    tree is a bad row. Images, class names and templates are those of the data.
    """

    def __init__(self, source: Source, tree: ClassTree, options: TreeOptions, name: str) -> None:
        self.tree, self.options = tree, options
        names = getattr(source, "classnames", None) or tree.paths
        if len(names) != len(tree.paths):
            raise ValueError(f"{name}: the tree has {len(tree.paths)} classes, but the data names {len(names)}.")
        levels = options.levels or tuple((level, 1.0) for level in range(tree.depth + 1))
        if (most := max(level for level, _ in levels)) > tree.depth:
            raise ValueError(f"{name}: levels={most}: the tree has levels 0 (its root) to {tree.depth}.")
        self._levels = [level for level, _ in levels]
        self._shares = np.cumsum([weight for _, weight in levels]) / sum(weight for _, weight in levels)
        choice = f"{levels} {options.captions} {options.seed}"
        super().__init__(source, name, digest(f"tree {source.fingerprint} {tree.digest} {choice}"))

    @property
    def contents(self) -> frozenset[str]:
        """The origin of images and captions; see `kiloword.data.edits.contents`."""
        return frozenset({f"{self.source.fingerprint} images", f"{self.fingerprint} captions"})

    def captions(self, row: int) -> list[str]:
        """Captions of a row, without reading its image after the first call. Raises BadSample."""
        return self._captions(self.key(row), self._label(row))[0]

    def record(self, row: int) -> Record:
        """The stored image and label with captions of the tree. Raises BadSample with the reason."""
        try:
            record = self.source.record(row)
        except NoCaption as error:
            record = error.record
        captions, levels = self._captions(record.key, self._checked(record.label))
        return replace(record, captions=captions, info={**record.info, "levels": levels})

    def relevance(self, captions: Sequence[str], rows: Sequence[int]) -> NDArray[np.bool_]:
        """Which captions are true of which rows' images, bool [T, I]; ValueError for captions that name no node."""
        return self.tree.truth(captions, self.class_of[np.asarray(rows, np.int64)])

    def hierarchies(self, row: int) -> list[list[str]]:
        """One chain of captions of a row, from the root to its class. Raises BadSample."""
        return [[self.tree.captions[node] for node in self.tree.paths[self._label(row)]]]

    @cached_property
    def class_of(self) -> NDArray[np.int64]:
        """[N] class of each row; -1 where it has none, several, or one outside the tree. Read once."""
        stored = getattr(self.source, "labels", None)
        labels = np.array([self._read(row) for row in range(len(self))]) if stored is None else np.asarray(stored)
        return np.where((labels >= 0) & (labels < len(self.tree.paths)), labels, -1).astype(np.int64)

    def _read(self, row: int) -> int:
        try:
            label = self.source.record(row).label
        except NoCaption as error:
            label = error.record.label
        except BadSample:
            return -1
        return label if isinstance(label, int) else -1

    def _label(self, row: int) -> int:
        return self._checked(int(self.class_of[row]))

    def _checked(self, label: Any) -> int:
        if not isinstance(label, int) or not 0 <= label < len(self.tree.paths):
            raise BadSample("no class of the tree")
        return label

    def _captions(self, key: str, label: int) -> tuple[list[str], list[int]]:
        """Different captions and their levels; the first ones do not depend on how many are drawn."""
        drawn = generator("tree", self.options.seed, key).random(self.options.captions)
        levels = [self._levels[n] for n in np.searchsorted(self._shares, drawn, side="right").tolist()]
        level_of = {self.tree.captions[self.tree.node(label, level)]: level for level in reversed(levels)}
        captions = list(reversed(level_of))
        return captions, [level_of[caption] for caption in captions]


def tree_source(source: Source, folder: Path, options: TreeOptions, name: str) -> TreeSource:
    """Class data with the tree that its options name, or that lies in its folder or beside it.

    Raises: ValueError where there is no tree, or it does not fit.
    """
    places = [Path(options.tree).expanduser()] if options.tree else [folder / FILE, folder.absolute().parent / FILE]
    file = next((path for path in places if path.is_file()), None)
    if file is None:
        raise ValueError(f"{name}: no {' or '.join(map(str, places))}. Expected a tree of the classes: docs/data.md.")
    return TreeSource(source, read_tree(file), options, name)


def tree_options(name: str, query: str) -> TreeOptions:
    """Options of `tree:SRC?...`. Raises: ValueError naming what is allowed."""
    return TreeOptions(**read_options(name, query, _READERS))


def _levels(value: str) -> tuple[tuple[int, float], ...]:
    """ "0:1,3:2" or "0,3" """
    parts = [re.fullmatch(r"(\d{1,3})(?::(\d+\.?\d*))?", item) for item in value.split(",")]
    levels = tuple((int(part[1]), float(part[2] or 1)) for part in parts if part)
    if len(levels) < len(parts) or not all(weight > 0 for _, weight in levels):
        raise ValueError(value)
    return levels


def _count(value: str) -> int:
    if not 1 <= int(value) <= 100:
        raise ValueError(value)
    return int(value)


_READERS: Readers = {
    "captions": (_count, "captions of an image, 1 to 100"),
    "levels": (_levels, f"as in {FORM}"),
    "seed": (int, "a whole number"),
    "tree": (str, "a file"),
}
