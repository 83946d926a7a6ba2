"""Texts made by someone who means harm, in everything that a verb reads: none of them steers the terminal."""

from __future__ import annotations

import json
import shutil
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from safetensors.numpy import save_file

from kiloword.cli.main import main
from kiloword.config.recipes import ModelFile
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.methods.defaults import default_recipe
from kiloword.methods.registry import preset
from kiloword.models.build import build
from kiloword.models.model_folder import save_model
from runs import row, write as write_run
from tars import pairs, photo, write_tar

# Colours, the window's title, a link, the screen cleared by a C1 character, a line of its own, words turned around or
# unseen, rich's markup. No / in it: it is a file's name too.
EVIL = (
    "\x1b[31mred\x1b]0;title\x07\x1b]8;;x:e\x1b\\\x9b2J\r\n"
    "kiloword: forged\u2028\u202elive\u2066\u200b\ufeff\x00[red]r[/red][link=x:e]l[/link]\t%s{0}\"' é"
)
NAME = EVIL.replace("\x00", "").replace("[/red]", "").replace("[/link]", "")
BYTES = "\udcff"  # of a file name that is not UTF-8, as Python holds it


@dataclass
class World:
    """What the attacked one was given: every name and text in it is hostile."""

    folder: Path
    model: Path

    def __truediv__(self, name: str) -> str:
        return str(self.folder / name)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("w") / NAME
    members = {}
    for n in range(6):
        members |= {f"{n}{EVIL}.png": photo(n), f"{n}{EVIL}.txt": f"{EVIL} dog {n}".encode(errors="replace")}
        members[f"{n}{EVIL}.cls"] = str(n % 2).encode()
    bad = f"6{BYTES}{EVIL}"
    members |= {f"{bad}.png": b"no image", f"{bad}.txt": b"x", f"{bad}.cls": b"0"}
    write_tar(folder / "data" / f"{NAME}.tar", members)
    classes = "\n".join(EVIL.replace("\n", "\v") + c for c in "ab")
    (folder / "data" / "classnames.txt").write_text(classes, errors="replace")
    for name in ("photo", NAME[:60]):
        (folder / f"{name}.png").write_bytes(photo())
    return World(folder, _model(folder / "model"))


def _model(folder: Path) -> Path:
    tokenizer = Tokenizer.train([f"a red circle above a blue square {EVIL.encode(errors='replace').decode()}"] * 3, 290)
    config = default_recipe("coca", "debug").model
    made = build(replace(config, text=replace(config.text, vocab=tokenizer.vocab)), preset("coca"), 0)
    save_model(folder, made, tokenizer, ModelFile(method="coca", settings={}, model=made.config, data=EVIL))
    return folder


def _damaged(world: World, **change: object) -> str:
    """A model folder whose config.json holds something hostile."""
    folder = Path(shutil.copytree(world.model, world.folder / "damaged", dirs_exist_ok=True))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    return str(folder)


def _run(world: World) -> str:
    rows = [row(n, **{EVIL: 1.0 / n, f"val/{EVIL} recall@1": 0.5}) for n in range(1, 40)]
    return str(write_run(world.folder / "runs" / NAME, rows, method=EVIL, size=EVIL))


def _tensors(world: World) -> str:
    save_file({f"visual.{EVIL}".replace("\udcff", ""): np.zeros(3, "f4")}, world / "foreign.safetensors")
    (world.folder / "config.json").write_text(json.dumps({EVIL: 1, "model": {EVIL: EVIL}}))
    return world / "foreign.safetensors"


def _table(world: World) -> str:
    """Captions with the data's keys."""
    text = EVIL.replace("\udcff", "")
    with Path(world / "t.parquet").open("wb") as file:  # by its path pyarrow cannot
        pa.parquet.write_table(pa.table({"key": [f"{n}{text}" for n in range(6)], text: [text] * 6}), file)
    return world / "t.parquet"


def _side(world: World) -> str:
    """Features of the data."""
    if not (world.folder / "mined-side").is_dir():
        main(["embed", world / "model", "--data", world / "data", "--out", world / "mined-side", *OWN])
    return world / "mined-side"


def _with(world: World) -> list[str]:
    return ["--data", world / "data", *SMALL[:-1], "2"]


