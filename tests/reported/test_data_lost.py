"""Whatever a data set holds is a row, or is counted and named: members of tars, rows of tables, files of folders."""

from __future__ import annotations

import csv
import json
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from folders import model_folder
from kiloword.cli.main import main
from kiloword.data.open import open_source
from kiloword.types import BadSample
from tars import photo, write_tar

STRUCT = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
WORDS = ["बिल्ली सो रही है", "قطة تنام", "一只猫在睡觉", "🐈 sleeps", "a cat sleeps"]


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    """Exit code and output of a command."""
    try:
        code = main(list(map(str, words)))
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    printed = capsys.readouterr()
    return code or 0, printed.out + printed.err


def table(folder: Path, kind: str, images: Sequence[bytes | str | None], captions: Sequence[str]) -> Path:
    """A table. Args: kind: "bytes" or "struct" of a parquet, "parquet" of paths, "csv", "tsv" or "json"."""
    path = folder / f"x.{'parquet' if kind in ('bytes', 'struct') else kind}"
    if path.suffix == ".parquet":
        cells = [{"bytes": image, "path": None} for image in images] if kind == "struct" else images
        of_images = {"bytes": pa.binary(), "struct": STRUCT, "parquet": pa.string()}[kind]
        pq.write_table(pa.table({"image": pa.array(cells, of_images), "caption": captions}), path)
    elif kind == "json":
        rows = [{"image": image, "caption": text} for image, text in zip(images, captions, strict=True)]
        path.write_text(json.dumps(rows, ensure_ascii=False))
    else:
        with path.open("w", newline="") as file:
            writer = csv.writer(file, delimiter="\t" if kind == "tsv" else ",")
            writer.writerows([("image", "caption"), *zip(images, captions, strict=True)])
    return path


def captions(source: Any) -> list[list[str]]:
    return [source.captions(row) for row in range(len(source))]


@pytest.mark.parametrize("absent", [None, ""])
@pytest.mark.parametrize("kind", ["bytes", "struct", "parquet", "csv", "tsv", "json"])
def test_each_row_without_an_image_is_a_bad_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, absent: str | None
) -> None:
    (tmp_path / "a.png").write_bytes(photo())
    there: bytes | str = photo() if kind in ("bytes", "struct") else "a.png"
    none = absent if absent is None or isinstance(there, str) else absent.encode()
    data = table(tmp_path, kind, [none, there, none, there, *[none] * 4], [*WORDS, "x", "y", "z"])
    code, output = run(capsys, "data", "check", data)
    assert code > 0
    assert "6 of 7 samples are bad" in output  # one image with two captions, and six rows without an image
    assert captions(open_source(str(data)))[:3] == [[WORDS[0]], [WORDS[1], WORDS[3]], [WORDS[2]]]


