"""Data without a split, in two parts by key: `train-part:SRC` and `val-part:SRC`."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from kiloword.data.feature_store import contents
from kiloword.data.reading import eval_batches
from kiloword.data.sources.held_out import HELD_OUT, is_held_out
from kiloword.data.sources.open import open_source
from kiloword.data.sources.optional import keys
from tars import pairs, write_tar


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    write_tar(folder / "0.tar", pairs(40))
    write_tar(folder / "1.tar", pairs(40, 40))
    return folder


def test_the_parts_are_the_whole_and_share_no_key(photos: Path) -> None:
    train, val = open_source(f"train-part:{photos}"), open_source(f"val-part:{photos}")
    assert not set(keys(train)) & set(keys(val))
    assert sorted([*keys(train), *keys(val)]) == sorted(keys(open_source(str(photos))))
    assert all(is_held_out(str(key)) for key in keys(val))
    assert train.name == f"train-part:{photos}"
    assert len({train.fingerprint, val.fingerprint, open_source(str(photos)).fingerprint}) == 3
    assert not contents(train) & contents(val)  # a feature store of one part does not pass as one of the other


def test_rows_of_a_part_are_those_of_its_keys(photos: Path) -> None:
    val = pickle.loads(pickle.dumps(open_source(f"val-part:{photos}")))  # as a loader worker gets it
    for row, key in enumerate(keys(val)):
        assert val.record(row).key == key
        assert val.captions(row) == [f"image {int(str(key))}"] == val.record(row).captions
    (batch,) = eval_batches(val, 32)
    assert batch.keys == keys(val)


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
    assert not hasattr(val, "at")


def test_an_empty_part_and_a_missing_source_are_refused(tmp_path: Path) -> None:
    few = tmp_path / "few"
    write_tar(few / "0.tar", pairs(2))
    with pytest.raises(ValueError, match=r"of the 2 images .* a share of 10% is held out by key, which here is 0"):
        open_source(f"val-part:{few}")
    with pytest.raises(ValueError, match="no such file or folder"):
        open_source("val-part:nowhere")
