"""ProLIP as in its authors' code, for their released weights. Source: arXiv:2410.18857, its public code.

Differences between that code and the paper, and so between this preset and `prolip`:
- The class token of an image passes the final norm twice. The code shares one norm; here the second norm has separate
  weights, which are equal after import.
- The log variance of a text is computed from its projected mean before normalisation. The uncertainty token is part of
  the text and attended to by other tokens, but its output is not used.
- Texts have 64 tokens including pads, which all tokens attend to, then [UNC] and [CLS]: a context of 66; every position
  has an embedding. The code also gives the image's uncertainty token one; here the two are summed in one parameter.
- The scale starts at 1/0.07. The bottleneck uses sigma in place of the variance, masked copies drop a quarter of their
  patches, and the inclusion loss has eps -10 and c 1000.
- Not reproduced: the code drops the same patches for all images of a batch, and makes masked copies of the first images
  of a batch (here: by position in the global batch).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, cast

from torch import Tensor, nn

from kiloword.config.recipes import ModelConfig
from kiloword.config.settings import ABOVE_0, setting
from kiloword.methods.method import Method, Part
from kiloword.methods.prolip import preset as prolip
from kiloword.methods.prolip.gaussian import Gaussian, GaussianSettings, log_variance
from kiloword.model.heads import Pooling, Single, unit
from kiloword.types import Features, Texts


@dataclass(frozen=True, kw_only=True)
class Settings(prolip.Settings):
    """ProLIP's settings where the authors' code differs from the paper."""

    scale: float = setting(1 / 0.07, "initial scale of the score", initial="head.log_scale")
    vib_form: Literal["textbook", "released"] = setting("released", "released: sigma instead of the variance")
    drop_patches: float = setting(0.25, "share of patches dropped from a masked copy", 0, 1)
    c: float = setting(1000.0, "sharpness of the inclusion loss", ABOVE_0)


def preset(settings: Settings) -> Method:
    """ProLIP as its authors' code computes it: twice normalised means, variances from means."""
    base = prolip.preset(settings)

    def towers(config: ModelConfig) -> ModelConfig:
        image, text = replace(config.image, class_token=True), replace(config.text, pad_to_context=True)
        pools = replace(config.head, image_pool="cls", text_pool="last", text_projection_bias=True)
        return base.towers(replace(config, image=image, text=text, head=pools))

    return replace(
        base,
        name="prolip-released",
        summary="prolip as in its authors' code, for their weights",
        pooling=Part(TwiceNormalised),
        uncertainty=Part(FromMean, settings),
        towers=towers,
    )


class TwiceNormalised(Single):
    """One vector per image and text; a second norm of the image's class token before its projection."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.norm = nn.LayerNorm(config.image.width, config.image.norm_eps)

    def image(self, tokens: Tensor) -> Features:
        return {"vec": unit(self.project_image_tokens(self.norm(self.pooled(tokens))))}


class FromMean(Gaussian):
    """Gaussians with log variances from the uncertainty token (images) and from the mean (texts)."""

    def __init__(self, config: ModelConfig, settings: GaussianSettings) -> None:
        super().__init__(config, settings)
        del self.text_log_var  # renamed below: initial values are keyed by name, and the shapes differ
        self.mean_log_var = nn.Linear(config.head.dim, config.head.dim)

    def text(self, tokens: Tensor, texts: Texts, pooling: Pooling) -> Features:
        """Packed [S, W] -> "log_var" [T, D]."""
        read = cast(Single, pooling).text_pool(tokens, texts)
        return {"log_var": log_variance(self.mean_log_var, pooling.project_text_tokens(read))}
