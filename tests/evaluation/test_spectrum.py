"""The spectrum of image features: against numpy, on spectra that are known, and as a verb for several models."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from kiloword.api import Matcher
from kiloword.cli.main import main
from kiloword.config.recipes import ModelConfig, ModelFile, sizes
from kiloword.data.open import open_source
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.evaluation import evaluate
from kiloword.evaluation.command import labels
from kiloword.evaluation.spectrum.task import _chosen, covariance, effective_rank, report, singular_values, tower_output
from kiloword.methods.registry import preset
from kiloword.models.build import build
from kiloword.models.model_folder import save_model
from kiloword.types import Skipped
from tars import pairs, write_tar


def matcher(config: ModelConfig | None = None, seed: int = 0) -> Matcher:
    tokenizer = Tokenizer.train(["a red dog", "a blue cat", "green"], vocab=300)
    return Matcher(build(config or sizes()["debug"], preset("siglip"), seed), tokenizer)


def test_covariance_in_parts_is_numpys_far_from_zero_too() -> None:
    x = np.random.default_rng(0).normal(size=(23, 5)) * [1, 2, 3, 1e-3, 0] + 1e6
    count, spread = covariance(torch.from_numpy(x).split(7))
    assert count == 23
    centred = x - x.mean(0)
    np.testing.assert_allclose(spread.numpy(), centred.T @ centred / 22, atol=1e-8)
    expected = np.linalg.svd(centred, compute_uv=False) ** 2 / 22
    np.testing.assert_allclose(singular_values(spread).numpy(), expected, atol=1e-8)


@pytest.mark.parametrize(
    ("values", "rank"), [([3.0, 3.0, 3.0, 0.0], 3.0), ([5.0, 0.0], 1.0), ([0.0, 0.0], 0.0), ([2.0, 1.0, 1.0], 2**1.5)]
)
def test_effective_rank_of_known_spectra(values: list[float], rank: float) -> None:
    assert effective_rank(torch.tensor(values, dtype=torch.float64)) == pytest.approx(rank)


def test_task_is_the_covariance_of_what_the_tower_puts_out() -> None:
    model = matcher()
    source = open_source("scenes:test?n=21", 32)
    found = evaluate(model, "spectrum", source, samples=13, batch=5)
    pixels = torch.stack([model._transform(source.record(row).image) for row in _chosen(source, 13)])
    with torch.inference_mode():
        tokens, features = model.model.encode_image(pixels)
        pooled = model.model.head.pooling.image_pool(tokens)
    values = [found[f"singular_value@{k}"] for k in range(1, 33)]
    np.testing.assert_allclose(values, np.linalg.eigvalsh(np.cov(pooled.double().numpy().T))[::-1].clip(0), atol=1e-6)
    assert (found["vectors"], found["dimensions"], found["skipped"]) == (13, 32, 0)
    assert 1 <= found["effective_rank"] <= 12
    vec = evaluate(model, "spectrum", source, samples=13, of="vec")
    largest = np.linalg.eigvalsh(np.cov(features["vec"].double().numpy().T))[-1]
    assert vec["dimensions"] == 16
    assert vec["singular_value@1"] == pytest.approx(largest, rel=1e-4)


@pytest.mark.parametrize(("pool", "tokens"), [("contextual", 3), ("learned_average", 3), ("average", 3), ("first", 1)])
def test_mixture_tokens_are_vectors_of_their_own(pool: str, tokens: int) -> None:
    method = preset("llip", {"k": 3, "heads": 4, "pool": pool})
    model = Matcher(build(sizes()["debug"], method), matcher().tokenizer)
    given = torch.arange(2.0 * 7 * 4).view(2, 7, 4)  # 3 mixture tokens, 4 patches
    torch.testing.assert_close(tower_output(model.model, given), given[:, :tokens])
    assert evaluate(model, "spectrum", "scenes:test?n=5")["vectors"] == 5 * tokens


def test_bad_images_are_named_by_their_own_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILOWORD_CACHE", str(tmp_path / "cache"))
    write_tar(tmp_path / "photos" / "0.tar", pairs(6) | {"0004.png": b"no image"})
    skipped: list[Skipped] = []
    found = evaluate(matcher(), "spectrum", str(tmp_path / "photos"), skipped=skipped)
    assert (found["vectors"], found["skipped"], skipped[0].row) == (5, 1, 4)
    found = evaluate(matcher(), "spectrum", str(tmp_path / "photos"), samples=5, skipped=skipped)
    assert all(one.row == 4 for one in skipped)


def test_nothing_readable_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILOWORD_CACHE", str(tmp_path / "cache"))
    write_tar(tmp_path / "photos" / "0.tar", pairs(1) | {"0000.png": b"no image"})
    with pytest.raises(ValueError, match="none of its 1 rows is a usable image"):
        evaluate(matcher(), "spectrum", str(tmp_path / "photos"))


def test_choice_is_the_same_for_every_model_and_within_the_source() -> None:
    source = open_source("scenes:test?n=50", 32)
    assert _chosen(source, 20) == _chosen(open_source("scenes:test?n=50", 64), 20)
    assert _chosen(source, 99) == list(range(50))


def test_one_image_and_equal_images() -> None:
    with pytest.raises(ValueError, match="1 usable vector: "):
        evaluate(matcher(), "spectrum", "scenes:test?n=1")
    same = {"effective_rank": 0.0, "dimensions": 2.0, "vectors": 5.0, "singular_value@1": 0.0}
    with pytest.raises(ValueError, match="no spectrum to draw"):
        report({"a": same}, "scenes", {})


def test_verb_shows_several_models_in_one_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed, name in enumerate("ab"):
        model = matcher(seed=seed)
        file = ModelFile(method="siglip", settings={}, model=model.model.config)
        save_model(tmp_path / name / "model", model.model, model.tokenizer, file)
    a, b = (str(tmp_path / name / "model") for name in "ab")
    html, numbers = tmp_path / "s.html", tmp_path / "s.json"
    data = ["--data", "scenes:test?n=9"]
    main(["eval", "spectrum", a, b, *data, "--html", str(html), "--json", str(numbers), "--samples", "7"])
    said = capsys.readouterr().out
    assert "effective_rank" in said
    assert "singular_value@8 " in said
    assert "singular_value@7 " not in said
    found = json.loads(numbers.read_text())
    assert list(found) == ["a", "b"]
    assert found["a"]["vectors"] == 7
    assert "singular_value@7" in found["b"]
    assert html.read_text().count('<path class="line"') == 2 * 2 + 2 * 2  # two plots of two lines, two legends
    for task, flags, said in (("retrieval", (), "no page"), ("zeroshot", ("--shortlist", "5"), "--shortlist")):
        with pytest.raises(SystemExit):
            main(["eval", task, a, *flags, *data, "--html", str(html)])
        assert said in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["eval", "uncertainty", a, b, *data])
    assert "kiloword: a: this model's features have no variance" in capsys.readouterr().err


def test_labels_tell_models_apart() -> None:
    assert labels(["runs/a/model", "b"]) == ["a", "b"]
    assert labels(["x/a/model", "y/a/model"]) == ["x/a/model", "y/a/model"]
    with pytest.raises(ValueError, match="twice"):
        labels(["a", "a"])
