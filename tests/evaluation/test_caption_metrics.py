"""BLEU, ROUGE-L, CIDEr-D as pycocoevalcap has them; CLIPScore and VQA accuracy literally; tokenizers; METEOR."""

from __future__ import annotations

import gc
import gzip
import json
import shutil
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from kiloword.evaluation.caption_metrics import Captions, bleu, cider, clipscore, own, rouge_l, score_captions
from kiloword.evaluation.vqa import CONTRACTIONS, accuracy, means, normalise
from parts import units

official = pytest.mark.skipif(find_spec("pycocoevalcap") is None, reason="pycocoevalcap is not installed")
java = pytest.mark.skipif(
    find_spec("pycocoevalcap") is None or shutil.which("java") is None, reason="no pycocoevalcap or no java"
)
SENTENCES = st.lists(st.sampled_from(("a", "man", "dog", "on")), max_size=7).map(" ".join)


def check_equal(captions: Captions) -> None:
    """BLEU-1 to 4 of the set, ROUGE-L and CIDEr-D of each image, are pycocoevalcap's."""
    from pycocoevalcap.bleu.bleu import Bleu
    from pycocoevalcap.cider.cider import Cider
    from pycocoevalcap.rouge.rouge import Rouge

    known = {i: list(own) for i, own in enumerate(captions.references)}
    said = {i: [c] for i, c in enumerate(captions.candidates)}
    np.testing.assert_allclose(bleu(captions), Bleu(4).compute_score(known, said, verbose=0)[0], atol=1e-9)
    np.testing.assert_allclose(rouge_l(captions), Rouge().compute_score(known, said)[1], atol=1e-9)
    np.testing.assert_allclose(cider(captions), Cider().compute_score(known, said)[1], atol=1e-9)


def coco(shared: Path, n: int) -> tuple[list[str], list[list[str]]]:
    """The first caption of n COCO images, and the others."""
    with gzip.open(shared / "coco_captions" / "val2014.json.gz") as file:
        found = json.load(file)
    rows = [found[name] for name in sorted(found)[:n]]
    return [row[0] for row in rows], [row[1:] for row in rows]


@official
def test_equals_pycocoevalcap_on_coco(shared: Path) -> None:
    candidates, references = coco(shared, 1000)
    captions = Captions(list(map(own, candidates)), [list(map(own, of_image)) for of_image in references])
    check_equal(captions)
    values = score_captions(candidates, references).values
    expected = [*bleu(captions), rouge_l(captions).mean(), cider(captions).mean()]
    assert list(values.values())[:6] == pytest.approx(expected, abs=1e-12)


@official
@given(st.lists(st.tuples(SENTENCES, st.lists(SENTENCES, min_size=1, max_size=3)), min_size=1, max_size=5))
@settings(max_examples=150, deadline=None)
def test_equals_pycocoevalcap_on_odd_input(rows: Sequence[tuple[str, list[str]]]) -> None:
    """Empty captions, one image, repeated words, references that are all alike."""
    captions = Captions([c for c, _ in rows], [own for _, own in rows])
    if any(r for own in captions.references for r in own):  # its CIDEr fails when no reference has a word
        check_equal(captions)


def test_values_by_hand() -> None:
    empty = Captions([""], [[""]])
    assert cider(empty).tolist() == [0.0]
    assert bleu(empty) == [pytest.approx(0, abs=1e-5)] * 4
    assert cider(Captions(["a dog", "two men"], [["a dog"], ["two men"]])).tolist() == [5.0, 5.0]  # no 3-, 4-grams
    full = Captions(["a dog runs by", "two men sit here"], [["a dog runs by"], ["two men sit here"]])
    np.testing.assert_allclose(cider(full), 10)
    np.testing.assert_allclose(bleu(full), 1, atol=1e-8)
    assert rouge_l(full).tolist() == [1.0, 1.0]
    found = score_captions(["A dog.", "a dog", ""], [["A dog runs."], ["a cat", "the dog"], ["Two men!"]]).values
    assert list(found) == [*(f"bleu_{n}" for n in range(1, 5)), "rouge_l", "cider", "distinct", "words", "vocabulary"]
    assert (found["distinct"], found["words"], found["vocabulary"]) == (2 / 3, 4 / 3, 2)


