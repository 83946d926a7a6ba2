"""Words of a command line: verbs, methods and texts as people write them, and what an interruption keeps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kiloword.cli.main import app, main
from kiloword.cli.words import settled
from kiloword.data.open import open_source
from kiloword.errors import count
from kiloword.evaluation.command import number
from kiloword.methods.registry import preset
from kiloword.stores.embed import embed
from tars import photo


class Ones:
    """A teacher to whom all is one."""

    size, resize, fingerprint = 8, "shortest", "ones"

    def encode_images(self, images: Tensor) -> Tensor:
        return torch.ones(len(images), 1)

    def encode_texts(self, texts: Sequence[str]) -> Tensor:
        return torch.ones(len(texts), 1)


RUN = ("--batch", "8", "--size", "debug", "--vocab", "300")


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    with pytest.raises(SystemExit) as end:
        main([str(word) for word in words])
    assert end.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "meant"),
    [("trian siglip --data scenes --out x", "train"), ("evla retrieval m", "eval"), ("methdos", "methods")],
)
def test_a_verb_that_is_misspelled(words: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    output = refused(capsys, *words.split())
    assert output.startswith(f"kiloword: unknown verb '{words.split()[0]}': expected one of train, ")
    assert output.endswith(f"Did you mean {meant}?\n")
    assert "--" not in output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "data stat x",
            "unknown action 'stat': expected one of index, check, stats, names, pairs. Did you mean stats?",
        ),
        ("import openclip x --out y", "unknown format 'openclip': expected one of open_clip, prolip."),
        ("data check scenes:test?nn=2", "scenes has no option 'nn'; "),
        ("train siglip --captions many --data scenes --out x", "--captions is 'many': expected one, all or a number"),
    ],
)
def test_a_value_that_is_misspelled(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, *words.split()).startswith(f"kiloword: {message}")


@pytest.mark.parametrize(
    "words", ["mine", "watch", "import", "eval caption", "plan siglip", "train siglip", "score", "embed", "caption"]
)
def test_help_marks_what_is_required_and_wraps_lines(
    words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No argument is required and has a default; no line is short although the next word fits."""
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([*words.split(), "--help"])
    printed = capsys.readouterr().out
    positional = printed.partition("positional arguments")[2].partition("\n options")[0]
    assert "(default: )" not in positional
    assert ("(required)" in positional) is bool(positional)
    assert "(required) (default" not in " ".join(printed.split())
    for line, after in pairwise(map(str.rstrip, printed.splitlines())):
        column = len(after) - len(after.lstrip())
        if after and column > 6 and line[column - 2 : column] == "  ":
            assert len(line) + 1 + len(after.split()[0]) > 80, line


@pytest.mark.parametrize(
    "words",
    [
        "classify model --images photos --classes dog cat --json",
        "eval retrieval model --data photos --json",
        "eval zeroshot model --data photos --html",
        "eval suite small model --data photos --csv",
        "compare a b --html",
        "search library dog --page",
        "search library dog --json",
        "score model --images a.jpg --texts dog --plane",
        "data stats photos --png",
        "recipes list --json",
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_any_work(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing that the commands name exists: none of it is looked at."""
    *first, flag = words.split()
    said = refused(capsys, *first, flag, tmp_path)
    assert f"{flag} {tmp_path} is a folder. Expected a file, such as {tmp_path}/" in said
    (tmp_path / "file").touch()
    below = tmp_path / "file" / "deep" / "x"
    assert f"{below} cannot be written: {tmp_path / 'file'} is no folder." in refused(capsys, *first, f"{flag}={below}")


def test_a_folder_that_is_a_file_is_refused_before_any_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    words = ("score", "model", "--images", "a.jpg", "--texts", "dog", "--explain", tmp_path / "file")
    assert "is a file. Expected a folder" in refused(capsys, *words)


def test_what_a_function_returned_has_its_article(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_articles.py").write_text("def number():\n    return 3\ndef text():\n    return ''\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name, kind in (("number", "an int"), ("text", "a str")):
        with pytest.raises(ValueError, match=f"returned {kind}: expected"):
            preset(f"own_articles:{name}")


def test_numbers_and_nouns() -> None:
    assert [count(n, "figure") for n in (0, 1, 2)] == ["0 figures", "1 figure", "2 figures"]
    assert [number(x) for x in (1.16e-17, 0.0, 0.0012345, 0.5)] == ["0.0000", "0.0000", "0.00123", "0.5000"]


def test_texts_are_utf8_in_any_locale_and_paths_stay() -> None:
    ascii_locale = "caf\udcc3\udca9"  # as Python decodes the word in a locale of ASCII
    words = ["score", ascii_locale, "--images", ascii_locale, "--texts", ascii_locale, ascii_locale, "\udcff"]
    expected = ["score", ascii_locale, "--images", ascii_locale, "--texts", "caf\u00e9", "caf\u00e9", "\ufffd"]
    assert settled(words, app._subcommands) == expected
    assert settled(["train", f"--settings.compose.merge={ascii_locale}"], ["train"])[1].endswith("=caf\u00e9")


@pytest.mark.slow
def test_a_run_goes_on_in_another_locale(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The bytes of the path are the same, its text is not."""
    folder = tmp_path / "caf\u00e9"
    folder.mkdir()
    for n in range(8):
        (folder / f"{n}.png").write_bytes(photo(n))
        (folder / f"{n}.txt").write_text(f"thing {n}")
    for steps, name in ((1, "caf\udcc3\udca9"), (2, "caf\u00e9")):
        words = ["clip", "--data", tmp_path / name, *RUN, "--steps", steps, "--extend", "--out", tmp_path / "run"]
        main(["train", *map(str, words)])
    assert "goes on from step 1 of 2" in capsys.readouterr().err


class Interrupted(Ones):
    """Ctrl-C at the ninth image, and one to see how many numbers a feature has."""

    asked = 0

    def encode_images(self, images: Tensor) -> Tensor:
        self.asked += len(images)
        if self.asked > 9:
            raise KeyboardInterrupt
        return super().encode_images(images)


def test_an_interrupted_embed_names_the_rows_kept(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt, match=r"^8 of 12 rows are kept, the same command goes on with the others\.$"):
        embed(Interrupted(), open_source("scenes?n=12"), tmp_path / "features", part=4)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "error", "shown"),
    [
        ("embed m --data d --out o", "8 of 12 rows are kept.", "interrupted: 8 of 12 rows are kept."),
        ("eval retrieval m --data d", "", "interrupted: no results were written."),
        ("sizes", "", "interrupted."),
    ],
)
def test_interruptions_name_what_stays(
    words: str, error: str, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*args: Any, **named: Any) -> None:
        raise KeyboardInterrupt(*([error] if error else []))

    for place in (
        "kiloword.stores.embed.main",
        "kiloword.evaluation.command.main",
        "kiloword.cli.describe.sizes_table",
    ):
        monkeypatch.setattr(place, interrupt)
    with pytest.raises(SystemExit) as end:
        main(words.split())
    assert end.value.code == 130
    assert capsys.readouterr().err == f"kiloword: {shown}\n"
