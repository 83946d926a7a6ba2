"""Model folders that no training made."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any, Literal

from kiloword.config.recipes import ModelFile, sizes
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.methods.registry import preset
from kiloword.models.build import build
from kiloword.models.model_folder import save_model

TextPool = Literal["last", "mean", "max"]
CAPTIONS = ["a dog on the grass", "two cats and a dog", "the red circle is left of a blue star"] * 5


def model_folder(
    out: Path, method: str = "siglip", settings: dict[str, Any] | None = None, text_pool: TextPool | None = None
) -> Path:
    """A fresh model of size "debug" with its tokenizer. Args: text_pool: None: that of the size. Returns: `out`."""
    tokenizer, config = Tokenizer.train(CAPTIONS, 400), sizes()["debug"]
    text = replace(config.text, vocab=tokenizer.vocab, special=tokenizer.roles.ids())
    head = replace(config.head, text_pool=text_pool or config.head.text_pool)
    file = ModelFile(method=method, settings=settings or {}, model=replace(config, text=text, head=head), size="debug")
    save_model(out, build(file.model, preset(method, settings), seed=1), tokenizer, file)
    return out


def changed(folder: Path, file: str, **values: Any) -> Path:
    """The folder with other values in one of its json files, by their names; __ stands for the dots between."""
    document = json.loads((folder / file).read_text(encoding="utf-8"))
    for name, value in values.items():
        *parts, last = name.split("__")
        reduce(lambda inner, part: inner[part], parts, document)[last] = value
    (folder / file).write_text(json.dumps(document), encoding="utf-8")
    return folder
