"""Image trunks: ours, and towers of timm, open_clip and transformers; from a config, and what their tokens look like.

Names come from files of strangers too: each is looked up in its library's registry and imports nothing.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from kiloword.config.recipes import TrunkConfig
from kiloword.errors import needs, suggestion
from kiloword.model.trunks.libraries import (
    check_numbers,
    kept,
    quiet,
    torchvision_ready,
    transformers,
    unfilled,
    unusable,
    without_pooling,
)
from kiloword.model.trunks.lite import VARIANTS, EfficientNetLite
from kiloword.model.trunks.trunk import Trunk
from kiloword.types import Texts

TIMM, OPEN_CLIP, HF = "timm:", "open_clip:", "hf"
HF_TYPES = ("vit", "dinov2", "dinov2_with_registers", "siglip_vision_model", "clip_vision_model")
HF_WHOLE = ("aimv2", "altclip", "blip", "chinese_clip", "clip", "clipseg", "groupvit", "metaclip_2")
ANY_SIZE = ("dinov2", "dinov2_with_registers")  # interpolate their positions to the size of an image
HEADS = ("attn_pool", "fc_norm", "head", "head_drop", "head_norm")  # parts of timm's models after their tokens
# a number that is a part of the name: `layer1.0.` and `blocks.3.`, not `bn1.`
INDEXED = re.compile(r"^(?!net\.conv1\b|.*\b(?:stem|patch_embed)\b)(.*?(?<![A-Za-z\d])\d+\.(?:(?:blocks\.)?\d+\.)?)")
INSTALL = {"timm": ("timm", "timm"), "open_clip": ("open_clip_torch", "openclip")}  # package, extra of kiloword


def image_trunk(config: TrunkConfig) -> Trunk:
    """The trunk of an image tower. Raises: ValueError for one that does not exist, or whose library is missing."""
    name = config.name
    with unusable(f"the trunk {name[:200]}"):
        if name in VARIANTS:
            return EfficientNetLite(name)
        if name.startswith(TIMM):
            return TimmVision(name.removeprefix(TIMM))
        if name.startswith(OPEN_CLIP):
            return OpenClipVision(name.removeprefix(OPEN_CLIP), config.whole)
        if name == HF:
            return HfWhole(config.config, text=False) if config.whole else HfVision(config.config)
    kinds = (*VARIANTS, "timm:NAME", "open_clip:NAME", HF)
    raise ValueError(f"the image trunk {name[:200]!r} is unknown: expected one of {', '.join(kinds)}.")


def resized_trunk(config: TrunkConfig, size: int) -> TrunkConfig:
    """The config of an image trunk for images of another size; unchanged without a trunk.

    Raises: ValueError for a trunk whose size is fixed.
    """
    return measured(config, size)[0] if config.name else config


def measured(config: TrunkConfig, size: int | None) -> tuple[TrunkConfig, int]:
    """The config of a trunk with the shape of its tokens, and the image size in pixels, without weights.

    Args: size: in pixels; None: the trunk's own. Raises: ValueError for a size that it cannot take.
    """
    with torch.device("meta"), unusable(f"the trunk {config.name[:200]}"):
        trunk = image_trunk(config)
        size = size or trunk.size
        tokens = trunk(torch.empty(1, 3, size, size))
    places = tokens.shape[1] - trunk.prefix
    side = math.isqrt(max(places, 0))
    if side < 1 or side * side != places:
        raise ValueError(f"the trunk {config.name} has {places} tokens: expected a square map of them.")
    return replace(config, width=int(tokens.shape[2]), prefix=trunk.prefix, grid=side), size


class LibraryTrunk(Trunk):
    """A trunk whose module is `net`."""

    net: Any

    def blocks(self) -> list[list[str]]:
        """Blocks by the numbers in the names of parameters; parameters without go to the first or the last block."""
        groups: dict[str, list[str]] = {}
        for name, _ in self.named_parameters():
            match = INDEXED.match(name)
            groups.setdefault(match[1] if match else next(reversed(groups), ""), []).append(name)
        stem = groups.pop("", [])
        first, *rest = groups.values() if groups else ([],)
        return [[*stem, *first], *rest]


class TimmVision(LibraryTrunk):
    """Tokens of timm's `forward_features`; a feature map [I, C, H, W] or [I, H, W, C] row by row."""

    def __init__(self, name: str) -> None:
        super().__init__()
        timm = _library("timm")
        if not timm.is_model(name):
            raise ValueError(_unknown("timm", name, timm.list_models()))
        self.net = timm.create_model(name, pretrained=False, num_classes=0)
        _behead(self.net)
        self.size = self.net.pretrained_cfg["input_size"][-1]
        self.prefix, self.width = int(getattr(self.net, "num_prefix_tokens", 0)), int(self.net.num_features)
        self.only_floats()

    def tokens(self, *inputs: Tensor) -> Tensor:
        x: Tensor = self.net.forward_features(inputs[0])
        if x.dim() == 3:
            return x
        return x.flatten(2).transpose(1, 2) if x.shape[1] == self.width else x.flatten(1, 2)


