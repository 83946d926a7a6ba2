"""A model judged by CLIP_benchmark's own evaluation, end to end, and by ours: the same numbers."""

from __future__ import annotations

import io
import tarfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from class_data import drawn
from kiloword.api import Matcher
from kiloword.cli.clip_benchmark import Towers
from kiloword.config.recipes import sizes
from kiloword.data.classes.names import classnames, read_templates
from kiloword.data.open import open_source
from kiloword.data.reading import eval_batches
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.evaluation import evaluate
from kiloword.methods.registry import preset
from kiloword.models.build import build
from kiloword.types import Source
from tars import write_tar

pytest.importorskip("clip_benchmark", reason="needs the CLIP_benchmark package")
pytest.importorskip("sklearn", reason="CLIP_benchmark's classification metrics need scikit-learn")


ACCURACY = {"acc1", "acc5", "mean_per_class_recall"}


class AsTheirs(Towers):
    """With the tokenizer that they ask for."""

    def __init__(self, matcher: Matcher) -> None:
        super().__init__(matcher)
        self.tokenizer = partial(matcher.tokenizer.encode, config=matcher.model.config.text)


class TheirLoader(list):  # type: ignore[type-arg]
    """Batches, and the class names where their evaluation looks for them."""

    def __init__(self, source: Source, labels: bool) -> None:
        batches = list(eval_batches(source, 32, batch=50))
        super().__init__((b.images, b.labels if labels else b.captions) for b in batches)
        self.dataset = SimpleNamespace(classes=getattr(source, "classnames", None))


@pytest.fixture(scope="module")
def matcher() -> Matcher:
    captions = [c for row in range(200) for c in open_source("scenes").record(row).captions]
    return Matcher(build(sizes()["debug"], preset("siglip"), seed=1), Tokenizer.train(captions, 400))


def test_retrieval(matcher: Matcher) -> None:
    from clip_benchmark.metrics import zeroshot_retrieval

    source, theirs = open_source("scenes:test?n=150&captions=3"), AsTheirs(matcher)
    with torch.no_grad():
        expected = zeroshot_retrieval.evaluate(
            theirs, TheirLoader(source, False), theirs.tokenizer, "cpu", amp=False, recall_k_list=[1, 5, 10]
        )
    ours = evaluate(matcher, "retrieval", source)
    assert len(expected) == 6
    assert {name: ours[name] for name in expected} == pytest.approx(expected, abs=1e-6)
    assert expected["text_retrieval_recall@10"] > 0


def check_zeroshot(
    matcher: Matcher, loader: Any, names: list[str], templates: list[str], source: Any, /, **options: Any
) -> set[str]:
    """Their figures of a loader are ours of the source. Returns: names of the metrics."""
    from clip_benchmark.metrics import zeroshot_classification

    theirs = AsTheirs(matcher)
    with pytest.MonkeyPatch.context() as patch:
        # Its accuracy() calls float() on an array of shape [1], which NumPy 2.4 refuses: shadow that one name.
        patch.setattr(zeroshot_classification, "float", _number, raising=False)
        expected = zeroshot_classification.evaluate(
            theirs, loader, theirs.tokenizer, names, templates, "cpu", amp=False
        )
    ours = evaluate(matcher, "zeroshot", source, **options)
    assert {name: ours[name] for name in expected} == pytest.approx(expected, abs=1e-6)
    assert ours["skipped"] == 0
    return set(expected)


def test_zeroshot(matcher: Matcher) -> None:
    source: Any = open_source("scenes:test?n=200&task=shape")
    metrics = check_zeroshot(matcher, TheirLoader(source, True), source.classnames, source.templates, source)
    assert metrics == ACCURACY


def test_real_class_data(matcher: Matcher, shared: Path) -> None:
    """CLIP_benchmark's figures of images that Python's tarfile and Pillow read, without any reader of ours."""
    folder = shared / "wds_cifar10"
    names = (folder / "classnames.txt").read_text().splitlines()
    templates = (folder / "zeroshot_classification_templates.txt").read_text().splitlines()
    with tarfile.open(folder / "test" / "0.tar") as file:
        files = {name: file.extractfile(name).read() for name in file.getnames()}  # type: ignore[union-attr]
    keys = [name.removesuffix(".cls") for name in files if name.endswith(".cls")]
    images = [(files[f"{key}.jpg"], int(files[f"{key}.cls"])) for key in keys]
    assert (names, templates) == (classnames("cifar10"), read_templates("cifar10"))
    assert len({label for _, label in images}) == 10
    loader, test = Decoded(images, names), str(folder / "test")
    assert check_zeroshot(matcher, loader, names, templates, test, templates="cifar10") == ACCURACY


def test_several_classes_an_image(matcher: Matcher, tmp_path: Path) -> None:
    """Labels as CLIP_benchmark's own converter writes them: a .npy of 0 and 1."""
    images, names = drawn("scenes:test?task=shape&n=60")
    targets = np.random.default_rng(0).integers(0, 2, (60, len(names)))
    parts: dict[str, bytes] = {}
    for row, ((image, _), target) in enumerate(zip(images, targets, strict=True)):
        np.save(array := io.BytesIO(), target)
        parts |= {f"{row:02}.npy": array.getvalue(), f"{row:02}.png": image}
    write_tar(tmp_path / "0.tar", parts)
    loader = Decoded(images, names)
    loader[0] = loader[0][0], torch.from_numpy(targets)
    own = {"classnames": names, "templates": "a {}"}
    assert check_zeroshot(matcher, loader, names, ["a {c}"], str(tmp_path), **own) == {"mean_average_precision"}


class Decoded(list):  # type: ignore[type-arg]
    """A batch of images of 32 pixels, decoded by Pillow alone."""

    def __init__(self, images: list[tuple[bytes, int]], names: list[str]) -> None:
        pixels = [np.asarray(Image.open(io.BytesIO(image)).convert("RGB")) for image, _ in images]
        labels = torch.tensor([label for _, label in images])
        super().__init__([(torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2), labels)])
        self.dataset = SimpleNamespace(classes=names)


def _number(value: object) -> float:
    return value.item() if hasattr(value, "item") else float(value)  # type: ignore[arg-type]
