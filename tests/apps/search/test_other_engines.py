"""The examples of docs/export.md run as they stand there, with stand-ins for the packages of others."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest

import kiloword
from folders import model_folder
from kiloword.apps.search.command import Index
from kiloword.apps.search.library import Library
from kiloword.apps.search.rank import find
from tars import photos_in

PAGE = Path(__file__).parents[3] / "docs" / "export.md"


def test_libraries_and_features_for_other_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model, photos = kiloword.load(model_folder(tmp_path / "run/model")), photos_in(tmp_path / "photos")
    Index(photos=photos, out=tmp_path / "library", model="run/model", device="cpu").run()
    engines = {"LanceDB": MagicMock(), "Ray Data": MagicMock()}
    defined = {}
    for heading, package in (("LanceDB", "lancedb"), ("Ray Data", "ray")):
        monkeypatch.setitem(sys.modules, package, engines[heading])
        code = re.search(rf"^### {heading}$.*?^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
        exec(code[1], defined)  # type: ignore[index]
    table = engines["LanceDB"].connect.return_value.create_table.call_args.args[1]
    library, vectors = Library(tmp_path / "library"), np.array(table["vector"].to_pylist())
    found = find(library, model, [("a dog on the beach", 1)], 12)
    nearest = (vectors @ defined["query"].ravel()).argsort()[::-1].tolist()
    assert [table["path"][row].as_py() for row in nearest] == [library.cells(one.row)["path"] for one in found]
    files = [path.read_bytes() for path in sorted(photos.glob("*.jpg"))]
    features = defined["Embed"]("run/model")({"bytes": np.array(files, object), "path": ["a"] * len(files)})["vec"]
    np.testing.assert_allclose(features, model.encode_image(files)["vec"], atol=1e-6)
