"""A model judged by CLIP_benchmark's own evaluation, end to end, and by ours: the same numbers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from kiloword.api import Matcher
from kiloword.config.recipes import sizes
from kiloword.data.reading import eval_batches
from kiloword.data.sources.open import open_source
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.evaluation import evaluate
from kiloword.methods.registry import preset
from kiloword.model.model import build
from kiloword.types import Source, Texts

pytest.importorskip("clip_benchmark", reason="needs the CLIP_benchmark package")
pytest.importorskip("sklearn", reason="CLIP_benchmark's classification metrics need scikit-learn")


class AsTheirs:
    """Our model as CLIP_benchmark wants one: cosines of single vectors."""

    def __init__(self, matcher: Matcher) -> None:
        self.model, self.tokens = matcher.model, matcher.tokenizer

    def encode_image(self, images: Tensor) -> Tensor:
        return self.model.encode_image(images)[1]["vec"]

    def encode_text(self, texts: Texts) -> Tensor:
        return self.model.encode_text(texts)[1]["vec"]

    def tokenizer(self, captions: list[str]) -> Texts:
        return self.tokens.encode(captions, self.model.config.text)


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


def test_zeroshot(matcher: Matcher, monkeypatch: pytest.MonkeyPatch) -> None:
    from clip_benchmark.metrics import zeroshot_classification

    # Its accuracy() calls float() on an array of shape [1], which NumPy 2.4 refuses: shadow that one name.
    monkeypatch.setattr(zeroshot_classification, "float", _number, raising=False)
    source, theirs = open_source("scenes:test?n=200&task=shape"), AsTheirs(matcher)
    expected = zeroshot_classification.evaluate(
        theirs,
        TheirLoader(source, True),
        theirs.tokenizer,
        source.classnames,  # type: ignore[attr-defined]
        source.templates,  # type: ignore[attr-defined]
        "cpu",
        amp=False,
    )
    ours = evaluate(matcher, "zeroshot", source)
    assert set(expected) == {"acc1", "acc5", "mean_per_class_recall"}
    assert {name: ours[name] for name in expected} == pytest.approx(expected, abs=1e-6)


def _number(value: object) -> float:
    return value.item() if hasattr(value, "item") else float(value)  # type: ignore[arg-type]
