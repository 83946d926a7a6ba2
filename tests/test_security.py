"""SECURITY.md says what the code does: its numbers, its tests, its options."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from kiloword.config import recipes, settings
from kiloword.data.images import decode
from kiloword.data.remote import errors, http_files, transport
from kiloword.data.remote import file as remote_file
from kiloword.data.sources import columns, embedded, sample
from kiloword.data.tars import headers as tar
from kiloword.data.text import tokenizer
from kiloword.model.trunks import libraries
from kiloword.models import states, tensors
from kiloword.watch import rows

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
MIB, GIB = 1 << 20, 1 << 30
IMAGE, WORDS = (
    {f.name: f.metadata["limits"] for f in fields(kind) if "limits" in f.metadata}
    for kind in (recipes.ImageConfig, recipes.TextConfig)
)
NUMBERS = {  # row -> what it says, with the limits of the code
    "model folder": [
        f"{settings.LARGEST // MIB} MiB; width and context {IMAGE['width'][1]:,}, depth and heads {recipes.DEPTH:,}, "
        f"vocabulary {WORDS['vocab'][1]:,}, image {IMAGE['size'][1]:,} pixels"
    ],
    "`model.safetensors`": [f"header of {tensors.LONGEST_HEADER // MIB} MiB"],
    "`tokenizer.json`": [f"{tokenizer.LARGEST // MIB} MiB"],
    "`hf:FOLDER`": [f"up to {libraries.MOST:,}"],
    "tar": [
        f"headers of {tar._LONGEST // MIB} MiB, images of {sample.MAX_IMAGE // MIB} MiB, "
        f"texts of {sample.MAX_TEXT // MIB} MiB"
    ],
    "image": [
        f"{decode.MAX_PIXELS:,} pixels, {decode.MAX_SCANS} scans of a JPEG",
    ],
    "csv, tsv, parquet": [
        f"rows of {columns._BLOCK // MIB} MiB, text of {embedded.MAX_TABLE // GIB} GiB",
    ],
    "indexes, feature stores, states of runs": [f"JSON of {states.MAX_JSON // MIB} MiB"],
    "servers": [
        f"files of {transport.LARGEST // 10**12} TB, small ones of {remote_file.MOST_SMALL // MIB} MiB; "
        f"{http_files._HOPS} redirects",
        f"waits of {errors._ASKED:g} s",
    ],
    "run folder (`kiloword watch`)": [f"lines of {rows.LINE:,} bytes, {rows.NAMES:,} metrics"],
}


@pytest.mark.parametrize("row", NUMBERS)
def test_its_numbers_are_those_of_the_code(row: str) -> None:
    lines = [line for line in TEXT.splitlines() if line.startswith(f"| {row}")]
    assert len(lines) == 1
    for words in NUMBERS[row]:
        assert words in lines[0]


def test_its_tests_exist() -> None:
    named = set(re.findall(r"`(test_\w+\.py)`", TEXT))
    assert len(named) > 12
    assert named <= {path.name for path in (ROOT / "tests").rglob("test_*.py")}


def test_width_and_context_and_heads_have_the_limits_of_their_neighbours() -> None:
    """The row names two with each number."""
    assert IMAGE["width"] == WORDS["width"]
    assert IMAGE["width"][1] == WORDS["context"][1]
    assert IMAGE["heads"][1] == IMAGE["depth"][1] == recipes.DEPTH
