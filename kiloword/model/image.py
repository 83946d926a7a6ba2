"""The image tower: a vision transformer with optional class token, extra tokens, dropped and masked patches."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kiloword.config.recipes import ImageConfig
from kiloword.model.blocks import Init, Tower, as_bool, take
from kiloword.model.trunks.library import image_trunk


def grid(config: ImageConfig) -> int:
    """Height and width of the map of patches, or of the trunk's tokens."""
    return config.trunk.grid if config.trunk.name else config.size // config.patch


def extra(config: ImageConfig) -> int:
    """E, the number of tokens before the patches."""
    return int(config.class_token) + config.extra_tokens + int(config.uncertainty_token)


class ConvStem(nn.Module):
    """Strided 3x3 convolutions, then one that makes patch tokens: [I, 3, H, W] -> [I, P, W].

    Norms are per image, so that images do not depend on others of the batch.
    """

    def __init__(self, config: ImageConfig) -> None:
        super().__init__()
        patch, channels, layers = config.patch, 3, list[nn.Module]()
        for out in (config.width // 8, config.width // 4):
            if patch % 2 == 0 and patch > 2:
                layers += [nn.Conv2d(channels, out, 3, 2, 1, bias=False), nn.GroupNorm(1, out), nn.GELU()]
                patch, channels = patch // 2, out
        self.layers = nn.Sequential(*layers, nn.Conv2d(channels, config.width, patch, patch, bias=False))

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.layers(images)
        return out.flatten(2).transpose(1, 2)


class ImageTower(Tower):
    """Vision transformer: images to tokens. With a trunk, the trunk's tokens take the place of the patches.

    The first token before the trunk's map (its class token) joins the tower's class token; others are not used.
    """

    def __init__(self, config: ImageConfig) -> None:
        super().__init__()
        if not config.trunk.name and config.size < config.patch:
            raise ValueError(
                f"patch {config.patch} is larger than the image size {config.size}: choose another "
                "--model.image.patch or --model.image.size."
            )
        self.config = config
        width, places = config.width, grid(config) ** 2 + int(config.class_token)
        self.trunk = image_trunk(config.trunk) if config.trunk.name else None
        if self.trunk is not None and self.trunk.prefix != config.trunk.prefix:
            raise ValueError(
                f"the trunk {config.trunk.name} has {self.trunk.prefix} tokens before its map, not as here."
            )
        incoming = config.trunk.width if self.trunk is not None else 3 * config.patch**2
        self.patches = nn.Linear(incoming, width, bias=config.stem_bias)
        self.stem = ConvStem(config) if config.stem == "conv" and self.trunk is None else None
        self.class_token = nn.Parameter(torch.empty(width)) if config.class_token else None
        self.extra_tokens = nn.Parameter(torch.empty(config.extra_tokens, width)) if config.extra_tokens else None
        beside = config.uncertainty_blocks if config.uncertainty_token else 0
        learned = config.uncertainty_token and not beside
        self.uncertainty_token = nn.Parameter(torch.empty(width)) if learned else None
        self.mask_token = nn.Parameter(torch.empty(width)) if config.mask_token else None
        self.positions = nn.Parameter(torch.empty(places, width))  # class token first; other tokens have none
        self.pre_norm = nn.LayerNorm(width, config.norm_eps) if config.pre_norm else None
        own_class = config.class_token and not config.trunk.prefix
        self.add_blocks(config, beside, own_class or config.extra_tokens > 0 or config.uncertainty_token)

    def forward(
        self, images: Tensor, keep: Tensor | None = None, masked: Tensor | None = None, patches: bool = True
    ) -> Tensor:
        """Encode images.

        Args: images [I, 3, H, W] normalised, or tokens of the trunk [I, prefix + P, W']; keep [I, k] int64, indices of
        the patches to keep (None: all); masked [I, P] bool, the patches to replace by the mask token; patches: whether
        to return them. With a trunk, patches are places of its map, which has seen all of them.
        Returns: [I, E + P, W] (or E + k), normed: class token, extra tokens, uncertainty token, patches in the order of
        `keep`.
        """
        x = self._embed(images, keep, masked)
        if self.pre_norm is not None:
            x = self.pre_norm(x)
        before = None if patches else torch.arange(extra(self.config), device=x.device).expand(len(x), -1)
        x, beside = self.through_blocks(x, only=before)
        out: Tensor = self.norm(x)
        if beside is None:
            return out
        # the class token of the second path, or the mean of its patches, is the uncertainty token
        first, place = self.config.extra_tokens, extra(self.config) - 1
        token = beside[:, :1] if self.config.class_token else beside[:, first:].mean(1, keepdim=True)
        return torch.cat([out[:, :place], token.to(out.dtype), out[:, place:]], 1)

    def _embed(self, images: Tensor, keep: Tensor | None, masked: Tensor | None) -> Tensor:
        x, prefix = self._patches(images, keep, masked)
        first = int(self.config.class_token)
        places = self.positions[first:].expand(x.shape[0], -1, -1)
        x = x + (places if keep is None else take(places, keep))
        before = []
        if self.class_token is not None:
            learned = (self.class_token + self.positions[0]).expand(x.shape[0], 1, -1)
            before.append(learned if prefix is None else learned + prefix)
        if self.extra_tokens is not None:
            before.append(self.extra_tokens.expand(x.shape[0], -1, -1))
        if self.uncertainty_token is not None:
            before.append(self.uncertainty_token.expand(x.shape[0], 1, -1))
        return torch.cat([*(b.to(x.dtype) for b in before), x], 1) if before else x

    def _patches(self, images: Tensor, keep: Tensor | None, masked: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Patches or the trunk's map [I, P or k, W], without positions; the class token of the trunk [I, 1, W]."""
        if images.dim() == 4:
            check_pixels(images, self.config.size)
        if self.trunk is None:
            inputs, prefix = unfold(images, self.config.patch), None
        else:
            tokens, trunk, dtype = images, self.config.trunk, self.patches.weight.dtype
            if images.dim() == 4:
                tokens = self.trunk(images)
            if tokens.shape[1:] != (expected := (trunk.prefix + grid(self.config) ** 2, trunk.width)):
                raise ValueError(
                    f"tokens have shape {tuple(tokens.shape[1:])}, but the tower expects those of {trunk.name}: "
                    f"{expected}"
                )
            joins = trunk.prefix > 0 and self.class_token is not None
            # stored tokens may be of half precision
            inputs, prefix = tokens[:, trunk.prefix :].to(dtype), tokens[:, :1].to(dtype) if joins else None
        x: Tensor = self.patches(inputs if keep is None else take(inputs, keep))
        if self.stem is not None:  # added to the linear stem: convolutions alone start slowly
            unseen, used = masked, grid(self.config) * self.config.patch
            if keep is not None:
                dropped = ~as_bool(keep, inputs.shape[1])
                unseen = dropped if masked is None else dropped | masked
            seen = images[..., :used, :used]
            if unseen is not None:  # so that convolutions do not leak hidden neighbours
                seen = fold(inputs.masked_fill(unseen[..., None], 0.0), self.config.patch)
            fine = self.stem(seen)
            x = x + (fine if keep is None else take(fine, keep))
        if masked is not None:
            if self.mask_token is None:
                raise ValueError("patches are masked, but this image tower has no mask token: set config.mask_token.")
            hidden = masked if keep is None else masked.gather(1, keep)
            x = torch.where(hidden[..., None], self.mask_token.to(x.dtype), x)
        return x, None if prefix is None else self.patches(prefix)

    def initial(self) -> dict[str, Init]:
        std = self.config.init_std or self.config.width**-0.5
        names = ("positions", "class_token", "extra_tokens", "uncertainty_token", "mask_token")
        return {name: Init(std=std) for name in names if getattr(self, name) is not None}


VIT = "choose a vision transformer, such as --size b16, or omit what needs it"


def check_no_tokens(config: ImageConfig, what: str) -> None:
    """Raises: ValueError where a method gives `what` tokens beside the patches."""
    if config.class_token or config.extra_tokens or config.uncertainty_token or config.mask_token:
        raise ValueError(f"{what} has no class, extra (registers, mixture), variance or mask tokens: {VIT}.")


def check_pixels(images: Tensor, size: int) -> None:
    """Raises: ValueError for other than normalised images of this size in pixels."""
    if not images.is_floating_point() or images.shape[1:] != (3, size, size):
        raise ValueError(
            f"images are {images.dtype} of shape {tuple(images.shape[1:])}, but the tower expects normalised ones "
            f"(model.normalise) of (3, {size}, {size}): resize them, or the tower by kiloword.model.model.resize"
        )


def unfold(images: Tensor, patch: int) -> Tensor:
    """[I, 3, H, W] -> [I, P, 3 * patch^2], in the order of a strided convolution; the rest of an image is not used."""
    h, w = (size // patch * patch for size in images.shape[2:])
    return F.pixel_unshuffle(images[..., :h, :w], patch).flatten(2).transpose(1, 2).contiguous()


def fold(pixels: Tensor, patch: int) -> Tensor:
    """The inverse of `unfold` for square images."""
    side = int(pixels.shape[1] ** 0.5)
    return F.pixel_shuffle(pixels.transpose(1, 2).reshape(len(pixels), -1, side, side), patch)
