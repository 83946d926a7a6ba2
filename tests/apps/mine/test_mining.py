"""Mining: the search against a literal loop, analyses with known answers, thresholds, precision and recall, report."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pyarrow.parquet
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from corpora import LOW, corpus, random_corpus, unit
from holding import held_by_another
from kiloword.apps.mine import _check_folder, analyses, gallery, images, main, output, results
from kiloword.apps.mine import page as mining_page
from kiloword.apps.mine.calibrate import RandomPairs, calibrate, candidates, compare, exceeded_by, random_pairs
from kiloword.apps.mine.corpus import Corpus
from kiloword.apps.mine.options import MineOptions
from kiloword.apps.mine.origin import Origin, Truths
from kiloword.apps.mine.pairs import TERMS, by_term, search
from kiloword.config.recipes import DataConfig
from kiloword.data.open import open_data
from kiloword.data.scenes.source import parse_scenes
from kiloword.methods.fff.preset import Mined
from kiloword.report import percent, stack
from kiloword.report import plots as report_plots
from kiloword.stores.embed import embed
from kiloword.terminal.progress import Bar
from pages import Section, plots, sections
from terminals import Terminal


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
@given(seed=st.integers(0, 10**6), chunk=st.sampled_from([1, 3, 5, 100]), unknown=st.booleans())
def test_search_is_the_literal_loop(seed: int, chunk: int, unknown: bool) -> None:
    c = random_corpus(seed, unknown=unknown)
    wanted = literal(c, LOW)
    found = search(c, LOW, most=100, chunk=chunk)
    got = {(i, int(t)) for i, row in enumerate(found.column) for t in row if t >= 0}
    assert got == set(wanted)
    counts = [sum(by[3 + n] for by in wanted.values()) for n in range(3)]
    alone = [sum(by[3 + n] and sum(by[3:]) == 1 for by in wanted.values()) for n in range(3)]
    assert (found.mined.whole, list(found.mined.term.values()), list(found.mined.alone.values())) == (
        len(wanted),
        counts,
        alone,
    )
    assert found.per_image.tolist() == [sum(i == n for i, _ in wanted) for n in range(len(c.keys))]
    assert found.per_text.tolist() == [sum(t == n for _, t in wanted) for n in range(len(c.captions))]
    assert found.pairs == len(c.keys) * len(c.captions) - len(c.captions)
    for i, row in enumerate(found.column):
        for place, t in enumerate(row.tolist()):
            if t >= 0:
                values = [float(found.scores[name][i, place]) for name in TERMS]
                np.testing.assert_allclose(values, wanted[i, t][:3], atol=1e-6)


def test_the_best_are_kept_in_order_and_all_are_counted() -> None:
    c = random_corpus(1)
    wanted = literal(c, LOW)
    found = search(c, LOW, most=2, chunk=4)
    for i, row in enumerate(found.column.tolist()):
        best = sorted((t for p, t in wanted if p == i), key=lambda t: -wanted[i, t][0])[:2]
        assert [t for t in row if t >= 0] == best
    assert found.mined.whole == len(wanted)


def test_annotated_pairs_are_judged_by_their_scores_and_never_mined() -> None:
    images = np.eye(3, 4, dtype=np.float32)
    c = corpus(images, [images[:1], images[:1], images[2:]])  # the second caption is true of the first image
    found = search(c, Mined())
    assert found.annotated.term == {"it": 2, "ii": 3, "tt": 2}
    assert [[t for t in row if t >= 0] for row in found.column.tolist()] == [[1], [], []]
    assert (found.mined.term, found.mined.alone) == (
        {"it": 1, "ii": 0, "tt": 1},
        {"it": 0, "ii": 0, "tt": 0},
    )


def test_a_term_that_is_off_accepts_nothing() -> None:
    it = ii = tt = torch.tensor([[1.0, 0.0]])
    terms = by_term(Mined(image_image=False), it, ii, tt)
    assert {name: hit.tolist() for name, hit in terms.items()} == {
        "it": [[True, False]],
        "ii": [[False, False]],
        "tt": [[True, False]],
    }


@pytest.mark.parametrize("bad", [{"p1": 0.0}, {"p2": -0.1}, {"p3": float("nan")}, {"p1_text": 1.5}])
def test_thresholds_out_of_range_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="above 0, at most 1"):
        search(random_corpus(0), Mined(**bad))  # type: ignore[arg-type]


def test_ranks_count_what_stands_above_and_share_ties() -> None:
    images = np.eye(4, dtype=np.float32)
    texts = [images[:1], images[:1], images[2:3], images[3:]]  # image 1's caption is image 0's
    found = analyses.ranks(corpus(images, texts), batch=100, seed=0)
    assert (found.batch, found.batches) == (4, 1)
    # image 0: its caption ties with the copy; image 1: all four captions score 0
    assert sorted(found.captions.tolist()) == [1.0, 1.0, 1.5, 2.5]
    assert sorted(found.images.tolist()) == [1.0, 1.0, 1.0, 3.0]


def test_ranks_of_features_that_say_nothing_are_the_mean_rank() -> None:
    ones = np.ones((10, 1), np.float32)
    found = analyses.ranks(corpus(ones, list(ones[:, None])), batch=5, seed=3)
    assert found.batches == 2
    assert set(found.captions.tolist()) == {3.0}
    with pytest.raises(ValueError, match="--batch is 1"):
        analyses.ranks(corpus(ones, list(ones[:, None])), batch=1, seed=3)


def test_frequent_captions() -> None:
    assert analyses.frequent(["a", "b", "a", "c", "a", "b"], most=2) == [("a", 3), ("b", 2)]
    assert len(analyses.frequent([str(n) for n in range(150)])) == 100


def test_nearest_captions_leave_the_caption_itself_out() -> None:
    e = np.eye(3, dtype=np.float32)
    found = analyses.nearest(corpus(e, [e[:1], np.stack([e[0], e[1]]), e[2:]]), seed=0, k=2, chunk=2)
    assert found.tolist() == [0.5, 0.5, 0.0, 0.0]  # e0 has a twin; e1 and e2 are like nobody


@given(seed=st.integers(0, 10**6))
@settings(max_examples=10, deadline=None)
def test_similarity_among_captions_is_the_mean_over_pairs(seed: int) -> None:
    c = random_corpus(seed)
    wanted = []
    for n in range(len(c.keys)):
        own = c.texts[c.starts[n] : c.starts[n + 1]].astype(np.float64)
        if len(own) > 1:
            products = own @ own.T
            wanted.append((products.sum() - np.trace(products)) / (len(own) * (len(own) - 1)))
    np.testing.assert_allclose(analyses.among(c), wanted, atol=1e-6)


def test_the_mean_of_several_captions_is_compared_as_a_direction() -> None:
    images = np.array([[1.0, 0.0], [0.0, 1.0]], np.float32)
    leaning = np.array([[0.6, 0.8], [0.6, -0.8]], np.float32)  # their mean points at the image
    one, mean = analyses.one_and_mean(corpus(images, [leaning, images[1:]]), seed=0)
    np.testing.assert_allclose(one, [0.6], atol=1e-6)
    np.testing.assert_allclose(mean, [1.0], atol=1e-6)


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=200), st.floats(1e-4, 0.9))
def test_a_threshold_is_exceeded_by_no_more_than_its_share(values: list[float], share: float) -> None:
    tensor = torch.tensor(values)
    threshold = exceeded_by(tensor, share)
    assert (tensor > threshold + 1e-7).sum() <= share * len(values)
    assert threshold <= float(tensor.max()) + 1.1e-4


def test_calibration_finds_what_it_says() -> None:
    rng = np.random.default_rng(0)
    annotated = rng.normal(0.5, 0.1, 10_000).astype(np.float32)
    it, ii, tt = (torch.from_numpy(rng.normal(m, 0.05, 100_000).astype(np.float32)) for m in (0.1, 0.3, 0.4))
    fitted = calibrate(annotated, RandomPairs(it, ii, tt, None), Mined(annotated_always=False), 1e-3)
    assert fitted.p1 == pytest.approx(0.5, abs=0.005)
    assert fitted.p1_text == pytest.approx(0.5 - 1.2816 * 0.1, abs=0.01)
    assert fitted.p2 == pytest.approx(0.3 + 3.09 * 0.05, abs=0.01)
    assert fitted.p3 == pytest.approx(0.4 + 3.09 * 0.05, abs=0.01)
    assert not fitted.annotated_always
    near = calibrate(annotated, RandomPairs(it + 0.3, ii, tt, None), Mined(), 1e-3)  # a weak teacher: the rate decides
    assert near.p1 == pytest.approx(0.4 + 3.09 * 0.05, abs=0.01)
    assert float((ii > fitted.p2).float().mean()) <= 1e-3


def test_calibration_lets_copies_match_and_refuses_a_teacher_that_knows_nothing() -> None:
    ones = torch.ones(1000)
    fitted = calibrate(np.full(10, 0.3), RandomPairs(ones * 0.1, ones, ones, None), Mined(), 1e-3)
    assert (fitted.p2, fitted.p3) == (0.999, 0.999)
    with pytest.raises(ValueError, match="train it longer"):
        calibrate(np.full(10, -0.1), RandomPairs(ones, ones, ones, None), Mined())
    with pytest.raises(ValueError, match="--false-rate is 2"):
        calibrate(np.full(10, 0.1), RandomPairs(ones, ones, ones, None), Mined(), 2)


def test_choices_of_p1_tell_what_they_would_mine() -> None:
    it = torch.tensor([0.1, 0.3, 0.5, 0.7])
    true = torch.tensor([False, True, False, True])
    sample = RandomPairs(it, torch.zeros(4), torch.zeros(4), true)
    annotated = np.array([0.2, 0.4, 0.6, 0.8], np.float32)
    c = random_corpus(0)
    choice, none = compare(c, annotated, sample, Mined(text_text=False), [0.4, 0.9])
    assert (choice.annotated_above, choice.random_above) == (0.5, 0.5)
    assert (choice.precision, choice.recall) == (0.5, 0.5)
    assert choice.mined_per_image == pytest.approx(0.5 * len(c.captions) * 8 / 9)
    assert (none.precision, none.recall) == (None, 0.0)
    assert 0.5 in candidates(annotated, sample, 0.5)


def test_random_pairs_are_never_annotated_and_never_unknown() -> None:
    c = random_corpus(4, unknown=True)
    sample = random_pairs(c, seed=0)
    images, captions = len(c.known_images), len(c.paired)
    assert len(sample.it) == images * captions - captions
    assert not (sample.it == 0).any()


SCENES = "scenes?n=300&captions=2"


def perfect(src: str = SCENES) -> tuple[Corpus, Origin, Truths]:
    """A teacher that knows the truth: a caption is the images it is true of, an image is itself."""
    source = parse_scenes(src, 16)
    captions = [source.captions(row) for row in range(len(source))]
    flat = [caption for own in captions for caption in own]
    true = source.relevance(flat, range(len(source))).astype(np.float32)  # [T, N]
    ends = np.cumsum([len(own) for own in captions])
    c = corpus(np.eye(len(source), dtype=np.float32), np.split(unit(true), ends[:-1]), flat)
    keys = [source.record(row).key for row in range(len(source))]
    c = Corpus(keys, c.captions, c.starts, c.images, c.texts, c.means)
    origin = Origin(source, np.arange(len(source)))
    truths = origin.truth(flat)
    assert truths is not None
    return c, origin, truths


def test_a_perfect_teacher_has_precision_and_recall_one() -> None:
    c, origin, truths = perfect()
    all_true = Mined(p1=1e-4, image_image=False, text_text=False)
    found = search(c, all_true, truth=truths, chunk=64)
    table = results.terms(found)
    exact = origin.source.relevance(c.captions, range(len(c.keys)))  # type: ignore[attr-defined]
    assert found.true == int(exact.sum()) - len(c.captions)
    assert found.true > 1000
    assert table[results.WHOLE]["mined"] == found.true
    assert (table[results.WHOLE]["precision"], table[results.WHOLE]["recall"]) == (1.0, 1.0)
    assert (table["ii"]["precision"], table["ii"]["recall"]) == (None, 0.0)
    strict = search(c, Mined(p1=0.1, image_image=False, text_text=False), truth=truths)
    assert results.terms(strict)["it"]["precision"] == 1.0
    assert 0 < float(results.terms(strict)["it"]["recall"] or 0) < 1


def test_a_teacher_that_guesses_has_the_precision_of_chance() -> None:
    c, _, truths = perfect()
    rng = np.random.default_rng(0)
    texts = unit(rng.normal(size=c.texts.shape)).astype(np.float32)
    guess = Corpus(c.keys, c.captions, c.starts, c.images, texts, c.means)
    found = search(guess, Mined(p1=1e-3, image_image=False, text_text=False), truth=truths)
    assert results.terms(found)["it"]["precision"] == pytest.approx(found.true / found.pairs, rel=0.05)


def test_truth_is_unknown_where_somebody_else_wrote_the_captions() -> None:
    _, origin, _ = perfect()
    assert origin.truth(["a dog on a beach"]) is None


def check_page(page: dict[str, Section], judged: results.MiningResults, drawn: list[Any]) -> None:
    """Tables, figures and plots against the results themselves."""
    c = judged.corpus
    found, terms = judged.mined, results.terms(judged.mined)
    counts = found.per_image.numpy()
    whole = terms[results.WHOLE]
    short = page["In short"].words
    for figure, name in (
        (f"{whole['mined']:,}", "pairs mined beside the annotated ones"),
        (f"{counts.mean():.3g}", "mined captions an image, on average"),
        (percent(float(np.mean(counts > 0))), "of images have a mined caption"),
        (percent(whole["precision"]), "of the mined pairs are true (precision)"),
        (percent(whole["recall"]), "of the true pairs were mined (recall)"),
    ):
        assert short[short.index(name) + (1 if short.index(name) % 2 == 0 else -1)] == figure, name
    header, *rows = page["Mined pairs"].tables[0]
    assert header == ["term", "mined", "precision", "recall", "by it alone", "of all pairs", "annotated accepted"]
    assert len(rows) == len(terms)
    for row, term in zip(rows, terms.values(), strict=True):
        assert row[1] == f"{term['mined']:,}"
        assert row[2:4] == ["–" if term[n] is None else f"{term[n]:.3f}" for n in ("precision", "recall")]
        assert row[4] == ("–" if term["alone"] is None else f"{term['alone']:,}")
        assert row[5] == f"{term['share_of_pairs']:.3%}"
        assert row[6] == f"{round(100 * term['annotated_accepted'], 1):g}%"
    per_batch = found.mined.whole / found.pairs * 99 * len(c.captions) / len(c.keys)
    assert (
        f"In a random batch of 100 images with all captions, an image has {per_batch:.3g} mined"
        in page["Mined pairs"].text
    )
    assert f"{found.true:,} pairs" in page["Mined pairs"].text
    header, *rows = page["Thresholds"].tables[0]
    assert [row[0].split()[0] for row in rows] == [f"{choice.p1:g}" for choice in judged.choices]
    assert [row[0] for row in rows if row[0].endswith("(used)")] == ["0.2 (used)"]
    mean = float(np.mean(c.annotated()))
    assert [float(row[0].split()[0]) for row in rows if row[0].endswith("(mean)")] == [pytest.approx(mean, abs=1e-2)]
    for row, choice in zip(rows, judged.choices, strict=True):
        assert row[1:3] == [percent(choice.annotated_above), f"{choice.random_above:.3%}"]
        assert row[3] == (f"{choice.mined_per_image:{',.0f' if choice.mined_per_image >= 100 else '.3g'}}")
        assert row[4:] == ["–" if v is None else f"{v:.3f}" for v in (choice.precision, choice.recall)]
    ranks = judged.groups["captions"].ranks
    _, captions, images = page["Rank of the true caption"].tables[0]
    for row, side, own in ((captions, "own caption", ranks.captions), (images, "own image", ranks.images)):
        assert row[0] == side
        assert row[1:5] == [f"{round(100 * float(np.mean(own <= k)), 1):g}%" for k in (1, 5, 10, 100)]
        assert float(row[5]) == pytest.approx(float(np.median(own)), rel=1e-2)
    frequent = judged.groups["captions"].frequent
    listed = [[text, str(count)] for text, count in frequent[:15]]
    repeated = [[text, str(count)] for text, count in frequent[:15] if count > 1]
    assert page["Captions"].tables[0][1:] in (listed, repeated)
    by_label = {args[2] if name == "histogram" else args[1]: args for name, args in drawn}
    heights = by_label["S_it, image and caption"][0]
    assert set(heights) == {"annotated", "random"}
    assert all(sum(of) == pytest.approx(100) for of in heights.values())
    one = judged.groups["captions"]
    for label, series in (
        ("S_it, image and caption", {"annotated": c.annotated(), "random": judged.sample.it.numpy()}),
        ("S_ii, two images", {"random": judged.sample.ii.numpy()}),
        ("S_tt, caption and captions", {"random": judged.sample.tt.numpy()}),
        ("mean similarity with its 100 nearest captions", {"captions": one.nearest}),
        ("similarity among one image's captions", {"captions": one.among}),
        ("similarity of an image", {"one caption": one.one, "mean of its captions": one.mean}),
    ):
        drawn_heights, edges, *_ = by_label[label]
        assert list(drawn_heights) == list(series)
        for name, values in series.items():
            wanted = [100 * float(np.mean((values >= low) & (values < high))) for low, high in pairwise(edges)]
            wanted[-1] += 100 * float(np.mean(values == edges[-1]))
            assert drawn_heights[name] == pytest.approx(wanted), label
    words = "\n".join(section.text for section in page.values())
    assert f"{found.true:,} pairs ({percent(found.true / found.pairs)}) are true without being annotated" in words
    assert f"On average: one caption {np.mean(one.one):.3f}; mean of its captions {np.mean(one.mean):.3f}." in words
    assert f"Random: {len(judged.sample.it):,} pairs of an image and a caption of another one" in words
    assert f"{ranks.batches} random batches of {ranks.batch:,} images with one caption each." in words
    mined = by_label["mined captions, at least"]
    assert mined[0]["mined"] == pytest.approx((100 * np.histogram(counts, mined[1])[0] / len(counts)).tolist())
    for name, points in by_label["rank"][0].items():
        own = ranks.captions if name == "own caption of an image" else ranks.images
        assert points == [(k, pytest.approx(100 * float(np.mean(own <= k)))) for k, _ in points]
        assert (points[0][0], points[-1][0]) == (1, ranks.batch)
    points = by_label["the 100 most frequent captions"][0]["captions"]
    assert points == [(n, count) for n, (_, count) in enumerate(frequent, 1)]


def test_the_report_holds_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    c, origin, truths = perfect()
    bars, lines = (plots(monkeypatch, *of) for of in ((report_plots, "histogram"), (mining_page.report, "line_plot")))
    options = MineOptions(calibrate=True, p1=0.2, gallery=2, batch=100, most=3, device="cpu")
    judged = results.judge(c, {"captions": c}, options.over(Mined()), options, ("drawn <scenes>", "oracle"), truths)
    output.write(tmp_path, judged, origin, {"captions": c})
    check_page(sections((tmp_path / "report.html").read_text()), judged, bars + lines)
    drawn = re.findall('<figure class="plot">.*?</figure>', (tmp_path / "report.html").read_text(), re.S)
    assert len(set(drawn)) == len(drawn) == len(bars + lines)
    numbers = json.loads((tmp_path / "mine.json").read_text())
    page = (tmp_path / "report.html").read_text()
    assert numbers["thresholds"] == json.loads((tmp_path / "thresholds.json").read_text())
    assert numbers["thresholds"]["p1"] == 0.2  # given ones stand
    assert numbers["terms"]["it"]["precision"] == 1.0
    assert f"{numbers['terms'][results.WHOLE]['mined']:,}" in page
    assert results.flags(judged.settings) in page
    assert "drawn &lt;scenes&gt;" in page
    assert "<scenes>" not in page
    assert page.count("<svg") >= 6
    assert page.count("data:image/png") >= 4
    table = pyarrow.parquet.read_table(tmp_path / "pairs.parquet")
    monkeypatch.setattr(output, "IMAGES", 7)  # an image without pairs may end a part
    output.write_pairs(tmp_path / "parts.parquet", judged, truths)
    assert pyarrow.parquet.ParquetFile(tmp_path / "parts.parquet").num_row_groups == -(-len(c.keys) // 7)
    assert pyarrow.parquet.read_table(tmp_path / "parts.parquet").equals(table)
    rows = table.to_pylist()
    assert len(rows) == int((judged.mined.column >= 0).sum())
    assert max(sum(row["key"] == key for row in rows) for key in c.keys) <= 3
    for row in rows[:50]:
        place = c.starts[list(c.keys).index(row["owner"])] + row["caption_index"]
        assert c.captions[place] == row["caption"]
        assert row["owner"] != row["key"]
        image = list(c.keys).index(row["key"])
        assert row["true"] == truths(np.array([place]), np.array([image])).item()
        assert row["it"] == pytest.approx(float(c.images[image] @ c.texts[place]), abs=1e-6)
        assert row["by_it"] or row["by_ii"] or row["by_tt"]


def judged_page(c: Corpus, mined: Mined, **options: Any) -> tuple[str, dict[str, Section]]:
    """What a search of a corpus says on the terminal, and its page."""
    some = MineOptions(gallery=0, batch=9, device="cpu", **options)
    judged = results.judge(c, {"captions": c}, some.over(mined), some, ("drawn", "oracle"), None)
    page = mining_page.page(judged, output.chosen(judged, None, {"captions": c}), lambda row: b"")
    return "\n".join(output.summary(judged)), sections(page)


@pytest.mark.parametrize(("p1", "many"), [(0.99, False), (1e-4, True)])
def test_mining_that_makes_many_pairs_positive_warns(p1: float, many: bool) -> None:
    c = random_corpus(0)
    printed, page = judged_page(c, Mined(p1=p1, p2=0.999, p3=0.999))
    warned = re.search(r"warning: (\S+)% of all pairs are mined as positives", printed)
    assert bool(warned) == many == ("Warning: " in page["Mined pairs"].text)
    if warned:
        share = len(literal(c, Mined(p1=p1, p2=0.999, p3=0.999))) / (len(c.captions) * (len(c.keys) - 1))
        assert float(warned[1]) == pytest.approx(100 * share, abs=0.06)


def test_calibrated_thresholds_are_explained_as_they_came_about() -> None:
    """Five of nine images are copies, so that p2 is capped, and p3 is not."""
    c = random_corpus(1)
    c.images[:5] = c.images[0]
    _, page = judged_page(c, Mined(), calibrate=True, false_rate=0.1)
    words = "\n".join(section.text for section in page.values())
    assert re.search(r"p2 is 0\.999, the highest that identical features surely exceed: \d+(\.\d)?% of random", words)
    assert "p3 is the S_tt that only 0.1 of random pairs exceed" in words


@pytest.mark.parametrize("repeats", [False, True])
def test_captions_that_occur_once_are_not_listed_as_frequent(repeats: bool) -> None:
    c = random_corpus(2)
    if repeats:
        c.captions[-1] = c.captions[0]
    _, page = judged_page(c, Mined())
    tables = [table for section in page.values() for table in section.tables if table[0] == ["caption", "times"]]
    assert tables == ([[["caption", "times"], [c.captions[0], "2"]]] if repeats else [])
    words = "\n".join(section.text for section in page.values())
    assert (f"Each of {len(c.captions)} captions occurs once." in words) != repeats


def test_a_corpus_without_pairs_is_refused() -> None:
    with pytest.raises(ValueError, match="there are no pairs to mine"):
        random_pairs(corpus(np.zeros((2, 2), np.float32), [np.ones((1, 2)), np.ones((1, 2))]), 0)


@pytest.mark.parametrize("bad", [{"batch": 1}, {"most": 0}, {"gallery": -1}, {"chunk": 0}, {"false_rate": 0.0}])
def test_options_out_of_range_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="Expected"):
        MineOptions(**bad).check()  # type: ignore[arg-type]


def test_some_captions_of_some_images() -> None:
    c = random_corpus(2)
    kept = np.arange(len(c.captions)) % 2 == 0
    images = np.arange(len(c.keys)) > 3
    part = c.only(kept, images)
    wanted = [t for t in range(len(c.captions)) if kept[t] and c.owner[t] > 3]
    assert part.captions == [c.captions[t] for t in wanted]
    assert [part.keys[n] for n in part.owner] == [c.keys[n] for n in c.owner[wanted]]
    np.testing.assert_array_equal(part.texts, c.texts[wanted])
    for n in range(len(part.keys)):
        own = part.texts[part.starts[n] : part.starts[n + 1]]
        np.testing.assert_allclose(part.means[n], own.mean(0) if len(own) else 0, atol=1e-6)


def test_progress_says_rate_and_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    bar = Bar("pairs", "pairs")
    bar(5, 10)
    bar(10, 10)
    printed = capsys.readouterr().err
    assert "100%" in printed
    assert "ETA 0:00" in printed
    assert printed.count("\n") == 1  # plain lines come seldom


@pytest.mark.parametrize(
    ("seconds", "printed"), [(65, "1:05"), (3 * 3600 + 7 * 60 + 5, "3:07:05"), (99 * 3600, "4d 03h")]
)
def test_time_left_reads_as_in_training(seconds: int, printed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half is done after the given seconds."""
    screen, now = io.StringIO(), 0.0
    monkeypatch.setattr("time.perf_counter", lambda: now)
    bar = Bar("pairs", "pairs", screen)
    now = float(seconds)
    bar(5, 10)
    assert [line.partition("ETA ")[2].strip() for line in screen.getvalue().splitlines()] == [printed]


