"""What is made from a source is joined to it alone, whatever its keys: features, tokens, captions and keep-lists."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from kiloword.cli.main import main
from kiloword.config.recipes import DataConfig
from kiloword.data.open import open_data
from kiloword.model.trunks.lite import EfficientNetLite
from tars import photo, write_tar

N = 12
WORKS = ["--device", "cpu", "--workers", "0"]


def data(path: Path, kind: str, first: int = 0, count: int = N, text: str = "image {n} of {path}") -> Path:
    """A data set. Its keys are 0000, 0001, ..., or the numbers of rows in a parquet, whatever its images are.

    Args: kind: "tar", "folder", "csv" or "parquet"; first: seed of the first image.
    """
    images = {f"{n:04d}": photo(first + n) for n in range(count)}
    texts = [text.format(n=n, path=path.name) for n in range(count)]
    if kind == "tar":
        pairs = zip(images.items(), texts, strict=True)
        members = [m for (key, image), t in pairs for m in ((f"{key}.png", image), (f"{key}.txt", t.encode()))]
        return write_tar(path / "0.tar", members).parent
    path.mkdir(parents=True)
    if kind == "parquet":
        pq.write_table(pa.table({"image": list(images.values()), "caption": texts}), path / "x.parquet")
        return path / "x.parquet"
    for (key, image), t in zip(images.items(), texts, strict=True):
        (path / f"{key}.png").write_bytes(image)
        if kind == "folder":
            (path / f"{key}.txt").write_text(t)
    if kind == "csv":
        with (path / "x.csv").open("w", newline="") as file:
            csv.writer(file).writerows(
                [("image", "caption"), *zip(sorted(f"{k}.png" for k in images), texts, strict=True)]
            )
        return path / "x.csv"
    return path


def opened(*sources: object, **settings: Any) -> list[tuple[str, list[str]]]:
    """Keys and captions of all rows, as a run reads them."""
    source: Any = open_data(DataConfig(sources=tuple(map(str, sources)), **settings))
    return [(source.key(row), source.captions(row)) for row in range(len(source))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that captions, with a frozen trunk, all of random weights."""
    folder = tmp_path_factory.mktemp("model")
    state = EfficientNetLite("efficientnet-lite0").state_dict()
    state = {name: value * 4 if value.ndim == 4 else value for name, value in state.items()}  # else features vanish
    names = {name: ["_" * (not part.isdecimal()) + part for part in name.split(".")] for name in state}
    named = {
        ".".join([*parts[:-1], parts[-1][1:]]).replace("_layers.", "_blocks."): state[n] for n, parts in names.items()
    }
    torch.save(named, folder / "lite0.pth")
    tower = ["--image-tower", f"efficientnet-lite0:{folder / 'lite0.pth'}", "--model.image.size", "32"]
    assert train(folder / "run", *tower, "--data", "scenes?n=16", "--vocab", "300", method="coca") == 0
    return folder / "run" / "model"


def train(out: Path, *words: object, method: str = "clip") -> int:
    size = ["--size", "debug", "--steps", "1", "--batch", "8", "--quiet"]
    return code("train", method, *size, *words, *WORKS, "--out", out)


def code(*words: object) -> int:
    """Exit code of a command."""
    try:
        return main(list(map(str, words))) or 0
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1


def captioned(model: Path, source: Path, out: Path) -> Path:
    assert code("caption", model, "--data", source, "--out", out, *WORKS) == 0
    return out


def audited(model: Path, source: Path, out: Path, omitted: int) -> Path:
    """A keep-list that omits one row."""
    assert code("audit", source, "--model", model, "--out", out, *WORKS) == 0
    rows = pq.read_table(out / "keep.parquet")
    keep = pa.array([n != omitted for n in range(len(rows))])
    pq.write_table(rows.set_column(rows.column_names.index("keep"), "keep", keep), out / "keep.parquet")
    return out / "keep.parquet"


