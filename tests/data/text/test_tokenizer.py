"""Tokenizers: round trips, packing, truncation, CLIP's ids against open_clip's own tokenizer; `--tokenizer`."""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import pickle
import random
import string
import subprocess
import sys
import unicodedata
from pathlib import Path
from types import ModuleType

import pytest
import tokenizers
import torch
from hypothesis import assume, given, settings, strategies as st
from tokenizers import decoders, models, pre_tokenizers

from commands import module_at, refused
from kiloword.cli.main import main
from kiloword.config.recipes import TextConfig
from kiloword.data.text.tokenizer import (
    Tokenizer,
    clip_tokenizer,
    clip_tokenizer_from,
    siglip,
    tokenizer_from,
    vocabulary,
)
from kiloword.model.trunks.libraries import torchvision_ready
from kiloword.training.run_folder import RunFile, read_config

CAPTIONS = [f"a {c} {s} on the {p} ." for c in ("red", "blue") for s in ("dog", "ball") for p in ("left", "right")] * 3
ODD = [
    "",
    "   ",
    "Hello   World's\tbest\nDOG",
    "it's they'll I'd we've i'm you're don't 'S 'ſ",
    "caf\u00e9 na\u00efve \u65e5\u672c\u8a9e \U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467",
    "&lt;b&gt; &amp;amp; &eacute; 100% $5.99 1,000",
    "schÃ¶n â€œquotedâ€\x9d mojibake",
    "a\x0bb\x1cc\x00d\x7fe\x85f\xa0g\u3000h",
    "<start_of_text> in the middle <end_of_text> and <mask> <pad>",
    "</w> !!!! ... ---- aaaaaaaa ______",
    "İstanbul ẞ ﬁne Ⅷ ½ ²",
    "a\u0345b !\u0345! \u0345",
    "x" * 3000,
    "word " * 200,
]


@pytest.fixture(scope="module")
def own() -> Tokenizer:
    return Tokenizer.train(CAPTIONS, 300)


@pytest.fixture(scope="module")
def clip() -> Tokenizer:
    pytest.importorskip("ftfy")
    if importlib.util.find_spec("open_clip") is None:
        pytest.skip("open_clip is not installed")
    return clip_tokenizer()


@pytest.fixture(scope="module")
def oracle() -> ModuleType:
    """open_clip's tokenizer file by itself: the package's import needs a working torchvision."""
    package = importlib.util.find_spec("open_clip")
    if package is None or not package.submodule_search_locations:
        pytest.skip("open_clip is not installed")
    path = Path(package.submodule_search_locations[0]) / "tokenizer.py"
    return module_at(path, "open_clip_tokenizer")


def config(**changes: object) -> TextConfig:
    return TextConfig(**{"context": 32, "vocab": 50000, **changes})  # type: ignore[arg-type]


def rows(tokenizer: Tokenizer, captions: list[str], settings: TextConfig) -> list[list[int]]:
    texts = tokenizer.encode(captions, settings)
    assert texts.longest == int(texts.starts.diff().max())
    return [texts.ids[a:b].tolist() for a, b in zip(texts.starts[:-1], texts.starts[1:], strict=True)]


@given(text=st.text(max_size=60))
def test_any_text_survives_byte_level(own: Tokenizer, text: str) -> None:
    got = own.decode(rows(own, [text], config(context=2000))[0])
    composed = unicodedata.normalize("NFC", " ".join(text.split()))
    # Letter by letter, as the library does: Python lower-cases a final sigma by its context.
    assert got.split() == "".join(c.lower() for c in composed).split()


def test_special_tokens_in_a_caption_are_plain_text(own: Tokenizer) -> None:
    for tokenizer in (own, pickle.loads(pickle.dumps(own))):
        ids = rows(tokenizer, ["<mask> <end> <pad>"], config())[0]
        assert (own.roles.mask in ids, ids.count(own.roles.end)) == (False, 1)
        assert own.decode(ids) == "<mask> <end> <pad>"
    surrogates = "a d\udcffg \ud800"  # as file names that are not UTF-8 have
    assert rows(own, [surrogates], config()) == rows(own, ["a d?g ?"], config())


def test_truncation_keeps_the_end_and_the_extra_tokens_and_is_counted(own: Tokenizer) -> None:
    captions = ["a red dog", "red dog " * 40]
    settings = config(context=8, extra_tokens=("unc", "cls"))
    texts = own.encode(captions, settings)
    short, long = rows(own, captions, settings)
    assert texts.truncated == 1
    assert short[0] == long[0] == own.roles.start
    assert short[-3:] == long[-3:] == [own.roles.end, own.roles.unc, own.roles.cls]
    assert len(long) == 8
    full = rows(own, captions, config(context=500))[1]
    assert long[:5] == full[:5]
    assert own.cut(captions, settings) == {1: (len(full) - 2, 4)}


