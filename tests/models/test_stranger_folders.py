"""Model folders that declare too much: refused by one message before room is made for any of it."""

from __future__ import annotations

import importlib.util
import io
import json
import pickle
import random
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from functools import reduce
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from folders import model_folder
from kiloword.api import load
from kiloword.config.recipes import HeadConfig, ImageConfig, TextConfig
from kiloword.config.settings import check as check_recipe
from kiloword.data.text.tokenizer import LARGEST, Tokenizer
from kiloword.interop.open_clip import import_state, read
from kiloword.methods.defaults import default_recipe
from kiloword.models.model_folder import read_model_file
from kiloword.models.tensors import read_shapes
from kiloword.training import start

FUZZ = Path(__file__).parents[2] / "fuzz"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("models") / "base")


@pytest.fixture
def folder(base: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(base, tmp_path / "model"))


@pytest.fixture
def no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """No model is built, and no file of weights is read, before the message."""

    def never(*args: object, **options: object) -> None:
        raise AssertionError("room was made for what does not fit")

    monkeypatch.setattr("kiloword.model.model.initialise", never)
    monkeypatch.setattr(Path, "read_bytes", never)


def change(folder: Path, what: str, at: str, value: Any) -> Path:
    """Set one value of a json file by its dotted name."""
    path = folder / what
    document = json.loads(path.read_text(encoding="utf-8"))
    *parts, last = at.split(".")
    reduce(lambda inner, part: inner[part], parts, document)[last] = value
    path.write_text(json.dumps(document), encoding="utf-8")
    return folder


@pytest.mark.usefixtures("no_room")
@pytest.mark.parametrize(
    ("at", "value", "says"),
    [
        ("model.image.depth", 100_000, "expected 0 to 1024"),
        ("model.text.depth", 10**30, "expected 0 to 1024"),
        ("model.image.width", 0, "expected 1 to 65536"),
        ("model.image.heads", 0, "expected 1 to 1024"),
        ("model.image.heads", 3, r"config\.json cannot be used: .*cannot be split into 3 heads"),
        ("method", "nosuch", r"config\.json cannot be used: unknown method 'nosuch'"),
        ("settings", {"foo": 1}, r"config\.json cannot be used: settings of \S+: foo"),
        ("model.image.mlp", -1, "expected 1 to"),
        ("model.image.patch", 0, "expected 1 to"),
        ("model.image.size", -32, "expected 1 to 8192"),
        ("model.image.norm_eps", float("nan"), "model.image.norm_eps is nan"),
        ("model.text.vocab", 10**9, "expected 1 to 4194304"),
        ("model.text.vocab", 4_000_000, r"text_tower.tokens is \[\d+, 32\] instead of \[4000000, 32\]"),
        ("model.text.context", 10**9, "expected 3 to 65536"),
        ("model.text.extra_tokens", ["unc"] * 10**6, "1,000,000 extra tokens: expected 16 at most"),
        ("model.head.dim", 65_536, "instead of"),
        ("model.head.pool_heads", 0, "expected 1 to"),
        ("model.head.pool_queries", 10**9, "expected 1 to"),
        ("model.preprocess.std", [0, 0, 0], "model.preprocess.std is 0.0: expected 1e-06"),
        ("model.preprocess.mean", [0, float("inf"), 0], "model.preprocess.mean is inf"),
        ("method", "llip", r"unexpected keyword|do not fit its config: missing image_tower.extra_tokens"),
    ],
)
def test_declared_sizes(folder: Path, at: str, value: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        load(change(folder, "config.json", at, value))
    assert len(str(caught.value)) < 600


@pytest.mark.usefixtures("no_room")
@pytest.mark.parametrize(
    ("method", "settings", "says"),
    [
        ("coca", {"decoder_depth": 100_000}, "decoder_depth is 100000: expected 0 to 1024"),
        (
            "sycoca",
            {"image_decoder_depth": 100_000},
            "image_decoder_depth is 100000: expected 0 to 1024",
        ),
        ("vqa", {"decoder_depth": 100_000}, "decoder_depth is 100000: expected 0 to 1024"),
        ("llip", {"k": 10**9}, "missing image_tower.extra_tokens"),
    ],
)
def test_declared_sizes_of_a_method(folder: Path, method: str, settings: dict[str, Any], says: str) -> None:
    change(folder, "config.json", "settings", settings)
    with pytest.raises(ValueError, match=says):
        load(change(folder, "config.json", "method", method))


LIMITED = [
    (part, f.name, f.metadata["limits"])
    for part, kind in (("image", ImageConfig), ("text", TextConfig), ("head", HeadConfig))
    for f in fields(kind)
    if "limits" in f.metadata
]


@pytest.mark.parametrize(("part", "name", "limits"), LIMITED, ids=[f"{part}.{name}" for part, name, _ in LIMITED])
def test_recipe_and_model_file_have_the_same_ranges(
    folder: Path, part: str, name: str, limits: tuple[float, float]
) -> None:
    recipe = default_recipe("siglip", "debug")
    for value in (int(limits[0]) - 1, int(limits[1]) + 1):
        parts = {part: replace(getattr(recipe.model, part), **{name: value})}
        says = rf"model.{part}.{name} is {value}(\.0)?: expected"
        with pytest.raises(ValueError, match="--" + says.replace("_", "-")):
            check_recipe(replace(recipe, model=replace(recipe.model, **parts)))
        with pytest.raises(ValueError, match=says):
            read_model_file(change(folder, "config.json", f"model.{part}.{name}", value))


@pytest.mark.usefixtures("no_room")
def test_a_run_does_not_start_from_a_model_that_declares_too_much(folder: Path) -> None:
    change(folder, "config.json", "model.text.vocab", 4_000_000)
    with pytest.raises(ValueError, match=r"text_tower.tokens is .* instead of \[4000000, 32\]"):
        start.settle(start.defaults("clip", str(folder), "debug"), Tokenizer.load(folder))


# Weights


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def write(path: Path, header: str, body: bytes, more: int = 0) -> None:
    """Args: more: bytes of a hole behind the body."""
    raw = header.encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw + body)
        file.truncate(file.tell() + more)


