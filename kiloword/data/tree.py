"""`tree:SRC`: class data whose captions name nodes of a tree of classes, such as WordNet's, with their exact truth.

A caption that names a node is true of an image if the class of the image is the node or lies below it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kiloword.data.edits import Selection, digest
from kiloword.data.query import Readers, levels_of, read_options, within
from kiloword.errors import article, suggestion
from kiloword.randomness import generator
from kiloword.terminal import shown
from kiloword.types import BadSample, Source

FILE = "tree.json"
FORM = "tree:SRC?levels=0:1,3:2&captions=2"
PLAIN = "a photo of {}"


@dataclass(frozen=True)
class ClassTree:
    """Nodes and what lies below them.

    Attributes: captions: one of each node; paths: of each class, the nodes from the root to its own; below [N, C] bool:
    which classes each node covers; nodes_of: the nodes of a caption.
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
        """Which captions [T] are true of labels [I], -1: none. Raises: ValueError where a caption names no node."""
        unknown = [caption for caption in captions if caption not in self.nodes_of]
        if unknown:
            hint = suggestion(unknown[0], self.nodes_of)
            raise ValueError(f"the caption {shown(unknown[0][:100])!r} names no node of the tree.{hint}")
        rows = np.array([self.below[self.nodes_of[caption]].any(0) for caption in captions])
        return rows[:, labels] & (labels >= 0)


@dataclass(frozen=True)
class _Node:
    name: str
    parent: str | None
    phrase: str | None = None


@dataclass(frozen=True)
class _File:
    nodes: dict[str, _Node]
    classes: list[str]
    templates: dict[str, str] | None = None


def read_tree(path: Path) -> ClassTree:
    """A tree from json, see docs/data.md. Raises: ValueError for a file of another form."""
    from pydantic import TypeAdapter

    try:
        raw = path.read_bytes()
        return _tree(TypeAdapter(_File).validate_json(raw), digest(raw.decode()))
    except (OSError, ValueError, KeyError) as error:
        reason = f"no node {error}" if isinstance(error, KeyError) else " ".join(str(error).split())
        raise ValueError(f"{path} is no tree of classes ({shown(reason[:200])}), see docs/data.md.") from None


def _tree(stored: _File, digest: str) -> ClassTree:
    place, captions, paths = {name: n for n, name in enumerate(stored.nodes)}, list[str](), list[list[int]]()
    for node in stored.nodes.values():
        phrase = node.phrase or article(node.name)
        template = (stored.templates or {}).get(str(len(phrase.split())), PLAIN)
        if template.count("{}") != 1:
            raise ValueError(f"the template {template!r} has not one place {{}} for the phrase.")
        captions.append(template.replace("{}", phrase))
    below = np.zeros((len(captions), len(stored.classes)), dtype=bool)
    for label, name in enumerate(stored.classes):
        path = list[int]()
        at: str | None = name
        while at is not None:
            if place[at] in path:
                raise ValueError(f"the node {name!r} is its own ancestor.")
            path.append(place[at])
            at = stored.nodes[at].parent
        below[path, label] = True
        paths.append(path[::-1])
    if not paths:
        raise ValueError("it has no classes.")
    tree = ClassTree(captions, paths, below, digest)
    for number, caption in enumerate(captions):
        tree.nodes_of.setdefault(caption, []).append(number)
    return tree


class TreeSource(Selection):
    """Class data with captions that name the class of an image or a node above it, drawn by the key of the image.

    `relevance` is exact; `hierarchies` are the captions from the root to the class. An image without one class of the
    tree is a bad row. Images, class names and templates are those of the data.

    Args: levels: depths of the named nodes and their weights; (): all depths alike; captions: drawn for an image, equal
    ones count once; seed: of the nodes that are drawn. Raises: ValueError where the tree is of other classes.
    """

    def __init__(
        self,
        source: Source,
        tree: ClassTree,
        name: str,
        levels: tuple[tuple[int, float], ...] = (),
        captions: int = 1,
        seed: int = 0,
    ) -> None:
        names, labels = getattr(source, "classnames", None) or tree.paths, getattr(source, "labels", None)
        if labels is None or len(names) != len(tree.paths):
            raise ValueError(
                f"{name}: the tree has {len(tree.paths)} classes, but the data names "
                f"{'none' if labels is None else len(names)}."
            )
        levels = levels or tuple((level, 1.0) for level in range(tree.depth + 1))
        if (most := max(level for level, _ in levels)) > tree.depth:
            raise ValueError(f"{name}: levels={most}: the tree has levels 0 (its root) to {tree.depth}.")
        self.tree, self.drawn, self.seed = tree, captions, seed
        self.class_of: NDArray[np.int64] = np.where((labels >= 0) & (labels < len(tree.paths)), labels, -1)
        """[N] class of each row; -1 where it has none, several, or one outside the tree."""
        self._levels = [level for level, _ in levels]
        self._shares = np.cumsum([weight for _, weight in levels]) / sum(weight for _, weight in levels)
        fingerprint = digest(f"tree {source.fingerprint} {tree.digest} {levels} {captions} {seed}")
        super().__init__(source, name, fingerprint, edit=self._named)

    def relevance(self, captions: Sequence[str], rows: Sequence[int]) -> NDArray[np.bool_]:
        """Which captions are true of which rows' images, bool [T, I]; ValueError for captions that name no node."""
        return self.tree.truth(captions, self.class_of[np.asarray(rows, np.int64)])

    def hierarchies(self, row: int) -> list[list[str]]:
        """One chain of captions of a row, from the root to its class. Raises BadSample."""
        return [[self.tree.captions[node] for node in self.tree.paths[self._class(row)]]]

    def _class(self, row: int) -> int:
        if (label := int(self.class_of[row])) < 0:
            raise BadSample("no class of the tree")
        return label

    def _named(self, row: int, _: list[str]) -> list[str]:
        """Different captions."""
        label, drawn = self._class(row), generator("tree", self.seed, self.key(row)).random(self.drawn)
        levels = [self._levels[n] for n in np.searchsorted(self._shares, drawn, side="right").tolist()]
        nodes = [self.tree.node(label, level) for level in reversed(levels)]
        return list(dict.fromkeys(self.tree.captions[node] for node in nodes))[::-1]


def tree_source(source: Source, folder: Path, query: str, name: str) -> TreeSource:
    """Class data with the tree that its options name, or that lies in its folder or beside it.

    Raises: ValueError for wrong options, and where there is no tree, or it does not fit.
    """
    options = read_options(name, query, _READERS)
    given = Path(options.pop("tree", "")).expanduser()
    places = [given] if given.name else [folder / FILE, folder.absolute().parent / FILE]
    file = next((path for path in places if path.is_file()), None)
    if file is None:
        raise ValueError(f"{name}: no {' or '.join(map(str, places))}. Expected a tree of the classes: docs/data.md.")
    return TreeSource(source, read_tree(file), name, **options)


_READERS: Readers = {
    "captions": (within(range(1, 101)), "captions of an image, 1 to 100"),
    "levels": (lambda value: tuple(levels_of(value).items()), f"as in {FORM}"),
    "seed": (int, "a whole number"),
    "tree": (str, "a file"),
}
