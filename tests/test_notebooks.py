"""The notebooks of docs/notebooks run from start to end, and what they print is true."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = Path(__file__).parents[1] / "docs" / "notebooks"


def cells(path: Path) -> list[Any]:
    nbformat = pytest.importorskip("nbformat", reason="notebooks need nbformat")
    return list(nbformat.read(path, 4).cells)


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: str(path.stem))
def test_outputs_are_not_committed(path: Path) -> None:
    assert not [cell for cell in cells(path) if cell.get("outputs") or cell.get("execution_count")]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_first_model_learns_is_found_and_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat", reason="notebooks need nbformat")
    nbclient = pytest.importorskip("nbclient", reason="notebooks are run by nbclient")
    pytest.importorskip("ipykernel", reason="notebooks are run by ipykernel")
    monkeypatch.setenv("PYTHONPATH", str(NOTEBOOKS.parents[1]))
    notebook = nbformat.read(NOTEBOOKS / "first_model.ipynb", 4)
    client = nbclient.NotebookClient(notebook, timeout=1100, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    said = "".join(
        output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ()) if cell.outputs
    )
    figures = dict.fromkeys(("best ten", "right colour", "largest difference of a feature"), "")
    for line in said.splitlines():
        for what in figures:
            if what in line:
                figures[what] = line.partition(": ")[2].split()[0].rstrip("%")
    assert float(figures["best ten"]) >= 50  # by chance 5
    assert float(figures["right colour"]) >= 50  # by chance 12.5
    assert float(figures["largest difference of a feature"]) < 1e-5
    assert (tmp_path / "first-model" / "search.html").is_file()
    assert "12 photos, 128 dimensions" in said
