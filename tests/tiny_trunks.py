"""Small trunks with random weights, and runs on their stored tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kiloword.config.recipes import AugmentConfig, ImageConfig, Recipe, TrunkConfig
from kiloword.data.open import open_source
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.methods.defaults import default_recipe
from kiloword.methods.registry import preset
from kiloword.model.model import Model
from kiloword.model.trunks.trunk import Trunk
from kiloword.models.build import build
from kiloword.stores.embed import embed_tokens
from kiloword.stores.options import EmbedOptions
from kiloword.stores.tokens import TokenKind
from kiloword.types import Source
from kiloword.verify.batch import BERT as SUITE_BERT

KINDS: tuple[TokenKind, ...] = ("images", "texts")
SCENES = "scenes?n=48&captions=2"
SIZE, PATCH, WIDTH = 32, 8, 12
JITTER = AugmentConfig(jitter=0.8, blur=0.3)
BERT = SUITE_BERT | {"hidden_size": 16, "num_hidden_layers": 1, "max_position_embeddings": 48}


class TinyTrunk(Trunk):
    """A convolution: one token before the map, of the mean, then a token of every patch. It counts its calls."""

    calls = 0
    prefix = 1

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.norm = nn.BatchNorm2d(WIDTH)
        self.only_floats()

    def tokens(self, *inputs: Any) -> Tensor:
        type(self).calls += 1
        x = torch.tanh(self.norm(self.patches(inputs[0]))).flatten(2).transpose(1, 2)
        return torch.cat([x.mean(1, keepdim=True), x], 1)

    def blocks(self) -> list[list[str]]:
        return [["patches."], ["norm."]]


@pytest.fixture
def tiny_trunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Image trunks are `TinyTrunk`."""

    def make(config: ImageConfig) -> Trunk:
        return TinyTrunk().eval()

    monkeypatch.setattr("kiloword.model.image.image_trunk", make)


def recipe(method: str = "siglip", steps: int = 12, augment: AugmentConfig = JITTER, **changes: Any) -> Recipe:
    """A run of size debug on both trunks, which are frozen."""
    base = default_recipe(method, "debug", (SCENES,))
    image = replace(
        base.model.image,
        trunk=TrunkConfig(name="tiny", width=WIDTH, prefix=1, grid=SIZE // PATCH),
        size=SIZE,
        patch=PATCH,
    )
    text = replace(base.model.text, trunk=TrunkConfig(name="hf", width=16, config=BERT), context=48, causal=False)
    data = replace(base.data, augment=augment, tokenizer_vocab=300)
    model = replace(base.model, image=image, text=text)
    return replace(base, steps=steps, batch=16, precision="fp32", seed=3, data=data, model=model, **changes)


def words(run: Recipe, source: Source) -> Tokenizer:
    """The tokenizer that the run trains."""
    from kiloword.data.reading import captions_of

    return Tokenizer.train(captions_of(source), run.data.tokenizer_vocab)


def trunks_of(run: Recipe, source: Source) -> tuple[Model, Tokenizer]:
    """A model with the run's trunks, and its tokenizer."""
    tokenizer = words(run, source)
    text = replace(run.model.text, vocab=tokenizer.vocab, special=tokenizer.roles.ids())
    return build(replace(run.model, text=text), preset("clip"), run.seed), tokenizer


def stored(run: Recipe, out: Path, kinds: Sequence[TokenKind] = KINDS, **options: Any) -> Path:
    """A folder with the tokens of the run's data, as its augmentation draws them."""
    source = open_source(run.data.sources[0], size=SIZE)
    model, tokenizer = trunks_of(run, source)
    drawn = {"augment": run.data.augment, "seed": run.seed}
    made = EmbedOptions(**{"model": "tiny", "dtype": "fp32", **drawn, **options})
    for kind in kinds:
        embed_tokens(model, tokenizer, kind, source, out, made)
    return out
