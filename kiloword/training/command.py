"""The verb train. Its flags are the recipe's settings, whose defaults depend on method, size and data.

No torch at import, so that help is instant.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import tyro

from kiloword.config.options import RecipeFlags, RunOptions
from kiloword.config.papers import LENGTHS, fill
from kiloword.config.recipes import Recipe
from kiloword.config.settings import BaseSettings, about, check, lacks, leaves, setting, shown
from kiloword.methods.command import MethodWords, method_words, values_of
from kiloword.methods.defaults import WHY_TUNED, default_recipe, tuned
from kiloword.methods.recipes import report, towers_flag
from kiloword.terminal import say

if TYPE_CHECKING:
    from kiloword.types import Source


@dataclass(frozen=True, kw_only=True)
class Train(BaseSettings):
    """Train a model; run the same command again to resume.

    Examples:
      kiloword train siglip --data scenes --out runs/first
      kiloword train clip --data photos/train --val photos/dev --out runs/photos --epochs 30
      kiloword train siglip --data table.csv --out runs/table --size s16 --optim.lr 1e-3 --workers 8
      kiloword train llip+compose+mined --features features --data photos/train --out runs/mix
      kiloword train --recipe llip-b32 --data tars --out runs/llip
    """

    common: ClassVar[dict[str, str]] = {
        "recipe": "recipe config",
        "data": "data val features captions",
        "length": "steps epochs samples batch",
        "model": "size init image-tower text-tower",
        "optimization": "optim.name optim.lr optim.muon-lr optim.warmup",
        "hardware": "device workers precision micro",
        "run": "out seed dry-run",
    }

    out: Path = setting(tyro.MISSING, "folder of the run")
    steps: int | None = setting(None, "length in steps; default: 2000 (scenes: 1000), at most 100 epochs")
    epochs: float | None = setting(None, "length in passes over the data")
    samples: int | None = setting(None, "length in images seen")
    dry_run: bool = setting(False, "print what would run, and stop")
    origin: RecipeFlags = field(default_factory=RecipeFlags, metadata=about(flag=""))
    options: RunOptions = field(default_factory=RunOptions, metadata=about(flag=""))
    recipe: Recipe = field(metadata=about(flag=""))


@dataclass(frozen=True)
class Training:
    """The words of a command line, read."""

    words: MethodWords
    plain: Recipe  # the defaults
    usual: Recipe  # with the values of --recipe or --config
    args: Train

    def run(self, source: Source | None = None) -> Path:
        """Train, or with --dry-run print what would run.

        Args: source: data in place of --data.
        Returns: the model folder. Raises: ValueError for a run that cannot start.
        """
        args, recipe = self.args, self.args.recipe
        loud = os.environ.get("RANK", "0") == "0" and not args.options.quiet  # RANK: of torchrun
        if loud:
            say(*_about_recipe(self.words, args))
        from kiloword.training import start
        from kiloword.training.dry_run import rehearse
        from kiloword.training.loop import train
        from kiloword.training.resolve import MOST_EPOCHS, open_sources, visited, with_length

        recipe = start.fitted(recipe)
        start.check(recipe)
        start.check_effects(recipe, self.plain if args.origin.config else self.usual, args.options.trust_code)
        if loud and self.words.recipe is None and recipe.init is not None:
            say(
                _about_init(recipe),
                f"note       --init has its own towers; size {recipe.size} sets optimizer and batch.",
            )
        source = open_sources(recipe, source)
        most = 0 if args.origin.config else MOST_EPOCHS  # a file has its own length
        recipe = with_length(recipe, visited(recipe, source), most, **{name: getattr(args, name) for name in LENGTHS})
        if args.dry_run:
            rehearse(recipe, source, args.out, args.options)
            return args.out / "model"
        folder = train(recipe, args.out, source, args.options, self.plain)
        if loud:
            say(f"model: {folder}")
        return folder


def read(argv: Sequence[str]) -> Training:
    """Read the words of a command line. Raises: ValueError and SystemExit for words that `train` refuses."""
    words = method_words(argv, "train siglip --out runs/first")
    plain, usual = _defaults(words)
    defaults: dict[str, Any] = {"recipe": usual}
    if words.recipe and not any(values_of(words.flags, f"--{name}") for name in LENGTHS):
        defaults |= words.recipe.length()
    if any(word.replace("_", "-") == "--dry-run" for word in words.flags):  # needs no --out
        defaults["out"] = Path("runs", words.recipe.name if words.recipe else words.method)
    args, settings = words.read(Train(**defaults))
    check(args.recipe)
    recipe = replace(args.recipe, settings=asdict(settings), init=usual.init)  # a local folder
    return Training(words, plain, usual, replace(args, recipe=recipe))


def _about_recipe(words: MethodWords, args: Train) -> list[str]:
    """The recipe that the run follows: of a dry run every value with its source."""
    if words.recipe is None:
        return []
    replaced = towers_flag(words.recipe, words.first("--size"), words.first("--init"))
    lines = report(words.recipe, args.recipe, {name: getattr(args, name) for name in LENGTHS})
    if not args.dry_run:
        lines = [f"{lines[0]} ({len(lines) - 1} values; --dry-run prints them)"]
    if replaced:
        lines.append(f"note       {replaced} replaces the towers of the recipe: size and all of model.*")
    return lines


def _about_init(recipe: Recipe) -> str:
    """The defaults that hold because the run starts from trained weights, and why."""
    if recipe.lora.rank:
        return "note       --lora.rank keeps the learning rates and augmentation from scratch: adapters start at 0."
    scratch = default_recipe(recipe.method, recipe.size, recipe.data.sources)
    usual, gentle = ({leaf.flag: leaf.value for leaf in leaves(r)} for r in (scratch, tuned(scratch)))
    kept = [leaf for leaf in leaves(recipe) if leaf.value == gentle[leaf.flag] != usual[leaf.flag] and not lacks(leaf)]
    flags = (f"--{leaf.flag} {shown(leaf.value)} (from scratch {shown(usual[leaf.flag])})" for leaf in kept)
    return f"note       --init sets {', '.join(flags)}: {WHY_TUNED}. Flags override." if kept else ""


def _defaults(words: MethodWords) -> tuple[Recipe, Recipe]:
    """The recipe that method, size, data, towers and init imply, and that with the values of --recipe or --config.

    Both on the tokens that --image-features and --text-features name, and on the views of --features.
    """
    stores = [values_of(words.flags, flag) for flag in ("--features", "--image-features", "--text-features")]
    if not any(stores):
        return _without_tokens(words)
    from kiloword.stores.runs import on_stores, towers_of

    plain, usual = _without_tokens(words, towers_of(*stores[1:]))
    return on_stores(plain, *stores), on_stores(usual, *stores)


def _without_tokens(words: MethodWords, stored: tuple[str, str] = ("", "")) -> tuple[Recipe, Recipe]:
    """As `_defaults`. Args: stored: towers of the tokens, where the flags name none."""
    named, flags = words.recipe, words.flags

    def given(name: str, usual: Any = None) -> Any:
        """The value of a flag, or else of the recipe."""
        return words.first(f"--{name.replace('_', '-')}", usual if named is None else named.value(name, usual))

    recipe_data = ("scenes",) if named is None else named.value("data.sources", ("scenes",))
    data = values_of(flags, "--data") or tuple(recipe_data)
    size, init = given("size"), given("init")
    if init is not None:
        from kiloword.interop.names import local_folder

        init = str(local_folder(init))
    of_stores = ("", "") if init else stored  # the folder that the run starts from has them
    image_tower, text_tower = (
        own if own and not values_of(flags, f"--{kind}-tower") else given(f"{kind}_tower", "")
        for kind, own in zip(("image", "text"), of_stores, strict=True)
    )
    towers = image_tower or text_tower
    plain = default_recipe(words.method, size or ("top" if towers else "tiny"), data)
    if towers or init is not None:
        from kiloword.training import start

        if init is not None:
            tune = named is None and not values_of(flags, "--lora.rank")  # adapters start at 0, and take larger rates
            plain = start.defaults(words.method, init, size, data, tune)
        plain = start.with_towers(plain, image_tower, text_tower)
    if named is None:
        return plain, plain
    filled = fill(plain, named, towers=init is None and not towers_flag(named, words.first("--size"), None))
    if init is not None:  # whose tokenizer and weights it takes
        model = replace(filled.model, init_std=plain.model.init_std)
        filled = replace(filled, data=replace(filled.data, tokenizer="own"), model=model)
    return plain, replace(filled, method=words.method, size=plain.size, init=init)
