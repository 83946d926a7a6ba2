"""What users get wrong, and what goes wrong around them: one sentence and exit code 2, or a counted, named skip."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from cases import mostly_slow
from kiloword.cli.main import main
from kiloword.training.log import read_metrics
from states import load_state
from tars import pairs, photo, write_tar

SCENES = "scenes?n=64"  # few, so that the tokenizer is trained at once
SMALL = ["--size", "debug", "--batch", "8", "--steps", "4", "--log-every", "1", "--vocab", "300"]
Refused = Callable[..., str]


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    """Runs a command line that must fail; returns its one sentence."""

    def run(*words: object) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main([str(word) for word in words])
        output = capsys.readouterr().err
        assert end.value.code == 2, output
        assert "Traceback" not in output
        last = output.strip().splitlines()[-1]
        assert last.startswith("kiloword: "), output
        assert len(last) < 600
        return last

    return run


@pytest.fixture(scope="module")
def a_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of four steps."""
    out = tmp_path_factory.mktemp("run")
    main(train(SCENES, out, "--save-every", 2))
    return out


@pytest.fixture
def model(a_run: Path, tmp_path: Path) -> Path:
    """A copy of its model folder, to be damaged."""
    return Path(shutil.copytree(a_run / "model", tmp_path / "model"))


def train(data: Path | str, out: Path, *more: object) -> list[str]:
    small = SMALL[:-2] if "--init" in more else SMALL  # which has a vocabulary
    return ["train", "siglip", *small, "--data", str(data), "--out", str(out), *map(str, more)]


def commands(data: Path | str, model: Path, tmp_path: Path) -> list[list[str]]:
    """Every verb that reads a data set."""
    looks = [["data", what, str(data)] for what in ("index", "check", "stats")]
    evals = [["eval", task, str(model), "--data", str(data)] for task in ("retrieval", "zeroshot")]
    return [train(data, tmp_path / "out"), *looks, *evals]


def unusable(folder: Path, kind: str) -> Path:
    """A data set of nothing that can be used."""
    if kind == "missing":
        return folder / "none"
    if kind == "empty":
        (folder / "empty").mkdir()
        return folder / "empty"
    if kind == "no images":
        return write_tar(folder / "data" / "0.tar", {"a.txt": b"a dog", "b.txt": b"a cat"}).parent
    content = {"page.tar": b"<html>not found</html>" * 100, "words.xyz": b"a dog", "empty.csv": b""}
    (folder / kind).write_bytes(content.get(kind, b"image,words\na.jpg,a dog\n"))
    return folder / kind


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("missing", "no such file or folder"),
        ("empty", "is an empty folder"),
        ("no images", "holds no images"),
        ("page.tar", "cannot be read as a plain tar"),
        ("words.xyz", "unknown kind of file"),
        ("columns.csv", "image, words"),
        ("empty.csv", "is empty"),
    ],
)
def test_data_that_cannot_be_used(refused: Refused, model: Path, tmp_path: Path, kind: str, says: str) -> None:
    data = unusable(tmp_path, kind)
    for words in commands(data, model, tmp_path):
        assert says in refused(*words)
    assert not (tmp_path / "out").exists()


