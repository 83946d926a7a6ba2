"""Counting of bad samples, which are reported and replaced; too many stop the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from kiloword.types import Skipped


class BadRows:
    """Distinct bad rows of a run; its length is their number.

    Args: rows: of the data set; share: of rows that may be bad (`DataConfig.bad_share`).
    """

    def __init__(self, rows: int, share: float) -> None:
        self.rows, self.share = rows, share
        self._seen: dict[int, Skipped] = {}

    def __len__(self) -> int:
        return len(self._seen)

    def count(self, skipped: Iterable[Skipped]) -> list[Skipped]:
        """Add the skipped samples of one step; returns those that are new.

        Errors: ValueError, with the most frequent reasons, when more than the allowed share of the rows is bad.
        """
        new = []
        for sample in skipped:
            if sample.row not in self._seen:
                self._seen[sample.row] = sample
                new.append(sample)
        if len(self) > self.share * self.rows:
            raise ValueError(
                f"{len(self)} of the data set's {self.rows} rows are bad, more than the allowed {self.share:.2%}: "
                f"{reasons(self._seen.values())}. Look with `kiloword data check`, or allow more with --bad-share."
            )
        return new

    def rows_of(self, reason: str) -> list[int]:
        """The rows whose reason starts with `reason`."""
        return [row for row, sample in self._seen.items() if sample.reason.startswith(reason)]

    def state_dict(self) -> dict[str, Any]:
        """The state for a resumed run, as plain lists."""
        return {"bad": [[sample.row, sample.key, sample.reason] for sample in self._seen.values()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._seen = {row: Skipped(row, key, reason) for row, key, reason in state["bad"]}


def reasons(skipped: Iterable[Skipped], most: int = 3) -> str:
    """The most frequent reasons, each with a number and one example: "truncated image (31, such as 00012)"."""
    skipped = list(skipped)
    example = {sample.reason: sample.key for sample in reversed(skipped)}
    counted = Counter(sample.reason for sample in skipped).most_common(most)
    return "; ".join(f"{reason} ({n}, such as {example[reason]})" for reason, n in counted)
