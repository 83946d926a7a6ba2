"""Inclusion of one-dimensional Gaussians, drawn: ProLIP's Fig. 3 (arXiv:2410.18857).

`python -m research.prolip_toy --out toy.html` writes a page with a plot (SVG) of each pair and its H (eq. 4), log
inclusion (eq. 3) and KL divergence. The figure's own means and deviations are not in the text; `--pairs` takes others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro
from torch import Tensor, float64, tensor

from kiloword.methods.prolip.gaussian import csd, inclusion, log_inclusion
from kiloword.report import Block, Page, Plot, Table, Text, write_page
from kiloword.terminal import say
from research.arms import in_one_message

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PROGRAM = "python -m research.prolip_toy"
NAMED = {  # mean and standard deviation of both
    "Z1 lies within Z2": (0.0, 0.5, 0.5, 1.5),
    "Z2 lies within Z1": (0.5, 1.5, 0.0, 0.5),
    "apart, equally wide": (-1.5, 0.5, 1.5, 0.5),
}
POINTS, WIDE = 241, 4  # of a curve; standard deviations beyond the means
_INTRO = (
    "Curves of two Gaussians, and of their squares, which the inclusion compares: log inc(Z1, Z2) is the log of the "
    "integral of p1 squared times p2. H(Z1 in Z2) = inc(Z1, Z2) - inc(Z2, Z1) is positive where Z1 lies within Z2, "
    "and 0 where both are equally wide. KL tells how different they are, not which includes which."
)


@dataclass(frozen=True)
class Values:
    """Measures of two Gaussians."""

    h: float  # H(Z1 in Z2), eq. 4, as the paper prints eq. 3
    h_exact: float  # by the integral
    inc: float  # inc(Z1, Z2), eq. 3
    inc_exact: float
    kl: float  # KL(Z1 || Z2)
    distance: float  # CSD


def measured(mean_1: float, std_1: float, mean_2: float, std_2: float) -> Values:
    """Measures of N(mean_1, std_1^2) and N(mean_2, std_2^2)."""
    first, second = _gaussian(mean_1, std_1), _gaussian(mean_2, std_2)
    exact: dict[str, Any] = {"form": "exact"}
    return Values(
        float(inclusion(first, second)),
        float(inclusion(first, second, **exact)),
        float(log_inclusion(first, second)),
        float(log_inclusion(first, second, **exact)),
        math.log(std_2 / std_1) + (std_1**2 + (mean_1 - mean_2) ** 2) / (2 * std_2**2) - 0.5,
        float(csd(first, second)),
    )


@in_one_message(PROGRAM)
def main(out: Path = Path("toy.html"), pairs: tuple[tuple[float, float, float, float], ...] = ()) -> None:
    """Draw pairs of Gaussians with H, inclusion and KL: ProLIP's Fig. 3. User errors are one message and exit code 2.

    Args:
        out: page to write.
        pairs: mean and standard deviation of both Gaussians of each pair, instead of three like the paper's.
    """
    named = NAMED if not pairs else {f"pair {n}": pair for n, pair in enumerate(pairs, 1)}
    for name, pair in named.items():
        if not all(map(math.isfinite, pair)) or min(pair[1], pair[3]) <= 0:
            raise ValueError(f"{name} is {pair}: expected finite numbers, and standard deviations above 0.")
    values = {name: measured(*pair) for name, pair in named.items()}
    header = ["", "H(Z1 in Z2)", "H, exact", "log inc(Z1, Z2)", "log inc, exact", "KL(Z1, Z2)", "CSD"]
    rows = [[name, v.h, v.h_exact, v.inc, v.inc_exact, v.kl, v.distance] for name, v in values.items()]
    about = "Eq. 3 as printed counts the log variances twice; exact: the integral. Both omit its constant factor."
    drawn = {name: _drawn(pair, values[name]) for name, pair in named.items()}
    write_page(out, Page("Inclusion of Gaussians", _INTRO, {"Measures": [Table(rows, header), Text(about)], **drawn}))
    say(f"page: {out}")


def _drawn(pair: tuple[float, float, float, float], values: Values) -> list[Block]:
    low = min(pair[0] - WIDE * pair[1], pair[2] - WIDE * pair[3])
    high = max(pair[0] + WIDE * pair[1], pair[2] + WIDE * pair[3])
    xs = [low + (high - low) * n / (POINTS - 1) for n in range(POINTS)]
    curves = {f"p{n}": [_density(x, *pair[2 * n - 2 : 2 * n]) for x in xs] for n in (1, 2)}

    def draw(axes: Axes) -> None:
        for name, ys in curves.items():
            axes.plot(xs, ys, label=name)
        for name, ys in curves.items():
            axes.plot(xs, [y**2 for y in ys], label=f"{name} squared")
        axes.set(xlabel="x", ylabel="density")

    summary = f"H {values.h:.3g}, log inclusion {values.inc:.3g}, KL {values.kl:.3g}."
    return [Plot(draw, "densities of both Gaussians and their squares"), Text(summary)]


def _density(x: float, mean: float, std: float) -> float:
    return math.exp(-0.5 * ((x - mean) / std) ** 2) / (std * math.sqrt(2 * math.pi))


def _gaussian(mean: float, std: float) -> dict[str, Tensor]:
    return {"vec": tensor([[mean]], dtype=float64), "log_var": tensor([[2 * math.log(std)]], dtype=float64)}


if __name__ == "__main__":
    tyro.cli(main, prog=PROGRAM)
