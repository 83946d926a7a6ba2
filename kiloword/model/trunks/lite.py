"""EfficientNet-Lite as a trunk: its last feature map as tokens (arXiv:1905.11946; the Lite variants of its authors)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kiloword.model.trunks.trunk import Trunk

WIDTH, EPS = 1280, 1e-3
STEM = 32
STAGES = (  # repeats, kernel, stride, expansion, channels: of EfficientNet-B0
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)


@dataclass(frozen=True)
class Variant:
    """How much wider and deeper than Lite0 a variant is, and the size of the images of its training."""

    wider: float
    deeper: float
    size: int


DEBUG = "efficientnet-debug"  # as size debug: for tests, with random weights
VARIANTS = {
    "efficientnet-lite0": Variant(1.0, 1.0, 224),
    "efficientnet-lite2": Variant(1.1, 1.2, 260),
    DEBUG: Variant(0.25, 0.3, 64),
}


class EfficientNetLite(Trunk):
    """Normalised images [I, 3, H, W] to the last feature map [I, P, 1280], after the convolution of the head.

    No squeeze and excitation, ReLU6, and the padding of TensorFlow: where a stride leaves an odd number of places, the
    odd one is at the end. Stem, head, first and last stage are as in Lite0 in all variants, apart from their width.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        variant, before, layers = VARIANTS[name], STEM, list[InvertedBottleneck]()
        self.size = variant.size
        self.conv_stem = nn.Conv2d(3, STEM, 3, 2, bias=False)
        self.bn0 = nn.BatchNorm2d(STEM, EPS)
        for n, (repeats, kernel, stride, expansion, channels) in enumerate(STAGES):
            inner = 0 < n < len(STAGES) - 1
            wanted = channels * variant.wider
            after = max(8, int(wanted + 4) // 8 * 8)  # the nearest multiple of 8, or the next, not a tenth below
            after += 8 * (after < 0.9 * wanted)
            for m in range(math.ceil(repeats * variant.deeper) if inner else repeats):
                layers.append(InvertedBottleneck(before, after, kernel, 1 if m else stride, expansion))
                before = after
        self.layers = nn.ModuleList(layers)
        self.conv_head = nn.Conv2d(before, WIDTH, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(WIDTH, EPS)
        self.only_floats()

    def tokens(self, *inputs: Tensor) -> Tensor:
        images = inputs[0].contiguous(memory_format=torch.channels_last)  # 1.5 times faster on a CPU
        x = F.relu6(normed(self.conv_stem, self.bn0, images), inplace=True)
        for layer in self.layers:
            x = layer(x)
        x = F.relu6(normed(self.conv_head, self.bn1, x), inplace=True)
        return x.flatten(2).transpose(1, 2)

    def blocks(self) -> list[list[str]]:
        layers = [[f"layers.{n}."] for n in range(len(self.layers))]
        return [["conv_stem.", "bn0.", *layers[0]], *layers[1:], ["conv_head.", "bn1."]]


class InvertedBottleneck(nn.Module):
    """Inverted bottleneck: expand, filter each channel, project; with a shortcut where the shape stays."""

    def __init__(self, before: int, after: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        inner = before * expansion
        self.shortcut = stride == 1 and before == after
        self.expand_conv = nn.Conv2d(before, inner, 1, bias=False) if expansion > 1 else None
        self.bn0 = nn.BatchNorm2d(inner, EPS) if expansion > 1 else None
        self.depthwise_conv = nn.Conv2d(
            inner, inner, kernel, stride, padding=kernel // 2 if stride == 1 else 0, groups=inner, bias=False
        )
        self.bn1 = nn.BatchNorm2d(inner, EPS)
        self.project_conv = nn.Conv2d(inner, after, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(after, EPS)

    def forward(self, x: Tensor) -> Tensor:
        y = x
        if self.expand_conv is not None and self.bn0 is not None:
            y = F.relu6(normed(self.expand_conv, self.bn0, y), inplace=True)
        y = F.relu6(normed(self.depthwise_conv, self.bn1, y), inplace=True)
        out = normed(self.project_conv, self.bn2, y)
        return x + out if self.shortcut else out


def normed(convolution: nn.Conv2d, norm: nn.BatchNorm2d, x: Tensor) -> Tensor:
    """A convolution, then batch norm with its running statistics, in place where no gradient is needed.

    Padding is TensorFlow's "SAME": output places are ceil(places / stride).
    """
    size, (kernel, _), (stride, _) = x.shape[-1], convolution.kernel_size, convolution.stride  # all are square
    missing = (math.ceil(size / stride) - 1) * stride + kernel - size - 2 * int(convolution.padding[0])
    pads = (missing // 2, missing - missing // 2) * 2
    y: Tensor = convolution(F.pad(x, pads) if missing > 0 else x)
    if torch.is_grad_enabled():
        return norm(y)  # type: ignore[no-any-return]
    mean, var = norm.running_mean, norm.running_var
    assert mean is not None
    assert var is not None
    scale = norm.weight * (var + norm.eps).rsqrt()
    shift = norm.bias - mean * scale
    return torch.addcmul(shift[:, None, None], y, scale[:, None, None].to(y.dtype), out=y)
