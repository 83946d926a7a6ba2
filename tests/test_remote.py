"""Remote shards: the same data as local ones, whatever the network does; each byte fetched once, few kept."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from servers import Server
from tars import pairs, write_tar

from kiloword.data.sources import open_source
from kiloword.types import Source

QUICK = "backoff=0.01 timeout=0.5 ahead=0"


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILOWORD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("KILOWORD_REMOTE", QUICK)


def shards(folder: Path, count: int, rows: int = 6) -> dict[str, bytes]:
    """Small tars in a folder, and as a server serves them."""
    tars = [write_tar(folder / f"{n:02d}.tar", pairs(rows, n * rows)) for n in range(count)]
    return {tar.name: tar.read_bytes() for tar in tars}


def everything(source: Source) -> list[tuple[str, object, list[str]]]:
    return [(r.key, r.image, r.captions) for r in map(source.record, range(len(source)))]


def forget(tmp_path: Path) -> None:
    """All pieces, as if they had been given up; indexes stay."""
    for piece in (tmp_path / "cache/remote/pieces").iterdir():
        piece.unlink()


FAULTS = [
    "stall",
    "hang",
    "cut",
    "short",
    "shorter",
    "drop",
    "page",
    "redirect",
    "500",
    "503:0",
    "429:0",
    "408",
    "drip",
]


@pytest.mark.parametrize("piece", ["8MB", "5000"])
def test_remote_equals_local_under_every_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: str) -> None:
    monkeypatch.setenv("KILOWORD_REMOTE", f"{QUICK} piece={piece} timeout=0.3")
    files = shards(tmp_path / "data", len(FAULTS), rows=2)
    local = open_source(str(tmp_path / "data"))
    with Server(files) as server:
        for name, fault in zip(files, FAULTS, strict=True):
            server.faults[f"{name} probe"] = [fault] if fault not in ("drip", "cut", "page") else []
            server.faults[name] = [fault]
        remote = open_source(f"{server.url}/{{00..{len(FAULTS) - 1:02d}}}.tar")
        assert remote.fingerprint == local.fingerprint
        assert everything(remote) == everything(local)
        forget(tmp_path)
        for name, fault in zip(files, FAULTS, strict=True):
            server.faults[name] = [fault, "500", fault]
        assert everything(pickle.loads(pickle.dumps(remote))) == everything(local)
        assert not any(server.faults.values())
