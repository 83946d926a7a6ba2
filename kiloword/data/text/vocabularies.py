"""Vocabularies by name or file, for training from scratch with another tokenizer than one trained on the captions."""

from __future__ import annotations

import os
from pathlib import Path

import tokenizers
from tokenizers import normalizers

from kiloword.data.text.tokenizer import (
    Roles,
    Tokenizer,
    clip_tokenizer,
    read_document,
    siglip_tokenizer,
    tokenizer_from,
)

EXPECTED = (
    "a tokenizer.json (kiloword's, CLIP's or SigLIP's), a model folder, or CLIP's merges (bpe_simple_vocab_16e6.txt.gz)"
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
    return clip_tokenizer(path) if path.suffix in (".gz", ".txt") else tokenizer_from(read_document(path))


def encoder_tokenizer(document: str, rows: int, pad: int | None = None, lower: bool = False) -> Tokenizer:
    """The tokenizer of another library's text encoder: captions get the ids that this library gives them.

    Its first and last special token are start and end; class and uncertainty token follow its vocabulary, as does the
    mask token where it has none. Padding and truncation are removed.

    Args: document: the text of a tokenizer.json; rows: of the encoder's table; pad:
    id of its pads; lower: captions are lower-cased first.
    Raises: ValueError for a tokenizer without an end token, or with ids that the table has no rows for.
    """
    backend = tokenizers.Tokenizer.from_str(document)
    backend.no_padding()
    backend.no_truncation()
    words, whole = (backend.encode("a", add_special_tokens=special).ids for special in (False, True))
    before = next((n for n in (0, 1) if whole[n : n + len(words)] == words), None)
    if before is None or len(whole) - before - len(words) != 1:
        raise ValueError(
            f"the tokenizer puts the ids {whole[:20]} around {words[:20]}: expected one special token after a text, "
            "and at most one before"
        )
    highest = max(backend.get_vocab().values(), default=-1)
    if highest >= rows:
        raise ValueError(f"the tokenizer has ids up to {highest:,}, but the encoder has {rows:,} rows for them")
    if lower:
        parts = [normalizers.Lowercase(), *([backend.normalizer] if backend.normalizer else [])]
        backend.normalizer = normalizers.Sequence(parts)
    end, found = whole[-1], backend.token_to_id
    mask = next((i for i in map(found, ("[MASK]", "<mask>")) if i is not None), highest + 3)
    own_pad = next((i for i in map(found, ("[PAD]", "<pad>")) if i is not None), end)
    pad, start = own_pad if pad is None else pad, whole[0] if before else end
    special = {"start": start, "end": end, "pad": pad, "mask": mask, "cls": highest + 1, "unc": highest + 2}
    return Tokenizer(backend, Roles(**special, prefix=bool(before), verbatim=True))


def _downloaded_siglip() -> Path:
    """SigLIP's vocabulary of English among the downloads of huggingface_hub. Raises: ValueError where it is not."""
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface"))
    folder = Path(os.environ.get("HF_HUB_CACHE", home / "hub")).expanduser()
    for kind in ("models--timm--ViT-*-SigLIP*", "models--google--siglip-*"):
        for path in sorted(folder.glob(f"{kind}/snapshots/*/tokenizer.json")):
            if not any(word in path.parts[-4] for word in ("SigLIP2", "siglip2", "i18n")):
                return path
    raise ValueError(
        f"--tokenizer siglip: no package brings SigLIP's vocabulary, and {folder} has none: give the path of its "
        "tokenizer.json, as published with the weights (timm/ViT-B-16-SigLIP)."
    )
