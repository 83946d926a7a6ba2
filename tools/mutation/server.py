"""Runs tests against a mutant in a fork of a process that has imported what is slow to import, but not the package."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
HEAVY = (
    "torch",
    "torch.distributed",
    "torch.utils.data",
    "torch.utils.checkpoint",
    "numpy",
    "PIL.Image",
    "pyarrow.parquet",
    "pydantic",
    "tyro",
    "rich.progress",
    "rich.table",
    "tokenizers",
    "safetensors.torch",
    "sklearn.metrics",
)
MEMORY = 6 << 30


def preload() -> None:
    for name in HEAVY:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    assert "kiloword" not in sys.modules, "the server must not import what is mutated"


class Chosen:
    """A pytest plugin: the chosen tests in their order, until one fails or the processor time is spent."""

    def __init__(self, tests: list[str], budget: float) -> None:
        self.order = {test: index for index, test in enumerate(tests)}
        self.budget, self.ran, self.failed, self.why, self.spent = budget, 0, "", "", False

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted((i for i in items if i.nodeid in self.order), key=lambda i: self.order[i.nodeid])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and not self.failed:
            self.failed, self.why = report.nodeid, _last(report.longreprtext)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.ran += report.when == "call"
        if report.failed and not self.failed:
            self.failed, self.why = report.nodeid, _last(report.longreprtext)

    def pytest_runtest_logfinish(self) -> None:
        self.spent = sum(os.times()[:4]) > self.budget

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        if self.spent:
            item.session.shouldstop = "its processor time is spent"


def _last(text: str) -> str:
    lines = [line for line in text.splitlines() if line.startswith("E ")]
    return (lines or text.splitlines() or [""])[0][:200]


@dataclass
class Job:
    """A fork that runs tests, and where it leaves what came of it."""

    row: dict[str, Any]
    pid: int
    folder: Path
    limit: float

    def done(self, wait: float = 0.05) -> dict[str, Any] | None:
        """What came of it, or None while it runs; it is ended when it runs beyond its limit of seconds."""
        late = time.monotonic() > self.limit
        if late:
            os.killpg(self.pid, signal.SIGKILL)
        pid, status = os.waitpid(self.pid, 0 if late else os.WNOHANG)
        if not pid:
            time.sleep(wait)
            return None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        if os.waitstatus_to_exitcode(status) == 3:
            raise RuntimeError(f"the tests could not be run: see {self.folder / 'log'}")
        result = self.folder / "result.json"
        if not result.exists():
            return {"outcome": "timeout" if late else "killed", "ran": 0, "by": "", "why": "ended without a result"}
        return json.loads(result.read_text())  # type: ignore[no-any-return]


def start(
    row: dict[str, Any], root: Path, folder: Path, tests: list[str], *, source: str = "", budget: float, limit: float
) -> Job:
    """Starts the tests against the mutant of `row` (against the checkout as it is without a `source`)."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "source.py").write_text(source)
    sys.stdout.flush()
    if pid := os.fork():
        return Job(row, pid, folder, time.monotonic() + limit)
    try:
        os.setsid()
        _child(row, root, folder, tests, source, budget)
    except BaseException:
        traceback.print_exc()
        os._exit(3)
    os._exit(0)


def _child(row: dict[str, Any], root: Path, folder: Path, tests: list[str], source: str, budget: float) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    out = os.open(folder / "log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(out, 1), os.dup2(out, 2)
    os.chdir(root)
    os.environ |= {"PYTHONPATH": f"{HERE}:{root}", "HYPOTHESIS_STORAGE_DIRECTORY": str(folder / "hypothesis")}
    sys.path[:0] = [str(root), str(root / "tests")]
    if source:
        os.environ |= {"MUTATE_ROOT": str(root), "MUTATE_PATH": row["path"], "MUTATE_SOURCE": str(folder / "source.py")}
        import hook

        hook.install()
    chosen = Chosen(tests, budget)
    files = sorted({test.partition("::")[0] for test in tests})
    words = ["-x", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "--timeout", "120", "--hypothesis-seed", "0"]
    words += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of modules imported before the fork
    try:
        code = pytest.main([*words, f"--basetemp={folder / 'tmp'}", *files], plugins=[chosen])
    except Exception as error:  # of pytest itself: a mutant may take all open files of the process
        if not chosen.ran:
            raise
        code, chosen.why = 3, chosen.why or f"E {error!r}"
    outcome = "survived" if code in (0, 5) or (chosen.spent and not chosen.failed) else "killed"
    result = {"outcome": outcome, "ran": chosen.ran, "by": chosen.failed, "why": chosen.why, "cpu": sum(os.times()[:4])}
    (folder / "result.json").write_text(json.dumps(result))
