"""Whatever a data set holds is a row, or is counted and named: members of tars, rows of tables, files of folders."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import pytest
from users import Refused, Run, captioned, captions, write_photos, write_table, write_tars

from folders import model_folder
from kiloword.data.open import open_source
from kiloword.types import BadSample
from sources import records
from tars import photo, write_tar

SIX = ["बिल्ली सो रही है", "قطة تنام", "一只猫在睡觉", "🐈 sleeps", "a cat sleeps", "x"]


@pytest.mark.parametrize("absent", [None, ""])
@pytest.mark.parametrize("kind", ["bytes", "struct", "parquet", "csv", "tsv", "json"])
def test_each_row_without_an_image_is_a_bad_row(tmp_path: Path, run: Run, kind: str, absent: str | None) -> None:
    """Rows 1 and 3 share an image; the four others have none."""

    def cell(there: bool) -> Any:
        content = photo() if there else absent if absent is None else absent.encode()
        if kind == "struct":
            return {"bytes": content, "path": "a.png" if there else None}
        return content if kind == "bytes" else "a.png" if there else absent

    write_photos(tmp_path, ["a.png"])
    rows = [{"image": cell(n in (1, 3)), "caption": text} for n, text in enumerate(SIX)]
    data = write_table(tmp_path / f"x.{'parquet' if kind in ('bytes', 'struct') else kind}", rows)
    code, output = run("data", "check", data)
    assert (code, "4 of 5 samples are bad" in output) == (1, True)
    assert captions(open_source(str(data)))[:3] == [[SIX[0]], [SIX[1], SIX[3]], [SIX[2]]]


PLAIN = ["0000", "d/0001", "d.e/IMG", "बिल्ली", "猫/قطة", "🐈"]
DOTTED = ["IMG_2023.05.01", "IMG_2023.05.02", "photo.0", "photo.1", "Mr.Smith", "d.e/a.नमस्ते", "猫.1", "🐈.2.0"]


@pytest.mark.parametrize("stems", [PLAIN, DOTTED, [*PLAIN, *DOTTED]], ids=["plain", "dots", "both"])
def test_a_name_with_dots_is_a_name(tmp_path: Path, run: Run, stems: list[str]) -> None:
    data = write_tars(tmp_path / "data", captioned(*stems))
    source: Any = open_source(str(data))
    assert [source.key(row) for row in range(len(source))] == stems
    assert captions(source) == [[stem] for stem in stems]
    code, output = run("data", "check", data)
    assert (code, "skipped" in output) == (0, False)


@pytest.mark.parametrize(
    ("image", "other", "said"),
    [
        ("image.png", ("caption.txt", b"a cat"), (["a cat"], None)),
        ("png", ("caption.json", b'{"caption": "a cat"}'), (["a cat"], None)),
        ("rgb.png", ("cls", b"3"), ([], 3)),
        ("चित्र.png", ("शब्द.txt", b"a cat"), (["a cat"], None)),
        ("png", ("png.txt", b"a cat"), (["a cat"], None)),
    ],
)
def test_a_word_before_the_suffix_names_a_field(tmp_path: Path, image: str, other: Any, said: Any) -> None:
    keys = ["0", "d/IMG.05.01", "猫"]
    members = [m for key in keys for m in ((f"{key}.{image}", photo()), (f"{key}.{other[0]}", other[1]))]
    found = records(open_source(str(write_tars(tmp_path / "data", members))))
    assert [(one.key, (one.captions, one.label)) for one in found] == [(key, said) for key in keys]


@pytest.mark.parametrize(
    ("field", "content"),
    [("depth.png", photo(9)), ("ocr.txt", b"STOP"), ("cls.txt", b"2"), ("boxes.json", b"[1, 2]"), ("a.b.json", b"{")],
)
@pytest.mark.parametrize("first", [False, True])
def test_a_field_never_takes_the_place_of_the_samples_own_member(
    tmp_path: Path, run: Run, field: str, content: bytes, first: bool
) -> None:
    members = [("0.png", photo(1)), ("0.txt", b"a cat")]
    members.insert(0 if first else 2, (f"0.{field}", content))
    data = write_tars(tmp_path / "data", members)
    record = open_source(str(data)).record(0)
    assert (record.key, record.image, record.captions) == ("0", photo(1), ["a cat"])
    code, output = run("data", "check", data)
    assert (code, f"0.{field}" in output) == (0, True)


def test_what_lies_beside_tars_is_named(tmp_path: Path, raw: Run) -> None:
    data = write_tars(tmp_path / "data", captioned("a"))
    (data / "9.tar").symlink_to("nothing")
    beside = ["6.zip", "7.tar.lz4", "1.tar.gz", "2.TGZ", "x.jpg", "x.png", "照片.webp", "more/2.tar"]
    others = ["._0.tar", "00000_stats.json", "00000.parquet", "README.md"]  # of macOS; of img2dataset
    for name in (*beside, *others):
        (data / name).parent.mkdir(exist_ok=True)
        (data / name).write_bytes(b"?")
    code, output = raw("data", "check", data)
    assert code == 0
    lines = [line for line in output.splitlines() if "skipped" in line]
    for name in ("9.tar", *beside[:-1], "more"):
        assert sum(name in line for line in lines) == 1, name
    assert not any(name in "".join(lines) for name in others)


def test_thousands_of_reasons_are_few_lines(tmp_path: Path, raw: Run) -> None:
    members = [*captioned("a"), *((f"a.s{n}", b"?") for n in range(3000))]
    output = raw("data", "check", write_tars(tmp_path / "data", members))[1]
    assert len(output.splitlines()) < 40
    assert "2,980 members" in output


@pytest.mark.parametrize(
    ("read", "unread"),
    [
        (["a.png", "a.txt"], "a.webp"),
        (["a.png", "a.txt"], "a.depth.png"),
        (["a.input.png", "a.txt"], "a.output.png"),
        (["a.png", "a.en.txt"], "a.hi.txt"),
        (["a.png", "a.txt"], "a.mp3"),
        (["a.png", "a.txt"], "猫.pth"),
        (["a.png", "a.txt"], "a.npy"),
        (["a.png", "a.txt"], "__meta__.txt"),
        (["a.png", "a.txt"], "d/._a.png"),
        (["a.png", "a.txt"], "README"),
    ],
)
def test_members_that_are_not_read_are_named_once(tmp_path: Path, raw: Run, read: list[str], unread: str) -> None:
    """Once for a set of tars, when its index is made and later."""
    other = photo(2) if unread.endswith(("png", "webp")) else bytes(1 << 18)
    members = [(read[0], photo(1)), (read[1], b"x"), (unread, other)]
    data = write_tars(tmp_path / "data", *([(f"{n}/{name}", m) for name, m in members] for n in range(5)))
    for verb in ("index", "check", "stats"):
        code, output = raw("data", verb, data)
        (line,) = [line for line in output.splitlines() if "skipped" in line]
        assert (code, "5 members skipped" in line) == (0, True)
        assert f"0/{unread}, 1/{unread}, 2/{unread} and 2 more" in line
    found = records(open_source(str(data)))
    assert [(one.image, one.captions) for one in found] == [(photo(1), ["x"])] * 5


def test_links_in_a_tar_are_named(tmp_path: Path, run: Run) -> None:
    data = write_tar(tmp_path / "x.tar", captioned("0"))
    with tarfile.open(data, "a") as file:
        for kind, name in ((tarfile.SYMTYPE, "1.png"), (tarfile.LNKTYPE, "2.png"), (tarfile.DIRTYPE, "d")):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = kind, "0.png"
            file.addfile(link)
    output = run("data", "check", data)[1]
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
def test_a_tar_without_samples_is_named(tmp_path: Path, run: Run, kind: str, place: int) -> None:
    """The others are read, with an index, and with one that is there already."""
    tars: list[list[tuple[str, bytes]] | bytes] = [captioned("0", "1"), captioned("2")]
    tars.insert(place, NO_SAMPLES[kind])
    data = write_tars(tmp_path / "data", *tars)
    for _ in range(2):
        code, output = run("data", "check", data)
        assert (code, "data: 3 samples" in output) == (0, True)
        assert output.count("1 tar skipped") == 1
        assert f"{place:05d}.tar" in output
    assert captions(open_source(str(data / "{00000..00002}.tar"))) == [["0"], ["1"], ["2"]]


@pytest.mark.parametrize("kind", NO_SAMPLES)
@pytest.mark.parametrize("verb", ["check", "index"])
def test_only_tars_without_samples_are_refused(tmp_path: Path, refused: Refused, kind: str, verb: str) -> None:
    said = refused("data", verb, write_tars(tmp_path / "data", NO_SAMPLES[kind], NO_SAMPLES[kind]))
    assert "holds no images" in said
    assert ("a.mp4" in said) == (kind == "other files")


def test_other_verbs_name_what_is_left_out(tmp_path: Path, model: Path, run: Run) -> None:
    data = write_tars(tmp_path / "data", [*captioned(*"0123"), ("0.mp3", b"x"), ("1.mp3", b"x")], b"")
    train = ["train", "clip", "--size", "debug", "--vocab", 300, "--batch", 2, "--steps", 1]
    for words in (
        [*train, "--out", tmp_path / "run"],
        ["embed", model, "--out", tmp_path / "store"],
        ["eval", "retrieval", model],
    ):
        code, output = run(*words, "--data", data, "--workers", 0)
        assert (code, output.count("2 members skipped"), output.count("1 tar skipped")) == (0, 1, 1)


def half_bad(folder: Path, kind: str) -> Path:
    """24 samples, of which 12 have images that cannot be read, for one reason."""
    names = [f"{n:02d} नाम 猫.png" for n in range(24)]
    if kind == "tar":
        images = [(name, photo(n) if n % 2 else b"") for n, name in enumerate(names)]
        members = [m for image in images for m in (image, (f"{image[0][:-4]}.txt", b"x"))]
        return write_tars(folder / "data", members[:24], members[24:])
    write_photos(folder, names[1::2])
    return write_table(folder / f"x.{kind}", [{"image": name, "caption": f"of {name}"} for name in names])


@pytest.mark.parametrize(
    ("kind", "verb"),
    [(kind, verb) for kind in ("tar", "csv") for verb in ("train", "embed", "eval", "caption", "audit")]
    + [("json", "embed")],
)
def test_bad_rows_of_one_reason_take_a_few_lines(tmp_path: Path, model: Path, raw: Run, kind: str, verb: str) -> None:
    data, out = half_bad(tmp_path, kind), ["--out", tmp_path / ("out.parquet" if verb == "caption" else "out")]
    many = ["--size", "debug", "--vocab", 300, "--batch", 8, "--epochs", 2, "--bad-share", 0.9]
    words: dict[str, list[object]] = {
        "train": ["clip", *many, "--data", data, *out],
        "embed": [model, "--data", data, *out],
        "eval": ["retrieval", model, "--data", data],
        "caption": [tmp_path / "coca", "--data", data, *out],
        "audit": [data, "--model", model, *out],
    }
    if verb == "caption":
        model_folder(tmp_path / "coca", "coca")
    code, output = raw(verb, *words[verb], "--workers", 0)
    assert code == 0
    reason = "the image has zero bytes" if kind == "tar" else "image cannot be read (No such file or directory)"
    named = [line for line in output.splitlines() if reason in line]
    assert 1 <= len(named) <= 4
    assert "12 samples skipped" in named[-1]
    assert "and 9 more" in named[-1]
    assert all("नाम 猫" in line for line in named)


@pytest.mark.parametrize("classes", [False, True])
def test_reasons_of_files_are_grouped(tmp_path: Path, run: Run, classes: bool) -> None:
    """Captions that link to a folder, in a folder of images and in class folders."""
    for n in range(8):
        folder = tmp_path / "data" / ("बिल्ली" if n % 2 else "猫") if classes else tmp_path / "data"
        write_photos(folder, [f"{n}.png"])
        (folder / f"{n}.txt").symlink_to(tmp_path)
    output = run("data", "check", tmp_path / "data")[1]
    assert "8 of 8 samples are bad" in output
    assert "8 samples skipped, the .txt is no regular file" in output


def test_a_tar_that_is_replaced_is_never_read_by_old_places(tmp_path: Path) -> None:
    """Neither by a source that was opened before, nor by one that is opened again in the same process."""
    tar = write_tar(tmp_path / "a.tar", {"0.png": photo(0), "0.txt": b"zero", "1.png": photo(1), "1.txt": b"one"})
    before = open_source(str(tar))
    assert before.record(1).image == photo(1)
    members = {"1.txt": b"long " * 999, "1.png": photo(1), "0.txt": b"0", "0.png": photo(9)}
    write_tar(tmp_path / "b.tar", members).replace(tar)
    again = open_source(str(tar))
    assert {one.key: one.image for one in records(again)} == {"0": photo(9), "1": photo(1)}
    with tar.open("r+b") as file:  # in place
        file.truncate(1024)
    with pytest.raises(BadSample):
        again.record(0)


def test_what_is_cached_follows_the_files_beside_a_table(tmp_path: Path) -> None:
    for n, name in enumerate(write_photos(tmp_path, ["0.png", "1.png"])):
        write_table(tmp_path / f"{n}.csv", [{"image": name, "label": "dog"}])
    for names in (["dog", "cat"], ["cat", "dog"]):
        (tmp_path / "classnames.txt").write_text("\n".join(names))
        found = records(open_source(str(tmp_path / "{0..1}.csv")))
        assert [one.label for one in found] == [names.index("dog")] * 2
