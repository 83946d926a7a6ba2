"""`--tokenizer`: vocabularies by name and by file."""

from __future__ import annotations

import gzip
import importlib.util
import json
from pathlib import Path

import pytest
import tokenizers

from kiloword.cli.main import main
from kiloword.config.recipes import TextConfig
from kiloword.data.text.tokenizer import Tokenizer, clip_tokenizer
from kiloword.data.text.vocabularies import vocabulary
from kiloword.training.run_folder import RunFile, read_config

HUB = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
CAPTIONS = ["a dog's ball, 12 times", "two Cats &amp; a dog!", "the red circle"]
needs_clip = pytest.mark.skipif(not importlib.util.find_spec("open_clip"), reason="open_clip is not installed")


def ids(tokenizer: Tokenizer) -> list[int]:
    captions = CAPTIONS if importlib.util.find_spec("ftfy") else [CAPTIONS[0], CAPTIONS[2]]
    return tokenizer.encode(captions, TextConfig(vocab=1 << 20)).ids.tolist()


@needs_clip
def test_clip_by_name_and_by_its_merges(tmp_path: Path) -> None:
    """The same ids from open_clip's package and from its file of merges, packed or not."""
    (package,) = importlib.util.find_spec("open_clip").submodule_search_locations  # type: ignore[union-attr, misc]
    packed = Path(package) / "bpe_simple_vocab_16e6.txt.gz"
    (tmp_path / "merges.txt").write_bytes(gzip.decompress(packed.read_bytes()))
    for path in (packed, tmp_path / "merges.txt"):
        assert ids(vocabulary(str(path))) == ids(vocabulary("clip"))


@needs_clip
@pytest.mark.slow
def test_clip_as_the_hub_has_it(tmp_path: Path) -> None:
    """The same ids from a tokenizer.json with another pattern and without kiloword's special ids."""
    document = json.loads(clip_tokenizer().to_bytes())
    document["post_processor"] = None
    document["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": HUB}
    (tmp_path / "hub.json").write_text(json.dumps(document))
    assert ids(vocabulary(str(tmp_path / "hub.json"))) == ids(clip_tokenizer())


def hub_siglip(path: Path) -> Path:
    """A small unigram vocabulary as the hub has SigLIP's."""
    words = [
        ("<pad>", 0.0),
        ("</s>", 0.0),
        ("<unk>", 0.0),
        ("▁", -2.0),
        *((letter, -3.0) for letter in "abcdeghilmrtw"),
    ]
    backend = tokenizers.Tokenizer(tokenizers.models.Unigram(words, unk_id=2))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    path.parent.mkdir(parents=True, exist_ok=True)
    backend.save(str(path))
    return path


def test_siglip_by_file_and_among_downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match="no package brings SigLIP's vocabulary"):
        vocabulary("siglip")
    hub_siglip(tmp_path / "models--timm--ViT-B-16-SigLIP2-256" / "snapshots" / "0" / "tokenizer.json")
    with pytest.raises(ValueError, match="no package brings SigLIP's vocabulary"):
        vocabulary("siglip")
    path = hub_siglip(tmp_path / "models--timm--ViT-B-16-SigLIP" / "snapshots" / "0" / "tokenizer.json")
    assert vocabulary("siglip").clean == "siglip"
    assert ids(vocabulary("siglip")) == ids(vocabulary(str(path)))


def test_own_file_and_folder(tmp_path: Path) -> None:
    trained = Tokenizer.train(CAPTIONS * 3, 300)
    trained.save(tmp_path)
    for name in (tmp_path, tmp_path / "tokenizer.json"):
        assert ids(vocabulary(str(name))) == ids(trained)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.json", None, "is no file: expected own, clip, siglip, or"),
        ("clpi", None, "is no file: expected own, clip, siglip, or"),
        ("merges.txt", b"a b\nc d", "does not hold the 48,894 merges of CLIP"),
        ("merges.txt.gz", b"no gzip", "cannot be read"),
        ("merges.txt", b"\xff\xfe\xff", "cannot be read"),
        ("other.json", b"{}", "damaged tokenizer file"),
        ("word.json", None, "holds a WordLevel model of another kind"),
    ],
)
def test_bad_files(name: str, content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    if name == "word.json":
        tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")).save(str(path))
    with pytest.raises(ValueError, match=message):
        vocabulary(str(path))


def test_train_with_a_vocabulary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained = Tokenizer.train(CAPTIONS * 3, 300)
    trained.save(tmp_path)
    words = ["train", "clip", "--size", "debug", "--batch", "8", "--steps", "1", "--data", "scenes?n=16", "--out"]
    main([*words, str(tmp_path / "run"), "--tokenizer", str(tmp_path / "tokenizer.json")])
    recipe = read_config(tmp_path / "run" / "config.json", RunFile).recipe
    assert recipe.model.text.vocab == trained.vocab
    assert Tokenizer.load(tmp_path / "run" / "model").to_bytes() == trained.to_bytes()
    with pytest.raises(SystemExit):
        main([*words, str(tmp_path / "b"), "--init", str(tmp_path / "run" / "model"), "--tokenizer", "clip"])
    assert "a run with --init has the tokenizer of" in capsys.readouterr().err
