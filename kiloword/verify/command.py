"""The verb verify: its flags are those of a method and its components. No torch at import, so that help is instant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

from kiloword.config.settings import BaseSettings, setting
from kiloword.methods.command import method_words
from kiloword.terminal import say


@dataclass(frozen=True, kw_only=True)
class Verify(BaseSettings):
    """Check that a method's gradients are right, and do not depend on ranks, micro-batches, blocks or order.

    This takes from half a minute to a few minutes, depending on the method.

    Examples:
      kiloword verify llip
      kiloword verify mine:preset --settings.weight 0.5 --ranks 1 2
      kiloword verify siglip+mine:component
    """

    common: ClassVar[dict[str, str]] = {"checks": "ranks trunks"}

    ranks: tuple[Literal[1, 2, 4], ...] = setting(
        (1, 2, 4), "numbers of processes to compare; 1 alone: no comparison of processes"
    )
    trunks: Literal["none", "cached", "frozen", "tuned"] = setting(
        "none", "put the towers on trunks of other libraries with random weights: frozen, tuned, or with cached tokens"
    )


@dataclass(frozen=True)
class Conformity:
    """The words of a command line, read."""

    method: str
    settings: Any
    options: Verify

    def run(self) -> None:
        """Run all checks and print each. Raises: ValueError naming those that failed."""
        from kiloword.verify.batch import MethodChoice
        from kiloword.verify.suite import verify

        if not self.options.ranks:
            raise ValueError("--ranks is empty: expected some of 1, 2 and 4.")
        failed = []
        for check in verify(MethodChoice(self.method, asdict(self.settings)), self.options.ranks, self.options.trunks):
            result, where = ("ok  ", "") if check.passed else ("FAIL", f"  {check.where}")
            say(f"{result}  {check.name:48s} {check.value:9.2e}  (at most {check.limit:g}){where}")
            failed += [] if check.passed else [check.name]
        if self.options.ranks == (1,):
            say("one process: whether several agree was not checked, which --ranks 1 2 does")
        if failed:
            raise ValueError(f"{self.method} fails {len(failed)} of its checks: {', '.join(failed)}.")


def read(argv: Sequence[str]) -> Conformity:
    """Read the words of a command line."""
    words = method_words(argv, "verify siglip")
    options, settings = words.read(Verify())
    return Conformity(words.method, settings, options)
