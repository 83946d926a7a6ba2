"""Model folders of strangers: data, never code; what declares too much is refused before room is made for it."""

from __future__ import annotations

import importlib.util
import json
import random
import shutil
import struct
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from folders import changed, model_folder
from kiloword.api import load
from kiloword.config.recipes import ModelFile, TextConfig
from kiloword.data.text.tokenizer import LARGEST, Tokenizer
from kiloword.interop.checkpoint import read
from kiloword.interop.open_clip import import_state
from kiloword.models.model_folder import load_model, save_model
from kiloword.training import start
from kiloword.verify.batch import config
from kiloword.verify.suite import learner

FUZZ = Path(__file__).parents[2] / "fuzz"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("models") / "base")


@pytest.fixture
def folder(base: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(base, tmp_path / "model"))


@pytest.mark.parametrize(
    ("at", "value", "says"),
    [
        ("model.image.depth", 100_000, "0 to 1024"),
        ("model.text.depth", 10**30, "0 to 1024"),
        ("model.image.heads", 0, "1 to 1024"),
        ("model.image.heads", 3, "config.json"),
        ("method", "nosuch", "nosuch"),
        ("settings", {"foo": 1}, "foo"),
        ("model.image.size", -32, "1 to 8192"),
        ("model.image.norm_eps", float("nan"), "norm_eps"),
        ("model.text.vocab", 10**9, "1 to 4194304"),
        ("model.text.vocab", 4_000_000, r"\[4000000, 32\]"),
        ("model.text.extra_tokens", ["unc"] * 10**6, "extra tokens"),
        ("model.head.dim", 65_536, "instead of"),
        ("model.preprocess.std", [0, 0, 0], "preprocess.std"),
        ("method", "llip", "image_tower.extra_tokens"),
        ("method+coca", {"decoder_depth": 100_000}, "decoder_depth"),
        ("method+sycoca", {"image_decoder_depth": 100_000}, "image_decoder_depth"),
        ("method+llip", {"k": 10**9}, "image_tower.extra_tokens"),
    ],
)
def test_declared_sizes(folder: Path, at: str, value: Any, says: str) -> None:
    at, _, method = at.partition("+")
    if method:
        changed(folder, "config.json", settings=value)
        value = method
    with pytest.raises(ValueError, match=says) as caught:
        load(changed(folder, "config.json", **{at.replace(".", "__"): value}))
    assert len(str(caught.value)) < 600


def test_a_run_does_not_start_from_a_model_that_declares_too_much(folder: Path) -> None:
    changed(folder, "config.json", model__text__vocab=4_000_000)
    with pytest.raises(ValueError, match=r"text_tower.tokens.* \[4000000, 32\]"):
        start.settle(start.defaults("clip", str(folder), "debug"), Tokenizer.load(folder))


def test_an_unknown_dtype(base: Path) -> None:
    with pytest.raises(ValueError, match="dtype is 'fp16'"):
        load(base, dtype="fp16")


def rewrite(path: Path, change: Callable[[dict[str, Any]], object], more: int = 0) -> None:
    """Change the header of a file. Args: more: bytes of a hole behind its tensors."""
    raw = path.read_bytes()
    end = 8 + struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8:end])
    change(header)
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + raw[end:])
        file.truncate(file.tell() + more)


def hole(path: Path) -> None:
    """A tensor of 64 GB that the model does not have: no disk holds it, and no memory should."""
    end = path.stat().st_size - 8 - struct.unpack("<Q", path.read_bytes()[:8])[0]
    junk = {"dtype": "F32", "shape": [16 << 30], "data_offsets": [end, end + (64 << 30)]}
    rewrite(path, lambda header: header.update(junk=junk), 64 << 30)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda path: path.write_bytes(struct.pack("<Q", 2**62) + b"{}"), "is damaged"),
        (lambda path: rewrite(path, lambda header: header.update(long=" " * (1 << 24))), "is damaged"),
        (lambda path: rewrite(path, lambda header: header["head.bias"].update(shape=[2**40])), "is damaged"),
        (lambda path: rewrite(path, lambda header: header["head.bias"].update(data_offsets=[4, 8])), "is damaged"),
        (lambda path: rewrite(path, lambda header: header["head.bias"].update(dtype="I32")), "head.bias .*int32"),
        (hole, "junk|mmap"),
    ],
    ids=range(6),
)
def test_weights(folder: Path, damage: Callable[[Path], None], says: str) -> None:
    damage(folder / "model.safetensors")
    with pytest.raises(ValueError, match=says):
        load(folder)


