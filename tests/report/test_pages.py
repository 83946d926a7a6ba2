"""What pages say: figures, tables and plots of invented results, each value where its heading promises it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from kiloword.evaluation.caption import page as caption_page
from kiloword.evaluation.caption.page import CaptionedImage
from kiloword.evaluation.caption.truth import JudgedCaption, Statement
from kiloword.report import plots as report_plots
from kiloword.types import Record
from pages import plots, sections
from tars import encode


@dataclass
class Drawn:
    """A source of small images, row n as bright as n."""

    fingerprint: str = "f"
    bad: tuple[int, ...] = ()

    def record(self, row: int) -> Record:
        image = b"no image" if row in self.bad else encode(np.full((8, 8, 3), row, np.uint8))
        return Record(key=f"k{row}", image=image, captions=[])


def doubles(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


# Captions


def test_the_page_of_captions(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = plots(monkeypatch, report_plots, "histogram")
    told = [
        CaptionedImage(n, f"k{n}", "the same" if n % 2 else f"said {n}", [f"people {n} {i}" for i in range(7)])
        for n in range(8)
    ]
    told[0] = CaptionedImage(0, "k0", "", ["people"])
    judged = [JudgedCaption(n != 1, (Statement("colour", "is red", n % 2 == 0),) if n else (), n, 9) for n in range(8)]
    shown = caption_page.CaptionPageData(Drawn(bad=(2,)), told, np.arange(8) / 4, judged)
    values = {"cider": 0.875, "vocabulary": 12.0, "parsable": 0.75, "statements_true@colour": 0.5}
    page = sections(caption_page.report({"a": values, "b": {"cider": 0.25}}, "d", {"a": {"captions": shown}, "b": {}}))
    assert page["Figures"].tables == [[["", "a", "b"], ["CIDEr-D", "0.875", "0.250"], ["different words", "12", "–"]]]
    assert page["What is true"].tables == [
        [["", "a", "b"], ["captions in the language", "0.750", "–"]],
        [["statements true, of those about", "a", "b"], ["colour", "0.500", "–"]],
    ]
    ((_, (counts, edges, *_)),) = calls
    assert sum(counts["a"]) == 8
    assert counts["a"] == np.histogram(np.arange(8) / 4, edges)[0].tolist()
    examples = page["Captions of a"]
    assert examples.tables == [
        [
            ["caption", "images", "share"],
            ["the same", "4", "50%"],
            ["(nothing)", "1", "12.5%"],
            ["said 2", "1", "12.5%"],
            ["said 4", "1", "12.5%"],
            ["said 6", "1", "12.5%"],
        ]
    ]
    assert "5 different captions of 8 images." in examples.words
    best = examples.words.index("Nearest to the data's own captions, by CIDEr-D:")
    worst = examples.words.index("Farthest from them:")
    near = [float(w.split()[1]) for w in examples.words[best:worst] if w.startswith("CIDEr-D ")]
    far = [float(w.split()[1]) for w in examples.words[worst:] if w.startswith("CIDEr-D ")]
    assert near == [1.75, 1.5, 1.25, 1.0, 0.75]  # row 2 cannot be read
    assert far == [0.0, 0.25, 0.75, 1.0, 1.25]
    assert "✗ outside the language" in examples.words
    assert "✓\u00a0is\u00a0red, 4 of 9 objects mentioned" in examples.words
    assert "✗\u00a0is\u00a0red, 7 of 9 objects mentioned" in examples.words
    assert "states nothing, 0 of 9 objects mentioned" in examples.words
    assert "“people 7 4”" in examples.words
    assert "“people 7 5”" not in examples.words
    assert "and 2 more" in examples.words
    without = sections(caption_page.report({"b": {"cider": 0.25}}, "d", {"b": {"captions": shown}}))
    assert "What is true" not in without
