"""What pages say: figures, tables and plots of invented results, each value where its heading promises it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from kiloword.evaluation import TASKS, command
from kiloword.evaluation.calibration import Bins
from kiloword.evaluation.caption import page as caption_page
from kiloword.evaluation.caption.page import CaptionedImage
from kiloword.evaluation.caption.truth import JudgedCaption, Statement
from kiloword.evaluation.hierarchy import page as hierarchy_page
from kiloword.evaluation.hierarchy.chains import Chains
from kiloword.evaluation.hierarchy.levels import ImageLevels
from kiloword.evaluation.reconstruction import page as reconstruction_page
from kiloword.evaluation.reconstruction.page import PaintedExample
from kiloword.evaluation.spectrum import task as spectrum_page
from kiloword.evaluation.uncertainty import page as uncertainty_page
from kiloword.evaluation.uncertainty.data import Levelled
from kiloword.evaluation.uncertainty.inclusion import InclusionAnswers
from kiloword.evaluation.uncertainty.shown import Plane
from kiloword.evaluation.zeroshot import page as prompts_page
from kiloword.evaluation.zeroshot.page import Class
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


# Uncertainty


def uncertain(**more: Any) -> dict[str, Any]:
    """What `drawn` gives of four captions of two images."""
    found = {"levelled": None, "true_of": None, "bins": {}, "matched": None, "answers": {}, "exact": True}
    texts = {f"{kind} texts": [(f"{kind} one", 0.5)] for kind in ("certain", "uncertain", "long")}
    return {
        "image": doubles(1.0, 3.0),
        "text": doubles(2.0, 4.0, 6.0, 8.0),
        "own": doubles(1.0, 1.0, 3.0, 3.0),
        "different": doubles(2.0, 4.0, 6.0, 8.0),
        "words": torch.tensor([3, 5, 7, 40]),
        "certain": [(noise(8, 8), 0.125)],
        "uncertain": [(noise(8, 8), 2.5)],
        "plane": None,
        "pairs": {},
        **found,
        **texts,
        **more,
    }


UNCERTAINTY = {"image_uncertainty_mean": 2.0, "text_uncertainty_mean": 5.0, "text_above_image": 0.75}


def test_the_page_of_uncertainty_names_models_where_there_are_several() -> None:
    one = sections(uncertainty_page.report({"a": UNCERTAINTY}, "data", {"a": uncertain()}))
    values = {"a": UNCERTAINTY, "b": {"text_uncertainty_mean": 0.25}}
    two = sections(uncertainty_page.report(values, "data", {"a": uncertain(), "b": uncertain()}))
    heading = "How uncertain images and texts are"
    assert "a:" not in one[heading].words
    assert [word for word in two[heading].words if word in ("a:", "b:")] == ["a:", "b:"]
    assert two["In short"].tables == [
        [
            ["", "a", "b"],
            ["images, mean", "2", "–"],
            ["texts, mean", "5", "0.25"],
            ["share of captions above their image", "0.75", "–"],
        ]
    ]
    assert "In 75% of the pairs the text is less certain than its image." in one[heading].words
    # what there is nothing to draw of has no heading
    assert list(one) == [
        "",
        "In short",
        heading,
        "Uncertainty by length of the text",
        "Most certain images",
        "Most uncertain images",
        "Most certain and most uncertain texts",
    ]
    assert "0.125" in one["Most certain images"].text
    assert "2.50" in one["Most uncertain images"].text
    assert [table[0] for table in one["Most certain and most uncertain texts"].tables] == [
        ["most certain", "variance"],
        ["most uncertain", "variance"],
        ["of the longest tenth, most uncertain", "variance"],
    ]
    assert [table[1][0] for table in one["Most certain and most uncertain texts"].tables] == [
        "certain one",
        "uncertain one",
        "long one",
    ]


def test_plots_of_uncertainty_hold_their_values(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = plots(monkeypatch, uncertainty_page, "scatter", "box_plot", "line_plot")
    levelled = Levelled(torch.tensor([0, 0, 1, 1]), doubles(8, 6, 4, 2), True)
    bins = {"text": Bins(doubles(1, 2), doubles(0.75, 0.25), torch.tensor([12, 10]))}
    more = uncertain(levelled=levelled, true_of=torch.tensor([4, 0, 2, 1]), bins=bins)
    values = UNCERTAINTY | {
        "truth_spearman": 0.5,
        "truth_spearman_level@1": 0.25,
        "calibration_text_pearson": -0.875,
    }
    page = sections(uncertainty_page.report({"a": values}, "data", {"a": more}))
    scattered = [args for name, args in calls if name == "scatter"]
    assert scattered[0][0] == {"pairs": [(1.0, 2.0), (1.0, 4.0), (3.0, 6.0), (3.0, 8.0)]}
    assert scattered[1][0] == {"level 0": [(4.0, 2.0)], "level 1": [(2.0, 6.0), (1.0, 8.0)]}  # none is true of none
    (calibrated,) = [args for name, args in calls if name == "line_plot"]
    assert calibrated[0] == {"Captions": [(1.0, 0.75), (2.0, 0.25)]}
    boxes = [dict(args[0]) for name, args in calls if name == "box_plot"]
    assert [list(box) for box in boxes] == [["0-5", "6-10", "31+"], ["level 0", "level 1"]]
    assert boxes[0]["0-5"] == pytest.approx([2.1, 2.5, 3.0, 3.5, 3.9])
    assert "Fewer than 10 texts are dots." in page["Uncertainty by length of the text"].text
    truth = page["Uncertainty by what a caption is true of"].text
    assert "Spearman's correlation: all 0.50, level 1 0.25." in truth
    assert (
        "Captions in 2 bins of 10 or more, with 95% intervals. Pearson -0.88"
        in page["Calibration: uncertainty and accuracy"].text
    )


def test_inclusion_on_the_page_of_uncertainty(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = plots(monkeypatch, report_plots, "histogram")
    answer = InclusionAnswers(
        doubles(1, -1, 1, 1), doubles(0, 0, 0, 0), torch.tensor([True, True, False, True]), torch.ones(4) > 0
    )
    answers = dict.fromkeys(("chain_3_in_2", "chain", "unrelated"), answer)
    values = UNCERTAINTY | {"image_in_text": 0.625, "text_in_image": 0.375, "inclusion_overlap": 12.5}
    values |= {f"inclusion_{name}": 0.5 for name in answers} | {"inclusion_chain_overlap": 0.125}
    more = uncertain(matched=doubles(1, -1), answers=answers, exact=False)
    page = sections(uncertainty_page.report({"a": values}, "data", {"a": more}))
    assert "62.5% of the captions include their image (H > 0), 37.5% lie within it" in page[
        "Images within their captions"
    ].text.replace("\n", " ")
    chains = page["Specific texts within general ones"]
    assert chains.tables[0][1:] == [
        ["level 3 in 2", "4", "0.750", "0.500", "–"],
        ["all of these", "4", "0.750", "0.500", "0.125"],
        ["in another image's chain", "4", "0.750", "0.500", "–"],
    ]
    assert "Chains are taken as true" in chains.text
    assert "distance is below 12.5" in chains.text
    assert list(calls[-1][1][0]) == ["level 3 in 2", "in another image's chain"]
    exact = sections(uncertainty_page.report({"a": values}, "data", {"a": uncertain(answers=answers)}))
    assert "Chains are taken as true" not in exact["Specific texts within general ones"].text


def test_units_of_uncertainty_are_powers_of_a_thousand() -> None:
    assert uncertainty_page.readable_unit(doubles(0.2, 999.0)) == (1.0, "sum of variances")
    assert uncertainty_page.readable_unit(doubles(0.0)) == (1.0, "sum of variances")
    for most, power in ((5e-3, "10⁻³"), (5e-8, "10⁻⁹"), (2e4, "10³")):
        scale, label = uncertainty_page.readable_unit(doubles(most))
        assert label == f"sum of variances in {power}"
        assert 1 <= most * scale < 1000


def test_the_plane_of_uncertainty(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = plots(monkeypatch, uncertainty_page, "scatter")
    spread = torch.diag_embed(torch.tensor([[4.0, 1.0], [1.0, 9.0]]))
    plane = Plane(
        [noise(8, 8)],
        [0, 0],
        [None, "a cat"],
        torch.tensor([[1.0, 2], [3, 4]]),
        spread,
        doubles(0.5, 0.25),
    )
    page = sections(uncertainty_page.report({"a": UNCERTAINTY}, "d", {"a": uncertain() | {"plane": plane}}))
    drawn, *labels = calls[-1][1]
    assert labels == ["component 1, 50% of the variance", "component 2, 25% of the variance"]
    dots = drawn["image 1"]
    assert (dots.dots, dots.squares) == ([(3.0, 4.0)], [(1.0, 2.0)])
    rings = zip(dots.outlines, plane.means.numpy(), ((4, 2), (2, 6)), strict=True)  # two standard deviations
    for outline, mean, (width, height) in rings:
        assert np.abs(np.array(outline) - mean).max(0) == pytest.approx([width, height], rel=1e-2)
    assert page["A few images and their captions in a plane"].tables == [[["caption", "of image"], ["a cat", "1"]]]


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


# Reconstruction


def test_the_page_of_reconstruction() -> None:
    read = {
        "reconstruction_l1_right@random": 0.5,
        "reconstruction_l1_none@random": 0.75,
        "reconstruction_l1_mean_colour@random": 0.875,
        "right_beats_none@random": 0.625,
        "none_minus_right@random": 0.25,
        "none_minus_right_se@random": 0.03125,
    }
    image = noise(16, 16)
    losses = {"right": 0.125, "wrong": 0.25, "none": 0.375}
    example = PaintedExample(
        "random", image, np.eye(2, dtype=bool), dict.fromkeys(losses, image), losses, "a cat", "a dog"
    )
    shown = {"examples": [example], "truth": True, "norm_pix": True}
    found = {"a": read, "b": {"reconstruction_l1_none@random": 1.0}}
    other = {"examples": [], "truth": False, "norm_pix": False}
    page = sections(reconstruction_page.report(found, "d", {"a": shown, "b": other}))
    numbers = page["Random patches are masked"]
    assert numbers.tables == [
        [
            ["L1", "its caption", "a wrong caption", "no caption", "mean colour seen", "mean image"],
            ["a", "0.5000", "–", "0.7500", "0.8750", "–"],
            ["b", "–", "–", "1.0000", "–", "–"],
        ],
        [
            ["image by image", "against", "right is better in", "L1 more than by right", "± standard error"],
            ["a", "no caption", "62.5%", "0.2500", "0.0312"],
        ],
    ]
    note = "Each model masks the patches that it finds most similar to the caption: compare models by random masks."
    attentive = page["The patches most similar to the right caption are masked"]
    assert note in attentive.words
    assert note not in numbers.words
    assert "Trained without text: the reconstruction does not depend on the caption." in attentive.words
    cards = page["Images – a: random patches are masked"]
    assert {"original", "hidden", "its caption: 0.125", "a wrong caption: 0.250", "no caption: 0.375"} <= set(
        cards.words
    )
    assert {"“a cat”", "a wrong caption: “a dog”"} <= set(cards.words)
    patterns = "This model predicts patches without mean and contrast"
    assert patterns in cards.text
    assert patterns not in page["Images – b: random patches are masked"].text
    assert "original" not in page["Images – a: the patches most similar to the right caption are masked"].words
    assert "another image's caption, false of this one" in page[""].text
    alone = sections(reconstruction_page.report({"b": found["b"]}, "d", {"b": other}))
    assert note not in alone["The patches most similar to the right caption are masked"].words
    assert "Images: random patches are masked" in alone
    assert "false of this one" not in alone[""].text


# Hierarchy


def test_the_page_of_hierarchies(monkeypatch: pytest.MonkeyPatch) -> None:
    bars = plots(monkeypatch, report_plots, "histogram")
    calls = plots(monkeypatch, hierarchy_page, "line_plot", "ladder")
    chains = Chains(
        ["a thing", "an animal", "a cat", "a dog"], torch.tensor([[0, 1, 2]] * 9), torch.arange(9), list(range(9))
    )
    paths = {"HierarCaps": torch.tensor([[0, 0, 1, 3]] * 9), "root inc": torch.tensor([[3, 1, 1, 0]] * 9)}
    more = {
        "chains": chains,
        "paths": paths,
        "truth": None,
        "source": Drawn(),
        "images": ImageLevels(
            Drawn(), [[0, 1, 2]] * 2, torch.tensor([[3.0, 2, 1], [5, 3, 1]]), torch.tensor([[1.0, 2], [0.5, -1]])
        ),
    }
    values = {
        "hierarcaps_precision": 0.5,
        "hierarcaps_hit": 0.75,
        "traversal_inc_recall": 0.25,
        "traversal_inc_hit": 1.0,
        "traversal_inc_root_hit": 0.125,
        "traversal_inc_order": -0.5,
        "text_chain_uncertainty@0": 3.0,
        "text_chain_uncertainty@1": 2.0,
        "text_chain_uncertainty_spearman": -0.875,
        "text_chain_uncertainty_order": 0.625,
        "text_inclusion_h@2": 0.75,
        "image_inclusion_inc@1": 0.5,
        "text_inclusion_whole_h@0": 0.25,
    }
    page = sections(hierarchy_page.report({"m": values}, "d", {"m": more}))
    header, first, second = page["Retrieval along chains"].tables[0]
    assert header[1:4] == ["precision", "recall", "hit"]
    assert (first[0], first[1:4]) == ("m, hierarcaps", ["0.500", "–", "0.750"])
    assert second == ["m, traversal, root inc", "–", "0.250", "1.000", "–", "0.125", "–", "–", "-0.500"]
    assert page["Uncertainty by level"].tables == [
        [["texts", "Spearman with level", "falls within chains (tau)"], ["m", "-0.875", "0.625"]]
    ]
    assert [args[0] for name, args in calls if name == "line_plot"] == [{"m": [(0.0, 3.0), (1.0, 2.0)]}]
    assert page["Inclusion"].tables == [
        [
            ["is it included?", "share"],
            ["m, texts: level 2 in level 1, H > 0", "0.750"],
            ["m, images: level 1 in level 0, by inc", "0.500"],
            ["m, texts: the whole in level 0, H > 0", "0.250"],
        ]
    ]
    (_, (spread, *_)), (_, (counts, edges, *_)), (_, (within, *_)) = bars
    assert list(spread) == ["level 0", "level 1", "the whole image"]
    assert list(within) == ["level 0", "level 1"]
    assert "Included (H > 0): level 0 100%, level 1 50%." in page["Images by level, m"].text
    for name, gaps in (("level 0", [2, 4]), ("level 1", [1, 2])):
        assert counts[name] == np.histogram(gaps, edges)[0].tolist()
    assert set(counts) == {"level 0", "level 1"}
    ladders = [args for name, args in calls if name == "ladder"]
    assert len(ladders) == 8  # of nine images
    assert ladders[0][2] == [
        ("as annotated", [("a thing", None), ("an animal", None), ("a cat", None)]),
        ("HierarCaps", [("a thing", True), ("an animal", True), ("a dog", False)]),
        ("root inc", [("a thing", True), ("an animal", True), ("a dog", False)]),
    ]
    truth = more | {"truth": lambda texts, rows: torch.tensor([[text == 3] for text in texts])}
    hierarchy_page.report({"m": values}, "d", {"m": truth})
    assert calls[-1][1][2][1] == ("HierarCaps", [("a thing", False), ("an animal", False), ("a dog", True)])
    assert list(sections(hierarchy_page.report({"m": {}}, "d", {"m": {}}))) == [""]


# Spectrum


def test_the_page_of_spectra(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = plots(monkeypatch, spectrum_page, "line_plot")
    values = {"effective_rank": 1.75, "dimensions": 3.0, "vectors": 1200.0}
    values |= {"singular_value@1": 4.0, "singular_value@2": 1.0, "singular_value@3": 1e-13}
    page = sections(spectrum_page.report({"m": values}, "d", {}))
    assert page["Effective rank"].tables == [
        [["model", "effective rank", "dimensions", "vectors"], ["m", "1.8", "3", "1200"]]
    ]
    assert [args[0] for _, args in calls] == [{"m": [(1.0, 4.0), (2.0, 1.0)]}, {"m": [(1.0, 1.0), (2.0, 0.25)]}]
    assert list(page)[1:] == ["Effective rank", "Singular values", "Against the largest"]


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
