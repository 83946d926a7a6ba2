"""Search among a million vectors: all of them exactly, usearch as `kiloword index` uses it, and LanceDB.

Vectors are drawn around centres, queries near vectors. Recall is the share of the exact ten best among the listed.
Needs `pip install usearch lancedb`. One thread.

    python bench/index.py [--n 1000000 --dim 128 --json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "RAYON_NUM_THREADS", "LANCE_CPU_THREADS", "TOKIO_WORKER_THREADS"), "1")

import lancedb
import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor
from usearch.index import Index

from kiloword.apps.search.nearest import EFFORT, LISTED, WIDTH

CENTRES, SPREAD, NEAR = 2_000, 0.7, 0.05  # standard deviations of vectors from centres, of queries from vectors
QUERIES, BEST = 100, 10
Rows = NDArray[np.int64]


def drawn(n: int, dim: int) -> tuple[Tensor, Tensor]:
    """Vectors [n, dim] and queries [QUERIES, dim] of norm 1."""
    random = torch.Generator().manual_seed(0)
    centres = torch.randn(CENTRES, dim, generator=random)
    vectors = centres[torch.randint(0, CENTRES, (n,), generator=random)]
    vectors += SPREAD * torch.randn(n, dim, generator=random)
    vectors = torch.nn.functional.normalize(vectors, dim=1)
    queries = vectors[torch.randperm(n, generator=random)[:QUERIES]] + NEAR * torch.randn(
        QUERIES, dim, generator=random
    )
    return vectors, torch.nn.functional.normalize(queries, dim=1)


def measured(
    name: str, build_s: float, mb: float, truth: list[Rows], search: Callable[[int], Rows]
) -> dict[str, object]:
    """A row: seconds to build, megabytes on disk, milliseconds of a query (median, most), recall."""
    seconds, recalls = [], []
    for n in range(QUERIES):
        began = time.perf_counter()
        rows = search(n)
        seconds.append(time.perf_counter() - began)
        recalls.append(float(np.isin(truth[n], rows).mean()))
    row = {
        "name": name,
        "build_s": round(build_s, 1),
        "mb": round(mb),
        "median_ms": round(1000 * float(np.median(seconds)), 2),
        "most_ms": round(1000 * max(seconds), 2),
        "recall": round(float(np.mean(recalls)), 4),
    }
    print(json.dumps(row), flush=True)
    return row


def size_mb(folder: Path) -> float:
    """Size of a folder's files."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e6


def exact(vectors: Tensor, query: Tensor, best: int) -> Rows:
    """The rows of the best, in blocks as a library is scored."""
    return torch.cat([block @ query for block in vectors.split(4096)]).topk(best).indices.numpy()


def with_usearch(vectors: Tensor, queries: Tensor, truth: list[Rows], folder: Path) -> dict[str, object]:
    """HNSW over half-precision vectors."""
    index = Index(ndim=vectors.shape[1], metric="ip", dtype="f16", connectivity=WIDTH, expansion_add=EFFORT)
    began = time.perf_counter()
    for start in range(0, len(vectors), 50_000):
        part = vectors[start : start + 50_000].numpy()
        index.add(np.arange(start, start + len(part)), part, threads=1)
    index.save(str(folder / "index"))
    build_s = time.perf_counter() - began
    index.expansion_search = LISTED
    return measured(
        f"usearch, {LISTED} listed", build_s, size_mb(folder), truth,
        lambda n: index.search(queries[n].numpy(), LISTED).keys.astype(np.int64),
    )  # fmt: skip


def with_lance(vectors: Tensor, queries: Tensor, truth: list[Rows], folder: Path) -> list[dict[str, object]]:
    """LanceDB without an index, with IVF-PQ and with IVF-HNSW-SQ, each at some numbers of probed parts."""
    dim = vectors.shape[1]
    batch = pa.table({
        "row": np.arange(len(vectors)),
        "vec": pa.FixedSizeListArray.from_arrays(pa.array(vectors.numpy().ravel()), dim),
    })  # fmt: skip
    began = time.perf_counter()
    table = lancedb.connect(folder).create_table("photos", batch)
    written = time.perf_counter() - began

    def search(n: int, probes: int = 20, kind: str = "") -> Rows:
        query = table.search(queries[n].numpy()).distance_type("dot").select(["row", "_distance"]).limit(LISTED)
        query = query.nprobes(probes).ef(LISTED) if "HNSW" in kind else query.nprobes(probes)
        return query.to_arrow()["row"].to_numpy()

    rows = [measured("lancedb, no index", written, size_mb(folder), truth, search)]
    for kind in ("IVF_PQ", "IVF_HNSW_SQ"):
        began = time.perf_counter()
        table.create_index(metric="dot", vector_column_name="vec", index_type=kind)
        build_s = written + time.perf_counter() - began
        for probes in (20, 100):
            name = f"lancedb {kind}, {probes} parts probed"
            rows.append(measured(name, build_s, size_mb(folder), truth, partial(search, probes=probes, kind=kind)))
    return rows


def main() -> None:
    """Measure, print a line for each way, and write --json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    vectors, queries = drawn(args.n, args.dim)
    truth = [exact(vectors, query, BEST) for query in queries]
    rows = [measured("exact", 0.0, 0.0, truth, lambda n: exact(vectors, queries[n], LISTED))]
    with tempfile.TemporaryDirectory() as folder:
        for name in ("usearch", "lance"):
            (Path(folder) / name).mkdir()
        rows.append(with_usearch(vectors, queries, truth, Path(folder) / "usearch"))
        rows += with_lance(vectors, queries, truth, Path(folder) / "lance")
    if args.json is not None:
        args.json.write_text(json.dumps({"n": args.n, "dim": args.dim, "rows": rows}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
