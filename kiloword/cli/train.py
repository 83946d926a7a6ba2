"""The verb train. Its flags are the recipe's settings, whose defaults depend on method, size and data.

No torch at import, so that help is instant.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import arg

from kiloword.cli.words import asked, values_of
from kiloword.config.options import RunOptions
from kiloword.config.ranges import check
from kiloword.config.recipes import AugmentConfig, Matmul, ModelConfig, OptimConfig, Precision, Recipe
from kiloword.methods.defaults import default_recipe
from kiloword.terminal import say


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train a model; run the same command again to resume.

    Examples:
      kiloword train siglip --data scenes --out runs/first
      kiloword train clip --data photos/train --val photos/dev --out runs/photos --epochs 30
      kiloword train siglip --data table.csv --out runs/table --size s16 --optim.lr 1e-3 --workers 8
      kiloword train llip --transforms compose --positives mined --features features --data photos/train --out runs/mix
    """

    out: Path = tyro.MISSING  # folder of the run
    data: tuple[str, ...] = ("scenes",)  # folder of tars, brace pattern, csv/tsv/parquet, image folder, scenes
    val: str | None = None  # evaluate retrieval on this
    transforms: str | None = None  # another method's transforms: compose, mixup, cutmix, stylistic (`kiloword methods`)
    positives: str | None = None  # another method's positives: mined, exact
    pair_loss: str | None = None  # another method's pair loss: softmax, sigmoid, supcon, ppcl, matching
    pooling: str | None = None  # another method's pooling: contextual
    uncertainty: str | None = None  # gaussian: features with a variance
    terms: tuple[str, ...] = ()  # more terms of the loss, one or several: caption, mim, inclusion
    features: tuple[str, ...] = ()  # feature stores (`kiloword embed`), joined by key
    extra_captions: tuple[str, ...] = ()  # parquet tables (key, captions) whose captions join the images' own
    raw_captions: bool = True  # whether the images' own captions stay beside the extra ones
    size: str = "tiny"  # of the towers (`kiloword sizes`)
    steps: int | None = None  # length of the run, or --epochs, or --samples
    epochs: float | None = None  # length in passes over the data
    samples: int | None = None  # length in images seen
    batch: int = 128  # images in a step, over all ranks
    micro: int = 0  # images in a micro-batch; 0: a rank's whole share
    chunk: int = 0  # rows and columns of a block of pairs; 0: automatic
    # of the computation; weights stay in fp32 under bf16; auto: bf16 for tiny, and for larger sizes on CUDA
    precision: Precision = "auto"
    matmul: Matmul = "auto"  # precision of fp32 matrix products, e.g. of losses; high: TF32 on CUDA, the default there
    freeze: Literal["none", "image", "text"] = "none"  # tower that is not trained
    init: str | None = None  # model folder to start from, with its towers and image size
    # captions (vqa: answers) of an image in a batch: one (drawn each epoch), all, or N
    captions: int | Literal["one", "all"] = "one"
    decoder: Literal["pillow", "opencv", "simplejpeg"] = "pillow"  # of image files; opencv and simplejpeg are faster
    weights: tuple[float, ...] = ()  # passes over each of several --data in an epoch
    together: int = 1  # group size: consecutive rows that always share a batch (hard negatives)
    vocab: int = 4096  # largest vocabulary of the tokenizer trained on the captions
    bad_share: float = 0.01  # stop when a larger share of the rows is bad
    seed: int = 0  # of initial weights, order and augmentation
    dry_run: bool = False  # print what would run, and stop
    options: Annotated[RunOptions, arg(name="")] = field(default_factory=RunOptions)
    optim: OptimConfig = field(default_factory=OptimConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    model: ModelConfig = field(default_factory=ModelConfig)


def recipe_of(method: str, args: Train, settings: Any) -> Recipe:
    """The recipe that the flags of `train` describe, without its length. Args: settings: of the method, or None.

    Raises: ValueError for numbers that are NaN, infinite or out of their range.
    """
    base = default_recipe(method, args.size, args.data)
    data = replace(
        base.data,
        val=args.val,
        extra_captions=args.extra_captions,
        raw_captions=args.raw_captions,
        features=args.features,
        captions=args.captions,
        decoder=args.decoder,
        weights=args.weights,
        together=args.together,
        tokenizer_vocab=args.vocab,
        bad_share=args.bad_share,
        augment=args.augment,
    )
    method_settings = {} if settings is None else asdict(settings)
    same = ("batch", "micro", "chunk", "precision", "matmul", "freeze", "init", "seed", "optim", "model")
    recipe = replace(base, data=data, settings=method_settings, **{name: getattr(args, name) for name in same})
    check(recipe)
    return recipe


def main(argv: Sequence[str]) -> None:
    """`kiloword train METHOD ...`. Raises: ValueError for an invalid recipe."""
    command = asked(argv, "train siglip --out runs/first")
    usual = _defaults(command.method, command.flags)
    args, settings = command.read(_train(usual))
    from kiloword.training import effects, start
    from kiloword.training.dry_run import rehearse
    from kiloword.training.loop import train
    from kiloword.training.setup import open_sources, with_length

    recipe = recipe_of(command.method, args, settings)
    start.check(recipe)
    effects.check(recipe, usual, args.options.trust_code)
    source = open_sources(recipe)
    recipe = with_length(recipe, len(source), args.steps, args.epochs, args.samples)
    if args.dry_run:
        rehearse(recipe, source, args.out, args.options)
        return
    folder = train(recipe, args.out, source, args.options)
    if os.environ.get("RANK", "0") == "0":  # of torchrun
        say(f"model: {folder}")


def _train(base: Recipe) -> Train:
    """The flags with the defaults of a recipe."""
    return Train(
        size=base.size,
        optim=base.optim,
        augment=base.data.augment,
        model=base.model,
        batch=base.batch,
        captions=base.data.captions,
        precision=base.precision,
        matmul=base.matmul,
    )


def _defaults(method: str, argv: Sequence[str]) -> Recipe:
    """The recipe that method, size, data and init imply."""
    data = values_of(argv, "--data") or ("scenes",)
    size, init = ((values_of(argv, flag) or (None,))[0] for flag in ("--size", "--init"))
    if init is None:
        return default_recipe(method, size or "tiny", data)
    from kiloword.training import start

    return start.defaults(method, init, size, data)