@pytest.mark.parametrize("kind", ["bytes", "csv"])
def test_rows_without_an_image_stop_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    (tmp_path / "a.png").write_bytes(photo())
    names = [f"{n}.png" for n in range(0, 40, 2)]
    for n, name in enumerate(names):
        (tmp_path / name).write_bytes(photo(n))
    images = [None if n % 2 else photo(n) if kind == "bytes" else names[n // 2] for n in range(40)]
    data = table(tmp_path, kind, images, [f"caption {n}" for n in range(40)])
    words = ["train", "siglip", "--data", data, "--size", "debug", "--vocab", 300, "--batch", 8, "--epochs", 1]
    code, output = run(capsys, *words, "--workers", 0, "--bad-share", 0.1, "--out", tmp_path / "run")
    assert code == 2
    assert "of the data set's 40 rows are bad" in output


def image_and_text(*stems: str) -> list[tuple[str, bytes]]:
    return [m for n, stem in enumerate(stems) for m in ((f"{stem}.png", photo(n)), (f"{stem}.txt", stem.encode()))]


def of_tars(folder: Path, *tars: list[tuple[str, bytes]] | bytes) -> Path:
    for n, members in enumerate(tars):
        path = folder / f"{n:05d}.tar"
        write_tar(path, members if isinstance(members, list) else [])
        if isinstance(members, bytes):
            path.write_bytes(members)
    return folder


PLAIN = ["0000", "d/0001", "d.e/IMG", "बिल्ली", "猫/قطة", "🐈"]
DOTTED = [
    "IMG_2023.05.01",
    "IMG_2023.05.02",
    "photo.0",
    "photo.1",
    "Mr.Smith",
    "Mr.Jones",
    "d.e/a.नमस्ते",
    "猫.1",
    "🐈.2.0",
]


@pytest.mark.parametrize("stems", [PLAIN, DOTTED, [*PLAIN, *DOTTED]], ids=["plain", "dots", "both"])
def test_a_name_with_dots_is_a_name(tmp_path: Path, capsys: pytest.CaptureFixture[str], stems: list[str]) -> None:
    data = of_tars(tmp_path / "data", image_and_text(*stems))
    source: Any = open_source(str(data))
    assert [source.key(row) for row in range(len(source))] == stems
    assert captions(source) == [[stem] for stem in stems]
    code, output = run(capsys, "data", "check", data)
    assert code == 0
    assert "skipped" not in output


@pytest.mark.parametrize(
    "names",
    [
        ["{}.image.png", "{}.caption.txt"],
        ["{}.png", "{}.caption.json"],
        ["{}.rgb.png", "{}.cls"],
        ["{}.चित्र.png", "{}.शब्द.txt"],
        ["{}.png", "{}.png.txt"],
    ],
)
def test_a_word_before_the_suffix_names_a_field(tmp_path: Path, names: list[str]) -> None:
    texts = {"txt": b"a cat", "json": b'{"caption": "a cat"}', "cls": b"3"}
    members = [
        (name.format(key), texts.get(name.rpartition(".")[2], photo()))
        for key in ("0", "d/IMG.05.01", "猫")
        for name in names
    ]
    source: Any = open_source(str(of_tars(tmp_path / "data", members)))
    assert [source.key(row) for row in range(len(source))] == ["0", "d/IMG.05.01", "猫"]
    assert all(
        (record.captions, record.label) in [(["a cat"], None), ([], 3)] for record in map(source.record, range(3))
    )


@pytest.mark.parametrize(
    ("field", "content"),
    [("depth.png", photo(9)), ("ocr.txt", b"STOP"), ("cls.txt", b"2"), ("boxes.json", b"[1, 2]"), ("a.b.json", b"{")],
)
def test_a_field_never_takes_the_place_of_the_samples_own_member(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], field: str, content: bytes
) -> None:
    for n, order in enumerate(((0, 1, 2), (2, 0, 1))):
        members = [("0.png", photo(1)), ("0.txt", b"a cat"), (f"0.{field}", content)]
        data = of_tars(tmp_path / f"{n}", [members[place] for place in order])
        record = open_source(str(data)).record(0)
        assert (record.key, record.image, record.captions) == ("0", photo(1), ["a cat"])
        code, output = run(capsys, "data", "check", data)
        assert code == 0
        assert f"0.{field}" in output


def test_what_lies_beside_tars_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = of_tars(tmp_path / "data", [("a.png", photo()), ("a.txt", b"x")])
    (data / "9.tar").symlink_to("nothing")
    for name in ("6.zip", "7.tar.lz4", "x.jpg", "more/2.tar"):
        (data / name).parent.mkdir(exist_ok=True)
        (data / name).write_bytes(b"?")
    for name in ("._0.tar", "00000_stats.json", "00000.parquet", "README.md"):  # of macOS; of img2dataset
        (data / name).write_bytes(b"?")
    code, output = run(capsys, "data", "check", data)
    assert code == 0
    lines = [line for line in output.splitlines() if "skipped" in line]
    for name in ("9.tar", "6.zip", "7.tar.lz4", "x.jpg", "more"):
        assert sum(name in line for line in lines) == 1
    assert not any(name in "".join(lines) for name in ("._0", "stats", "parquet", "README"))


def test_thousands_of_reasons_are_few_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    members = [("a.png", photo()), ("a.txt", b"x"), *((f"a.s{n}", b"?") for n in range(3000))]
    output = run(capsys, "data", "check", of_tars(tmp_path / "data", members))[1]
    assert len(output.splitlines()) < 40
    assert "2,980 members" in output


@pytest.mark.parametrize(
    "members",
    [
        [("a.png", photo(1)), ("a.txt", b"x"), ("a.webp", photo(2))],
        [("a.png", photo(1)), ("a.txt", b"x"), ("a.depth.png", photo(2))],
        [("a.input.png", photo(1)), ("a.output.png", photo(2)), ("a.txt", b"x")],
        [("a.png", photo(1)), ("a.en.txt", b"x"), ("a.hi.txt", "बिल्ली".encode())],
        [("a.png", photo(1)), ("a.txt", b"x"), ("a.mp3", b"sound")],
        [("a.png", photo(1)), ("a.txt", b"x"), ("猫.pth", b"state")],
        [("a.png", photo(1)), ("a.txt", b"x"), ("a.npy", bytes(1 << 18))],
        [("a.png", photo(1)), ("a.txt", b"x"), ("__meta__.txt", b"?")],
        [("a.png", photo(1)), ("a.txt", b"x"), ("d/._a.png", b"?")],
        [("a.png", photo(1)), ("a.txt", b"x"), ("README", b"?")],
    ],
    ids=lambda members: members[-1][0].encode("unicode_escape").decode(),
)
def test_members_that_are_not_read_are_named_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], members: list[tuple[str, bytes]]
) -> None:
    """Once for a set of tars, when its index is made and later."""
    tars = [[(f"{n}/{name}", content) for name, content in members] for n in range(5)]
    data = of_tars(tmp_path / "data", *tars)
    unread = members[1 if members[1][0] == "a.output.png" else 2][0]
    for verb in ("index", "check", "stats"):
        code, output = run(capsys, "data", verb, data)
        assert code == 0
        (line,) = [line for line in output.splitlines() if "skipped" in line]
        assert "5 members skipped" in line
        assert f"0/{unread}, 1/{unread}, 2/{unread} and 2 more" in line
    source: Any = open_source(str(data))
    assert captions(source) == [["x"]] * 5
    assert {source.record(row).image for row in range(5)} == {photo(1)}


