"""BLEU, ROUGE-L, CIDEr-D against pycocoevalcap's own scorers; tokenizers; METEOR and SPICE, which need Java."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kiloword.evaluation.caption import CaptionOptions
from kiloword.evaluation.caption import java as caption_java
from kiloword.evaluation.caption.metrics import (
    PUNCTUATION,
    check_programs,
    own,
    score_captions,
    tokenize,
    tokenized,
)
from kiloword.evaluation.caption.scorers import Captions, bleu, cider, common_subsequence, rouge_l
from kiloword.randomness import key

official = pytest.mark.skipif(find_spec("pycocoevalcap") is None, reason="pycocoevalcap is not installed")
java = pytest.mark.skipif(
    find_spec("pycocoevalcap") is None or shutil.which("java") is None, reason="no pycocoevalcap or no java"
)
WORDS = ("a", "man", "dog", "on", "the", "red", "bus", "of", "with", "sits", "street", "two")


def theirs(captions: Captions) -> tuple[list[float], np.ndarray, np.ndarray]:
    """BLEU-1 to 4 of the set, ROUGE-L and CIDEr-D of each image, by pycocoevalcap."""
    from pycocoevalcap.bleu.bleu import Bleu
    from pycocoevalcap.cider.cider import Cider
    from pycocoevalcap.rouge.rouge import Rouge

    known = {i: list(own) for i, own in enumerate(captions.references)}
    said = {i: [c] for i, c in enumerate(captions.candidates)}
    return (
        Bleu(4).compute_score(known, said, verbose=0)[0],
        Rouge().compute_score(known, said)[1],
        Cider().compute_score(known, said)[1],
    )


def check_equal(captions: Captions) -> None:
    blue, rouge, ciders = theirs(captions)
    np.testing.assert_allclose(bleu(captions), blue, atol=1e-9)
    np.testing.assert_allclose(rouge_l(captions), rouge, atol=1e-9)
    np.testing.assert_allclose(cider(captions), ciders, atol=1e-9)


def drawn(n: int, seed: int) -> tuple[list[str], list[list[str]]]:
    """n captions of few words, so that many n-grams are shared, with 1 to 6 references each."""

    def caption(*names: object) -> str:
        return " ".join(WORDS[key(seed, *names, k) % len(WORDS)] for k in range(key(seed, *names) % 14))

    references = [[f"a {caption('reference', i, r)}" for r in range(1 + key(seed, "n", i) % 6)] for i in range(n)]
    return [caption("candidate", i) for i in range(n)], references


def coco(shared: Path, n: int) -> tuple[list[str], list[list[str]]]:
    """The first caption of n COCO images, and the others."""
    with gzip.open(shared / "coco_captions" / "val2014.json.gz") as file:
        found = json.load(file)
    rows = [found[name] for name in sorted(found)[:n]]
    return [row[0] for row in rows], [row[1:] for row in rows]


@official
@pytest.mark.parametrize("seed", range(3))
def test_equals_pycocoevalcap(seed: int) -> None:
    check_equal(tokenized(*drawn(80, seed), "own", 0))


@official
def test_equals_pycocoevalcap_on_coco(shared: Path) -> None:
    check_equal(tokenized(*coco(shared, 1000), "own", 0))


@pytest.mark.slow
@java
def test_equals_pycocoevalcap_on_coco_in_its_own_words(shared: Path) -> None:
    candidates, references = coco(shared, 1000)
    captions = tokenized(candidates, references, "ptb", 60)
    check_equal(captions)
    here, there = (
        score_captions(candidates, references, CaptionOptions(tokenizer=tokenizer, meteor=False)).values
        for tokenizer in ("own", "ptb")
    )
    apart = [abs(here[n] - value) for n, value in there.items() if n not in ("distinct", "words", "vocabulary")]
    assert max(apart) < 1e-3


SENTENCES = st.lists(st.sampled_from(WORDS[:4]), max_size=7).map(" ".join)


@official
@given(st.lists(st.tuples(SENTENCES, st.lists(SENTENCES, min_size=1, max_size=3)), min_size=1, max_size=5))
@settings(max_examples=150, deadline=None)
def test_equals_pycocoevalcap_on_odd_input(rows: Sequence[tuple[str, list[str]]]) -> None:
    """Empty captions, one image, repeated words, references that are all alike."""
    captions = Captions([c for c, _ in rows], [own for _, own in rows])
    if any(r for own in captions.references for r in own):  # its CIDEr fails when no reference has a word
        check_equal(captions)


@given(st.lists(st.sampled_from("abc"), max_size=12), st.lists(st.sampled_from("abcd"), max_size=12))
def test_common_subsequence_is_the_tables(a: list[str], b: list[str]) -> None:
    table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            table[i + 1][j + 1] = table[i][j] + 1 if x == y else max(table[i][j + 1], table[i + 1][j])
    assert common_subsequence(a, b) == table[-1][-1]


def test_words_that_nothing_divides_by() -> None:
    empty = Captions([""], [[""]])
    assert cider(empty).tolist() == [0.0]
    assert bleu(empty) == [pytest.approx(0, abs=1e-5)] * 4
    assert cider(Captions(["a dog"], [["a dog"]])).tolist() == [0.0]  # one image: every word is in all of them
    assert cider(Captions(["a dog", "two men"], [["a dog"], ["two men"]])).tolist() == [5.0, 5.0]  # no 3-, 4-grams
    full = Captions(["a dog runs by", "two men sit here"], [["a dog runs by"], ["two men sit here"]])
    np.testing.assert_allclose(cider(full), 10)
    np.testing.assert_allclose(bleu(full), 1, atol=1e-8)
    assert rouge_l(full).tolist() == [1.0, 1.0]


def test_what_is_returned() -> None:
    found = score_captions(["A dog.", "a dog", ""], [["A dog runs."], ["a cat", "the dog"], ["Two men!"]]).values
    assert list(found) == [*(f"bleu_{n}" for n in range(1, 5)), "rouge_l", "cider", "distinct", "words", "vocabulary"]
    assert found["distinct"] == 2 / 3
    assert found["words"] == 4 / 3
    assert found["vocabulary"] == 2
    assert all(isinstance(value, float) for value in found.values())


@pytest.mark.parametrize(
    ("candidates", "references", "said"),
    [
        ([], [], "0 captions came for 0 images"),
        (["a"], [["a"], ["b"]], "1 captions came for 2 images"),
        (["a", "b"], [["a"], []], "image 1 has no references"),
        ("ab", [["a"], ["b"]], "as one string"),
        (["a"], ["b"], "as one string"),
    ],
)
def test_what_cannot_be_scored(candidates: list[str], references: list[list[str]], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        score_captions(candidates, references)


@pytest.mark.parametrize(
    ("caption", "words"),
    [
        ("A man's dog doesn't sit -- it CAN'T!", "a man 's dog does n't sit it ca n't"),
        ('The "big" one (red), two-story; 8:30 a.m. …', "the big one red two-story 8:30 a.m."),
        ("It’s 50's & $5, they'll cannot.", "it 's 50 's & $ 5 they 'll can not"),
        ("o'clock 3,000 St. 'quoted' dogs'", "o'clock 3,000 st quoted dogs"),
        ("naïve café हिन्दी 犬", "naïve café हिन्दी 犬"),
        (" \n\t", ""),
        ("...!?", ""),
    ],
)
def test_own_tokenizer(caption: str, words: str) -> None:
    assert own(caption) == words


@given(st.text())
def test_own_tokenizer_takes_anything(caption: str) -> None:
    words = own(caption)
    assert words == " ".join(words.split())
    assert not PUNCTUATION.intersection(words.split())


@java
def test_treebank_tokenizer_is_pycocoevalcaps(shared: Path) -> None:
    from pycocoevalcap.tokenizer.ptbtokenizer import PTBTokenizer

    captions = [*coco(shared, 400)[0], "", "A (small) dog's toy, isn't it?", "two\nlines", "café"]
    asked = {i: [{"caption": c}] for i, c in enumerate(captions)}
    known = PTBTokenizer().tokenize(asked)
    assert tokenize(captions, "ptb", 60) == [known[i][0] for i in range(len(captions))]


@java
def test_how_far_the_tokenizers_are_apart(shared: Path) -> None:
    captions = coco(shared, 5000)[0]
    pairs = zip(tokenize(captions), tokenize(captions, "ptb", 60), strict=True)
    assert sum(a != b for a, b in pairs) <= 0.002 * len(captions)


@java
@pytest.mark.slow
def test_meteor_is_pycocoevalcaps() -> None:
    from pycocoevalcap.meteor.meteor import Meteor

    captions = tokenized(*drawn(40, 3), "own", 0)
    scorer = Meteor()
    known = {i: list(own) for i, own in enumerate(captions.references)}
    total, each = scorer.compute_score(known, {i: [c] for i, c in enumerate(captions.candidates)})
    for pipe in (scorer.meteor_p.stdout, scorer.meteor_p.stderr):
        pipe.close()
    del scorer
    assert caption_java.meteor(captions.candidates, captions.references, 120) == (total, each)


@pytest.fixture
def fake_java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program `java` and an installed package, to be written by the test."""
    package = tmp_path / "pycocoevalcap"
    for name in (caption_java.TOKENIZER, caption_java.METEOR, caption_java.SPICE):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).touch()
    monkeypatch.setattr(caption_java, "folder", lambda: package)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    program = tmp_path / "java"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    return program


