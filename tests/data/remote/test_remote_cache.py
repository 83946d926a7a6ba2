"""The folder of fetched files on its own: what is made, kept, counted, given up, and what stays open."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from counting import opened_in
from kiloword.data.remote import cache as remote_cache
from kiloword.data.remote.cache import FileCache
from kiloword.data.remote.errors import Unreachable


def write(content: bytes, made: list[bytes] | None = None) -> Callable[[int], None]:
    def fill(fd: int) -> None:
        os.pwrite(fd, content, 0)
        if made is not None:
            made.append(content)

    return fill


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()} - {"total"}


def total(folder: Path) -> str:
    return (folder / "total").read_text()


def make(cache: FileCache, name: str, size: int, age: int = 0) -> None:
    """Args: age: seconds since it was used last."""
    cache.fetch(name, size, write(b"x" * size))
    stat = (cache.folder / name).stat()
    os.utime(cache.folder / name, ns=(stat.st_atime_ns, stat.st_mtime_ns - age * 10**9))


def is_free(path: Path) -> bool:
    """Whether nobody reads or makes a file."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


@pytest.fixture(autouse=True)
def nothing_stays_open(tmp_path: Path) -> Iterator[None]:
    yield
    assert opened_in(tmp_path) == []


@contextmanager
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(remote_cache, "_PATIENCE", 0.0)
        patch.setattr(remote_cache, "_WAIT", 0.001)
        yield


def test_a_file_is_made_once_and_held_while_it_is_open(tmp_path: Path) -> None:
    cache, made = FileCache(tmp_path / "new" / "folder", 1000), list[bytes]()
    for _ in range(2):
        with cache.opened("a", 3, write(b"abc", made)) as fd, cache.opened("a", 3, write(b"?", made)) as again:
            assert os.pread(fd, 9, 0) == os.pread(again, 9, 0) == b"abc"
            assert not is_free(cache.folder / "a")
        assert is_free(cache.folder / "a")
    cache.fetch("a", 3, write(b"?", made))
    assert made == [b"abc"]
    assert (names(cache.folder), total(cache.folder)) == ({"a"}, "3")
    assert (cache.folder / "a").stat().st_mode & 0o777 == 0o644 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_reading_makes_a_file_young_again(tmp_path: Path) -> None:
    cache = FileCache(tmp_path, 1000)
    make(cache, "a", 3, age=1000)
    make(cache, "b", 3, age=500)
    with cache.opened("a", 3, write(b"?")):
        pass
    assert (tmp_path / "a").stat().st_mtime_ns > (tmp_path / "b").stat().st_mtime_ns


def test_a_file_of_another_length_is_made_again(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"half")
    with FileCache(tmp_path).opened("a", 5, write(b"whole")) as fd:
        assert os.pread(fd, 9, 0) == b"whole"
    assert (tmp_path / "a").read_bytes() == b"whole"


def test_the_oldest_go_and_a_twentieth_stays_free(tmp_path: Path) -> None:
    cache = FileCache(tmp_path, 1000)
    for n in range(10):
        make(cache, f"{n}", 95, age=100 * (n != 3) + n)
    assert total(tmp_path) == "950"
    make(cache, "exactly", 50)
    assert (len(names(tmp_path)), total(tmp_path)) == (11, "1000")
    make(cache, "next", 95)  # 1000 + 95: down to 855, from the oldest on
    assert (names(tmp_path), total(tmp_path)) == ({*"01234567", "exactly", "next"}, "905")


def test_what_dead_processes_left_goes_before_the_oldest(tmp_path: Path) -> None:
    cache = FileCache(tmp_path, 1000)
    make(cache, "old", 500, age=10**6)
    (tmp_path / "dead.part").write_bytes(b"x" * 400)
    (tmp_path / "total").unlink()  # nobody knows how much is there
    make(cache, "new", 450)
    assert names(tmp_path) == {"old", "new"}
    assert total(tmp_path) == "950"


@pytest.mark.parametrize("count", ["", "many", "-5", "99999"])
def test_a_count_that_is_none_or_too_high_is_made_anew(tmp_path: Path, count: str) -> None:
    cache = FileCache(tmp_path, 1000)
    make(cache, "a", 300)
    (tmp_path / "total").write_text(count)
    make(cache, "b", 200)
    assert (names(tmp_path), total(tmp_path)) == ({"a", "b"}, "500")


def test_nothing_is_renamed_while_another_counts(tmp_path: Path) -> None:
    """A listing made meanwhile might miss the file under both names, and the folder would grow beyond its limit."""
    cache, listed = FileCache(tmp_path, 1000), list[set[str]]()

    def count(held: int) -> None:
        time.sleep(0.1)
        listed.append(names(tmp_path))
        os.close(held)

    def fill(fd: int) -> None:
        os.pwrite(fd, b"abc", 0)
        held = os.open(tmp_path / "total", os.O_RDWR)
        fcntl.flock(held, fcntl.LOCK_EX)
        threading.Thread(target=count, args=(held,)).start()

    cache.fetch("a", 3, fill)
    assert (listed, names(tmp_path)) == ([{"a.part"}], {"a"})


