"""Easy data augmentation: what each operation may do to a caption."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kiloword.data.text import eda
from kiloword.randomness import Draw

WORDS = {"dog": ["hound"], "runs": ["sprints", "dashes"], "big": ["large"]}


def said(caption: str, edits: float) -> set[str]:
    """What becomes of a caption by many draws."""
    return {eda.eda(caption, WORDS, edits, np.random.default_rng(seed)) for seed in range(300)}


def test_each_operation() -> None:
    """A word is replaced, a synonym inserted, two words are swapped, words deleted; punctuation and capitals stay."""
    inserted = {"hound the dog", "the hound dog", "the dog hound"}
    assert said("the dog", 0.5) == {"the hound", *inserted, "dog the", "the", "dog", "the dog"}
    replaced = {"A Hound, big, runs.", "A Dog, large, runs.", "A Dog, big, sprints.", "A Dog, big, dashes."}
    assert replaced < said("A Dog, big, runs.", 0.25)
    assert "A Hound, large, sprints." in said("A Dog, big, runs.", 1.0)
    assert said("a", 0.5) == {"a"}
    assert said("a b", 1.0) == {"a b", "a", "b"}
    lengths = [len(text.split()) for text in said(" ".join(map(str, range(100))), 0.2) if len(text.split()) < 100]
    assert abs(np.mean(lengths) - 80) < 1.5


@given(caption=st.text(max_size=40), edits=st.floats(0, 1), seed=st.integers(0, 1000))
def test_no_caption_becomes_empty(caption: str, edits: float, seed: int) -> None:
    changed = eda.eda(caption, eda.read_synonyms(), edits, np.random.default_rng(seed))
    assert changed.split() or changed == caption


def test_synonyms_from_a_file(tmp_path: Path) -> None:
    groups: Sequence[list[str]] = [line.split(", ") for line in eda.BUILT_IN.read_text(encoding="utf-8").splitlines()]
    words = [word for group in groups for word in group]
    assert all(len(group) > 1 for group in groups)
    assert len(words) == len(set(words)) > 600
    synonyms = eda.read_synonyms()
    assert synonyms["dog"] == ["hound", "canine"]
    assert not {"the", "red"} & synonyms.keys()
    path = tmp_path / "words.txt"
    path.write_text("Dog, hound\n\nalone\ndog, pet animal\n")
    assert eda.read_synonyms(str(path)) == {"dog": ["hound", "pet animal"], "hound": ["dog"], "pet animal": ["dog"]}
    path.with_name("empty.txt").write_text("alone\n")
    path.with_name("bytes.txt").write_bytes(b"\xff\xfe\x00")
    for name, word in (("empty", "no line has two words"), ("bytes", "UTF-8"), ("none", "cannot be read")):
        with pytest.raises(ValueError, match=word):
            eda.read_synonyms(str(tmp_path / f"{name}.txt"))


def test_dropped_words_are_keyed_and_never_all() -> None:
    captions = ["a dog runs over the wide green grass", "dog"]
    first = eda.drop_words(captions, 0.5, Draw(0, 0, 0))
    assert first == eda.drop_words(captions, 0.5, Draw(0, 0, 0)) != eda.drop_words(captions, 0.5, Draw(0, 1, 0))
    assert eda.drop_words(captions, 1.0, Draw(0, 0, 0)) == captions
    kept = [len(eda.drop_words(captions, 0.25, Draw(0, epoch, 0))[0].split()) for epoch in range(400)]
    assert 5.7 < sum(kept) / 400 < 6.3  # three quarters of eight
