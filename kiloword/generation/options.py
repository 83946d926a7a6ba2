"""Options of text generation. No torch here, so that help texts are instant."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from kiloword.config.settings import BaseSettings

MOST_BEAMS = 1000
Way = Literal["greedy", "beam", "nucleus"]


@dataclass(frozen=True, kw_only=True)
class GenerationOptions(BaseSettings):
    """How a decoder searches for texts.

    Beam search is the default, as in BLIP, GIT and open_clip's CoCa (and the pseudo-captions of arXiv:2405.10286,
    fig. 3): greedy search can miss a more likely sentence for a more likely first word.
    """

    # greedy: the most likely word at each step; beam: the most likely text; nucleus: sampled texts
    method: Way = "beam"
    num: int = 1  # number of unique captions per image, best first
    beams: int = 5  # beam: number of unfinished captions to keep
    length_penalty: float = 1.0  # score = log probability / tokens^length_penalty; larger values favour longer captions
    exact: bool = False  # beam: search until no unfinished caption can win, not only until none scores higher
    top_p: float = 0.9  # nucleus: sample from the smallest set of tokens with this probability
    temperature: float = 1.0  # nucleus: below 1, likely words become more likely
    longest: int = 0  # largest number of tokens, start and end included; 0: the text tower's context
    shortest: int = 1  # smallest number of tokens before the end
    no_repeat: int = 0  # n-grams of this size occur only once in a caption; 0: no limit
    seed: int = 0  # nucleus: seed of the samples

    def check(self) -> None:
        """Errors: ValueError for values out of range, options of another method, and too many captions for it."""
        if self.method not in get_args(Way):
            raise ValueError(f"method is {self.method!r}. Expected {' or '.join(get_args(Way))}.")
        least = {"num": 1, "beams": 1, "longest": 0, "shortest": 0, "no_repeat": 0}
        for name, low in least.items():
            if getattr(self, name) < low:
                raise ValueError(f"{name} is {getattr(self, name)}. Expected at least {low}.")
        if self.beams > MOST_BEAMS:
            raise ValueError(f"beams is {self.beams}. Expected at most {MOST_BEAMS:,}.")
        if self.longest and self.longest < self.shortest + 2:
            raise ValueError(
                f"longest is {self.longest}, shortest {self.shortest}: expected at least shortest + 2 (start and end)."
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p:g}. Expected a share above 0 and at most 1, such as 0.9.")
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature is {self.temperature:g}. Expected a number above 0; greedy is its limit.")
        if not math.isfinite(self.length_penalty):
            raise ValueError(f"length_penalty is {self.length_penalty}. Expected a finite number, such as 1.")
        read = {"beam": ("beams", "exact"), "nucleus": ("top_p", "temperature", "seed")}
        for method, names in read.items():
            for name in names:
                if method != self.method and getattr(self, name) != getattr(GenerationOptions, name):
                    raise ValueError(f"{name} is an option of method {method}, not of {self.method}: omit it.")
        if self.method == "greedy" and self.num > 1:
            raise ValueError(f"method greedy generates one caption, but num is {self.num}: use method beam or nucleus.")
        if self.method == "beam" and self.num > self.beams:
            raise ValueError(f"num is {self.num}, but there are {self.beams} beams. Expected at least as many beams.")
