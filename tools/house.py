"""The size of the repository against values that may only fall, and the order of its imports.

    python tools/house.py     exit code 1 where a value is above the one in tools/house.json, or a rule is broken

Values: lines, code lines and tokens of the package (names, operators, numbers and strings; a docstring is one), lines
of the tests, words of the pages for users, imports that go upward. A value that fell is written to tools/house.json.
Rules: no circle of imports (those in functions and `import_module("literal")` count, those for types alone do not); no
file above 500 lines, no function above 80 without its docstring; a docstring for every public class, and for every
public function above three statements, except where a base class of the package has it, and `forward` of a module.
"""

from __future__ import annotations

import ast
import io
import json
import re
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT, PACKAGE = Path(__file__).resolve().parents[1], "kiloword"
FILE_LINES, FUNCTION_LINES, STATEMENTS = 500, 80, 3
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
COUNTED = {tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING}
Function = ast.FunctionDef | ast.AsyncFunctionDef


class File:
    """A file of the package: `path` below it, `module`, its syntax tree, its lines, code lines and tokens."""

    def __init__(self, folder: Path, path: Path) -> None:
        text, self.path = path.read_text(encoding="utf-8"), path.relative_to(folder).as_posix()
        self.tree, self.lines = ast.parse(text, str(path)), text.count("\n")
        tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
        self.code = len({token.start[0] for token in tokens if token.type not in LAYOUT})
        self.tokens = sum(token.type in COUNTED for token in tokens)
        self.module = f"{PACKAGE}.{self.path}".removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        self.room = self.path.partition("/")[0] if "/" in self.path else "ground"

    def imports(self, modules: Iterable[str]) -> Iterator[str]:
        """Modules of the package that this one imports when it runs."""
        parents = self.module.split(".")[: None if self.path.endswith("__init__.py") else -1]
        for node in nodes_below([self.tree]):
            names: list[str] = []
            if isinstance(node, ast.ImportFrom):
                start = parents[: len(parents) - node.level + 1] if node.level else []
                base = ".".join([*start, *filter(None, [node.module])])
                names = [full if (full := f"{base}.{alias.name}") in modules else base for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.Call) and last_name(node.func) == "import_module":
                names = [str(arg.value) for arg in node.args[:1] if isinstance(arg, ast.Constant)]
            yield from (name for name in names if name in modules and name != self.module)


def nodes_below(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """All nodes at any depth, without the body of `if TYPE_CHECKING`."""
    for node in nodes:
        yield node
        checked = node.body if isinstance(node, ast.If) and last_name(node.test) == "TYPE_CHECKING" else []
        yield from nodes_below(child for child in ast.iter_child_nodes(node) if child not in checked)


def last_name(node: ast.AST) -> str:
    """`c` of `a.b.c`."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def order(root: Path) -> dict[str, int]:
    """The place of each room in the tree of docs/architecture.md, the highest first."""
    tree = (root / "docs" / "architecture.md").read_text(encoding="utf-8").split("```")[1].split("\nresearch/")[0]
    return {room: n for n, room in enumerate(re.findall(r"^  (\w+)/", tree, re.MULTILINE))}


def broken_imports(root: Path, files: list[File]) -> tuple[list[str], list[str]]:
    """Circles of modules (the first that is found), and imports of a room above as "a -> b"."""
    modules, place = {file.module: file for file in files}, order(root)
    graph = {file.module: sorted(set(file.imports(modules))) for file in files}
    upward = sorted(
        f"{name} -> {target}"
        for name, targets in graph.items()
        for target in targets
        if name not in (PACKAGE, f"{PACKAGE}.__main__")  # the ways in
        if place.get(modules[name].room, 99) > place.get(modules[target].room, 99)
    )
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [f"circle of imports: {' -> '.join(error.args[1][::-1])}"], upward
    return [], upward


def definitions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function | ast.ClassDef]]:
    """Every class and function with its qualified name as Python writes it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.ClassDef):
            yield prefix + child.name, child
            inner = "." if isinstance(child, ast.ClassDef) else ".<locals>."
            yield from definitions(child, prefix + child.name + inner)
        else:
            yield from definitions(child, prefix)