def huge_png(side: int) -> bytes:
    """The header of an image that nobody should decode."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")


BAD = {
    "empty.png": (b"", b"x", "the image has zero bytes"),
    "huge.png": (huge_png(20_000), b"x", "image has more than 80,000,000 pixels"),
    "notes.jpg": (b"this is no image", b"x", "not an image in a known format"),
    "torn.png": (photo()[:60], b"x", "cannot be decoded"),
    "silent.png": (photo(), b"", "no caption"),
    "blank.png": (photo(), b" \n\t\n", "no caption"),
    "latin.png": (photo(), "café".encode("latin-1"), "caption is not UTF-8"),
}


def bad_members(names: list[str]) -> dict[str, bytes]:
    members = {}
    for name in names:
        image, caption, _ = BAD[name]
        members |= {name: image, name.split(".")[0] + ".txt": caption}
    return members


@pytest.mark.parametrize("decoder", ["pillow", "simplejpeg"])
@pytest.mark.parametrize("workers", [0, 2])
def test_bad_samples_are_named_and_replaced(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, decoder: str, workers: int
) -> None:
    if workers and decoder != "pillow":
        pytest.skip("one decoder is enough")
    write_tar(tmp_path / "data" / "0.tar", pairs(93) | bad_members(list(BAD)))
    more = ("--batch", 100, "--steps", 1, "--bad-share", 0.1, "--decoder", decoder, "--workers", workers)
    main(train(tmp_path / "data", tmp_path / "out", *more))
    output = capsys.readouterr().err
    for name, (_, _, reason) in BAD.items():
        assert f"{name.split('.')[0]}: {reason}" in output
    assert read_metrics(tmp_path / "out" / "metrics.jsonl")[-1]["skipped"] == len(BAD)


@pytest.mark.parametrize("name", list(BAD))
def test_too_many_bad_samples_stop_the_run(refused: Refused, tmp_path: Path, name: str) -> None:
    write_tar(tmp_path / "data" / "0.tar", pairs(24) | bad_members([name]))
    output = refused(*train(tmp_path / "data", tmp_path / "out", "--batch", 25))
    for words in ("1 of the data set's 25 rows are bad, more than the allowed 1.00%", BAD[name][2], "--bad-share"):
        assert words in output
    assert name.split(".")[0] in output


# Model folders


def uses(model: Path, tmp_path: Path) -> list[list[str]]:
    """Every verb that reads a model folder."""
    (tmp_path / "a.png").write_bytes(photo())
    return [
        ["eval", "retrieval", str(model), "--data", "scenes:test?n=8"],
        ["score", str(model), "--images", str(tmp_path / "a.png"), "--texts", "x"],
        train(SCENES, tmp_path / "out", "--init", model),
    ]


def damaged(path: Path, damage: str) -> None:
    raw = path.read_bytes()
    path.write_bytes({"cut": raw[: len(raw) // 2], "empty": b"", "noise": os.urandom(500)}.get(damage, b""))
    if damage == "gone":
        path.unlink()


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
@pytest.mark.parametrize("damage", ["gone", "cut", "empty", "noise"])
def test_model_folder_is_damaged(refused: Refused, model: Path, tmp_path: Path, name: str, damage: str) -> None:
    damaged(model / name, damage)
    for words in uses(model, tmp_path):
        assert name in refused(*words)


def test_no_model_folder_or_another_config(refused: Refused, a_run: Path, model: Path, tmp_path: Path) -> None:
    for words in uses(tmp_path / "none", tmp_path):
        assert "is not a folder" in refused(*words)
    assert f"Did you mean {a_run / 'model'}?" in refused(*train(SCENES, tmp_path / "out", "--init", a_run))
    whole = (model / "config.json").read_text()
    for part, key, value, says in (
        ("image", "colour", "red", "model.image.colour"),
        ("head", "dim", 8, "do not fit its config"),
    ):
        config = json.loads(whole)
        config["model"][part][key] = value
        (model / "config.json").write_text(json.dumps(config))
        for words in uses(model, tmp_path):
            assert says in refused(*words)


# The folder of a run


def test_out_cannot_be_written(refused: Refused, model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for out in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/none")):
        assert f"--out {out} cannot be written" in refused(*train(SCENES, out))
    json_out = ("--data", "scenes:test?n=4", "--json", tmp_path / "file" / "r.json")
    assert "r.json" in refused("eval", "retrieval", model, *json_out)


def test_out_holds_another_run(refused: Refused, a_run: Path, tmp_path: Path) -> None:
    before = {p: p.read_bytes() for p in a_run.rglob("*") if p.is_file()}
    output = refused(*train(SCENES, a_run, "--optim.lr", 0.5, "--seed", 3))
    assert re.search("seed is 0 there, 3 here; optim.lr is 0[.0-9]+ there, 0.5 here", output)
    assert "holds another run" in output
    assert "method is 'siglip' there, 'clip' here" in refused("train", "clip", *SMALL, "--data", SCENES, "--out", a_run)
    assert "Use --extend" in refused(*train(SCENES, a_run, "--steps", 9))
    assert "holds another run: data.sources is ['scenes?n=64'] there" in refused(*train("scenes?n=64&seed=2", a_run))
    assert before == {p: p.read_bytes() for p in a_run.rglob("*") if p.is_file()}


@pytest.mark.parametrize("content", [None, '{"recipe": '])
def test_run_without_a_usable_config(refused: Refused, a_run: Path, tmp_path: Path, content: str | None) -> None:
    """Nothing says whose state it is: it is not continued under another recipe."""
    out = Path(shutil.copytree(a_run, tmp_path / "out"))
    (out / "config.json").unlink()
    if content is not None:
        (out / "config.json").write_text(content)
    assert "config.json" in refused(*train(SCENES, out, "--seed", 3))


def test_states_that_are_gone_or_damaged(
    refused: Refused, capsys: pytest.CaptureFixture[str], a_run: Path, tmp_path: Path
) -> None:
    """The newest state that is whole counts; where all are damaged, the user decides."""
    out = Path(shutil.copytree(a_run, tmp_path / "out"))
    (out / "state" / "step-000000004.json").write_text("null")
    main(train(SCENES, out, "--save-every", 2))
    assert "step-000000004 is damaged" in capsys.readouterr().err
    for state in (out / "state").rglob("*.safetensors"):
        state.write_bytes(b"x")
    assert "all are damaged" in refused(*train(SCENES, out, "--save-every", 2))
    shutil.rmtree(out / "state")
    main(train(SCENES, out))
    assert "the run starts again" in capsys.readouterr().err


# While training


def full_disk(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """From the `after`-th file on, nothing can be written any more."""
    real, done = os.fsync, []

    def fsync(handle: int) -> None:
        done.append(handle)
        if len(done) > after:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle)

    monkeypatch.setattr("os.fsync", fsync)


@pytest.mark.parametrize(
    "after", mostly_slow([4, 5, 6, 8, 9, 10, 11, 12, 13, 14, 15, 17, 18, 19, 20, 21, 22, 25], 0, 7, -1)
)
def test_disk_full_while_saving(refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Whatever file it hits, what was saved before is whole, and the run goes on when there is room."""
    words = train(SCENES, tmp_path / "out", "--save-every", 1)
    with monkeypatch.context() as patch:
        full_disk(patch, after)
        output = refused(*words)
    assert "No space left on device" in output
    assert "What was there before is kept" in output
    assert not list(tmp_path.rglob("*.tmp"))
    spoken: list[str] = []
    found = load_state(tmp_path / "out" / "state", spoken.append)
    assert not spoken
    assert (found is None) == (after < 12)
    main(words)
    assert [row["step"] for row in read_metrics(tmp_path / "out" / "metrics.jsonl")] == [1, 2, 3, 4]
