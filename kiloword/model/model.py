"""The model: two towers and a head."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kiloword.config.recipes import EncoderPrecision, ModelConfig
from kiloword.distributed.device import precision_of
from kiloword.model.blocks import Init
from kiloword.model.heads import Head
from kiloword.model.image import ImageTower
from kiloword.model.pooling import at_least_float
from kiloword.model.text import TextTower
from kiloword.randomness import key
from kiloword.types import Features, Texts

if TYPE_CHECKING:
    from kiloword.methods.method import Method


class Model(nn.Module):
    """Images and texts to features and scores.

    Args: more: further towers that a method asks for (decoders); saved and sharded like the two. bare: the two get no
    storage.
    Attributes: precision: that towers compute in, "fp32" (the weights' own type) or "bf16" (autocast, what comes out is
    fp32 again); training leaves it, and has autocast around the whole step.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self, config: ModelConfig, head: Head, more: Mapping[str, nn.Module] | None = None, bare: bool = False
    ) -> None:
        super().__init__()
        self.config = config
        self.precision: EncoderPrecision = "fp32"
        with _storage(bare):
            self.image_tower = ImageTower(config.image)
            self.text_tower = TextTower(config.text)
        self.head = head
        self.more = nn.ModuleDict(more or {})
        self.register_buffer("mean", torch.tensor(config.preprocess.mean).view(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(config.preprocess.std).view(3, 1, 1), persistent=False)

    def normalise(self, images: Tensor) -> Tensor:
        """uint8 [I, 3, H, W] -> float, of the mean and deviation that the tower was trained with."""
        if images.dtype != torch.uint8:
            raise ValueError(f"images must be uint8 in [0, 255], not {images.dtype}; the model normalises them itself")
        mean, std = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (self.mean, self.std))
        return ((images.to(mean.dtype) / 255 - mean) / std).to(self.mean.dtype)

    def encode_image(
        self, images: Tensor, keep: Tensor | None = None, masked: Tensor | None = None
    ) -> tuple[Tensor, Features]:
        """Tokens [I, E + P, W] and features of uint8 images; `keep` and `masked` as in `ImageTower`."""
        tokens = self.image_tokens(images, keep, masked)
        with self.computing():
            features = self.head.image(tokens)
        return tokens, {name: self._out(value) for name, value in features.items()}

    def image_tokens(self, images: Tensor, keep: Tensor | None = None, masked: Tensor | None = None) -> Tensor:
        """Tokens [I, E + P, W] of uint8 images; `keep` and `masked` as in `ImageTower`."""
        with self.computing():
            tokens: Tensor = self.image_tower(self.normalise(images), keep, masked)
        return self._out(tokens)

    def memory(self, image_tokens: Tensor) -> Tensor:
        """What a decoder sees of images: all tokens [I, E + P, W], or the pooling's own [I, Q, W], where it has."""
        own = getattr(self.head.pooling, "memory", None)
        return image_tokens if own is None else own(image_tokens)

    def encode_text(self, texts: Texts) -> tuple[Tensor, Features]:
        """Packed tokens [S, W] and features of texts."""
        with self.computing():
            tokens = self.text_tower(texts)
            features = self.head.text(tokens, texts)
        return self._out(tokens), {name: self._out(value) for name, value in features.items()}

    def computing(self) -> AbstractContextManager[object]:
        """Inside, towers and decoders that are called themselves compute in `precision` too, and may put out bf16."""
        return precision_of(self.precision, self.mean.device.type)()

    def _out(self, x: Tensor) -> Tensor:
        return at_least_float(x) if self.precision == "bf16" else x

    def score(self, images: Features, texts: Features) -> Tensor:
        """[I, T], computed in blocks of the head's choice: higher is a better match."""
        rows, (down, across) = [], self.head.block(images, texts)
        for i in range(0, len(images["vec"]), down):
            some = {k: v[i : i + down] for k, v in images.items()}
            blocks = [
                self.head.score(some, {k: v[j : j + across] for k, v in texts.items()})
                for j in range(0, len(texts["vec"]), across)
            ]
            rows.append(torch.cat(blocks, 1))
        return torch.cat(rows)


def build(config: ModelConfig, method: Method, seed: int = 0, bare: bool = False) -> Model:
    """A fresh model of a method.

    Args: bare: towers and decoders get no storage (torch's meta device); `engine.materialise` gives it to their shards.
    """
    model = _empty(config, method, bare)
    initialise(model, seed)
    return model


