"""Class names and prompt templates of known data sets, as files; `names.py` reads them, and those of users."""

from collections.abc import Mapping, Sequence

Templates = Sequence[str] | Mapping[str, Sequence[str]]
"""Prompts with `{c}` for the class name; or a list of prompts per class name."""
