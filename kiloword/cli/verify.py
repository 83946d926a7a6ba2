"""The verb verify: its flags are those of a method and its components. No torch at import, so that help is instant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import ClassVar, Literal

from kiloword.cli.words import method_command
from kiloword.config.options import Mixing
from kiloword.config.settings import BaseSettings, about, setting


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


def main(argv: Sequence[str]) -> None:
    """Check a method: kiloword verify METHOD. Raises: ValueError naming the checks that failed."""
    command = method_command(argv, "verify siglip")
    args, settings = command.read(Verify())
    from kiloword.verify.batch import MethodChoice
    from kiloword.verify.suite import main as run

    run(MethodChoice(command.method, asdict(settings)), args.ranks, trunks=args.trunks)
