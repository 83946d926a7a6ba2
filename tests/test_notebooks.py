"""The notebooks of docs/notebooks run from start to end, and what they print is true."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = Path(__file__).parents[1] / "docs" / "notebooks"


def test_outputs_are_not_committed() -> None:
    for path in NOTEBOOKS.glob("*.ipynb"):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        assert not [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")], path.stem


TUTORIALS = {  # modules that it needs beside kiloword's own
    "your_photos": (),
    "cached_features": ("transformers",),
    "many_captions": (),
    "captions_as_regions": (),
    "what_it_looks_at": (),
    "your_method": (),
    "open_clip_and_back": ("open_clip",),
}


def executed(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The cells of a notebook with their outputs, run in an empty folder. Raises: CellExecutionError."""
    nbformat = pytest.importorskip("nbformat", reason="notebooks need nbformat")
    nbclient = pytest.importorskip("nbclient", reason="notebooks are run by nbclient")
    pytest.importorskip("ipykernel", reason="notebooks are run by ipykernel")
    monkeypatch.setenv("PYTHONPATH", str(NOTEBOOKS.parents[1]))
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", 4)
    nbclient.NotebookClient(notebook, timeout=1100, resources={"metadata": {"path": str(folder)}}).execute()
    return list(notebook.cells)


def printed(cells: list[Any]) -> str:
    return "".join(output.get("text", "") for cell in cells for output in cell.get("outputs", ()))


def test_every_notebook_is_executed_and_listed() -> None:
    """By a test below, and on the start page."""
    names = {path.stem for path in NOTEBOOKS.glob("*.ipynb")}
    assert names == {"first_model", *TUTORIALS}
    listed = (NOTEBOOKS.parent / "index.md").read_text(encoding="utf-8")
    assert not [name for name in names if f"(notebooks/{name}.ipynb)" not in listed]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", list(TUTORIALS))
def test_what_must_hold_in_a_tutorial(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in TUTORIALS[name]:
        if find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    run = executed(name, tmp_path, monkeypatch)
    assert "SystemExit" not in printed(run)  # %run shows that a command has failed, and goes on
    assert "\nassert " in "\n" + run[-1].source
    assert run[-1].execution_count  # nbclient has raised if one of them was false
    assert "What must hold" in run[-2].source


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_first_model_learns_is_found_and_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = printed(executed("first_model", tmp_path, monkeypatch))
    found = {
        name: float(re.search(rf"{name}.*?: ([\d.e+-]+)", said)[1])  # type: ignore[index]
        for name in ("best ten", "right colour", "largest difference of a feature")
    }
    assert found["best ten"] >= 50  # by chance 5
    assert found["right colour"] >= 50  # by chance 12.5
    assert found["largest difference of a feature"] < 1e-5
    assert (tmp_path / "first-model" / "search.html").is_file()
    assert "library: 12 photos" in said
