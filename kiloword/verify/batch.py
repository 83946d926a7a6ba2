"""The batch and the model of the conformity suite: small, fixed, uneven, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from kiloword.config.recipes import ModelConfig, TrunkConfig, sizes
from kiloword.methods.method import Method
from kiloword.methods.registry import preset
from kiloword.model.trunks.lite import DEBUG
from kiloword.randomness import key
from kiloword.types import Batch, BatchInputs, Input, TextGroup, Texts

Trunks = Literal["none", "cached", "frozen", "tuned"]
"""Whether the towers stand on trunks: their tokens cached, or computed with the trunks frozen, or tuned."""

IMAGES = 16  # divides over 4 ranks of 4 micro-batches
TRUNK = TrunkConfig(name=DEBUG, width=1280, grid=2)
BERT = {"model_type": "bert", "vocab_size": 512, "hidden_size": 24, "intermediate_size": 48}
BERT |= {"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 32}
TEXT_TRUNK = TrunkConfig(name="hf", width=24, config=BERT)
SIZE_ON_TRUNK = 64  # pixels: a map of 2 x 2 tokens
QUESTION = 9  # as a number of a caption, other than any has


class MethodChoice(NamedTuple):
    """A method by its name, with settings that differ from its defaults."""

    name: str
    settings: dict[str, Any] | None = None


Chosen = str | MethodChoice


def slots_of(method: Chosen) -> Method:
    """The method of a name or choice."""
    return preset(*((method,) if isinstance(method, str) else method))


def config(trunks: Trunks = "none", method: Chosen = "siglip") -> ModelConfig:
    """A model small enough for seconds; with trunks below both towers, if the method needs no text tower of its own."""
    small = sizes()["debug"]
    image, text = replace(small.image, init_std=0.1), replace(small.text, init_std=0.1)
    if trunks != "none":
        image = replace(image, trunk=TRUNK, size=SIZE_ON_TRUNK)
        if "text_decoder" not in slots_of(method).decoders:
            text = replace(text, trunk=TEXT_TRUNK)
    return replace(small, image=image, text=text)


def batch(
    first: int = 0,
    end: int = IMAGES,
    order: Sequence[int] | None = None,
    method: Chosen = "siglip",
    trunks: Trunks = "none",
) -> Batch:
    """Images `first` to `end` of a fixed batch, with one to three captions of two to nine tokens each.

    It has the features and questions that the method needs; with transforms, some images count as composed.
    """
    rows, slots = list(order or range(IMAGES))[first:end], slots_of(method)
    model = slots.shape(config(trunks, method))
    tail = [model.text.special[name] for name in model.text.extra_tokens]
    captions = [(row, c) for row in rows for c in range(1 + row % 3)]
    image_features, text_features = dict[str, Tensor](), dict[str, Tensor]()
    for name in slots.needs:  # as a loader joins them: of few directions, so that any threshold selects some pairs
        if name == "truth":
            text_features[name] = torch.stack([_uniform("truth", row, c, size=IMAGES) < 0.2 for row, c in captions])
        elif name != "questions":
            text_features[name] = of_texts = torch.stack([_direction(name, row + c) for row, c in captions])
            image_features[name] = torch.stack([_direction(name, row) for row in rows])
            parts = torch.split(of_texts, [1 + row % 3 for row in rows])
            image_features[f"{name}.texts"] = torch.stack([part.mean(0) for part in parts])

    def made(name: str, one: Input) -> Tensor | TextGroup:
        """An input of the method: noise in its shape, or none to two texts an image."""
        if one.shape is not None:
            shape = one.shape(model)
            return torch.stack([_noise(key(name, row), shape) for row in rows])
        ids = [_tokens(row, key(name, n)) + tail for row in rows for n in range(row % 3)]
        return TextGroup(Texts.pack(ids), torch.repeat_interleave(torch.tensor([row % 3 for row in rows])))

    return Batch(
        images=torch.stack([_noise(row, (3, model.image.size, model.image.size)) for row in rows]),
        texts=Texts.pack([_tokens(row, c) + tail for row, c in captions]),
        image_of_text=torch.repeat_interleave(torch.tensor([1 + row % 3 for row in rows])),
        seeds=torch.tensor([key(0, "verify", row) for row in rows]),
        position=torch.tensor(rows),
        composed=torch.tensor([bool(slots.transforms) and row % 5 == 0 for row in rows]),
        image_features=image_features,
        text_features=text_features,
        questions=Texts.pack([_tokens(row, QUESTION) for row in rows]) if "questions" in slots.needs else None,
        inputs=BatchInputs({name: made(name, one) for name, one in slots.inputs.items()}),
    )


def _direction(name: str, row: int) -> Tensor:
    """[8] unit norm: one of four orthogonal directions, a little blurred."""
    blur = _uniform(name, row, size=8) - 0.5
    return torch.nn.functional.normalize(torch.eye(8)[row % 4] + 0.3 * blur, dim=0)


def _uniform(*parts: int | str, size: int) -> Tensor:
    return torch.rand(size, generator=torch.Generator().manual_seed(key(*parts)))


def _noise(row: int, shape: tuple[int, ...]) -> Tensor:
    return torch.randint(256, shape, generator=torch.Generator().manual_seed(row), dtype=torch.uint8)


def _tokens(row: int, caption: int) -> list[int]:
    generator = torch.Generator().manual_seed(key(row, caption))
    length = int(torch.randint(2, 10, (1,), generator=generator))
    ids: list[int] = torch.randint(6, 500, (length,), generator=generator).tolist()
    return ids
