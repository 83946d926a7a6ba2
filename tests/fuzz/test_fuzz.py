"""The readers on changed inputs, by the properties of `fuzz/`; and inputs that were findings once."""

from __future__ import annotations

import importlib
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

FUZZ = Path(__file__).parents[2] / "fuzz"
NAMES = ("tars", "images", "captions", "configs")


@pytest.fixture(scope="module")
def readers() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FUZZ))
        yield importlib.import_module("readers")


@pytest.fixture(scope="module")
def seeds(readers: ModuleType) -> ModuleType:
    return sys.modules["seeds"]


def read(readers: ModuleType, name: str, data: bytes, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    readers.READERS[name].read(data, folder)


@pytest.mark.parametrize("name", NAMES)
def test_seeds_are_understood(readers: ModuleType, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the fuzzing would stay at the door: most of them raise nothing at all."""
    refused = []
    result_of = readers.result_of

    def watched(call: object) -> object:
        found = result_of(call)
        refused.append(found is None)
        return found

    monkeypatch.setattr(readers, "result_of", watched)
    for seed in readers.READERS[name].seeds():
        read(readers, name, seed, tmp_path)
    assert sum(refused) < len(refused) / 2


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_bytes_give_a_value_or_a_sentence(
    readers: ModuleType, name: str, data: st.DataObject, tmp_path: Path
) -> None:
    raw = bytearray(data.draw(st.sampled_from(readers.READERS[name].seeds())))
    for _ in range(data.draw(st.integers(0, 4))):
        place = data.draw(st.integers(0, len(raw)))
        raw[place : place + data.draw(st.integers(0, 8))] = data.draw(st.binary(max_size=8))
    read(readers, name, bytes(raw), tmp_path)


def findings(seeds: ModuleType) -> list[tuple[str, bytes]]:
    """What once raised something else, or was read otherwise by another decoder."""
    tiff, jpeg, grey = seeds.image("TIFF"), seeds.image("JPEG"), seeds.image("JPEG", "L")
    after = 10 + 12 * struct.unpack_from("<H", tiff, 8)[0]
    inside = seeds.parquet({"image": [b"\x89PNG", b""], "caption": [b"a", None]})
    table = seeds.parquet({"image": ["a.png"], "caption": ["x"]})
    own, words = (seeds.settings_seeds()[n][1:] for n in (4, 5))
    panic = own.replace('"²":'.encode(), b'"\xff\xff":').replace('["Ġ","cat"]'.encode(), b'["\xff\xff","cat"]')
    scan = grey[grey.index(b"\xff\xda") :]
    return [
        ("images", b"\0" + tiff[:after] + struct.pack("<I", 9) + tiff[after + 4 :]),  # a second directory, no size
        ("images", b"\0" + jpeg[:-9] + b"\xff\x4f\xff\xd9"),  # a marker that leads nowhere
        ("images", b"\0" + grey[:-2] + scan),  # a scan again
        ("captions", b"\6" + table.replace(b"image", b"i\xffage")),  # a column's name
        ("captions", b"\6" + table[:4] + b"\xff" * 30 + table[34:]),  # a page
        ("captions", b"\6" + inside.replace(b"\x1c\x15\x0c\x195", b"\x0c\x19\x15\x1c5", 1)),  # a number of rows
        ("captions", b'\4image,caption\n"\n\n\n"\n'),  # a bad line over several
        ("captions", b"\4image,caption\na.png,x\n\xff\n"),  # a bad line that is no text
        ("configs", b"\3" + own.replace(b'"type":"BPE"', b'"kind":"BPE"')),  # a model without a type
        ("configs", b"\3" + words.replace(b'"unk_token": "a"', b'"unk_token": "b"')),  # no token for letters
        ("configs", b"\3" + panic),  # the library panics at a merge of longer words than there are
        ("configs", b"\0" + b"[" * 100_000),
        ("configs", b"\5" + b"[" * 100_000),
    ]


def test_what_was_found_once(readers: ModuleType, seeds: ModuleType, tmp_path: Path) -> None:
    for reader, data in findings(seeds):
        read(readers, reader, data, tmp_path)


@pytest.mark.slow
def test_the_program_counts_what_it_reads(tmp_path: Path) -> None:
    """Without atheris too; a reader that raises is told, and its input kept."""
    words = ["--plain", "--inputs", "300", "--into", str(tmp_path)]
    done = subprocess.run([sys.executable, FUZZ / "run.py", *words], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in NAMES:
        assert f"| {name} | 300 |" in done.stdout
