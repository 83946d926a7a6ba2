"""What evaluation, captioning and planning refuse, and errors in the words of a user."""

from __future__ import annotations

import pytest

from kiloword.errors import LeftOut, sentence_of


@pytest.mark.parametrize(
    ("error", "output"),
    [
        (ValueError(" a sentence. "), f"a sentence. ({__file__}:"),
        (FileNotFoundError(2, "No such file", "x.tar"), "No such file: x.tar."),
        (MemoryError("9 GiB"), "out of memory (9 GiB): take a smaller --batch"),
        (RuntimeError("DataLoader (pid 3) exited. \nmore"), "a loader worker stopped: DataLoader (pid 3) exited. "),
        (RuntimeError("another"), None),
        (KeyError("ours"), None),
        (type("OutOfMemoryError", (RuntimeError,), {})("CUDA is full.\nmore"), "CUDA is full. Take a smaller --micro"),
        (UnicodeEncodeError("utf-8", "a\udcff", 1, 2, "surrogate"), r"'a\udcff' cannot be written as utf-8"),
    ],
)
def test_errors_in_the_words_of_a_user(error: BaseException, output: str | None) -> None:
    with pytest.raises(type(error)) as raised:
        raise error
    found = sentence_of(raised.value)
    assert found is None if output is None else (found or "").startswith(output) and "\n" not in (found or "")


def test_what_is_left_out_is_counted_and_the_first_named() -> None:
    left, more = LeftOut("sample"), LeftOut("sample", most=1)
    assert [left.add(f"{n}", "no caption") for n in range(5)] == [True, True, True, False, False]
    more.add("x", "damaged")
    more.add("y", "no caption")
    more.add("w", "no caption")
    left.extend(more)
    assert left.lines() == ["7 samples skipped, no caption: 0, 1, 2 and 4 more", "1 sample skipped, damaged: x"]
    for n in range(30):
        left.add("z", f"reason {n}")
    assert (len(left), len(left.lines())) == (38, 21)
    assert left.lines()[-1] == "12 samples skipped for 12 other reasons"
