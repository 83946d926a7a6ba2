"""Images and texts replaced by others of the same size between two runs of one command: what is noticed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from cases import mostly_slow
from kiloword.cli.main import main
from kiloword.data.sources import digest
from kiloword.data.sources.mixture import MixtureSource
from kiloword.data.sources.open import open_source
from kiloword.data.tars.index import open_index
from tars import pairs, photo, write_tar

OTHER = "the data is not what the run began with (images or texts were changed or replaced)"


def tars(folder: Path) -> Path:
    folder.mkdir()
    for n in range(3):
        write_tar(folder / f"{n}.tar", pairs(10, 10 * n))
    return folder


def files(folder: Path) -> Path:
    folder.mkdir()
    for n in range(30):
        (folder / f"{n}.png").write_bytes(photo(n))
        (folder / f"{n}.txt").write_text(f"caption {n}")
    return folder


def table(folder: Path) -> Path:
    files(folder)
    rows = "\n".join(f"{n}.png,caption {n}" for n in range(30))
    (folder / "data.csv").write_text(f"image,caption\n{rows}\n")
    return folder / "data.csv"


def change(path: Path, old: bytes, new: bytes) -> None:
    """Replace the first such bytes of a file by others, as many."""
    raw = path.read_bytes()
    assert old in raw
    assert len(old) == len(new)
    path.write_bytes(raw.replace(old, new, 1))


def pixels(n: int) -> tuple[bytes, bytes]:
    """What an image's pixels are written as, and others."""
    raw = photo(n)
    at = raw.index(b"IDAT") + 10
    return raw[at : at + 8], bytes(255 - byte for byte in raw[at : at + 8])


def train(data: Path, out: Path, steps: int = 2) -> None:
    words = ["train", "siglip", "--size", "debug", "--batch", 8, "--vocab", 300, "--steps", steps, "--extend"]
    main([str(word) for word in (*words, "--data", data, "--out", out)])


CHANGES: dict[str, tuple[Callable[[Path], Path], Callable[[Path], None]]] = {
    "pixels in a tar": (tars, lambda data: change(data / "1.tar", *pixels(13))),
    "a caption in a tar": (tars, lambda data: change(data / "1.tar", b"image 13", b"other 13")),
    "pixels in a folder": (files, lambda data: change(data / "7.png", *pixels(7))),
    "a caption in a folder": (files, lambda data: change(data / "7.txt", b"caption", b"another")),
    "pixels that a table names": (table, lambda data: change(data.with_name("7.png"), *pixels(7))),
}


@pytest.mark.parametrize("what", mostly_slow(CHANGES, 0, 3))
def test_what_was_replaced_is_no_longer_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str) -> None:
    make, replaced = CHANGES[what]
    data = make(tmp_path / "data")
    train(data, tmp_path / "out")
    for file in (path for path in (tmp_path / "data").iterdir() if path.suffix != ".kwindex"):
        os.utime(file, ns=(1, 1))
    train(data, tmp_path / "out", 3)  # touched files are the same
    replaced(data)
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        train(data, tmp_path / "out", 4)
    said = capsys.readouterr().err
    assert end.value.code == 2
    assert f"holds another run: {OTHER}; data_sampled is " in said


def test_a_run_from_before_there_were_digests(tmp_path: Path) -> None:
    """It goes on, and has one from then on."""
    data, out = files(tmp_path / "data"), tmp_path / "out"
    train(data, out)
    config = json.loads((out / "config.json").read_text())
    del config["data_sampled"], config["data_digest"]
    (out / "config.json").write_text(json.dumps(config))
    train(data, out, 3)
    assert len(json.loads((out / "config.json").read_text())["data_sampled"]) == 32


def test_a_bounded_number_of_rows_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rows each time, spread over all; of a mixture, of each source; of drawn scenes none."""
    read: list[int] = []

    class Many:
        name, fingerprint = "many", "abc"

        def __len__(self) -> int:
            return 100_000_000

        def record(self, row: int) -> None:  # type: ignore[empty-body]
            ...

        def stored(self, row: int) -> list[bytes | None]:
            read.append(row)
            return [b"%d" % row, None]

    first = digest.sampled(Many())  # type: ignore[arg-type]
    assert len(set(read)) == digest.SAMPLED
    assert 4e7 < sum(read) / len(read) < 6e7
    assert digest.sampled(Many()) == first  # type: ignore[arg-type]
    assert len(read) == 2 * digest.SAMPLED
    scenes, folder = open_source("scenes?n=9"), open_source(str(files(tmp_path / "data")))
    assert digest.sampled(scenes) == ""
    before = digest.sampled(MixtureSource([scenes, folder], [1.0, 2.0]))
    assert before
    change(tmp_path / "data" / "3.txt", b"caption", b"another")
    assert digest.sampled(MixtureSource([scenes, folder], [1.0, 2.0])) != before


def test_a_missing_image_is_no_error_and_another_digest(tmp_path: Path) -> None:
    data = table(tmp_path / "data")
    before = digest.sampled(open_source(str(data)))
    data.with_name("5.png").unlink()
    after = digest.sampled(open_source(str(data)))
    assert after
    assert after != before


@pytest.mark.slow
def test_index_with_a_digest_of_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the sample missed is noticed: a tar that has changed since is digested again."""
    monkeypatch.setattr(digest, "SAMPLED", 0)
    data = tars(tmp_path / "data")
    main(["data", "index", str(data), "--digest"])
    said = capsys.readouterr().out.splitlines()[-1]
    source = open_source(str(data))
    assert said == f"digest {digest.whole(source)}"
    train(data, tmp_path / "out")
    for tar in data.glob("*.tar"):
        os.utime(tar, ns=(1, 1))
    train(data, tmp_path / "out", 3)
    assert digest.whole(open_source(str(data))) == digest.whole(source)
    change(data / "1.tar", *pixels(13))
    with pytest.raises(SystemExit):
        train(data, tmp_path / "out", 4)
    said = capsys.readouterr().err
    assert f"holds another run: {OTHER}; data_digest is " in said
    change(data / "1.tar", *reversed(pixels(13)))
    train(data, tmp_path / "out", 4)


def test_an_index_without_a_digest_stays_as_it_is(tmp_path: Path) -> None:
    data = tars(tmp_path / "data")
    assert open_index(data / "0.tar").header.contents == ""
    assert digest.whole(open_source(str(data))) == ""
    made = open_index(data / "0.tar", digest=True)
    assert len(made.header.contents) == 32
    assert digest.whole(open_source(str(data))) == ""  # of one tar alone
    assert open_index(data / "0.tar").header == made.header


def test_a_digest_of_what_has_no_index_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["data", "index", str(files(tmp_path / "data")), "--digest"])
    assert end.value.code == 2
    assert "--digest needs local tars" in capsys.readouterr().err
