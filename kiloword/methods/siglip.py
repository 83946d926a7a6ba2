"""SigLIP: one vector per image and text, binary classification of all pairs. Source: arXiv:2303.15343."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kiloword.config.settings import BaseSettings, setting
from kiloword.losses.pairs import sigmoid_loss
from kiloword.methods.method import Component, Method
from kiloword.model.heads import Scale


@dataclass(frozen=True, kw_only=True)
class Settings(BaseSettings):
    """The logit of a pair, scale * cosine + bias, before training."""

    scale: float = setting(10.0, "initial scale of the cosine", initial="head.log_scale")
    bias: float = setting(-10.0, "initial bias; the logit is scale * cosine + bias", initial="head.bias")


def preset(settings: Settings) -> Method:
    summary = "one vector per image and text, sigmoid over all pairs"
    return sigmoid(Method(name="siglip", source="arXiv:2303.15343", summary=summary, pair_loss=sigmoid_loss), settings)


def sigmoid(method: Method, settings: Settings) -> Method:
    """Use SigLIP's loss, scale and bias."""
    return replace(method, pair_loss=sigmoid_loss, scale=Scale(settings.scale, settings.bias))


COMPONENTS = {"sigmoid": Component("pair_loss", "binary classification of all pairs", Settings, sigmoid)}