class Colours:
    """A teacher of eight numbers: an image's mean colours, a caption's letters."""

    size, fingerprint = 16, "colours"
    resize: Literal["shortest", "squash"] = "squash"

    def encode_images(self, images: torch.Tensor) -> torch.Tensor:
        means = images.float().unflatten(2, (2, 8)).mean((3, 4)).flatten(1) / 255  # [n, 6]
        return torch.nn.functional.normalize(torch.nn.functional.pad(means, (0, 2), value=0.1), dim=1)

    def encode_texts(self, texts: Sequence[str]) -> torch.Tensor:
        counts = [[1.0 + text.count(letter) for letter in "abcdefgh"] for text in texts]
        return torch.nn.functional.normalize(torch.tensor(counts).reshape(-1, 8), dim=1)


def test_from_feature_store_to_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    src, extra = "scenes?n=30&captions=2", tmp_path / "extra.parquet"
    keys = [parse_scenes(src).record(row).key for row in range(30)]
    pyarrow.parquet.write_table(pyarrow.table({"key": keys, "caption": [f"bead {n % 4}" for n in range(30)]}), extra)
    data = open_data(DataConfig(sources=(src,), extra_captions=(str(extra),)))
    embed(Colours(), data, tmp_path / "side", name="hues")
    options = MineOptions(calibrate=True, false_rate=0.05, batch=8, gallery=1, device="cpu")

    main([src], tmp_path / "side", tmp_path / "own", options)  # the table knows more captions than are asked for
    own = json.loads((tmp_path / "own" / "mine.json").read_text())
    assert own["captions"] == sum(len(parse_scenes(src).captions(row)) for row in range(30))
    assert own["true_pairs"] > 0
    assert "--settings.teacher hues" in capsys.readouterr().out

    main([src], tmp_path / "side", tmp_path / "both", replace(options, extra_captions=(extra,)))
    both = json.loads((tmp_path / "both" / "mine.json").read_text())
    assert both["captions"] == own["captions"] + 30
    assert set(both["analyses"]) == {"own", "extra"}
    assert both["analyses"]["extra"]["repeated"] == 26
    assert both["true_pairs"] is None  # nobody knows what a bead is true of
    assert both["terms"]["it"]["precision"] is None
    page = (tmp_path / "both" / "report.html").read_text()
    beside = sections(page)["Raw captions beside pseudo-captions"].text
    assert re.search(r"Pseudo-captions\n-?0\.\d\d bead \d", beside)
    assert len(re.findall(r"^-?0\.\d\d ", beside, re.M)) == 2 + 1  # both raw captions and the extra one
    assert "precision" not in page

    refused = pytest.raises(ValueError, match=r"process \d+ on \S+ is writing .*own: wait for its end")
    with held_by_another(tmp_path / "own"), refused:
        main([src], tmp_path / "side", tmp_path / "own", options)

    with pytest.raises(ValueError, match="was made from scenes"):
        main(["scenes?n=31&captions=2"], tmp_path / "side", tmp_path / "no", options)
    with pytest.raises(ValueError, match="holds no features"):
        main([src], tmp_path / "nothing", tmp_path / "no", options)
    assert not (tmp_path / "no").exists()


