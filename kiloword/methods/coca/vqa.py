"""Visual question answering by fine-tuning. Source: arXiv:2401.02137, section 4.2.

The text tower encodes the question; additional cross-attention blocks let it attend to the image. CoCa's text decoder
then generates the answer, attending to the tokens of the question in place of the image's. `--init` from a coca or
sycoca model loads towers and decoder; the cross-attention blocks are new.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kiloword.config.settings import only, setting
from kiloword.methods import clip
from kiloword.methods.coca.answering import AnswerSettings, answering
from kiloword.methods.coca.coca import ended
from kiloword.methods.method import Method


@dataclass(frozen=True, kw_only=True)
class Settings(AnswerSettings):
    """Answers, and the class token of texts."""

    class_token: bool = setting(True, "append a class token to texts, as in the model of --init")


def preset(settings: Settings) -> Method:
    method = clip.preset(clip.Settings())
    method = ended(method) if settings.class_token else method
    return replace(
        answering(method, only(settings, AnswerSettings)),
        name="vqa",
        source="arXiv:2401.02137",
        summary="generated answers to questions about images (needs questions)",
    )
