"""What the task hierarchy puts together: the root is "", radii grow with levels, the whole lies in its parts."""

from __future__ import annotations

import pytest
import torch
from PIL import Image
from test_hierarchy import matcher

from kiloword.data.open import open_source
from kiloword.data.scenes.source import SceneParts, ScenesSource
from kiloword.evaluation import evaluate
from kiloword.evaluation.hierarchy.chains import gather
from kiloword.evaluation.hierarchy.levels import ImageLevels, kendall
from kiloword.evaluation.hierarchy.page import report
from kiloword.evaluation.hierarchy.paths import measure, traversals
from kiloword.methods.prolip.gaussian import inclusion


def scenes(n: int) -> ScenesSource:
    source = open_source(f"scenes:test?n={n}", 32)
    assert isinstance(source, ScenesSource)
    return source


def test_the_root_is_the_empty_text() -> None:
    model, source = matcher(), scenes(11)
    found = evaluate(model, "hierarchy", source)
    chains = gather([(row, source.hierarchies(row)) for row in range(11)])
    texts, root = model.encode_text(chains.texts), model.encode_text([""])
    radius = (texts["vec"] - root["vec"]).norm(dim=1)
    assert found["hierarcaps_order"] == pytest.approx(float(kendall(radius[chains.places]).mean()))
    images = model.encode_image([Image.fromarray(source.record(row).image) for row in range(11)])
    paths = traversals(model.score, images, texts, root["vec"])
    for name, value in measure(paths, chains):
        assert found[f"traversal_empty_{name}"] == pytest.approx(value)


def test_specific_images_are_asked_to_lie_in_general_ones() -> None:
    model, source = matcher(), scenes(23)
    found, parts = evaluate(model, "hierarchy", source), SceneParts(source)
    levels = [
        model.encode_image([Image.fromarray(parts.record(row).image) for row in range(k, len(parts), 3)])
        for k in range(3)
    ]

    def rate(specific: int, general: int) -> float:
        h = inclusion(levels[specific], levels[general]).sum(1)
        return float((h > 0).double().mean())

    rates = [rate(1, 0), rate(2, 1), rate(2, 0), rate(2, 1)]
    names = ["inclusion_h@1", "inclusion_h@2", "inclusion_whole_h@0", "inclusion_whole_h@1"]
    assert [found[f"image_{name}"] for name in names] == pytest.approx(rates)
    assert all(value != 0.5 for value in rates[1:])  # or the other direction would say the same


def test_images_of_levels_are_drawn_and_the_reversed_ones_shown() -> None:
    shown: dict[str, ImageLevels] = {}
    model, source = matcher("prolip"), open_source("scenes:test?n=12")
    found = evaluate(model, "hierarchy", source, shown=shown)
    images = shown["images"]
    features = model.encode_image([images.source.record(row).image for row in images.rows[0]])
    on_cpu = {name: features[name] for name in ("vec", "log_var")}
    whole = {name: value[-1:] for name, value in on_cpu.items()}
    for k in range(2):
        h = inclusion(whole, {name: value[[k]] for name, value in on_cpu.items()}).sum()
        assert float(images.whole[0, k]) == pytest.approx(float(h), rel=1e-4)
        assert found[f"image_inclusion_whole_h@{k}"] == float((images.whole[:, k] > 0).double().mean())
    images.whole[:] = 1.0
    assert "not within level 0" not in report({"a": found}, "scenes", {"a": shown})
    images.whole[1, 0] = -2.0
    html = report({"a": found}, "scenes", {"a": shown})
    assert "Where the whole image is not within level 0" in html
    assert html.count("<li><img") == len(images.rows[1]) == 3


def test_many_levels_fit_one_plot() -> None:
    """HierarImgs of many segments: six levels at most are drawn."""
    levels = ImageLevels(open_source("scenes:test?n=2"), [[0] * 11] * 2, torch.rand(2, 11), torch.ones(2, 10))
    html = report({"a": {}}, "images", {"a": {"images": levels}})
    assert "level 9" in html
    assert "level 3" not in html
