"""The image tower as a ResNet: CLIP's modified one, and torchvision's (v1.5); with batch norm over all ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kiloword.config.recipes import ImageConfig
from kiloword.distributed.collectives import ranks
from kiloword.distributed.gather import gather_one_row
from kiloword.model.blocks import Init, Unit
from kiloword.model.image import VIT, check_no_tokens, check_pixels

STRIDE = 32  # pixels of an output position, which is a patch to all other code
STAGES = {  # depth -> blocks of the four stages
    4: (1, 1, 1, 1),
    16: (3, 4, 6, 3),
    26: (4, 6, 10, 6),
    33: (3, 4, 23, 3),
    40: (6, 8, 18, 8),
    64: (3, 15, 36, 10),
}
EXPANSION = 4  # channels of a block's output, over those of its 3x3 convolution
MOMENTUM, EPS = 0.1, 1e-5  # as torch's batch norm


class BatchNorm(nn.Module):
    """Batch norm over the images of all ranks: a result does not depend on how a batch is dealt to them.

    In training mode it uses the statistics of the batch, where the weight is trained, and elsewhere the running ones.
    `commit` adds those of the last pass to the running ones, so that a skipped step leaves them.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels))
        self.bias = nn.Parameter(torch.empty(channels))
        # with storage where parameters get none, as no rule fills it later
        self.register_buffer("running_mean", torch.zeros(channels, device="cpu"))
        self.register_buffer("running_var", torch.ones(channels, device="cpu"))
        self.last: Tensor | None = None  # mean and unbiased variance [2, C] of the last pass with statistics of a batch

    def forward(self, x: Tensor) -> Tensor:
        """[I, C, H, W] -> the same."""
        mean, var = self.running_mean, self.running_var
        if not (self.training and self.weight.requires_grad):
            return F.batch_norm(x, mean, var, self.weight, self.bias, False, 0.0, EPS)
        if ranks() > 1:
            return self._over_ranks(x)
        self.last = torch.zeros(2, len(mean), dtype=mean.dtype, device=mean.device)
        return F.batch_norm(x, self.last[0], self.last[1], self.weight, self.bias, True, 1.0, EPS)

    def _over_ranks(self, x: Tensor) -> Tensor:
        values = x.to(torch.promote_types(x.dtype, self.weight.dtype))
        var, mean = torch.var_mean(values, (0, 2, 3), correction=0)
        means, variances = gather_one_row(torch.stack([mean, var])).unbind(1)  # each rank has as many images
        mean, var = means.mean(0), variances.mean(0) + means.var(0, correction=0)
        n = ranks() * values.numel() / len(mean)
        self.last = torch.stack([mean, var * n / (n - 1)]).detach()
        scale = self.weight * (var + EPS).rsqrt()
        out = values * scale[:, None, None] + (self.bias - mean * scale)[:, None, None]
        return out.to(x.dtype)

    def initial(self) -> dict[str, Init]:
        return {"weight": Init(1.0), "bias": Init()}


def statistics(module: nn.Module) -> dict[str, Tensor]:
    """Running statistics of all batch norms, by name of the buffer."""
    parts = [(name, part) for name, part in module.named_modules() if isinstance(part, BatchNorm)]
    return {buffer: x for name, norm in parts for buffer, x in norm.named_buffers(name)}


@torch.no_grad()
def commit(module: nn.Module, skipped: Tensor) -> None:
    """After a training step: move running statistics toward the last pass. Args: skipped: scalar, 1: leave them."""
    for norm in module.modules():
        if isinstance(norm, BatchNorm) and norm.last is not None:
            for running, last in zip(norm.buffers(), norm.last, strict=True):
                running.copy_(torch.where(skipped > 0, running, running.lerp(last, MOMENTUM)))
            norm.last = None