class OpenClipVision(LibraryTrunk):
    """Tokens of open_clip's vision transformers, after the last norm; of a model with a tower of timm, the tower's.

    Args: whole: the one vector of any image tower in place of its tokens.
    """

    def __init__(self, name: str, whole: bool = False) -> None:
        super().__init__()
        config = open_clip_config(name)
        from open_clip.model import _build_vision_tower

        vision = {**config["vision_cfg"], "timm_model_pretrained": False}
        net = self.net = _build_vision_tower(config["embed_dim"], vision, bool(config.get("quick_gelu", False)))
        self.whole, self.timm, self.size = whole, hasattr(net, "trunk"), int(vision.get("image_size", 224))
        self.prefix = int(getattr(net.trunk, "num_prefix_tokens", 0)) if self.timm else 1
        if whole:
            self.prefix = 0
        elif self.timm:
            net.head = nn.Identity()
            _behead(net.trunk)
        elif not hasattr(net, "transformer"):
            raise ValueError(f"open_clip's {name} has a ResNet: import it whole, kiloword import open_clip {name}.")
        else:
            net.proj = net.attn_pool = None
        self.only_floats()

    def tokens(self, *inputs: Tensor) -> Tensor:
        if self.whole:
            vectors: Tensor = self.net(inputs[0])
            return vectors[:, None]
        if self.timm:
            x: Tensor = self.net.trunk.forward_features(inputs[0])
            return x if x.dim() == 3 else x.flatten(2).transpose(1, 2)
        tokens: Tensor = self.net.ln_post(self.net.transformer(self.net._embeds(inputs[0])))
        return tokens


