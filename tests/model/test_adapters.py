"""LoRA: what adapters compute and start as, which layers they join, what is trained, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kiloword.config.recipes import LoraConfig
from kiloword.methods.registry import preset
from kiloword.model.adapters import LowRank, attach, merge
from kiloword.model.model import Model, initialise
from kiloword.model.trunks.lite import EfficientNetLite
from kiloword.models.adapters import merged
from kiloword.models.build import build
from kiloword.verify.batch import batch, config

BOTH = ("image", "text")


def model(method: str = "siglip") -> Model:
    return build(config(), preset(method), seed=0).double()


def adapted(*targets: str, method: str = "siglip", rank: int = 3, **more: Any) -> Model:
    made = model(method)
    attach(made, LoraConfig(rank=rank, targets=targets), 0, BOTH, **more)
    return made


def moved(made: nn.Module) -> nn.Module:
    """With adapters as after training: B is no longer 0."""
    generator = torch.Generator().manual_seed(1)
    for name, p in made.named_parameters():
        if name.endswith(".lora.b"):
            p.data = 0.1 * torch.randn(p.shape, generator=generator, dtype=p.dtype)
    return made


def features(made: Model) -> list[Tensor]:
    data = batch()
    with torch.no_grad():
        return [made.encode_image(data.images)[1]["vec"], made.encode_text(data.texts)[1]["vec"]]


def low_rank(layer: Any, *how: Any, **more: Any) -> Any:
    """With factors drawn; `attach` would initialise them."""
    lora: Any = LowRank(layer, *how, **more)
    for factor in (lora.a, lora.b):
        nn.init.normal_(factor)
    return lora


def test_a_fused_projection_has_an_adapter_for_each_matrix() -> None:
    """Equation 3 for q, k and v, one after the other: W x + alpha / r B A x."""
    layer, alpha, rank = nn.Linear(8, 24).double(), 5.0, 2
    lora = low_rank(layer, rank, alpha, stacked=3)
    x = torch.randn(4, 7, 8, dtype=torch.float64)
    outputs = []
    for n in range(3):
        a, b = lora.a[n * rank : (n + 1) * rank], lora.b[n * 8 : (n + 1) * 8]
        rows = slice(n * 8, (n + 1) * 8)
        outputs.append(x @ layer.weight[rows].T + layer.bias[rows] + alpha / rank * (x @ a.T) @ b.T)
    torch.testing.assert_close(layer(x) + lora(x), torch.cat(outputs, -1), rtol=1e-12, atol=1e-12)
    whole = F.linear(x, merge(layer.weight, lora.a, lora.b, lora.scale), layer.bias)
    torch.testing.assert_close(layer(x) + lora(x), whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("stride", [1, 2])
def test_a_convolution_of_one_pixel(stride: int) -> None:
    layer = nn.Conv2d(6, 10, 1, stride).double()
    lora, x = low_rank(layer, 2, 4.0), torch.randn(3, 6, 5, 5, dtype=torch.float64)
    whole = F.conv2d(x, merge(layer.weight, lora.a, lora.b, lora.scale), layer.bias, stride)
    torch.testing.assert_close(layer(x) + lora(x), whole, rtol=1e-12, atol=1e-12)


def test_a_model_with_adapters_starts_as_its_base() -> None:
    """Bit for bit; A is drawn, B is 0, by the seed and their names alone."""
    before, made, other = model(), adapted("qkv,out"), adapted("qkv", "image:fc")
    for a, b in zip(features(before), features(made), strict=True):
        assert torch.equal(a, b)
    drawn, same = made.state_dict(), other.state_dict()
    name = "text_tower.blocks.1.attention.qkv.lora"
    assert torch.equal(drawn[f"{name}.a"], same[f"{name}.a"])
    assert 0.5 < float(drawn[f"{name}.a"].std() * 32**0.5) < 1.5
    assert not drawn[f"{name}.b"].any()
    assert {k: v.shape for k, v in drawn.items() if "lora" not in k} == {
        k: v.shape for k, v in before.state_dict().items()
    }


@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-12), (torch.float32, 3e-6)])
def test_merged_equals_unmerged(dtype: torch.dtype, close: float) -> None:
    made: Any = moved(adapted("qkv,out,fc,proj")).to(dtype)
    whole = model().to(dtype)
    whole.load_state_dict(merged(made.state_dict()))
    for a, b, start in zip(features(made), features(whole), features(model().to(dtype)), strict=True):
        assert float((a - b).abs().max()) < close
        assert float((a - start).abs().max()) > 0.01


QKV = [f"{tower}_tower.blocks.{n}.attention.{x}" for tower in BOTH for n in (0, 1) for x in ("qkv", "out")]
MLP = [f"text_tower.blocks.{x}" for x in ("0.mlp.proj", "1.mlp.proj", "1.mlp.fc")]


def trained_of(made: nn.Module) -> set[str]:
    return {name for name, p in made.named_parameters() if p.requires_grad}


@pytest.mark.parametrize(
    ("targets", "layers", "frozen"),
    [
        (("qkv,out",), QKV, BOTH),
        (("image:1:qkv",), ["image_tower.blocks.1.attention.qkv"], ("image",)),
        (("text:0-1:mlp.proj", "text:1:fc"), MLP, ("text",)),
    ],
)
def test_exactly_these_are_trained(targets: tuple[str, ...], layers: list[str], frozen: tuple[str, ...]) -> None:
    """Adapters, the head, and towers that have none."""
    trained = trained_of(adapted(*targets))
    others = {n for n in dict(model().named_parameters()) if not n.startswith(tuple(f"{t}_tower." for t in frozen))}
    assert trained == {f"{layer}.lora.{x}" for layer in layers for x in "ab"} | others
    llip = trained_of(adapted("image:qkv", method="llip", new=["image_tower.extra_tokens"]))  # mixture tokens, too
    assert {n for n in llip if n.startswith("image_tower.") and "lora" not in n} == {"image_tower.extra_tokens"}


class Trunk(nn.Module):
    """A tower of another library: its names, torch's attention, a CNN's layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 8, 4, 4)
        self.layer = nn.ModuleList(nn.ModuleDict({"query": nn.Linear(8, 8), "norm": nn.LayerNorm(8)}) for _ in range(3))
        self.attn = nn.MultiheadAttention(8, 2)
        self.point = nn.Conv2d(8, 16, 1)
        self.depthwise = nn.Conv2d(8, 8, 1, groups=8)

    def blocks(self) -> list[list[str]]:
        return [["embed", "layer.0"], ["layer.1"], ["layer.2", "attn", "point", "depthwise"]]


