"""Shared by all tests: few threads, no CUDA device, and real data only where it lies beside the checkout."""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import IO

import pytest
import torch
from hypothesis import HealthCheck, settings
from matplotlib.figure import Figure

torch.set_num_threads(1)
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the tests are for the CPU; bench/gpu.sh is for a GPU
LOADED_MACHINE = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
settings.register_profile("any machine", max_examples=60, deadline=None, suppress_health_check=LOADED_MACHINE)
settings.load_profile("any machine")

SAVEFIG = Figure.savefig
SHARED = Path(__file__).parents[2] / "shared" / "data"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests with the longest time limit come first, so that no process ends alone with one of minutes."""
    items.sort(key=lambda item: -_limit(item) if item.get_closest_marker("slow") else 0)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Plots of pages are written only where a test asks for them: a run's take longer than its training."""
    Figure.savefig = SAVEFIG if item.get_closest_marker("plots") else _saved_empty


def _saved_empty(figure: Figure, file: IO[str], **_: object) -> None:
    file.write('<svg viewBox="0 0 1 1"></svg>')


def _limit(item: pytest.Item) -> float:
    mark = item.get_closest_marker("timeout")
    return float(mark.args[0]) if mark else 0


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or fills the cache of this machine."""
    monkeypatch.setenv("KILOWORD_CACHE", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def _trim(request: pytest.FixtureRequest) -> Iterator[None]:
    """After a slow test, glibc gives freed memory back; else pieces of it stay with the process, GB after GB."""
    yield
    if request.node.get_closest_marker("slow"):
        getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: 0)(0)


@pytest.fixture(scope="session")
def open_clip() -> ModuleType:
    """The package open_clip, with torchvision's missing operators where torch is a CPU build."""
    from kiloword.model.trunks.libraries import torchvision_ready

    torchvision_ready()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module: ModuleType = pytest.importorskip("open_clip")
        return module


@pytest.fixture
def shared() -> Path:
    """Real photos beside the checkout; a user's machine has none."""
    if not SHARED.is_dir():
        pytest.skip("no ../shared/data beside this checkout")
    return SHARED
