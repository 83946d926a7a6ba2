"""What decides a claim: outcomes of every image over seeds, a paired bootstrap, and a rule that was written before.

Two arms are compared on the same images and the same seeds. The rule names the least effect that counts; the interval
tells whether an effect is there, and whether one of that size can be excluded.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kiloword.api import Matcher
from kiloword.evaluation.metrics import hit, spearman
from kiloword.evaluation.retrieval import all_pairs
from kiloword.types import Features

Verdict = Literal["shown", "refuted", "undecided"]
Outcomes = NDArray[np.float64]  # [S, N]: of S seeds and N images, or other units
RESAMPLES, AT_ONCE = 10_000, 500
CORRELATIONS = 1_000  # resamples of a correlation, which sorts
LEVEL = 0.95
SEEDS = 3  # that decide a claim, at least


@dataclass(frozen=True)
class Effect:
    """The difference of two arms' means and its 95% interval, in the unit of the outcomes or as a share."""

    value: float
    low: float
    high: float

    def verdict(self, least: float) -> Verdict:
        """By a rule: shown if the interval is above 0 and the effect is at least `least`; refuted if it lies below.

        A least effect below 0 is a loss that is allowed: the interval must lie above it.
        """
        if self.low > min(0.0, least) and self.value >= least:
            return "shown"
        return "refuted" if self.high < least else "undecided"

    def __str__(self) -> str:
        value, low, high = (round(x, 9) for x in (self.value, self.low, self.high))  # halves: as on any machine
        return f"{value:+.3f} ({low:+.3f}..{high:+.3f})"


