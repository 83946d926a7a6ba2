"""The verb train. Its flags are the recipe's settings, whose defaults depend on method, size and data.

No torch at import, so that help is instant.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import tyro

from kiloword.cli.papers import report, towers_flag
from kiloword.cli.words import MethodCommand, method_command, values_of
from kiloword.config.options import Mixing, RecipeFlags, RunOptions
from kiloword.config.papers import LENGTHS, fill
from kiloword.config.recipes import Recipe
from kiloword.config.settings import BaseSettings, about, check, lacks, leaves, setting
from kiloword.methods.defaults import WHY_TUNED, default_recipe, tuned
from kiloword.terminal import say


@dataclass(frozen=True, kw_only=True)
class Train(BaseSettings):
    """Train a model; run the same command again to resume.

    Examples:
      kiloword train siglip --data scenes --out runs/first
      kiloword train clip --data photos/train --val photos/dev --out runs/photos --epochs 30
      kiloword train siglip --data table.csv --out runs/table --size s16 --optim.lr 1e-3 --workers 8
      kiloword train llip --transforms compose --positives mined --features features --data photos/train --out runs/mix
      kiloword train --recipe llip-b32 --data tars --out runs/llip
    """

    common: ClassVar[dict[str, str]] = {
        "recipe": "recipe config",
        "data": "data val features captions",
        "length": "steps epochs samples batch",
        "model": "size init image-tower text-tower",
        "loss": "transforms positives pair-loss pooling uncertainty terms",
        "optimization": "optim.name optim.lr optim.muon-lr optim.warmup",
        "hardware": "device workers precision micro",
        "run": "out seed dry-run",
    }

    out: Path = setting(tyro.MISSING, "folder of the run")
    steps: int | None = setting(None, "length in steps; or give --epochs or --samples")
    epochs: float | None = setting(None, "length in passes over the data")
    samples: int | None = setting(None, "length in images seen")
    dry_run: bool = setting(False, "print what would run, and stop")
    origin: RecipeFlags = field(default_factory=RecipeFlags, metadata=about(flag=""))
    mixing: Mixing = field(default_factory=Mixing, metadata=about(flag=""))
    options: RunOptions = field(default_factory=RunOptions, metadata=about(flag=""))
    recipe: Recipe = field(metadata=about(flag=""))


def main(argv: Sequence[str]) -> None:
    """Train a model, or resume it: kiloword train METHOD --data SRC --out DIR."""
    words = read(argv)
    command, plain, usual, args, recipe = words.command, words.plain, words.usual, words.args, words.args.recipe
    _say_recipe(command, args, recipe)
    from kiloword.training import effects, start
    from kiloword.training.dry_run import rehearse
    from kiloword.training.loop import train
    from kiloword.training.resolve import open_sources, visited, with_length

    recipe = start.fitted(recipe)
    start.check(recipe)
    effects.check(recipe, plain if args.origin.config else usual, args.options.trust_code)
    _say_tuned(command, args, recipe)
    source = open_sources(recipe)
    recipe = with_length(recipe, visited(recipe, source), args.steps, args.epochs, args.samples)
    if args.dry_run:
        rehearse(recipe, source, args.out, args.options)
        return
    folder = train(recipe, args.out, source, args.options)
    if os.environ.get("RANK", "0") == "0":  # of torchrun
        say(f"model: {folder}")


@dataclass(frozen=True)
class Words:
    """The words of a command line, read."""

    command: MethodCommand
    plain: Recipe  # the defaults
    usual: Recipe  # with the values of --recipe or --config
    args: Train


def read(argv: Sequence[str]) -> Words:
    """Read the words of a command line. Raises: ValueError and SystemExit for words that `train` refuses."""
    command = method_command(with_local_init(argv), "train siglip --out runs/first")
    plain, usual = _defaults(command)
    args, settings = command.read(_train(command, usual))
    check(args.recipe)
    recipe = replace(args.recipe, settings=asdict(settings))
    return Words(command, plain, usual, replace(args, recipe=recipe))


def with_local_init(argv: Sequence[str]) -> list[str]:
    """The words with the model folder of --init, where that names a model of another library."""
    words = list(argv)
    for n, word in enumerate(words):
        flag, equals, value = word.partition("=")
        at = n if equals else n + 1
        name = value if equals else words[at] if at < len(words) else ""
        if flag == "--init" and name.startswith(("open_clip:", "hf:", "hf-hub:")):
            from kiloword.interop.names import local_folder

            words[at] = f"{flag}{equals}{local_folder(name)}" if equals else str(local_folder(name))
    return words


def _train(command: MethodCommand, usual: Recipe) -> Train:
    """The defaults of all flags. A dry run needs no --out."""
    defaults: dict[str, Any] = {"recipe": usual}
    if command.recipe and not any(values_of(command.flags, f"--{name}") for name in LENGTHS):
        defaults |= command.recipe.length()
    if any(word.replace("_", "-") == "--dry-run" for word in command.flags):
        defaults["out"] = Path("runs", command.recipe.name if command.recipe else command.method)
    return Train(**defaults)


def _say_recipe(command: MethodCommand, args: Train, recipe: Recipe) -> None:
    """Print the recipe that the run follows: a dry run prints every value with its source."""
    if command.recipe is None or os.environ.get("RANK", "0") != "0" or args.options.quiet:
        return
    size, init = (values_of(command.flags, flag) for flag in ("--size", "--init"))
    replaced = towers_flag(command.recipe, size, init)
    length = {name: value for name in LENGTHS if (value := getattr(args, name)) is not None}
    lines = report(command.recipe, recipe, length, replaced)
    if not args.dry_run:
        lines = [f"{lines[0]} ({len(lines) - 1} values; --dry-run prints them)"]
    if replaced:
        lines.append(f"note       {replaced} replaces the towers of the recipe: size and all of model.*")
    say(*lines)


def _say_tuned(command: MethodCommand, args: Train, recipe: Recipe) -> None:
    """Print the defaults that hold because the run starts from trained weights, and why."""
    if command.recipe is not None or recipe.init is None or os.environ.get("RANK", "0") != "0" or args.options.quiet:
        return
    if recipe.lora.rank:
        say("note       --lora.rank keeps the learning rates and augmentation from scratch: adapters start at 0.")
        return
    scratch = default_recipe(recipe.method, recipe.size, recipe.data.sources)
    usual, gentle = ({leaf.flag: leaf.value for leaf in leaves(r)} for r in (scratch, tuned(scratch)))
    kept = [leaf for leaf in leaves(recipe) if leaf.value == gentle[leaf.flag] != usual[leaf.flag] and not lacks(leaf)]
    if kept:
        shown = ", ".join(
            f"--{leaf.flag} {_value(leaf.value)} (from scratch {_value(usual[leaf.flag])})" for leaf in kept
        )
        say(f"note       --init sets {shown}: {WHY_TUNED}. Flags override.")


def _value(value: Any) -> str:
    """A setting as a flag takes it."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def _defaults(command: MethodCommand) -> tuple[Recipe, Recipe]:
    """The recipe that method, size, data, towers and init imply, and that with the values of --recipe or --config.

    Both on the tokens that --image-features and --text-features name, and on the views of --features.
    """
    stores = [values_of(command.flags, flag) for flag in ("--features", "--image-features", "--text-features")]
    if not any(stores):
        return _without_tokens(command)
    from kiloword.stores.runs import on_stores, towers_of

    plain, usual = _without_tokens(command, towers_of(*stores[1:]))
    return on_stores(plain, *stores), on_stores(usual, *stores)


