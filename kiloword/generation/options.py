"""Options of text generation. No torch here, so that help texts are instant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kiloword.config.settings import ABOVE_0, BaseSettings, check, setting, unread

Way = Literal["greedy", "beam", "nucleus"]


@dataclass(frozen=True, kw_only=True)
class GenerationOptions(BaseSettings):
    """How a decoder searches for texts.

    Beam search is the default, as in BLIP, GIT and open_clip's CoCa (and the pseudo-captions of arXiv:2405.10286,
    fig. 3): greedy search can miss a more likely sentence for a more likely first word.
    """

    # greedy: the most likely word at each step; beam: the most likely text; nucleus: sampled texts
    method: Way = "beam"
    num: int = setting(1, "number of unique captions per image, best first", 1)
    beams: int = setting(5, "beam: number of unfinished captions to keep", 1, 1000)
    length_penalty: float = 1.0  # score = log probability / tokens^length_penalty; larger values favour longer captions
    exact: bool = setting(
        False,
        "beam: search until no unfinished caption can win, not only until none scores higher",
        needs="method=beam",
    )
    top_p: float = setting(
        0.9, "nucleus: sample from the smallest set of tokens with this probability", ABOVE_0, 1, needs="method=nucleus"
    )
    temperature: float = setting(
        1.0, "nucleus: below 1, likely words become more likely", ABOVE_0, needs="method=nucleus"
    )
    longest: int = setting(0, "largest number of tokens, start and end included; 0: the text tower's context", 0)
    shortest: int = setting(1, "smallest number of tokens before the end", 0)
    no_repeat: int = setting(0, "n-grams of this size occur only once in a caption; 0: no limit", 0)
    seed: int = setting(0, "nucleus: seed of the samples", needs="method=nucleus")

    def check(self) -> None:
        """Errors: ValueError for values out of range, options of another method, and too many captions for it."""
        check(self)
        for wrong in unread(self, GenerationOptions()):
            raise ValueError(f"{wrong}: omit it.")
        most = {"greedy": 1, "beam": self.beams}.get(self.method, self.num)
        if self.num > most:
            raise ValueError(f"--num is {self.num}, but --method {self.method} gives at most {most}.")