def effect(arm: Outcomes, rival: Outcomes, relative: bool = False, seed: int = 0) -> Effect:
    """How far an arm's mean lies above its rival's, by a bootstrap over seeds and images, both paired.

    Args: arm, rival: of the same seeds and images; relative: as a share of the rival's mean.
    Raises: ValueError for outcomes of different shapes, or of fewer than three seeds.
    """
    if arm.shape != rival.shape or arm.ndim != 2:
        raise ValueError(f"outcomes {list(arm.shape)} and {list(rival.shape)}: expected the same seeds and images.")
    if len(arm) < SEEDS:
        raise ValueError(f"a claim is decided by at least {SEEDS} seeds, not by {len(arm)}.")
    rng, (seeds, images), values = np.random.default_rng(seed), arm.shape, []
    columns, counts = np.unique(np.concatenate([arm, rival]), axis=1, return_counts=True)  # [2S, K] images alike, [K]
    for _ in range(0, RESAMPLES, AT_ONCE):
        of_seeds = rng.multinomial(seeds, np.full(seeds, 1 / seeds), AT_ONCE)  # [B, S] times that each is drawn
        of_columns = rng.multinomial(images, counts / images, AT_ONCE)  # [B, K]
        mean, base = (((of_seeds @ outcomes) * of_columns).sum(1) / arm.size for outcomes in np.split(columns, 2))
        values.append((mean - base) / base if relative else mean - base)
    low, high = np.quantile(np.concatenate(values), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    value = arm.mean() - rival.mean()
    return Effect(float(value / rival.mean() if relative else value), float(low), float(high))


Runs = Mapping[str, Sequence[Mapping[str, Any]]]
"""Rows of results by arm, in the order of their seeds."""


@dataclass(frozen=True)
class Decision:
    """What a rule says of the runs that are there."""

    says: str
    of: str  # the arm, or "arm over rival"
    effect: Effect
    least: float
    verdict: Verdict

    def __str__(self) -> str:
        return f"{self.says}: {self.of} {self.effect}, least {self.least}: {self.verdict}."


class Rule(Protocol):
    """A rule of research/README.md."""

    @property
    def says(self) -> str: ...

    def lacks(self, runs: Runs) -> str:
        """What is there where it does not suffice to decide; "" where it does."""
        ...

    def decide(self, runs: Runs) -> Decision:
        """The decision on runs that suffice."""
        ...


def decided(rule: Rule, runs: Runs) -> Decision | str:
    """The decision, or a line that says what is there where it does not suffice."""
    if lacks := rule.lacks(runs):
        return f"{rule.says}: not decided yet ({lacks})."
    return rule.decide(runs)


class OverSeeds:
    """A rule that needs the same seeds of all its arms, three or more."""

    @property
    def of(self) -> tuple[str, ...]:
        """The arms that it reads."""
        raise NotImplementedError

    def lacks(self, runs: Runs) -> str:
        """The seeds that are finished, where they are too few or differ."""
        seeds = {name: [row["seed"] for row in runs.get(name, ())] for name in self.of}
        equal = next(iter(seeds.values()))
        if all(len(of_arm) >= SEEDS and of_arm == equal for of_arm in seeds.values()):
            return ""
        return f"seeds finished: {', '.join(f'{n} {s}' for n, s in seeds.items())}"


@dataclass(frozen=True, kw_only=True)
class Claim(OverSeeds):
    """An arm against the best of its rivals, and the least effect that counts."""

    says: str
    arm: str
    rivals: tuple[str, ...]
    least: float
    relative: bool = False  # the effect is a share of the rival's mean
    outcome: str = "outcomes"  # the metric that has a value for every image
    rival_outcome: str = ""  # that of the rivals, if another

    @property
    def of(self) -> tuple[str, ...]:
        return self.arm, *self.rivals

    def decide(self, runs: Runs) -> Decision:
        arm = _outcomes(runs[self.arm], self.outcome)
        rivals = {name: _outcomes(runs[name], self.rival_outcome or self.outcome) for name in self.rivals}
        rival = max(rivals, key=lambda name: float(rivals[name].mean()))
        value = effect(arm, rivals[rival], self.relative)
        over = (
            f"{self.arm} over {rival}" if rival != self.arm else f"{self.arm}, {self.outcome} over {self.rival_outcome}"
        )
        return Decision(self.says, over, value, self.least, value.verdict(self.least))


@dataclass(frozen=True, kw_only=True)
class Gain(OverSeeds):
    """How far one arm's gain over its rival is above another arm's over its own."""

    says: str
    arm: str
    rival: str
    other: str
    other_rival: str
    least: float = 0.0
    outcome: str = "outcomes"

    @property
    def of(self) -> tuple[str, ...]:
        return self.arm, self.rival, self.other, self.other_rival

    def decide(self, runs: Runs) -> Decision:
        a, b, c, d = (_outcomes(runs[name], self.outcome) for name in self.of)
        value = effect(a - b, c - d)
        over = f"{self.arm} over {self.rival}, less {self.other} over {self.other_rival}"
        return Decision(self.says, over, value, self.least, value.verdict(self.least))


def _outcomes(rows: Sequence[Mapping[str, Any]], metric: str) -> Outcomes:
    return np.stack([unpacked(row["metrics"][metric]) for row in rows])


@dataclass(frozen=True, kw_only=True)
class Correlation(OverSeeds):
    """A correlation over texts, and what its mean and the low end of its interval need.

    The metric holds pairs [N, 2]: of each text the uncertainty, and the number of images that it is true of.
    """

    says: str
    arm: str
    least: float  # of the mean of seeds
    above: float  # of the low end of the interval
    outcome: str = "generality"

    @property
    def of(self) -> tuple[str, ...]:
        return (self.arm,)

    def decide(self, runs: Runs) -> Decision:
        """Spearman's correlation, and its interval over texts and seeds."""
        pairs = np.stack([np.asarray(row["metrics"][self.outcome]) for row in runs[self.arm]])  # [S, N, 2]
        value = float(np.mean([_spearman(of_seed) for of_seed in pairs]))
        low, high = (float(end) for end in np.quantile(_resampled(pairs), [(1 - LEVEL) / 2, (1 + LEVEL) / 2]))
        shown = value >= self.least and low > self.above
        verdict: Verdict = "shown" if shown else "refuted" if high < self.least else "undecided"
        return Decision(self.says, self.arm, Effect(value, low, high), self.least, verdict)


def _resampled(pairs: Outcomes, seed: int = 0) -> list[float]:
    """The mean correlation of resampled seeds and texts. Args: pairs [S, N, 2]."""
    rng, (seeds, texts, _) = np.random.default_rng(seed), pairs.shape
    values = []
    for _ in range(CORRELATIONS):
        chosen = rng.integers(texts, size=(texts,))
        of_seeds = [_spearman(pairs[s, chosen]) for s in rng.integers(seeds, size=(seeds,)).tolist()]
        values.append(float(np.mean(of_seeds)))
    return values


def _spearman(pairs: Outcomes) -> float:
    """Of pairs [N, 2]."""
    return spearman(*torch.from_numpy(pairs).unbind(1))


def recall_by_image(matcher: Matcher, images: Features, texts: Features, image_of_text: Sequence[int]) -> Outcomes:
    """[I] mean R@1 of every image: half whether its best caption is first, half the share of its captions that find it.

    The mean over images is the mean of both directions' R@1 where all images have equally many captions.
    """
    owner = torch.as_tensor(image_of_text)
    for_images, for_texts = (side.standing() for side in all_pairs(matcher.score, images, texts, owner))
    hits, count = (torch.zeros(len(images["vec"]), dtype=torch.float64) for _ in range(2))
    hits.index_add_(0, owner, hit(for_texts, 1).double().cpu())
    count.index_add_(0, owner, torch.ones(len(owner), dtype=torch.float64))
    return ((hit(for_images, 1).double().cpu() + hits / count.clamp_min(1)) / 2).numpy()


def packed(outcomes: Outcomes) -> dict[str, Any]:
    """Outcomes [N] as a row of results holds them, to 1/255 of their range: a kilobyte for 1,000 images."""
    least, most = float(outcomes.min()), float(outcomes.max())
    scaled = (outcomes - least) / max(most - least, 1e-12) * 255
    return {"least": least, "most": most, "bytes": base64.b85encode(scaled.round().astype(np.uint8).tobytes()).decode()}


def unpacked(stored: dict[str, Any]) -> Outcomes:
    """What `packed` made, to 1/510 of the range."""
    scaled = np.frombuffer(base64.b85decode(stored["bytes"]), np.uint8).astype(np.float64)
    values: Outcomes = stored["least"] + scaled / 255 * (stored["most"] - stored["least"])
    return values
