"""Reference pages of the documentation site, made from what the command line and the settings declare.

`pages()` holds them as Markdown by their paths below docs/: every verb with its flags, every setting of a run with
type, default and range, the settings of every method, the named sizes. The text of each stands in the code alone.
"""

from __future__ import annotations

import ast
import inspect
import io
import re
import tempfile
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout, suppress
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import tyro
from docstring_parser import parse

from kiloword.apps.plan.options import Plan
from kiloword.apps.sweep.command import SweepOptions
from kiloword.cli.evaluate import EvaluateSuite, flags as words_of_task
from kiloword.cli.main import VERBS, declared
from kiloword.config.recipes import sizes
from kiloword.config.settings import ABOVE_0, BELOW_1, UNLIMITED, Leaf, leaves
from kiloword.evaluation import TASKS
from kiloword.methods.defaults import default_recipe
from kiloword.methods.registry import PRESETS, components, find, preset
from kiloword.training.command import Train
from kiloword.verify.command import Verify

FOLDER = "reference"
HIDDEN = "--named"  # of `Trust`: tyro's completion lists what its help suppresses
PARSED = re.compile(r"(?:(?P<kind>.+?) • )?(?P<text>.*?) ?(?:\((?:default: )?(?P<default>[^()]*)\))?", re.DOTALL)
REQUIRED = Path("required")  # where a setting has no default
TITLES = {  # of the groups of settings that are no table of a recipe file
    "": "Folder and length",
    "origin": "Where settings come from",
    "options": "How the run is carried out",
    "recipe": "Model, method and batch",
}


class Row(NamedTuple):
    """A flag in a table."""

    flag: str
    kind: str
    default: str
    limits: str
    text: str


def pages() -> dict[str, str]:
    """Path of each page below docs/ -> its Markdown."""
    made = {"verbs": verbs(), "train": train(), "eval": evaluation(), "methods": methods(), "sizes": sizes_page()}
    return {f"{FOLDER}/{name}.md": text + "\n" for name, text in made.items()}


def verbs() -> str:
    """All verbs: an overview, then the flags of each that has no page of its own."""
    places = {"train": "train.md", "eval": "eval.md"}
    lines, sections = ["| verb | what it does |", "|---|---|"], {}
    for verb, (_, about) in (pair for group in VERBS.values() for pair in group.items()):
        lines.append(f"| [`kiloword {verb}`]({places.get(verb, f'#kiloword-{verb}')}) | {prose(about.rstrip('.'))} |")
        if verb in own_verbs():
            sections[verb] = of_settings(own_verbs()[verb])
        elif verb not in places:
            sections[verb] = of_function(declared(verb))
    parts = ["# Verbs", "Made from the flags that the command line reads; `kiloword VERB --help` prints the same."]
    parts.append("\n".join(lines))
    return "\n\n".join([*parts, *(f"## kiloword {verb}\n\n{sections[verb]}" for verb in sorted(sections))])


