"""Recipes of papers against values written independently of them, from the papers' texts (`paper_values.py`)."""

from __future__ import annotations

import pytest

from kiloword.config import papers
from paper_values import VALUES


@pytest.mark.parametrize("name", VALUES)
def test_a_recipe_sets_what_its_paper_states(name: str) -> None:
    """Every stated value is set, and says where it is stated; the towers' own values may come from the size."""
    entries = papers.values(name)
    for setting, (stated, quotation, place) in VALUES[name].items():
        if setting == "method":
            assert papers.load(name).method == stated
            continue
        entry = entries[setting]
        value = tuple(entry.value) if isinstance(entry.value, list) else entry.value
        assert value == stated, f"{setting}: the paper says {stated} ({quotation!r}, {place})"
        assert entry.source or setting.startswith("model."), f"{setting}: no source, but the paper states it ({place})"
