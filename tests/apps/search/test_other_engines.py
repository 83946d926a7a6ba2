"""The examples of docs/export.md run as they stand there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import kiloword
from folders import model_folder
from kiloword.apps.search.command import Index
from kiloword.apps.search.library import Library
from kiloword.apps.search.rank import by_text
from photo_folders import photos_in

PAGE = Path(__file__).parents[3] / "docs" / "export.md"


def example(heading: str) -> dict[str, Any]:
    """What the code below a heading defines."""
    code = re.search(rf"^### {heading}$.*?^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert code is not None
    defined: dict[str, Any] = {"__name__": "example"}
    exec(code[1], defined)
    return defined


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    model_folder(tmp_path / "run/model")
    photos_in(tmp_path / "photos")
    return tmp_path


def test_lancedb_finds_the_same_photos(root: Path) -> None:
    pytest.importorskip("lancedb", reason="needs lancedb, which no other part uses")
    Index(photos=root / "photos", out=root / "library", model="run/model", device="cpu").run()
    library = Library(root / "library")
    found = by_text(library, kiloword.load("run/model"), "a dog on the beach", 10)
    assert [one["path"] for one in example("LanceDB")["nearest"]] == [library.cells(one.row)["path"] for one in found]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_two_actors_of_ray_give_what_one_process_gives(root: Path) -> None:
    ray = pytest.importorskip("ray", reason="needs ray: pip install 'kiloword[ray]'")
    variables = {"OMP_NUM_THREADS": "1"}
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": variables})
    try:
        example("Ray Data")
    finally:
        ray.shutdown()
    table = pq.read_table(root / "features")
    alone = kiloword.load("run/model").encode_image(table["path"].to_pylist())["vec"]
    assert len(table) == 12
    np.testing.assert_allclose(np.array(table["vec"].to_pylist()), alone.numpy(), atol=1e-6)