KINDS = [("tar", "tar"), ("folder", "csv"), ("parquet", "parquet"), ("csv", "tar")]


@pytest.mark.parametrize(("first", "second"), KINDS[1:3])
def test_tokens_of_each_source(model: Path, tmp_path: Path, first: str, second: str) -> None:
    """Training on two sources of equal keys is as on one source of them, whatever the order of the stores."""
    sources = [data(tmp_path / "a", first, text="{n}"), data(tmp_path / "b", second, 100, text="{n}")]
    members = [(f"{n:04d}", photo(n % N + 100 * (n >= N)), f"{n % N}".encode()) for n in range(2 * N)]
    both = [m for key, image, text in members for m in ((f"{key}.png", image), (f"{key}.txt", text))]
    sources.append(write_tar(tmp_path / "both.tar", both))
    for n, source in enumerate(sources):
        assert code("embed", model, "--data", source, "--tokens", "--out", tmp_path / f"t{n}", *WORKS) == 0
    losses = []
    for order in ("2", "01", "10"):
        stores = [tmp_path / f"t{n}" for n in order]
        words = ["--init", model, "--batch", 2 * N, "--data", *(sources[2:] if order == "2" else sources[:2])]
        assert train(tmp_path / f"run{order}", *words, "--image-features", *stores, "--log-every", "1") == 0
        losses.append(json.loads((tmp_path / f"run{order}" / "metrics.jsonl").read_text().splitlines()[-1])["loss"])
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)


@pytest.mark.parametrize(("first", "second"), KINDS)
def test_captions_are_of_the_source_that_they_were_made_from(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], first: str, second: str
) -> None:
    a, b = data(tmp_path / "a", first), data(tmp_path / "b", second, 100)
    table = str(captioned(model, b, tmp_path / "captions.parquet"))
    made = pq.read_table(table)
    extra = dict(zip(made["key"].to_pylist(), made["captions"].to_pylist(), strict=True))
    assert any(extra.values())
    both, own = opened(a, b), opened(b, extra_captions=(table,))
    assert own == [(key, [*texts, *extra[key]]) for key, texts in both[N:]]
    assert opened(a, b, extra_captions=(table,)) == [*both[:N], *own]
    with pytest.raises(ValueError, match="captions"):
        opened(a, extra_captions=(table,))
    assert train(tmp_path / "run", "--data", a, "--extra-captions", table) == 2
    assert "captions.parquet" in capsys.readouterr().err
    assert not list((tmp_path / "run").glob("**/*.jsonl"))


@pytest.mark.parametrize(("first", "second"), KINDS)
def test_a_keep_list_is_of_the_source_that_it_was_made_from(
    model: Path, tmp_path: Path, first: str, second: str
) -> None:
    """Even where all captions are equal, as of class data."""
    a, b = data(tmp_path / "a", first, text="a photo"), data(tmp_path / "b", second, 100, text="a photo")
    lists = [str(audited(model, source, tmp_path / f"k{n}", omitted=3 + n)) for n, source in enumerate((a, b))]
    key = [key for key, _ in opened(a)]
    expected = [*key[:3], *key[4:], *key[:4], *key[5:]]
    for order in (lists, lists[::-1]):
        assert [key for key, _ in opened(a, b, keep=tuple(order))] == expected
    for wrong in (lambda: opened(a, keep=(lists[1],)), lambda: opened(a, b, keep=(lists[0],))):
        with pytest.raises(ValueError, match="keep"):
            wrong()


