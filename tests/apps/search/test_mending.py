"""The same `kiloword index` again mends a damaged library, and keeps the photos of folders that it cannot read."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from folders import model_folder
from kiloword.apps.search import command, index
from kiloword.apps.search.library import Library
from photo_folders import draw, photos_in, refused

PART = "part-000001"


class Made:
    """Libraries of the same photos, each made once and copied for a test."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.photos = photos_in(root / "photos", 6)

    def copy(self, to: Path, method: str = "siglip", **options: Any) -> Path:
        name = "-".join((method, *map(str, options.values())))
        if not (self.root / name).exists():
            model_folder(self.root / f"model-{method}", method)
            index.main(self.photos, str(self.root / f"model-{method}"), self.root / name, device="cpu", **options)
        return Path(shutil.copytree(self.root / name, to / "library"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("mending"))


def parquet(folder: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    pq.write_table(change(pq.read_table(path := folder / f"{PART}.parquet")), path)


def arrow(folder: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    path = folder / f"{PART}.arrow"
    with pa.ipc.open_file(path) as reader:
        table = change(reader.read_all())
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)


def with_nan(name: str) -> Callable[[pa.Table], pa.Table]:
    """The table with one NaN in a column of vectors."""

    def changed(table: pa.Table) -> pa.Table:
        kind = table.schema.field(name).type
        flat = np.array(table[name].combine_chunks().values.to_numpy(zero_copy_only=False))
        flat[7] = np.nan
        values = pa.FixedSizeListArray.from_arrays(pa.array(flat), kind.list_size)
        return table.set_column(table.schema.get_field_index(name), name, values)

    return changed


def overwritten(folder: Path) -> None:
    """Bytes of the vectors are lost, as on a bad disk."""
    path = folder / f"{PART}.parquet"
    first = np.array(pq.read_table(path)["vec"][0].as_py(), np.float32).tobytes()
    path.write_bytes(path.read_bytes().replace(first, b"\xff" * len(first)))


def truncated(folder: Path) -> None:
    path = folder / f"{PART}.arrow"
    path.write_bytes(path.read_bytes()[:-100])


def garbled(folder: Path) -> None:
    """The description of the one batch of rows is lost."""
    path = folder / f"{PART}.arrow"
    raw = path.read_bytes()
    at = raw.index(b"\xff\xff\xff\xff", 16)
    path.write_bytes(raw[: at + 8] + b"\xff" * 64 + raw[at + 72 :])


CODES = {"codes": "int8"}
DAMAGE = [
    pytest.param("siglip", CODES, lambda folder: (folder / f"{PART}.arrow").unlink(), id="no arrow"),
    pytest.param("siglip", CODES, truncated, id="truncated arrow"),
    pytest.param("siglip", CODES, garbled, id="garbled arrow"),
    pytest.param("siglip", CODES, lambda folder: arrow(folder, lambda t: t.slice(1)), id="fewer rows"),
    pytest.param("siglip", CODES, lambda folder: arrow(folder, with_nan("vec")), id="NaN stored"),
    pytest.param(
        "siglip",
        CODES,
        lambda folder: parquet(folder, lambda t: t.replace_schema_metadata({"scale": "[1]"})),
        id="scale of codes",
    ),
    pytest.param(
        "siglip",
        {"codes": "binary", "vectors": "int8"},
        lambda folder: arrow(folder, lambda t: t.replace_schema_metadata({})),
        id="scale of vectors",
    ),
    pytest.param("siglip", {}, overwritten, id="overwritten vec"),
    pytest.param("siglip", {}, lambda folder: parquet(folder, with_nan("vec")), id="NaN in vec"),
    pytest.param("siglip", {}, lambda folder: parquet(folder, lambda t: t.drop_columns("vec")), id="no vec"),
    pytest.param("prolip", {}, lambda folder: parquet(folder, with_nan("log_var")), id="NaN in log_var"),
    pytest.param("llip", {}, lambda folder: (folder / f"{PART}.arrow").unlink(), id="no tokens"),
    pytest.param("llip", {}, truncated, id="truncated tokens"),
]


@pytest.mark.parametrize(("method", "options", "damage"), DAMAGE)
def test_the_same_command_mends_a_damaged_library(
    made: Made,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    method: str,
    options: dict[str, Any],
    damage: Callable[[Path], object],
) -> None:
    folder = made.copy(tmp_path, method, **options)
    before = Library(folder).features(range(6))
    damage(folder)
    capsys.readouterr()
    index.main(made.photos, None, folder, device="cpu")
    shown = capsys.readouterr()
    assert "6 new, 0 changed, 0 gone" in shown.out
    assert f"{PART} is damaged: its photos are encoded again" in shown.err
    mended = Library(folder)
    assert mended.file.parts == ("part-000002",)
    for name, value in mended.features(range(6)).items():
        torch.testing.assert_close(value, before[name], atol=1e-2, rtol=1e-2)
    command.main(folder, "a dog", device="cpu")


def test_a_damaged_library_takes_new_photos(made: Made, tmp_path: Path) -> None:
    folder = made.copy(tmp_path, **CODES)
    photos = Path(shutil.copytree(made.photos, tmp_path / "photos"))
    shutil.move(made.photos, aside := made.root / "aside")  # the library follows its photos
    try:
        draw(photos / "new.jpg", 50)
        (folder / f"{PART}.arrow").unlink()
        index.main(photos, None, folder, device="cpu")
    finally:
        shutil.move(aside, made.photos)
    assert len(Library(folder)) == 7
    command.main(folder, "a dog", device="cpu")


def test_a_whole_library_is_not_encoded_again(made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for n, (method, options) in enumerate([("siglip", CODES), ("siglip", {}), ("prolip", {}), ("llip", {})]):
        folder = made.copy(tmp_path / str(n), method, **options)
        capsys.readouterr()
        index.main(made.photos, None, folder, device="cpu")
        assert "0 new, 0 changed, 0 gone" in capsys.readouterr().out


@pytest.fixture
def library(tmp_path: Path) -> Path:
    model_folder(tmp_path / "model")
    index.main(photos_in(tmp_path / "photos", 6), str(tmp_path / "model"), tmp_path / "library", device="cpu")
    return tmp_path / "library"


def paths(library: Path) -> list[str]:
    return sorted(path for part in Library(library).parts for path in part.paths)


def broken(monkeypatch: pytest.MonkeyPatch, call: str, path: Path, number: int) -> None:
    """Let a call of `os` fail for a path and what is below it. Root may read what nobody else may."""
    real = getattr(os, call)

    def failing(at: Any = ".", *args: Any, **options: Any) -> Any:
        if isinstance(at, str | os.PathLike) and Path(os.fspath(at)).is_relative_to(path):
            raise OSError(number, os.strerror(number), os.fspath(at))
        return real(at, *args, **options)

    monkeypatch.setattr(os, call, failing)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_photos_of_a_folder_that_cannot_be_read_are_kept(
    library: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    photos = library.parent / "photos"
    before = paths(library)
    (photos / "00.jpg").unlink()
    draw(photos / "new.jpg", 50)
    draw(photos / "deeper.jpg", 51)  # its path begins with "deep", and is not below that folder
    with monkeypatch.context() as patch:
        broken(patch, "scandir", photos / "deep", number)
        index.main(photos, None, library, device="cpu")
    shown = capsys.readouterr()
    assert "2 new, 0 changed, 1 gone" in shown.out
    assert f"cannot be read ({os.strerror(number)}): deep" in shown.err
    assert "3 photos kept" in shown.err
    assert paths(library) == sorted({*before, "new.jpg", "deeper.jpg"} - {"00.jpg"})
    (photos / "deep/01.jpg").unlink()
    index.main(photos, None, library, device="cpu")
    assert "deep/01.jpg" not in paths(library)


@pytest.mark.parametrize("beside", ["02.jpg", "02.txt"])
def test_a_photo_whose_state_cannot_be_read_is_kept(
    library: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], beside: str
) -> None:
    photos = library.parent / "photos"
    (photos / "02.txt").write_text("a dog")
    before = paths(library)
    with monkeypatch.context() as patch:
        broken(patch, "stat", photos / beside, errno.EIO)
        index.main(photos, None, library, device="cpu")
    assert "cannot be read (Input/output error): 02.jpg" in capsys.readouterr().err
    assert paths(library) == before


def test_a_folder_that_cannot_be_read_at_all_is_refused(
    library: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    photos = library.parent / "photos"
    broken(monkeypatch, "scandir", photos, errno.EACCES)
    assert f"Permission denied: {photos}" in refused(capsys, "index", photos, "--out", library)
    assert len(paths(library)) == 6
