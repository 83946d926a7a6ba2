"""The page of eval uncertainty: its plots, the plane, and the verb that writes it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from test_uncertainty import matcher

from kiloword.cli.main import main
from kiloword.config.recipes import ModelFile
from kiloword.data.scenes.source import parse_scenes
from kiloword.evaluation.task import Inputs
from kiloword.evaluation.uncertainty.data import gather
from kiloword.evaluation.uncertainty.inclusion import matched
from kiloword.evaluation.uncertainty.page import report
from kiloword.evaluation.uncertainty.shown import KINDS, Findings, drawn, pairs, plane
from kiloword.explain.plane import principal
from kiloword.models.model_folder import save_model
from kiloword.report import box_plot, scatter, tiles
from kiloword.report.plots import Dots
from tars import noise


def test_the_plane_is_numpys_and_projects_gaussians() -> None:
    source = parse_scenes("scenes:test?n=20&captions=6&levels=0,1,2,3", 32)
    model = matcher()
    data = gather(Inputs(model, source, 8))
    one, again = plane(data), plane(gather(Inputs(model, source, 3)))
    assert one is not None
    assert again is not None
    assert one.texts == again.texts
    torch.testing.assert_close(one.means, again.means, rtol=1e-3, atol=1e-5)
    assert len(one.images) == 4
    assert sum(text is not None for text in one.texts) == 16
    x = torch.randn(50, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * torch.arange(1, 7)
    axes, share = principal(x)
    values, vectors = np.linalg.eigh(np.cov(x.T.numpy()))
    np.testing.assert_allclose(np.abs(axes.numpy() @ vectors[:, ::-1][:, :2]), np.eye(2), atol=1e-8)
    np.testing.assert_allclose(share, values[::-1][:2] / values.sum(), rtol=1e-10)
    assert all(float(axis[axis.abs().argmax()]) > 0 for axis in axes)


def test_scatter_places_dots_squares_and_ellipses() -> None:
    ring = [(8.0, 5.0), (5.0, 6.0), (2.0, 5.0), (5.0, 4.0)]
    html = scatter({"a": Dots([(0.0, 0.0)], [(10.0, 10.0)], [ring]), "b": [(5.0, 0.0)]}, "across", "up")
    assert 'class="dot"' in html
    assert 'd="M0.0 1000.0h0"' in html
    assert 'class="dot square"' in html
    assert 'd="M1000.0 0.0h0"' in html
    assert 'class="ring"' in html
    assert "across" in html
    assert "legend" in html
    assert 'd="M0.0 1000.0h0M500.0 1000.0h0M1000.0 0.0h0"' in scatter(
        {"a": [(1.0, 0.0), (10.0, 0.0), (100.0, 1.0)]}, "x", "y", log_x=True
    )


@pytest.mark.parametrize(
    ("series", "log_x", "output"),
    [
        ({}, False, "no series has a point"),
        ({"a": [(0.0, float("nan"))]}, False, "not finite"),
        ({"a": [(0.0, 1.0)]}, True, "logarithmic"),
        ({str(n): [(0.0, 1.0)] for n in range(7)}, False, "room for 6"),
    ],
)
def test_scatter_refuses(series: dict[str, list[tuple[float, float]]], log_x: bool, output: str) -> None:
    with pytest.raises(ValueError, match=output):
        scatter(series, "x", "y", log_x=log_x)


def test_boxes_stand_where_their_numbers_are() -> None:
    html = box_plot(
        {"few & short": [0.0, 2.0, 5.0, 8.0, 10.0], "many": [1.0, 1.0, 1.0, 1.0, 1.0]}, "words", "uncertainty"
    )
    assert "M250.0 1000.0V800.0M250.0 200.0V0.0" in html  # whiskers
    assert "M125.0 800.0H375.0V200.0H125.0Z" in html
    assert "M125.0 500.0H375.0" in html
    assert "few &amp; short" in html
    for wrong in ([1.0, 2.0], [5.0, 4.0, 3.0, 2.0, 1.0], [0.0, 0.0, 0.0, 0.0, float("inf")]):
        with pytest.raises(ValueError, match="five finite numbers"):
            box_plot({"x": wrong}, "a", "b")
    with pytest.raises(ValueError, match="no groups"):
        box_plot({}, "a", "b")


def test_tiles_stand_in_rows() -> None:
    html = tiles([(noise(8, 8), "a <b>")] * 3, columns=2)
    assert html.count("<li>") == 3
    assert "--n:2" in html
    assert "a &lt;b&gt;" in html


def test_verb_writes_a_page_of_two_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = []
    for name in ("one", "two"):
        model = matcher(seed=len(folders))
        folders.append(str(tmp_path / name))
        file = ModelFile(method="prolip", settings={}, model=model.model.config)
        save_model(tmp_path / name, model.model, model.tokenizer, file)
    page, values = tmp_path / "page.html", tmp_path / "values.json"
    source = "scenes:test?n=20&levels=0,1,2,3&captions=2"
    main(
        [
            "eval",
            "uncertainty",
            *folders,
            "--data",
            source,
            "--html",
            str(page),
            "--json",
            str(values),
        ]
    )
    output = capsys.readouterr().out
    assert "text_above_image" in output
    assert "right@" not in output
    assert set(json.loads(values.read_text())) == {"one", "two"}
    html = page.read_text()
    for heading in ("How uncertain images and texts are", "by level", "true of", "Calibration", "in a plane"):
        assert heading in html
    assert html.count('class="ring"') == 2 * 4 * 3  # four images and two captions of each
    assert "nan" not in html.lower().replace("financ", "")


def test_pairs_are_of_the_corners_and_their_distance_is_literal() -> None:
    model = matcher()
    data = gather(Inputs(model, parse_scenes("scenes:test?n=16&captions=2")))
    assert data.texts is not None
    found = pairs(data, matched(data)[1])
    assert list(found) == list(KINDS)
    uncertain, certain = found["Image and text uncertain"][0], found["Image and text certain"][0]
    for name in ("image_uncertainty", "text_uncertainty"):
        middle = float((data.image_uncertainty if name.startswith("image") else data.text_uncertainty).median())
        assert getattr(certain, name) < middle < getattr(uncertain, name)
    for pair in (one for several in found.values() for one in several):
        (text,) = (t for t, caption in enumerate(data.captions) if caption == pair.caption)
        image = int(data.image[text])
        gap = data.images["vec"][image].double() - data.texts["vec"][text].double()
        sums = float(data.image_uncertainty[image]), float(data.text_uncertainty[text])
        assert (pair.image_uncertainty, pair.text_uncertainty) == sums
        assert pair.distance == pytest.approx(float(gap.square().sum()) + sum(sums), rel=1e-5)
    corner = found["Image uncertain, text certain"]
    assert len({pair.image.tobytes() for pair in corner}) == len(corner) == 3  # of unique images


def test_captions_of_pairs_are_escaped() -> None:
    data = gather(Inputs(matcher(), parse_scenes("scenes:test?n=4&captions=1")))
    data.captions[:] = [f"<script>{n}</script>" for n in range(4)]
    findings = Findings(data)
    findings.distance = matched(data)[1]
    html = report({"a": {}}, "scenes", {"a": drawn(findings)})
    assert "&lt;script&gt;0" in html
    assert "<script>" not in html
    assert "CSD 1." in html or "CSD 2." in html or "CSD 0." in html
