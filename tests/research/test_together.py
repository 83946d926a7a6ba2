"""The mean of several models' scores as one model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from folders import model_folder
from kiloword.api import Matcher
from kiloword.config.recipes import sizes
from kiloword.data.open import open_source
from kiloword.data.reading import eval_batches
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.methods.registry import preset
from kiloword.models.build import build
from research.together import Encoded, encoded, main, recalls, together

ROWS = 70  # more than a batch
SCENES = open_source(f"scenes?n={ROWS}&captions=2")
PARTS = list(eval_batches(SCENES, sizes()["debug"].image.size))
CAPTIONS = [text for part in PARTS for texts in part.captions for text in texts]
TOKENIZER = Tokenizer.train(CAPTIONS, vocab=300)


def matcher(method: str, seed: int) -> Matcher:
    made = preset(method)
    return Matcher(build(made.shape(sizes()["debug"]), made, seed), TOKENIZER)


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


def test_each_direction_stands_where_the_line_says(models: list[Encoded]) -> None:
    scores = torch.stack([one.matcher.score(one.views[0], one.texts) for one in models]).mean(0)  # [I, T]
    of_text = models[0].image_of_text
    text = (of_text[scores.argmax(1)] == torch.arange(ROWS)).float().mean()
    image = (scores.argmax(0) == of_text).float().mean()
    assert text != image
    assert recalls("both", models).startswith(f"both: R@1, R@5, R@10, text / image: {text:.3f} / {image:.3f}, ")


def test_photos_without_captions_and_no_models_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        Image.new("RGB", (40, 40)).save(tmp_path / f"{name}.png")
    with pytest.raises(ValueError, match="none of its 2 rows is a usable image, the first because: no caption"):
        encoded(matcher("clip", 0), open_source(str(tmp_path)))
    with pytest.raises(SystemExit) as ended:
        main((), data="scenes?n=2")
    assert ended.value.code == 2
    assert "no model: expected folders of models" in capsys.readouterr().err


def test_the_script_prints_each_model_and_their_mean(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = tuple(model_folder(tmp_path / name / "model") for name in ("a", "b"))
    main(folders, data="scenes?n=4")
    printed = capsys.readouterr().out.splitlines()
    assert [line.partition(": R@1")[0] for line in printed] == [*map(str, folders), "together"]
