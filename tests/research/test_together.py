"""The mean of several models' scores as one model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from folders import matcher, model_folder
from kiloword.config.recipes import sizes
from kiloword.data.open import open_source
from kiloword.data.reading import eval_batches
from research.together import Encoded, encoded, main, together

ROWS = 70  # more than a batch
SCENES = open_source(f"scenes?n={ROWS}&captions=2")
PARTS = list(eval_batches(SCENES, sizes()["debug"].image.size))
CAPTIONS = [text for part in PARTS for texts in part.captions for text in texts]


@pytest.fixture(scope="module")
def models() -> list[Encoded]:
    return [encoded(matcher("clip", 0), SCENES), encoded(matcher("llip", 1), SCENES)]


def test_its_scores_are_the_means_of_theirs(models: list[Encoded]) -> None:
    """Also of a method whose image features depend on the text."""
    score, images, texts = together(models)
    pixels = torch.cat([part.images for part in PARTS])
    scores = torch.stack([one.matcher.score(list(pixels), CAPTIONS) for one in models])
    torch.testing.assert_close(score(images, texts), scores.mean(0))
    assert (scores[0] - scores[1]).abs().max() > 0.01
    assert models[0].image_of_text.tolist() == [row for row in range(ROWS) for _ in range(2)]


def test_mirrored_images_score_as_their_mirror_images() -> None:
    model = matcher("clip", 0)
    score, images, texts = together([encoded(model, SCENES, mirrored=True)])
    pixels = torch.cat([part.images for part in PARTS])
    own, mirror = (model.score(list(view), CAPTIONS) for view in (pixels, pixels.flip(-1)))
    torch.testing.assert_close(score(images, texts), (own + mirror) / 2)
    assert not torch.allclose(own, mirror)


def test_the_script_prints_each_model_and_their_mean(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = tuple(model_folder(tmp_path / name / "model") for name in ("a", "b"))
    main(folders, data="scenes?n=4")
    printed = capsys.readouterr().out.splitlines()
    assert [line.partition(": R@1")[0] for line in printed] == [*map(str, folders), "together"]
