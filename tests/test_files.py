"""Files that are whole, and folders in which one process is at work, whatever is killed."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tars import pairs, write_tar

from kiloword.cli import main
from kiloword.data.side import TableFile
from kiloword.data.side_writer import SideWriter
from kiloword.files import SaveError, atomic, is_taken, write_atomic
from kiloword.generation.options import GenerationOptions
from kiloword.generation.table import CaptionFile, CaptionWriter
from kiloword.lock import Lock

WRITE = """
import sys
from pathlib import Path
from kiloword.files import atomic
with atomic(Path(sys.argv[1])) as file:
    file.write(b"other")
    file.flush()
    print("writing", flush=True)
    sys.stdin.readline()
"""
HOLD = """
import sys
from pathlib import Path
from kiloword.lock import Lock
lock = Lock(Path(sys.argv[1]), "writing", Path(sys.argv[2]))
print("held", flush=True)
sys.stdin.readline()
"""


@contextmanager
def process(code: str, *words: object) -> Iterator[subprocess.Popen[str]]:
    """Another process, once it has spoken."""
    command = [sys.executable, "-c", code, *map(str, words)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline()
        yield other
        other.kill()


def test_what_a_killed_process_left_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    with process(WRITE, path) as other:
        other.kill()
        other.wait()
    assert [p.name for p in tmp_path.iterdir()] == [".a.json.tmp"]
    assert not is_taken(tmp_path)
    write_atomic(path, b"own")
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {"a.json": b"own"}


def test_the_temporary_file_of_a_living_process_is_left_alone(tmp_path: Path) -> None:
    """The second writer waits, then replaces what the first one wrote."""
    path = tmp_path / "a.json"
    with process(WRITE, path) as other:
        waiting = threading.Thread(target=write_atomic, args=(path, b"own"))
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive()
        assert (tmp_path / ".a.json.tmp").read_bytes() == b"other"
        other.communicate("\n")
        assert other.returncode == 0
        waiting.join(30)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {"a.json": b"own"}


def test_threads_wait_for_each_other_too(tmp_path: Path) -> None:
    path, data = tmp_path / "a", [bytes([n]) * 50_000 for n in range(8)]
    threads = [threading.Thread(target=write_atomic, args=(path, one)) for one in data]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert path.read_bytes() in data
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*args: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", none)
    with atomic(tmp_path / "a") as file:
        file.write(b"own")
        assert len({p.name for p in tmp_path.iterdir()} - {".a.tmp"}) == 1  # of this thread alone
    assert (tmp_path / "a").read_bytes() == b"own"


def _fail(path: Path, error: BaseException) -> None:
    with atomic(path) as file:
        file.write(b"half")
        raise error


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")
    for error, expected in ((KeyboardInterrupt(), KeyboardInterrupt), (OSError(28, "No space left"), SaveError)):
        with pytest.raises(expected):
            _fail(tmp_path / "a", error)
        assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {"a": b"old"}


@pytest.mark.parametrize("name", ["notes.tmp", ".hidden", "config.json"])
def test_files_of_others_are_not_taken_for_ours(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    assert is_taken(tmp_path)
    assert is_taken(tmp_path, {"config.json": b"y"})
    assert is_taken(tmp_path, {"config.json": b"x"}) == (name != "config.json")


# One process at a time

TABLE = TableFile(
    name="t",
    dim=2,
    teacher="a",
    teacher_fingerprint="a",
    precision="fp32",
    dtype="fp32",
    data="d",
    fingerprint="d",
    contents=("d",),
    rows=2,
    part=2,
)
CAPTIONS = CaptionFile(
    model="a",
    model_fingerprint="a",
    precision="fp32",
    options=GenerationOptions(),
    data="d",
    fingerprint="d",
    rows=2,
    part=2,
)


@pytest.mark.parametrize("what", ["embed", "caption"])
def test_two_commands_that_write_one_thing(tmp_path: Path, what: str) -> None:
    out = tmp_path / "out"
    folder = tmp_path / "out.parts" if what == "caption" else out

    def begin() -> object:
        if what == "embed":
            return SideWriter(out, TABLE)
        return CaptionWriter(out, CAPTIONS)

    with process(HOLD, out, folder) as other:
        with pytest.raises(ValueError, match=rf"process {other.pid} on \S+ is writing {out}: wait for its end"):
            begin()
        assert [path.name for path in folder.iterdir()] == [".lock"]
        other.kill()
        other.wait()
    assert begin() is not None  # what it left keeps nobody out


def test_a_lock_that_was_given_up_leaves_no_file(tmp_path: Path) -> None:
    with Lock(tmp_path):
        assert (tmp_path / ".lock").is_file()
    assert not list(tmp_path.iterdir())


def test_a_folder_of_something_else_gets_no_lock(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    with pytest.raises(ValueError, match="is no side table"):
        SideWriter(tmp_path, TABLE)
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


@pytest.mark.parametrize("mode", [0o755, 0o555])
def test_an_index_takes_over_what_a_killed_process_left(
    tmp_path: Path, mode: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside the data, or in the cache folder."""
    tar = write_tar(tmp_path / "photos" / "0.tar", pairs(3))
    tar.parent.chmod(mode)
    main(["data", "index", str(tar)])
    index = next(tmp_path.rglob("*.kwindex"))
    whole = index.read_bytes()
    index.rename(index.with_name(f".{index.name}.tmp"))
    main(["data", "index", str(tar)])
    assert [path.name for path in index.parent.iterdir() if "kwindex" in path.name] == [index.name]
    assert index.read_bytes() == whole
    tar.parent.chmod(0o755)