def test_nothing_hangs(fake_java: Path) -> None:
    with pytest.raises(ValueError, match=r"METEOR did not end within 0\.3 seconds"):
        caption_java.meteor(["a"], [["a"]], 0.3)
    with pytest.raises(ValueError, match=r"the tokenizer ptb did not end within 0\.3 seconds"):
        tokenize(["a"], "ptb", 0.3)


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("exit 1", "METEOR failed: no reason given"),
        ("exit 0", "METEOR failed: it gave 0 answers to 1 questions"),
        ("while read line; do echo Error: no; done", "METEOR failed: Error: no"),
        ("read line; echo NaN; case $line in EVAL*) echo NaN;; esac", "METEOR failed: it answered 'NaN'"),
        ("read line; echo what; case $line in EVAL*) echo what;; esac", "METEOR failed: it answered 'what'"),
    ],
)
def test_a_broken_meteor_is_named(fake_java: Path, program: str, said: str) -> None:
    fake_java.write_text(f"#!/bin/sh\n{program}\n")
    with pytest.raises(ValueError, match=said):
        caption_java.meteor(["a"], [["a"]], 20)


METEOR = """#!{python}
import sys
asked = open("{asked}", "a")
for line in sys.stdin:
    print(line.rstrip(), file=asked, flush=True)
    if line.startswith("SCORE"):
        print("stats of", line.count("|||"), flush=True)
    else:
        print(*[n / 8 for n in range(line.count("|||") + 1)], sep="\\n", flush=True)
"""


