"""`kiloword data stats SRC --as METHOD --png FILE` and `kiloword data pairs`: what a run would see of a data set."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow.parquet
from PIL import Image

from kiloword.config import papers
from kiloword.config.recipes import Recipe
from kiloword.data.images.contact import TILES, draw_tiles
from kiloword.data.loader import Loader
from kiloword.data.sampler import Order
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.data.transforms.mix import WithPartner, pairs_table
from kiloword.files import replacing
from kiloword.methods.defaults import default_recipe
from kiloword.methods.registry import preset
from kiloword.stores.features import FeatureStore
from kiloword.training.resolve import bound, open_sources


def draw_examples(src: str, like: str, size: str, png: Path) -> str:
    """Draw the first examples of a run: augmented, transforms applied, with all captions.

    `kiloword data stats SRC --as METHOD --png FILE`. Args: like: a method, whose defaults apply; a paper's recipe; or
    the folder or config.json of a run, or a recipe in a file; size: of a method.

    Returns: a line about them. Errors: ValueError for an unknown method or size, and data that cannot be read.
    """
    recipe = _recipe_like(src, like, size)
    chosen, source = preset(recipe.method, recipe.settings), open_sources(recipe)
    loader = Loader(
        source,
        Order(len(source), min(TILES, len(source)), recipe.seed),
        recipe.data,
        chosen.shape(recipe.model).text,
        recipe.model.image.size,
        Tokenizer.train([], 262),  # nothing is packed
        transforms=bound(chosen.transforms, source),
        questions="questions" in chosen.needs,
        seed=recipe.seed,
        resize=recipe.model.preprocess.resize,
    )
    examples = loader.examples(0)[0]
    draw_tiles([(Image.fromarray(e.image.permute(1, 2, 0).numpy()), e.words, 1) for e in examples], png)
    composed = sum(e.composed for e in examples)
    return f"{len(examples)} examples as {like} at size {recipe.size} sees them, {composed} composed: {png}"


def write_pairs(src: str, like: str, size: str, out: Path) -> str:
    """Write a parquet (key, partner, caption) of all pairs that a run composes, their captions joined.

    With the captions rewritten, by a language model for example, the table is `--settings.rewrites` of the run. Args:
    as of `draw_examples`. Returns: a line about them. Errors: ValueError for a method that composes no pairs, partners
    that change in each epoch, and a file that cannot be written.
    """
    recipe = _recipe_like(src, like, size)
    source = open_sources(recipe)
    mixing = [t for t in preset(recipe.method, recipe.settings).transforms if isinstance(t, WithPartner)]
    if not mixing or mixing[0].settings.partner == "random":
        why = "draws another partner in each epoch" if mixing else "composes no pairs"
        raise ValueError(
            f"{like} {why}: expected a recipe with settings.partner fixed, nearest, farthest or file, such as a TOML "
            'file with method = "clip-c" and settings.partner = "fixed".'
        )
    table = pairs_table(source, mixing[0].bind(source, FeatureStore), recipe.seed)
    with replacing(out) as file:
        pyarrow.parquet.write_table(table, file)
    return f"{len(table):,} captions of {len(source):,} rows with their partners: {out}"


def _recipe_like(src: str, like: str, size: str) -> Recipe:
    """The recipe of `draw_examples`, with `src` as its only data."""
    path = Path(like)
    if path.exists():
        named = papers.read(path / "config.json" if path.is_dir() else path)
    elif like in papers.names():
        named = papers.load(like)
    else:
        return default_recipe(like, size, (src,))
    plain = default_recipe(named.method, named.value("size", size), (src,))
    recipe = papers.fill(plain, named, towers=True)
    return replace(recipe, data=replace(recipe.data, sources=(src,), weights=()))
