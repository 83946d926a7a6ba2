"""Runs on the first captions of an image, and features of images resized to more than the crop (FFF's teacher)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kiloword.cli.main import main
from kiloword.config.recipes import ModelFile, sizes
from kiloword.config.settings import parse
from kiloword.data.sampler import choose_captions
from kiloword.methods.defaults import default_recipe
from kiloword.randomness import Draw
from kiloword.stores.features import FeatureStore
from kiloword.training.loop import RunOptions, train


def test_the_first_captions_of_every_epoch() -> None:
    captions = ["own", "best", "good", "fair"]
    for epoch in range(3):
        some = Draw(0, epoch, 5)
        assert choose_captions(captions, 2, some, first=True) == ["own", "best"]
        assert choose_captions(captions, "one", some, first=True) == ["own"]
        assert choose_captions(captions, 9, some, first=True) == choose_captions(captions, "all", some) == captions
    others = {tuple(choose_captions(captions, 2, Draw(0, epoch, 5))) for epoch in range(3)}
    assert len(others) > 1


def test_a_run_of_first_captions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = default_recipe("siglip", "debug", ("scenes?n=16&captions=3",))
    data = replace(base.data, tokenizer_vocab=300, captions=2, first_captions=True)
    out = train(replace(base, data=data, batch=8, steps=1), tmp_path / "run", options=RunOptions(quiet=True))
    assert json.loads((tmp_path / "run" / "config.json").read_text())["recipe"]["data"]["first_captions"] is True
    file = parse(json.loads((out / "config.json").read_text()), ModelFile)
    assert file.model.preprocess == sizes()["debug"].preprocess
    embedded(out, tmp_path, capsys)


def embedded(model: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Features of a teacher whose images are resized otherwise are others, and never mix with its own."""
    words = ["embed", str(model), "--data", "scenes?n=6", "--out"]
    main([*words, str(folder / "plain")])
    main([*words, str(folder / "wide"), "--resize", "40"])
    plain, wide = (FeatureStore(folder / name) for name in ("plain", "wide"))
    assert len(plain) == len(wide) == 6
    features = [(folder / name / "images.npy").read_bytes() for name in ("plain", "wide")]
    assert features[0] != features[1]
    with pytest.raises(SystemExit):
        main([*words, str(folder / "plain"), "--resize", "40"])
    assert "resize 40" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*words, str(folder / "small"), "--resize", "30"])
    assert "resize 30 is smaller than the image size 32" in capsys.readouterr().err
    main([*words, str(folder / "plain"), "--resize", "shortest"])  # as the model has it