def test_links_in_a_tar_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_tar(tmp_path / "x.tar", image_and_text("0"))
    with tarfile.open(data, "a") as file:
        for kind, name in ((tarfile.SYMTYPE, "1.png"), (tarfile.LNKTYPE, "2.png"), (tarfile.DIRTYPE, "d")):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = kind, "0.png"
            file.addfile(link)
    output = run(capsys, "data", "check", data)[1]
    assert "2 members skipped" in output
    assert "1.png, 2.png" in output


NO_SAMPLES: dict[str, list[tuple[str, bytes]] | bytes] = {
    "no members": [],
    "no bytes": b"",
    "no images": [("a.txt", b"x"), ("b.txt", b"y")],
    "other files": [("a.mp4", b"x")],
}


@pytest.mark.parametrize("kind", NO_SAMPLES)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_tar_without_samples_is_named_and_the_others_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, place: int
) -> None:
    tars: list[list[tuple[str, bytes]] | bytes] = [image_and_text("0", "1"), image_and_text("2")]
    tars.insert(place, NO_SAMPLES[kind])
    data = of_tars(tmp_path / "data", *tars)
    for _ in range(2):  # with an index, and with one that is there already
        code, output = run(capsys, "data", "check", data)
        assert (code, "data: 3 samples" in output) == (0, True)
        assert output.count("1 tar skipped") == 1
        assert f"{place:05d}.tar" in output
    pattern: Any = open_source(str(tmp_path / "data" / "{00000..00002}.tar"))
    assert captions(pattern) == [["0"], ["1"], ["2"]]


@pytest.mark.parametrize("kind", NO_SAMPLES)
@pytest.mark.parametrize("verb", ["check", "index"])
def test_only_tars_without_samples_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, verb: str
) -> None:
    data = of_tars(tmp_path / "data", NO_SAMPLES[kind], NO_SAMPLES[kind])
    code, output = run(capsys, "data", verb, data)
    assert (code, "holds no images" in output) == (2, True)
    assert ("a.mp4" in output) == (kind == "other files")


def test_other_verbs_name_what_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = of_tars(tmp_path / "data", [*image_and_text(*"0123"), ("0.mp3", b"x"), ("1.mp3", b"x")], b"")
    model = model_folder(tmp_path / "model")
    train = ["train", "clip", "--data", data, "--size", "debug", "--vocab", 300, "--batch", 2, "--steps", 1]
    for words in (
        [*train, "--workers", 0, "--out", tmp_path / "run"],
        ["embed", model, "--data", data, "--out", tmp_path / "store", "--workers", 0],
        ["eval", "retrieval", model, "--data", data, "--workers", 0],
    ):
        code, output = run(capsys, *words)
        assert code == 0
        assert output.count("2 members skipped") == 1
        assert output.count("1 tar skipped") == 1


def half_bad(folder: Path, kind: str) -> Path:
    """24 samples, of which 12 have images that cannot be read, for one reason."""
    names = [f"{n:02d} नाम 猫.png" for n in range(24)]
    for n, name in enumerate(names):
        if n % 2 or kind == "tar":
            (folder / name).write_bytes(photo(n) if n % 2 else b"")
        (folder / f"{name[:-4]}.txt").write_text(f"caption {n}")
    if kind == "tar":
        members = [(path.name, path.read_bytes()) for path in sorted(folder.iterdir())]
        return of_tars(folder / "data", members[:24], members[24:])
    return table(folder, kind, names, [f"caption {n}" for n in range(24)])


