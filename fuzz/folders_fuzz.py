"""Model folders of strangers: config, tokenizer and weights changed by structure, not only by bytes.

Each is loaded, and scores an image against texts; or it is refused by one message. Anything else is a finding: another
error, more than 10 seconds, more than 2 GB.

    python fuzz/folders_fuzz.py 2000
"""

from __future__ import annotations

import json
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from PIL import Image

from kiloword.api import load
from kiloword.config.recipes import ModelFile, sizes
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.methods.registry import preset
from kiloword.models.build import build
from kiloword.models.model_folder import save_model

SECONDS, MEMORY = 10, 2 << 30  # of one folder; MEMORY: beyond what the program has before the first
METHODS = ("siglip", "clip", "llip", "coca", "sycoca", "prolip", "siglip+compose", "pcme++", "vqa")
TEXTS = ["a dog on the grass", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!", "two 犬   é \U0001f600"]
NUMBERS = (0, -1, 1, 2, 3, 7, 63, 1000, 4096, 10**5, 10**6, 10**9, 2**31, 2**63, 10**30, 0.5, -0.0, 1e-45, 1e308)
VALUES: tuple[Any, ...] = (
    *NUMBERS,
    *(float("nan"), float("inf"), -float("inf"), None, True, False, "", "x", "os:abort", "a" * 10_000, [], {}, [[]]),
    *([0], [1, 2, 3], {"a": 1}, ["unc", "cls", "pad"], ["cls"] * 500, {"type": "Sequence"}),
)


PARTS: dict[str, list[Any]] = {  # of a tokenizer.json
    "normalizer": [
        {"type": "Sequence", "normalizers": [{"type": "NFKD"}] * 20},
        {"type": "Replace", "pattern": {"Regex": r"\s+"}, "content": " "},
        {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
        {"type": "Precompiled", "precompiled_charsmap": "BAAAAAAAAABhYWFh"},
        {"type": "Lowercase"},
    ],
    "pre_tokenizer": [
        {"type": "Split", "pattern": {"String": ""}, "behavior": "Isolated", "invert": False},
        {"type": "FixedLength", "length": 0},
        {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
    ],
    "decoder": [{"type": "WordPiece"}, None],
    "padding": [
        {"strategy": {"Fixed": 10**8}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0}
        | {"pad_type_id": 0, "pad_token": "x"}
    ],
    "truncation": [{"direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": 0}],
    "added_tokens": [[{"id": 5, "content": "", "single_word": False, "lstrip": False, "rstrip": False}
        | {"normalized": False, "special": False}], [], [{}] * 1000],
}  # fmt: skip


class Broken(Exception):
    """A folder was neither loaded nor refused."""


def base(out: Path, method: str) -> Path:
    """A fresh model of size "debug"."""
    tokenizer = Tokenizer.train(["a dog on the grass", "two cats and a dog"] * 20, 300)
    config = sizes()["debug"]
    text = replace(config.text, vocab=tokenizer.vocab, special=tokenizer.roles.ids())
    file = ModelFile(method=method, settings={}, model=replace(config, text=text))
    save_model(out, build(file.model, preset(method), seed=0), tokenizer, file)
    return out


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths into plain data; of long lists and vocabularies the first few."""
    yield at
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items)[:40]:
        yield from places(inner, (*at, key))


def changed(value: Any, rng: random.Random) -> Any:
    """Plain data with one value that is another, is gone, or stands there twice."""
    value = json.loads(json.dumps(value))
    *path, last = rng.choice([place for place in places(value) if place])
    inner = value
    for key in path:
        inner = inner[key]
    match rng.randrange(8):
        case 0:
            del inner[last]
        case 1:
            inner[last] = json.loads(json.dumps(rng.choice(VALUES)))
        case 2 if isinstance(inner, dict):
            inner[rng.choice(("x", "type", "size", "é\x1b[2J"))] = rng.choice(VALUES)
        case 3 if isinstance(inner[last], int | float):
            inner[last] = inner[last] * rng.choice((2, 3, -1, 1000)) + rng.choice((0, 1))
        case _:
            inner[last] = rng.choice(NUMBERS)
    return value


def changed_tokenizer(document: dict[str, Any], rng: random.Random) -> Any:
    if rng.random() < 0.5:
        kind = rng.choice(list(PARTS))
        return {**document, kind: rng.choice(PARTS[kind])}
    return changed(document, rng)


def changed_weights(raw: bytes, rng: random.Random) -> bytes:
    """The header's numbers, names and length, the file's length, its bytes."""
    length = struct.unpack("<Q", raw[:8])[0]
    header, body = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    match rng.randrange(6):
        case 0:
            return raw[: rng.randrange(len(raw))]
        case 1:
            return struct.pack("<Q", rng.choice((0, 1, length - 1, length + 8, 2**31, 2**63))) + raw[8:]
        case 2:
            other = bytearray(raw)
            for _ in range(rng.choice((1, 8, 100))):
                other[rng.randrange(rng.choice((8 + length, len(raw))))] = rng.randrange(256)
            return bytes(other)
        case 3:
            text = json.dumps(header)
            name = json.dumps(next(iter(header)))
            text = text.replace("{" + name, "{" + f"{name}: {json.dumps(next(iter(header.values())))}, {name}", 1)
        case 4:
            header["x" * rng.choice((1, 10_000))] = {
                "dtype": rng.choice(("F32", "U8", "F4", "x")),
                "shape": [rng.choice((0, 1, 2**40, 2**62))] * rng.choice((1, 3, 100)),
                "data_offsets": [len(body), len(body) + rng.choice((0, 4, 2**50))],
            }
            text = json.dumps(header)
        case _:
            text = json.dumps(changed(header, rng))
    return struct.pack("<Q", len(text.encode())) + text.encode() + body


def mutant(folder: Path, rng: random.Random) -> None:
    """Change one to three things of a folder in place."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        what = rng.choice(("config.json", "config.json", "tokenizer.json", "model.safetensors"))
        path = folder / what
        if what == "model.safetensors":
            raw = path.read_bytes()
            path.write_bytes(changed_weights(raw, rng) if len(raw) > 8 and raw[8:9] == b"{" else raw[:-1])
            return
        change = changed if what == "config.json" else changed_tokenizer
        text = json.dumps(change(json.loads(path.read_text(encoding="utf-8")), rng))
        path.write_text(text, encoding="utf-8")


def use(folder: Path) -> str:
    """What becomes of a folder: "loaded" and used, or "refused" by one message. Raises: Broken."""
    image = Image.fromarray(np.arange(40 * 40 * 3, dtype=np.uint8).reshape(40, 40, 3))
    try:
        matcher = load(folder)
        scores = matcher.score([image], TEXTS)
    except ValueError as error:
        if isinstance(error, UnicodeError) or not str(error).strip() or len(str(error)) > 2000:
            raise Broken(f"no message: {error!r}") from error
        return "refused"
    if scores.shape != (1, len(TEXTS)):
        raise Broken(f"scores of shape {tuple(scores.shape)}")
    return "loaded"


@dataclass
class Figures:
    """Of all folders that were tried."""

    outcomes: Counter[str] = field(default_factory=Counter)
    slowest: float = 0.0  # seconds of processor time
    broken: list[str] = field(default_factory=list)


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    def stop(signum: int, frame: FrameType | None) -> None:
        raise Broken(f"more than {seconds} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def attempt(count: int, work: Path, seed: int = 0) -> Figures:
    """Try folders. Args: work: an empty folder to make them in."""
    figures = Figures()
    bases = [base(work / "bases" / str(n), method) for n, method in enumerate(METHODS)]
    for n in range(count):
        rng, folder = random.Random(f"{seed} {n}"), work / "mutant"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(bases[n % len(bases)], folder)
        mutant(folder, rng)
        before = time.process_time()
        try:
            with limited(60):
                outcome = use(folder)
        except Exception as error:
            outcome = "broken"
            figures.broken.append(f"{n} ({METHODS[n % len(bases)]}): {type(error).__name__}: {error}"[:300])
        figures.outcomes[outcome] += 1
        took = time.process_time() - before
        figures.slowest = max(figures.slowest, took)
        if took > SECONDS:
            figures.broken.append(f"{n}: {took:.1f} s")
    return figures


def main(count: int) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as work:
        use(base(Path(work) / "warm", "siglip"))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
        figures = attempt(count, Path(work))
    gained = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    for line in figures.broken:
        print(line)
    outcomes = ", ".join(f"{n:,} {outcome}" for outcome, n in sorted(figures.outcomes.items()))
    print(
        f"{count:,} folders: {outcomes}; slowest {figures.slowest:.2f} s; {gained:.0f} MB beyond {before / 1024:.0f} MB"
    )
    raise SystemExit(bool(figures.broken))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2000)