def test_damaged_tokenizers(folder: Path) -> None:
    for part, value in (
        ("post_processor__special_tokens__mask__ids", [2**31]),  # it decides how large a table of tokens is
        ("post_processor__special_tokens__mask__ids", ["x"]),
        ("model", 3),
        ("model", {"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "a"}),
        ("post_processor", None),
    ):
        with pytest.raises(ValueError, match=r"token|special ids") as caught:
            Tokenizer.load(changed(folder, "tokenizer.json", **{part: value}))
        assert len(str(caught.value)) <= 600
    with (folder / "tokenizer.json").open("ab") as file:
        file.truncate(LARGEST + 1)
    with pytest.raises(ValueError, match="at most"):
        Tokenizer.load(folder)


def test_a_vocabulary_that_drops_merges_at_random_does_not(folder: Path) -> None:
    before = Tokenizer.load(folder).encode(["a dog on the grass"] * 9, TextConfig(vocab=512)).ids
    again = Tokenizer.load(changed(folder, "tokenizer.json", model__dropout=0.9))
    assert again.encode(["a dog on the grass"] * 9, TextConfig(vocab=512)).ids.equal(before)


def test_junk_in_place_of_weights(open_clip: ModuleType, tmp_path: Path) -> None:
    for value in (3, [1], {"state_dict": {}}, {1: torch.zeros(1)}, {"visual.proj": torch.zeros(2, 2).to_sparse()}):
        torch.save(value, tmp_path / "x.pt")
        with pytest.raises(ValueError, match=r"\w"):
            import_state("ViT-B-32", read(tmp_path / "x.pt"))


CODE = "stranger_trunk_code"  # a module on the path, which writes a file when imported
VIT = {"model_type": "vit", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
IMAGE: list[dict[str, Any]] = [
    {"name": "os:system"},
    {"name": f"{CODE}:make"},
    {"name": f"timm:{CODE}"},
    {"name": "hf", "config": {"model_type": CODE}},
    {"name": "hf", "config": {**VIT, "hidden_size": 10**12}},
    {"name": "hf", "config": {"model_type": "other", "auto_map": {"AutoModel": f"{CODE}.Model"}}},
    {"name": "efficientnet-lite0"},  # other shapes than the weights have
    {"grid": 8192},
    {"width": 65_536},
    {"prefix": 4096},
    {"config": "x"},
]
TEXT: list[dict[str, Any]] = [
    {"name": CODE},
    {"config": {"model_type": CODE, "auto_map": {"AutoModel": f"{CODE}.Model"}}},
    {"config": {"model_type": "bert", "hidden_size": 24, "num_hidden_layers": 100_000}},
    {"config": {"model_type": "bert", "hidden_size": 24, "vocab_size": 10**12}},
    {"width": 65_536},
]


@pytest.fixture(scope="module")
def with_trunks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stranger")
    small = learner("siglip", trunks="frozen").float().model
    file = ModelFile(method="siglip", settings={}, model=config("frozen"), size="debug")
    save_model(folder, small, Tokenizer.train(["a small red star"], 300), file)
    return folder


@pytest.mark.parametrize(
    ("tower", "change"), [("image", {}), *(("image", c) for c in IMAGE), *(("text", c) for c in TEXT)]
)
def test_trunks_of_strangers(
    with_trunks: Path, tower: str, change: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{CODE}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\ndef make(*_): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    folder = Path(shutil.copytree(with_trunks, tmp_path / "model"))
    changed(folder, "config.json", **{f"model__{tower}__trunk__{name}": value for name, value in change.items()})
    with pytest.raises(ValueError, match=r"\w") if change else nullcontext():
        load_model(folder)
    assert not (tmp_path / "ran").exists()
    assert CODE not in sys.modules


@pytest.mark.slow
def test_changed_folders_load_or_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FUZZ))
    figures = importlib.import_module("folders_fuzz").attempt(100, tmp_path, seed=1)
    assert not figures.broken
    assert figures.outcomes["loaded"] > 5
    assert figures.outcomes["refused"] > 30


def test_a_vocabulary_learns_from_the_beginning_of_long_words() -> None:
    """Its work grew as the square of a word: 45 s of a caption of 200,000 Chinese characters."""
    rng = random.Random(0)
    usual = ["".join(chr(0x4E00 + rng.randrange(300)) for _ in range(1024)), "a dog " * 10_000]
    long = "".join(chr(0x4E00 + rng.randrange(300)) for _ in range(200_000))
    found = Tokenizer.train([*usual, long], 1000).to_bytes()
    assert found == Tokenizer.train([*usual, long[:1024]], 1000).to_bytes()