def with_trunk(*targets: str) -> Any:
    made: Any = model().float()
    made.image_tower.trunk = Trunk()
    attach(made, LoraConfig(rank=2, targets=targets), 0, ["image"])
    return made


def test_adapters_of_a_trunk_leave_the_top_to_train() -> None:
    trained = trained_of(with_trunk("1-2:query", "point"))
    assert {name.rpartition(".lora")[0] for name in trained if ".trunk." in name} == {
        f"image_tower.trunk.{layer}" for layer in ("layer.1.query", "layer.2.query", "point")
    }
    assert {name for name in trained if ".trunk." not in name} == set(dict(model().named_parameters()))


def test_adapters_of_efficientnet() -> None:
    """Its blocks by number; merged as unmerged; gradients of adapters alone, though the trunk is frozen."""
    made: Any = model().float()
    trunk, plain = EfficientNetLite("efficientnet-lite0"), EfficientNetLite("efficientnet-lite0")
    made.image_tower.trunk = trunk
    initialise(trunk, 0)
    attach(made, LoraConfig(rank=2, targets=("image:1-2:expand_conv", "conv_head")), 0, ["image"])
    moved(trunk)
    plain.load_state_dict(merged(trunk.state_dict()))
    images = torch.randn(2, 3, 64, 64)
    out = trunk(images)
    torch.testing.assert_close(out, plain(images), rtol=1e-4, atol=1e-4)
    out.sum().backward()  # type: ignore[no-untyped-call]
    layers = ("layers.1.expand_conv", "layers.2.expand_conv", "conv_head")
    assert {n for n, p in trunk.named_parameters() if p.grad is not None} == {
        f"{x}.lora.{ab}" for x in layers for ab in "ab"
    }


@pytest.mark.parametrize(
    ("make", "target", "word"),
    [
        (adapted, "qvk", "Did you mean qkv?"),
        (adapted, "qkv,norm1", "'norm1'"),
        (adapted, "text:patches", "fc, out, proj, qkv"),
        (adapted, "image:2:query", "'query'"),
        (adapted, "img:qkv", "expected"),
        (adapted, "image:", "expected"),
        # torch's attention, layers of other kinds, blocks beyond the last one, a tower of random weights
        *((with_trunk, target, "targets") for target in ("attn.out_proj", "embed", "depthwise", "3:query", "text:qkv")),
    ],
)
def test_refused(make: Callable[[str], Any], target: str, word: str) -> None:
    with pytest.raises(ValueError, match="targets") as error:
        make(target)
    assert word in str(error.value)