class Bottleneck(Unit):
    """1x1, 3x3 and 1x1 convolutions and a shortcut.

    Args: pooled: average pooling in place of strided convolutions (CLIP's), so that shifts move the output smoothly.
    """

    def __init__(self, before: int, channels: int, stride: int, pooled: bool) -> None:
        super().__init__()
        out, step = channels * EXPANSION, 1 if pooled else stride
        self.conv1 = nn.Conv2d(before, channels, 1, bias=False)
        self.bn1 = BatchNorm(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, step, 1, bias=False)
        self.bn2 = BatchNorm(channels)
        self.pool = nn.AvgPool2d(stride) if pooled and stride > 1 else nn.Identity()
        self.conv3 = nn.Conv2d(channels, out, 1, bias=False)
        self.bn3 = BatchNorm(out)
        self.downsample = None
        if stride > 1 or before != out:
            self.downsample = nn.Sequential(nn.Conv2d(before, out, 1, step, bias=False), BatchNorm(out))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.pool(F.relu(self.bn2(self.conv2(y))))
        y = self.bn3(self.conv3(y))
        shortcut = x if self.downsample is None else self.downsample(self.pool(x))
        return F.relu(y + shortcut)

    def initial(self) -> dict[str, Init]:
        return {"bn3.weight": Init()}  # a block begins as its shortcut (arXiv:1706.02677)


class ResNet(nn.Module):
    """Images to the positions of the last feature map, as patches of 32 pixels; no other tokens.

    CLIP's has a stem of three convolutions and average pooling where others stride (arXiv:2103.00020, section 2.4);
    its attention pooling is `pooling.AttentionPool`. The plain one is torchvision's, v1.5 (arXiv:1512.03385): it
    strides in the 3x3 convolution.
    """

    def __init__(self, config: ImageConfig) -> None:
        super().__init__()
        check(config)
        self.config = config
        clip, width = config.tower == "clip-resnet", config.width // STRIDE
        thirds = [(3, width // 2, 2), (width // 2, width // 2, 1), (width // 2, width, 1)]
        convolutions = [nn.Conv2d(a, b, 3, stride, 1, bias=False) for a, b, stride in thirds]
        if not clip:
            convolutions = [nn.Conv2d(3, width, 7, 2, 3, bias=False)]
        self.stem = nn.ModuleList(convolutions)
        self.stem_norms = nn.ModuleList(BatchNorm(convolution.out_channels) for convolution in convolutions)
        self.pool = nn.AvgPool2d(2) if clip else nn.MaxPool2d(3, 2, 1)
        self.stages, before = nn.ModuleList(), width
        for n, depth in enumerate(STAGES[config.depth]):
            channels, blocks = width << n, nn.ModuleList()
            for block in range(depth):
                blocks.append(Bottleneck(before, channels, 2 if n and not block else 1, clip))
                before = channels * EXPANSION
            self.stages.append(blocks)

    def forward(self, images: Tensor, keep: Tensor | None = None, masked: Tensor | None = None) -> Tensor:
        """Images [I, 3, H, W], normalised, to [I, P, W]. Raises: ValueError for dropped or masked patches."""
        if keep is not None or masked is not None:
            raise ValueError(f"a ResNet cannot drop or mask patches: {VIT}.")
        check_pixels(images, self.config.size)
        x = images
        for convolution, norm in zip(self.stem, self.stem_norms, strict=True):
            x = F.relu(norm(convolution(x)))
        x = self.pool(x)
        for stage in self.stages:
            for block in stage:  # type: ignore[attr-defined]
                x = block(x)
        out: Tensor = x.flatten(2).transpose(1, 2)
        return out


def check(config: ImageConfig) -> None:
    """Raises: ValueError for a shape that no ResNet has, or a method that needs tokens of a transformer."""
    check_no_tokens(config, "a ResNet")
    if config.depth not in STAGES or config.patch != STRIDE or config.width % (2 * STRIDE) or config.size % STRIDE:
        raise ValueError(
            f"depth {config.depth}, patch {config.patch}, width {config.width} and size {config.size} are not those of "
            f"a ResNet: one of {', '.join(map(str, STAGES))}; {STRIDE}; multiples of {2 * STRIDE} and {STRIDE}."
        )


def check_vit(config: ImageConfig, what: str) -> None:
    """Raises: ValueError where the image tower is no transformer of kiloword. Args: what: needs one."""
    if config.tower != "vit" or config.trunk.whole:
        other = f"{config.trunk.name}, used whole" if config.trunk.whole else "a ResNet"
        raise ValueError(f"{what} needs a vision transformer, but this image tower is {other}.")
