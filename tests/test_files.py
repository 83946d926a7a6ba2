"""Files that are whole, and folders in which one process is at work, whatever is killed."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from commands import held_by_another, process
from kiloword.files import Lock, SaveError, atomic, is_taken, new_folder, write_atomic

WRITE = """
import sys
from pathlib import Path
from kiloword.files import atomic, new_folder
with new_folder(Path(sys.argv[1])) as work, atomic(work / "sub" / "a.json") as file:
    file.write(b"other")
    file.flush()
    print("writing", flush=True)
    sys.stdin.readline()
"""


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with process(WRITE, out) as other:
        with pytest.raises(ValueError, match=rf"process {other.pid} on \S+ is writing {out}"), new_folder(out):
            pass
        other.kill()
        other.wait()
    assert not is_taken(out)
    with new_folder(out) as work:
        write_atomic(work / "b.json", b"own")
    assert contents(out) == {"b.json": b"own"}


def test_a_new_folder_has_all_or_nothing(tmp_path: Path) -> None:
    out = tmp_path / "in" / "out"

    def fill(error: Exception | None = None) -> None:
        with new_folder(out) as work:
            (work / "sub").mkdir()
            (work / "sub" / "a").write_bytes(b"a")
            if error:
                raise error

    with pytest.raises(KeyError):
        fill(KeyError())
    assert not out.exists()
    out.mkdir()
    fill()
    assert [path.relative_to(out).as_posix() for path in sorted(out.rglob("*"))] == ["sub", "sub/a"]
    with pytest.raises(ValueError, match=f"{out} exists"):
        fill()


def test_a_file_is_on_disk_before_it_has_its_name_and_then_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a power cut leaves an empty file of that name, or the old one after the new one was promised."""
    events: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def synced(handle: int) -> None:
        at = os.readlink(f"/proc/self/fd/{handle}")
        events.append("sync folder" if os.path.isdir(at) else f"sync {os.fstat(handle).st_size} bytes")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", lambda self, to: events.append(f"name {to.name}") or replace(self, to))
    write_atomic(tmp_path / "in" / "a", b"seven b")
    assert events == ["sync 7 bytes", "name a", "sync folder"]
    links = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    assert not [link for link in links if link.is_symlink() and os.readlink(link).startswith(f"{tmp_path}/")]


def test_writers_of_one_file_do_not_mix(tmp_path: Path) -> None:
    path, data = tmp_path / "a", [bytes([n]) * 50_000 for n in range(8)]
    with ThreadPoolExecutor(len(data)) as pool:
        list(pool.map(write_atomic, [path] * len(data), data))
    assert list(contents(tmp_path)) == ["a"]
    assert path.read_bytes() in data


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")

    def fail(error: BaseException) -> None:
        with atomic(tmp_path / "a") as file:
            file.write(b"half")
            raise error

    for error, expected in ((KeyboardInterrupt(), KeyboardInterrupt), (OSError(28, "No space left"), SaveError)):
        with pytest.raises(expected):  # type: ignore[arg-type, var-annotated]
            fail(error)
        assert contents(tmp_path) == {"a": b"old"}


def test_files_of_others_are_not_taken_for_ours(tmp_path: Path) -> None:
    for name in ("notes.tmp", ".hidden", ".a.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_bytes(b"x")
        assert is_taken(tmp_path / name)
        Lock(tmp_path / name).release()
        assert contents(tmp_path / name) == {name: b"x"}


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


def test_a_lock_ends_with_its_process_though_a_worker_lives(tmp_path: Path) -> None:
    """Workers of a loader are forked, and outlive a killed run for a while."""
    code = """
import os, sys, time
from pathlib import Path
from kiloword.files import Lock
lock = Lock(Path(sys.argv[1]))
child = os.fork()
if child == 0:
    print("forked", flush=True)
time.sleep(60)
"""
    with process(code, tmp_path / "out") as other:
        other.kill()
        other.wait()
        Lock(tmp_path / "out").release()
