"""Easy data augmentation: what each operation may do to a caption."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kiloword.data.text import eda
from kiloword.randomness import Draw

WORDS = {"dog": ["hound"], "runs": ["sprints", "dashes"], "big": ["large"]}


def rngs(n: int = 60) -> list[np.random.Generator]:
    return [np.random.default_rng(seed) for seed in range(n)]


def test_synonyms_replace_words_and_keep_their_dress() -> None:
    said = {" ".join(eda.replace_words(["A", "Dog,", "big,", "runs."], 1, WORDS, rng)) for rng in rngs()}
    assert said == {"A Hound, big, runs.", "A Dog, large, runs.", "A Dog, big, sprints.", "A Dog, big, dashes."}
    assert {" ".join(eda.replace_words(["A", "Dog,", "big"], 9, WORDS, rng)) for rng in rngs()} == {"A Hound, large"}
    assert eda.replace_words(["a", "b"], 2, WORDS, rngs()[0]) == ["a", "b"]


def test_insertions_add_synonyms_at_any_place() -> None:
    said = {" ".join(eda.insert_words(["the", "dog"], 1, WORDS, rng)) for rng in rngs()}
    assert said == {"hound the dog", "the hound dog", "the dog hound"}
    assert {len(eda.insert_words(["dog"], 3, WORDS, rng)) for rng in rngs()} == {4}
    assert eda.insert_words(["a", "b"], 2, WORDS, rngs()[0]) == ["a", "b"]


def test_swaps_change_two_places() -> None:
    said = {" ".join(eda.swap_words(["a", "b", "c"], 1, rng)) for rng in rngs()}
    assert said == {"b a c", "c b a", "a c b"}
    assert eda.swap_words(["a"], 3, rngs()[0]) == ["a"]


def test_deletions_have_their_probability_and_leave_a_word() -> None:
    lengths = [len(eda.delete_words(["x"] * 100, 0.2, rng)) for rng in rngs(200)]
    assert abs(np.mean(lengths) - 80) < 1.5
    assert {tuple(eda.delete_words(["a", "b"], 1.0, rng)) for rng in rngs()} == {("a",), ("b",)}


@given(caption=st.text(max_size=40), edits=st.floats(0, 1), seed=st.integers(0, 1000))
def test_no_caption_becomes_empty(caption: str, edits: float, seed: int) -> None:
    said = eda.eda(caption, eda.read_synonyms(), edits, np.random.default_rng(seed))
    assert said.split() or said == caption


def test_all_four_operations_come() -> None:
    said = Counter(eda.eda("the dog sat", WORDS, 0.4, rng) for rng in rngs(200))
    assert {"the hound sat", "dog the sat"} < set(said)
    assert any(len(s.split()) == 4 for s in said)
    assert any(len(s.split()) < 3 for s in said)


def test_the_list_of_synonyms_is_whole() -> None:
    groups = [line.split(", ") for line in eda.BUILT_IN.read_text(encoding="utf-8").splitlines()]
    words = [word for group in groups for word in group]
    assert all(len(group) > 1 for group in groups)
    assert len(words) == len(set(words)) > 600
    assert all(word == word.lower().strip() and word for word in words)
    synonyms = eda.read_synonyms()
    assert synonyms["dog"] == ["hound", "canine"]
    assert "the" not in synonyms
    assert "red" not in synonyms


def test_synonyms_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "words.txt"
    path.write_text("Dog, hound\n\nalone\ndog, pet animal\n")
    assert eda.read_synonyms(str(path)) == {"dog": ["hound", "pet animal"], "hound": ["dog"], "pet animal": ["dog"]}
    path.with_name("empty.txt").write_text("alone\n")
    path.with_name("bytes.txt").write_bytes(b"\xff\xfe\x00")
    for name, message in (("empty", "no line has two words"), ("bytes", "UTF-8"), ("none", "cannot be read")):
        with pytest.raises(ValueError, match=message):
            eda.read_synonyms(str(tmp_path / f"{name}.txt"))


def test_dropped_words_are_keyed_and_never_all() -> None:
    captions = ["a dog runs over the wide green grass", "dog"]
    first = eda.drop_words(captions, 0.5, Draw(0, 0, 0))
    assert first == eda.drop_words(captions, 0.5, Draw(0, 0, 0))
    assert first != eda.drop_words(captions, 0.5, Draw(0, 1, 0))
    assert eda.drop_words(captions, 1.0, Draw(0, 0, 0)) == captions
    kept = [len(eda.drop_words(captions, 0.25, Draw(0, epoch, 0))[0].split()) for epoch in range(400)]
    assert 5.7 < sum(kept) / 400 < 6.3  # three quarters of eight
