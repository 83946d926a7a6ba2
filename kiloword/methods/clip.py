"""CLIP: one vector per image and text, symmetric softmax. Source: arXiv:2103.00020."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kiloword.config.settings import BaseSettings, setting
from kiloword.losses.pairs import softmax_loss
from kiloword.methods.method import Component, Method
from kiloword.model.heads import Scale


@dataclass(frozen=True, kw_only=True)
class Settings(BaseSettings):
    """The scale of the cosine: its start, its limit, whether it is trained."""

    scale: float = setting(1 / 0.07, "initial scale of the cosine", initial="head.log_scale")
    max_scale: float = setting(100.0, "upper limit in training; a checkpoint's larger scale is kept")
    fixed_scale: bool = setting(False, "do not train the scale, for controlled ablations")


def preset(settings: Settings) -> Method:
    summary = "one vector per image and text, symmetric softmax"
    return softmax(Method(name="clip", source="arXiv:2103.00020", summary=summary, pair_loss=softmax_loss), settings)


def softmax(method: Method, settings: Settings) -> Method:
    """Use CLIP's loss, scale and limit; several positives of a row or column share its probability."""
    scale = Scale(settings.scale, limit=settings.max_scale, trained=not settings.fixed_scale)
    return replace(method, pair_loss=softmax_loss, scale=scale)


COMPONENTS = {"softmax": Component("pair_loss", "symmetric softmax", Settings, softmax)}
