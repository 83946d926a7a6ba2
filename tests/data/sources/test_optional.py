"""What a source must have, and what it may have."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from pathlib import Path

import kiloword
from kiloword.data.sources.mixture import mix
from kiloword.data.sources.optional import OptionalMembers
from kiloword.methods.defaults import default_recipe
from kiloword.training.log import read_metrics
from kiloword.training.loop import train
from kiloword.types import Record, Source
from tars import noise

SOURCE = re.compile(r"(^|\.)(source|part|s)$")


class Minimal:
    """Only the required members."""

    def __init__(self, name: str) -> None:
        self.name = self.fingerprint = name

    def __len__(self) -> int:
        return 12

    def record(self, row: int) -> Record:
        return Record(f"{self.name} {row}", noise(40, 40, row), [f"a thing number {row}"])


def test_a_source_of_required_members_trains(tmp_path: Path) -> None:
    members = {name for name in (*Source.__annotations__, *vars(Source)) if not name.startswith("_")}
    assert members == {"name", "fingerprint", "record"}
    recipe = replace(default_recipe("siglip", "debug", data=("minimal",)), steps=2, batch=8)
    for name, source in (("one", Minimal("a")), ("two", mix([Minimal("a"), Minimal("b")]))):
        train(recipe, tmp_path / name, source=source)
        assert read_metrics(tmp_path / name / "metrics.jsonl")[-1]["skipped"] == 0


def test_every_optional_member_is_named() -> None:
    calls = [
        node.args
        for path in Path(kiloword.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr")
    ]
    read = {
        name.value for owner, name, *_ in calls if isinstance(name, ast.Constant) and SOURCE.search(ast.unparse(owner))
    }
    named = {name for name in (*OptionalMembers.__annotations__, *vars(OptionalMembers)) if not name.startswith("_")}
    assert read - {"keys"} == named, "of a part of a memory"
