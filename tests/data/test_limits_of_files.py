"""Limits on tables, at the limit and one above."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kiloword.data.sources import embedded
from kiloword.data.sources.embedded import check_expanded


@pytest.mark.parametrize("column", ["text", "lists"])
def test_text_of_a_table_counts_as_it_expands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, column: str) -> None:
    """Ten times the same cell is stored once."""
    cells = ["x" * 1000] * 10 if column == "text" else [["x" * 600, "x" * 400]] * 10
    pq.write_table(pa.table({column: cells, "other": ["y" * 9999] * 10}), tmp_path / "x.parquet")
    monkeypatch.setattr(embedded, "MAX_TABLE", 10_000)
    check_expanded(tmp_path / "x.parquet", [column])
    monkeypatch.setattr(embedded, "MAX_TABLE", 9_999)
    with pytest.raises(ValueError, match=f"the columns {column} hold more than 9,999 bytes of text"):
        check_expanded(tmp_path / "x.parquet", [column])