@pytest.mark.slow
def test_training_does_not_depend_on_order_or_threads(own: Tokenizer, tmp_path: Path) -> None:
    own.save(tmp_path)
    code = "from kiloword.data.text.tokenizer import Tokenizer as T\n"
    code += f"T.train({random.Random(1).sample(CAPTIONS, len(CAPTIONS))!r}, 300).save({str(tmp_path / 'b')!r})"
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": "4", "PYTHONHASHSEED": "7"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    assert (tmp_path / "tokenizer.json").read_bytes() == (tmp_path / "b" / "tokenizer.json").read_bytes()


def test_what_does_not_fit_is_refused(own: Tokenizer) -> None:
    for call, word in (
        (lambda: Tokenizer.train(CAPTIONS, 100), "262"),
        (lambda: own.encode(["a"], config(context=2)), "no room"),
        (lambda: own.cut(["a"], config(context=2)), "no room"),
        (lambda: own.encode(["a red dog"], config(vocab=100)), "does not fit"),
    ):
        with pytest.raises(ValueError, match=word):
            call()


def test_captions_of_the_web_need_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ftfy", None)
    assert siglip("A dog, plain!") == "a dog plain"
    for call in (lambda: siglip("a &amp; b"), lambda: clip_tokenizer_from([]).encode(["a &amp; b"], config())):
        with pytest.raises(ValueError, match=r"^caption .* needs ftfy"):
            call()


def test_clip_ids_equal_open_clip_on_odd_captions(clip: Tokenizer, oracle: ModuleType) -> None:
    settings = config(context=77, pad_to_context=True)
    expected = oracle.tokenize(ODD)
    assert torch.equal(clip.encode(ODD, settings).ids.view(-1, 77), expected)
    assert clip.encode(ODD, settings).truncated == 2
    assert clip.plain_vocab == 49408


@given(text=st.text(st.characters(max_codepoint=0x2FFF, exclude_categories=["Cn", "Cs"]), max_size=40))
@settings(max_examples=200)
def test_clip_ids_equal_open_clip_on_any_text(clip: Tokenizer, oracle: ModuleType, text: str) -> None:
    """Characters assigned long ago, once repaired too: there the two libraries hold the same Unicode tables."""
    ftfy = pytest.importorskip("ftfy")
    assume(not any(unicodedata.category(c) == "Cn" for c in ftfy.fix_text(text)))
    expected = oracle.tokenize([text], 200)[0]
    assert torch.equal(clip.encode([text], config(context=200, pad_to_context=True)).ids, expected)


def test_clip_folder_needs_no_open_clip(clip: Tokenizer, tmp_path: Path) -> None:
    clip.save(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    assert rows(loaded, ODD, config(context=77)) == rows(clip, ODD, config(context=77))
    assert loaded.decode(rows(loaded, ["A dog's \u00e9t\u00e9!"], config())[0]) == "a dog 's \u00e9t\u00e9 !"


def hub_siglip(path: Path) -> Path:
    """A small unigram vocabulary as the hub has SigLIP's."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)] + [(f"\u2581{w}", -1.0) for w in ("a", "red", "dog")]
    backend = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=2))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.enable_truncation(2)  # files from hubs may carry both; neither may leak into ours
    backend.enable_padding(length=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    backend.save(str(path))
    return path


def test_siglip_canonicalises_ends_and_pads_with_one(tmp_path: Path) -> None:
    ours = vocabulary(str(hub_siglip(tmp_path / "hub.json")))
    settings = config(context=6, pad_to_context=True)
    assert rows(ours, ["A  Red, DOG!", "a_dog"], settings) == [[3, 4, 5, 1, 1, 1], [3, 5, 1, 1, 1, 1]]
    assert rows(ours, ["a dog " * 9], settings) == [[3, 5, 3, 5, 3, 1]]
    ours.save(tmp_path)
    assert rows(Tokenizer.load(tmp_path), ["a red dog"], settings) == [[3, 4, 5, 1, 1, 1]]
    assert ours.decode([3, 4, 5, 1, 1]) == "a red dog"


@pytest.mark.parametrize("lower", [False, True])
def test_siglip_2_as_open_clip_and_as_transformers_read_it(tmp_path: Path, oracle: ModuleType, lower: bool) -> None:
    """Gemma's vocabulary, small; "<mask>" in a caption is text here."""
    torchvision_ready()
    library = pytest.importorskip("transformers", reason="needs transformers")
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *(f"<0x{n:02X}>" for n in range(256))]
    merges = [("\u2581", "a"), ("d", "o"), ("do", "g"), ("r", "e"), ("re", "d")]
    pieces += [*"\u2581", *string.ascii_letters, *".!&;", *map("".join, merges)]
    vocab = {piece: n for n, piece in enumerate(pieces)}
    ends = {"add_bos_token": False, "add_eos_token": True, "padding_side": "right"}
    theirs = library.Siglip2Tokenizer(vocab=vocab, merges=merges, **ends)
    theirs.save_pretrained(tmp_path)
    captions, settings = [*ODD[:8], *ODD[9:], "A red dog!"], config(context=64, pad_to_context=True)
    read = tokenizer_from((tmp_path / "tokenizer.json").read_text(encoding="utf-8"), lower)
    read.save(tmp_path / "ours")
    if lower:
        expected = theirs(captions, padding="max_length", max_length=64, truncation=True).input_ids
    else:
        expected = oracle.HFTokenizer(str(tmp_path), context_length=64, clean="canonicalize")(captions).tolist()
    for ours in (read, Tokenizer.load(tmp_path / "ours")):
        assert rows(ours, captions, settings) == expected


