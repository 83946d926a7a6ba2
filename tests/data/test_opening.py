"""What a name of data stands for, and its rows in parts."""

from __future__ import annotations

from pathlib import Path

import pytest

from kiloword.data.open import open_source
from kiloword.data.reading import captions_of, eval_batches
from kiloword.types import BadSample, Record, Skipped
from tars import noise, pairs, write_tar


def test_a_file_named_scenes_goes_before_the_drawn_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(open_source("scenes?n=3", 32)) == 3
    assert open_source("scenes:val?n=3", 32).record(0).image.shape == (32, 32, 3)  # type: ignore[union-attr]
    write_tar(tmp_path / "scenes" / "0.tar", pairs(2))
    assert len(open_source("scenes")) == 2
    with pytest.raises(ValueError, match="no such file"):
        open_source("scenesque")


class Small:
    """Rows that are read one by one; some have a label, some are bad."""

    name, fingerprint = "small", "f"

    def __len__(self) -> int:
        return 7

    def record(self, row: int) -> Record:
        if row == 4:
            raise BadSample("damaged")
        return Record(
            f"k{row}", noise(8, 8, row), [f"said {row}"] * (row != 6), row if row == 2 else None, {"row": row}
        )


def test_evaluation_in_parts() -> None:
    batches = list(eval_batches(Small(), 4, batch=2, parts=[range(1, 4), range(5, 5), range(3, 7, 2)]))
    assert [batch.rows for batch in batches] == [[1, 2], [3], [3, 5]]
    assert [None if b.labels is None else b.labels.tolist() for b in batches] == [[-1, 2], None, None]
    (whole,) = eval_batches(Small(), 4)
    assert (whole.rows, whole.keys[4], len(whole.images)) == ([0, 1, 2, 3, 5, 6], "k5", 6)
    assert (whole.captions[-1], whole.infos[-1]) == ([], {"row": 6})
    assert whole.skipped == [Skipped(4, "row 4", "damaged")]
    with pytest.raises(ValueError, match="batch is 0"):
        eval_batches(Small(), 4, batch=0)
    assert list(captions_of(Small(), 3)) == ["said 0", "said 2"], "every second row of 7, of which one is bad"
    assert list(captions_of(Small(), 7)) == [f"said {n}" for n in (0, 1, 2, 3, 5)]