def broken_definitions(files: list[File]) -> Iterator[str]:
    """Long files, long functions, and public names without docstring."""
    classes = {one.name: one for file in files for one in file.tree.body if isinstance(one, ast.ClassDef)}
    for file in files:
        if file.lines > FILE_LINES:
            yield f"{file.path} has {file.lines} lines, above {FILE_LINES}"
        for name, one in definitions(file.tree):
            if isinstance(one, Function) and (lines := length(one)) > FUNCTION_LINES:
                yield f"{file.path}:{name} has {lines} lines, above {FUNCTION_LINES}"
            small = sum(isinstance(part, ast.stmt) for part in ast.walk(one)) - 1 <= STATEMENTS
            documented = ast.get_docstring(one) is not None or (isinstance(one, Function) and small)
            documented |= "." in name and inherits_docstring(classes, *name.split(".")[-2:])
            parts = [*file.path.removesuffix("__init__.py").split("/"), *name.split(".")]
            if not documented and not any(part.startswith(("_", "<")) for part in parts):
                yield f"{file.path}:{name} has no docstring"


def length(node: Function) -> int:
    """Lines from `def` to the last one, without the docstring."""
    first, documented = node.body[0], ast.get_docstring(node) is not None
    return (node.end_lineno or 0) - node.lineno + 1 - documented * ((first.end_lineno or 0) - first.lineno + 1)


def inherits_docstring(classes: Mapping[str, ast.ClassDef], owner: str, method: str) -> bool:
    """Whether a method is documented by a base class, or is the `forward` of a documented module."""
    if owner not in classes:
        return False
    if method == "forward" and ast.get_docstring(classes[owner]):
        return True
    bases = [last_name(base.value if isinstance(base, ast.Subscript) else base) for base in classes[owner].bases]
    inherited = [part for base in bases if base in classes for part in classes[base].body if isinstance(part, Function)]
    return any(part.name == method and ast.get_docstring(part) for part in inherited) or any(
        inherits_docstring(classes, base, method) for base in bases if base != owner
    )


def measure(root: Path, files: list[File], upward: list[str]) -> dict[str, int]:
    """The values that may only fall."""
    tests = (path.read_text(encoding="utf-8") for path in (root / "tests").rglob("*.py"))
    pages = (path.read_text(encoding="utf-8") for path in [*root.glob("*.md"), *root.glob("docs/**/*.md")])
    return {
        "package lines": sum(file.lines for file in files),
        "package code lines": sum(file.code for file in files),
        "package tokens": sum(file.tokens for file in files),
        "test lines": sum(text.count("\n") for text in tests),
        "words for users": sum(len(text.split()) for text in pages),
        "upward imports": len(upward),
    }


def main(root: Path = ROOT) -> int:
    """Print the rooms and the values, and write values that fell. Returns: 1 if a value rose or a rule is broken."""
    record = root / "tools" / "house.json"
    stored = json.loads(record.read_text(encoding="utf-8"))
    try:
        files = [File(root / PACKAGE, path) for path in sorted((root / PACKAGE).rglob("*.py"))]
    except SyntaxError as error:
        print(f"cannot parse {error.filename}, line {error.lineno}: {error.msg}", file=sys.stderr)
        return 2
    rooms: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for file in files:
        rooms[file.room] += Counter(files=1, lines=file.lines, code=file.code, tokens=file.tokens)
    print(f"{'room':14}{'files':>6}{'lines':>8}{'target':>8}{'code':>8}{'tokens':>8}")
    for room in sorted({*rooms, *stored["rooms"]}, key=lambda room: (-rooms[room]["lines"], room)):
        values, target = rooms[room], stored["rooms"].get(room, "-")
        columns = (values["files"], values["lines"], target, values["code"], values["tokens"])
        print(f"{room:14}{columns[0]:>6}" + "".join(f"{value:>8}" for value in columns[1:]))
    circles, upward = broken_imports(root, files)
    values, before = measure(root, files, upward), stored["values"]
    broken = [*circles, *broken_definitions(files)]
    broken += [
        f"{name}: {value}, above {before[name]} in {record.name}"
        for name, value in values.items()
        if value > before[name]
    ]
    for name, value in values.items():
        print(f"{name:20}{value:>8}  was {before[name]}, target {stored['targets'].get(name, '-')}")
    print(*(f"upward import: {name}" for name in upward), *(f"BROKEN {line}" for line in broken), sep="\n")
    lower = {name: min(value, before[name]) for name, value in values.items()}
    if lower != before:
        record.write_text(json.dumps({**stored, "values": lower}, indent=1) + "\n", encoding="utf-8")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