@pytest.mark.parametrize("kind", ["tar", "csv", "json"])
@pytest.mark.parametrize("verb", ["train", "embed", "eval", "caption", "audit"])
def test_bad_rows_of_one_reason_take_a_few_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, verb: str
) -> None:
    data = half_bad(tmp_path, kind)
    model = model_folder(tmp_path / "model", "coca" if verb == "caption" else "siglip")
    words: dict[str, list[object]] = {
        "train": ["clip", "--size", "debug", "--vocab", 300, "--batch", 8, "--epochs", 2, "--bad-share", 0.9],
        "embed": [model],
        "eval": ["retrieval", model],
        "caption": [model],
        "audit": [data, "--model", model],
    }
    source = [] if verb == "audit" else ["--data", data]
    out = [] if verb == "eval" else ["--out", tmp_path / ("out.parquet" if verb == "caption" else "out")]
    code, output = run(capsys, verb, *words[verb], *source, *out, "--workers", 0)
    assert code == 0
    reason = "the image has zero bytes" if kind == "tar" else "image cannot be read (No such file or directory)"
    named = [line for line in output.splitlines() if reason in line]
    assert 1 <= len(named) <= 4
    assert "12 samples skipped" in named[-1]
    assert "and 9 more" in named[-1]
    assert all("नाम 猫" in line for line in named)


def test_images_that_are_elsewhere_are_named_by_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = table(tmp_path, "csv", [f"{n}.png" for n in range(99)], [f"caption {n}" for n in range(99)])
    code, output = run(capsys, "embed", model_folder(tmp_path / "model"), "--data", data, "--out", tmp_path / "out")
    assert (code, "99 samples skipped" in output) == (2, True)
    assert 1 <= sum("No such file" in line for line in output.splitlines()) <= 5


@pytest.mark.parametrize("classes", [False, True])
def test_reasons_of_files_are_grouped(tmp_path: Path, capsys: pytest.CaptureFixture[str], classes: bool) -> None:
    """Captions that link to a folder, in a folder of images and in class folders."""
    for n in range(8):
        folder = tmp_path / "data" / ("बिल्ली" if n % 2 else "猫") if classes else tmp_path / "data"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{n}.png").write_bytes(photo(n))
        (folder / f"{n}.txt").symlink_to(tmp_path)
    output = run(capsys, "data", "check", tmp_path / "data")[1]
    assert "8 of 8 samples are bad" in output
    assert "8 samples skipped, the .txt is no regular file" in output


def test_a_validation_says_how_many_samples_it_skips(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = table(tmp_path, "bytes", [photo(n) for n in range(20)], [f"image {n}" for n in range(20)])
    val = of_tars(tmp_path / "val", [*image_and_text(*"abcdefgh"), ("i.png", b"cut"), ("i.txt", b"i")])
    words = ["--size", "debug", "--vocab", "300", "--batch", "8", "--steps", "1", "--device", "cpu", "--workers", "0"]
    code, output = run(capsys, "train", "clip", "--data", data, "--val", val, "--out", tmp_path / "run", *words)
    assert code == 0
    assert "of 8 images" in output
    assert "1 sample skipped" in output


def test_a_tar_that_is_replaced_is_never_read_by_old_places(tmp_path: Path) -> None:
    """Neither by a source that was opened before, nor by one that is opened again in the same process."""
    tar = write_tar(tmp_path / "a.tar", {"0.png": photo(0), "0.txt": b"zero", "1.png": photo(1), "1.txt": b"one"})
    before = open_source(str(tar))
    assert before.record(1).image == photo(1)
    other = write_tar(
        tmp_path / "b.tar", {"1.txt": b"long " * 999, "1.png": photo(1), "0.txt": b"0", "0.png": photo(9)}
    )
    other.replace(tar)
    again = open_source(str(tar))
    assert {(one := again.record(row)).key: one.image for row in range(2)} == {"0": photo(9), "1": photo(1)}
    with tar.open("r+b") as file:  # in place
        file.truncate(1024)
    with pytest.raises(BadSample):
        again.record(0)


def test_what_is_cached_follows_the_files_beside_a_table(tmp_path: Path) -> None:
    for n in range(2):
        (tmp_path / f"{n}.csv").write_text(f"image,label\n{n}.png,dog\n")
        (tmp_path / f"{n}.png").write_bytes(photo(n))
    for names in (["dog", "cat"], ["cat", "dog"]):
        (tmp_path / "classnames.txt").write_text("\n".join(names))
        source = open_source(str(tmp_path / "{0..1}.csv"))
        assert [source.record(row).label for row in range(2)] == [names.index("dog")] * 2
