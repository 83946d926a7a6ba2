"""The mutants of a module: small faults of ordinary kinds, each in one function."""

from __future__ import annotations

import ast
import copy
import difflib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
COMPARED: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
SWAPPED: dict[type, type] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Add,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.Pow: ast.Mult, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
RENAMED = {"min": "max", "max": "min", "any": "all", "all": "any", "minimum": "maximum", "maximum": "minimum",
           "argmin": "argmax", "argmax": "argmin", "floor": "ceil", "ceil": "floor"}  # fmt: skip
CONDITIONS = (ast.If, ast.While, ast.IfExp)
# Nothing inside these is mutated: messages, annotations and decorators are no behaviour, or are checked by mypy.
OPAQUE = (ast.JoinedStr, ast.Raise, ast.Assert, ast.Global, ast.Nonlocal)
Site = tuple[str, ast.AST, Callable[[ast.AST], ast.AST | None]]


@dataclass(frozen=True)
class Mutant:
    """One fault: where it is, the module's whole source with it, and its difference from the function as it was."""

    path: str
    unit: str
    first: int
    lines: tuple[int, int]
    kind: str
    source: str
    diff: str


def units(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Outermost functions and the methods of outermost classes, with their qualified names."""
    for node in tree.body:
        if isinstance(node, FUNCTION):
            yield node.name, node  # type: ignore[misc]
        elif isinstance(node, ast.ClassDef):
            yield from ((f"{node.name}.{part.name}", part) for part in node.body if isinstance(part, FUNCTION))  # type: ignore[misc]


def first_line(unit: ast.FunctionDef) -> int:
    return min([unit.lineno, *(decorator.lineno for decorator in unit.decorator_list)])


def sites(unit: ast.FunctionDef) -> list[Site]:
    """What can be changed: a kind, the node, and what makes of a copy of it the node that takes its place."""
    defaults = [node for node in [*unit.args.defaults, *unit.args.kw_defaults] if isinstance(node, ast.Constant)]
    found: list[Site] = [("default", node, change) for node in defaults for change in constants(node)]
    for index, statement in enumerate(unit.body):
        if index == 0 and isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue
        if index and isinstance(unit.returns, ast.Constant) and unit.returns.value is None:
            found.append(("early return", statement, lambda node: ast.Return(value=None)))
        found += [site for node in visible(statement) for site in sites_of(node)]
    return found


def visible(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    if isinstance(node, OPAQUE):
        return
    for name, child in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_comment"):
            continue
        for part in child if isinstance(child, list) else [child]:
            if isinstance(part, ast.AST):
                yield from visible(part)


def sites_of(node: ast.AST) -> Iterator[Site]:
    if isinstance(node, ast.Raise) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Await)):
        yield "statement deleted", node, lambda _: ast.Pass()
    if isinstance(node, ast.AugAssign | ast.Continue | ast.Break) or (isinstance(node, ast.Assign) and stores(node)):
        yield "statement deleted", node, lambda _: ast.Pass()
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield "comparison", node, lambda old: replaced(old, ops=[COMPARED[type(old.ops[0])]()])  # type: ignore[attr-defined]
    joins_text = isinstance(node, ast.BinOp) and (text(node.left) or text(node.right))
    if isinstance(node, ast.BinOp | ast.AugAssign | ast.BoolOp) and type(node.op) in SWAPPED and not joins_text:
        yield "operator", node, lambda old: replaced(old, op=SWAPPED[type(old.op)]())  # type: ignore[attr-defined]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield "negation", node, lambda old: old.operand  # type: ignore[attr-defined]
    if isinstance(node, CONDITIONS):
        for value in (True, False):
            if not (value and isinstance(node, ast.While)):
                yield "condition", node, lambda old, value=value: replaced(old, test=ast.Constant(value))  # type: ignore[misc]
        yield "negation", node, lambda old: replaced(old, test=ast.UnaryOp(ast.Not(), old.test))  # type: ignore[attr-defined]
    if isinstance(node, ast.comprehension) and node.ifs:
        yield "condition", node, lambda old: replaced(old, ifs=[])
    if isinstance(node, ast.Constant):
        yield from (("constant", node, change) for change in constants(node))
    if isinstance(node, ast.Call):
        for index, keyword in enumerate(node.keywords):
            if keyword.arg == "strict":  # as an assertion
                continue
            yield "argument dropped", node, lambda old, at=index: replaced(old, keywords=without(old.keywords, at))  # type: ignore[attr-defined,misc]
        if name_of(node.func) in RENAMED:
            yield "operator", node, lambda old: replaced(old, func=renamed(old.func))  # type: ignore[attr-defined]


def constants(node: ast.Constant) -> Iterator[Callable[[ast.AST], ast.AST]]:
    value = node.value
    if isinstance(value, bool):
        yield lambda _: ast.Constant(not value)
    elif isinstance(value, int):
        yield lambda _: ast.Constant(value + 1)
        yield lambda _: ast.Constant(value - 1)
    elif isinstance(value, float):
        yield lambda _: ast.Constant(2 * value if value else 1.0)


def stores(node: ast.Assign) -> bool:
    return all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets)


def text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def name_of(function: ast.AST) -> str:
    return getattr(function, "attr", getattr(function, "id", ""))


def renamed(function: ast.AST) -> ast.AST:
    field = "attr" if isinstance(function, ast.Attribute) else "id"
    return replaced(function, **{field: RENAMED[name_of(function)]})


def replaced(node: ast.AST, **fields: object) -> ast.AST:
    new = copy.copy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return new


def without(items: list[ast.keyword], at: int) -> list[ast.keyword]:
    return items[:at] + items[at + 1 :]


class _Swap(ast.NodeTransformer):
    def __init__(self, node: ast.AST, change: Callable[[ast.AST], ast.AST | None]) -> None:
        self.node, self.change = node, change

    def visit(self, node: ast.AST) -> ast.AST | None:
        return self.change(node) if node is self.node else self.generic_visit(node)


def mutant(path: str, source: str, name: str, kind: str, nth: int) -> Mutant:
    """The nth mutant of a kind of the function `name`; the text is parsed anew, since a swap changes the tree."""
    tree = ast.parse(source)
    unit = dict(units(tree))[name]
    before = ast.unparse(unit)
    _, node, change = [site for site in sites(unit) if site[0] == kind][nth]
    lines = span(node)
    _Swap(node, change).visit(unit)
    ast.fix_missing_locations(tree)
    after = ast.unparse(unit)
    diff = difflib.unified_diff(before.splitlines(), after.splitlines(), path, path, name, kind, 1, "")
    return Mutant(path, name, first_line(unit), lines, kind, ast.unparse(tree), "\n".join(diff))


def span(node: ast.AST) -> tuple[int, int]:
    """Lines that run when the changed code runs: of a condition its test alone."""
    part = node.test if isinstance(node, CONDITIONS) else node.iter if isinstance(node, ast.comprehension) else node
    return part.lineno, part.end_lineno or part.lineno  # type: ignore[attr-defined]