class OpenClipText(LibraryTrunk):
    """The one vector of a text by open_clip's text tower, at its last place; the others are 0."""

    def __init__(self, name: str) -> None:
        super().__init__()
        config = open_clip_config(name)
        from open_clip.model import _build_text_tower

        text = {**config["text_cfg"], "hf_model_pretrained": False}
        import huggingface_hub.constants as hub

        before = hub.HF_HUB_OFFLINE
        hub.HF_HUB_OFFLINE = True  # a text tower of transformers has its config in the cache
        try:
            self.net = _build_text_tower(config["embed_dim"], text, bool(config.get("quick_gelu", False)))
        finally:
            hub.HF_HUB_OFFLINE = before
        self.only_floats()

    def tokens(self, *inputs: Any) -> Tensor:
        texts = inputs[0]
        return _at_ends(self.vectors(texts.ids.view(len(texts), -1).long()), texts)

    def vectors(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Padded ids [T, L] to [T, D]. Args: mask: of texts without pads; not used."""
        vectors: Tensor = self.net(ids)
        return vectors


class HfVision(LibraryTrunk):
    """`last_hidden_state` of an image tower of transformers: ViT, DINOv2, SigLIP's and CLIP's vision towers."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Args: config: as config.json of transformers. Raises: ValueError for other models, and beyond all limits."""
        super().__init__()
        self.net = without_pooling(hf_model({**config, "vision_use_head": False}, HF_TYPES))
        made = self.net.config
        self.size = int(made.image_size)
        self.prefix = int(made.model_type != "siglip_vision_model") + int(getattr(made, "num_register_tokens", 0))
        self.only_floats()

    def tokens(self, *inputs: Tensor) -> Tensor:
        tokens: Tensor = self.net(pixel_values=inputs[0]).last_hidden_state
        return tokens


class HfWhole(LibraryTrunk):
    """The one vector of an image, or of a text at its last place, by a model of transformers for both.

    Args: config: of the model, as config.json of transformers; text: its text tower in place of its image tower.
    Raises: ValueError for other models, and beyond all limits.
    """

    def __init__(self, config: Mapping[str, Any], text: bool) -> None:
        super().__init__()
        self.net, self.text = hf_model(config), text
        self.size = self.net.config.vision_config.image_size
        self.pad = int(self.net.config.text_config.pad_token_id or 0)
        for name in {n.partition(".")[0] for n, _ in self.net.named_parameters()}:
            if name.startswith("text_") != text or name.startswith("logit_"):
                delattr(self.net, name)
        self.only_floats()

    def tokens(self, *inputs: Any) -> Tensor:
        if not self.text:
            return _vectors(self.net.get_image_features(pixel_values=inputs[0]))[:, None]
        texts, packing = inputs
        return _at_ends(self.vectors(packing.pad(texts.ids, self.pad), packing.valid), texts)

    def vectors(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Padded ids [T, L], and which are no pads, to [T, D]."""
        return _vectors(self.net.get_text_features(input_ids=ids.long(), attention_mask=mask.long()))


def hf_model(config: Mapping[str, Any], types: tuple[str, ...] = HF_WHOLE) -> Any:
    """A model of transformers without initial values. Raises: ValueError as `check_hf`."""
    check_hf(config, types)
    library = transformers()
    made = library.AutoConfig.for_model(**kept(dict(config)))
    with quiet(library), unfilled():
        return library.AutoModel.from_config(made, trust_remote_code=False)


def _vectors(out: Any) -> Tensor:
    vectors: Tensor = getattr(out, "pooler_output", out)  # of transformers 5, or of 4
    return vectors


def _at_ends(vectors: Tensor, texts: Texts) -> Tensor:
    """Vectors [T, D] at the last places of texts, [S, D]; the others are 0."""
    return vectors.new_zeros(len(texts.ids), vectors.shape[1]).index_copy(0, texts.starts[1:].long() - 1, vectors)


def open_clip_config(name: str) -> dict[str, Any]:
    """The configuration of open_clip's model `name`. Raises: ValueError for a name that it does not know."""
    library = _library("open_clip")
    if name not in library.list_models():
        raise ValueError(_unknown("open_clip", name, library.list_models()))
    config: dict[str, Any] = library.get_model_config(name)
    return config


def check_hf(config: Mapping[str, Any], types: tuple[str, ...] = HF_TYPES) -> None:
    """Raises: ValueError for a model of transformers of another type, and for numbers beyond all limits."""
    kind = str(config.get("model_type"))[:200]
    if kind not in types:
        raise ValueError(f"the model of transformers is a {kind!r}: expected one of {', '.join(types)}.")
    check_numbers(dict(config), f"the config of {kind}")


def _library(name: str) -> Any:
    """timm or open_clip. Raises: ValueError where it is not installed."""
    if importlib.util.find_spec(name) is None:
        raise ValueError(needs(f"a tower of {name}", *INSTALL[name]))
    torchvision_ready()
    return importlib.import_module(name)


def _unknown(library: str, name: str, known: list[str]) -> str:
    expected = f"expected one of {library}.list_models()"
    return f"{library} has no model {name[:200]!r}: {expected}.{suggestion(name, known)}"


def _behead(net: nn.Module) -> None:
    """Remove the parts of a model of timm after its tokens."""
    for part in HEADS:
        if isinstance(getattr(net, part, None), nn.Module):
            setattr(net, part, nn.Identity())
