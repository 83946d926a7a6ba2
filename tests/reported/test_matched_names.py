"""Names of classes, labels and folders match exactly first; letters, marks and symbols always count."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from users import Refused, Run, write_table

from kiloword.cli.main import main
from kiloword.data.open import open_source
from sources import records
from tars import photo

NAMES = {
    "symbols": ["C", "C++", "C#"],
    "signs": ["-5", "5", "+5 °C"],
    "apostrophe": ["well", "we'll", "we-ll"],
    "hindi": ["लड़का", "लड़की", "लड़के"],
    "thai": ["ไก่", "ไข่", "ไข้"],
    "tamil": ["கல்", "கால்", "கூல்"],
    "arabic": ["عِلْم", "عَلَم", "علم"],
    "hebrew": ["סֵפֶר", "סַפָּר", "ספר"],
    "emoji": ["love ❤️", "love 💔", "love"],
    "accents": ["papa", "papá", "PAPA"],
}
every_script = pytest.mark.parametrize("names", NAMES.values(), ids=NAMES)


def class_folders(root: Path, names: list[str]) -> Path:
    """1, 2, 4, ... images in the folders of these names."""
    for place, name in enumerate(names):
        (root / name).mkdir(parents=True)
        for number in range(2**place):
            (root / name / f"{place}{number}.png").write_bytes(photo(8 * place + number))
    return root


def table(folder: Path, labels: list[str], classnames: list[str] | None = None) -> str:
    """A parquet file with a row a label, and the names of the classes beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    if classnames is not None:
        lines(folder / "classnames.txt", classnames)
    return str(write_table(folder / "x.parquet", [{"image": photo(n), "label": x} for n, x in enumerate(labels)]))


def lines(path: Path, names: list[str]) -> str:
    path.write_text("\n".join(names), encoding="utf-8")
    return str(path)


def labels(source: str) -> list[Any]:
    return [record.label for record in records(open_source(source))]


def metrics(path: Path, *words: str) -> dict[str, float]:
    main(["eval", *words, "--json", str(path)])
    values: dict[str, float] = json.loads(path.read_text())
    return values


@every_script
def test_class_folders_and_classnames_txt(tmp_path: Path, names: list[str]) -> None:
    class_folders(tmp_path / "data", names)
    lines(tmp_path / "data" / "classnames.txt", [*names[1:], names[0]])
    assert sorted(labels(str(tmp_path / "data"))) == [0, 0, 1, 1, 1, 1, 2]


@pytest.mark.parametrize("script", ["symbols", "hindi", "emoji"])
def test_labels_of_a_table_and_class_names(tmp_path: Path, script: str) -> None:
    names = [name.upper() for name in NAMES[script]]
    listed = [*NAMES[script][1:], NAMES[script][0], "another"]
    assert labels(table(tmp_path, names, listed)) == [2, 0, 1]


@every_script
def test_zeroshot_by_names(tmp_path: Path, model: Path, names: list[str]) -> None:
    """In another order; and by two of three."""
    data = str(class_folders(tmp_path / "data", names))
    call = ["zeroshot", str(model), "--data", data, "--templates", "{c}"]
    own = metrics(tmp_path / "own.json", *call)
    moved = metrics(tmp_path / "moved.json", *call, "--classnames", lines(tmp_path / "n", [*names[1:], names[0]]))
    assert own["acc1"] == moved["acc1"]
    assert own["mean_per_class_recall"] == moved["mean_per_class_recall"]
    for left_out in range(3):
        some = lines(tmp_path / "names.txt", [name for name in names if name != names[left_out]])
        assert metrics(tmp_path / "a.json", *call, "--classnames", some)["skipped"] == 2**left_out


def test_a_probe_with_some_of_the_names(tmp_path: Path, model: Path) -> None:
    data = str(class_folders(tmp_path / "data", NAMES["hindi"]))
    train = str(class_folders(tmp_path / "train", NAMES["hindi"][::-1]))
    call = ["probe", str(model), "--data", data, "--train", train, "--classnames"]
    values = metrics(tmp_path / "a.json", *call, lines(tmp_path / "names.txt", NAMES["hindi"][1:]))
    assert values["train_rows"] == 3  # of the two classes


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        (unicodedata.normalize("NFD", "München"), "München"),
        (unicodedata.normalize("NFD", "바다"), "바다"),
        (unicodedata.normalize("NFD", "がっこう"), "がっこう"),
        ("red_bus", "Red bus"),
        ("STRASSE", "Straße"),
        ("ΣΊΣΥΦΟΣ", "Σίσυφος"),
    ],
)
def test_names_that_match_in_another_form(tmp_path: Path, folder: str, name: str) -> None:
    class_folders(tmp_path / "data", ["zebra", folder])
    names = ["aardvark", name, "zebra"]
    lines(tmp_path / "data" / "classnames.txt", names)
    assert sorted(labels(str(tmp_path / "data"))) == [1, 1, 2]
    assert labels(table(tmp_path / "table", ["zebra", folder], names)) == [2, 1]


@pytest.mark.parametrize(
    ("folders", "classnames"),
    [
        (["Cat", "dog"], ["CAT", "cat", "dog"]),
        (["ÉTÉ", "dog"], ["été", "Été", "dog"]),
        (["red_bus", "Red_bus"], ["red bus", "dog"]),
    ],
)
@pytest.mark.parametrize("form", ["folders", "table"])
def test_a_match_that_would_be_a_guess_is_refused(
    tmp_path: Path, refused: Refused, folders: list[str], classnames: list[str], form: str
) -> None:
    data: object = tmp_path / "data"
    if form == "folders":
        class_folders(tmp_path / "data", folders)
        lines(tmp_path / "data" / "classnames.txt", classnames)
    else:
        data = table(tmp_path / "data", folders, classnames)
    said = refused("data", "check", data)
    assert sum(name in said for name in {*folders, *classnames}) >= 3


def test_classes_are_not_merged_by_a_space_for_an_underline(tmp_path: Path) -> None:
    source: Any = open_source(str(class_folders(tmp_path / "folders", ["a_b", "a b"])))
    assert sorted(source.classnames) == ["a b", "a_b"]
    source = open_source(table(tmp_path, ["a_b", "a b", "c"]))
    assert len({*source.classnames}) == 3


def test_folders_of_which_some_are_named_otherwise_are_not_taken_in_order(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class_folders(tmp_path / "data", ["a", "b"])
    lines(tmp_path / "data" / "classnames.txt", ["b", "x"])
    with pytest.raises(ValueError, match="'a'"):
        open_source(str(tmp_path / "data"))
    lines(tmp_path / "data" / "classnames.txt", ["x", "y"])
    open_source(str(tmp_path / "data"))
    assert "order" in caplog.text  # none is named alike: by their order, and said
    assert "'x'" in caplog.text


@pytest.mark.parametrize(
    ("folder", "typed"),
    [
        (unicodedata.normalize("NFD", "München"), "münchen"),
        ("München", unicodedata.normalize("NFD", "München")),
        (unicodedata.normalize("NFD", "제주도"), "제주"),
        ("Straße", "STRASSE"),
    ],
)
def test_a_search_within_a_folder(tmp_path: Path, model: Path, run: Run, folder: str, typed: str) -> None:
    class_folders(tmp_path / "album", [folder, "Other"])
    run("index", tmp_path / "album", "--model", model, "--out", tmp_path / "lib")
    assert "1 of 3 photos" in run("search", tmp_path / "lib", "x", "--within", typed)[1]