def test_what_was_made_stays_with_its_images(model: Path, tmp_path: Path) -> None:
    """Captions and keep-lists hold for data that moved, that grew, that lies in other files, and for a part of it."""
    a = data(tmp_path / "a", "folder", count=60)
    table, keep = captioned(model, a, tmp_path / "c.parquet"), audited(model, a, tmp_path / "k", omitted=3)
    made = opened(a, extra_captions=(str(table),))
    moved = shutil.copytree(a, tmp_path / "other" / "place")
    packed = data(tmp_path / "packed", "tar", count=60, text="image {n} of a")
    for same in (moved, packed):
        assert opened(same, extra_captions=(str(table),)) == made
        assert len(opened(same, keep=(str(keep),))) == 59
    parts = [opened(f"{part}:{a}", extra_captions=(str(table),)) for part in ("train-part", "val-part")]
    assert sorted([*parts[0], *parts[1]]) == made
    (moved / "new.png").write_bytes(photo(999))
    (moved / "new.txt").write_text("new")
    assert opened(moved, extra_captions=(str(table),)) == [*made, ("new", ["new"])]


def users_table(path: Path, keys: list[str], **columns: Any) -> str:
    """A table that does not say what it was made from."""
    pq.write_table(pa.table({"key": keys, **columns}), path)
    return str(path)


@pytest.mark.parametrize(("first", "second"), KINDS)
def test_equal_keys_of_two_sources_are_refused_where_nothing_says_which(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], first: str, second: str
) -> None:
    a, b = data(tmp_path / "a", first), data(tmp_path / "b", second, 100)
    other = data(tmp_path / "c", "folder", 200)
    for file in other.iterdir():
        file.rename(file.with_name(f"c{file.name}"))
    keys = [key for key, _ in opened(a)]
    table = users_table(tmp_path / "t.parquet", keys, caption=["more"] * N)
    assert opened(a, other, extra_captions=(table,))[0] == (keys[0], [*opened(a)[0][1], "more"])
    captions = [text for _, texts in opened(a) for text in texts]
    keep = users_table(tmp_path / "k.parquet", keys, caption=captions, keep=[True] * N)
    for flag, file in (("--extra-captions", table), ("--keep", keep)):
        capsys.readouterr()
        assert train(tmp_path / "run", "--data", a, b, flag, file) == 2
        err = capsys.readouterr().err
        assert keys[0] in err
        assert str(a) in err
        assert str(b) in err


