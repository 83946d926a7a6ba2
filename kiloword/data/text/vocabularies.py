"""Vocabularies by name or file, for training from scratch with another tokenizer than one trained on the captions."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import tokenizers
from tokenizers import normalizers

from kiloword.data.text.tokenizer import (
    CLIP_MERGES,
    Tokenizer,
    clip_tokenizer,
    clip_tokenizer_from,
    siglip_tokenizer,
    siglip_tokenizer_from,
)
from kiloword.data.text.tokenizer_file import LARGEST, Roles, read

EXPECTED = (
    "a tokenizer.json (kiloword's, CLIP's or SigLIP's), a model folder, CLIP's merges (bpe_simple_vocab_16e6.txt.gz), "
    "or SigLIP's .model file"
)


def vocabulary(name: str) -> Tokenizer:
    """The tokenizer named "clip" or "siglip", or that of a file or model folder.

    CLIP's comes with open_clip; SigLIP's with no package: it is looked for among downloads of huggingface_hub.
    Raises: ValueError for files that are missing, damaged or of another kind, saying what to install or to give.
    """
    if name == "clip":
        return clip_tokenizer()
    if name == "siglip":
        return siglip_tokenizer(_downloaded_siglip())
    path = Path(name)
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"--tokenizer {name} is no file: expected own, clip, siglip, or {EXPECTED}.")
    if path.suffix in (".gz", ".txt"):
        return clip_tokenizer_from(_merges(path))
    return siglip_tokenizer(path) if path.suffix == ".model" else _of_json(path)


def _of_json(path: Path) -> Tokenizer:
    """A tokenizer.json of kiloword, or of the hub for CLIP or SigLIP."""
    document = read(path)
    parsed = json.loads(document)
    if "start" in ((parsed.get("post_processor") or {}).get("special_tokens") or {}):
        return Tokenizer(document)
    model = parsed.get("model") or {}
    if model.get("type") == "Unigram":
        return siglip_tokenizer_from(document)
    if model.get("end_of_word_suffix") == "</w>":
        merges = [pair.split() if isinstance(pair, str) else pair for pair in model.get("merges") or ()]
        return clip_tokenizer_from([(first, second) for first, second in merges])
    raise ValueError(f"--tokenizer {path} holds a {model.get('type')} model of another kind: expected {EXPECTED}.")


def encoder_tokenizer(document: str, rows: int, pad: int | None = None, lower: bool = False) -> Tokenizer:
    """The tokenizer of another library's text encoder: captions get the ids that this library gives them.

    Its first and last special token are start and end; class and uncertainty token follow its vocabulary, as does the
    mask token where it has none. Padding and truncation are removed.

    Args: document: the text of a tokenizer.json that passed `tokenizer_file.check`; rows: of the encoder's table; pad:
    id of its pads; lower: captions are lower-cased first.
    Raises: ValueError for a tokenizer without an end token, or with ids that the table has no rows for.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    backend = tokenizers.Tokenizer.from_str(document)
    backend.no_padding()
    backend.no_truncation()
    prefix, end = _around(backend)
    highest = max(backend.get_vocab().values(), default=-1)
    if highest >= rows:
        raise ValueError(f"the tokenizer has ids up to {highest:,}, but the encoder has {rows:,} rows for them")
    after, known = highest + 1, {name: backend.token_to_id(f"[{name}]") for name in ("MASK", "PAD")}
    mask = next((i for i in (known["MASK"], backend.token_to_id("<mask>")) if i is not None), after + 2)
    pad = next((i for i in (pad, known["PAD"], backend.token_to_id("<pad>")) if i is not None), end)
    if lower:
        parts = [normalizers.Lowercase(), *([backend.normalizer] if backend.normalizer else [])]
        backend.normalizer = normalizers.Sequence(parts)
    start = prefix[0] if prefix else end
    roles = Roles(
        start=start, end=end, pad=pad, mask=mask, cls=after, unc=after + 1, prefix=bool(prefix), verbatim=True
    )
    backend.post_processor = roles.template()
    return Tokenizer(backend.to_str())


def _around(backend: tokenizers.Tokenizer) -> tuple[list[int], int]:
    """Special ids before and after a caption: none or one before, one after. Raises: ValueError for others."""
    words, whole = (backend.encode("a", add_special_tokens=special).ids for special in (False, True))
    first = next((n for n in (0, 1) if whole[n : n + len(words)] == words), None)
    if first is None or len(whole) - first - len(words) != 1:
        raise ValueError(
            f"the tokenizer puts the ids {whole[:20]} around {words[:20]}: expected one special token after a text, "
            "and at most one before"
        )
    return whole[:first], whole[-1]


def _merges(path: Path) -> list[tuple[str, str]]:
    """The merges of CLIP in its own file. Raises: ValueError for another file."""
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rb") as file:
            lines = file.read(LARGEST).decode("utf-8").split("\n")[1 : CLIP_MERGES + 1]
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise ValueError(f"--tokenizer {path} cannot be read ({error}): expected {EXPECTED}.") from error
    pairs = [tuple(line.split()) for line in lines]
    if len(pairs) != CLIP_MERGES or any(len(pair) != 2 for pair in pairs):
        raise ValueError(f"--tokenizer {path} does not hold the {CLIP_MERGES:,} merges of CLIP: expected {EXPECTED}.")
    return [(first, second) for first, second in pairs]


def _downloaded_siglip() -> Path:
    """SigLIP's vocabulary of English among the downloads of huggingface_hub. Raises: ValueError where it is not."""
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface"))
    folder = Path(os.environ.get("HF_HUB_CACHE", home / "hub")).expanduser()
    for path in _candidates(folder):
        return path
    raise ValueError(
        f"--tokenizer siglip: no package brings SigLIP's vocabulary, and {folder} has none: give the path of its "
        "tokenizer.json, as published with the weights (timm/ViT-B-16-SigLIP)."
    )


def _candidates(folder: Path) -> Iterator[Path]:
    for pattern in ("models--timm--ViT-*-SigLIP*", "models--google--siglip-*"):
        for model in sorted(folder.glob(pattern)):
            if not any(word in model.name for word in ("SigLIP2", "siglip2", "i18n")):
                yield from sorted(model.glob("snapshots/*/tokenizer.json"))
