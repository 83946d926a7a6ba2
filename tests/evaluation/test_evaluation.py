"""Retrieval and zero-shot, chunked, against dense and literal references, and on a model with known answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from kiloword.api import Matcher
from kiloword.config.recipes import TextConfig, sizes
from kiloword.data.open import open_source
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.evaluation import evaluate, metrics
from kiloword.evaluation.retrieval import retrieval, true_relevance
from kiloword.evaluation.zeroshot.task import prompts, zeroshot
from kiloword.methods.registry import preset
from kiloword.model.model import Model
from kiloword.models.build import build
from kiloword.types import BadSample, Features, Record, Skipped, Texts


def cosine(images: Features, texts: Features) -> Tensor:
    return images["vec"] @ texts["vec"].T


def best_token(images: Features, texts: Features) -> Tensor:
    """A score that no single vector gives: the best of an image's tokens for each text."""
    return torch.einsum("ikd,td->itk", images["tokens"], texts["vec"]).amax(-1)


def features(n: int, seed: int, decimals: int = 6) -> Features:
    g = torch.Generator().manual_seed(seed)
    vec = torch.nn.functional.normalize(torch.randn(n, 8, generator=g, dtype=torch.float64), dim=1)
    return {"vec": vec.round(decimals=decimals), "tokens": torch.randn(n, 3, 8, generator=g, dtype=torch.float64)}


def dense_retrieval(scores: Tensor, image_of_text: Tensor, k: int) -> tuple[float, float]:
    """Of all scores [I, T] at once: recall of texts, recall of images."""
    own = image_of_text == torch.arange(len(scores))[:, None]
    return metrics.recall_at(scores, own, k).mean().item(), metrics.recall_at(scores.T, own.T, k).mean().item()


@pytest.mark.parametrize("score", [cosine, best_token])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_retrieval_equals_all_scores_at_once(
    score: Callable[[Features, Features], Tensor], data: st.DataObject
) -> None:
    photos, captions = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 25))
    rows = st.lists(st.integers(0, photos - 1), min_size=captions, max_size=captions)
    image_of_text = torch.tensor(data.draw(rows))  # any order; some images have no caption
    seed, decimals = data.draw(st.integers(0, 99)), data.draw(st.sampled_from([0, 1, 6]))  # 0 and 1: many ties
    images, texts = features(photos, seed, decimals), features(captions, seed + 100, decimals)
    chunk = data.draw(st.integers(1, 30))
    values = dict(retrieval(score, images, texts, image_of_text, (1, 2, 5), chunk=chunk))
    for k in (1, 2, 5):
        expected = dense_retrieval(score(images, texts), image_of_text, k)
        got = values[f"text_retrieval_recall@{k}"], values[f"image_retrieval_recall@{k}"]
        assert got == pytest.approx(expected, abs=1e-12)


def test_retrieval_equals_clip_benchmark() -> None:
    theirs = pytest.importorskip("clip_benchmark.metrics.zeroshot_retrieval", reason="needs CLIP_benchmark")
    images, texts = features(40, 0), features(120, 1)
    image_of_text = torch.arange(120) // 3
    texts["vec"] += 0.3 * images["vec"][image_of_text]
    own = image_of_text[:, None] == torch.arange(40)
    values = dict(retrieval(cosine, images, texts, image_of_text, (1, 5, 10), chunk=17))
    for k in (1, 5, 10):
        scores = texts["vec"] @ images["vec"].T
        assert values[f"image_retrieval_recall@{k}"] == (theirs.recall_at_k(scores, own, k) > 0).double().mean().item()
        text_recall = (theirs.recall_at_k(scores.T, own.T, k) > 0).double().mean().item()
        assert values[f"text_retrieval_recall@{k}"] == text_recall