def test_files_in_use_are_not_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = FileCache(tmp_path, 100)
    make(cache, "idle", 30)
    with cache.opened("used", 60, write(b"u" * 60)), impatient(monkeypatch):
        with pytest.raises(Unreachable, match=r"is full of files in use: set KILOWORD_REMOTE to a higher limit"):
            cache.fetch("b", 50, write(b"b" * 50))
        assert (names(tmp_path), total(tmp_path)) == ({"used"}, "60")
        cache.fetch("c", 40, write(b"c" * 40))
    assert (names(tmp_path), total(tmp_path)) == ({"used", "c"}, "100")


def test_what_can_never_fit_costs_nothing(tmp_path: Path) -> None:
    cache = FileCache(tmp_path, 1000)
    make(cache, "a", 1000)
    said = r"a file of 1,001 bytes does not fit into .*, which may hold 1,000: set KILOWORD_REMOTE to another limit"
    with pytest.raises(Unreachable, match=said):
        cache.fetch("b", 1001, write(b""))
    assert names(tmp_path) == {"a"}


@pytest.mark.parametrize("limit", [None, 100])
@pytest.mark.parametrize("error", [KeyboardInterrupt("a signal"), ValueError("no network")])
def test_a_failed_fill_leaves_no_file(tmp_path: Path, limit: float | None, error: BaseException) -> None:
    def fail(fd: int) -> None:
        os.pwrite(fd, b"half", 0)
        raise error

    cache = FileCache(tmp_path, limit)
    with pytest.raises(type(error), match=str(error)), cache.opened("a", 10, fail):
        pass
    with pytest.raises(type(error), match=str(error)):
        cache.fetch("a", 10, fail)
    assert names(tmp_path) == set()
    with cache.opened("a", 10, write(b"0123456789")) as fd:
        assert os.pread(fd, 10, 0) == b"0123456789"


def test_who_fetches_ahead_does_not_wait_for_another_maker(tmp_path: Path) -> None:
    with (tmp_path / "a.part").open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        FileCache(tmp_path, 100).fetch("a", 5, write(b"twice"))
    assert names(tmp_path) == {"a.part"}
    with FileCache(tmp_path, 100).opened("a", 5, write(b"whole")) as fd:  # its maker died: made by the next one
        assert os.pread(fd, 5, 0) == b"whole"
    assert names(tmp_path) == {"a"}


def test_what_another_made_meanwhile_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its maker has finished between two looks."""
    cache, made, flock = FileCache(tmp_path, 100), list[bytes](), fcntl.flock

    def late(fd: int, how: int) -> None:
        if how == fcntl.LOCK_EX and not made and os.readlink(f"/proc/self/fd/{fd}").endswith("a.part"):
            write(b"other", made)(fd)
            os.replace(tmp_path / "a.part", tmp_path / "a")
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with cache.opened("a", 5, write(b"again", made)) as fd:
        assert os.pread(fd, 5, 0) == b"other"
    assert made == [b"other"]
    monkeypatch.undo()
    assert names(tmp_path) == {"a"}
    assert is_free(tmp_path / "a")


def test_dropping_leaves_what_is_being_made(tmp_path: Path) -> None:
    for name in ("x-0", "x-1", "x-2.part", "y-0"):
        (tmp_path / name).write_bytes(b"x")
    cache = FileCache(tmp_path)
    cache.drop_all("x-")
    assert names(tmp_path) == {"x-2.part", "y-0"}


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EINVAL, errno.EIO])
def test_file_systems_that_reserve_no_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(fd: int, offset: int, size: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    sizes: list[int] = []
    if number == errno.EIO:
        with pytest.raises(Unreachable, match=r"cannot keep what is fetched \(Input/output error\)"):
            FileCache(tmp_path, 100).fetch("a", 10, sizes.append)
        assert names(tmp_path) == set()
    else:
        FileCache(tmp_path, 100).fetch("a", 10, lambda fd: sizes.append(os.fstat(fd).st_size))
        assert (sizes, names(tmp_path), total(tmp_path)) == ([10], {"a"}, "10")


def test_a_full_disk_gives_up_as_little_as_it_must(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room, reserve = 100, os.posix_fallocate

    def allocate(fd: int, offset: int, size: int) -> None:
        if sum(file.stat().st_size for file in tmp_path.iterdir() if file.name != "total") + size > room:
            os.ftruncate(fd, 1)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(fd, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    cache = FileCache(tmp_path, 10**6)
    for n in range(5):
        make(cache, f"{n}", 20, age=10 - n)
    make(cache, "new", 30)
    assert names(tmp_path) == {"2", "3", "4", "new"}
    with cache.opened("2", 20, write(b"")), cache.opened("new", 30, write(b"")), impatient(monkeypatch):
        with pytest.raises(Unreachable, match="No space left on device"):
            cache.fetch("large", 60, write(b""))
        assert names(tmp_path) == {"2", "new"}
    make(cache, "next", 20)
    assert (names(tmp_path), total(tmp_path)) == ({"2", "new", "next"}, "70")