def shapes(config: ModelConfig, method: Method) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a method's model, of which none is made."""
    with torch.device("meta"):
        return {name: tuple(value.shape) for name, value in _empty(config, method).state_dict().items()}


def _empty(config: ModelConfig, method: Method, bare: bool = False) -> Model:
    config = method.shape(config)
    with _storage(bare):
        more = {name: make(config) for name, make in method.towers.items()}
    return Model(config, method.head(config), more, bare)


def _storage(bare: bool) -> AbstractContextManager[object]:
    """Where parameters are made: as usual, or without storage."""
    return torch.device("meta") if bare else nullcontext()


@torch.no_grad()
def initialise(module: nn.Module, seed: int, prefix: str = "") -> None:
    """Fill every parameter that has storage as `first_values` says.

    Raises: ValueError for a parameter that has no initial value.
    """
    parameters = {name: p for name, p in module.named_parameters() if not p.is_meta}
    for name, values in first_values(module, seed, parameters, prefix):
        parameters[name].copy_(values)


def first_values(module: nn.Module, seed: int, names: Iterable[str], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Parameters' names and whole first values, single precision on the CPU, one after the other.

    Each comes from a generator keyed by its name, so that all models start equal where names are.

    Args: names: of parameters of `module`, which may be sharded; prefix: what stands before them.
    Raises: ValueError for a parameter of `module` that has no initial value.
    """
    rules = rules_of(module)
    shapes = {name: p.shape for name, p in module.named_parameters()}
    for name in names:
        yield name, _values(shapes[name], rules[name], key(seed, prefix + name))


def rules_of(module: nn.Module) -> dict[str, Init]:
    """How each parameter of a module starts, by name. Raises: ValueError for one of which no module says it."""
    rules: dict[str, Init] = {}
    for path, part in module.named_modules():
        for name, init in initial(part).items():
            rules.setdefault(f"{path}.{name}" if path else name, init)  # an outer module overrules an inner one
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
    """How a module's parameters start: what it says itself, or the usual for layers of torch."""
    own: Callable[[], dict[str, Init]] | None = getattr(module, "initial", None)
    if own is not None:
        return own()
    if isinstance(module, nn.LayerNorm | nn.GroupNorm):
        return {"weight": Init(1.0), "bias": Init()}
    if isinstance(module, nn.Linear | nn.Conv2d):
        fan_in = module.weight.shape[1:].numel()
        return {"weight": Init(std=fan_in**-0.5), "bias": Init()}
    return {}


def resize(config: ModelConfig, state: Mapping[str, Tensor], size: int) -> tuple[ModelConfig, dict[str, Tensor]]:
    """A model's configuration and state for another image size, its positions interpolated (bicubic).

    Raises: ValueError when the patch does not divide the size.
    """
    patch = config.image.patch
    if size < patch or size % patch:
        raise ValueError(f"image size {size} is not a multiple of the patch size {patch}")
    name = "image_tower.positions"
    places, first = state[name], int(config.image.class_token)
    old, new = config.image.size // patch, size // patch
    grid = places[first:].float().T.reshape(1, -1, old, old)
    grid = F.interpolate(grid, (new, new), mode="bicubic", antialias=True)
    patches = grid.reshape(grid.shape[1], -1).T.to(places.dtype)
    resized = {**state, name: torch.cat([places[:first], patches])}
    return replace(config, image=replace(config.image, size=size)), resized


def resize_text(
    config: ModelConfig, state: Mapping[str, Tensor], context: int, keep: tuple[int, int] = (20, 2)
) -> tuple[ModelConfig, dict[str, Tensor]]:
    """A model's configuration and state for another context, its text positions interpolated (linear).

    Args: keep: so many positions at the beginning and at the end stay as they are: most captions are short, and the
    last are those of [UNC] and [CLS] where pads are seen.
    Raises: ValueError when a context leaves none between those that are kept. Source: arXiv:2503.08048, section 3.
    """
    first, last = keep
    least = min(context, config.text.context)
    if least <= first + last:
        raise ValueError(
            f"context {context} came for a text tower of {config.text.context} tokens: its first {first} and last "
            f"{last} positions are kept, and of both at least {first + last + 1} are needed"
        )
    name = "text_tower.positions"
    places = state[name]
    middle = places[first : len(places) - last].float().T[None]
    middle = F.interpolate(middle, context - first - last, mode="linear")[0].T.to(places.dtype)
    resized = {**state, name: torch.cat([places[:first], middle, places[len(places) - last :]])}
    return replace(config, text=replace(config.text, context=context)), resized
