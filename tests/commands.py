"""Commands of the program, run here or in processes of their own; other processes; scripts as modules."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import ModuleType

import pytest

from kiloword.cli.main import main

HOLD = """
import sys
from pathlib import Path
from kiloword.files import Lock
lock = Lock(Path(sys.argv[1]), "writing", Path(sys.argv[2]))
print("held", flush=True)
sys.stdin.readline()
"""


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    """Exit code of a command, and what it printed; wrapped lines are joined."""
    try:
        main([str(word) for word in words])
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(bool(end.code))
    printed = capsys.readouterr()
    return code, " ".join(f"{printed.out}\n{printed.err}".split())


def said(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """What a command prints on stdout."""
    main([str(word) for word in words])
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """What a command that must end with exit code 2 prints on stderr."""
    with pytest.raises(SystemExit) as end:
        main([str(word) for word in words])
    assert end.value.code == 2
    return capsys.readouterr().err


def torchrun(ranks: int, *words: object) -> subprocess.CompletedProcess[str]:
    """A command as it ended, by so many ranks; torchrun starts more than one rank."""
    launch = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"] if ranks > 1 else []
    command = [sys.executable, "-m", *launch, "kiloword", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


@contextmanager
def process(code: str, *words: object) -> Iterator[subprocess.Popen[str]]:
    """A process of Python, once it has printed a line."""
    command = [sys.executable, "-c", code, *map(str, words)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline()
        yield other
        other.kill()


def held_by_another(out: Path, folder: Path | None = None) -> AbstractContextManager[subprocess.Popen[str]]:
    """A process that writes `out`, by its lock in `folder` (`out` itself if not given)."""
    return process(HOLD, out, folder or out)


def module_at(path: Path, name: str) -> ModuleType:
    """The module in a file, registered under `name`, as dataclasses need it."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
