"""Mining: the search against a literal loop, analyses with known answers, thresholds, precision and recall, files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st

from commands import held_by_another, refused
from kiloword.apps.mine.analyses import analysed, nearest, ranks, spread
from kiloword.apps.mine.corpus import Corpus, corpus_of, truth_of
from kiloword.apps.mine.mine import terms
from kiloword.apps.mine.search import calibrate, exceeded_by, random_pairs, search
from kiloword.cli.main import main
from kiloword.config.recipes import DataConfig
from kiloword.data.open import open_data
from kiloword.data.scenes.source import parse_scenes
from kiloword.methods.fff import Mined, matches
from kiloword.stores.embed import embed
from kiloword.stores.features import FeatureStore
from sources import LOW, corpus, random_corpus, unit


def literal(c: Corpus, s: Mined) -> dict[tuple[int, int], tuple[float, float, float, bool, bool, bool]]:
    """Eq. 2, pair by pair: mined pairs with their similarities and the terms that accept them."""
    found = {}
    images, texts = c.images.astype(np.float64), c.texts.astype(np.float64)
    for i in range(len(c.keys)):
        own = [t for t in range(len(texts)) if c.owner[t] == i]
        for t in range(len(texts)):
            it = images[i] @ texts[t]
            ii = images[i] @ images[c.owner[t]]
            tt = np.mean([texts[o] @ texts[t] for o in own]) if own else 0.0
            by = (it > s.p1, ii > s.p2, tt > s.p3 and it > s.p1_text)
            if t not in own and any(by):
                found[i, t] = (it, ii, tt, *by)
    return found


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), chunk=st.sampled_from([1, 3, 5, 100]), without=st.booleans())
def test_search_is_the_literal_loop(seed: int, chunk: int, without: bool) -> None:
    c = random_corpus(seed, without=without)
    wanted = literal(c, LOW)
    every = search(c, LOW, most=100, chunk=chunk)
    pairs = list(zip(every.image.tolist(), every.caption.tolist(), strict=True))
    assert pairs == sorted(wanted, key=lambda pair: (pair[0], -wanted[pair][0], pair[1]))
    np.testing.assert_allclose(every.scores.T, np.array([wanted[p][:3] for p in pairs]).reshape(-1, 3), atol=1e-6)
    assert matches(LOW, *every.scores).T.tolist() == [list(wanted[p][3:]) for p in pairs]
    of_terms = [sum(by[3 + n] for by in wanted.values()) for n in range(3)]
    others = len(c.keys) * len(c.captions) - len(c.captions)
    assert every.counts.tolist() == [[len(wanted), *of_terms, others], [0] * 5]
    assert every.per_image.tolist() == [sum(i == n for i, _ in wanted) for n in range(len(c.keys))]
    few = search(c, LOW, most=2, chunk=chunk)
    assert torch.equal(few.counts, every.counts)
    kept = [pair for n, pair in enumerate(pairs) if sum(i == pair[0] for i, _ in pairs[:n]) < 2]
    assert list(zip(few.image.tolist(), few.caption.tolist(), strict=True)) == kept


@pytest.mark.parametrize("chunk", [1, 2, 9])
def test_equal_pairs_stand_as_their_captions_do_and_annotated_ones_are_never_mined(chunk: int) -> None:
    e = np.eye(3, 4, dtype=np.float32)
    c = corpus(e, [e[:1], e[[0, 1, 0]], e[:1]])  # four captions are e0
    found = search(c, Mined(), most=2, chunk=chunk)
    assert (found.image.tolist(), found.caption.tolist()) == ([0, 0], [1, 3])
    assert found.per_image.tolist() == [3, 0, 0]
    assert found.counts[0].tolist() == [3, 3, 0, 3, 10]  # S_tt of the third image is 1, but its S_it is 0


def test_ranks_count_what_stands_above_and_share_ties() -> None:
    images = np.eye(4, dtype=np.float32)
    texts = [images[:1], images[:1], images[2:3], images[3:]]  # image 1's caption is image 0's
    # image 0: its caption ties with the copy; image 1: all four captions score 0
    assert sorted(ranks(corpus(images, texts), batch=100, seed=0).tolist()) == [1.0, 1.0, 1.5, 2.5]
    ones = np.ones((11, 1), np.float32)  # says nothing: the mean rank
    assert ranks(corpus(ones, list(ones[:, None])), batch=5, seed=3).tolist() == [3.0] * 10


def test_analyses_of_captions() -> None:
    """Nearest captions leave the caption itself out; the mean of several captions is compared as a direction."""
    c, wanted = random_corpus(1), []
    for texts in np.split(c.texts.astype(np.float64), c.starts[1:-1]):
        pairs = [texts[i] @ texts[j] for i in range(len(texts)) for j in range(i)]
        wanted += [np.mean(pairs)] if pairs else []
    assert analysed(c, 4, 0)["similarity_among_captions"] == pytest.approx(spread(wanted), abs=1e-6)
    e = np.eye(3, dtype=np.float32)
    found = nearest(corpus(e, [e[:1], e[:2], e[2:]]), seed=0, k=2)
    assert found.tolist() == [0.5, 0.5, 0.0, 0.0]  # e0 has a twin; e1 and e2 are like nobody
    images = np.array([[1.0, 0.0], [0.0, 1.0]], np.float32)
    leaning = np.array([[0.6, 0.8], [0.6, -0.8]], np.float32)  # their mean points at the image
    figures = analysed(corpus(images, [leaning, images[1:]], ["a", "b", "a"]), 2, 0)
    assert (figures["captions"], figures["repeated"], figures["frequent"]) == (3, 1, [("a", 2), ("b", 1)])
    assert figures["own_caption_first"] == 1.0
    means = {name: value["mean"] for name, value in figures.items() if isinstance(value, dict)}
    assert means == pytest.approx(
        {
            "rank_of_own_caption": 1.0,
            "annotated_similarity": 2.2 / 3,
            "nearest_captions_similarity": (0.8 - 0.28 - 0.28 - 0.8) / 6,
            "similarity_among_captions": -0.28,
            "similarity_with_one_caption": 0.6,
            "similarity_with_mean_caption": 1.0,
        },
        abs=1e-6,
    )
    either = corpus(images, [np.array([[1.0, 0.0], [0.6, 0.8]], np.float32), images[1:]])
    drawn = {analysed(either, 2, seed)["similarity_with_one_caption"]["mean"] for seed in range(9)}
    assert sorted(drawn) == pytest.approx([0.6, 1.0])  # one of an image's captions, at random
    quantiles = {"q05": 0.5, "median": 5.0, "q95": 9.5, "max": 10.0}
    assert spread(range(11)) == pytest.approx({"mean": 5.0, "std": 10**0.5, **quantiles})
    assert spread([]) is None


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=200), st.floats(1e-4, 0.9))
def test_a_threshold_is_exceeded_by_no_more_than_its_share(values: list[float], share: float) -> None:
    tensor = torch.tensor(values)
    threshold = exceeded_by(tensor, share)
    assert (tensor > threshold + 1e-7).sum() <= share * len(values)
    assert threshold <= float(tensor.max()) + 1.1e-4


def test_calibration_finds_what_it_says() -> None:
    rng = np.random.default_rng(0)
    annotated = rng.normal(0.5, 0.1, 10_000).astype(np.float32)
    sample = torch.stack([torch.from_numpy(rng.normal(m, 0.05, 100_000).astype(np.float32)) for m in (0.1, 0.3, 0.4)])
    fitted = calibrate(annotated, sample, Mined(annotated_always=False), 1e-3)
    assert fitted.p1 == pytest.approx(0.5, abs=0.005)
    assert fitted.p1_text == pytest.approx(0.5 - 1.2816 * 0.1, abs=0.01)
    assert fitted.p2 == pytest.approx(0.3 + 3.09 * 0.05, abs=0.01)
    assert fitted.p3 == pytest.approx(0.4 + 3.09 * 0.05, abs=0.01)
    assert not fitted.annotated_always
    near = calibrate(annotated, sample + 0.3, Mined(), 1e-3)  # a weak teacher: the rate decides
    assert near.p1 == pytest.approx(0.4 + 3.09 * 0.05, abs=0.01)
    assert not matches(near, *map(torch.tensor, (near.p1, near.p2, near.p3))).any()  # a threshold is exceeded
    ones = torch.ones(3, 1000)  # copies match
    fitted = calibrate(np.full(10, 0.3), ones * torch.tensor([[0.1], [1], [1]]), Mined(), 1e-3)
    assert (fitted.p2, fitted.p3) == (0.999, 0.999)
    skewed = calibrate(np.array([0.9] * 19 + [-1.0]), ones * 0.1, Mined())  # nine of ten exceed 0.9, the mean is below
    assert skewed.p1 == skewed.p1_text == 0.805
    with pytest.raises(ValueError, match="train it longer"):
        calibrate(np.full(10, -0.1), ones, Mined())


def test_precision_and_recall_of_a_teacher_that_knows() -> None:
    """A caption is the images that it is true of, an image is itself."""
    source = parse_scenes("scenes?n=300&captions=2", 16)
    captions = [source.captions(row) for row in range(300)]
    flat = [caption for own in captions for caption in own]
    true = source.relevance(flat, range(300)).astype(np.float32)  # [T, N]
    ends = np.cumsum([len(own) for own in captions])
    c = corpus(np.eye(300, dtype=np.float32), np.split(unit(true), ends[:-1]), flat)
    truth = truth_of(source, flat, np.arange(300))
    assert truth_of(source, ["a dog on a beach"], np.arange(300)) is None  # somebody else wrote the captions
    found = search(c, Mined(p1=1e-4, p3=1.0), truth=truth, chunk=64)
    assert found.true.all()
    sample, known = random_pairs(c, 0, truth)
    assert torch.equal(sample[0] > 0, known)
    table = terms(found, True)
    assert table["eq. 2"]["mined"] == found.counts[1, -1] == int(true.sum()) - len(flat)
    assert (table["eq. 2"]["precision"], table["eq. 2"]["recall"]) == (1.0, 1.0)
    assert table["it"]["share_of_pairs"] == table["it"]["mined"] / (299 * len(flat))
    assert (table["ii"]["precision"], table["ii"]["recall"]) == (None, 0.0)
    strict = terms(search(c, Mined(p1=0.1, p3=1.0), truth=truth), True)["it"]
    assert strict["precision"] == 1.0
    assert 0 < float(strict["recall"] or 0) < 1


def colours(images: torch.Tensor) -> torch.Tensor:
    return F.normalize(images.float().reshape(len(images), 8, -1).mean(2))


def letters(texts: Sequence[str]) -> torch.Tensor:
    return F.normalize(torch.tensor([[1.0 + text.count(letter) for letter in "abcdefgh"] for text in texts]))


TEACHER: Any = SimpleNamespace(
    size=16, fingerprint="colours", resize="squash", encode_images=colours, encode_texts=letters
)


def test_from_feature_store_to_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    src, extra = "scenes?n=30&captions=2", tmp_path / "extra.parquet"
    keys = [parse_scenes(src).record(row).key for row in range(30)]
    pq.write_table(pa.table({"key": keys, "caption": [f"<b>bead {n % 4}" for n in range(30)]}), extra)
    data = open_data(DataConfig(sources=(src,), extra_captions=(str(extra),)))
    embed(TEACHER, data, tmp_path / "side", name="hues")
    flags = ["--features", str(tmp_path / "side"), *["--calibrate", "--false-rate", "0.05", "--batch", "8"]]

    def run(out: str, *more: str, data: str = src) -> dict:
        main(["mine", data, *flags, "--device", "cpu", "--out", str(tmp_path / out), *more])
        return json.loads((tmp_path / out / "mine.json").read_text())

    own = run("own")  # the table knows more captions than are asked for
    assert own["captions"] == sum(len(parse_scenes(src).captions(row)) for row in range(30))
    assert own["true_pairs"] > 0
    assert "--settings.teacher hues" in capsys.readouterr().out
    pairs = pq.read_table(tmp_path / "own/pairs.parquet")
    names = ["key", "caption", "caption_index", "owner", "it", "ii", "tt", "by_it", "by_ii", "by_tt", "true"]
    assert pairs.column_names == names
    source = parse_scenes(src)
    for row in pairs.to_pylist():
        assert source.captions(keys.index(row["owner"]))[row["caption_index"]] == row["caption"]
        assert [[row["true"]]] == source.relevance([row["caption"]], [keys.index(row["key"])]).tolist()
        assert row["by_it"] == (row["it"] > own["thresholds"]["p1"])
        assert row["by_it"] or row["by_ii"] or row["by_tt"]
    part, rows = corpus_of(parse_scenes("scenes?n=20&captions=1"), FeatureStore(tmp_path / "side"))
    assert (list(part.keys), rows.tolist()) == (keys[:20], list(range(20)))
    assert part.captions == [parse_scenes("scenes?n=20&captions=1").captions(row)[0] for row in range(20)]
    np.testing.assert_allclose(part.texts, letters(part.captions), atol=1e-3)
    np.testing.assert_array_equal(part.means, part.texts.astype(np.float32))
    both = run("both", "--extra-captions", str(extra), "--p3", "0.99")
    assert both["thresholds"]["p3"] == 0.99
    assert both["captions"] == own["captions"] + 30
    assert set(both["analyses"]) == {"own", "extra"}
    assert both["analyses"]["extra"]["repeated"] == 26
    assert both["analyses"]["extra"]["frequent"][0] == ["<b>bead 0", 8]
    assert both["true_pairs"] is None  # nobody knows what a bead is true of
    page = (tmp_path / "both" / "report.html").read_text()
    for text in ("extra:", "&lt;b&gt;bead", f"{both['thresholds']['p1']:g}"):
        assert text in page, text
    with held_by_another(tmp_path / "own"), pytest.raises(SystemExit):
        run("own")
    capsys.readouterr()
    for words, data, word in (
        (f"--features {tmp_path}/nothing", src, "nothing"),
        ("", "scenes?n=31", "n=31"),
        ("", "scenes?n=1&captions=2", "two images"),
        ("--batch 1", src, "--batch"),
        ("--no-calibrate --false-rate 0.1", src, "--calibrate"),
    ):
        command = ["mine", data, *flags, "--device", "cpu", "--out", tmp_path / "no", *words.split()]
        assert word in refused(capsys, *command), words
    assert not (tmp_path / "no").exists()
