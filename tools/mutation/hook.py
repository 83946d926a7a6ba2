"""Gives a process a mutated module: the import system reads its source from elsewhere, the checkout stays as it is."""

from __future__ import annotations

import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        return compile(Path(os.environ["MUTATE_SOURCE"]).read_text(), self.path, "exec", dont_inherit=True)


class _Finder(MetaPathFinder):
    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, name

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        return spec_from_file_location(fullname, self.path, loader=_Loader(fullname, str(self.path)))


def install() -> None:
    """Of MUTATE_ROOT (the checkout), MUTATE_PATH (the module's file in it) and MUTATE_SOURCE (a file with its text)."""
    parts = Path(os.environ["MUTATE_PATH"]).with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    sys.meta_path.insert(0, _Finder(Path(os.environ["MUTATE_ROOT"], os.environ["MUTATE_PATH"]), name))