def test_a_collapsed_model_gets_chance() -> None:
    one = torch.nn.functional.normalize(torch.randn(1, 64, generator=torch.Generator().manual_seed(0)), dim=1)
    images, texts = {"vec": one.repeat(50, 1)}, {"vec": one.repeat(100, 1)}
    relevance = torch.arange(50)[None, :] % 5 == torch.arange(100)[:, None] % 5  # a fifth is true of every text
    values = dict(retrieval(cosine, images, texts, torch.arange(100) // 2, (1, 5), relevance, chunk=16))
    assert values["image_retrieval_recall@5"] == pytest.approx(5 / 50)
    assert values["text_retrieval_recall@1"] == pytest.approx(2 / 100)
    assert values["image_retrieval_true_recall@1"] == pytest.approx(1 / 5)


def test_blocks_stay_small() -> None:
    sizes = []

    def score(images: Features, texts: Features) -> Tensor:
        sizes.append((len(images["vec"]), len(texts["vec"])))
        return cosine(images, texts)

    list(retrieval(score, features(100, 0), features(300, 1), torch.arange(300) // 3, chunk=32))
    assert max(max(size) for size in sizes) == 32
    assert len(sizes) <= 4 * 10 + 4 + 10  # every block once, and those of the pairs once more


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 12), st.integers(1, 9), st.sampled_from([1, 6]))
def test_true_relevance_equals_all_scores_at_once(seed: int, photos: int, captions: int, decimals: int) -> None:
    images, texts = features(photos, seed, decimals), features(captions, seed + 1, decimals)
    if decimals == 1:  # eighths: their products are exact, so that ties are ties in blocks of any shape
        images, texts = ({k: (8 * v).round() / 8 for k, v in side.items()} for side in (images, texts))
    truth = torch.rand(captions, photos, generator=torch.Generator().manual_seed(seed)) < 0.3
    truth[0, 0] = True
    values = dict(true_relevance(cosine, images, texts, lambda c: truth[c].numpy(), (1, 3), chunk=5))
    known = truth.any(1)
    scores, matched = cosine(images, texts).T[known], truth[known]
    expected = metrics.average_precision(scores, matched).mean().item()
    assert values["image_retrieval_true_map"] == pytest.approx(expected)
    for k in (1, 3):
        expected = metrics.recall_at(scores, matched, k).mean().item()
        assert values[f"image_retrieval_true_recall@{k}"] == pytest.approx(expected)
    assert values.get("image_retrieval_true_unmatched", 0) == (~known).sum().item()


def test_retrieval_refuses_what_it_cannot_rank() -> None:
    with pytest.raises(ValueError, match="0 images and 3 texts"):
        list(retrieval(cosine, features(0, 0), features(3, 0), torch.zeros(3, dtype=torch.int64)))
    with pytest.raises(ValueError, match="image_of_text"):
        list(retrieval(cosine, features(2, 0), features(3, 0), torch.tensor([0, 1, 2])))
    broken = {"vec": torch.full((3, 8), torch.nan, dtype=torch.float64)}
    with pytest.raises(ValueError, match="NaN"):
        list(retrieval(cosine, features(3, 0), broken, torch.arange(3)))
    with pytest.raises(ValueError, match="nothing to retrieve"):
        list(true_relevance(cosine, features(2, 0), features(3, 0), torch.zeros(3, 2, dtype=torch.bool)))
    with pytest.raises(ValueError, match="relevance came as"):
        list(true_relevance(cosine, features(2, 0), features(3, 0), torch.ones(2, 2, dtype=torch.bool)))


def test_zeroshot_in_batches_equals_all_at_once() -> None:
    images, classes = features(70, 0), features(9, 1)
    labels = torch.randint(9, (70,), generator=torch.Generator().manual_seed(2))
    batches = [({"vec": images["vec"][s : s + 16]}, labels[s : s + 16]) for s in range(0, 70, 16)]
    values = dict(zeroshot(cosine, batches, classes))
    ranked = cosine(images, classes).argsort(1, descending=True)
    found = (ranked[:, :5] == labels[:, None]).double()
    recalls = [found[labels == c, 0].mean().item() for c in labels.unique()]
    assert values["acc1"] == pytest.approx(found[:, 0].mean().item())
    assert values["acc5"] == pytest.approx(found.sum(1).mean().item())
    assert values["mean_per_class_recall"] == pytest.approx(sum(recalls) / len(recalls))

    targets = torch.rand(70, 9, generator=torch.Generator().manual_seed(3)) < 0.3
    many = dict(zeroshot(cosine, [(images, targets)], classes))
    by_class = metrics.average_precision(cosine(images, classes).T, targets.T)
    assert many["mean_average_precision"] == by_class.mean().item()
    assert set(many) == {"mean_average_precision", "mean_average_precision_11"}


def test_labels_must_be_classes() -> None:
    with pytest.raises(ValueError, match="labels run from 0 to 4, but there are 4 classes"):
        list(zeroshot(cosine, [(features(2, 0), torch.tensor([0, 4]))], features(4, 1)))


def test_prompts() -> None:
    assert prompts(["cat", "dog"], ["a {c}", "{c}!"]) == (["a cat", "cat!", "a dog", "dog!"], [0, 0, 1, 1])
    own = {"cat": ["a feline"], "dog": ["a hound", "{c}"]}
    assert prompts(["dog", "cat"], own) == (["a hound", "{c}", "a feline"], [0, 0, 1])
    with pytest.raises(ValueError, match="no prompts for the class 'cow'"):
        prompts(["cat", "cow"], own)
    with pytest.raises(ValueError, match="class name"):
        prompts(["cat"], ["a photo"])
    with pytest.raises(ValueError, match="class name"):
        prompts(["cat"], "a {c}")
    with pytest.raises(ValueError, match="no class names"):
        prompts([], ["a {c}"])
    for names in ("cat", [1, 2]):
        with pytest.raises(ValueError, match="must be a list of strings"):
            prompts(names, ["a {c}"])  # type: ignore[arg-type]


class KnownModel(torch.nn.Module):
    """Knows every image and text by number: grey level 10 n and the text "n" get the n-th unit vector."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        super().__init__()
        self.config = sizes()["debug"]
        self.unused = torch.nn.Parameter(torch.zeros(1))
        self.head = Known()
        self.score = self.head.score

    def encode_image(self, images: Tensor) -> tuple[None, Features]:
        return None, {"vec": torch.eye(26)[(images[:, 0, 0, 0] // 10).long()]}

    def encode_text(self, texts: Texts) -> tuple[None, Features]:
        return None, {"vec": torch.eye(26)[texts.ids]}


class Known(torch.nn.Module):
    def score(self, images: Features, texts: Features) -> Tensor:
        return cosine(images, texts)

    def ensemble(self, texts: Features, group: Tensor, n: int, weights: Tensor | None = None) -> Features:
        return {"vec": torch.zeros(n, 26).index_add_(0, group, texts["vec"])}


class Numbers:
    """A tokenizer whose captions are one number each."""

    def encode(self, captions: list[str], config: TextConfig) -> Texts:
        return Texts.pack([[int(caption)] for caption in captions])


@dataclass
class Greys:
    """Row n is grey 10 n; captions and labels as given; row 3 cannot be read."""

    captions: list[list[str]]
    labels: list[int | None]
    classnames: list[str] | None = None
    templates: list[str] | None = None
    bad: tuple[int, ...] = (3,)
    name: str = "greys"
    fingerprint: str = "greys-v1"

    def __len__(self) -> int:
        return len(self.captions)

    def record(self, row: int) -> Record:
        if row in self.bad:
            raise BadSample("truncated image")
        return Record(f"k{row}", np.full((32, 32, 3), 10 * row, np.uint8), self.captions[row], self.labels[row])


def known() -> Matcher:
    return Matcher(cast(Model, KnownModel()), cast(Tokenizer, Numbers()))


def test_a_model_that_knows_is_perfect_and_bad_rows_are_named() -> None:
    source = Greys([[str(n)] * 2 for n in range(12)], [None] * 12)
    source.captions[5] = []
    bad: list[Skipped] = []
    values = evaluate(known(), "retrieval", source, skipped=bad, batch=4)
    assert values.pop("skipped") == 2
    assert values.pop("rsum") == 6
    recalls = {f"{side}_retrieval_recall@{k}" for side in ("text", "image") for k in (1, 5, 10)}
    means = {"mean_recall@1", "text_retrieval_mean_recall", "image_retrieval_mean_recall"}
    assert set(values) == recalls | means
    assert set(values.values()) == {1.0}
    assert [(s.row, s.reason) for s in bad] == [(3, "truncated image"), (5, "no caption")]


def test_wrong_captions_cost_what_they_should() -> None:
    captions = [["1"], ["2"], ["3"], *([str(n)] for n in range(3, 10))]
    values = evaluate(known(), "retrieval", Greys(captions, [None] * 10, bad=()))
    assert values["image_retrieval_recall@1"] == pytest.approx(7 / 10)
    # Image 0 ties with all ten texts, 1 and 2 match another's, and the third text ties with the own one of image 3.
    assert values["text_retrieval_recall@1"] == pytest.approx((1 / 10 + 0 + 0 + 1 / 2 + 6) / 10)


def test_zeroshot_on_a_source() -> None:
    labels: list[int | None] = [n % 6 for n in range(12)]
    labels[7] = None
    source = Greys([[]] * 12, labels, [str(n) for n in range(6)], ["{c}"])
    bad: list[Skipped] = []
    values = evaluate(known(), "zeroshot", source, batch=5, skipped=bad)
    # Images 0, 1, 2, 4, 5 are known; 6 and 8 to 11 score 0 with every class: chance.
    assert values["acc1"] == pytest.approx((5 + 5 / 6) / 10)
    assert values["acc5"] == pytest.approx((5 + 5 * 5 / 6) / 10)
    assert values["skipped"] == 2
    assert [(s.row, s.reason) for s in bad] == [(3, "truncated image"), (7, "no class label")]


def test_zeroshot_on_a_flat_folder_reads_its_class_names(tmp_path: Path) -> None:
    for n in range(4):
        Image.new("RGB", (32, 32), (10 * (n + 1),) * 3).save(tmp_path / f"{n}.png")
        (tmp_path / f"{n}.cls").write_text(str(n))
    (tmp_path / "classnames.txt").write_text("1\n2\n3\n4\n")
    (tmp_path / "zeroshot_classification_templates.txt").write_text("{c}\n")
    source = open_source(str(tmp_path))
    assert (source.classnames, source.templates) == (["1", "2", "3", "4"], ["{c}"])  # type: ignore[attr-defined]
    assert evaluate(known(), "zeroshot", source)["acc1"] == 1


@pytest.mark.parametrize(
    ("task", "source", "message"),
    [
        (
            "retrival",
            Greys([["1"]], [0]),
            r"unknown task 'retrival'; known: .*hierarchy, .*retrieval, .*zeroshot. Did you mean retrieval\?",
        ),
        ("retrieval", Greys([[], []], [0, 1]), "greys has no captions.*zeroshot"),
        ("zeroshot", Greys([["1"]], [0]), "greys has no class names.*classnames.txt"),
        ("zeroshot", Greys([["1"]], [None], ["1", "2"]), "greys has no class labels"),
        ("retrieval", Greys([["1"]] * 4, [0] * 4, bad=(0, 1, 2, 3)), "none of its 4 rows.*truncated image"),
    ],
)
def test_wrong_questions_get_a_sentence(task: str, source: Greys, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate(known(), task, source)


@pytest.fixture(scope="module")
def debug() -> Matcher:
    tokenizer = Tokenizer.train(["something red", "two blue squares in the middle row"], 300)
    return Matcher(build(sizes()["debug"], preset("siglip"), seed=0), tokenizer)


def test_scenes_bring_their_truth(debug: Matcher) -> None:
    values = evaluate(debug, "retrieval", "scenes:test?n=40&levels=1")
    assert 0 < values["image_retrieval_true_map"] < 1
    assert values["image_retrieval_true_recall@1"] >= values["image_retrieval_recall@1"]
    colours = evaluate(debug, "zeroshot", "scenes:test?n=40&task=colour")
    assert set(colours) == {"acc1", "acc5", "mean_per_class_recall", "skipped"}
    assert set(evaluate(debug, "zeroshot", "scenes:test?n=40&task=count")) == set(colours) - {"acc5"}


def test_class_data_in_clip_benchmarks_layout(debug: Matcher, shared: Path) -> None:
    values = evaluate(debug, "zeroshot", str(shared / "wds_tf_flowers"))
    assert 0.1 < values["acc1"] < 0.35  # 5 classes, nothing learned
    assert values["skipped"] == 0
