"""Measures the package against the limits of a well-kept code base; prints each figure with its worst offenders.

    python tools/house.py [--all] [--json]    exit code 1 if an offender is not named in EXCEPTIONS

root files, folder files   files in the package's own folder (at most 8, py.typed not counted); .py files of the fullest
                           folder below it (at most 20, subfolders not counted). __init__.py counts in both.
import cycles              groups of modules that import each other, directly or through others. Imports in functions
                           and import_module("literal") count; imports under `if TYPE_CHECKING`, names in a table of
                           strings and the __init__ of a module's own parents do not.
room cycles                the same for top-level folders and modules at the root, and how many imports those have that
                           import each other. Information.
function lines             of each def, methods and nested ones too: from `def` to the last line, without the docstring,
                           with blank lines and comments; a nested function counts in the outer one again
missing docstrings         of public classes, and of public functions and methods above 3 statements. Public: no part of
                           path, class and name starts with an underscore; not inside a function. Omitted: `forward`
                           of a documented class, methods that a base class of the package documents. Types: mypy.
class names defined twice  names of top-level classes in two modules or more
modules with one importer  modules of at most 60 lines that one other module of the package imports (for types alone
                           counts), except ONE_IMPORTER_ALLOWED
file, package lines        of .py files, blank lines counted; __init__.py and __main__.py may be below 60 lines
room lines                 of .py files by folder, down to data/sources, and of the largest room: code (imports and
                           comments too), docstrings, blank lines between. Information; all rooms with --all.
old words                  words that the project replaced, in names, comments and strings of the package and in pages
                           at the root and in docs; `variable X`: variables, parameters, attributes where bound
commits to reword, %       of the last 50: subject above 72 characters, or no body. Information.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatch
from pathlib import Path

ROOT, PACKAGE = Path(__file__).resolve().parents[1], "kiloword"
# Measure -> offender as the table names it -> the reason why it may stay.
EXCEPTIONS: dict[str, dict[str, str]] = {
    "class names defined twice": {"Settings": "one a method's module, where the registry looks for it by this name"},
    "files below 60 lines": {
        **{
            f"kiloword/methods/{name}.py": "one method a file"
            for name in (
                "clip",
                "clip_c",
                "siglip",
                "coca/cappa",
                "coca/coca",
                "coca/sycoca",
                "coca/vqa",
                "llip/preset",
            )
        },
        "kiloword/cli/verify.py": "one verb a file",
        "kiloword/mining/options.py": "imports no torch: help is instant",
        "kiloword/distributed/allocator.py": "imports no torch: called before help",
        "kiloword/terminal/screen.py": "imports rich, which only tables need",
        "kiloword/errors.py": "below all rooms",
        "kiloword/data/sources/digest.py": "in a file that it would fit, modules would import each other",
    },
    "package lines": {
        "kiloword": "a goal that is not reached: about 40% of the lines are docstrings, imports and blank lines; "
        "docs/log.md says what was tried"
    },
    "old words": {
        **{
            f"picture in kiloword/{path}.py": "a word of the captions of scenes"
            for path in (
                "data/scenes/grammar",
                "data/scenes/questions",
                "data/scenes/world",
                "quickstart/judge",
                "quickstart/page",
            )
        },
        "picture in kiloword/mining/calibrate.py": "the purpose of a draw",
        "picture in README.md": "a proverb",
        "variable own in kiloword/model/decoder.py": "a parameter's name, by which its initial values are drawn",
    },
}
# Small modules that only a registry imports (verbs, methods, tasks, data sources). Paths below the package.
ONE_IMPORTER_ALLOWED = ("cli/*", "methods/*", "evaluation/*/task.py", "data/sources/*")
OLD_WORDS = {name: name for name in ("so many", "but in its rounding", "no number", "what is kept", "the truth")} | {
    "picture": "pictures?", "side table": "side tables?", "meeting": "meetings?", "signs of life": "signs? of life",
    "leave out": r"(?:leav(?:e|es|ing)|left)(?: \w+){0,3} (?:away|out)", "doubt": r"doubt\w*", "blame": r"blam\w+",
}  # fmt: skip
OLD_VARIABLES = {"found", "given", "own", "some", "said", "told", "piece", "pieces"}
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Offender:
    name: str  # the key of an exception
    figure: int
    detail: str = ""


@dataclass(frozen=True)
class Measure:
    name: str
    limit: int | None  # None: for information
    value: int | None  # None: could not be measured
    offenders: list[Offender] = field(default_factory=list)
    parts: dict[str, int] = field(default_factory=dict)  # summands of the value

    @property
    def broken(self) -> bool:
        """Whether a limit is exceeded by an offender that is no exception."""
        return self.limit is not None and any(o.name not in EXCEPTIONS.get(self.name, {}) for o in self.offenders)


class File:
    """A parsed file of the package: path ("data/loader.py"), module ("kiloword.data.loader"), text, tree, lines."""

    def __init__(self, folder: Path, path: Path) -> None:
        self.path, self.text = path.relative_to(folder).as_posix(), path.read_text(encoding="utf-8")
        self.tree, self.lines = ast.parse(self.text, str(path)), len(self.text.splitlines())
        self.module = f"{PACKAGE}.{self.path}".removesuffix(".py").replace("/", ".").removesuffix(".__init__")

    def lines_by_kind(self) -> Counter[str]:
        """Number of lines of code (imports and comments too), docstrings and blank lines outside them."""
        kinds = ["code" if line.strip() else "blank" for line in self.text.splitlines()]
        for node in ast.walk(self.tree):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                kinds[node.lineno - 1 : node.end_lineno] = ["docstrings"] * len(
                    kinds[node.lineno - 1 : node.end_lineno]
                )
        return Counter(kinds)

    def imports(self, modules: set[str]) -> Iterator[tuple[str, bool]]:
        """Modules of the package that this one imports, each with whether for types alone."""
        parents = self.module.split(".")[: None if self.path.endswith("__init__.py") else -1]
        for node, types_only in nodes_below([self.tree]):
            names: list[str] = []
            if isinstance(node, ast.ImportFrom):
                start = parents[: len(parents) - node.level + 1] if node.level else []
                base = ".".join([*start, *filter(None, [node.module])])
                names = [full if (full := f"{base}.{alias.name}") in modules else base for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.Call) and last_name(node.func) == "import_module":
                names = [str(arg.value) for arg in node.args[:1] if isinstance(arg, ast.Constant)]
            yield from ((name, types_only) for name in names if name in modules and name != self.module)


def nodes_below(nodes: Iterable[ast.AST], types_only: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """All nodes at any depth, each with whether it stands under `if TYPE_CHECKING`."""
    for node in nodes:
        checked = node.body if isinstance(node, ast.If) and last_name(node.test) == "TYPE_CHECKING" else []
        yield from nodes_below(checked, True)
        yield node, types_only
        yield from nodes_below((child for child in ast.iter_child_nodes(node) if child not in checked), types_only)


def last_name(node: ast.AST) -> str:
    """`c` of `a.b.c`."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def definitions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function | ast.ClassDef]]:
    """Every class and function with its qualified name as Python writes it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.ClassDef):
            yield prefix + child.name, child
            inner = "." if isinstance(child, ast.ClassDef) else ".<locals>."
            yield from definitions(child, prefix + child.name + inner)
        else:
            yield from definitions(child, prefix)


def largest(figures: Mapping[str, int], above: int = 0, details: Mapping[str, str] | None = None) -> list[Offender]:
    """Those whose figure is above a limit, largest first."""
    listed = [Offender(name, n, (details or {}).get(name, "")) for name, n in figures.items() if n > above]
    return sorted(listed, key=lambda one: (-one.figure, one.name))


def number_of(name: str, offenders: list[Offender]) -> Measure:
    return Measure(name, 0, len(offenders), offenders)


def measure_files(folder: Path, files: list[File]) -> Iterator[Measure]:
    root_files = sum(path.is_file() and path.name[0] != "." and path.name != "py.typed" for path in folder.iterdir())
    yield Measure("root files", 8, root_files, largest({PACKAGE: root_files}, 8))
    folders = Counter(f"{PACKAGE}/{file.path.rpartition('/')[0]}" for file in files if "/" in file.path)
    yield Measure("folder files", 20, max(folders.values(), default=0), largest(folders, 20))
    lines = {f"{PACKAGE}/{file.path}": file.lines for file in files}
    below = {path: n for path, n in lines.items() if n < 60 and not path.endswith("__.py")}
    yield number_of("files below 60 lines", largest(below, -1)[::-1])
    yield number_of("files above 400 lines", largest(lines, 400))
    total = sum(lines.values())
    yield Measure("package lines", 33_000, total, largest({PACKAGE: total}, 33_000))
    yield measure_rooms(files)


def measure_rooms(files: list[File]) -> Measure:
    rooms: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for file in files:
        rooms["/".join([PACKAGE, *file.path.split("/")[:-1][:2]])].update(file.lines_by_kind())
    details = {
        room: ", ".join(f"{kinds[kind]} {kind}" for kind in ("code", "docstrings", "blank"))
        for room, kinds in rooms.items()
    }
    listed = largest({room: kinds.total() for room, kinds in rooms.items()}, -1, details)
    return Measure("room lines", None, max((one.figure for one in listed), default=0), listed)


def measure_imports(files: list[File]) -> Iterator[Measure]:
    modules = {file.module for file in files}
    edges = {(file.module, *target) for file in files for target in file.imports(modules)}
    graph, rooms, importers, crossing = defaultdict(set), defaultdict(set), defaultdict(set), Counter[str]()
    for importer, target, types_only in edges:
        importers[target].add(importer)
        a, b = (name.split(".")[:2][-1] for name in (importer, target))
        if not types_only:
            graph[importer].add(target)
            rooms[a].update({b} - {a})
            crossing.update({f"{a} -> {b}"} if a != b else ())
    yield number_of("import cycles", cycles(graph))
    mutual = largest({way: n for way, n in crossing.items() if " -> ".join(way.split(" -> ")[::-1]) in crossing})
    yield Measure("room cycles", None, len(cycles(rooms)), cycles(rooms) + mutual)
    single = {
        f"{PACKAGE}/{file.path}": (file.lines, f"lines; imported by {min(importers[file.module])}")
        for file in files
        if len(importers[file.module]) == 1 and file.lines <= 60 and not file.path.endswith("__.py")
        if not any(fnmatch(file.path, kind) for kind in ONE_IMPORTER_ALLOWED)
    }
    yield number_of("modules with one importer", [Offender(name, *single[name]) for name in sorted(single)])


def cycles(graph: dict[str, set[str]]) -> list[Offender]:
    """Groups of nodes that reach each other, largest first, each with a shortest cycle."""
    paths = {node: shortest_paths(graph, node) for node in graph}
    groups = {frozenset(b for b in paths[a] if a in paths.get(b, ())) for a in graph if a in paths[a]}
    shortest = {", ".join(sorted(group)): min((paths[a][a] for a in sorted(group)), key=len) for group in groups}
    details = {name: "modules; shortest: " + " -> ".join(path) for name, path in shortest.items()}
    return largest({name: name.count(",") + 1 for name in shortest}, 0, details)


def shortest_paths(graph: dict[str, set[str]], start: str) -> dict[str, list[str]]:
    """The shortest path to every node that start reaches; to itself only where there is a cycle."""
    paths: dict[str, list[str]] = {}
    waiting = [[start]]
    for path in waiting:
        for node in sorted(graph.get(path[-1], set()) - set(paths)):
            paths[node] = [*path, node]
            waiting.append(paths[node])
    return paths


def measure_definitions(files: list[File]) -> Iterator[Measure]:
    lengths, longest, missing, places = [], Counter[str](), {}, defaultdict(list)
    classes = {one.name: one for file in files for one in file.tree.body if isinstance(one, ast.ClassDef)}
    for file in files:
        for node in {one.name: one for one in file.tree.body if isinstance(one, ast.ClassDef)}:
            places[node].append(file.module)
        for name, one in definitions(file.tree):
            key = f"{PACKAGE}/{file.path}:{name}"
            if isinstance(one, Function):
                lengths.append(length(one))
                longest[key] = max(longest[key], lengths[-1])
            size = sum(isinstance(part, ast.stmt) for part in ast.walk(one)) - 1
            documented = ast.get_docstring(one) is not None or (isinstance(one, Function) and size <= 3)
            documented |= inherits_docstring(classes, *name.split(".")[-2:]) if "." in name else False
            parts = [*file.path.removesuffix("__init__.py").split("/"), *name.split(".")]
            if not documented and not any(part.startswith(("_", "<")) for part in parts):
                missing[key] = size
    ordered = sorted(lengths) or [0]
    for label, share, limit in (("median", 0.5, 10), ("p90", 0.9, 20)):
        value = ordered[math.ceil(share * len(ordered)) - 1]
        yield Measure(f"function lines, {label}", limit, value, largest({PACKAGE: value}, limit))
    yield Measure("function lines, longest", 60, ordered[-1], largest(longest, 60))
    yield number_of("missing docstrings", largest(missing, -1, dict.fromkeys(missing, "statements")))
    details = {name: ", ".join(modules) for name, modules in places.items()}
    yield number_of("class names defined twice", largest({n: len(m) for n, m in places.items()}, 1, details))


def inherits_docstring(classes: Mapping[str, ast.ClassDef], owner: str, method: str) -> bool:
    """Whether a method is documented by a base class, or is the `forward` of a documented module."""
    if owner not in classes:
        return False
    if method == "forward" and ast.get_docstring(classes[owner]):
        return True
    bases = [ast.unparse(base).split("[")[0].split(".")[-1] for base in classes[owner].bases]
    own = [part for base in bases if base in classes for part in classes[base].body if isinstance(part, Function)]
    return any(part.name == method and ast.get_docstring(part) for part in own) or any(
        inherits_docstring(classes, base, method) for base in bases if base != owner
    )


def length(node: Function) -> int:
    first, documented = node.body[0], ast.get_docstring(node) is not None
    return (node.end_lineno or 0) - node.lineno + 1 - documented * ((first.end_lineno or 0) - first.lineno + 1)


def measure_words(root: Path, files: list[File]) -> Iterator[Measure]:
    pages = [*root.glob("*.md"), *root.glob("docs/**/*.md")]
    texts = {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in pages}
    figures: Counter[tuple[str, str]] = Counter()
    for path, text in (texts | {f"{PACKAGE}/{file.path}": file.text for file in files}).items():
        plain = plain_words(text)
        for word, pattern in OLD_WORDS.items():
            figures[word, path] = len(re.findall(rf"\b(?:{pattern})\b", plain))
    figures.update(old_variables(files))
    totals = sum((Counter({word: n}) for (word, _), n in figures.items()), Counter[str]())
    offenders = largest({f"{word} in {path}": n for (word, path), n in figures.items()})
    yield Measure("old words", 0, totals.total(), offenders, dict(totals.most_common()))


def plain_words(text: str) -> str:
    """Lower-case text with one space between words, also of those in names, comment lines and joined literals."""
    text = re.sub(r'\\[nrt]|"\s*[rRfF]*"', " ", text)
    return re.sub(r"[\s#_*`]+", " ", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", text)).lower()


def old_variables(files: list[File]) -> Iterator[tuple[str, str]]:
    for file in files:
        for node in ast.walk(file.tree):
            stored = isinstance(getattr(node, "ctx", None), ast.Store)
            name = node.arg if isinstance(node, ast.arg) else last_name(node) if stored else ""
            if name in OLD_VARIABLES:
                yield f"variable {name}", f"{PACKAGE}/{file.path}"


def measure_commits(root: Path) -> Measure:
    name, command = "commits to reword, %", ["git", "-C", str(root), "log", "-50", "--format=%h%x1f%s%x1f%b%x1e"]
    try:
        log = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return Measure(name, None, None)
    rows = [row.strip("\n").split("\x1f") for row in log.split("\x1e") if row.strip()]
    bad = {commit: len(subject) for commit, subject, body in rows if len(subject) > 72 or not body}
    details = {commit: "characters" + ", no body" * (not body) for commit, _, body in rows}
    return Measure(name, None, round(100 * len(bad) / max(len(rows), 1)), largest(bad, -1, details))


def measure(root: Path) -> list[Measure]:
    """All measures of the repository at root."""
    files = [File(root / PACKAGE, path) for path in sorted((root / PACKAGE).rglob("*.py"))]
    measures = [*measure_files(root / PACKAGE, files), *measure_imports(files), *measure_definitions(files)]
    return [*measures, *measure_words(root, files), measure_commits(root)]


def table(measures: list[Measure], shown: int | None) -> Iterator[str]:
    """A line a measure, below it the first offenders that are no exceptions (shown None: all)."""
    yield f"{'measure':27}{'limit':>7}{'today':>8}"
    for one in measures:
        limit, value = ("-" if figure is None else figure for figure in (one.limit, one.value))
        listed = [offender for offender in one.offenders if offender.name not in EXCEPTIONS.get(one.name, {})]
        excepted = len(one.offenders) - len(listed)
        state = "" if one.limit is None else "  BROKEN" if one.broken else "  ok"
        yield f"{one.name:27}{limit:>7}{value:>8}{state}" + f" ({excepted} excepted)" * bool(excepted)
        yield from (f"    {n:7} {part}" for part, n in one.parts.items())
        yield from (f"    {bad.name}: {bad.figure} {bad.detail}".rstrip() for bad in listed[:shown])
        yield from [f"    and {len(listed) - shown} more"] if shown and len(listed) > shown else []
        stale = set(EXCEPTIONS.get(one.name, {})) - {offender.name for offender in one.offenders}
        yield from (f"    no longer needed in EXCEPTIONS: {name}" for name in sorted(stale))


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="print every offender")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    try:
        measures = measure(root)
    except SyntaxError as e:
        parser.error(f"cannot parse {e.filename}, line {e.lineno}: {e.msg}; mend it first")
    if options.json:
        print(json.dumps([asdict(one) | {"broken": one.broken} for one in measures], indent=1))
    else:
        print("\n".join(table(measures, None if options.all else 5)))
    return int(any(one.broken for one in measures))


if __name__ == "__main__":
    sys.exit(main())