Attack = Callable[[World], Sequence[str]]
MODEL, OWN = "model", ["--batch", "4"]
SMALL = ["--size", "debug", "--batch", "4", "--steps", "1"]
ATTACKS: dict[str, tuple[int, Attack]] = {
    "data stats": (0, lambda w: ["data", "stats", w / "data"]),
    "data check": (1, lambda w: ["data", "check", w / "data"]),
    "data with a zero": (2, lambda w: ["data", "stats", w / EVIL]),
    "data csv": (2, lambda w: ["data", "stats", _table(w)]),
    "train": (0, lambda w: ["train", "clip", "--out", w / "r", *_with(w), "--bad-share", "0.5"]),
    "too many bad": (2, lambda w: ["train", "clip", "--out", w / "r2", *_with(w)]),
    "captions": (2, lambda w: ["train", "clip", "--out", w / "r", *_with(w), "--extra-captions", _table(w)]),
    "zeroshot": (0, lambda w: ["eval", "zeroshot", w / MODEL, "--data", w / "data", "--html", w / "z.html"]),
    "retrieval": (0, lambda w: ["eval", "retrieval", w / MODEL, "--data", w / "data", "--json", w / "r.json"]),
    "score": (0, lambda w: ["score", w / MODEL, "--images", w / "photo.png", w / f"{NAME[:60]}.png", "--texts", EVIL]),
    "embed": (0, lambda w: ["embed", w / MODEL, "--data", w / "data", "--out", w / "side", *OWN]),
    "mine": (0, lambda w: ["mine", w / "data", "--features", _side(w), "--out", w / "mined"]),
    "caption": (0, lambda w: ["caption", w / MODEL, "--data", w / "data", "--out", w / "c.parquet", *OWN]),
    "watch": (0, lambda w: ["watch", _run(w), "--once"]),
    "compare": (2, lambda w: ["compare", _run(w)]),
    "unknown key": (2, lambda w: ["score", _damaged(w, **{EVIL: 1}), "--images", w / "photo.png", "--texts", "a"]),
    "model's method": (2, lambda w: ["score", _damaged(w, method=EVIL), "--images", w / "photo.png", "--texts", "a"]),
    "method": (2, lambda w: ["train", EVIL, "--out", w / "r"]),
    "verb": (2, lambda w: [EVIL]),
    "verify": (2, lambda w: ["verify", EVIL]),
    "import": (2, lambda w: ["import", "open_clip", "ViT-B-32", _tensors(w), "--out", w / "i"]),
}  # fmt: skip


def steering(text: str) -> set[str]:
    """Characters that a terminal would obey or not show."""
    return {c for c in text if c != "\n" and (unicodedata.category(c)[0] == "C" or c in "\u2028\u2029")}


OPEN_CLIP = ("import",)  # its own import takes seconds


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in OPEN_CLIP else ()) for n in ATTACKS])
def test_nothing_steers_the_terminal(world: World, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    expected, attack = ATTACKS[name]
    try:
        main(list(attack(world)))
        code = 0
    except SystemExit as end:
        code = end.code
    said = capsys.readouterr()
    assert not steering(said.out + said.err)
    assert code == expected, said.err
    assert "\nkiloword: forged" not in said.out + said.err
    assert "Traceback" not in said.err
    if expected == 2:
        assert said.err


def test_names_of_members(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Parts of paths, NUL and a megabyte: names of samples, and nothing else."""
    names = ["../../up", "/root/x", "a\\..\\b", "-rf", "n\x00ul", "l" * 4096, "m" * 900_000, "\udcff", " ", "%s{0}"]
    members = {f"{name}.{kind}": b"no image" for name in names for kind in ("png", "txt")}
    with pytest.raises(SystemExit):
        main(["data", "check", str(write_tar(tmp_path / "x.tar", members | pairs(2)))])
    said = capsys.readouterr().out
    assert "9 of 11 samples are bad" in said  # a header ends a name at NUL
    assert all(name in said for name in ("../../up", "/root/x", "-rf", "l" * 4096))
    assert max(map(len, said.split("\n"))) == 10_003
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != "cache") == ["x.tar"]
