"""Runs on the first captions of an image, and features of images resized to more than the crop (FFF's teacher)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kiloword.cli.main import main
from kiloword.data.sampler import choose_captions
from kiloword.methods.defaults import default_recipe
from kiloword.randomness import Draw
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


def test_features_of_images_resized_otherwise_are_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A teacher's features never mix with those of its images resized to another size."""
    base = default_recipe("siglip", "debug", ("scenes?n=16&captions=3",))
    data = replace(base.data, tokenizer_vocab=300, captions=2, first_captions=True)
    model = train(replace(base, data=data, batch=8, steps=1), tmp_path / "run", options=RunOptions(quiet=True))
    words = ["embed", str(model), "--data", "scenes?n=6", "--out"]
    main([*words, str(tmp_path / "plain")])
    main([*words, str(tmp_path / "wide"), "--resize", "40"])
    features = [(tmp_path / name / "images.npy").read_bytes() for name in ("plain", "wide")]
    assert features[0] != features[1]
    for name, resize, word in (("plain", "40", "resize 40"), ("small", "30", "resize 30 is smaller")):
        with pytest.raises(SystemExit):
            main([*words, str(tmp_path / name), "--resize", resize])
        assert word in capsys.readouterr().err
    main([*words, str(tmp_path / "plain"), "--resize", "shortest"])  # as the model has it
