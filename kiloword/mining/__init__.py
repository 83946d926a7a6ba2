"""`kiloword mine`: which captions of a data set fit other pictures than their own (FFF, arXiv:2405.10286)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kiloword.mining.options import Options


def main(sources: Sequence[str], side: Path, out: Path, options: Options) -> None:
    """What the command line calls: writes report.html, pairs.parquet, mine.json and thresholds.json into `out`.

    Errors: ValueError for data that cannot be opened, a side table of other data, or settings out of range.
    """
    from kiloword.data.side import SideTable
    from kiloword.data.sources import open_data
    from kiloword.device import choose
    from kiloword.methods.fff import Mined, check
    from kiloword.mining import output
    from kiloword.mining.corpus import Corpus
    from kiloword.mining.origin import Origin, split_extra
    from kiloword.mining.results import judge
    from kiloword.recipes import DataConfig

    options.check()
    options = replace(options, device=choose(options.device))
    check(options.over(Mined()))
    table = SideTable(side)
    settings = options.over(Mined(teacher=table.name))
    source = open_data(DataConfig(sources=tuple(sources), extra_captions=tuple(map(str, options.extra_captions))))
    table.check(source)
    origin, corpus = Origin.of(source, Corpus.of(table, options.device), table)
    parts = split_extra(corpus, options.extra_captions)
    results = judge(corpus, parts, settings, options, (source.name, table.file.teacher), origin.truth(corpus.captions))
    output.write(out, results, origin)
