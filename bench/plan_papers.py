"""The tables of research/plan.md: what the papers' runs take, and open_clip's profiles: python bench/plan_papers.py"""

from __future__ import annotations

from collections.abc import Sequence

from kiloword.apps.plan.command import read
from kiloword.apps.plan.options import GIB
from kiloword.terminal import say

RECIPES = (
    "llip-b16", "llip-l14", "llip-g14", "prolip-b16-1.28b", "prolip-b16-12.8b", "sycoca-cc12m", "fff-yfcc15m",
    "clip-c-cc3m",
)  # fmt: skip

# open_clip's docs/model_profile.csv: million parameters, GFLOP of an image and a caption of 77 tokens, forward
PROFILES = {
    "b32": (151.28, 14.78),
    "b16": (149.62, 41.09),
    "l16": (427.74, 136.41),
    "l14": (427.62, 175.33),
    "h14": (986.11, 381.68),
    "g14": (1366.68, 581.15),
    "bigg": (2539.57, 1065.36),
}


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table: names on the left, numbers on the right."""
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    say(*(f"| {' | '.join(line)} |" for line in lines), "")


def papers() -> None:
    """Print the fastest layout that fits, of every recipe."""
    rows = []
    for name in RECIPES:
        planner = read(["--recipe", name]).planner()
        best = planner.options()[0]
        held = f"{best.bytes / GIB:.1f} of {planner.card.memory / GIB:.0f}"
        flop = sum(best.flop.values()) / planner.images / 1e9
        figures = f"{flop:.4g}", str(best), held, f"{best.pairs_per_second:,.0f}", f"{best.days:.2f}"
        rows.append([name, f"{planner.parameters / 1e6:.1f}", *figures, f"{best.gpu_hours:,.0f}"])
    markdown(("recipe", "M parameters", "GFLOP a pair", "fastest", "GiB", "pairs/s", "days", "GPU hours"), rows)


def profiles() -> None:
    """Print parameters and FLOP of open_clip's models beside open_clip's own figures."""
    rows = []
    for size, (millions, gflop) in PROFILES.items():
        planner = read(f"clip --size {size} --samples 1e9 --tokens 77 --batch 1".split()).planner()
        ours = planner.micro_batch("none", 1).flop["towers"] / 1e9
        rows.append([size, f"{planner.parameters / 1e6:.2f}", f"{millions:.2f}", f"{ours:.2f}", f"{gflop:.2f}"])
    markdown(("size", "M parameters", "open_clip's", "GFLOP", "open_clip's"), rows)


if __name__ == "__main__":
    papers()
    profiles()
