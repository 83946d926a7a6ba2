"""Recall against bytes and time: the first numbers of vectors, as float, int8 and bits, with candidates scored again.

Libraries as `kiloword index` makes them, searched by captions' vectors, so that no encoder is timed. Photos of --dev
alone: how often a caption finds its photo among ten. Among --n: these photos, and others that are photos of --train and
half the difference of two more; the share of the ten best by all numbers in float32 that a search has. One thread;
libraries take turns, a few queries each, so that other work on the machine slows all of them.

    kiloword embed MODEL --data photos/dev --dtype fp32 --out features/dev    # and photos/train
    python bench/codes.py --dev features/dev --train features/train [--n 200000 --json FILE --html FILE]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from kiloword.apps.search.codes import CodeKind, code_bytes, column, first
from kiloword.apps.search.library import PART, Library, LibraryFile, create
from kiloword.apps.search.rank import Ranker
from kiloword.report import made_by, page, scatter, section, signed, table, write
from kiloword.stores.features import FeatureStore

DIMS, SMALL = (16, 32, 64, 128), 0.5  # and all; part of a difference that makes another photo
WAYS: dict[str, tuple[CodeKind, int]] = {  # name -> codes, candidates scored again for each photo wanted
    "float": ("float", 0),
    "int8": ("int8", 0),
    "int8, 4 rescored": ("int8", 4),
    "binary": ("binary", 0),
    "binary, 4 rescored": ("binary", 4),
    "binary, 16 rescored": ("binary", 16),
}
BEST, TURN = 10, 10  # photos of a search; queries of a library before it is the next one's turn


def more(photos: Tensor, n: int) -> Tensor:
    """Photos that nobody took, [n, D]: one plus a part of the difference of two others, normalised."""
    random = torch.Generator().manual_seed(0)
    one, plus, minus = (photos[torch.randint(0, len(photos), (n,), generator=random)] for _ in range(3))
    return torch.nn.functional.normalize(one + SMALL * (plus - minus), dim=1)


def library_of(folder: Path, vec: Tensor, dim: int, codes: CodeKind) -> Library:
    """A library of vectors [n, D]: the first `dim` numbers of them, or codes of these with whole vectors beside."""
    short = first(vec, dim) if codes == "float" else vec
    file = LibraryFile(folder="photos", model="model", fingerprint="0", dim=short.shape[1], codes=codes)
    if codes != "float":
        file = LibraryFile(**(vars(file) | {"code_dim": dim}))
    library = create(folder, file)
    for start in range(0, len(vec), PART):
        part = short[start : start + PART]
        names = pa.array([str(n) for n in range(start, start + len(part))])
        none = pa.nulls(len(part), pa.binary())
        library.commit(pa.table({"path": names, "raw": none, "stamp": names, "caption": names, "vec": column(part)}))
    return library


def rankers(root: Path, vec: Tensor) -> dict[tuple[int, str], Ranker]:
    """Searches by number of dimensions and name of the way."""
    made, out = {}, {}
    for dim in (*DIMS, vec.shape[1]):
        for name, (codes, rescore) in WAYS.items():
            library = made.get((dim, codes)) or library_of(root / f"{codes}-{dim}", vec, dim, codes)
            made[dim, codes] = library
            stub: Any = SimpleNamespace(
                model=SimpleNamespace(config=SimpleNamespace(head=SimpleNamespace(dim=library.file.dim)))
            )
            out[dim, name] = Ranker(library, stub, rescore)
    return out


def found(ranker: Ranker, query: Tensor) -> list[int]:
    """The best rows for the vector of a caption [D]."""
    return [match.row for match in ranker.by_image(first(query, ranker.library.file.dim), BEST)]


def own_photos(root: Path, dev: FeatureStore) -> dict[tuple[int, str], float]:
    """Share of the captions of photos that find their own photo among the best."""
    photos, captions = (torch.tensor(np.asarray(x, np.float32)) for x in (dev.images(), dev.texts()))
    owner = np.repeat(np.arange(len(photos)), np.diff(dev.starts))
    searches = rankers(root, photos)
    return {
        way: float(np.mean([own in found(ranker, query) for query, own in zip(captions, owner, strict=True)]))
        for way, ranker in searches.items()
    }


def large(root: Path, vec: Tensor, queries: Tensor) -> dict[tuple[int, str], dict[str, float]]:
    """Recall by the ten best of all numbers, seconds of a search, bytes on disk, of every way."""
    searches = rankers(root, vec)
    exact = [torch.topk(vec @ query, BEST).indices.numpy() for query in queries]
    seconds: dict[tuple[int, str], list[float]] = {way: [] for way in searches}
    shares: dict[tuple[int, str], list[float]] = {way: [] for way in searches}
    for start in range(0, len(queries), TURN):
        for way, ranker in searches.items():
            for n in range(start, min(start + TURN, len(queries))):
                began = time.perf_counter()
                rows = found(ranker, queries[n])
                seconds[way].append(time.perf_counter() - began)
                shares[way].append(float(np.isin(exact[n], rows).mean()))
    return {
        way: {
            "recall": float(np.mean(shares[way])),
            "median_ms": 1000 * float(np.median(seconds[way])),
            "least_ms": 1000 * min(seconds[way]),
            "disk": size(ranker.library.folder, rescored=bool(ranker.rescore)) / len(vec),
        }
        for way, ranker in searches.items()
    }


def size(folder: Path, rescored: bool) -> int:
    """Bytes of a library's files. Args: rescored: with the vectors beside codes."""
    return sum(path.stat().st_size for path in folder.iterdir() if rescored or path.suffix != ".arrow")


