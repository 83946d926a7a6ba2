"""How text is generated. No torch here, so that help texts are instant."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from kiloword.config.recipes import BaseSettings

Way = Literal["greedy", "beam", "nucleus"]


@dataclass(frozen=True, kw_only=True)
class GenerationOptions(BaseSettings):
    """What of all texts a decoder could write is written.

    Beam search is the default because the field's captions are made by it (BLIP, GIT, open_clip's CoCa; the
    pseudo-captions of arXiv:2405.10286, fig. 3): greedy search loses the likelier sentence to the likelier first word.
    """

    method: Way = "beam"  # greedy: the likeliest word each time; beam: the likeliest text; nucleus: drawn texts
    num: int = 1  # different captions of an image, best first
    beams: int = 5  # beam: unfinished captions that are kept
    length_penalty: float = 1.0  # a caption's score is its log probability / tokens^this; more favours longer ones
    exact: bool = False  # beam: search until nothing unfinished can win; else, as usual, until none wins as it stands
    top_p: float = 0.9  # nucleus: words are drawn from the smallest set with this much probability
    temperature: float = 1.0  # nucleus: below 1 likely words become likelier
    longest: int = 0  # tokens at most, start and end included; 0: as many as the text tower reads
    shortest: int = 1  # tokens before the end, at least
    no_repeat: int = 0  # so many tokens in a row never come twice in a caption; 0: they may
    seed: int = 0  # nucleus: another seed gives other captions

    def check(self) -> None:
        """Errors: ValueError for numbers that make no sense, and for more captions than a method can find."""
        if self.method not in get_args(Way):
            raise ValueError(f"method is {self.method!r}. Expected {' or '.join(get_args(Way))}.")
        least = {"num": 1, "beams": 1, "longest": 0, "shortest": 0, "no_repeat": 0}
        for name, low in least.items():
            if getattr(self, name) < low:
                raise ValueError(f"{name} is {getattr(self, name)}. Expected at least {low}.")
        if self.longest and self.longest < self.shortest + 2:
            raise ValueError(
                f"longest is {self.longest}, shortest {self.shortest}: start and end need 2 tokens more than shortest."
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p:g}. Expected a share above 0 and at most 1, such as 0.9.")
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature is {self.temperature:g}. Expected a number above 0; greedy is its limit.")
        if not math.isfinite(self.length_penalty):
            raise ValueError(f"length_penalty is {self.length_penalty}. Expected a finite number, such as 1.")
        self._check_read()
        self._check_num()

    def _check_read(self) -> None:
        """Errors: ValueError for a number that the method does not look at."""
        read = {"beam": ("beams", "exact"), "nucleus": ("top_p", "temperature", "seed")}
        for method, names in read.items():
            for name in names:
                if method != self.method and getattr(self, name) != getattr(GenerationOptions, name):
                    raise ValueError(f"{name} is of the method {method}, not of {self.method}: leave it away.")

    def _check_num(self) -> None:
        if self.method == "greedy" and self.num > 1:
            raise ValueError(f"greedy finds one caption, but num is {self.num}: choose method beam or nucleus.")
        if self.method == "beam" and self.num > self.beams:
            raise ValueError(f"num is {self.num}, but there are {self.beams} beams. Expected at least as many beams.")
