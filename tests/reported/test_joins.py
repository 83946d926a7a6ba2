"""What is made from a source is joined to it alone, whatever its keys: features, tokens, captions and keep-lists."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.torch import save_file
from users import Refused, Run, write_table

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
    rows = [(f"{n:04d}", photo(first + n), text.format(n=n, path=path.name)) for n in range(count)]
    if kind == "tar":
        members = [m for key, image, t in rows for m in ((f"{key}.png", image), (f"{key}.txt", t.encode()))]
        return write_tar(path / "0.tar", members).parent
    path.mkdir(parents=True)
    if kind == "parquet":
        return write_table(path / "x.parquet", [{"image": image, "caption": t} for _, image, t in rows])
    for key, image, t in rows:
        (path / f"{key}.png").write_bytes(image)
        if kind == "folder":
            (path / f"{key}.txt").write_text(t)
    if kind == "csv":
        return write_table(path / "x.csv", [{"image": f"{key}.png", "caption": t} for key, _, t in rows])
    return path


def opened(*sources: object, **settings: Any) -> list[tuple[str, list[str]]]:
    """Keys and captions of all rows, as a run reads them."""
    source: Any = open_data(DataConfig(sources=tuple(map(str, sources)), **settings))
    return [(source.key(row), source.captions(row)) for row in range(len(source))]


def done(*words: object) -> None:
    main(list(map(str, words)))


def training(out: Path, *words: object, method: str = "clip") -> list[object]:
    size = ["--size", "debug", "--steps", "1", "--batch", "8", "--quiet"]
    return ["train", method, *size, *words, *WORKS, "--out", out]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that captions, with a frozen trunk, all of random weights."""
    folder = tmp_path_factory.mktemp("model")
    state = EfficientNetLite("efficientnet-lite0").state_dict()
    state = {name: value * 4 if value.ndim == 4 else value for name, value in state.items()}  # else features vanish
    save_file(state, folder / "lite0.safetensors")
    tower = ["--image-tower", f"efficientnet-lite0:{folder / 'lite0.safetensors'}", "--model.image.size", "32"]
    done(*training(folder / "run", *tower, "--data", "scenes?n=16", "--vocab", "300", method="coca"))
    return folder / "run" / "model"


def captioned(model: Path, source: Path, out: Path) -> Path:
    done("caption", model, "--data", source, "--out", out, *WORKS)
    return out


def audited(model: Path, source: Path, out: Path, omitted: int) -> Path:
    """A keep-list that omits one row."""
    done("audit", source, "--model", model, "--out", out, *WORKS)
    rows = pq.read_table(out / "keep.parquet")
    keep = pa.array([n != omitted for n in range(len(rows))])
    pq.write_table(rows.set_column(rows.column_names.index("keep"), "keep", keep), out / "keep.parquet")
    return out / "keep.parquet"


KINDS = [("tar", "tar"), ("folder", "csv"), ("parquet", "parquet"), ("csv", "tar")]


two_kinds = pytest.mark.parametrize(("first", "second"), KINDS)


@pytest.mark.parametrize(("first", "second"), KINDS[2:3])
def test_tokens_of_each_source(model: Path, tmp_path: Path, first: str, second: str) -> None:
    """Training on two sources of equal keys is as on one source of them, whatever the order of the stores."""
    sources = [data(tmp_path / "a", first, text="{n}"), data(tmp_path / "b", second, 100, text="{n}")]
    members = [(f"{n:04d}", photo(n % N + 100 * (n >= N)), f"{n % N}".encode()) for n in range(2 * N)]
    both = [m for key, image, text in members for m in ((f"{key}.png", image), (f"{key}.txt", text))]
    sources.append(write_tar(tmp_path / "both.tar", both))
    for n, source in enumerate(sources):
        done("embed", model, "--data", source, "--tokens", "--out", tmp_path / f"t{n}", *WORKS)
    losses = []
    for order in ("2", "01", "10"):
        words = ["--init", model, "--batch", 2 * N, "--data", *(sources[2:] if order == "2" else sources[:2])]
        words += ["--log-every", "1", "--image-features", *(tmp_path / f"t{n}" for n in order)]
        done(*training(tmp_path / f"run{order}", *words))
        losses.append(json.loads((tmp_path / f"run{order}" / "metrics.jsonl").read_text().splitlines()[-1])["loss"])
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)


