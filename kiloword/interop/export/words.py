"""The files by which other libraries read texts and images as the model does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers

from kiloword.files import write_atomic, write_json
from kiloword.interop.export.source import TEXTS, Exported
from kiloword.interop.hf_folder import BICUBIC


def write_tokenizer(source: Exported, folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json of transformers, whose ids are kiloword's.

    What cleans texts by ftfy is not in them; a note says so. Raises: ValueError where ids of the probes differ.
    """
    backend, roles = tokenizers.Tokenizer.from_str(source.tokenizer.to_bytes().decode()), source.tokenizer.roles
    # CLIP's vocabulary has no rows for mask, class and uncertainty tokens
    names = {value: backend.id_to_token(value) or f"<{name}>" for name, value in roles.ids().items()}
    document = _document(source, names)
    _check_ids(source, document)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": source.config.text.context,
        "eos_token": names[roles.end],
        "pad_token": names[padding_of(source)],
        "padding_side": "right",
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": source.tokenizer.clean != "clip",
    }
    if roles.prefix:
        config["bos_token"] = names[roles.start]
    write_atomic(folder / "tokenizer.json", json.dumps(document, ensure_ascii=False).encode())
    write_json(folder / "tokenizer_config.json", config)
    if source.tokenizer.clean in ("clip", "siglip"):
        source.notes.append(
            "Texts: kiloword repairs broken encodings and HTML entities (ftfy) before it reads a text; this tokenizer "
            "does not. Plain texts give the same ids."
        )


def padding_of(source: Exported) -> int:
    """The id of pads. CLIP's own is that of the word "!", which transformers would then cut out of texts: its end."""
    roles = source.tokenizer.roles
    return roles.end if source.tokenizer.clean == "clip" else roles.pad


def _document(source: Exported, names: dict[int, str]) -> dict[str, Any]:
    """The model's tokenizer.json with what kiloword does around it: cleaning, start, end and extra tokens."""
    document: dict[str, Any] = json.loads(source.tokenizer.to_bytes())
    spaces: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"Regex": r"\s+"}, "content": " "},
        {"type": "Strip", "strip_left": True, "strip_right": True},
    ]
    clean, normalizer = source.tokenizer.clean, document.get("normalizer")
    if clean == "siglip":
        spaces = [
            {"type": "Replace", "pattern": {"String": "_"}, "content": " "},
            {"type": "Replace", "pattern": {"Regex": r"[!-/:-@\[-`{-~]"}, "content": ""},
            *spaces,
        ]
    if clean in ("clip", "siglip"):
        spaces.append({"type": "Lowercase"})
    if clean != "encodable":
        document["normalizer"] = {"type": "Sequence", "normalizers": [*spaces, *([normalizer] if normalizer else [])]}
    roles = source.tokenizer.roles
    after = [roles.end, *(roles.ids()[name] for name in source.config.text.extra_tokens)]
    before = [roles.start] if roles.prefix else []

    def piece(token: int) -> dict[str, Any]:
        return {"SpecialToken": {"id": names[token], "type_id": 0}}

    single = [*map(piece, before), {"Sequence": {"id": "A", "type_id": 0}}, *map(piece, after)]
    document["post_processor"] = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {names[t]: {"id": names[t], "ids": [t], "tokens": [names[t]]} for t in (*before, *after)},
    }
    document["padding"] = document["truncation"] = None
    return document


def _check_ids(source: Exported, document: dict[str, Any]) -> None:
    backend = tokenizers.Tokenizer.from_str(json.dumps(document))
    backend.enable_truncation(source.config.text.context)
    texts, pad = source.tokenizer.encode(TEXTS, source.config.text), source.tokenizer.roles.pad
    for n, encoding in enumerate(backend.encode_batch(TEXTS)):
        expected = texts.ids[texts.starts[n] : texts.starts[n + 1]].tolist()
        ids = encoding.ids + [pad] * (len(expected) - len(encoding.ids))
        if ids != expected:
            raise ValueError(
                f"this tokenizer cannot be written for other libraries: {TEXTS[n][:30]!r} has other tokens there."
            )


def write_readers(source: Exported, folder: Path) -> None:
    """The files of transformers that say how texts (`write_tokenizer`) and images are read."""
    write_tokenizer(source, folder)
    shown, size = source.config.preprocess, source.config.image.size
    square = {"height": size, "width": size}
    squash = shown.resize == "squash"
    side = size if shown.resize == "shortest" else shown.resize
    steps = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb")
    config = dict.fromkeys(steps, True) | {
        "image_processor_type": "SiglipImageProcessor" if squash else "CLIPImageProcessor",
        "do_center_crop": not squash,
        "rescale_factor": 1 / 255,
        "resample": BICUBIC,
        "size": square if squash else {"shortest_edge": side},
        "crop_size": square,
        "image_mean": list(shown.mean),
        "image_std": list(shown.std),
    }
    write_json(folder / "preprocessor_config.json", config)
