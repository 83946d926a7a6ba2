"""ProLIP as its authors' code computes it, for their weights. Source: arXiv:2410.18857, its public code.

Where the code differs from the paper, and so this preset from `prolip`:
- An image's class token passes the final norm twice. The code has one norm for both; here the second has weights of
  its own, equal in imported weights.
- A text's log variance is read from its projected, not normalised mean. The uncertainty token still stands in the
  text, where other tokens see it, but its own output is read by nobody.
- Texts have 64 tokens, pads among them and seen by all, then [UNC] and [CLS]: a context of 66; every position has an
  embedding. So has the image's uncertainty token, but the sum of two learned vectors is one.
- The scale starts at 1/0.07. The bottleneck has sigma where the variance belongs, masked copies lose a quarter of
  their patches rather than keep one, and the inclusion loss has eps -10 and c 1000.
- Not reproduced: one choice of patches for all images of a batch, and which images get masked copies (the first
  ones of the batch; here by place in the global batch).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, cast

from torch import Tensor, nn

from kiloword.config.recipes import ModelConfig, only
from kiloword.methods.method import Method
from kiloword.methods.prolip import preset as prolip
from kiloword.methods.prolip.gaussian import Gaussian, GaussianSettings, log_variance
from kiloword.model.blocks import Init
from kiloword.model.heads import Head, Pooling, Single, unit
from kiloword.types import Features, Texts


@dataclass(frozen=True, kw_only=True)
class Settings(prolip.Settings):
    scale: float = 1 / 0.07  # initial factor of the score
    vib_form: Literal["textbook", "released"] = "released"  # sigma where the variance belongs
    drop_patches: float = 0.25  # share of a masked copy's patches that are dropped
    c: float = 1000.0  # sharpness of the inclusion loss


def preset(settings: Settings) -> Method:
    base = prolip.preset(only(settings, prolip.Settings))

    def head(config: ModelConfig) -> Head:
        made = base.head(config)
        made.pooling = TwiceNormed(config)
        made.uncertainty = FromMean(config, only(settings, GaussianSettings))
        return made

    def shape(config: ModelConfig) -> ModelConfig:
        image, text = replace(config.image, class_token=True), replace(config.text, pad_to_context=True)
        pools = replace(config.head, image_pool="cls", text_pool="last", text_projection_bias=True)
        return base.shape(replace(config, image=image, text=text, head=pools))

    return replace(
        base,
        name="prolip-released",
        summary="prolip as its authors' code computes it, for their weights",
        head=head,
        shape=shape,
    )


class TwiceNormed(Single):
    """One vector a side; the image's class token is normed once more before its projection."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.norm = nn.LayerNorm(config.image.width, config.image.norm_eps)

    def image(self, tokens: Tensor) -> Features:
        return {"vec": unit(self.project_image_tokens(self.norm(self.image_pool(tokens))))}


class FromMean(Gaussian):
    """Gaussians whose log variance is read from the uncertainty token for images, from the mean for texts."""

    def __init__(self, config: ModelConfig, settings: GaussianSettings) -> None:
        super().__init__(config, settings)
        del self.text_log_var  # another name: the two layers cannot start from each other
        self.mean_log_var = nn.Linear(config.head.dim, config.head.dim)

    def text(self, tokens: Tensor, texts: Texts, pooling: Pooling) -> Features:
        """Packed [S, W] -> "log_var" [T, D]."""
        read = cast(Single, pooling).text_pool(tokens, texts)
        return {"log_var": log_variance(self.mean_log_var, pooling.project_text_tokens(read))}

    def initial(self) -> dict[str, Init]:
        start = Init(self.settings.log_var)
        return {"image_log_var.bias": start, "mean_log_var.bias": start}