def hole(path: Path, dtype: str) -> None:
    """A tensor of 64 GB that the model does not have: no disk holds it, and no memory should."""
    header, body = header_of(path)
    size = 64 << 30
    header["junk"] = {"dtype": dtype, "shape": [size // 4], "data_offsets": [len(body), len(body) + size]}
    write(path, json.dumps(header), body, size)


def widened(path: Path) -> None:
    header, body = header_of(path)
    header["head.log_scale"]["shape"] = [2**40]
    write(path, json.dumps(header), body)


def twice(path: Path) -> None:
    header, body = header_of(path)
    other = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    write(path, json.dumps(header)[:-1] + f', "head.bias": {json.dumps(other)}}}', body)


def overlapping(path: Path) -> None:
    header, body = header_of(path)
    header["head.bias"]["data_offsets"] = header["head.log_scale"]["data_offsets"]
    write(path, json.dumps(header), body)


def integers(path: Path) -> None:
    header, body = header_of(path)
    header["head.bias"]["dtype"] = "I32"
    write(path, json.dumps(header), body)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-100]), "is damaged"),
        (lambda path: path.write_bytes(path.read_bytes()[:5]), "is damaged"),
        (lambda path: path.write_bytes(b""), "is damaged"),
        (lambda path: path.write_bytes(struct.pack("<Q", 2**62) + b"{}"), "header of 4,611"),
        (lambda path: write(path, " " * (1 << 24) + "{}", b""), "expected at most 16,777,216"),
        (lambda path: write(path, "{}", b"", 64 << 30), "is damaged"),
        (lambda path: hole(path, "F32"), "unknown junk"),
        (widened, "is damaged"),
        (twice, "is damaged|instead of"),
        (overlapping, "is damaged"),
        (integers, "head.bias in .* is I32: expected one of F64, F32, BF16, F16"),
    ],
    ids=range(11),
)
def test_weights(folder: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], None], says: str) -> None:
    damage(folder / "model.safetensors")
    monkeypatch.setattr(Path, "read_bytes", None)
    with pytest.raises(ValueError, match=says):
        load(folder)


def test_shapes_are_read_without_the_weights(folder: Path) -> None:
    model = load(folder).model
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    assert read_shapes(folder / "model.safetensors") == shapes


# Tokenizers


