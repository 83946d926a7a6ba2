"""`kiloword --install-completion SHELL`: a script by which a shell completes verbs, methods, tasks, flags and choices.

The script holds a table of words: no Python starts when a key is pressed, at the price that a later version needs the
same command again. The flags come from tyro's own completion (`--tyro-write-completion`), which alone would know
neither the tasks of `eval` nor the flags of a method.
"""

from __future__ import annotations

import ast
import io
import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_type_hints

import tyro

from kiloword.__version__ import __version__
from kiloword.cli.shells import HOW, SCRIPTS
from kiloword.config.settings import leaves
from kiloword.errors import suggestion
from kiloword.files import write_atomic
from kiloword.terminal import say

Table = dict[str, list[str]]
"""What may follow: "" (verbs), "train" (flags of all methods), "train llip" (further flags), "train :" (first words),
"train --precision" (values of a flag), "--device" (of any verb)."""

HIDDEN = "--named"  # of `Trust`: tyro's completion lists what its help suppresses
DEVICES = ["auto", "cpu", "cuda", "cuda:0"]
Choices = Mapping[str, tuple[str, Sequence[str]]]
"""First words of some verbs: (what they are, the words)."""
PARSED = re.compile(r"^COMPLETION_SPEC = (.*)$", re.MULTILINE)


def install(words: Sequence[str], verbs: Mapping[str, Any], app: Any, choices: Choices) -> None:
    """Write the script of a shell where it looks for one, and say how to use it.

    Args: words: the shell; verbs: those with flags of their own; app: all verbs; choices: first words of some.
    Raises: ValueError for another shell.
    """
    shell = words[0] if len(words) == 1 else ""
    if shell not in SCRIPTS:
        named = " ".join(words) or "nothing"
        raise ValueError(
            f"--install-completion got {named[:60]}: expected {', '.join(SCRIPTS)}.{suggestion(named, SCRIPTS)}"
        )
    path = place(shell)
    write_atomic(path, SCRIPTS[shell](table(verbs, app, choices), __version__).encode())
    say(f"written: {path}", HOW[shell].format(path=path, folder=path.parent))


def place(shell: str) -> Path:
    """The file of a shell's script, below the user's own folders."""
    data = Path(os.environ.get("XDG_DATA_HOME") or "~/.local/share").expanduser()
    config = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser()
    return {
        "bash": data / "bash-completion" / "completions" / "kiloword",
        "zsh": data / "kiloword" / "completions" / "_kiloword",
        "fish": config / "fish" / "completions" / "kiloword.fish",
    }[shell]


def table(verbs: Mapping[str, Any], app: Any, choices: Choices) -> Table:
    """Everything that the scripts know."""
    from kiloword.config.papers import names as recipe_names
    from kiloword.config.recipes import sizes
    from kiloword.evaluation import TASKS
    from kiloword.evaluation.suite import names as suites
    from kiloword.methods.registry import names as presets

    spec = parser_spec(lambda words: app.cli(args=words, prog="kiloword"))
    known: Table = {"": [*app._subcommands, "--help", "--version", "--install-completion"]}
    known["--install-completion :"] = list(SCRIPTS)
    for verb, described in spec["subcommands"].items():
        if verb not in verbs:
            _add(known, verb, described)
    known |= {f"{verb} :": list(words) for verb, (_, words) in choices.items()}
    known |= {"eval :": [*TASKS, "suite"], "eval suite :": suites()}
    known |= {"--device": DEVICES, "--size": list(sizes()), "--recipe": recipe_names(), "--method": presets()}
    for task in TASKS.values():
        _add(known, f"eval {task.name}", parser_spec(partial(_parse, verbs["eval"].flags(task))))
    _add(known, "eval suite", parser_spec(partial(_parse, verbs["eval"].SuiteWords)))
    _add_methods(known, verbs, presets())
    return known


def _add_methods(known: Table, verbs: Mapping[str, Any], presets: Sequence[str]) -> None:
    """Flags of train, sweep, plan and verify, and the settings of each method."""
    from kiloword.methods.registry import find

    first = presets[0]
    for verb in ("train", "plan", "verify"):
        _add(known, verb, parser_spec(partial(_method, verbs[verb].main, first)))
        known[verb] = [flag for flag in known[verb] if not flag.startswith("--settings.")] + ["--help-all"]
    _add(known, "sweep", parser_spec(partial(_parse, verbs["sweep"].SweepOptions)))
    known["sweep"] += [flag for flag in known["train"] if flag not in known["sweep"]]
    known |= {f"sweep{key[5:]}": words for key, words in known.items() if key.startswith("train --")}
    known |= {f"{verb} :": list(presets) for verb in ("train", "sweep", "plan", "verify")}
    for preset in presets:
        settings = list(leaves(find(preset)[1]()))
        for verb in ("train", "sweep", "plan", "verify"):
            known[f"{verb} {preset}"] = [f"--settings.{leaf.flag}" for leaf in settings]
            for leaf in settings:
                values = get_args(get_type_hints(leaf.owner)[leaf.field.name])
                if values and all(isinstance(value, str) for value in values):
                    known[f"{verb} --settings.{leaf.flag}"] = list(values)


def _parse(kind: Any, words: list[str]) -> None:
    tyro.cli(kind, args=words)


def _method(main: Callable[[list[str]], None], preset: str, words: list[str]) -> None:
    main([preset, *words])


def parser_spec(parse: Callable[[list[str]], Any]) -> dict[str, Any]:
    """What tyro knows of a parser, as its completion script holds it.

    Args: parse: parses the words of a command line, as `tyro.cli`.
    """
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script"
        nothing = io.StringIO()
        with suppress(SystemExit), redirect_stdout(nothing), redirect_stderr(nothing):
            parse(["--tyro-write-completion", "bash", str(script)])
        line = PARSED.search(script.read_text(encoding="utf-8"))
    assert line, "tyro's completion script has another form"
    spec: dict[str, Any] = ast.literal_eval(line[1])
    for part in (spec, *spec.get("subcommands", {}).values()):
        part["options"] = [option for option in part["options"] if HIDDEN not in option["flags"]]
    return spec


def _add(known: Table, key: str, spec: Mapping[str, Any]) -> None:
    """Add the flags of a parser, and the choices of their values."""
    options = [option for option in spec["options"] if option["flags"]]
    known[key] = [flag for option in options for flag in option["flags"] if flag.startswith("--")]
    for option in options:
        for flag in option["flags"]:
            if option.get("choices"):
                known[f"{key.split()[0]} {flag}"] = [str(choice) for choice in option["choices"]]
