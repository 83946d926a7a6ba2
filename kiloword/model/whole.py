"""Towers of another library, used whole: an image or a text is the one vector that this library gives it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from kiloword.config.recipes import ImageConfig, TextConfig
from kiloword.model.attention import Packing
from kiloword.model.image import check_no_tokens, check_pixels
from kiloword.model.text import TextTower
from kiloword.model.trunks.library import image_trunk
from kiloword.model.trunks.padded import text_trunk
from kiloword.types import Texts


class WholeImage(nn.Module):
    """An image is one token, the trunk's vector. Raises: ValueError for tokens that the trunk does not have."""

    def __init__(self, config: ImageConfig) -> None:
        super().__init__()
        check_no_tokens(config, f"{config.trunk.name}, used whole,")
        self.config, self.trunk = config, image_trunk(config.trunk)

    def forward(self, images: Tensor, keep: Tensor | None = None, masked: Tensor | None = None) -> Tensor:
        """Images [I, 3, H, W], normalised, or their stored vectors, to [I, 1, W]. Raises: ValueError for masks."""
        if keep is not None or masked is not None:
            raise ValueError(
                f"{self.config.trunk.name}, used whole, hides no patches: omit that (--settings.masked 0)."
            )
        if images.dim() == 3:
            return images
        check_pixels(images, self.config.size)
        vectors: Tensor = self.trunk(images)
        return vectors


class WholeText(TextTower):
    """The last token of a text is the trunk's vector, the others are 0; texts are padded to the context."""

    trunk: Any

    def __init__(self, config: TextConfig) -> None:
        nn.Module.__init__(self)  # nothing of its own
        if config.extra_tokens:
            raise ValueError(f"{config.trunk.name} is used whole: it has no extra tokens.")
        self.config, self.trunk = config, text_trunk(config)

    def forward(self, texts: Texts) -> Tensor:
        """[S, W]."""
        tokens = self.with_tokens(texts).tokens
        assert tokens is not None
        return tokens

    def packing(self, texts: Texts) -> Packing:
        """Packing of texts."""
        return Packing.of(texts)
