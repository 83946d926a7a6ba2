"""Data sets made of others: mixtures with weights, and parts by key."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kiloword.data import edits
from kiloword.data.edits import HELD_OUT, every_row, is_held_out, mix
from kiloword.data.open import open_source
from kiloword.data.reading import eval_batches
from kiloword.data.source import keys
from kiloword.randomness import permutation
from kiloword.types import Record
from tars import pairs, write_tar


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

    natural, notes = False, ["cut"]  # drawn images are not mirrored, nor is a set with some of them

    def key(self, row: int) -> str:
        return f"key {row}"

    def captions(self, row: int) -> list[str]:
        return [f"said {row}"]

    def info(self, row: int) -> dict[str, str]:
        return {"question": f"asked {row}"}


def test_rows_stand_source_by_source_each_as_often_as_its_weight() -> None:
    mixture: Any = mix([Bare("a", 3), Rich("b", 2)], [2.0, 1.0])
    assert (len(mixture), mixture.name) == (8, "2 x a + 1 x b")
    assert [mixture.record(row).key for row in range(8)] == [*["a 0", "a 1", "a 2"] * 2, "b 0", "b 1"]
    assert [mixture.key(row) for row in range(8)] == ["a 0", "a 1", "a 2"] * 2 + ["key 0", "key 1"]
    assert [mixture.captions(row)[0] for row in (0, 5, 6, 7)] == ["read 0", "read 2", "said 0", "said 1"]
    assert [mixture.info(row)["question"] for row in (0, 5, 6, 7)] == ["ask 0", "ask 2", "asked 0", "asked 1"]
    assert (len(every_row(mixture)), [mixture.stored_row(row) for row in range(8)]) == (5, [0, 1, 2, 0, 1, 2, 3, 4])
    assert (mixture.natural, mix([Bare("a", 3), Bare("b", 2)]).natural, mixture.notes) == (False, True, ["cut"])


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


def test_a_large_mixture_draws_its_parts_once_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = list[str]()
    monkeypatch.setattr(edits, "permutation", lambda n, name, what: [permutation(n, name, what), drawn.append(name)][0])
    mixture: Any = mix([Rich(f"many {n}", 10) for n in range(30)], [0.5] * 30)
    for epoch in (0, 1, 0, 1):  # batches around the end of an epoch
        mixture.at(epoch)
    assert len(drawn) == 2 * 30


def test_weights_are_one_each_or_none_and_take_at_least_a_row() -> None:
    one, two = Bare("a", 10), Bare("b", 4)
    assert mix([one]) is mix([one], [1.0]) is one
    assert [len(mix([one], [2.0])), len(mix([one, two])), len(mix([one, two], [0.06, 0.5]))] == [20, 14, 3]
    for weights in ([1.0], [1.0, 0.12], [0.05, 1.0], [-1.0, 1.0], [float("inf"), 1.0]):
        with pytest.raises(ValueError, match="weight"):
            mix([one, two], weights)
    with pytest.raises(ValueError, match="no data"):
        mix([])


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    write_tar(folder / "0.tar", pairs(40))
    write_tar(folder / "1.tar", pairs(40, 40))
    return folder


def test_the_parts_are_the_whole_and_share_no_key(photos: Path) -> None:
    train: Any
    val: Any
    train, val = open_source(f"train-part:{photos}"), open_source(f"val-part:{photos}")
    assert not set(keys(train)) & set(keys(val))
    assert sorted([*keys(train), *keys(val)]) == sorted(keys(open_source(str(photos))))
    assert train.name == f"train-part:{photos}"
    val = pickle.loads(pickle.dumps(val))  # as a loader worker gets it
    (batch,) = eval_batches(val, 32)
    assert batch.keys == keys(val)
    assert batch.captions == [[f"image {int(str(key))}"] for key in batch.keys]
    assert len({train.fingerprint, val.fingerprint, open_source(str(photos)).fingerprint}) == 3


def test_a_key_decides_alone_and_a_tenth_is_held_out(tmp_path: Path, photos: Path) -> None:
    share = np.mean([is_held_out(f"{n:07d}.jpg") for n in range(20_000)])
    assert share == pytest.approx(HELD_OUT, abs=0.01)
    write_tar(tmp_path / "more" / "0.tar", pairs(80, 20))  # other neighbours
    both = set(keys(open_source(f"val-part:{photos}"))) ^ set(keys(open_source(f"val-part:{tmp_path / 'more'}")))
    assert both == {f"{n:04d}" for n in (*range(20), *range(80, 100)) if is_held_out(f"{n:04d}")}


def test_truth_of_scenes_is_that_of_the_rows() -> None:
    whole, val = open_source("scenes:test?n=60"), open_source("val-part:scenes:test?n=60")
    places = [keys(whole).index(key) for key in keys(val)]
    captions = [whole.record(n).captions[0] for n in range(5)]
    assert (val.relevance(captions, range(len(val))) == whole.relevance(captions, places)).all()
    assert val.scene(0) == whole.scene(places[0])


def test_an_empty_part_and_a_missing_source_are_refused(tmp_path: Path) -> None:
    write_tar(tmp_path / "few" / "0.tar", pairs(2))
    for src in (f"val-part:{tmp_path / 'few'}", "val-part:nowhere"):
        with pytest.raises(ValueError, match=r"few|nowhere"):
            open_source(src)
