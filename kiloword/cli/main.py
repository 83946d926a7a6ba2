"""The verbs of the command line: where each is declared, and how a command ends. No torch at import."""

from __future__ import annotations

import inspect
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import tyro

from kiloword.__version__ import __version__
from kiloword.addresses import public, scrubbed
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
        "sweep": ("kiloword.cli.sweep:main", "Train over varied settings and seeds, and compare."),
        "plan": ("kiloword.cli.plan:main", "Estimate memory, time and traffic of a run."),
        "verify": ("kiloword.verify.command:read", "Check the gradients of a method."),
        "watch": ("kiloword.runs.watch:Watch", "Follow the last rows and the alerts of runs."),
        "compare": ("kiloword.runs.compare:Compare", "Compare runs, over seeds where they differ in nothing else."),
        "average": ("kiloword.cli.exchange:Average", "Average the weights of models."),
    },
    "Evaluate and use": {
        "eval": ("kiloword.cli.evaluate:read", "Evaluate models by a task, or by a suite of data sets."),
        "score": ("kiloword.cli.score:Score", "Score images against texts, and show where the model looks."),
        "classify": ("kiloword.cli.score:Classify", "Classify images into classes that are named in words."),
        "caption": ("kiloword.cli.embed:Caption", "Write captions for images."),
        "embed": ("kiloword.cli.embed:Embed", "Precompute the features or tokens of a data set."),
        "index": ("kiloword.apps.search.command:Index", "Make or update a library of photos to search in."),
        "search": ("kiloword.apps.search.command:Search", "Search photos by words or by a photo."),
        "serve": ("kiloword.apps.search.command:Serve", "Search photos in a browser."),
    },
    "Data": {
