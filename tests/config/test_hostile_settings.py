"""Settings and names made by someone who means harm: a sentence, and nothing that steers the terminal."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from kiloword.cli.main import main
from kiloword.config.recipes import ModelConfig, ModelFile, TextConfig
from kiloword.config.settings import read_config
from kiloword.data.tars.index import parse_index
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.methods.registry import preset
from kiloword.training.run_folder import RunFile
from tars import photo, write_tar

NESTED = b"[" * 100_000


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["a dog on the grass", "two cats and a dog"] * 20, 400)


@pytest.mark.parametrize(
    "raw",
    [NESTED, b'{"recipe":' * 50_000, b"\xff\xfe", b"", b"null", b"[]", b"NaN", b"9" * 5000, b'{"\\ud800": 1}'],
    ids=range(9),
)
def test_settings_that_cannot_be_read(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(raw)
    for kind in (RunFile, ModelFile):
        with pytest.raises(ValueError, match=r"config.json cannot be used: .* It was damaged") as caught:
            read_config(path, kind)
        assert len(str(caught.value)) < 700
    (tmp_path / "tokenizer.json").write_bytes(raw)
    with pytest.raises(ValueError, match="damaged tokenizer file"):
        Tokenizer.load(tmp_path)
    assert parse_index(raw) is None


@pytest.mark.parametrize(
    ("inside", "name", "value", "says"),
    [
        ("preprocess", "std", [1, 0, 1], "model.preprocess.std is 0.0: expected 1e-06 to 1000"),
        ("image", "init_std", float("nan"), "model.image.init_std is nan: expected 0 to 100"),
        ("text", "norm_eps", float("inf"), "model.text.norm_eps is inf: expected 1e-20 to 1"),
        ("image", "heads", 0, "model.image.heads is 0: expected 1 to 1024"),
    ],
)
def test_numbers_of_a_file_have_the_limits_of_the_command_line(
    tmp_path: Path, inside: str, name: str, value: object, says: str
) -> None:
    model = asdict(ModelConfig())
    model[inside][name] = value
    (tmp_path / "config.json").write_text(json.dumps({"method": "siglip", "settings": {}, "model": model}))
    with pytest.raises(ValueError, match=re.escape(says)):
        read_config(tmp_path / "config.json", ModelFile)


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), 1e7])
def test_settings_of_a_method_in_a_file_have_limits(scale: float) -> None:
    with pytest.raises(ValueError, match=r"settings of siglip: scale is \S+: expected -1e\+06 to 1e\+06"):
        preset("siglip", {"scale": scale})


def test_a_tokenizer_of_strangers(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """What the library reads may still lack what we need."""
    document = json.loads(tokenizer._backend.to_str())
    words = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    for changed in (document | {"post_processor": None}, document | {"post_processor": {"type": "BertProcessing",
        "sep": ["a", 0], "cls": ["b", 1]}}, document | {"model": words}):  # fmt: skip
        (tmp_path / "tokenizer.json").write_text(json.dumps(changed))
        with pytest.raises(ValueError, match="tokenizer"):
            Tokenizer.load(tmp_path).encode(["a dog"], TextConfig(vocab=512))


def test_names_do_not_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A key of escape codes, or of bytes that are no text, is written in letters."""
    evil = "\x1b[2J\udcff\u202e"
    write_tar(tmp_path / "x.tar", {f"{evil}.png": b"no image", f"{evil}.txt": b"x", "a.png": photo(), "a.txt": b"x"})
    with pytest.raises(SystemExit) as end:
        main(["data", "check", str(tmp_path / "x.tar")])
    assert end.value.code == 1
    said = capsys.readouterr()
    said.out.encode()
    assert "\x1b[2J" not in said.out + said.err
    assert r"\x1b[2J\udcff\u202e" in said.out
