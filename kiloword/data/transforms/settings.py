"""Settings of the transforms that mix examples. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kiloword.config.settings import ABOVE_0, BaseSettings, setting


@dataclass(frozen=True, kw_only=True)
class MixingSettings(BaseSettings):
    """How often two examples are composed, and how their captions are joined."""

    rho: float | None = setting(None, "share of composed examples; default: 0.3, 0.15 from 3.5 million images", 0, 1)
    merge: str = setting(" and ", 'text between two captions; " " omits the word')
    parts: Literal["both", "images", "captions"] = setting("both", "what is composed; the other part stays unchanged")


@dataclass(frozen=True, kw_only=True)
class PartnerSettings(MixingSettings):
    """Which example an example is composed with."""

    partner: Literal["random", "fixed", "nearest", "farthest", "file"] = setting("random", "random: another each epoch")
    partner_table: str | None = setting(None, "feature store of sentence embeddings, for nearest and farthest")
    partner_file: str | None = setting(None, "parquet with columns key and partner, for file")
    rewrites: str | None = setting(None, "parquet (key, partner, caption): caption of a pair in place of both captions")


@dataclass(frozen=True, kw_only=True)
class HalfSettings(BaseSettings):
    """How two images share one."""

    crop: Literal["centre", "squash"] = setting("centre", "centre half of each image, or all of it resized")
    image_order: Literal["fixed", "follows_caption"] = setting("fixed", "fixed: the example's image is left or above")


@dataclass(frozen=True, kw_only=True)
class ComposeSettings(HalfSettings, PartnerSettings):
    """Two half images, side by side or one above the other."""


@dataclass(frozen=True, kw_only=True)
class MixupSettings(PartnerSettings):
    """Two images averaged pixel by pixel (arXiv:1710.09412)."""

    alpha: float = setting(1.0, "the share of the example's image is drawn from Beta(alpha, alpha)", ABOVE_0)


@dataclass(frozen=True, kw_only=True)
class CutmixSettings(PartnerSettings):
    """A rectangle of one image pasted into the other (arXiv:1905.04899)."""

    alpha: float = setting(1.0, "the area of the example's image is drawn from Beta(alpha, alpha)", ABOVE_0)


@dataclass(frozen=True, kw_only=True)
class StylisticSettings(HalfSettings, MixingSettings):
    """Two crops of one image, and its caption with an edited copy: the control of CLIP-C (arXiv:2407.01408)."""

    least_area: float = setting(0.5, "smallest area of both crops, if the loader does not crop at random", 0.001, 1)
    edits: float = setting(0.1, "share of words that change", 0, 1)
    synonyms: str | None = setting(None, "text file, on each line synonyms with commas between; default: built-in")
