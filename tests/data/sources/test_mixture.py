"""Several sources as one: what a mixture says of its rows, and of itself."""

from __future__ import annotations

from typing import Any

import pytest

from kiloword.data.edits import MixtureSource, mix
from kiloword.types import Record


class Bare:
    """Rows that can do no more than be read."""

    def __init__(self, name: str, rows: int) -> None:
        self.name, self.fingerprint, self.rows = name, name, rows

    def __len__(self) -> int:
        return self.rows

    def record(self, row: int) -> Record:
        return Record(f"{self.name} {row}", b"", [f"read {row}"], info={"question": f"ask {row}", "answers": ["yes"]})


class Rich(Bare):
    """Tells keys, captions and questions without reading."""

    natural, notes = False, ["cut"]

    def key(self, row: int) -> str:
        return f"key {row}"

    def captions(self, row: int) -> list[str]:
        return [f"said {row}"]

    def question(self, row: int) -> str:
        return f"asked {row}"


def test_rows_stand_source_by_source_each_as_often_as_its_weight() -> None:
    mixture: Any = mix([Bare("a", 3), Rich("b", 2)], [2.0, 1.0])
    assert (len(mixture), mixture.name) == (8, "2 x a + 1 x b")
    assert [mixture.record(row).key for row in range(8)] == [*["a 0", "a 1", "a 2"] * 2, "b 0", "b 1"]
    assert [mixture.key(row) for row in range(8)] == ["a 0", "a 1", "a 2"] * 2 + ["key 0", "key 1"]
    assert [mixture.captions(row)[0] for row in (0, 5, 6, 7)] == ["read 0", "read 2", "said 0", "said 1"]
    assert [mixture.question(row) for row in (0, 5, 6, 7)] == ["ask 0", "ask 2", "asked 0", "asked 1"]
    for row in (-1, 8):
        with pytest.raises(IndexError, match=f"row {row} of 8"):
            mixture.locate(row)


def test_one_source_of_another_kind_makes_the_mixture_so() -> None:
    """Crops and mirror images are right only where they are right for all rows."""
    plain, both, rich = (MixtureSource(sources, [1.0] * len(sources)) for sources in _kinds())
    assert [m.natural for m in (plain, both, rich)] == [True, False, False]
    assert [m.notes for m in (plain, both, rich)] == [[], ["cut"], ["cut", "cut"]]


def _kinds() -> list[list[Any]]:
    return [[Bare("a", 3), Bare("b", 2)], [Bare("a", 3), Rich("b", 2)], [Rich("a", 3), Rich("b", 2)]]


def test_another_epoch_changes_which_rows_the_part_has_and_nothing_else() -> None:
    first: Any = mix([Rich("a", 10), Bare("b", 2)], [0.3, 1.0])
    seen: list[str] = []
    for epoch in range(10):
        now = first.at(epoch)
        assert (len(now), now.name, now.fingerprint, now.epoch) == (5, first.name, first.fingerprint, epoch)
        rows = [now.locate(row)[1] for row in range(5)]
        assert rows[:3] == sorted(set(rows[:3]))
        assert rows[3:] == [0, 1]
        seen += [now.key(row) for row in range(3)]
    assert {key: seen.count(key) for key in seen} == {f"key {n}": 3 for n in range(10)}


def test_weights_are_one_each_or_none_and_take_at_least_a_row() -> None:
    one, two = Bare("a", 10), Bare("b", 4)
    assert mix([one]) is mix([one], [1.0]) is one
    assert len(mix([one], [2.0])) == 20
    assert len(mix([one, two])) == 14
    assert len(mix([one, two], [0.06, 0.5])) == 1 + 2
    for weights, message in (
        ([1.0], "1 weights for 2 sources"),
        ([1.0, 0.12], "weight 0.12 of b takes none of its 4 rows"),
        ([0.05, 1.0], "weight 0.05 of a takes none of its 10 rows"),  # half a row is rounded to none
        ([-1.0, 1.0], "weight -1 of a takes none"),
        ([float("inf"), 1.0], "weight inf of a takes none of its 10 rows"),
    ):
        with pytest.raises(ValueError, match=message):
            mix([one, two], weights)
    with pytest.raises(ValueError, match="no data: name at least one source"):
        mix([])
