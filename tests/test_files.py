"""Files that are whole, and folders in which one process is at work, whatever is killed."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from counting import opened_in
from holding import held_by_another, process
from kiloword.cli.main import main
from kiloword.files import Lock, SaveError, atomic, is_taken, sync, write_atomic
from tars import pairs, write_tar

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


def test_a_file_is_on_disk_before_it_has_its_name_and_then_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a power cut leaves an empty file of that name, or the old one after the new one was promised."""
    events: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def synced(handle: int) -> None:
        at = os.readlink(f"/proc/self/fd/{handle}")
        events.append(
            f"sync {Path(at).relative_to(tmp_path)} {os.fstat(handle).st_size if not os.path.isdir(at) else ''}"
        )
        fsync(handle)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", lambda self, to: events.append(f"name {to.name}") or replace(self, to))
    write_atomic(tmp_path / "in" / "a", b"seven b")
    assert [event.strip() for event in events] == ["sync in/.a.tmp 7", "name a", "sync in"]
    sync(tmp_path)
    assert opened_in(tmp_path) == []


def test_threads_wait_for_each_other_too(tmp_path: Path) -> None:
    path, data = tmp_path / "a", [bytes([n]) * 50_000 for n in range(8)]
    threads = [threading.Thread(target=write_atomic, args=(path, one)) for one in data]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert path.read_bytes() in data
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


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


@pytest.mark.parametrize("inside", [False, True])
def test_a_lock_is_of_one_process(tmp_path: Path, inside: bool) -> None:
    out, folder = tmp_path / "out", tmp_path / ("out" if inside else "out.parts")
    with held_by_another(out, folder) as other:
        with pytest.raises(ValueError, match=rf"process {other.pid} on \S+ is writing {out}: wait for its end"):
            Lock(out, "writing", folder)
        other.kill()
        other.wait()
    Lock(out, "writing", folder).release()  # what it left keeps nobody out
    assert not list(folder.iterdir())


def test_a_lock_that_was_given_up_leaves_no_file(tmp_path: Path) -> None:
    with Lock(tmp_path):
        assert (tmp_path / ".lock").is_file()
    assert not list(tmp_path.iterdir())


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
