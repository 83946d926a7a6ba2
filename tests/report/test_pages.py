"""What pages say: figures, tables and plots of invented results, each value where its heading promises it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from kiloword.evaluation.zeroshot.page import Class

from kiloword.evaluation import TASKS, command
from kiloword.evaluation.caption import page as caption_page
from kiloword.evaluation.caption.page import CaptionedImage
from kiloword.evaluation.caption.truth import JudgedCaption, Statement
from kiloword.evaluation.zeroshot import page as prompts_page
from kiloword.report import plots as report_plots
from kiloword.types import Record
from pages import plots, sections
from tars import encode, noise


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


# Prompts


def test_the_page_of_prompts() -> None:
    classes = [
        Class("cat", [(f"cat {n}", weight) for n, weight in enumerate((0.5, 0.2, 0.1, 0.08, 0.06, 0.04, 0.02))], []),
        Class("dog", [("dog 0", 0.75), ("dog 1", 0.25)], [(noise(8, 8), "a true dog")]),
    ]
    classes[0].images = [(noise(8, 8), "a true cat")]
    values = {"a": {"acc1": 0.5, "held_out": 7.0}, "b": {"acc1": 0.25, "entropy": 1.5}}
    shown: dict[str, Any] = {"a": {"way": "bprw", "classes": classes}, "b": {}}
    page = sections(prompts_page.report(values, "d", shown))
    assert page["Accuracy"].tables == [
        [["model", "acc1", "held out", "entropy"], ["a", "0.500", "7", "–"], ["b", "0.250", "–", "1.500"]]
    ]
    assert list(page) == ["", "Accuracy", "Prompts of a, by bprw"]
    weights = page["Prompts of a, by bprw"]
    assert weights.tables[0][1:] == [
        ["cat", "cat 0", "0.500", "cat 6", "0.020", "0.143"],
        ["dog", "dog 0", "0.750", "dog 1", "0.250", "0.500"],
    ]
    uniform = "the largest weight 1/2 = 0.5 or 1/7 = 0.143 and the entropy 0.693 or 1.946;"
    assert any(uniform in w for w in weights.words)
    lines = [w for w in weights.words if (w[:1].isdigit() and "classes" not in w) or w == "…"]
    assert lines == [
        *("0.500 cat 0", "0.200 cat 1", "0.100 cat 2", "…", "0.060 cat 4", "0.040 cat 5", "0.020 cat 6"),
        *("0.750 dog 0", "0.250 dog 1"),
    ]
    assert {"a true cat", "a true dog"} <= set(weights.words)
    assert classes[0].concentration == 3.5
    assert not any("The first" in w for w in weights.words)
    many = {"a": {"way": "topk", "classes": [Class(f"c{n}", [("p", 1.0)], []) for n in range(201)]}}
    first = sections(prompts_page.report({"a": values["a"]}, "d", many))["Prompts of a, by topk"]
    assert "The first 200 of 201 classes." in first.words
    assert len(first.tables[0]) == 201
    assert not any("learned from" in w for w in first.words)


# What the verb prints


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.0000"),
        (0.01, "0.0100"),
        (0.00999, "0.00999"),
        (-0.005, "-0.005"),
        (12.34567, "12.3457"),
        (1e-9, "1e-09"),
    ],
)
def test_small_values_keep_digits_that_count(value: float, text: str) -> None:
    assert command.number(value) == text


def test_eval_prints_a_column_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    """Values that a task keeps from the screen are left out, one that a model lacks is a dash."""
    command._print(TASKS["spectrum"], {"one": {"effective_rank": 2.0, "singular_value@3": 1.0}})
    assert capsys.readouterr().out.splitlines() == ["effective_rank".ljust(36) + " 2.0000"]
    found = {"one": {"effective_rank": 2.0}, "a long name": {"effective_rank": 0.001, "vectors": 5.0}}
    command._print(TASKS["spectrum"], found)
    assert capsys.readouterr().out.splitlines() == [
        " " * 36 + "         one a long name",
        "effective_rank".ljust(36) + "      2.0000       0.001",
        "vectors".ljust(36) + "           -      5.0000",
    ]
    command._print(TASKS["retrieval"], {"a": {"x" * 40: 1.0, "y": 2.0}})
    assert capsys.readouterr().out.splitlines() == ["x" * 40 + " 1.0000", "y" + " " * 40 + "2.0000"]


def test_labels_tell_models_apart() -> None:
    assert command.labels(["runs/a/model", "b/"]) == ["a", "b"]
    assert command.labels(["x/a/model", "y/a/model"]) == ["x/a/model", "y/a/model"]
    assert command.labels(["model"]) == ["model"]
    with pytest.raises(ValueError, match="one model is named twice: a, a"):
        command.labels(["a", "a"])
