"""`kiloword mine`: find captions of a data set that match other images (FFF, arXiv:2405.10286)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from kiloword.apps.mine.options import MineOptions

OWN = ("pairs.parquet", "thresholds.json")  # what a call that was interrupted may have written


def main(sources: Sequence[str], features: Path, out: Path, options: MineOptions) -> None:
    """Run the command: write report.html, pairs.parquet, mine.json and thresholds.json into `out`.

    Ranks of torchrun share the search; the first one writes.

    Errors: ValueError for data that cannot be opened, features of other data, or settings out of range.
    """
    from kiloword.apps.mine import output
    from kiloword.apps.mine.corpus import Corpus
    from kiloword.apps.mine.origin import Origin, split_extra
    from kiloword.apps.mine.results import judge
    from kiloword.config.recipes import DataConfig
    from kiloword.config.settings import check
    from kiloword.data.open import open_data
    from kiloword.distributed.device import choose
    from kiloword.distributed.sharing import is_first, together
    from kiloword.files import Lock
    from kiloword.methods.fff.preset import Mined
    from kiloword.stores.features import FeatureStore

    options.check()
    _check_folder(out)
    options = replace(options, device=choose(options.device))
    check(options.over(Mined()), prefix="")
    with together(options.device):
        table = FeatureStore(features)
        settings = options.over(Mined(teacher=table.name))
        source = open_data(DataConfig(sources=tuple(sources), extra_captions=tuple(map(str, options.extra_captions))))
        table.of(source)
        with Lock(out, "writing") if is_first() else nullcontext():
            origin, corpus = Origin.of(source, Corpus.of(table, options.device), table)
            parts, names = split_extra(corpus, options.extra_captions), (source.name, table.file.model)
            results = judge(corpus, parts, settings, options, names, origin.truth(corpus.captions))
            if results is not None:
                output.write(out, results, origin, parts)


def _check_folder(out: Path) -> None:
    """Raises: ValueError for a folder that holds files of others; `mine` writes mine.json before its report."""
    if not out.is_dir() or (out / "mine.json").is_file():
        return
    other = next((p.name for p in sorted(out.iterdir()) if p.name not in OWN and not p.name.startswith(".")), None)
    if other is not None:
        raise ValueError(f"--out {out} holds {other}, and no mine.json of an earlier call: choose a new folder.")
