"""What a run reads before its first step from a set of many tars: seconds, memory, bytes and reads of each part.

Makes a set of hard links to one tar, and the file with the rows of all: 40,000 tars of 10,000 samples take 35 GB of
disk, 4,000 tars a tenth. Each start is a process of its own. The tar is in the page cache.

    python bench/startup.py [--tars 40000] [--samples 10000] [--folder DIR] [--starts cold warm]
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from PIL import Image

from kiloword.config.recipes import DataConfig, TextConfig
from kiloword.data import loader, open as sources, sampler
from kiloword.data.reading import captions_of
from kiloword.data.rows import write
from kiloword.data.tar import INDEX, Tar, merged, scan
from kiloword.data.text import tokenizer

BATCH = 256


def make(folder: Path, tars: int, samples: int) -> None:
    """`tars` names of one tar of `samples` small images with captions, and the rows of all."""
    folder.mkdir(parents=True)
    first, image = folder / "00000.tar", io.BytesIO()
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(image, "PNG")
    with tarfile.open(first, "w") as tar:
        for n in range(samples):
            for suffix, body in (("png", image.getvalue()), ("txt", b"caption %d of a small image" % n)):
                info = tarfile.TarInfo(f"{n:09d}.{suffix}")
                info.size = len(body)
                tar.addfile(info, io.BytesIO(body))
    status, rows = first.stat(), scan(f"{first}#0")
    files = [f"{n:05d}.tar#{status.st_size}-{status.st_mtime_ns}" for n in range(tars)]
    for file in files[1:]:
        os.link(first, folder / file.partition("#")[0])
    write(folder / INDEX, merged([(Tar(file, samples, "digest", "", {}, {}), rows) for file in files]))


def counters() -> dict[str, float]:
    """Of this process: seconds of processor time, bytes and calls of reading, memory in MB without mapped files."""
    io_lines = Path("/proc/self/io").read_text().splitlines()
    read = {name: int(value) for name, value in (line.split(": ") for line in io_lines)}
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    private = int(status["RssAnon"].split()[0]) / 1000
    return {"CPU s": time.process_time(), "MB read": read["rchar"] / 1e6, "reads": read["syscr"], "private MB": private}


def start(folder: str) -> None:
    """What `kiloword train` does with its data up to the first batch; prints a line of JSON a part."""

    def measured(part: str, do: Callable[[], Any]) -> Any:
        before, begun = counters(), time.perf_counter()
        result = do()
        after = {"s": time.perf_counter() - begun, **{k: v - before[k] for k, v in counters().items()}}
        print(json.dumps({"part": part} | {k: round(v, 2) for k, v in after.items()}), flush=True)
        return result

    source = measured("open_source", lambda: sources.open_source(folder))
    measured("10,000 captions for the vocabulary", lambda: deque(captions_of(source), 0))
    words, data = tokenizer.Tokenizer.train(["a caption"], 262), DataConfig(sources=(folder,))

    def first() -> Any:
        order = sampler.Order(len(source), BATCH)
        return loader.Loader(source, order, data, TextConfig(vocab=262), 32, words).batch(0)

    measured(f"order and first batch of {BATCH}", first)
    print(
        json.dumps(
            {"rows": len(source), "fingerprint": source.fingerprint, "process, private MB": counters()["private MB"]}
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tars", type=int, default=40_000)
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--folder", type=Path, help="where the set is made, or was made before")
    parser.add_argument("--starts", nargs="+", default=["cold", "warm"], help="names of starts, one after the other")
    parser.add_argument("--start", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.start:
        start(args.start)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary) / "set"
        if not folder.exists():
            make(folder, args.tars, args.samples)
        settings = os.environ | {"KILOWORD_CACHE": f"{temporary}/cache"}
        for name in args.starts:
            print(f"{name} start:", flush=True)
            subprocess.run([sys.executable, __file__, "--start", str(folder)], env=settings, check=True)


if __name__ == "__main__":
    main()