def twice(path: Path, kind: str) -> Path:
    """Two images of one key, the last ones of a data set."""
    a = data(path, "tar" if kind == "shards" else "folder")
    pairs = opened(a)
    if kind == "shards":
        write_tar(a / "1.tar", [("0011.png", photo(999)), ("0011.txt", b"another")])
    else:
        (a / "0011.jpg").write_bytes(photo(999))
    if kind in ("csv", "json"):
        rows = [(f"{key}.png", text[0]) for key, text in pairs] + [("0011.jpg", "another")]
        if kind == "json":
            (a / "x.json").write_text(json.dumps([{"image": image, "caption": text} for image, text in rows]))
            return a / "x.json"
        with (a / "x.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("image", "caption"), *rows])
        return a / "x.csv"
    return a


@pytest.mark.parametrize(
    ("verb", "kind"),
    [
        ("caption", "csv"), ("caption", "json"), ("audit", "shards"), ("audit", "csv"), ("extra", "csv"),
        ("extra", "json"), ("keep", "shards"), ("keep", "csv"),
    ],
)  # fmt: skip
def test_two_images_of_one_key_are_found_before_the_work(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str, kind: str
) -> None:
    a = twice(tmp_path / "a", kind)
    rows = opened(a)
    table = users_table(tmp_path / "t.parquet", ["0011"], caption=["more"]) if verb == "extra" else ""
    if verb == "keep":
        keys, captions = zip(*((key, text) for key, texts in rows for text in texts), strict=True)
        table = users_table(tmp_path / "t.parquet", list(keys), caption=list(captions), keep=[True] * len(keys))
    out = ["--out", tmp_path / "out", *WORKS]
    words: list[object] = {
        "caption": ["caption", model, "--data", a, *out],
        "audit": ["audit", a, "--model", model, *out],
        "extra": ["train", "clip", "--data", a, "--extra-captions", table, *out],
        "keep": ["train", "clip", "--data", a, "--keep", table, *out],
    }[verb]
    assert code(*words) == 2
    err = capsys.readouterr().err
    assert "'0011'" in err
    assert "images/s" not in err
    assert "step 1" not in err


def test_images_of_a_folder_that_differ_in_their_suffix_have_keys_of_their_own(model: Path, tmp_path: Path) -> None:
    a = twice(tmp_path / "a", "folder")
    assert [key for key, _ in opened(a)][-2:] == ["0011.jpg", "0011.png"]
    assert [texts for _, texts in opened(a)][-2:] == [opened(a)[-1][1]] * 2, "one caption lies beside both"
    assert code("embed", model, "--data", a, "--out", tmp_path / "out", *WORKS) == 0


@pytest.mark.parametrize(
    ("verb", "first", "second"),
    [("embed", "tar", "tar"), ("embed", "csv", "folder"), ("tokens", "parquet", "parquet"), ("caption", "tar", "csv")],
)
def test_equal_keys_of_two_sources(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str, first: str, second: str
) -> None:
    """Features are joined by source and row; a table of captions has keys alone, and is refused before the work."""
    a, b = data(tmp_path / "a", first), data(tmp_path / "b", second, 100)
    words = ["embed", model, "--tokens"] if verb == "tokens" else [verb, model]
    refused = verb == "caption"
    assert code(*words, "--data", a, b, "--out", tmp_path / "out", *WORKS) == (2 if refused else 0)
    out, err = capsys.readouterr()
    assert all((str(path) in err) == refused for path in (a, b))
    assert ("images/s" in err, f"{2 * N} images" in out) == (not refused, not refused)


def test_one_image_under_one_key_twice_is_harmless(model: Path, tmp_path: Path) -> None:
    a, b = (data(tmp_path / name, kind, text="a photo") for name, kind in (("a", "tar"), ("b", "folder")))
    assert code("embed", model, "--data", a, b, "--out", tmp_path / "f", *WORKS) == 0
    table = users_table(tmp_path / "t.parquet", ["0011"], caption=["more"])
    rows = opened(a, b, extra_captions=(table,))
    assert [rows[N - 1], rows[-1]] == [("0011", ["a photo", "more"])] * 2


def test_parquets_of_one_data_set_have_keys_of_their_own(model: Path, tmp_path: Path) -> None:
    """Shards with embedded images, as of the Hugging Face hub: rows of each are numbered from 0 on."""
    for n in range(2):
        shutil.move(data(tmp_path / f"{n}", "parquet", 100 * n), tmp_path / f"shard-{n}.parquet")
    shards = tmp_path / "shard-{0..1}.parquet"
    assert len({key for key, _ in opened(shards)}) == 2 * N
    assert code("embed", model, "--data", shards, "--out", tmp_path / "f", *WORKS) == 0
    table = captioned(model, shards, tmp_path / "c.parquet")
    assert all(len(texts) == 2 for _, texts in opened(shards, extra_captions=(str(table),)))


@pytest.mark.parametrize("verb", ["embed", "tokens", "caption"])
def test_two_folders_of_images_behind_one_table_are_two_sources(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    a, b = data(tmp_path / "a", "folder"), data(tmp_path / "b", "folder", 100)
    rows = [(f"{key}.png", text[0]) for key, text in opened(a)]
    with (tmp_path / "x.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("image", "caption"), *rows])
    sources = [f"{tmp_path / 'x.csv'}?images={folder}" for folder in (a, b)]
    words = ["embed", model, "--tokens"] if verb == "tokens" else [verb, model]
    refused = verb == "caption"
    assert code(*words, "--data", *sources, "--out", tmp_path / "out", *WORKS) == (2 if refused else 0)
    assert ("images/s" in capsys.readouterr().err) != refused
    copy = f"{tmp_path / 'x.csv'}?images={shutil.copytree(a, tmp_path / 'copy')}"
    assert code(*words, "--data", sources[0], copy, "--out", tmp_path / "same", *WORKS) == 0