@two_kinds
def test_captions_are_of_the_source_that_they_were_made_from(
    model: Path, tmp_path: Path, refused: Refused, first: str, second: str
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
    assert "captions.parquet" in refused(*training(tmp_path / "run", "--data", a, "--extra-captions", table))
    assert not list((tmp_path / "run").glob("**/*.jsonl"))


@pytest.mark.parametrize(("first", "second"), KINDS[1:3])
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
    for sources, wrong in (((a,), lists[1]), ((a, b), lists[0])):
        with pytest.raises(ValueError, match="keep"):
            opened(*sources, keep=(wrong,))


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


@two_kinds
def test_equal_keys_of_two_sources_are_refused_where_nothing_says_which(
    tmp_path: Path, refused: Refused, first: str, second: str
) -> None:
    a, b, other = data(tmp_path / "a", first), data(tmp_path / "b", second, 100), data(tmp_path / "c", "folder", 200)
    for file in other.iterdir():
        file.rename(file.with_name(f"c{file.name}"))
    rows = opened(a)
    keys, texts = [key for key, _ in rows], [text for _, (text,) in rows]
    table = users_table(tmp_path / "t.parquet", keys, caption=["more"] * N)
    assert opened(a, other, extra_captions=(table,))[0] == (keys[0], [texts[0], "more"])
    keep = users_table(tmp_path / "k.parquet", keys, caption=texts, keep=[True] * N)
    for flag, file in (("--extra-captions", table), ("--keep", keep)):
        said = refused(*training(tmp_path / "run", "--data", a, b, flag, file))
        assert all(word in said for word in (keys[0], str(a), str(b)))


def twice(path: Path, kind: str) -> Path:
    """Two images of one key, the last ones of a data set: "shards", "folder", "csv" or "json"."""
    a = data(path, "tar" if kind == "shards" else "folder")
    if kind == "shards":
        write_tar(a / "1.tar", [("0011.png", photo(999)), ("0011.txt", b"another")])
        return a
    rows = [{"image": f"{key}.png", "caption": text} for key, (text,) in opened(a)]
    (a / "0011.jpg").write_bytes(photo(999))
    return a if kind == "folder" else write_table(a / f"x.{kind}", [*rows, {"image": "0011.jpg", "caption": "another"}])


@pytest.mark.parametrize(
    ("verb", "kind"),
    [
        ("caption", "csv"),
        ("caption", "json"),
        ("audit", "shards"),
        ("audit", "csv"),
        ("extra", "csv"),
        ("extra", "json"),
        ("keep", "shards"),
        ("keep", "csv"),
    ],
)
def test_two_images_of_one_key_are_found_before_the_work(
    model: Path, tmp_path: Path, refused: Refused, verb: str, kind: str
) -> None:
    a, extra, keep = twice(tmp_path / "a", kind), tmp_path / "extra.parquet", tmp_path / "keep.parquet"
    users_table(extra, ["0011"], caption=["more"])
    keys, texts = zip(*((key, text) for key, texts in opened(a) for text in texts), strict=True)
    users_table(keep, list(keys), caption=list(texts), keep=[True] * len(keys))
    words: dict[str, list[object]] = {
        "caption": ["caption", model, "--data", a],
        "audit": ["audit", a, "--model", model],
        "extra": ["train", "clip", "--data", a, "--extra-captions", extra],
        "keep": ["train", "clip", "--data", a, "--keep", keep],
    }
    said = refused(*words[verb], "--out", tmp_path / "out", *WORKS)
    assert ("'0011'" in said, "images/s" in said, "step 1" in said) == (True, False, False)


def test_images_of_a_folder_that_differ_in_their_suffix_have_keys_of_their_own(model: Path, tmp_path: Path) -> None:
    a = twice(tmp_path / "a", "folder")
    last = opened(a)[-2:]
    assert [key for key, _ in last] == ["0011.jpg", "0011.png"]
    assert last[0][1] == last[1][1], "one caption lies beside both"
    done("embed", model, "--data", a, "--out", tmp_path / "out", *WORKS)


def encoding(verb: str, model: Path) -> list[object]:
    return ["embed", model, "--tokens"] if verb == "tokens" else [verb, model]


@pytest.mark.parametrize(
    ("verb", "first", "second"),
    [("embed", "tar", "tar"), ("embed", "csv", "folder"), ("tokens", "parquet", "parquet"), ("caption", "tar", "csv")],
)
def test_equal_keys_of_two_sources(model: Path, tmp_path: Path, run: Run, verb: str, first: str, second: str) -> None:
    """Features are joined by source and row; a table of captions has keys alone, and is refused before the work."""
    a, b = data(tmp_path / "a", first), data(tmp_path / "b", second, 100)
    code, said = run(*encoding(verb, model), "--data", a, b, "--out", tmp_path / "out", *WORKS)
    if verb == "caption":
        assert (code, str(a) in said, str(b) in said, "images/s" in said) == (2, True, True, False)
    else:
        assert (code, "images/s" in said, f"{2 * N} images" in said) == (0, True, True)


def test_one_image_under_one_key_twice_is_harmless(model: Path, tmp_path: Path) -> None:
    a, b = (data(tmp_path / name, kind, text="a photo") for name, kind in (("a", "tar"), ("b", "folder")))
    done("embed", model, "--data", a, b, "--out", tmp_path / "f", *WORKS)
    table = users_table(tmp_path / "t.parquet", ["0011"], caption=["more"])
    rows = opened(a, b, extra_captions=(table,))
    assert [rows[N - 1], rows[-1]] == [("0011", ["a photo", "more"])] * 2


def test_parquets_of_one_data_set_have_keys_of_their_own(model: Path, tmp_path: Path) -> None:
    """Shards with embedded images, as of the Hugging Face hub: rows of each are numbered from 0 on."""
    for n in range(2):
        shutil.move(data(tmp_path / f"{n}", "parquet", 100 * n), tmp_path / f"shard-{n}.parquet")
    shards = tmp_path / "shard-{0..1}.parquet"
    assert len({key for key, _ in opened(shards)}) == 2 * N
    done("embed", model, "--data", shards, "--out", tmp_path / "f", *WORKS)
    table = captioned(model, shards, tmp_path / "c.parquet")
    assert all(len(texts) == 2 for _, texts in opened(shards, extra_captions=(str(table),)))


@pytest.mark.parametrize("verb", ["embed", "tokens", "caption"])
def test_two_folders_of_images_behind_one_table_are_two_sources(
    model: Path, tmp_path: Path, run: Run, verb: str
) -> None:
    a, b = data(tmp_path / "a", "folder"), data(tmp_path / "b", "folder", 100)
    table = write_table(tmp_path / "x.csv", [{"image": f"{key}.png", "caption": text} for key, (text,) in opened(a)])
    copy = shutil.copytree(a, tmp_path / "copy")
    first, second, same = (f"{table}?images={folder}" for folder in (a, b, copy))
    code, said = run(*encoding(verb, model), "--data", first, second, "--out", tmp_path / "out", *WORKS)
    assert (code, "images/s" in said) == ((2, False) if verb == "caption" else (0, True))
    done(*encoding(verb, model), "--data", first, same, "--out", tmp_path / "same", *WORKS)
