"""Phrases of captions, and the photos that they are true of."""

from __future__ import annotations

from research.phrases import phrases, runs


def test_runs_end_at_function_words_and_punctuation() -> None:
    assert runs("A brown Dog runs on the wet sand, barking loudly.") == [
        ["brown", "dog", "runs"],
        ["wet", "sand"],
        ["barking", "loudly"],
    ]
    assert runs("The and of") == []


def test_a_phrase_is_true_of_every_photo_with_a_caption_that_has_it() -> None:
    captions = [
        ["A brown dog on wet sand .", "the brown dog"],
        ["A brown dog in a very long row of red tall wide old houses"],  # a run of five words is no phrase
        ["Wet sand", "sand"],
        ["a large brown dog"],  # also a brown dog
    ]
    made = phrases(captions)
    assert dict(zip(made.texts, made.photos, strict=True)) == {
        "brown dog": [0, 1, 3],
        "large brown dog": [3],
        "long row": [1],
        "wet sand": [0, 2],
    }
    assert made.of_at_most(1).texts == ["large brown dog", "long row"]
