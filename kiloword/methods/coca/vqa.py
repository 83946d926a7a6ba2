"""Visual question answering by fine-tuning. Source: arXiv:2401.02137, section 4.2.

The text tower sees the question and, by cross-attention blocks of its own, the image; the text decoder of CoCa then
writes the answer, looking at the tokens of the question in place of those of the image. `--init` of a coca or sycoca
model brings towers and decoder; the cross-attention blocks are new.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kiloword.config.recipes import only
from kiloword.methods import clip
from kiloword.methods.coca.answering import AnswerSettings, answering
from kiloword.methods.coca.coca import ended
from kiloword.methods.method import Method


@dataclass(frozen=True, kw_only=True)
class Settings(AnswerSettings):
    class_token: bool = True  # texts end in a class token, as those of --init


def preset(settings: Settings) -> Method:
    method = clip.preset(clip.Settings())
    method = ended(method) if settings.class_token else method
    return replace(
        answering(method, only(settings, AnswerSettings)),
        name="vqa",
        source="arXiv:2401.02137",
        summary="written answers to questions about images (needs questions)",
    )
