"""The verb verify: its flags are those of a method and its components. No torch at import, so that help is instant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal

from kiloword.config.options import Mixing
from kiloword.config.settings import BaseSettings, about, setting
from kiloword.methods.command import method_words
from kiloword.terminal import say


@dataclass(frozen=True, kw_only=True)
class Verify(BaseSettings):
    """Check a method's gradients: that they are right, and do not depend on ranks, micro-batches, blocks or order.

    It takes half a minute to some minutes, by the method.

    Examples:
      kiloword verify llip
      kiloword verify mine:preset --settings.weight 0.5 --ranks 1 2
      kiloword verify siglip+mine:component
    """

    common: ClassVar[dict[str, str]] = {
        "checks": "ranks trunks",
        "loss": "transforms positives pair-loss pooling uncertainty contrasts terms",
    }

    ranks: tuple[int, ...] = setting((1, 2, 4), "numbers of processes to compare")
    trunks: Literal["none", "cached", "frozen", "tuned"] = setting(
        "none", "towers on trunks of other libraries, with random weights: frozen, tuned, or their tokens cached"
    )
    mixing: Mixing = field(default_factory=Mixing, metadata=about(flag=""))


@dataclass(frozen=True)
class Conformity:
    """The words of a command line, read."""

    method: str
    settings: Any
    options: Verify

    def run(self) -> None:
        """Run all checks and print each. Raises: ValueError naming those that failed, and known causes."""
        from kiloword.verify.batch import IMAGES, MethodChoice
        from kiloword.verify.suite import WAYS, verify

        ranks, parts = self.options.ranks, max(way.micro for way in WAYS)
        fitting = [n for n in range(1, IMAGES + 1) if IMAGES % (n * parts) == 0]
        if not ranks or any(n not in fitting for n in ranks):
            raise ValueError(
                f"--ranks is {' '.join(map(str, ranks)) or 'empty'}: expected one or several of "
                f"{', '.join(map(str, fitting))}, as each process takes {parts} micro-batches of the {IMAGES} images."
            )
        if max(ranks) == 1:
            say("--ranks 1 adds no check: it is the run with which others, such as 2 4, are compared")
        failed = []
        for check in verify(MethodChoice(self.method, asdict(self.settings)), ranks, self.options.trunks):
            result = "ok  " if check.passed else "FAIL"
            where = "" if check.passed or not check.where else f"  {check.where}"
            say(f"{result}  {check.name:48s} {check.value:9.2e}  (at most {check.limit:g}){where}")
            failed += [] if check.passed else [check]
        if failed:
            message = f"{self.method} fails {len(failed)} of its checks: {', '.join(check.name for check in failed)}."
            raise ValueError(" ".join([message, *dict.fromkeys(check.cause for check in failed if check.cause)]))


def read(argv: Sequence[str]) -> Conformity:
    """Read the words of a command line."""
    words = method_words(argv, "verify siglip")
    options, settings = words.read(Verify())
    return Conformity(words.method, settings, options)
