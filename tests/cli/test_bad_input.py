"""What users get wrong, and what goes wrong around them: one sentence and exit code 2, or a counted, named skip."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import commands
from cases import mostly_slow
from folders import changed
from kiloword.cli.main import main
from kiloword.training.log import read_metrics
from runs import load_state
from sources import files_of
from tars import pairs, photo, write_tar

SCENES = "scenes?n=64"  # few, so that the tokenizer is trained at once
SMALL = ["--size", "debug", "--batch", "8", "--steps", "4", "--log-every", "1", "--vocab", "300"]
Refused = Callable[..., str]


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    """Runs a command line that must fail; returns its one sentence."""

    def run(*words: object) -> str:
        capsys.readouterr()
        output = commands.refused(capsys, *words)
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


DATA: dict[str, tuple[bytes | None, str]] = {  # name: its content (None: no file), what the refusal says
    "none": (None, "no such file or folder"),
    "empty/": (None, "empty folder"),
    "data/": (None, "no images"),
    "page.tar": (b"<html>not found</html>" * 100, "tar"),
    "words.xyz": (b"a dog", "words.xyz"),
    "columns.csv": (b"image,words\na.jpg,dog\n", "image, words"),
    "empty.csv": (b"", "empty"),
}


@pytest.mark.parametrize("name", DATA)
def test_data_that_cannot_be_used(refused: Refused, model: Path, tmp_path: Path, name: str) -> None:
    """By every verb that reads a data set."""
    content, says = DATA[name]
    data = tmp_path / name
    if name.endswith("/"):
        data.mkdir()
    if name == "data/":
        write_tar(data / "0.tar", {"a.txt": b"a dog", "b.txt": b"a cat"})
    if content is not None:
        data.write_bytes(content)
    for what in ("index", "check", "stats"):
        assert says in refused("data", what, data)
    for task in ("retrieval", "zeroshot"):
        assert says in refused("eval", task, model, "--data", data)
    assert says in refused(*train(data, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_too_many_bad_samples_stop_the_run(refused: Refused, tmp_path: Path) -> None:
    write_tar(tmp_path / "data" / "0.tar", pairs(24) | {"torn.png": photo()[:60], "torn.txt": b"x"})
    output = refused(*train(tmp_path / "data", tmp_path / "out", "--batch", 25))
    for words in ("1 of the data set's 25 samples", "1.00%", "torn", "decoded", "--bad-share"):
        assert words in output


# Model folders


def uses(model: Path, tmp_path: Path) -> list[list[str]]:
    """Every verb that reads a model folder."""
    (tmp_path / "a.png").write_bytes(photo())
    return [
        ["eval", "retrieval", str(model), "--data", "scenes:test?n=8"],
        ["score", str(model), "--images", str(tmp_path / "a.png"), "--texts", "x"],
        train(SCENES, tmp_path / "out", "--init", model),
    ]


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
@pytest.mark.parametrize("damage", ["gone", "cut", "empty", "noise"])
def test_model_folder_is_damaged(refused: Refused, model: Path, tmp_path: Path, name: str, damage: str) -> None:
    whole = (model / name).read_bytes()
    (model / name).write_bytes({"cut": whole[: len(whole) // 2], "noise": os.urandom(500)}.get(damage, b""))
    if damage == "gone":
        (model / name).unlink()
    for words in uses(model, tmp_path):
        assert name in refused(*words)


def test_no_model_folder_or_another_config(refused: Refused, a_run: Path, model: Path, tmp_path: Path) -> None:
    for words in uses(tmp_path / "none", tmp_path):
        assert "none" in refused(*words)
    assert f"Did you mean {a_run / 'model'}?" in refused(*train(SCENES, tmp_path / "out", "--init", a_run))
    for change, says in (({"model__image__colour": "red"}, "image.colour"), ({"model__head__dim": 8}, "do not fit")):
        other = Path(shutil.copytree(model, tmp_path / says))
        for words in uses(changed(other, "config.json", **change), tmp_path):
            assert says in refused(*words)


# The folder of a run


def test_out_cannot_be_written(refused: Refused, model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for out in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/none")):
        assert f"{out} cannot be written" in refused(*train(SCENES, out))
    json_out = ("--data", "scenes:test?n=4", "--json", tmp_path / "file" / "r.json")
    assert "r.json" in refused("eval", "retrieval", model, *json_out)


def test_out_holds_another_run(refused: Refused, a_run: Path) -> None:
    before = files_of(a_run)
    output = refused(*train(SCENES, a_run, "--optim.lr", 0.5, "--seed", 3))
    assert re.search("seed is 0 there, 3 here; optim.lr is 0[.0-9]+ there, 0.5 here", output)
    assert files_of(a_run) == before


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
    """Where all are damaged, the user decides."""
    out = Path(shutil.copytree(a_run, tmp_path / "out"))
    for state in (out / "state").rglob("*.safetensors"):
        state.write_bytes(b"x")
    assert "damaged" in refused(*train(SCENES, out, "--save-every", 2))
    shutil.rmtree(out / "state")
    main(train(SCENES, out))
    assert "starts again" in capsys.readouterr().err


# While training


@pytest.mark.parametrize(
    "after", mostly_slow([4, 5, 6, 8, 9, 10, 11, 12, 13, 14, 15, 17, 18, 19, 20, 21, 22, 25], 0, 7, -1)
)
def test_disk_full_while_saving(refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Whatever file the `after`-th is, what was saved before is whole, and the run goes on when there is room."""
    words, real, synced = train(SCENES, tmp_path / "out", "--save-every", 1), os.fsync, []

    def fsync(handle: int) -> None:
        synced.append(handle)
        if len(synced) > after:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        assert "No space left on device" in refused(*words)
    assert not list(tmp_path.rglob("*.tmp"))
    spoken: list[str] = []
    found = load_state(tmp_path / "out" / "state", spoken.append)
    assert not spoken
    assert (found is None) == (after < 12)
    main(words)
    assert [row["step"] for row in read_metrics(tmp_path / "out" / "metrics.jsonl")] == [1, 2, 3, 4]
