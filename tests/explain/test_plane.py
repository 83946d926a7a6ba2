"""Images and texts in a plane of several models: the projection, the page, and what is refused."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from kiloword.api import Matcher
from kiloword.cli.main import main
from kiloword.config.recipes import ModelFile, sizes
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.explain.plane import STDS, _letters, outline, project
from kiloword.methods.registry import preset
from kiloword.models.build import build
from kiloword.models.model_folder import save_model
from tars import photo

TEXTS = ["a red circle", "<b>two</b> stars"]


def folder(place: Path, method: str) -> str:
    made = preset(method)
    model = Matcher(build(made.shape(sizes()["debug"]), made, seed=1), Tokenizer.train(TEXTS, 300))
    save_model(
        place / method, model.model, model.tokenizer, ModelFile(method=method, settings={}, model=model.model.config)
    )
    return str(place / method)


def test_projection_is_that_of_samples() -> None:
    generator = torch.Generator().manual_seed(0)
    part = {"vec": torch.randn(5, 8, generator=generator), "log_var": torch.randn(5, 8, generator=generator)}
    plane = project([{name: value[:2] for name, value in part.items()}, {n: v[2:] for n, v in part.items()}])
    centred = part["vec"].double().numpy() - part["vec"].double().numpy().mean(0)
    scores = np.linalg.svd(centred)[0] * np.r_[np.linalg.svd(centred)[1], np.zeros(0)]
    np.testing.assert_allclose(plane.means.abs().numpy(), np.abs(scores[:, :2]), atol=1e-9)
    assert plane.spread is not None
    axes = np.linalg.lstsq(centred, plane.means.numpy(), rcond=None)[0].T  # [2, D]
    for n in range(5):
        expected = axes @ np.diag(np.exp(part["log_var"][n].double().numpy())) @ axes.T
        np.testing.assert_allclose(plane.spread[n].numpy(), expected, atol=1e-9)
    assert project([{"vec": part["vec"]}]).spread is None


def test_outlines_are_at_the_same_distance() -> None:
    mean, spread = torch.tensor([1.0, -2.0]).double(), torch.tensor([[2.0, 0.5], [0.5, 1.0]]).double()
    for point in outline(mean, spread):
        away = torch.tensor(point).double() - mean
        assert math.sqrt(float(away @ torch.linalg.inv(spread) @ away)) == pytest.approx(STDS)


def test_page_of_two_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for n in range(3):
        (tmp_path / f"{n}.png").write_bytes(photo(n))
    models = [folder(tmp_path, name) for name in ("prolip", "siglip")]
    images = ["--images", *(str(tmp_path / f"{n}.png") for n in range(3))]
    plane = ["--plane", str(tmp_path / "p.html"), "--beside", models[1]]
    main(["score", models[0], *images, "--texts", *TEXTS, *plane])
    assert str(tmp_path / "p.html") in capsys.readouterr().out
    html = (tmp_path / "p.html").read_text()
    assert html.count('class="ring"') == 3 + 2  # of the first model alone
    assert html.count("<img") == 3
    assert "&lt;b&gt;two&lt;/b&gt; stars" in html
    assert "<b>" not in html
    beside = re.findall(r'dx=".45em"[^>]*>([^<]*)<', html)
    assert beside == ["1", "2", "3", "A", "B"] * 2
    assert html.index(">prolip<") < html.index("Uncertainty (sum of variances)") < html.index("has no Gaussians")


def test_names_of_many_texts() -> None:
    assert [_letters(n) for n in (0, 25, 26, 27, 52, 701, 702)] == ["A", "Z", "AA", "AB", "BA", "ZZ", "AAA"]


def test_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "0.png").write_bytes(photo())
    model = folder(tmp_path, "clip")
    page = tmp_path / "p.html"
    for words, output in (
        (["--texts", "a", "--beside", model], "--beside names models to draw by --plane FILE"),
        (["--texts", *["a"] * 200, "--plane", str(page)], "--plane got 201 images and texts: expected 2 to 200"),
        (["--texts", "a", "--plane", str(page), "--beside", model], "one model is named twice"),
    ):
        with pytest.raises(SystemExit) as end:
            main(["score", model, "--images", str(tmp_path / "0.png"), *words])
        assert end.value.code == 2
        assert output in capsys.readouterr().err
    assert not page.exists()
