"""SyCoCa: captioning and text-guided masked image modelling, both with attentive masks. Source: arXiv:2401.02137.

The rows of its table 5 are `clip`; `coca`; `coca --settings.caption-mask attentive`; and this preset with
`--settings.guide none|text --settings.mim-mask random|attentive`. Table 6: `caption_share` and `mim_share`; table 7:
`mim_weight`. The paper's initial weights: `--model.init-std 0.01`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from kiloword.config.settings import only, setting
from kiloword.methods.coca import coca
from kiloword.methods.coca.masked_images import MimSettings, masked
from kiloword.methods.method import Component, Method


@dataclass(frozen=True, kw_only=True)
class Settings(MimSettings, coca.Settings):
    """CoCa's settings, those of masked images, and which patches captions see."""

    caption_mask: Literal["none", "attentive", "random"] = setting(
        "attentive", "attentive: the patches least similar to the caption"
    )


def preset(settings: Settings) -> Method:
    method = masked(coca.preset(only(settings, coca.Settings)), only(settings, MimSettings))
    return replace(
        method,
        name="sycoca",
        source="arXiv:2401.02137",
        summary="CoCa that also reconstructs patches masked by the caption",
    )


COMPONENTS = {
    "mim": Component(
        "terms", "an image decoder that reconstructs masked patches, guided by the caption", MimSettings, masked
    ),
}
