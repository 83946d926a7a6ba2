"""The verb data: what a data set holds, and what a run would see of it. No torch at import."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, arg

from kiloword.config import papers
from kiloword.terminal import say

if TYPE_CHECKING:
    from kiloword.config.recipes import Recipe


@dataclass(frozen=True, kw_only=True)
class Data:
    """Inspect a data set before training.

    Examples:
      kiloword data stats photos/train --png samples.png
      kiloword data stats photos/train --as clip-c --png examples.png
      kiloword data check photos/train
      kiloword data pairs photos/train --as recipe.toml --out pairs.parquet
    """

    # stats: count and describe the rows; check: decode every sample and list bad ones; index: read tars once and write
    # their rows beside them; names: list the data sets with known class names and templates; pairs: write the captions
    # of composed pairs, to rewrite them
    what: Positional[Literal["index", "check", "stats", "names", "pairs"]]
    # tars, a table, a folder of images or scenes, as for `kiloword train`; with names, one of the known data sets
    source: Positional[str | None] = None
    png: Path | None = None  # with stats, write an image of samples to this file
    # with stats and png, draw examples as training sees them: METHOD, a recipe, or the folder of a run
    as_: Annotated[str | None, arg(name="as")] = None
    size: str = "tiny"  # with as, size of the model, as in train
    # with pairs and as, table (key, partner, caption) to write, for --settings.rewrites
    out: Path | None = None

    def run(self) -> None:
        """Print. Exits with 1 where samples are bad. Raises: ValueError for flags that another action takes."""
        taken = {"stats": ("png", "as"), "pairs": ("as", "out")}.get(self.what, ())
        given = {"png": self.png, "as": self.as_, "out": self.out}
        if idle := next((name for name, value in given.items() if value and name not in taken), None):
            raise ValueError(f"--{idle} changes nothing in data {self.what}: see kiloword data --help.")
        if self.what == "names":
            from kiloword.data.classes.names import listing

            say(*listing(self.source))
        elif self.source is None:
            raise ValueError(f"data {self.what} needs a data set: kiloword data {self.what} SRC.")
        elif self.what == "pairs":
            if not (self.as_ and self.out):
                raise ValueError("expected kiloword data pairs SRC --as RUN --out pairs.parquet.")
            say(write_pairs(self.source, self.as_, self.size, self.out))
        else:
            if self.as_ and not self.png:
                raise ValueError("--as draws training examples: expected data stats SRC --as METHOD --png FILE.")
            drawn = [draw_examples(self.source, self.as_, self.size, self.png)] if self.as_ and self.png else []
            from kiloword.data.inspect import main

            if main(self.what, self.source, None if drawn else self.png):
                raise SystemExit(1)
            say(*drawn)


def draw_examples(src: str, like: str, size: str, png: Path) -> str:
    """Draw the first examples of a run: augmented, transforms applied, with all captions.

    Args: like: a method, whose defaults apply; a paper's recipe; or the folder or config.json of a run, or a recipe in
    a file; size: of a method.

    Returns: a line about them. Errors: ValueError for an unknown method or size, and data that cannot be read.
    """
    from PIL import Image

    from kiloword.data.images.contact import TILES, draw_tiles
    from kiloword.data.loader import Loader
    from kiloword.data.sampler import Order
    from kiloword.data.text.tokenizer import Tokenizer
    from kiloword.methods.registry import preset
    from kiloword.training.resolve import bound, open_sources

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
    import pyarrow.parquet

    from kiloword.data.transforms.mix import WithPartner, pairs_table
    from kiloword.files import replacing
    from kiloword.methods.registry import preset
    from kiloword.stores.features import FeatureStore
    from kiloword.training.resolve import open_sources

    recipe = _recipe_like(src, like, size)
    source = open_sources(recipe)
    mixing = [t for t in preset(recipe.method, recipe.settings).transforms if isinstance(t, WithPartner)]
    if not mixing or mixing[0].settings.partner == "random":
        raise ValueError(
            f"{like} composes no pairs, or new ones in each epoch: expected a recipe with settings.partner "
            'fixed, nearest, farthest or file, such as a TOML file with method = "clip-c", settings.partner = "fixed".'
        )
    table = pairs_table(source, mixing[0].bind(source, FeatureStore), recipe.seed)
    with replacing(out) as file:
        pyarrow.parquet.write_table(table, file)
    return f"{len(table):,} captions of {len(source):,} rows with their partners: {out}"


def _recipe_like(src: str, like: str, size: str) -> Recipe:
    """The recipe of `draw_examples`, with `src` as its only data."""
    from kiloword.training.command import read

    path = Path(like)
    if path.exists():
        words = ["--config", str(path / "config.json" if path.is_dir() else path)]
    else:
        words = ["--recipe", like] if like in papers.names() else [like, "--size", size]
    recipe = read([*words, "--data", src, "--dry-run"]).args.recipe
    return replace(recipe, data=replace(recipe.data, weights=()))
