"""The verb train: its flags are the recipe's settings, whose defaults depend on method, size and data.

No torch at import: help is instant.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, make_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import arg

from kiloword import recipes
from kiloword.options import Options
from kiloword.recipes import AugmentConfig, ModelConfig, OptimConfig, Recipe


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train a model; the same command again resumes.

    Examples:
      kiloword train siglip --data scenes --out runs/first
      kiloword train clip --data photos/train --val photos/dev --out runs/photos --epochs 30
      kiloword train siglip --data table.csv --out runs/table --size s16 --optim.lr 1e-3 --workers 8
      kiloword train llip --views compose --positives mined --side features --data photos/train --out runs/mix
    """

    out: Path = tyro.MISSING  # folder of the run
    data: tuple[str, ...] = ("scenes",)  # folder of tars, brace pattern, csv/tsv/parquet, picture folder, scenes
    val: str | None = None  # evaluate retrieval on this
    views: str | None = None  # another method's views: compose, mixup, cutmix, stylistic (`kiloword methods`)
    positives: str | None = None  # another method's positives: mined, exact
    pair_loss: str | None = None  # another method's pair loss: softmax, sigmoid, supcon, ppcl, matching
    pooling: str | None = None  # another method's pooling: contextual
    uncertainty: str | None = None  # gaussian: features with a variance
    terms: tuple[str, ...] = ()  # more terms of the loss, one or several: caption, mim, inclusion
    side: tuple[str, ...] = ()  # side tables of features (`kiloword embed`), joined by key
    extra_captions: tuple[str, ...] = ()  # parquet tables (key, captions) whose captions join the pictures' own
    raw_captions: bool = True  # whether the pictures' own captions stay beside the extra ones
    size: str = "tiny"  # of the towers (`kiloword sizes`)
    steps: int | None = None  # length of the run, or --epochs, or --samples
    epochs: float | None = None  # length in passes over the data
    samples: int | None = None  # length in pictures seen
    batch: int = 128  # pictures, over all ranks
    micro: int = 0  # pictures a micro-batch; 0: a rank's whole share
    chunk: int = 0  # rows and columns of pairs a block; 0: chosen
    precision: Literal["fp64", "fp32", "bf16"] = "fp32"
    freeze: Literal["none", "image", "text"] = "none"  # a tower that stays as it is
    init: str | None = None  # model folder to start from; brings its towers and picture size
    captions: int | Literal["one", "all"] = "one"  # of a picture in a batch: one (redrawn each epoch), all, or a number
    decoder: Literal["pillow", "opencv", "simplejpeg"] = "pillow"
    weights: tuple[float, ...] = ()  # how often each of several --data comes in an epoch
    together: int = 1  # consecutive rows that stand in a batch together (groups of hard negatives)
    vocab: int = 4096  # most entries of the tokenizer that is trained on the captions
    bad_share: float = 0.01  # stop when a larger share of the rows is bad
    seed: int = 0
    dry_run: bool = False  # say what would run, and stop
    options: Annotated[Options, arg(name="")] = field(default_factory=Options)
    optim: OptimConfig = field(default_factory=OptimConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    model: ModelConfig = field(default_factory=ModelConfig)


def recipe_of(method: str, args: Train, settings: Any) -> Recipe:
    """The recipe that the flags of `train` describe, but for its length; settings: the method's own, or None."""
    base = recipes.default(method, args.size, args.data)
    data = replace(
        base.data,
        val=args.val,
        extra_captions=args.extra_captions,
        raw_captions=args.raw_captions,
        side=args.side,
        captions=args.captions,
        decoder=args.decoder,
        weights=args.weights,
        together=args.together,
        tokenizer_vocab=args.vocab,
        bad_share=args.bad_share,
        augment=args.augment,
    )
    own = {} if settings is None else asdict(settings)
    same = ("batch", "micro", "chunk", "precision", "freeze", "init", "seed", "optim", "model")
    return replace(base, data=data, settings=own, **{name: getattr(args, name) for name in same})


MIXING = ("pooling", "views", "positives", "pair_loss", "uncertainty", "terms")  # flags that name a piece for a slot


def main(argv: Sequence[str]) -> None:
    """`kiloword train METHOD ...`. Raises: ValueError for a recipe that cannot be."""
    method = argv[0] if argv and not argv[0].startswith("-") else ""
    if not method and not {"-h", "--help"} & set(argv):
        raise ValueError(
            "train needs a method first, e.g. kiloword train siglip --out runs/first (`kiloword methods`)."
        )
    rest = argv[1:] if method else argv
    _check_once(rest)
    method = mixed(method, rest)
    both = tyro.cli(_train_type(method, rest), args=rest, prog="kiloword train METHOD", description=Train.__doc__)
    args: Train = both.run
    from kiloword import start
    from kiloword.dry_run import describe, rehearse
    from kiloword.prepare import open_sources, with_length
    from kiloword.train import train

    recipe = recipe_of(method, args, both.settings)
    start.check(recipe)
    source = open_sources(recipe)
    recipe = with_length(recipe, len(source), args.steps, args.epochs, args.samples)
    if args.dry_run:
        rehearse(recipe, source, args.out, args.options)
        print(describe(recipe, source, args.out))
        return
    folder = train(recipe, args.out, source, args.options)
    if os.environ.get("RANK", "0") == "0":  # of torchrun
        print(f"model: {folder}")


def mixed(method: str, argv: Sequence[str]) -> str:
    """The method with the pieces that flags name: llip, --views compose -> "llip+compose".

    Raises: ValueError for a piece that fills another slot than its flag's, and for --terms of nothing.
    """
    if "--terms" in argv and not _values_of(argv, "--terms"):
        raise ValueError("--terms names nothing: expected one or several of caption, mim and inclusion behind it.")
    chosen = [(slot, word) for slot in MIXING for word in _values_of(argv, f"--{slot.replace('_', '-')}")]
    if not (method and chosen):
        return method
    from kiloword.methods import pieces

    known = pieces()
    for slot, word in chosen:
        fits = [name for name, piece in known.items() if piece.slot == slot.replace("_", " ")]
        if word not in fits:
            raise ValueError(f"--{slot.replace('_', '-')} is {word!r}: expected {' or '.join(fits)}.")
    return "+".join([method, *(word for _, word in chosen)])


def _train_type(method: str, argv: Sequence[str]) -> Any:
    """`Train` with the defaults that method, size, data and init imply, beside the method's own settings."""
    kind: Any = None
    if method:
        from kiloword.methods import find

        kind = find(method)[1]
    base = _defaults(method, argv)
    run = Train(
        size=base.size,
        optim=base.optim,
        augment=base.data.augment,
        model=base.model,
        batch=base.batch,
        captions=base.data.captions,
        precision=base.precision,
    )
    settings = (kind, field(default_factory=kind)) if kind else (Annotated[None, tyro.conf.Suppress], None)
    return make_dataclass(
        "Both", [("run", Annotated[Train, arg(name="")], field(default=run)), ("settings", *settings)]
    )


def _defaults(method: str, argv: Sequence[str]) -> Recipe:
    data = _values_of(argv, "--data") or ("scenes",)
    size, init = ((_values_of(argv, flag) or (None,))[0] for flag in ("--size", "--init"))
    if init is None:
        return recipes.default(method, size or "tiny", data)
    from kiloword import start

    return start.defaults(method, init, size, data)


def _check_once(argv: Sequence[str]) -> None:
    """Raises: ValueError for a flag that adds something and comes twice: the first would be forgotten.

    Of any other flag the last counts, so that a command can be changed at its end.
    """
    flags = [word.partition("=")[0].replace("_", "-") for word in argv if word.startswith("--")]
    adds = [f"--{name.replace('_', '-')}" for name in (*MIXING, "data", "side", "extra_captions", "weights")]
    twice = next((flag for flag in adds if flags.count(flag) > 1), None)
    if twice is not None:
        raise ValueError(f"{twice} is given twice: give it once; where it takes several values, they follow it.")


def _values_of(argv: Sequence[str], flag: str) -> tuple[str, ...]:
    """The values that follow a flag, or come with it behind "="; of a flag that comes again, the last ones."""
    for n, word in reversed(list(enumerate(argv))):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") != flag:
            continue
        if equals:
            return (value,)
        rest = list(argv[n + 1 :])
        end = next((i for i, w in enumerate(rest) if w.startswith("--")), len(rest))
        return tuple(rest[:end])
    return ()