def test_damaged_tokenizers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part, value in (
        ("normalizer", {"type": "Odd"}),
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "////"}),
        ("model", 3),
        ("model", {"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "a"}),
        ("post_processor", None),
    ):
        with pytest.raises(ValueError, match=r"tokenizer file|tokenizer\.json") as caught:
            Tokenizer.load(change(folder, "tokenizer.json", part, value))
        assert len(str(caught.value)) <= 600
    with (folder / "tokenizer.json").open("ab") as file:
        file.truncate(LARGEST + 1)
    monkeypatch.setattr(Path, "read_text", None)
    with pytest.raises(ValueError, match="at most"):
        Tokenizer.load(folder)


def test_a_vocabulary_that_drops_merges_at_random_does_not(folder: Path) -> None:
    before = Tokenizer.load(folder).encode(["a dog on the grass"] * 9, TextConfig(vocab=512)).ids
    again = Tokenizer.load(change(folder, "tokenizer.json", "model.dropout", 0.9))
    assert again.encode(["a dog on the grass"] * 9, TextConfig(vocab=512)).ids.equal(before)


def test_padding_and_truncation_are_switched_off(folder: Path) -> None:
    plain = Tokenizer.load(folder)
    more = {"pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "x"}
    change(folder, "tokenizer.json", "padding", {"strategy": {"Fixed": 10**8}, "direction": "Right", **more})
    cut = {"direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": 0}
    change(folder, "tokenizer.json", "truncation", cut)
    ids = Tokenizer.load(folder).encode(["a dog on the grass"], TextConfig(vocab=512)).ids
    assert ids.tolist() == plain.encode(["a dog on the grass"], TextConfig(vocab=512)).ids.tolist()


@pytest.mark.parametrize("value", [2**31, -1, "x", None, 10**30])
def test_special_ids_belong_to_the_vocabulary(folder: Path, value: Any) -> None:
    """They decide how large the token table of a model that starts from this one is."""
    at = "post_processor.special_tokens.mask.ids"
    with pytest.raises(ValueError, match=r"special ids far from|not written by kiloword|damaged tokenizer"):
        Tokenizer.load(change(folder, "tokenizer.json", at, [value]))


# Weights of others


def junk() -> list[Any]:
    """What a .pt may hold: bytes, or values to save."""
    saved = io.BytesIO()
    torch.save({"visual.proj": torch.zeros(4, 4), "logit_scale": torch.zeros(())}, saved)
    raw, rng = saved.getvalue(), random.Random(0)
    changed = [bytes(rng.choice((b, rng.randrange(256))) if rng.random() < 0.02 else b for b in raw) for _ in range(30)]
    cut = [raw[:n] for n in (0, 1, 5, 50, 300, len(raw) // 2, len(raw) - 1)]
    foreign = [
        b"\0",
        b"\x80",
        b"\x80\2",
        b"PK\3\4",
        b"PK\5\6" + b"\0" * 18,
        b"{}",
        b"<html>",
        b"\x80\2}q\0.",
        b"x" * 999,
    ]
    pickles = [pickle.dumps(v, p) for v in (1, None, [], {}, {"a": 1}, (1,), 1.5) for p in range(6)]
    tensors = [
        {name: torch.zeros(shape)}
        for name in ("visual.proj", "visual.trunk.pos_embed", "visual.conv1.weight", "logit_scale", "logit_bias")
        for shape in ((0,), (2, 2, 2))
    ]
    for kind in (torch.bool, torch.int64, torch.complex64):
        tensors.append({"visual.proj": torch.zeros(512, 768, dtype=kind), "logit_scale": torch.zeros((), dtype=kind)})
    tensors += [{"visual.proj": torch.zeros(())}, {"visual.trunk.pos_embed": torch.zeros(())}]
    tensors += [{"visual.proj": torch.zeros(4, 4).to_sparse()}, {"logit_scale": torch.zeros((), device="meta")}]
    decoders = ("text_decoder.resblocks.x.ln_1.weight", "text_decoder.x", "text_decoder.cross_attn.0.attn.in_proj_bias")
    tensors += [{name: torch.zeros(1)} for name in (*decoders, "", "transformer.resblocks.x.attn.in_proj_weight")]
    names = ("text.token_embedding.weight", "text.cls_emb", "text_decoder.x")
    tables = {name: torch.zeros(()) for name in names}
    return [*cut, *changed, *foreign, *pickles, *tensors, tables, {"state_dict": {}}, {1: torch.zeros(1)}, [1], 3]


def test_junk_in_place_of_weights(tmp_path: Path) -> None:
    if importlib.util.find_spec("open_clip") is None:
        pytest.skip("open_clip is not installed")
    for n, value in enumerate(junk()):
        path = tmp_path / "x.pt"
        if isinstance(value, bytes):
            path.write_bytes(value)
        else:
            torch.save(value, path)
        with pytest.raises(ValueError, match=r"plain tensors|shape|none of these|do not fit|holds") as caught:  # noqa: PT012
            import_state("ViT-B-32", read(path))
            raise AssertionError(f"kind {n} was imported")
        assert "\n" not in str(caught.value), n


# Many


@pytest.fixture
def mutants(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FUZZ))
    return importlib.import_module("folders_fuzz")


@pytest.mark.slow
def test_changed_folders_load_or_are_refused(mutants: ModuleType, tmp_path: Path) -> None:
    figures = mutants.attempt(100, tmp_path, seed=1)
    assert not figures.broken
    assert figures.outcomes["loaded"] > 5
    assert figures.outcomes["refused"] > 30


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_thousand_changed_folders() -> None:
    """Within 2 GB and 10 s each."""
    words = [sys.executable, str(FUZZ / "folders_fuzz.py"), "2000"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "2,000 folders: " in done.stdout


# Vocabularies


def test_a_vocabulary_learns_from_the_beginning_of_long_words() -> None:
    """Its work grew as the square of a word: 45 s of a caption of 200,000 Chinese characters."""
    rng = random.Random(0)
    usual = ["".join(chr(0x4E00 + rng.randrange(300)) for _ in range(1024)), "a dog " * 10_000]
    long = "".join(chr(0x4E00 + rng.randrange(300)) for _ in range(200_000))
    found = Tokenizer.train([*usual, long], 1000).to_bytes()
    assert found == Tokenizer.train([*usual, long[:1024]], 1000).to_bytes()
