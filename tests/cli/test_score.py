"""`kiloword score`: folders of images, and what an explanation calls the pooling."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor

from kiloword.api import Matcher
from kiloword.cli.main import main
from kiloword.config.recipes import ModelFile, sizes
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.methods.registry import preset
from kiloword.model.heads import Single, unit
from kiloword.models.build import build
from kiloword.models.model_folder import save_model
from kiloword.types import Features

CAPTIONS = ["a red circle", "two blue squares"]


def matcher(method: str = "clip") -> Matcher:
    return Matcher(build(sizes()["debug"], preset(method), seed=1), Tokenizer.train(CAPTIONS, 300))


@pytest.fixture
def folder(tmp_path: Path) -> str:
    model = matcher()
    file = ModelFile(method="clip", settings={}, model=model.model.config)
    save_model(tmp_path / "model", model.model, model.tokenizer, file)
    return str(tmp_path / "model")


def images(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True)
    for n, name in enumerate(names):
        Image.new("RGB", (40, 30), (60 * n, 10, 99)).save(folder / name)
    return folder


def test_a_folder_stands_for_the_images_in_it(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photos = images(tmp_path / "photos", "b.png", "a.jpg", ".hidden.png")
    (photos / "a.txt").write_text("a red circle")
    each = [str(photos / "a.jpg"), str(photos / "b.png"), str(images(photos / "inner" / "2024", "c.png") / "c.png")]
    images(photos / ".cache", "hidden.png")
    (photos / "gone.png").symlink_to("nothing")
    main(["score", folder, "--images", str(photos), "--texts", *CAPTIONS])
    whole = capsys.readouterr().out
    main(["score", folder, "--images", *each, "--texts", *CAPTIONS])
    assert capsys.readouterr().out == whole
    assert whole.index("a.jpg") < whole.index("b.png")
    assert "hidden" not in whole
    images(photos / "inner" / "2025", "c.png")
    main(["score", folder, "--images", str(photos / "inner"), "--texts", *CAPTIONS])
    both = capsys.readouterr().out
    assert "2024/c.png" in both
    assert "2025/c.png" in both


def test_scores_by_distance_need_gaussians(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, photos = matcher("prolip"), images(tmp_path / "photos", "a.jpg")
    file = ModelFile(method="prolip", settings={}, model=model.model.config)
    save_model(tmp_path / "prolip", model.model, model.tokenizer, file)
    printed = []
    for nearest in ([], ["--nearest", "csd"], ["--nearest", "cosine"]):
        main(["score", str(tmp_path / "prolip"), "--images", str(photos), "--texts", "a red circle", *nearest])
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    cosine = model.score([photos / "a.jpg"], ["a red circle"], "cosine")
    assert f"{float(cosine):.3f}" in printed[2]
    with pytest.raises(SystemExit) as end:
        main(["score", folder, "--images", str(photos), "--texts", "a", "--nearest", "csd"])
    assert end.value.code == 2
    assert "their model is not Gaussian" in capsys.readouterr().err


def test_no_score_is_lost_where_a_table_is_too_wide(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [f"{'holiday' * 4}-{n}.jpg" for n in range(2)]
    photos = images(tmp_path / "photos", *names)
    for texts in (3, 13, 40):
        words = [f"a photo of {n} unbelievably red circles" for n in range(texts)]
        main(["score", folder, "--images", str(photos), "--texts", *words])
        printed = capsys.readouterr().out
        scores = matcher().score([photos / name for name in names], words)
        for name, row in zip(names, scores.tolist(), strict=True):
            assert printed.count(name) == (1 if texts == 3 else texts)
            assert all(f"{score:.3f}" in printed for score in row)
        assert all(word in printed for text in words for word in text.split())
        if texts > 3:
            assert f"{scores[1, 5]:.3f}  {names[1]}  {words[5]}\n" in printed


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--maps", "rollout"], "--maps selects the attention that --explain DIR draws"),
        (["--explain-what", "maps"], "--explain-what selects what --explain DIR draws"),
        (["--nearest", "cosine", "--explain", "inside"], "omit --nearest, or --explain"),
        (["--beside", "gone"], "--beside names models to draw by --plane FILE"),
        (["--beside", "gone", "--plane", "plane.html"], "gone"),
    ],
)
def test_flags_that_change_nothing_are_refused_before_anything_is_printed(
    flags: list[str], message: str, folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    photos = images(tmp_path / "photos", "a.jpg")
    with pytest.raises(SystemExit) as end:
        main(["score", folder, "--images", str(photos), "--texts", "a", *flags])
    printed = capsys.readouterr()
    assert end.value.code == 2
    assert message in printed.err
    assert not printed.out


def test_a_folder_without_images_is_refused(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = images(tmp_path / "photos")
    with pytest.raises(SystemExit) as end:
        main(["score", folder, "--images", str(empty), "--texts", "a"])
    assert end.value.code == 2
    assert f"{empty} holds no images" in capsys.readouterr().err


class PowerMean(Single):
    """Reads the patches, by another mean."""

    def image(self, tokens: Tensor) -> Features:
        patches = tokens[:, self.image_pool.extra :]
        return {"vec": unit(self.project_image_tokens(patches.pow(3).mean(1)))}


class ClassToken(Single):
    """Reads the class token, in a way of its own."""

    def image(self, tokens: Tensor) -> Features:
        return {"vec": unit(self.project_image_tokens(2 * tokens[:, 0]))}


def explained(kind: type[Single]):  # type: ignore[no-untyped-def]
    model = matcher()
    own = kind(model.model.config)
    own.load_state_dict(model.model.head.pooling.state_dict())  # type: ignore[attr-defined]
    model.model.head.pooling = own
    pixels = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return model, pixels, model.explain(pixels, CAPTIONS)


def test_a_pooling_of_patches_is_called_by_its_name_and_its_maps_are_the_falls_of_its_score() -> None:
    model, pixels, found = explained(PowerMean)
    assert "power mean" in found.about
    assert "class token" not in found.about
    texts = model.encode_text(CAPTIONS)
    with torch.no_grad():
        tokens = model.model.image_tokens(pixels)
        tokens[:, -1] = tokens[:, model.model.head.pooling.image_pool.extra :].mean(1)
        without = model.model.head.pooling.image(tokens)["vec"] @ texts["vec"].T
    torch.testing.assert_close(found.maps[..., -1], found.scores - without, atol=1e-6, rtol=1e-4)
    assert not torch.allclose(found.maps[:, 0], found.maps[:, 1])


def test_a_pooling_of_the_class_token_shows_where_that_looks() -> None:
    found, plain = explained(ClassToken)[2], explained(Single)[2]
    assert "class token reads" in found.about
    torch.testing.assert_close(found.maps, plain.maps)


def test_attentional_pooling_is_no_maximum() -> None:
    from dataclasses import replace

    config = sizes()["debug"]
    config = replace(config, head=replace(config.head, image_pool="attentional", pool_heads=2))
    model = Matcher(build(config, preset("coca"), seed=1), Tokenizer.train(CAPTIONS, 300))
    pixels = torch.randint(0, 256, (1, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert "attentional pooling" in model.explain(pixels, CAPTIONS).about
