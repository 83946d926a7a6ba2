"""SyCoCa: captions from images, images from captions, both with attentive masks. Source: arXiv:2401.02137.

Rows of its table 5 as settings: `clip`; `coca`; `coca --settings.caption-mask attentive`; and of this preset
`--settings.guide none|text --settings.mim-mask random|attentive`. Table 6: `caption_share` and `mim_share`; table 7:
`mim_weight`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from kiloword.config.recipes import only
from kiloword.methods.coca import coca
from kiloword.methods.coca.masked_images import MimSettings, masked
from kiloword.methods.method import Method, Piece


@dataclass(frozen=True, kw_only=True)
class Settings(MimSettings, coca.Settings):
    caption_mask: Literal["none", "attentive", "random"] = "attentive"  # attentive: what the caption does not speak of


def preset(settings: Settings) -> Method:
    made = masked(coca.preset(only(settings, coca.Settings)), only(settings, MimSettings))
    return replace(
        made,
        name="sycoca",
        source="arXiv:2401.02137",
        summary="CoCa that also paints patches which captions choose to hide",
    )


PIECES = {
    "mim": Piece(
        slot="terms", summary="an image decoder that paints hidden patches, guided by the caption",
        settings=MimSettings, apply=masked,
    ),
}  # fmt: skip