def parser_spec(parse: Callable[[list[str]], Any]) -> dict[str, Any]:
    """What tyro knows of a parser, as its completion script holds it. Args: parse: parses words, as `tyro.cli`."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script"
        with suppress(SystemExit), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            parse(["--tyro-write-completion", "bash", str(script)])
        line = re.search(r"^COMPLETION_SPEC = (.*)$", script.read_text(encoding="utf-8"), re.MULTILINE)
    assert line, "tyro's completion script has another form"
    spec: dict[str, Any] = ast.literal_eval(line[1])
    spec["options"] = [option for option in spec["options"] if HIDDEN not in option["flags"]]
    return spec


def own_verbs() -> dict[str, Any]:
    """The verbs beside train and eval whose flags depend on a method, each with the defaults of its flags."""
    return {"plan": Plan(), "sweep": SweepOptions(out=REQUIRED), "verify": Verify()}


def of_function(function: Any) -> str:
    """What a verb does, and its flags."""
    spec = parser_spec(partial(_parse, function))
    limits = limits_of(*(p.default for p in inspect.signature(function).parameters.values()))
    rows = [*positionals(function), *flags(spec, limits)]
    return f"{description(inspect.getdoc(function) or '')}\n\n{table(rows)}".rstrip()


def of_settings(defaults: Any) -> str:
    """The same of a verb whose flags are the settings of a dataclass."""
    rows = [row for leaf in leaves(defaults) if (row := setting_row(leaf))]
    return f"{description(inspect.getdoc(type(defaults)) or '')}\n\n{table(rows)}"


def description(doc: str) -> str:
    """A docstring without its arguments; its examples as code."""
    about, _, examples = doc.partition("\n\nArgs:")[0].partition("\n\nExamples:\n")
    text = "\n\n".join(sentence(part) for part in about.split("\n\n"))
    return text + (f"\n\n```bash\n{inspect.cleandoc(examples)}\n```" if examples else "")


def sentence(text: str) -> str:
    """A paragraph of a docstring; a command at the end of its first line as code."""
    about, colon, rest = text.partition(": kiloword ")
    if not colon or "`" in rest:
        return prose(text)
    command, _, more = rest.partition("\n")
    return f"{prose(about)}:\n\n```bash\nkiloword {command}\n```" + (f"\n\n{prose(more)}" if more else "")


def summary(function: Any) -> str:
    return (inspect.getdoc(function) or "").partition("\n")[0]


def positionals(function: Any) -> Iterator[Row]:
    """Arguments without a flag, in capitals."""
    texts = {one.arg_name: one.description or "" for one in parse(function.__doc__ or "").params}
    hints = get_type_hints(function, include_extras=True)
    for name, parameter in inspect.signature(function).parameters.items():
        if any(mark in markers(hints[name]) for mark in markers(tyro.conf.Positional[int])):
            default = "required" if parameter.default is inspect.Parameter.empty else parameter.default
            yield Row(
                name.strip("_").upper(),
                kind_of(hints[name]),
                value_of(default),
                "",
                texts.get(name) or comment(function, name),
            )


def comment(kind: Any, name: str) -> str:
    """The comment above a field of a dataclass, or behind it."""
    owner = next(base for base in kind.__mro__ if name in inspect.get_annotations(base))
    lines = inspect.getsource(owner).splitlines()
    at = next(n for n, line in enumerate(lines) if line.strip().startswith(f"{name}:"))
    above: list[str] = []
    while "  # " not in lines[at] and lines[at - 1 - len(above)].strip().startswith("#"):
        above.insert(0, lines[at - 1 - len(above)].strip(" #"))
    return " ".join(above) or lines[at].partition("  # ")[2]


def markers(hint: Any) -> tuple[Any, ...]:
    return tuple(get_args(hint)[1:]) if get_origin(hint) is Annotated else ()


def flags(spec: Mapping[str, Any], limits: Mapping[str, str]) -> Iterator[Row]:
    """The flags of a parser as tyro describes them. Args: limits: of some, by flag."""
    for option in spec["options"]:
        name = next((flag for flag in option["flags"] if flag.startswith("--")), "--help")
        if name == "--help":
            continue
        found = PARSED.fullmatch(option["description"])
        assert found, option["description"]
        kind = "flag" if option["type"] == "boolean" else plain_kind(found["kind"] or "")
        yield Row(name, kind, value_of(found["default"]), limits.get(name, ""), found["text"])


def plain_kind(kind: str) -> str:
    """A type as tyro writes it, "{None}|STR" or "[STR [STR ...]]", in the words of this reference."""
    first, *more = kind.strip("[]").split(" ")
    parts = [part for part in re.split(r"[{}|,]+", first) if part not in ("", "None")]
    words = [part.lower() if part in ("STR", "INT", "FLOAT", "PATH", "SRC", "ROOT") else part for part in parts]
    return ", ".join(words) + " ..." * bool(more)


def limits_of(*settings: Any) -> dict[str, str]:
    """Flag -> range, for those of some dataclasses that declare one."""
    found = [leaf for one in settings if hasattr(one, "__dataclass_fields__") for leaf in leaves(one)]
    return {f"--{leaf.flag}": range_of(leaf) for leaf in found}


def setting_row(leaf: Leaf) -> Row | None:
    """The row of a setting; None for one without a flag."""
    if leaf.field.metadata.get("flag") == "":
        return None
    kind = kind_of(get_type_hints(leaf.owner, include_extras=True)[leaf.field.name])
    return Row(f"--{leaf.flag}", kind, value_of(leaf.value), range_of(leaf), leaf.field.metadata.get("help", ""))


def range_of(leaf: Leaf) -> str:
    """The limits of a setting's numbers, "" where none are declared."""
    low, high = leaf.field.metadata.get("limits", (None, None))
    if low is None:
        return ""
    least = "> 0" if low == ABOVE_0 else f"≥ {low:g}"
    return least if high == UNLIMITED else f"{least}, " + ("< 1" if high == BELOW_1 else f"≤ {number(high)}")


def number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def kind_of(hint: Any) -> str:
    """A type in a word or two: the choices of a Literal, "str ..." for a tuple of any length."""
    if get_origin(hint) is Annotated:
        return kind_of(get_args(hint)[0])
    if get_origin(hint) is Literal:
        return ", ".join(map(str, get_args(hint)))
    if get_origin(hint) in (Union, types.UnionType):
        return ", ".join(kind_of(part) for part in get_args(hint) if part is not type(None))
    if get_origin(hint) is tuple:
        parts = get_args(hint)
        return f"{kind_of(parts[0])} ..." if parts[-1] is Ellipsis else " ".join(map(kind_of, parts))
    return {bool: "flag", Path: "path"}.get(hint, getattr(get_origin(hint) or hint, "__name__", str(hint)))


