"""The words of a command line before a verb reads them. No torch here: help is instant."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence

from kiloword.addresses import public
from kiloword.checkpoint.files import utf8

TEXTS = ("--texts", "--name", "--curves", ".merge", ".teacher")  # how flags end whose values are texts: no paths
NOTHING_KEPT = {  # verbs that write their results at the end alone
    "eval": "no results were written.",
    "mine": "no results were written.",
    "verify": "nothing was written.",
}


def settled(argv: Sequence[str], verbs: Collection[str]) -> list[str]:
    """The words without credentials of URLs, and texts among them decoded as UTF-8 whatever the locale is.

    Paths stay as Python decoded them: it can open them in no other form.
    Raises: ValueError for an unknown verb, and an empty word, which as a path would be the current directory.
    """
    _check_verb(argv, verbs)
    flag, words = "kiloword", []
    for n, word in enumerate(argv):
        name, _, value = word.partition("=")
        flag = name if word.startswith("--") or (n == 0 and name) else flag
        if not (value if "=" in word and word.startswith("--") else word):
            raise ValueError(
                f"{flag} got an empty value, perhaps of an unset shell variable: expected something there."
            )
        words.append(utf8(public(word), "replace") if flag.endswith(TEXTS) else public(word))
    return words


def _check_verb(argv: Sequence[str], verbs: Collection[str]) -> None:
    if not argv or not argv[0] or argv[0].startswith("-") or argv[0] in verbs:
        return
    near = difflib.get_close_matches(argv[0], verbs, 1)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise ValueError(f"unknown verb {argv[0]!r}: expected one of {', '.join(verbs)}.{hint}")


def interruption(argv: Sequence[str], error: KeyboardInterrupt) -> str:
    """What is printed after Ctrl-C: what is kept, where that is known."""
    kept = str(error) or NOTHING_KEPT.get(argv[0] if argv else "", "")
    return f"interrupted: {kept}" if kept else "interrupted."
