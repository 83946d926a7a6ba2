"""Texts made by someone who means harm, in everything that a verb reads: none of them steers the terminal."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from runs import row
from runs import write as write_run
from safetensors.numpy import save_file
from servers import Server
from tars import picture, write_tar

from kiloword.checkpoint import save_model
from kiloword.cli import main
from kiloword.data.tokenizer import Tokenizer
from kiloword.methods import preset
from kiloword.model import build
from kiloword.recipes import ModelFile, default

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
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("w") / NAME
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KILOWORD_CACHE", str(folder / "cache"))
        members = {}
        for n in range(6):
            members |= {f"{n}{EVIL}.png": picture(n), f"{n}{EVIL}.txt": f"{EVIL} dog {n}".encode(errors="replace")}
            members[f"{n}{EVIL}.cls"] = str(n % 2).encode()
        bad = f"6{BYTES}{EVIL}"
        members |= {f"{bad}.png": b"no picture", f"{bad}.txt": b"x", f"{bad}.cls": b"0"}
        write_tar(folder / "data" / f"{NAME}.tar", members)
        (folder / "data" / "classnames.txt").write_text(
            "\n".join(EVIL.replace("\n", "\v") + c for c in "ab"), errors="replace"
        )
        (folder / "photo.png").write_bytes(picture())
        (folder / f"{NAME[:60]}.png").write_bytes(picture())
        yield World(folder, _model(folder / "model"))


def _model(folder: Path) -> Path:
    tokenizer = Tokenizer.train([f"a red circle above a blue square {EVIL.encode(errors='replace').decode()}"] * 3, 290)
    config = default("coca", "debug").model
    made = build(replace(config, text=replace(config.text, vocab=tokenizer.vocab)), preset("coca"), 0)
    save_model(folder, made, tokenizer, ModelFile(method="coca", settings={}, model=made.config, data=EVIL))
    return folder


def _damaged(world: World, kind: str) -> str:
    """A model folder whose config.json holds something hostile."""
    folder = world.folder / kind
    if not folder.is_dir():
        folder.mkdir()
        for file in world.model.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        config = json.loads((folder / "config.json").read_text())
        changed = {"key": {EVIL: 1}, "method": {"method": EVIL}, "value": {"model": {EVIL: EVIL}}}[kind]
        (folder / "config.json").write_text(json.dumps(config | changed))
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
    return ["--data", world / "data", "--size", "debug", "--batch", "4", "--steps", "2"]


Attack = Callable[[World], Sequence[str]]
MODEL, OWN = "model", ["--batch", "4"]
ATTACKS: dict[str, tuple[int, Attack]] = {
    "data stats": (0, lambda w: ["data", "stats", w / "data"]),
    "data check": (1, lambda w: ["data", "check", w / "data"]),
    "data index": (0, lambda w: ["data", "index", w / "data"]),
    "data of nothing": (2, lambda w: ["data", "stats", w / EVIL.replace("\x00", "")]),
    "data with a zero": (2, lambda w: ["data", "stats", w / EVIL]),
    "data csv": (2, lambda w: ["data", "stats", _table(w)]),
    "dry run": (0, lambda w: ["train", "clip", "--out", w / "r", *_with(w), "--dry-run"]),
    "train": (0, lambda w: ["train", "clip", "--out", w / "r", *_with(w), "--bad-share", "0.5"]),
    "too many bad": (2, lambda w: ["train", "clip", "--out", w / "r2", *_with(w)]),
    "captions": (2, lambda w: ["train", "clip", "--out", w / "r", *_with(w), "--extra-captions", _table(w)]),
    "zeroshot": (0, lambda w: ["eval", w / MODEL, "zeroshot", "--data", w / "data", "--html", w / "z.html"]),
    "retrieval": (0, lambda w: ["eval", w / MODEL, "retrieval", "--data", w / "data", "--json", w / "r.json"]),
    "no task": (2, lambda w: ["eval", w / MODEL, EVIL, "--data", w / "data"]),
    "score": (0, lambda w: ["score", w / MODEL, "--images", w / "photo.png", w / f"{NAME[:60]}.png", "--texts", EVIL]),
    "embed": (0, lambda w: ["embed", w / MODEL, "--data", w / "data", "--out", w / "side", *OWN]),
    "mine": (0, lambda w: ["mine", w / "data", "--side", _side(w), "--out", w / "mined"]),
    "caption": (0, lambda w: ["caption", w / MODEL, "--data", w / "data", "--out", w / "c.parquet", *OWN]),
    "watch": (0, lambda w: ["watch", _run(w), "--once"]),
    "watch folder": (0, lambda w: ["watch", w / "runs", "--once", "--curves", EVIL]),
    "unknown key": (2, lambda w: ["score", _damaged(w, "key"), "--images", w / "photo.png", "--texts", "a"]),
    "unknown field": (2, lambda w: ["score", _damaged(w, "value"), "--images", w / "photo.png", "--texts", "a"]),
    "model's method": (2, lambda w: ["score", _damaged(w, "method"), "--images", w / "photo.png", "--texts", "a"]),
    "method": (2, lambda w: ["train", EVIL, "--out", w / "r"]),
    "piece": (2, lambda w: ["train", "clip", "--positives", EVIL, "--out", w / "r"]),
    "flag": (2, lambda w: ["train", "clip", f"--{EVIL}", "--out", w / "r"]),
    "flag of eval": (2, lambda w: ["eval", w / MODEL, "retrieval", "--data", w / "data", f"--{EVIL}"]),
    "verb": (2, lambda w: [EVIL]),
    "verify": (2, lambda w: ["verify", EVIL]),
    "plan": (2, lambda w: ["plan", EVIL, "--samples", "1e9"]),
    "plan size": (2, lambda w: ["plan", "clip", "--size", EVIL]),
    "import": (2, lambda w: ["import", "open_clip", "ViT-B-32", _tensors(w), "--out", w / "i"]),
    "import name": (2, lambda w: ["import", "open_clip", EVIL, _tensors(w), "--out", w / "i"]),
    "import prolip": (2, lambda w: ["import", "prolip", _tensors(w), "--out", w / "i"]),
    "import nothing": (2, lambda w: ["import", "open_clip", "ViT-B-32", w / EVIL, "--out", w / "i"]),
}  # fmt: skip


def steering(text: str) -> set[str]:
    """Characters that a terminal would obey or not show."""
    return {c for c in text if c != "\n" and (unicodedata.category(c)[0] == "C" or c in "\u2028\u2029")}


@pytest.mark.parametrize("name", ATTACKS)
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


def test_a_server_that_steers(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason phrase of an answer, and a header that comes back in a message."""
    monkeypatch.setenv("KILOWORD_REMOTE", "retries=0 timeout=5")
    reason = EVIL.replace("\r\n", "").encode("ascii", "replace").decode()
    with Server({}) as server:
        server._http.RequestHandlerClass.responses = {}
        server._http.RequestHandlerClass.send_response_only = lambda self, code, message=None: self.wfile.write(
            f"HTTP/1.1 {code} {reason}\r\n".encode()
        )
        server.always["x.tar"] = "418"
        with pytest.raises(SystemExit) as end:
            main(["data", "stats", f"{server.url}/x.tar"])
    said = capsys.readouterr()
    assert end.value.code == 2
    assert "418" in said.err
    assert not steering(said.out + said.err)
