"""What training would see of a data set: `kiloword data stats SRC --as METHOD --png FILE`."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from kiloword.data.images.contact import TILES, draw_tiles
from kiloword.data.loader import Loader
from kiloword.data.sampler import Order
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.methods.defaults import default_recipe
from kiloword.methods.registry import preset
from kiloword.training.setup import open_sources
from kiloword.types import Example


def draw(src: str, method: str, size: str, png: Path) -> str:
    """Draw the first examples of a run by the method's defaults: augmented, transforms applied, with all captions.

    Returns: a line about them. Errors: ValueError for an unknown method or size, and data that cannot be read.
    """
    recipe = default_recipe(method, size, (src,))
    chosen, source = preset(recipe.method, recipe.settings), open_sources(recipe)
    loader = Loader(
        source,
        Order(len(source), min(TILES, len(source)), recipe.seed),
        recipe.data,
        chosen.shape(recipe.model).text,
        recipe.model.image.size,
        Tokenizer.train([], 262),  # nothing is packed
        transforms=chosen.transforms,
        questions="questions" in chosen.needs,
        seed=recipe.seed,
        resize=recipe.model.preprocess.resize,
    )
    examples = loader.examples(0)[0]
    draw_tiles([(Image.fromarray(e.image.permute(1, 2, 0).numpy()), _text(e), 1) for e in examples], png)
    composed = sum(e.composed for e in examples)
    return f"{len(examples)} examples as {method} at size {size} sees them, {composed} composed: {png}"


def _text(example: Example) -> str:
    """The captions, or the question with its answers; composed examples are named so."""
    captions = " | ".join(example.captions)
    asked = f"{example.question} " if example.question else ""
    return f"{'composed: ' if example.composed else ''}{asked}{captions}"