def value_of(value: Any) -> str:
    """A default as a command line writes it."""
    if value in (None, "None", ""):
        return ""
    if isinstance(value, tuple | list):
        return " ".join(map(value_of, value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def train() -> str:
    """All settings of a run, by the dataclass that declares them, with the defaults of siglip in size tiny."""
    intro = (
        "# Settings of a run\n\nEvery flag of `kiloword train`. A recipe file has the same names with underscores, and "
        "a table for each group: `[optim]`, `[data]`, `[model.image]`. Defaults are those of `siglip` in size `tiny`; "
        "they depend on method, size, data and `--init`: `kiloword train METHOD --help-all` prints those of yours. The "
        "settings of a method, `--settings.NAME`, are on [a page of their own](methods.md)."
    )
    every = leaves(Train(recipe=default_recipe("siglip", "tiny"), out=REQUIRED))
    parts = [intro, description(inspect.getdoc(Train) or "")]
    for (owner, path), group in groupby(every, lambda leaf: (leaf.owner, leaf.path.rpartition(".")[0])):
        rows = [row for leaf in group if (row := setting_row(leaf))]
        if rows:
            title = TITLES.get(path) or path.removeprefix("recipe.")
            about = prose(inspect.getdoc(owner) or "") if owner is not Train else ""
            parts += [f"## {title}", about, table(rows)]
    return "\n\n".join(part for part in parts if part)


def evaluation() -> str:
    """The tasks of `kiloword eval`, and the suites."""
    parts = ["# Tasks of evaluation", "Flags of `kiloword eval TASK MODEL --data SRC`, a section a task."]
    for name, task in TASKS.items():
        spec = parser_spec(partial(_parse, words_of_task(task)))
        rows = [Row("MODEL", "str ...", "required", "", task.models), *flags(spec, limits_of(task.options()))]
        parts += [f"## kiloword eval {name}", prose(task.about), table(rows)]
    suite = parser_spec(partial(_parse, EvaluateSuite))
    return "\n\n".join(
        [*parts, "## kiloword eval suite", prose(str(EvaluateSuite.__doc__)), table(list(flags(suite, {})))]
    )


def _parse(kind: Any, words: list[str]) -> None:
    tyro.cli(kind, args=words)


def methods() -> str:
    """The settings of every preset, and of the components that have some."""
    intro = (
        "# Settings of the methods\n\nFlags of `kiloword train PRESET`. Those of a component, such as `+compose`, have "
        "its name before theirs: `--settings.compose.rho`. [Methods](../methods.md) shows them at work."
    )
    parts = [intro]
    for name in PRESETS:
        parts += [f"## {name}", f"Source: {preset(name).source}.", settings_of(name)]
    parts += ["# Components", "A component fills a slot of another method: `kiloword train siglip+NAME`."]
    for name, one in components().items():
        parts += [f"## +{name}", f"Slot: {one.slot}. {prose(one.summary.capitalize())}."]
        parts.append(settings_table(one.settings, f"--settings.{name}."))
    return "\n\n".join(part for part in parts if part)


def settings_of(method: str) -> str:
    """The settings of a preset, as its page shows them."""
    return settings_table(find(method)[1], "--settings.")


def settings_table(settings: type | None, prefix: str) -> str:
    """The settings of a method or a component; "" where it has none."""
    rows = [row for leaf in leaves(settings()) if (row := setting_row(leaf))] if settings else []
    return table([row._replace(flag=prefix + row.flag.removeprefix("--")) for row in rows]) if rows else ""


def sizes_page() -> str:
    """The named sizes of towers."""
    head = ["| size | image | width | depth | heads | text width | depth | heads | context | embedding |"]
    head.append("|" + "---|" * 10)
    lines = []
    for name, model in sizes().items():
        image, text = model.image, model.text
        shown = f"{image.tower}, {image.size} px, patch {image.patch}"
        cells = [f"`{name}`", shown, image.width, image.depth, image.heads, text.width, text.depth, text.heads]
        lines.append("| " + " | ".join(map(str, [*cells, text.context, model.head.dim])) + " |")
    about = prose((inspect.getdoc(sizes) or "").replace("\n", " "))
    return "\n\n".join(["# Sizes", about, "\n".join([*head, *lines])])


def table(rows: list[Row]) -> str:
    """A Markdown table of flags, without the column of ranges where none is declared; "" without rows."""
    if not rows:
        return ""
    ranged = any(row.limits for row in rows)
    titles = ["flag", "type", "default", *(["range"] if ranged else []), "what it is"]
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    for row in rows:
        default = row.default if row.default in ("", "required") else code(row.default)
        limits = [row.limits] if ranged else []
        lines.append("| " + " | ".join([code(row.flag), prose(row.kind), default, *limits, prose(row.text)]) + " |")
    return "\n".join(['<div class="flags" markdown>\n', *lines, "\n</div>"])


def code(text: str) -> str:
    return f"`{text}`"


def prose(text: str) -> str:
    """Plain text as Markdown: nothing in it is markup, except code in backticks."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    return "".join(part if part.startswith("`") else re.sub(r"([\\*_\[\]<|])", r"\\\1", part) for part in parts)
