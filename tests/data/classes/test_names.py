"""Class names and templates: those shipped, and those from files."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from kiloword.cli.main import main
from kiloword.data.classes.names import (
    classname_sets,
    classnames,
    listing,
    names_of_wnids,
    read_classnames,
    read_templates,
    template_sets,
    templates,
    wnids,
)


def test_imagenet_is_in_the_order_of_its_wnids() -> None:
    ids = wnids()
    assert ids == sorted(ids)
    assert [classnames("imagenet1k")[i] for i in (0, 6, 134, 517, 999)] == [
        "tench", "stingray", "crane bird", "construction crane", "toilet paper"
    ]  # fmt: skip
    assert names_of_wnids(["n12998815", "n01440764"]) == ["agaric", "tench"]
    assert names_of_wnids(["n01440764", "n00000000"]) is None
    for name in ("imagenet-a", "imagenet-r"):
        assert classnames(name) == names_of_wnids(wnids(name))
        assert set(wnids(name)) < set(ids)
    assert wnids("imagenet-a")[:2] == ["n01498041", "n01531178"]
    assert wnids("imagenet-r")[:2] == ["n01443537", "n01484850"]


def test_files_of_users(tmp_path: Path) -> None:
    text, listed, by_set, by_class = (tmp_path / name for name in ("a.txt", "a.json", "b.json", "c.json"))
    text.write_text("a photo of a {}.\n{c}\n")
    listed.write_text('["cat", "dog"]')
    by_set.write_text(json.dumps({"pets": ["a {c}."], "cars": ["my {}."]}))
    by_class.write_text(json.dumps({"cat": ["it purrs", "a cat"], "dog": ["it barks"]}))
    assert read_templates(str(text)) == ["a photo of a {c}.", "{c}"]
    assert read_classnames(str(listed)) == ["cat", "dog"]
    assert read_templates(f"{by_set}?set=cars") == ["my {c}."]
    assert read_templates(str(by_class)) == {"cat": ["it purrs", "a cat"], "dog": ["it barks"]}
    by_class.write_text(json.dumps({"cat": ["it purrs"], "dog": ["{c} barks"]}))
    assert read_templates(str(by_class)) == {"cat": ["it purrs"], "dog": ["{c} barks"]}
    assert read_templates("a {} here") == ["a {c} here"]
    assert read_templates("pets") == templates("pets")
    assert read_classnames("imagenet-r") == classnames("imagenet-r")
    by_set.write_text('{"pets": ["cat", "dog"]}')
    assert read_classnames(str(by_set)) == ["cat", "dog"]
    by_set.write_text(json.dumps({"imagenet1k": {"tench": ["a fish"]}}))
    assert read_templates(str(by_set)) == {"tench": ["a fish"]}


@pytest.mark.parametrize(
    ("read", "named", "word"),
    [
        (read_templates, "a photo", "{c} or {}"),
        (read_templates, "plain.txt", "'a photo'"),
        (read_templates, "sets.json", "(pets, cars)"),
        (read_templates, "sets.json?set=pet", "Did you mean pets?"),
        (read_templates, "sets.json?st=pet", "no option 'st'"),
        (read_templates, "number.json", "a list of templates"),
        (read_templates, "broken.json", "JSON"),
        (read_templates, "latin.txt", "is not UTF-8"),
        (read_templates, ".", "no such file"),
        (read_classnames, "gap.txt", "line 2 is empty"),
        (read_classnames, "sets.json", "(pets, cars)"),
        (read_classnames, "cifar-10", "Did you mean cifar10"),
    ],
)
def test_files_and_names_that_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[str], object], named: str, word: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("gap.txt").write_text("cat\n\ndog\n")
    Path("plain.txt").write_text("a {c}\na photo\n")
    Path("sets.json").write_text('{"pets": ["a {c}"], "cars": ["{}"]}')
    Path("number.json").write_text("3")
    Path("broken.json").write_text("[" * 100_000)
    Path("latin.txt").write_bytes(b"{c} caf\xe9\n")
    with pytest.raises(ValueError, match=re.escape(word)):
        read(named)


def test_the_command_line_lists_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert re.search(r"imagenet1k +1000 +80", "\n".join(listing()))
    main(["data", "names", "pcam"])
    assert "   1  lymph node containing" in capsys.readouterr().out
    with pytest.raises(SystemExit) as error:
        main(["data", "names", "pcan"])
    assert error.value.code == 2
    assert "Did you mean pcam?" in capsys.readouterr().err


def test_lists_are_as_their_sources_publish_them() -> None:
    """Digests of all lists, computed from the files of openai/CLIP, CLIP_benchmark and wise-ft."""
    lists = {name: classnames(name) for name in classname_sets()} | {
        f"templates {name}": templates(name) for name in template_sets()
    }
    digest = hashlib.blake2b(json.dumps(lists, sort_keys=True).encode(), digest_size=8).hexdigest()
    assert digest == "a77f3d2d285b48a9"
