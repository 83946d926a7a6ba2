"""All that is in a folder, a batch or a data set."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from kiloword.data.text.tokenizer import Tokenizer
from kiloword.types import Batch, Record, Source, Texts


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def tensors(of: Batch) -> list[Tensor]:
    found = list[Tensor]()
    of.each(lambda x: found.append(x) or x)  # type: ignore[func-returns-value]
    return found


def decoded(tokenizer: Tokenizer, texts: Texts) -> list[str]:
    return [tokenizer.decode(texts.cut(t, t + 1).ids.tolist()) for t in range(len(texts))]


def records(source: Source) -> list[Record]:
    return [source.record(row) for row in range(len(source))]
