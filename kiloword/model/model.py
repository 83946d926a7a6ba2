"""The model: two towers and a head."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kiloword.config.recipes import EncoderPrecision, ImageConfig, ModelConfig, TextConfig
from kiloword.distributed.device import precision_of
from kiloword.model.blocks import Init
from kiloword.model.encoding import chunks, rows
from kiloword.model.heads import Head, Single
from kiloword.model.image import ImageTower, grid
from kiloword.model.pooling import at_least_float
from kiloword.model.resnet import ResNet, check_vit
from kiloword.model.text import TextTower
from kiloword.model.trunks.library import resized_trunk
from kiloword.model.whole import WholeImage, WholeText
from kiloword.randomness import key
from kiloword.types import Features, Texts


class Model(nn.Module):
    """Computes features of images and texts, and their scores.

    Args: more: additional towers of the method (decoders); saved and sharded like the image and text tower. bare: build
    the image and text tower without storage.
    Attributes: precision: compute precision of the towers, "fp32" (the type of the weights) or "bf16" (autocast, with
    fp32 outputs); not used in training, which has autocast around the whole step.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self, config: ModelConfig, head: Head, more: Mapping[str, nn.Module] | None = None, bare: bool = False
    ) -> None:
        super().__init__()
        self.config = config
        self.precision: EncoderPrecision = "fp32"
        with storage(bare):
            image = WholeImage if config.image.trunk.whole else ImageTower if config.image.tower == "vit" else ResNet
            self.image_tower = image(config.image)
            self.text_tower = WholeText(config.text) if config.text.trunk.whole else TextTower(config.text)
        self.head = head
        self.more = nn.ModuleDict(more or {})
        self.register_buffer("mean", torch.tensor(config.preprocess.mean).view(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(config.preprocess.std).view(3, 1, 1), persistent=False)

    def normalise(self, images: Tensor) -> Tensor:
        """uint8 [I, 3, H, W] -> float, normalised with the mean and deviation of the configuration."""
        if images.is_floating_point() and images.dim() == 3 and self.config.image.trunk.name:
            raise ValueError(
                f"these are tokens of {self.config.image.trunk.name}, which batch.images are above a trunk: "
                "model.image_tokens takes them. A loss that needs pixels refuses a config.image.trunk.name."
            )
        if images.dtype != torch.uint8:
            raise ValueError(f"images must be uint8 in [0, 255], not {images.dtype}; the model normalises them itself")
        mean, std = map(at_least_float, (self.mean, self.std))
        return ((images.to(mean.dtype) / 255 - mean) / std).to(self.mean.dtype)

    def encode_image(
        self, images: Tensor, keep: Tensor | None = None, masked: Tensor | None = None, patches: bool = True
    ) -> tuple[Tensor, Features]:
        """Tokens [I, E + P, W] and features of uint8 images; other arguments as of `ImageTower`."""
        tokens = self.image_tokens(images, keep, masked, patches)
        with self.computing():
            features = self.head.image(tokens)
        return tokens, {name: self._out(value) for name, value in features.items()}

    def image_features(self, images: Tensor) -> Features:
        """Features of uint8 images, as of `encode_image`; the last block computes patches only if they are read."""
        read = type(self.head.pooling) is not Single or self.head.uncertainty or self.config.head.image_pool != "cls"
        return self.encode_image(images, patches=bool(read))[1]

    def image_tokens(
        self, images: Tensor, keep: Tensor | None = None, masked: Tensor | None = None, patches: bool = True
    ) -> Tensor:
        """Tokens [I, E + P, W] of uint8 images, or of their trunk's tokens; other arguments as of `ImageTower`."""
        of_trunk = images.is_floating_point() and images.dim() == 3
        if of_trunk and not self.config.image.trunk.name:
            raise ValueError("these are tokens of a trunk, but the image tower has none: encode images.")
        with self.computing():
            inputs = images if of_trunk else self.normalise(images)
            tokens: Tensor = self.image_tower(inputs, keep, masked, **({} if patches else {"patches": False}))
        return self._out(tokens)

    def image_trunk(self, images: Tensor) -> Tensor:
        """Tokens [I, prefix + P, W'] of the image tower's trunk, of uint8 images."""
        with self.computing():
            tokens: Tensor = self.image_tower.get_submodule("trunk")(self.normalise(images))
        return self._out(tokens)

    def memory(self, image_tokens: Tensor) -> Tensor:
        """Memory of a decoder: all tokens [I, E + P, W], or the pooling's `memory` [I, Q, W] if it defines one."""
        return self.head.pooling.memory(image_tokens)

    def encode_text(self, texts: Texts) -> tuple[Tensor, Features]:
        """Packed tokens [S, W] and features of texts."""
        with self.computing():
            tokens = self.text_tower(texts)
            features = self.head.text(tokens, texts)
        return self._out(tokens), {name: self._out(value) for name, value in features.items()}

    def with_tokens(self, texts: Texts) -> Texts:
        """Texts with the tokens of the text tower's trunk, which all that read these texts share."""
        with self.computing():
            return self.text_tower.with_tokens(texts)

    @property
    def device(self) -> torch.device:
        return self.mean.device

    def initial(self) -> dict[str, Init]:
        """N(0, init_std^2) for all matrices, tables and tokens, of decoders too, where it is set (arXiv:2401.02137)."""
        std = self.config.init_std
        weights = (name for name, p in self.named_parameters() if p.dim() > 1 or name.endswith(("token", "probe")))
        return dict.fromkeys(weights, Init(std=std)) if std else {}

    def computing(self) -> AbstractContextManager[object]:
        """Context in which towers and decoders that are called directly compute in `precision`; outputs can be bf16."""
        return precision_of(self.precision, self.device.type)()

    def _out(self, x: Tensor) -> Tensor:
        return at_least_float(x) if self.precision == "bf16" else x

    def score(self, images: Features, texts: Features) -> Tensor:
        """Scores [I, T], higher is better, computed in blocks of the size that the head chooses."""
        down, across = self.head.block(images, texts)
        columns = [rows(texts, part) for part in chunks(len(texts["vec"]), across)]
        parts = [rows(images, part) for part in chunks(len(images["vec"]), down)]
        return torch.cat([torch.cat([self.head.score(part, of) for of in columns], 1) for part in parts])


def vit(model: Model, what: str) -> ImageTower:
    """The image tower of a model that `what` needs to be one transformer.

    Raises: ValueError for a ResNet, and for a tower with a second path.
    """
    check_vit(model.config.image, what)
    if model.config.image.uncertainty_blocks:
        raise ValueError(f"{what} cannot follow the second path through the towers that variance_blocks makes.")
    assert isinstance(model.image_tower, ImageTower)
    return model.image_tower


def storage(bare: bool) -> AbstractContextManager[object]:
    """Context that creates parameters without storage if `bare`."""
    return torch.device("meta") if bare else nullcontext()


@torch.no_grad()
def initialise(module: nn.Module, seed: int, prefix: str = "") -> None:
    """Fill every parameter that has storage with `first_values`.

    Raises: ValueError for a parameter without an initial value.
    """
    parameters = {name: p for name, p in module.named_parameters() if not p.is_meta}
    for name, values in first_values(module, seed, parameters, prefix):
        parameters[name].copy_(values)


def first_values(module: nn.Module, seed: int, names: Iterable[str], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield names and unsharded initial values of parameters, in single precision on the CPU.

    Each value is drawn from a generator keyed by the name, so that parameters of equal names start equal in all models.

    Args: names: of parameters of `module`, which may be sharded; prefix: prepended to the names in the key.
    Raises: ValueError for a parameter of `module` without an initial value.
    """
    rules = rules_of(module)
    shapes = {name: p.shape for name, p in module.named_parameters()}
    for name in names:
        yield name, _values(shapes[name], rules[name], key(seed, prefix + name))


def rules_of(module: nn.Module) -> dict[str, Init]:
    """Initial distributions of the parameters, by name. Raises: ValueError for a parameter that no module defines."""
    rules: dict[str, Init] = {}
    for path, part in module.named_modules():
        for name, init in initial(part).items():
            rules.setdefault(f"{path}.{name}" if path else name, init)  # an outer module takes precedence
    for path, _ in module.named_parameters():
        if path not in rules:
            owner, _, name = path.rpartition(".")
            kind = type(module.get_submodule(owner)).__name__
            raise ValueError(
                f"the parameter {name!r} of {kind} ({path}) has no initial value: give {kind}, or a module that "
                f"contains it, a method initial() that returns one by name, such as {{{name!r}: Init(std=0.02)}}. Init "
                "is in kiloword.model.blocks."
            )
    return rules


def _values(shape: torch.Size, init: Init, seed: int) -> Tensor:
    if not init.std:
        return torch.full(shape, init.mean)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul_(init.std).add_(init.mean)


def initial(module: nn.Module) -> dict[str, Init]:
    """Initial distributions of a module's parameters: from its `initial()`, or the default for layers of torch."""
    defined: Callable[[], dict[str, Init]] | None = getattr(module, "initial", None)
    if defined is not None:
        return defined()
    if isinstance(module, nn.LayerNorm | nn.GroupNorm):
        return {"weight": Init(1.0), "bias": Init()}
    if isinstance(module, nn.Linear | nn.Conv2d):
        fan_in = module.weight.shape[1:].numel()
        return {"weight": Init(std=fan_in**-0.5), "bias": Init()}
    return {}


def resize(config: ModelConfig, state: Mapping[str, Tensor], size: int) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Configuration and state for another image size; position embeddings are interpolated (bicubic).

    Raises: ValueError when the size is below the patch, or the trunk has another one.
    """
    patch, trunk = config.image.patch, config.image.trunk
    if not trunk.name and size < patch:
        raise ValueError(f"image size {size} is below the patch size {patch}")
    resized_config = replace(config, image=replace(config.image, size=size, trunk=resized_trunk(trunk, size)))
    in_pool = "head.pooling.image_pool.attention.positions"  # of a ResNet, behind that of the mean
    name, first = ("image_tower.positions", int(config.image.class_token)) if in_pool not in state else (in_pool, 1)
    if name not in state:
        return resized_config, dict(state)
    places = state[name]
    old, new = grid(config.image), grid(resized_config.image)
    places_map = places[first:].float().T.reshape(1, -1, old, old)
    places_map = F.interpolate(places_map, (new, new), mode="bicubic", antialias=True)
    patches = places_map.reshape(places_map.shape[1], -1).T.to(places.dtype)
    return resized_config, {**state, name: torch.cat([places[:first], patches])}


def resize_text(
    config: ModelConfig, state: Mapping[str, Tensor], context: int
) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Configuration and state for another context length.

    Text positions [L, W] become [context, W]. Where a text ends anywhere, a shorter context takes the first positions;
    a longer one keeps those that short captions have, and stretches the rest (`_stretched`). With `pad_to_context` or
    a class token in the last place, the last positions are particular too: they are kept, and those between are
    interpolated in both directions (arXiv:2503.08048, section 3).
    Raises: ValueError for a context without a position between those that are kept.
    """
    name, text = "text_tower.positions", config.text
    first, last = 20, 2 if text.pad_to_context or text.class_place == "last" else 0
    places, least = state[name], first + max(last + 1, 2)
    if last or context > text.context:
        if min(context, text.context) < least:
            kept = f"the first {first}{f' and last {last}' if last else ''} positions are kept"
            raise ValueError(
                f"the context {min(context, text.context)} is too short (the text tower has {text.context}): "
                f"{kept}, so both contexts need at least {least}."
            )
        middle = places[first:].float()
        if last:
            between = F.interpolate(middle[:-last].T[None], context - first - last, mode="linear")[0].T
            middle = torch.cat([between, middle[-last:]])
        else:
            middle = _stretched(middle, context - first)
        places = torch.cat([places[:first], middle.to(places.dtype)])
    resized = {**state, name: places[:context]}
    return replace(config, text=replace(text, context=context)), resized


def _stretched(places: Tensor, n: int) -> Tensor:
    """[L, W] -> [n, W]: positions interpolated; the last ones continue their line.

    From 77 to 248 these are the positions of Long-CLIP (arXiv:2403.15378): four for each from the 21st on.
    """
    at = torch.arange(n, dtype=torch.float64) * len(places) / n
    lower = at.long().clamp(max=len(places) - 2)
    share = (at - lower).to(places)[:, None]
    return (1 - share) * places[lower] + share * places[lower + 1]


def model_in_words(model: Model, method: str = "unknown method") -> str:
    """A model on one line: method, towers, size, number of parameters, precision, device."""
    config, weight = model.config, next(model.parameters())
    more = f", with {', '.join(name.replace('_', ' ') for name in model.more)}" if model.more else ""
    unused = 0 if config.image.trunk.name else config.image.size % config.image.patch
    patch = f"patch {config.image.patch}{f' ({unused} pixels unused)' if unused else ''}"
    return (
        f"{method}: image tower {tower_shape(config.image)}, {config.image.size} pixels, "
        f"{patch}; text tower {tower_shape(config.text)}, {config.text.context} tokens; embedding "
        f"{config.head.dim}{more}; {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, "
        f"{str(weight.dtype).removeprefix('torch.')} on {weight.device}"
    )


def tower_shape(tower: ImageConfig | TextConfig) -> str:
    """Width, depth and attention heads: "384 x 12 / 6"; width and blocks: "ResNet 2048 x 16"."""
    if getattr(tower, "tower", "vit") != "vit":
        return f"ResNet {tower.width} x {tower.depth}"
    if tower.trunk.whole:
        return str(tower.trunk.config.get("model_type", tower.trunk.name))
    below = f"{tower.trunk.name} + " if tower.trunk.name else ""
    return f"{below}{tower.width} x {tower.depth} / {tower.heads}"