def as_rows(
    own: dict[tuple[int, str], float], values: dict[tuple[int, str], dict[str, float]]
) -> list[dict[str, float | str]]:
    """One row for each way and number of dimensions."""
    return [
        {
            "way": name,
            "dim": dim,
            "bytes": code_bytes(WAYS[name][0], dim),
            "own@10": own[dim, name],
            **values[dim, name],
        }
        for name in WAYS
        for dim in sorted({dim for dim, _ in own})
    ]


def as_page(rows: Sequence[dict[str, Any]], n: int, photos: int, captions: int, queries: int) -> str:
    """Recall against bytes and time, as a page."""
    intro = (
        "Embeddings of a model that was trained on prefixes: the first numbers of each vector, as float32, a byte or a "
        "bit for each number. Where the name of a way says so, some of the nearest photos by these are scored again by "
        "whole vectors, which lie on disk in float16: 4 or 16 for each photo that is wanted.\n\nOne thread of a "
        f"machine that did other work too. Times are medians of {queries} searches, for which all ways took turns; the "
        "encoder of the query is not in them."
    )
    whole = next(row for row in rows if row["way"] == "float" and row["dim"] == max(row["dim"] for row in rows))

    def plot(x: str, y: str, x_label: str, y_label: str) -> str:
        series = {name: [(row[x], row[y]) for row in rows if row["way"] == name] for name in WAYS}
        return scatter(series, x_label, y_label, log_x=True, joined=True)

    memory, share = "bytes of a vector in memory", "share of the ten best by all numbers"
    cells = [
        [
            row["way"], row["dim"], row["bytes"], f"{row['disk']:,.0f}", f"{row['own@10']:.3f}", f"{row['recall']:.3f}",
            f"{row['median_ms']:.1f}", f"{whole['median_ms'] / row['median_ms']:.1f}",
        ]
        for row in rows
    ]  # fmt: skip
    header = ["way", "numbers", "bytes", "on disk", "R@10", "recall@10", "ms", "times as fast"]
    sections = [
        section(
            f"{n:,} photos",
            f"{photos:,} photos of Flickr8k's dev, and photos of its train plus half the difference of two others. "
            f"Share of the ten best by {whole['dim']} numbers in float32 that a search has.",
            plot("bytes", "recall", memory, share),
            "The same against the time of a search.",
            plot("median_ms", "recall", "milliseconds of a search", share),
        ),
        section(
            f"{photos:,} photos, {captions:,} captions",
            "How often a caption finds its own photo among the ten best (R@10, text to image).",
            plot("bytes", "own@10", memory, "R@10, text to image"),
        ),
        section(
            "All figures",
            "bytes: of a vector in memory, by which all photos are compared. on disk: bytes of a photo in its files, "
            "with vectors where some are scored again. R@10: of the captions. recall@10, ms and times as fast: "
            f"of a search among {n:,} photos.",
            table(cells, header),
        ),
    ]
    return page("Fewer numbers, bytes and bits", intro, sections)


def main() -> None:
    """Measure, print a table, and write --json and --html."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dev", type=Path, required=True)
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--n", type=int, default=200_000)
    parser.add_argument("--queries", type=int, default=200)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--html", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dev, train = FeatureStore(args.dev), FeatureStore(args.train)
    photos, captions = (torch.tensor(np.asarray(x, np.float32)) for x in (dev.images(), dev.texts()))
    others = more(torch.tensor(np.asarray(train.images(), np.float32)), args.n - len(photos))
    queries = captions[:: len(captions) // args.queries][: args.queries]
    with tempfile.TemporaryDirectory() as root:
        (Path(root) / "own").mkdir()
        own = own_photos(Path(root) / "own", dev)
        rows = as_rows(own, large(Path(root), torch.cat([photos, others]), queries))
    for row in rows:
        print(" | ".join(f"{x:.4g}" if isinstance(x, float) else str(x) for x in row.values()), flush=True)
    if args.json is not None:
        facts = {"n": args.n, "queries": len(queries), "photos": len(photos), "captions": len(captions)}
        args.json.write_text(json.dumps(facts | {"rows": rows}, indent=1), encoding="utf-8")
    if args.html is not None:
        html = as_page(rows, args.n, len(photos), len(captions), len(queries))
        write(args.html, signed(html, made_by([dev.file.teacher], dev.file.data)))


if __name__ == "__main__":
    main()
