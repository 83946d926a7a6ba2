"""What files and runs of earlier versions hold: fingerprints, digests and names that must not change unnoticed."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kiloword.addresses import Address
from kiloword.data import files
from kiloword.data.feature_store import TableFile
from kiloword.data.files import lookup_table
from kiloword.data.remote.config import RemoteConfig
from kiloword.data.remote.file import RemoteFile
from kiloword.data.remote.transport import Stat
from kiloword.data.scenes import open_scenes
from kiloword.data.sources import digest
from kiloword.data.sources.extra_captions import WithCaptions
from kiloword.data.sources.folder import Folder
from kiloword.data.sources.map_style import MapStyleSource
from kiloword.data.sources.mixture import MixtureSource
from kiloword.data.sources.tables import TableSource
from kiloword.data.tars import catalogue
from kiloword.data.tars.index import COLUMNS, Header, make_index, open_index, write_index
from kiloword.data.tars.shards import TarSource
from kiloword.features.tables import content_of
from tars import write_tar

MEMBERS = {"a.jpg": b"one", "a.txt": b"a dog", "b.json": b'{"caption": "a cat"}', "b.png": b"two", "b.cls": b"1"}

FINGERPRINTS = {
    "shards": "fa377cec2a8c6065910938fde67d01ed",
    "folder": "4cfba267bb4a135fa861c373ce4614c6",
    "table": "f1e34f1c5f011a667c7d981c98ca36ae",
    "mixture": "26131a3cccfdab34f93ec2f73836b7f9",
    "captions": "d2b3cebf24d3192d2400d86b87e579c1",
    "captions alone": "c1cb549603650cc3e0372227bc154f26",
    "own": "505c579a51d465ca3c14e520d81d6126",
    "scenes": "scenes-v1-6814ba94c00a81e0",
    "inner": "scenes-v1-048a078739b04d11",
    "questions": "questions-v1-010a08c2587ee190",
}
SAMPLED = {
    "shards": "aed838afcefbcd7a02e125b1e66f942a",
    "folder": "21d726afe072ce16a3375393726319bd",
    "table": "cec2c979413af5cac57eeb5d3486d26d",
    "mixture": "110ca95127836665c35b8eab5535c4b6",
    "own": "",
}
WHOLE = ("7887e74ef740f80c89dff7287104dbf6", "830b8f1eb1d4822a33259eb1ef95d321")
INDEX = "21e8a1bb87b14384"
FALLBACK = "6bd20ee855f1a614bba57427-a.tar.kwindex"
REMOTE = [
    "0 é.tar",
    "585e3b2337de200f02df574c-000002",
    "585e3b2337de200f02df574c.sha256",
    "3cb329c6635e9ce662300146-0_é.tar.kwindex",
    "803263804713731508",
]
WHOLE_BLOCK = "01a4bedec3a42ab19c5cb57e-000000"
LOOKUP = [[1957948516733239095, 3405396810240292928, 8453121595177857668], [7, 5, 6]]
IDENTITY = "ba8aa4ec8061366afe1d7de15ac9eb1f"
CATALOGUE = b"d732c6be860e019351f99173fa6ae612"
CONTENT = "071d3a797d3f20e6bce2ccaa917f0ab1"


@pytest.fixture
def sources(tmp_path: Path) -> dict[str, Any]:
    """A source of every kind, of bytes that no library makes."""
    tars = [write_tar(tmp_path / name, members) for name, members in (("0.tar", MEMBERS), ("é.tar", {"c.png": b"3"}))]
    for tar in tars:
        open_index(tar, digest=True)
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, content in (MEMBERS | {"notes.md": b"not read"}).items():
        (folder / name).write_bytes(content)
    (folder / "table.csv").write_bytes(b"image,caption\na.jpg,a dog\nb.png,a cat\na.jpg,a hound\n")
    shards, table = TarSource("shards", tars), TableSource("table", folder / "table.csv")
    extra: Any = type("Extra", (), {"fingerprint": "f" * 32, "path": Path("more.parquet")})()
    arrays = [(np.full((2, 2, 3), n, np.uint8), [f"level {n}", "level"]) for n in range(20)]
    return {
        "shards": shards,
        "folder": Folder("folder", folder),
        "table": table,
        "mixture": MixtureSource([shards, table], [2.0, 0.5]),
        "captions": WithCaptions(shards, [extra]),
        "captions alone": WithCaptions(shards, [extra], raw_captions=False),
        "own": MapStyleSource([(b"encoded", "a dog"), (b"other", []), *arrays]),
        "scenes": open_scenes("scenes:val?n=9&size=48"),
        "inner": open_scenes("scenes?inner=1"),
        "questions": open_scenes("scenes:test?task=vqa"),
    }


def test_fingerprints_of_data(sources: dict[str, Any]) -> None:
    assert {name: source.fingerprint for name, source in sources.items()} == FINGERPRINTS


def test_digests_of_what_is_stored(sources: dict[str, Any]) -> None:
    plain = ("shards", "folder", "table", "mixture", "own")
    assert {name: digest.sampled(sources[name]) for name in plain} == SAMPLED
    assert (digest.whole(sources["shards"]), sources["shards"].digest) == WHOLE
    assert digest.whole(sources["mixture"]) == "", "a table has no digest of its own"
    assert digest.whole(MixtureSource([sources["shards"]] * 2, [1.0, 1.0])) not in ("", digest.whole(sources["shards"]))


def test_an_index_is_written_as_ever() -> None:
    """Three blocks; the header's own line is of the digests of all that follows."""
    rows = 1100
    table = np.arange(rows * COLUMNS, dtype=np.int64).reshape(rows, COLUMNS) % 97
    keys = b"".join(b"%d" % n for n in range(rows))
    table[:, -1] = np.cumsum([len(b"%d" % n) for n in range(rows)])
    index = make_index(Header(size=10**6, mtime_ns=7, samples=rows, digest="old", note="cut"), table, keys)
    out = io.BytesIO()
    write_index(out, index)
    assert len(index.header.blocks) == 3
    assert hashlib.sha256(out.getvalue()).hexdigest()[:16] == INDEX


def test_names_in_the_cache_folder() -> None:
    assert files.fallback("/data/a.tar", ".kwindex", "/cache") == "/cache/" + FALLBACK
    address, config = Address("https://host/a/0%20é.tar", "", "?v=1"), RemoteConfig(block=1000)
    file = RemoteFile(address, Stat(2500, "tag", True), config)
    names = [file.name, file.block_name(2), file.sums.name, file.index.name, str(file.times()[1])]
    assert names == REMOTE
    whole = RemoteFile(address, Stat(2500, "tag", False), config)
    assert (whole.block_size, whole.block_name(0)) == (2500, WHOLE_BLOCK)


def test_keys_of_a_feature_store() -> None:
    file = TableFile(
        name="n", dim=2, teacher="t", teacher_fingerprint="tf", precision="fp32", dtype="fp16", data="d",
        fingerprint="f", contents=("c",), rows=5, part=2,
    )  # fmt: skip
    assert file.identity() == IDENTITY
    assert catalogue._digest(b"text") == CATALOGUE
    places = np.array([5, 6, 7], np.uint64)
    assert lookup_table([b"a", b"b", b"c"], places).tolist() == LOOKUP
    assert content_of(torch.arange(12, dtype=torch.uint8).reshape(3, 2, 2), ["a", "\ud800"]).hex() == CONTENT
