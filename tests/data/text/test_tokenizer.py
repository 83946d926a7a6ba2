"""Tokenizer: round trips, packing, truncation, and CLIP's ids against open_clip's own tokenizer."""

from __future__ import annotations

import importlib.util
import os
import pickle
import random
import subprocess
import sys
import tarfile
import unicodedata
from pathlib import Path
from types import ModuleType

import pytest
import tokenizers
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from kiloword.config.recipes import TextConfig
from kiloword.data.text.tokenizer import Tokenizer, clip_tokenizer, siglip, siglip_tokenizer, siglip_tokenizer_from
from modules import module_at

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


def test_round_trip_lower_cases_and_keeps_one_space(own: Tokenizer) -> None:
    ids = rows(own, ["A  Red\tDOG\n on THE left.", "Caf\u00e9 \U0001f600"], config())
    assert own.decode(ids[0]) == "a red dog on the left."
    assert own.decode(ids[1]) == "caf\u00e9 \U0001f600"
    assert ids[0][0] == own.roles.start
    assert ids[0][-1] == own.roles.end


@given(text=st.text(max_size=60))
@settings(max_examples=60, deadline=None)
def test_any_text_survives_byte_level(own: Tokenizer, text: str) -> None:
    got = own.decode(rows(own, [text], config(context=2000))[0])
    composed = unicodedata.normalize("NFC", " ".join(text.split()))
    # Letter by letter, as the library does: Python lower-cases a final sigma by its context.
    assert got.split() == "".join(c.lower() for c in composed).split()


def test_special_tokens_in_a_caption_are_plain_text(own: Tokenizer) -> None:
    for tokenizer in (own, pickle.loads(pickle.dumps(own))):
        ids = rows(tokenizer, ["<mask> <end> <pad>"], config())[0]
        assert own.roles.mask not in ids
        assert ids.count(own.roles.end) == 1
        assert own.decode(ids) == "<mask> <end> <pad>"


def test_truncation_keeps_the_end_and_the_extra_tokens_and_is_counted(own: Tokenizer) -> None:
    captions = ["a red dog", "red dog " * 40]
    settings = config(context=8, extra_tokens=("unc", "cls"))
    texts = own.encode(captions, settings)
    short, long = rows(own, captions, settings)
    assert texts.truncated == 1
    assert short[-3:] == long[-3:] == [own.roles.end, own.roles.unc, own.roles.cls]
    assert len(long) == 8
    full = rows(own, captions, config(context=500))[1]
    assert long[:5] == full[:5]
    assert own.cut(captions, settings) == {1: (len(full) - 2, 4)}


def test_pads_are_real_tokens_when_asked_for(own: Tokenizer) -> None:
    ids = rows(own, ["a red dog", "a"], config(context=16, pad_to_context=True, extra_tokens=("cls",)))
    assert [len(r) for r in ids] == [16, 16]
    assert ids[1][-1] == own.roles.cls
    assert ids[1][3:-1] == [own.roles.pad] * 12


@pytest.mark.slow
def test_training_does_not_depend_on_order_or_threads(own: Tokenizer, tmp_path: Path) -> None:
    own.save(tmp_path)
    shuffled = CAPTIONS.copy()
    random.Random(1).shuffle(shuffled)
    code = "from kiloword.data.text.tokenizer import Tokenizer as T\n"
    code += f"T.train({shuffled!r}, 300).save({str(tmp_path / 'b')!r})"
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": "4", "PYTHONHASHSEED": "7"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    assert (tmp_path / "tokenizer.json").read_bytes() == (tmp_path / "b" / "tokenizer.json").read_bytes()


def test_save_and_load(own: Tokenizer, tmp_path: Path) -> None:
    own.save(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    assert (loaded.roles, loaded.vocab) == (own.roles, own.vocab)
    assert rows(loaded, CAPTIONS, config()) == rows(own, CAPTIONS, config())


@pytest.mark.parametrize(
    ("content", "word"),
    [(None, "no tokenizer"), ('{"version": ', "damaged"), ("{}", "damaged"), ("BPE", "not written by kiloword")],
)
def test_files_that_are_none(tmp_path: Path, content: str | None, word: str) -> None:
    if content is not None:
        bare = tokenizers.Tokenizer(models.BPE()).to_str()
        (tmp_path / "tokenizer.json").write_text(bare if content == "BPE" else content)
    with pytest.raises(ValueError, match=word):
        Tokenizer.load(tmp_path)


def test_what_does_not_fit_is_refused(own: Tokenizer) -> None:
    for call, word in (
        (lambda: Tokenizer.train(CAPTIONS, 100), "262"),
        (lambda: own.encode(["a"], config(context=2)), "no room"),
        (lambda: own.cut(["a"], config(context=2)), "no room"),
        (lambda: own.encode(["a red dog"], config(vocab=100)), "does not fit"),
        (lambda: own.special("bos"), "'bos'"),
        (lambda: siglip_tokenizer_from(own.to_bytes().decode()), "unigram"),
    ):
        with pytest.raises(ValueError, match=word):
            call()


def test_captions_of_the_web_need_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ftfy", None)
    assert siglip("A dog, plain!") == "a dog plain"
    with pytest.raises(ValueError, match="ftfy"):
        siglip("a &amp; b")


def test_clip_ids_equal_open_clip_on_odd_captions(clip: Tokenizer, oracle: ModuleType) -> None:
    settings = config(context=77, pad_to_context=True)
    expected = oracle.tokenize(ODD)
    assert torch.equal(clip.encode(ODD, settings).ids.view(-1, 77), expected)
    assert clip.encode(ODD, settings).truncated == 2
    assert clip.plain_vocab == 49408


def test_clip_ids_equal_open_clip_on_real_captions(clip: Tokenizer, oracle: ModuleType, shared: Path) -> None:
    with tarfile.open(shared / "flickr8k" / "dev" / "0.tar") as tar:
        files = [tar.extractfile(m) for m in tar.getmembers() if m.name.endswith(".txt")][:300]
        captions = [line for f in files if f is not None for line in f.read().decode().splitlines()]
    assert len(captions) > 1000
    expected = oracle.tokenize(captions)
    assert torch.equal(clip.encode(captions, config(context=77, pad_to_context=True)).ids.view(-1, 77), expected)


@given(text=st.text(st.characters(max_codepoint=0x2FFF, exclude_categories=["Cn", "Cs"]), max_size=40))
@settings(max_examples=200, deadline=None)
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


def test_siglip_canonicalises_ends_and_pads_with_one(tmp_path: Path) -> None:
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)] + [(f"\u2581{w}", -1.0) for w in ("a", "red", "dog")]
    backend = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=2))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.enable_truncation(2)  # files from hubs may carry both; neither may leak into ours
    backend.enable_padding(length=9)
    backend.save(str(tmp_path / "hub.json"))
    ours = siglip_tokenizer(tmp_path / "hub.json")
    settings = config(context=6, pad_to_context=True)
    assert rows(ours, ["A  Red, DOG!", "a_dog"], settings) == [[3, 4, 5, 1, 1, 1], [3, 5, 1, 1, 1, 1]]
    assert rows(ours, ["a dog " * 9], settings) == [[3, 5, 3, 5, 3, 1]]
    ours.save(tmp_path)
    assert rows(Tokenizer.load(tmp_path), ["a red dog"], settings) == [[3, 4, 5, 1, 1, 1]]
    assert ours.decode([3, 4, 5, 1, 1]) == "a red dog"
    with pytest.raises(ValueError, match="no sentencepiece model at"):
        siglip_tokenizer(tmp_path / "spiece.model")
