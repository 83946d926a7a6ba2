"""Bad samples are counted, named and replaced; too many stop the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from kiloword.types import Skipped


class BadRows:
    """Distinct bad rows of a run; its length is their number.

    Args: rows of the data set; share of them that may be bad (`DataConfig.bad_share`).
    """

    def __init__(self, rows: int, share: float) -> None:
        self.rows, self.share = rows, share
        self._seen: dict[int, Skipped] = {}

    def __len__(self) -> int:
        return len(self._seen)

    def count(self, skipped: Iterable[Skipped]) -> list[Skipped]:
        """Add the skipped samples of one step; returns those never seen before.

        Errors: ValueError, with the most frequent reasons, when more than the allowed share of the rows is bad.
        """
        new = []
        for one in skipped:
            if one.row not in self._seen:
                self._seen[one.row] = one
                new.append(one)
        if len(self) > self.share * self.rows:
            raise ValueError(
                f"{len(self)} of the data set's {self.rows} rows are bad, more than the allowed {self.share:.2%}: "
                f"{reasons(self._seen.values())}. Look with `kiloword data check`, or allow more with --bad-share."
            )
        return new

    def rows_of(self, reason: str) -> list[int]:
        """The rows whose reason begins so."""
        return [row for row, one in self._seen.items() if one.reason.startswith(reason)]

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs: lists that json can hold."""
        return {"bad": [[one.row, one.key, one.reason] for one in self._seen.values()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._seen = {row: Skipped(row, key, reason) for row, key, reason in state["bad"]}


def reasons(skipped: Iterable[Skipped], most: int = 3) -> str:
    """The most frequent reasons, each with a number and one example: "truncated image (31, such as 00012)"."""
    skipped = list(skipped)
    example = {one.reason: one.key for one in reversed(skipped)}
    counted = Counter(one.reason for one in skipped).most_common(most)
    return "; ".join(f"{reason} ({n}, such as {example[reason]})" for reason, n in counted)