def test_numbers_of_the_file_from_their_definitions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spreads by numpy, seconds of each part by a clock that says when it is asked."""
    c, _, truths = perfect("scenes?n=60&captions=2")
    c.captions[3] = c.captions[0]  # type: ignore[index]
    clock = iter([10.0, 11.0, 13.0, 17.0])
    monkeypatch.setattr(results, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    options = MineOptions(gallery=0, batch=20, device="cpu")
    judged = results.judge(c, {"captions": c}, Mined(p1=0.1), options, ("data", "oracle"), truths)
    assert judged is not None
    printed = results.as_json(judged)
    assert printed["seconds"] == {"calibration": 1.0, "search": 2.0, "analyses": 4.0}
    assert printed["memory_mb"] == pytest.approx(judged.memory_mb, rel=0.1)
    assert 50 < judged.memory_mb < 100_000
    counts, group = judged.mined.per_image.numpy(), judged.groups["captions"]
    assert (printed["images"], printed["captions"], printed["true_pairs"]) == (60, len(c.captions), judged.mined.true)
    assert printed["images_without_mined"] == sum(n == 0 for n in counts.tolist())
    of = printed["analyses"]["captions"]
    assert (of["captions"], of["repeated"]) == (len(c.captions), len(c.captions) - len(set(c.captions)))
    assert (of["rank_batch"], of["rank_batches"]) == (20, 3)
    assert of["own_caption_first"] == np.mean(group.ranks.captions <= 1)
    assert of["own_image_first"] == np.mean(group.ranks.images <= 1)
    spreads = {"mined_per_image": counts, **{name: getattr(judged.sample, name).numpy() for name in TERMS}}
    found = {"mined_per_image": printed["mined_per_image"], **printed["similarity"]}
    names = {"rank_of_own_caption": group.ranks.captions, "rank_of_own_image": group.ranks.images}
    names |= {"annotated_similarity": group.annotated, "nearest_captions_similarity": group.nearest}
    names |= {"similarity_among_captions": group.among, "similarity_with_one_caption": group.one}
    for name, values in {**spreads, **names, "similarity_with_mean_caption": group.mean}.items():
        numbers = np.asarray(values, np.float64)
        assert (found | of)[name] == {
            "mean": pytest.approx(numbers.mean()), "std": pytest.approx(numbers.std()), "max": numbers.max(),
            "q05": pytest.approx(np.percentile(numbers, 5)), "median": pytest.approx(np.median(numbers)),
            "q95": pytest.approx(np.percentile(numbers, 95)),
        }, name  # fmt: skip
    assert results._spread([]) is None


def test_examples_are_pairs_that_their_term_accepts() -> None:
    c, _, truths = perfect("scenes?n=60&captions=2")
    options = MineOptions(gallery=5, batch=20, device="cpu")
    judged = results.judge(c, {"captions": c}, Mined(p1=0.1), options, ("data", "oracle"), truths)
    assert judged is not None
    shown = output.chosen(judged, truths, {"captions": judged.corpus})
    photos, texts = c.images.astype(np.float64), c.texts.astype(np.float64)
    assert set(shown.pairs) == set(TERMS)
    for term, drawn in shown.pairs.items():
        assert len({pair.image for pair in drawn}) == len(drawn) <= 5
        for pair in drawn:
            own = texts[c.starts[pair.image] : c.starts[pair.image + 1]]
            owner = c.owner[pair.caption]
            wanted = {"it": photos[pair.image] @ texts[pair.caption], "ii": photos[pair.image] @ photos[owner],
                      "tt": (own @ texts[pair.caption]).mean()}  # fmt: skip
            assert pair.scores == pytest.approx(wanted, abs=1e-6)
            assert {"it": wanted["it"] > 0.1, "ii": wanted["ii"] > Mined().p2}.get(term, wanted["tt"] > Mined().p3)
            assert pair.true == bool(truths(np.array([pair.caption]), np.array([pair.image])))
    assert len(shown.pairs["it"]) == 5
    often = judged.mined.per_text.tolist()
    wide = [best for _, best in shown.wide]
    captions = [caption for caption, _ in shown.wide]
    assert [often[n] for n in captions] == sorted((often[n] for n in captions), reverse=True)
    assert often[captions[0]] == max(often)
    assert len({c.captions[n] for n in captions}) == len(captions) == output.WIDE
    for caption, best in zip(captions, wide, strict=True):
        scores = photos @ texts[caption]
        scores[c.owner[caption]] = -np.inf
        assert [score for _, score, _ in best] == pytest.approx(sorted(scores, reverse=True)[: output.BEST], abs=1e-6)
        assert all(scores[row] == pytest.approx(score, abs=1e-6) for row, score, _ in best)
        assert [true for _, _, true in best] == [
            bool(truths(np.array([caption]), np.array([row]))) for row, _, _ in best
        ]

    black = np.zeros((4, 4, 3), np.uint8)
    cards = sections(stack(*images.mined_pairs(judged, shown, lambda row: black)))[""].words
    pair = shown.pairs["it"][0]
    at = cards.index(f"“{c.captions[pair.caption]}”")
    assert "Image and caption alike: S_it > 0.1." in cards
    assert cards[at - 2 : at] == ["the image", "the caption’s image"]
    assert cards[at + 1] == " ".join(f"S_{name} {value:.2f}" for name, value in pair.scores.items())
    assert cards[at + 2] == ("✓ true of the image" if pair.true else "✗ not true of the image")
    assert cards[at + 3] == f"Its own: “{c.captions[c.starts[pair.image]]}”"
    unseen = next(iter(shown.pairs["it"])).image
    fewer = stack(*images.mined_pairs(judged, shown, lambda row: None if row == unseen else black))
    assert fewer.count("<figure") < sum(map(len, shown.pairs.values()))
    wide_words = sections(stack(*images.wide_captions(judged, shown, lambda row: black)))[""].words
    assert f"“{c.captions[captions[0]]} ({often[captions[0]]:,} images)”" in wide_words


def test_candidates_of_p1_stand_around_the_mean_and_where_few_random_pairs_are() -> None:
    annotated = np.array([0.1, 0.3, 0.5, 0.7], np.float64)
    it = torch.arange(20_000) / 25_000
    deviation = float(np.std(annotated))
    wanted = {0.4 + step * deviation for step in (-1, -0.5, 0, 0.5, 1)}
    wanted |= {float(it[20_000 - 1 - int(rate * 20_000)]) for rate in (1e-2, 1e-3, 1e-4)} | {0.12345}
    found = candidates(annotated, RandomPairs(it, it, it, None), 0.12345)
    assert found == pytest.approx(sorted(wanted), abs=1.1e-4)
    assert 0.12345 in found  # as used, not rounded
    assert candidates(annotated, RandomPairs(it, it, it, None), 1.0) == pytest.approx(
        sorted(wanted - {0.12345}), abs=1.1e-4
    )


def test_a_line_of_progress_is_rewritten_until_the_end(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.perf_counter", lambda: now)
    bar = Bar("pairs", "pairs", terminal)
    assert not bar.line.shown
    lengths = []
    for seconds, done in ((100.1, 1), (100.25, 50_000), (100.3, 60_000), (100.5, 100_000), (100.5, 200_000)):
        now = seconds
        bar(done, 200_000)
        lengths.append(len(terminal.getvalue()))
    assert bar.line.shown
    assert lengths[0] == 0 < lengths[1] == lengths[2] < lengths[3] < lengths[4]
    rates = [f"pairs  {share}%  200,000 pairs/s  ETA 0:0{left}" for share, left in ((25, 0), (50, 0))]
    assert [*dict.fromkeys(filter(None, terminal.frames))] == [*rates, "pairs 100%  400,000 pairs/s  ETA 0:00"]
    assert terminal.frames[-1] == ""


def test_captions_above_the_own_one_and_beside_it() -> None:
    texts = [np.array([row], np.float32) for row in ([0.6, 0.8], [1.0, 0], [0, 1.0])]
    c = corpus(np.array([[1.0, 0], [0.6, 0.8], [0, 1.0]], np.float32), texts)
    (first, second) = gallery.ranked_above(c, 3, 9, 0, None)
    by_image = {one.image: one.lists for one in (first, second)}
    assert set(by_image) == {0, 1}  # the last image has its own caption first
    own, higher = by_image[0].values()
    assert [(text, round(score, 3)) for text, score, _ in own] == [(c.captions[0], 0.6)]
    assert [(text, round(score, 3)) for text, score, _ in higher] == [(c.captions[1], 1.0)]
    own, higher = by_image[1].values()
    assert [text for text, *_ in higher] == [c.captions[0], c.captions[2]]  # 1.0 and 0.8 above 0.6
    assert len(list(gallery.ranked_above(c, 3, 1, 0, None))) == 1
    parts = {"own": c.only(np.array([True, True, False])), "extra": c.only(np.array([False, False, True]))}
    assert list(gallery.raw_and_pseudo({"captions": c}, 9, 0)) == []
    assert list(gallery.raw_and_pseudo(parts, 9, 0)) == []  # no image has both
    parts["extra"] = c
    found = {one.image: one.lists for one in gallery.raw_and_pseudo(parts, 9, 0)}
    assert set(found) == {0, 1}
    assert found[1]["Raw captions"] == [(c.captions[1], pytest.approx(0.6), None)]


def test_captions_of_lists_are_escaped() -> None:
    one = images.CaptionLists(0, {"Raw captions": [("<script>", 0.5, True)]})
    pixels = np.zeros((4, 4, 3), np.uint8)
    (figure,) = gallery.drawn([one, replace(one, image=1)], ["k", "l"], lambda n: None if n else pixels)
    assert "&lt;script&gt;" in figure
    assert "<script>" not in figure


def test_a_folder_of_others_is_refused_and_its_own_is_not(tmp_path: Path) -> None:
    _check_folder(tmp_path / "new")
    _check_folder(tmp_path)
    for name in (".lock", "pairs.parquet", "thresholds.json"):  # of a call that was killed
        (tmp_path / name).touch()
    _check_folder(tmp_path)
    (tmp_path / "report.html").touch()
    with pytest.raises(ValueError, match=r"holds report\.html, and no mine\.json of an earlier call: choose a new"):
        _check_folder(tmp_path)
    (tmp_path / "mine.json").touch()
    _check_folder(tmp_path)