def test_what_means_nothing_is_omitted_with_a_note() -> None:
    alone = score_captions(["a red dog runs"], [["a red dog runs"]])
    assert "cider" not in alone.values
    assert np.isnan(alone.cider).all()
    assert alone.values["bleu_4"] == pytest.approx(1)
    assert "CIDEr-D" in alone.notes[0]
    for said in ("一只红色的狗在跑", "赤い犬が走る", "สุนัขสีแดงกำลังวิ่ง"):
        found = score_captions([said, f"{said} OK"], [[said], [said]])
        assert found.values == {"distinct": 1.0}
        assert "spaces" in found.notes[0]
    assert "cider" in score_captions(["a 犬 runs", "dog"], [["a dog runs"], ["dog"]]).values


@official
@pytest.mark.parametrize("java", [None, "exit 1"])
@pytest.mark.timeout(60)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # pycocoevalcap closes a broken pipe
def test_a_missing_or_broken_java_costs_no_other_figure(
    java: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    if java is not None:
        (tmp_path / "java").write_text(f"#!/bin/sh\n{java}\n")
        (tmp_path / "java").chmod(0o755)
    found = score_captions(["a", "b"], [["a"], ["b"]], meteor=True)
    assert {"bleu_1", "cider", "meteor"} & set(found.values) == {"bleu_1", "cider"}
    assert "METEOR" in found.notes[0]
    for options in ({"spice": True}, {"tokenizer": "ptb"})[: 1 + (java is None)]:  # SPICE lacks Stanford's
        with pytest.raises(ValueError, match=r"ptb|SPICE"):
            score_captions(["a"], [["a"]], **options)  # type: ignore[arg-type]
    gc.collect()


@given(st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_clipscore_is_the_papers(images: int, seed: int) -> None:
    """Hessel et al. 2021, equations of section 3, image by image and reference by reference."""
    v, c = units(images, 3, seed=seed), units(images, 3, seed=seed + 1)
    known = [units(1 + i % 3, 3, seed=seed + 2 + i) for i in range(images)]
    alone, both = clipscore(v, c, known)
    for i in range(images):
        score = 2.5 * max(float(c[i] @ v[i]), 0)
        nearest = max(max(float(c[i] @ r) for r in known[i]), 0)
        mean = 2 / (1 / score + 1 / nearest) if score and nearest else 0.0
        assert (alone[i], both[i]) == (pytest.approx(score), pytest.approx(mean))


@pytest.mark.parametrize(
    ("caption", "words"),
    [
        ("A man's dog doesn't sit -- it CAN'T!", "a man 's dog does n't sit it ca n't"),
        ('The "big" one (red), two-story; 8:30 a.m. …', "the big one red two-story 8:30 a.m."),
        ("It’s 50's & $5, they'll cannot.", "it 's 50 's & $ 5 they 'll can not"),
        ("o'clock 3,000 St. 'quoted' dogs'", "o'clock 3,000 st quoted dogs"),
        ("naïve cafe\u0301 हिन्दी 犬", "naïve café हिन्दी 犬"),
        ("सड़क पर एक कार है।", "सड़क पर एक कार है"),
        ("¿Un «perro» negro?¡Sí! „Hund“—l’été", "un perro negro sí hund l'été"),
        ("كلب، قطة؟ 猫、犬。", "كلب قطة 猫 犬"),
        ("cat😀 5€ col·lecció ❤️", "cat 😀 5 € col·lecció ❤"),
        (" \n\t...!?", ""),
    ],
)
def test_own_tokenizer(caption: str, words: str) -> None:
    assert own(caption) == words


@java
def test_the_treebank_tokenizer_differs_for_few_captions(shared: Path) -> None:
    here, there = (score_captions(*coco(shared, 1000), name).values for name in ("own", "ptb"))  # type: ignore[arg-type]
    assert 0 < max(abs(here[n] - there[n]) for n in list(there)[:6]) < 1e-3


@java
@pytest.mark.slow
def test_meteor_is_pycocoevalcaps() -> None:
    found = score_captions(["a dog runs", "two men"], [["a dog ran", "dogs"], ["two men sit"]], meteor=True).values
    assert 0.3 < found["meteor"] < 1


# VQA accuracy: a slow transcription of the official rules (visualqa.org)


MARKS = [";", "/", "[", "]", '"', "{", "}", "(", ")", "=", "+", "\\", "_", "-", ">", "<", "@", "`", ",", "?", "!"]
DIGITS = {
    "none": "0", "zero": "0", "one": "1", "two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7",
    "eight": "8", "nine": "9", "ten": "10",
}  # fmt: skip


def literal_normalise(text: str) -> str:
    """The rules one after the other, letter by letter."""
    in_number = any(text[i] == "," and text[i - 1].isdigit() and text[i + 1].isdigit() for i in range(1, len(text) - 1))
    out = text
    for mark in MARKS:
        beside_space = any(
            text[i] == mark and (text[i + 1 : i + 2] == " " or (i > 0 and text[i - 1] == " ")) for i in range(len(text))
        )
        out = "".join(("" if beside_space or in_number else " ") if letter == mark else letter for letter in out)
    kept, dropped = "", 0
    for i, letter in enumerate(out):
        if letter == "." and not out[i + 1 : i + 2].isdigit() and dropped < 32:
            dropped += 1
        else:
            kept += letter
    words = [DIGITS.get(word, word) for word in kept.lower().split()]
    return " ".join(CONTRACTIONS.get(word, word) for word in words if word not in ("a", "an", "the"))


def literal_accuracy(answer: str, answers: list[str]) -> float:
    """Ten annotators, each left out once."""
    said = [a.replace("\n", " ").replace("\t", " ").strip() for a in [answer, *answers]]
    if any(a != said[1] for a in said[1:]):
        said = [literal_normalise(a) for a in said]
    found = []
    for left_out in range(len(answers)):
        others = [a for n, a in enumerate(said[1:]) if n != left_out]
        found.append(min(1.0, sum(a == said[0] for a in others) / 3))
    return sum(found) / len(found)


words = st.sampled_from(
    ["red", "The", "a", "two", "TEN", "none", "dont", "couldnt've", "1,000", "3.", ".5", "2.5", "u.s.a.", "x-ray", "it"]
)
texts = st.one_of(st.lists(words, max_size=4).map(" ".join), st.text("ab 1,.-?'\"/\n\t", max_size=8))
answers = st.lists(texts, min_size=1, max_size=3).flatmap(
    lambda few: st.lists(st.sampled_from(few), min_size=10, max_size=10)
)


@given(texts)
@example("1,000 - 2")
@example("." * 40)
def test_normalise_is_the_rules_letter_by_letter(text: str) -> None:
    assert normalise(text) == literal_normalise(text)


@given(texts, answers)
def test_accuracy_is_the_transcription(answer: str, ten: list[str]) -> None:
    for said in (answer, ten[0]):
        assert accuracy(said, ten) == pytest.approx(literal_accuracy(said, ten), abs=1e-12)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  two dogs.", "2 dogs"),
        ("x-?y?z", "x y z"),  # the space that a hyphen leaves does not count
        ("black/white /x", "blackwhite x"),  # a slash beside a space takes all slashes away
        ("1,000-2", "10002"),  # and so does a comma within a number
        ("u.s.a. 1.5", "usa 1.5"),
        ("somebody'd 'ows'at ow's'at", "somebodyd 'ow's'at 'ow's'at"),
        ("ill shes wed", "ill shes wed"),  # which the evaluator does not spell out
    ],
)
def test_normalise(text: str, expected: str) -> None:
    assert normalise(text) == expected
    assert len(CONTRACTIONS) == 114  # of the evaluator's 120, six change nothing


@pytest.mark.parametrize(
    ("answer", "answers", "expected"),
    [
        ("2", ["two"] * 10, 0),  # equal answers are compared as they are: the evaluator's own quirk
        ("2", ["two"] * 9 + ["three"], 1),
        (" two\n", ["two"] * 10, 1),
        ("red", ["red"], 1),
        ("red", ["blue"], 0),
        ("red", ["red", "red"], 1),
        ("red", ["red", "blue"], 0.5),
    ],
)
def test_accuracy_by_hand(answer: str, answers: list[str], expected: float) -> None:
    assert accuracy(answer, answers) == expected


def test_means() -> None:
    kinds = [("colour", "other"), ("colour", "other"), ("count", "number")]
    rows = [
        ("red" if n else "blue", {"answers": ["red"] * 10, "question_type": question, "answer_type": answer})
        for n, (question, answer) in enumerate(kinds)
    ]
    assert dict(means(rows)) == {
        "accuracy": 2 / 3,
        "accuracy/question/colour": 0.5,
        "accuracy/question/count": 1,
        "accuracy/answer/number": 1,
        "accuracy/answer/other": 0.5,
    }
    assert dict(means([("red", {"answers": ["red", "blue"]})])) == {"accuracy": 0.5}
