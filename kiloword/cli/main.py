"""The verbs of the command line: where each is declared, and how a command ends. No torch at import."""

from __future__ import annotations

import inspect
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import MISSING, make_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import tyro

from kiloword.__version__ import __version__
from kiloword.addresses import public, scrubbed
from kiloword.config.settings import leaves
from kiloword.distributed import launch
from kiloword.distributed.allocator import keep_freed_memory
from kiloword.errors import sentence_of, suggestion
from kiloword.terminal import invoked, say, show_traceback, warn

Place = tuple[str, str]
"""Where a verb is declared, "module:name", and its line in the list of verbs. The name is of a dataclass with `run()`,
whose flags tyro reads, or of a function that reads the words and returns such an object."""

VERBS: dict[str, dict[str, Place]] = {
    "Train": {
        "train": ("kiloword.training.command:read", "Train a model; the same command again resumes."),
        "sweep": ("kiloword.apps.sweep.command:read", "Train with several settings and seeds, and compare."),
        "plan": ("kiloword.apps.plan.command:read", "Estimate memory, time and network traffic of a run."),
        "verify": ("kiloword.verify.command:read", "Check the gradients of a method."),
        "watch": ("kiloword.runs.watch:Watch", "Show the progress and the alerts of runs."),
        "compare": ("kiloword.runs.compare:Compare", "Compare the settings and metrics of runs."),
        "average": ("kiloword.cli.exchange:Average", "Average the weights of models."),
    },
    "Evaluate and use": {
        "eval": ("kiloword.cli.evaluate:read", "Evaluate models on a task, or on a suite of data sets."),
        "score": ("kiloword.cli.score:Score", "Score images against texts, and show where the model looks."),
        "classify": ("kiloword.cli.score:Classify", "Classify images by the names of classes."),
        "caption": ("kiloword.cli.embed:Caption", "Write captions for images."),
        "embed": ("kiloword.stores.command:Embed", "Precompute the features or tokens of a data set."),
        "index": ("kiloword.apps.search.command:Index", "Make or update a library of photos, for search and serve."),
        "search": ("kiloword.apps.search.command:Search", "Search photos by words or by a photo."),
        "serve": ("kiloword.apps.search.command:Serve", "Search photos in a browser."),
    },
    "Data": {
        "data": ("kiloword.cli.data:Data", "Inspect a data set before training."),
        "audit": ("kiloword.apps.audit.command:Audit", "Find pairs that do not match, duplicates and wrong labels."),
        "mine": ("kiloword.apps.mine.command:Mine", "Find captions that match further images."),
    },
    "Exchange": {
        "import": ("kiloword.cli.exchange:Import", "Import weights of another library."),
        "export": ("kiloword.cli.exchange:Export", "Export a model to another library, and compare both."),
        "push": ("kiloword.cli.exchange:Push", "Upload a model with its card to the Hugging Face hub."),
    },
    "Look up": {
        "quickstart": (
            "kiloword.apps.quickstart.command:Quickstart",
            "Train on drawn scenes or on your photos, and write a report.",
        ),
        "methods": ("kiloword.cli.describe:Methods", "List the methods and their components."),
        "recipes": ("kiloword.methods.recipes:Recipes", "List the recipes of papers, or show one with its sources."),
        "sizes": ("kiloword.cli.describe:Sizes", "List the named sizes of towers."),
        "bench": ("kiloword.apps.plan.command:Bench", "Measure the speed and memory of this machine."),
        "doctor": ("kiloword.cli.describe:Doctor", "Show versions, devices, extras and threads of this machine."),
    },
}

OUTPUTS = ("json", "html", "csv", "page", "plane", "png", "results")  # names of files that are written at the end


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point. An error that the user can fix is one message on stderr and exit code 2."""
    if argv is None:
        sys.excepthook = show_traceback
        keep_freed_memory()
    try:
        words = [public(word) for word in (sys.argv[1:] if argv is None else argv)]
        launch.adopt()
        with invoked(words):
            _run(words)
    except BrokenPipeError:  # `kiloword ... | head` has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except KeyboardInterrupt as error:
        warn(f"kiloword: interrupted{f': {error}' if str(error) else '.'}")
        raise SystemExit(130) from None
    except Exception as error:
        message = sentence_of(error)
        printed = launch.explain(scrubbed(message or "".join(traceback.format_exception(error))))
        if message is None:
            raise
        if printed:
            warn(f"kiloword: {scrubbed(message)}")
        raise SystemExit(getattr(error, "code", 2)) from None


def _run(words: Sequence[str]) -> None:
    first = words[0] if words else "--help"
    places = {name: place for group in VERBS.values() for name, (place, _) in group.items()}
    if first == "--version":
        say(__version__)
    elif first in ("-h", "--help"):
        say("usage: kiloword VERB ..., and kiloword VERB --help", "")
        for group, verbs in VERBS.items():
            say(group, *(f"  {name:11} {line}" for name, (_, line) in verbs.items()), "")
        say("Shell completion: kiloword --completion bash, zsh, tcsh or fish prints a script.")
    elif first == "--completion":
        _print_completion(words[1:])
    elif first not in places:
        raise ValueError(f"unknown verb {first!r}: expected one of {', '.join(places)}.{suggestion(first, places)}")
    elif any(not word or (word.startswith("--") and word.endswith("=")) for word in words):
        raise ValueError("an argument is empty, perhaps of an unset shell variable: expected a value.")
    else:
        read = declared(first)
        if isinstance(read, type):
            about = inspect.cleandoc(read.__doc__ or "")
            verb: Any = tyro.cli(read, args=words[1:], prog=f"kiloword {first}", description=about)
        else:
            verb = read(words[1:])
        check(verb, words)
        verb.run()


def declared(verb: str) -> Any:
    """The class of a verb, or the function that reads its words."""
    place = next(group[verb][0] for group in VERBS.values() if verb in group)
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


def check(verb: Any, words: Sequence[str]) -> None:
    """Raises: ValueError where a flag of several values is given twice, what is required is empty, or a file that is
    written at the end would be a folder or below a file."""
    given = [word[2:].partition("=")[0].rpartition(".")[2].replace("-", "_") for word in words if word.startswith("--")]
    for leaf in leaves(verb):
        flag, value = leaf.flag.rpartition(".")[2], leaf.value
        name = flag.replace("-", "_")
        if isinstance(value, tuple) and given.count(name) > 1:
            raise ValueError(f"--{flag} is given twice: its values follow the first one.")
        if value == () and leaf.field.default is MISSING and leaf.field.default_factory is MISSING:
            what = f"--{flag}" if name in given else name.upper()
            raise ValueError(f"{what} is missing: give one or several, see kiloword {words[0]} --help.")
        if name in OUTPUTS and isinstance(value, Path) and (value.is_dir() or value.parent.is_file()):
            raise ValueError(f"--{flag} {value} cannot be written: expected the name of a file.")


def _print_completion(shells: Sequence[str]) -> None:
    """Print tyro's completion script; of a verb whose flags depend on its first word, the name alone."""
    if shells not in (["bash"], ["zsh"], ["tcsh"], ["fish"]):
        raise ValueError("--completion needs the name of a shell: bash, zsh, tcsh or fish.")
    kinds = {name: declared(name) for group in VERBS.values() for name in group}
    verbs: dict[str, Any] = {n: k if isinstance(k, type) else make_dataclass(n, []) for n, k in kinds.items()}
    tyro.extras.subcommand_cli_from_dict(verbs, prog="kiloword", args=["--tyro-print-completion", *shells])