# Vocabularies by name and by file

WORD_LEVEL = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
HUB = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
SAID = ["a dog's ball, 12 times", "two Cats &amp; a dog!", "the red circle"]


def ids(tokenizer: Tokenizer) -> list[int]:
    captions = SAID if importlib.util.find_spec("ftfy") else [SAID[0], SAID[2]]
    return tokenizer.encode(captions, TextConfig(vocab=1 << 20)).ids.tolist()


def test_clip_by_name_and_by_its_merges(clip: Tokenizer, tmp_path: Path) -> None:
    """The same ids from open_clip's package and from its file of merges, packed or not."""
    (package,) = importlib.util.find_spec("open_clip").submodule_search_locations  # type: ignore[union-attr, misc]
    packed = Path(package) / "bpe_simple_vocab_16e6.txt.gz"
    (tmp_path / "merges.txt").write_bytes(gzip.decompress(packed.read_bytes()))
    for path in (packed, tmp_path / "merges.txt"):
        assert ids(vocabulary(str(path))) == ids(vocabulary("clip")) == ids(clip)


@pytest.mark.slow
def test_clip_as_the_hub_has_it(clip: Tokenizer, tmp_path: Path) -> None:
    """The same ids from a tokenizer.json with another pattern and without kiloword's special ids."""
    document = json.loads(clip.to_bytes())
    document["post_processor"] = None
    del document["model"]["type"]
    document["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": HUB}
    (tmp_path / "hub.json").write_text(json.dumps(document))
    assert ids(vocabulary(str(tmp_path / "hub.json"))) == ids(clip)


def test_siglip_by_file_and_among_downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    hub_siglip(tmp_path / "models--timm--ViT-B-16-SigLIP2-256" / "snapshots" / "0" / "tokenizer.json")
    with pytest.raises(ValueError, match="no package brings SigLIP's vocabulary"):
        vocabulary("siglip")
    path = hub_siglip(tmp_path / "models--timm--ViT-B-16-SigLIP" / "snapshots" / "0" / "tokenizer.json")
    assert vocabulary("siglip").clean == "siglip"
    assert ids(vocabulary("siglip")) == ids(vocabulary(str(path)))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("clpi", None, "is no file: expected own, clip, siglip, or"),
        ("merges.txt", b"a b\n" * 48_894 + b"c", "does not hold the 48,894 merges of CLIP"),
        ("merges.txt", b"a b\nc d", "does not hold the 48,894 merges of CLIP"),
        ("merges.txt.gz", b"no gzip", "cannot be read"),
        ("merges.txt", b"\xff\xfe\xff", "cannot be read"),
        ("tokenizer.json", b"{}", "damaged tokenizer file"),
        ("word.json", WORD_LEVEL.to_str().encode(), "of another kind"),
        ("untyped.json", b'{"version": "1.0", "model": {"vocab": {"a": 0}, "merges": []}}', "of another kind"),
    ],
)
def test_bad_files(name: str, content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        vocabulary(str(path))
    with pytest.raises(ValueError, match=r"no tokenizer|damaged"):
        Tokenizer.load(tmp_path)


def test_train_with_a_vocabulary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained = Tokenizer.train(SAID * 3, 300)
    trained.save(tmp_path)
    for name in (tmp_path, tmp_path / "tokenizer.json"):
        assert ids(vocabulary(str(name))) == ids(trained)
    words = ["train", "clip", "--size", "debug", "--batch", "8", "--steps", "1", "--data", "scenes?n=16", "--out"]
    main([*words, str(tmp_path / "run"), "--tokenizer", str(tmp_path / "tokenizer.json")])
    assert read_config(tmp_path / "run" / "config.json", RunFile).recipe.model.text.vocab == trained.vocab
    assert Tokenizer.load(tmp_path / "run" / "model").to_bytes() == trained.to_bytes()
    other = ("--init", tmp_path / "run" / "model", "--tokenizer", "clip")
    assert "has the tokenizer of" in refused(capsys, *words, tmp_path / "b", *other)
