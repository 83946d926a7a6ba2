"""Images resized to more than the crop (FFF's teacher: 256, then 224), and the first captions of an image."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from kiloword.cli.main import main
from kiloword.config.recipes import AugmentConfig, ModelFile, Preprocess, sizes
from kiloword.config.settings import check, parse
from kiloword.data.images.augmentation import EvalTransform, TrainTransform
from kiloword.data.sampler import choose_captions
from kiloword.features import extract
from kiloword.features.extract import resized
from kiloword.features.teachers import open_teacher
from kiloword.interop.open_clip_config import torchvision_ready
from kiloword.methods.defaults import default_recipe
from kiloword.randomness import Draw
from kiloword.training.loop import RunOptions, train


def photo(width: int, height: int) -> Image.Image:
    noise = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BILINEAR)


@pytest.mark.parametrize(("width", "height"), [(90, 61), (61, 90), (64, 64), (500, 40)])
def test_torchvisions_resize_and_centre_crop(width: int, height: int) -> None:
    torchvision_ready()
    transforms = pytest.importorskip("torchvision.transforms", reason="torchvision is not installed")
    image = photo(width, height)
    both = transforms.Compose(
        [
            transforms.Resize(64, transforms.InterpolationMode.BICUBIC),
            transforms.CenterCrop(56),
            transforms.PILToTensor(),
        ]
    )
    assert torch.equal(EvalTransform(56, 64)(np.asarray(image)), both(image))
    assert not torch.equal(EvalTransform(56)(np.asarray(image)), both(image))


def test_training_without_a_random_crop_sees_the_same_part() -> None:
    pixels = np.zeros((64, 128, 3), dtype=np.uint8)
    pixels[4:60, 36:92] = 255  # what a crop of 56 from 64 sees
    some = Draw(0, 0, 0)
    assert bool((EvalTransform(56, 64)(pixels) == 255).all())
    assert bool((TrainTransform(56, AugmentConfig(), 64)(pixels, some) == 255).all())
    assert not bool((TrainTransform(56, AugmentConfig())(pixels, some) == 255).all())


def test_a_side_below_the_crop() -> None:
    for transform in (EvalTransform, lambda size, resize: TrainTransform(size, AugmentConfig(), resize)):
        with pytest.raises(
            ValueError, match=r"resize 200 is smaller than the image size 224, .* such as 256, or shortest"
        ):
            transform(224, 200)


@pytest.mark.parametrize("bad", [0, "longest", 1.5])
def test_values_of_the_setting(bad: Any) -> None:
    assert parse({"resize": 256}, Preprocess).resize == 256
    with pytest.raises(ValueError, match="resize"):
        check(parse({"resize": bad}, Preprocess), prefix="")


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
    words = ["embed", str(model), "--data", "scenes?n=6&size=64", "--out"]
    main([*words, str(folder / "plain")])
    main([*words, str(folder / "wide"), "--resize", "40"])
    plain, wide = (extract.FeatureStore(folder / name) for name in ("plain", "wide"))
    assert len(plain) == len(wide) == 6
    features = [(folder / name / "part-00000.arrow").read_bytes() for name in ("plain", "wide")]
    assert features[0] != features[1]
    with pytest.raises(SystemExit):
        main([*words, str(folder / "plain"), "--resize", "40"])
    assert "resize 40) here" in capsys.readouterr().err
    teacher = open_teacher(str(model), "cpu", "fp32")
    with pytest.raises(ValueError, match="resize 30 is smaller than the image size 32"):
        resized(teacher, 30)
    fingerprint = teacher.fingerprint
    assert resized(teacher, "shortest").fingerprint == fingerprint
    assert resized(teacher, 40).fingerprint == f"{fingerprint} resize 40"