def test_what_meteor_is_asked_and_answers(fake_java: Path) -> None:
    """Statistics of every image by its references and caption, then all of these; the score of the set comes last."""
    asked = fake_java.parent / "asked"
    fake_java.write_text(METEOR.format(python=sys.executable, asked=asked))
    found = caption_java.meteor(["a ||| b  c", "d"], [["e", "f"], ["g"]], 20)
    assert found == (2 / 8, [0.0, 1 / 8])
    assert asked.read_text().splitlines() == [
        "SCORE ||| e ||| f ||| a b c", "SCORE ||| g ||| d", "EVAL ||| stats of 3 ||| stats of 2"
    ]  # fmt: skip


def test_spice_that_writes_nothing_is_named(fake_java: Path) -> None:
    with pytest.raises(ValueError, match=r"SPICE cannot be computed: .* is not there"):
        caption_java.spice(["a"], [["a"]], 20)
    for name in caption_java.MODELS:
        path = caption_java.folder() / name  # type: ignore[operator]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    fake_java.write_text("#!/bin/sh\nexit 0\n")
    with pytest.raises(ValueError, match="SPICE wrote no scores; it is known to need Java 8"):
        caption_java.spice(["a"], [["a"]], 20)


def test_a_broken_tokenizer_is_named(fake_java: Path) -> None:
    fake_java.write_text("#!/bin/sh\necho no heap >&2\nexit 3\n")
    with pytest.raises(ValueError, match="the tokenizer ptb failed: no heap"):
        tokenize(["a"], "ptb")
    fake_java.write_text("#!/bin/sh\ncat >/dev/null; echo one\n")
    with pytest.raises(ValueError, match="gave 1 lines for 2 captions"):
        tokenize(["a", "b"], "ptb")
    with pytest.raises(ValueError, match="the tokenizer of captions is 'nltk'"):
        tokenize(["a"], "nltk")  # type: ignore[arg-type]


def test_spice_is_refused_without_its_models(fake_java: Path) -> None:
    ran = fake_java.parent / "ran"
    fake_java.write_text(f"#!/bin/sh\ntouch {ran}\n")
    with pytest.raises(ValueError, match=r"SPICE cannot be computed: .*models, which pycocoevalcap fetches"):
        score_captions(["a"], [["a"]], CaptionOptions(spice=True))
    with pytest.raises(ValueError, match=r"SPICE cannot be computed: .*models, which pycocoevalcap fetches"):
        check_programs("own", spice=True)  # before a model writes captions for hours
    check_programs("own", spice=False)
    assert not ran.exists()


def test_spice_where_its_models_are(fake_java: Path) -> None:
    for name in caption_java.MODELS:
        path = caption_java.folder() / name  # type: ignore[operator]
        path.parent.mkdir(exist_ok=True)
        path.touch()
    answer = json.dumps([{"image_id": i, "scores": {"All": {"f": f}}} for i, f in enumerate((0.25, 0.75))])
    fake_java.write_text(f"#!/bin/sh\necho '{answer}' > \"$6\"\n")
    assert score_captions(["a", "b"], [["a"], ["b"]], CaptionOptions(spice=True, meteor=False)).values["spice"] == 0.5


def test_what_is_missing_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(caption_java, "folder", lambda: None)
    with pytest.raises(ValueError, match="METEOR cannot run: it needs pycocoevalcap: pip install"):
        caption_java.meteor(["a"], [["a"]], 600)
    monkeypatch.setattr(caption_java, "folder", lambda: tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="the tokenizer ptb cannot run: there is no java on the PATH"):
        score_captions(["a"], [["a"]], CaptionOptions(tokenizer="ptb"))
