"""One reader under fuzz, in a process of its own: `python fuzz/target.py READER INPUTS FOLDER [--plain]`.

Writes FOLDER/result.json: inputs, seconds, memory, findings by their place. `last` holds the input that is read now, so
that it is known when the interpreter dies or hangs.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import random
import resource
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

CPU_SECONDS, WALL_SECONDS = 2.0, 120  # of one input: a finding; the end of the process (other work may hold it up)
MEMORY = 6 << 30  # bytes of address space, libraries and maps included
LONGEST = 1 << 14  # bytes of an input

Read = Callable[[bytes, Path], None]


class Watch:
    """Reads one input after the other and keeps what is found; a finding ends nothing."""

    def __init__(self, read: Read, folder: Path) -> None:
        self.read, self.folder = read, folder
        self.inputs, self.slowest, self.start = 0, 0.0, time.monotonic()
        self.findings: dict[str, str] = {}  # what: file of the input
        self._places: set[str] = set()
        self.work = folder / "work"
        self._before = _memory()

    def __call__(self, data: bytes) -> None:
        (self.folder / "last").write_bytes(data)
        faulthandler.dump_traceback_later(WALL_SECONDS, exit=True)
        self.work.mkdir()
        start = time.process_time()
        try:
            self.read(data, self.work)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            self._found(_place(error), data, str(error))
        seconds = time.process_time() - start
        if seconds > CPU_SECONDS:
            self._found(f"{CPU_SECONDS} s", data, f"took {seconds:.1f} s")
        shutil.rmtree(self.work)
        self.slowest, self.inputs = max(self.slowest, seconds), self.inputs + 1
        if self.inputs % 100 == 0:
            self.write()

    def _found(self, place: str, data: bytes, what: str) -> None:
        if place not in self._places:
            self._places.add(place)
            name = hashlib.blake2b(data, digest_size=6).hexdigest()
            (self.folder / name).write_bytes(data)
            self.findings[f"{place}: {what[:200]}"] = name
            self.write()

    def write(self) -> None:
        result = {
            "inputs": self.inputs,
            "seconds": time.monotonic() - self.start,
            "slowest": self.slowest,
            "megabytes": _memory(),
            "more_megabytes": _memory() - self._before,
            "findings": self.findings,
        }
        (self.folder / "result.json.tmp").write_text(json.dumps(result, indent=1))
        os.replace(self.folder / "result.json.tmp", self.folder / "result.json")


def _memory() -> int:
    """Megabytes at the highest."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def _place(error: BaseException) -> str:
    """One finding for each line that raised it, and for each that it was read by."""
    frames = traceback.extract_tb(error.__traceback__)
    last = [frame for frame in frames if "kiloword" in frame.filename or "readers" in frame.filename][-2:]
    return " < ".join([type(error).__name__, *(f"{Path(frame.filename).name}:{frame.lineno}" for frame in last[::-1])])


def mutations(seeds: list[bytes], rng: random.Random) -> Iterator[bytes]:
    """Without end: a seed, changed in one to eight places."""
    tokens = [
        b"\0",
        b"\xff",
        b"\xff\xff\xff\xff",
        b"\x7f\xff\xff\xff",
        b"-1",
        b"[",
        b"{",
        b'"',
        b"\n",
        b"\\u",
        b"1e999",
    ]
    while True:
        data = bytearray(rng.choice(seeds))
        for _ in range(rng.choice((1, 1, 2, 3, 5, 8))):
            at = rng.randrange(len(data) + 1)
            end = min(len(data), at + rng.choice((1, 1, 2, 4, 8, 64, 512)))
            match rng.randrange(6):
                case 0 | 1:
                    data[at:end] = rng.randbytes(end - at)
                case 2:
                    del data[at:end]
                case 3:
                    data[at:at] = data[at:end] * rng.choice((1, 2, 50))
                case 4:
                    data[at : at + rng.choice((0, 4))] = rng.choice(tokens) * rng.choice((1, 1, 1, 1000))
                case 5:
                    other = rng.choice(seeds)
                    start = rng.randrange(len(other) + 1)
                    data[at:end] = other[start : start + rng.choice((4, 64, 1024))]
        yield bytes(data[:LONGEST])


def main(reader: str, inputs: int, folder: Path, plain: bool) -> None:
    atheris: Any = None
    if not plain:
        import atheris  # type: ignore[no-redef]
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    if atheris:
        with atheris.instrument_imports(include=["kiloword", "PIL"]):
            from readers import READERS
    else:
        from readers import READERS
    watch = Watch(READERS[reader].read, folder)
    seeds = READERS[reader].seeds()
    if atheris is None:
        for data, _ in zip(mutations(seeds, random.Random(reader)), range(inputs), strict=False):
            watch(data)
        watch.write()
        return
    corpus = folder / "corpus"
    corpus.mkdir()
    for n, seed in enumerate(seeds):
        (corpus / f"seed{n}").write_bytes(seed)
    flags = [f"-runs={inputs}", f"-max_len={LONGEST}", "-timeout=3600", "-rss_limit_mb=0", "-seed=1", "-verbosity=0"]
    atheris.Setup([sys.argv[0], *flags, str(corpus)], watch)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), "--plain" in sys.argv)