def _without_tokens(command: MethodCommand, stored: tuple[str, str] = ("", "")) -> tuple[Recipe, Recipe]:
    """As `_defaults`. Args: stored: towers of the tokens, where the flags name none."""
    named, flags = command.recipe, command.flags

    def given(flag: str, name: str, usual: Any = None) -> Any:
        """The value of a flag, or else of the recipe by name."""
        words = values_of(flags, f"--{flag}")
        return words[0] if words else usual if named is None else named.value(name, usual)

    data = values_of(flags, "--data") or tuple(
        ("scenes",) if named is None else named.value("data.sources", ("scenes",))
    )
    size, init = given("size", "size"), given("init", "init")
    of_stores = ("", "") if init else stored  # the folder that the run starts from has them
    image_tower, text_tower = (
        own if own and not values_of(flags, f"--{kind}-tower") else given(f"{kind}-tower", f"{kind}_tower", "")
        for kind, own in zip(("image", "text"), of_stores, strict=True)
    )
    tune = named is None and not values_of(flags, "--lora.rank")  # adapters start at 0, and take larger rates
    if init is None and not (image_tower or text_tower):
        plain = default_recipe(command.method, size or "tiny", data)
    else:
        from kiloword.training import start

        above = (
            default_recipe(command.method, size or "top", data)
            if init is None
            else start.defaults(command.method, init, size, data, tune)
        )
        plain = start.with_towers(above, image_tower, text_tower)
    if named is None:
        return plain, plain
    filled = fill(plain, named, towers=init is None and not towers_flag(named, values_of(flags, "--size"), ()))
    if init is not None:  # whose tokenizer and weights it takes
        model = replace(filled.model, init_std=plain.model.init_std)
        filled = replace(filled, data=replace(filled.data, tokenizer="own"), model=model)
    return plain, replace(filled, method=command.method, size=plain.size, init=init)
