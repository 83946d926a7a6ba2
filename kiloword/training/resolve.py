"""Resolve a recipe: everything that depends on data, device and an earlier run, before the first file is written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import nn

from kiloword.config.options import RunOptions
from kiloword.config.recipes import NO_MICRO, Recipe
from kiloword.config.settings import check
from kiloword.data.edits import MixtureSource
from kiloword.data.joins import omitted
from kiloword.data.loader import Loader
from kiloword.data.open import open_data
from kiloword.data.reading import BadRows, captions_of
from kiloword.data.sampler import BLOCK, GROUP, Order
from kiloword.data.stored import WithTokens
from kiloword.data.text.tokenizer import Tokenizer, vocabulary
from kiloword.distributed import collectives
from kiloword.distributed.by_device import settle, summary, workers_of
from kiloword.errors import refuse
from kiloword.files import Lock
from kiloword.interop.text_towers import tokenizer_of
from kiloword.methods.method import Method
from kiloword.methods.registry import preset
from kiloword.runs.page import Differs
from kiloword.stores.features import FeatureStore
from kiloword.stores.runs import stored
from kiloword.training import start, tuning
from kiloword.training.log import Log
from kiloword.training.optimizer import Average, Optimizer
from kiloword.training.run_folder import RunFile, check_same_run, earlier, holds_run, run_file
from kiloword.training.step import Learner
from kiloword.training.tuning import Unfreezing
from kiloword.training.validation import Best, ValSet, check_best, open_val, prefix
from kiloword.types import Source, Transform

MOST_EPOCHS = 100  # of a run whose length the user does not choose


@dataclass
class Plan:
    """A run that nothing refuses: `--dry-run` prints it, training carries it out."""

    recipe: Recipe  # the whole recipe
    method: Method
    source: Source
    out: Path
    options: RunOptions
    device: torch.device
    tokenizer: Tokenizer
    loader: Loader
    val: list[ValSet]
    best: Best
    file: RunFile  # the future config.json of the run
    began: str  # see `start.began`
    chosen: str  # the defaults of the device, with their reasons
    notes: list[str]  # for the user


@dataclass(kw_only=True)
class Run(Plan):
    """A prepared run, fresh or resumed."""

    learner: Learner
    reducer: nn.Module  # see `engine.replicated`
    optimizer: Optimizer
    average: Average
    unfreezing: Unfreezing
    bad: BadRows
    log: Log
    lock: Lock | None  # on rank 0
    step: int = 0  # number of steps done
    truncated: int = 0  # number of captions truncated so far
    skipped_steps: int = 0  # steps without an update, see `meter.Meter`
    skipped_in_a_row: int = 0
    reports: list[dict[str, float]] = field(default_factory=list)  # of the steps since the last row
    captions: int = 0  # of this rank since the last row
    unusual: list[Differs] = field(default_factory=list)  # settings, for the report

    @property
    def finished(self) -> bool:
        """Whether no step is left."""
        return self.step >= self.recipe.steps or self.best.stalled


def resolve(recipe: Recipe, source: Source, out: Path, options: RunOptions, device: str) -> Plan:
    """Resolve a recipe for a run in `out`; no file is written. A collective.

    Raises: ValueError for settings, data, feature stores or validation data that cannot be used, and when `out` holds a
    run of another recipe (naming what differs).
    """
    check(recipe)
    method, parts = preset(recipe.method, recipe.settings), micro_batches(recipe)
    if recipe.batch == 1 and (method.pair_weight or method.contrasts):
        raise ValueError(
            f"--batch 1: {recipe.method} compares an image with the texts of other images in its batch, and has none. "
            "Use a larger batch; --micro 1 needs as little memory."
        )
    check_best(options, recipe)
    tuning.check(recipe)
    trains_norms = recipe.model.image.tower != "vit" and ("image" not in recipe.freeze or bool(recipe.unfreeze))
    if parts > 1 and trains_norms:
        raise ValueError(f"micro {recipe.micro} splits a batch of {recipe.batch} images, but {NO_MICRO}")
    val = open_val(recipe)  # a wrong name is refused now, not after hours
    requested, before = recipe, earlier(out)
    recipe, tokenizer = _with_tokenizer(
        settle(recipe, device, before.recipe if before else None), source, out, options.trust_code
    )
    frozen = tuning.reason(recipe)
    recipe = replace(recipe, freeze=tuning.frozen(recipe))
    method, file = preset(recipe.method, recipe.settings), run_file(recipe, source)
    if before is not None:
        check_same_run(out, before, file, options.extend)
    loader = make_loader(recipe, source, method, tokenizer, options, device)
    often = ""
    if (epochs := recipe.steps // loader.order.steps_per_epoch) >= MOST_EPOCHS:
        often = (
            f"{recipe.steps} steps are {epochs} epochs of {loader.order.rows} images. A model that sees its images so "
            "often may learn them by heart: --val with --keep-best keeps the best one."
        )
    return Plan(
        recipe,
        method,
        source,
        out,
        options,
        torch.device(device),
        tokenizer,
        loader,
        val,
        Best(out, options.keep_best, options.patience, [prefix(one, val) for one in val]),
        file,
        start.began(recipe),
        summary(requested, recipe, device, loader.workers, before is not None),
        list(filter(None, (frozen, often, *start.notes(recipe), *loader.notes))),
    )


def open_sources(recipe: Recipe, source: Source | None = None) -> Source:
    """The training data of a recipe. Args: source: in place of those that it names."""
    return open_data(recipe.data, recipe.model.image.size, source)


def with_length(recipe: Recipe, rows: int, most: int = 0, **lengths: float | None) -> Recipe:
    """The recipe with its number of steps.

    Args: lengths: one of steps, epochs and samples; most: epochs, where there is none. Raises: ValueError for more than
    one length, or a length below one step.
    """
    check(recipe)
    given = {f"--{name}": value for name, value in lengths.items() if value is not None}
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} both say how long to train: give one of them.")
    flag, value = next(iter(given.items()), ("", recipe.steps))
    epoch = rows // recipe.batch
    made = {"--epochs": value * epoch, "--samples": value // recipe.batch}.get(flag, value)
    if most and not flag:
        made = min(made, max(1, most * epoch))
    if not 0.5 < made < math.inf:
        raise ValueError(
            f"{flag} {value:g} is {made:g} steps of batch {recipe.batch} on {rows} images: expected at least 1. A "
            "smaller --batch gives more steps in an epoch."
        )
    return replace(recipe, steps=round(made))


def micro_batches(recipe: Recipe, ranks: int = 0) -> int:
    """Micro-batches of one rank's share. Args: ranks: 0: those that there are.

    Raises: ValueError when they would not be equal.
    """
    ranks, batch = ranks or collectives.ranks(), recipe.batch
    if batch % ranks:
        raise ValueError(f"batch {batch} does not divide over {ranks} ranks: choose a multiple of {ranks}.")
    share = batch // ranks
    if share % (micro := recipe.micro or share):
        raise ValueError(f"micro {micro} does not divide a rank's share of {share} images: choose a divisor.")
    return share // micro


def _with_tokenizer(recipe: Recipe, source: Source, out: Path, trust_code: bool) -> tuple[Recipe, Tokenizer]:
    """The recipe with its vocabulary, and with `init` the shape of the model; and the tokenizer, that of the run in
    `out` if there is one."""
    given = f"--init {recipe.init}" if recipe.init else recipe.text_tower and f"--text-tower {recipe.text_tower}"
    if given and recipe.data.tokenizer != "own":
        raise ValueError(f"--tokenizer {recipe.data.tokenizer}: a run with {given} has the tokenizer of that model.")
    if holds_run(out):
        tokenizer = Tokenizer.load(out / "model")
    elif recipe.init is not None:
        tokenizer = Tokenizer.load(recipe.init)
    elif recipe.text_tower:
        tokenizer = tokenizer_of(recipe.text_tower)
    elif recipe.data.tokenizer == "own":
        tokenizer = Tokenizer.train(captions_of(source), recipe.data.tokenizer_vocab)
    else:
        tokenizer = vocabulary(recipe.data.tokenizer)
    if recipe.init is not None:
        return start.settle(recipe, tokenizer, trust_code), tokenizer
    text = replace(recipe.model.text, vocab=tokenizer.vocab, special=tokenizer.roles.ids())
    return replace(recipe, model=replace(recipe.model, text=text)), tokenizer


def make_loader(
    recipe: Recipe, source: Source, method: Method, tokenizer: Tokenizer, options: RunOptions, device: str = "cpu"
) -> Loader:
    """The loader of this rank's batches. Args: device: the device that trains on them."""
    images, size = recipe.batch // collectives.ranks(), recipe.model.image.size
    read = stored(_stores(recipe, method), recipe.data, source, tokenizer, method.transforms, method.inputs)
    lists, transforms = omitted(source), bound(method.transforms, source)
    notes = [f"--keep {lists}" if lists else "", *(getattr(one, "note", None) for one in transforms)]
    notes += [one.note(source) for one in method.inputs.values() if one.note]
    return Loader(
        WithTokens(source, read.image_tokens, lean=True) if read.image_tokens else source,
        _order(recipe, source),
        recipe.data,
        method.shape(recipe.model).text,
        size,
        read.tokenizer,
        transforms,
        method.inputs,
        read.stores,
        read.shown,
        notes=list(filter(None, notes)),
        truth="truth" in method.needs,
        questions="questions" in method.needs,
        seed=recipe.seed,
        rank=collectives.rank(),
        ranks=collectives.ranks(),
        workers=workers_of(options.workers, device, images, size, train=getattr(source, "natural", True)),
        timeout=options.timeout,
        resize=recipe.model.preprocess.resize,
    )


def bound(transforms: Sequence[Transform], source: Source) -> list[Transform]:
    """Transforms that know the data set. Raises: ValueError for files that are unusable or of other data."""
    return [t.bind(source, FeatureStore) if hasattr(t, "bind") else t for t in transforms]


def _stores(recipe: Recipe, method: Method) -> list[FeatureStore]:
    """The recipe's feature stores. Raises: ValueError for those that the method does not read, and those it lacks."""
    stores = [FeatureStore(path) for path in recipe.data.features]
    names = [store.name for store in stores]
    if len({*names}) < len(names):
        raise ValueError(f"feature stores have the same name, of {', '.join(names)}: name them apart (`embed --name`).")
    if unread := [store.name for store in stores if store.name not in method.needs and not store.file.augmented]:
        raise ValueError(f"{recipe.method} reads no features named {unread[0]!r}: omit --features, or name others.")
    if missing := [name for name in method.needs if name not in (*names, "truth", "questions")]:
        raise ValueError(
            f"{recipe.method} needs precomputed features named {missing[0]!r}: make them once by `kiloword embed "
            f"MODEL --data SRC --out DIR`, then train with --features DIR."
        )
    return stores


def visited(recipe: Recipe, source: Source) -> int:
    """Number of rows that a run visits. Raises: ValueError for rows and groups of rows that there are not."""
    rows, together, n = recipe.data.rows, recipe.data.together, len(source)
    changing = isinstance(source, MixtureSource) and any(weight % 1 for weight in source.weights)
    wrong = {
        f"--rows is {rows}, but {source.name} has {n} rows: expected at most {n}, or 0 for all": rows > n,
        f"--rows {rows} and --together {together} exclude each other": rows and together > 1,
        f"{source.name}: rows change between epochs, which --rows cannot fix: use whole weights": rows and changing,
        f"--together {together} does not fill a batch of {recipe.batch}: choose a multiple of it": recipe.batch
        % together,
        # a shorter group would shift all later groups across the borders of batches
        f"{source.name}: {n} rows are no multiple of --together {together}": n % together,
    }
    refuse(wrong)
    return rows or n


def _order(recipe: Recipe, source: Source) -> Order:
    rows, together = visited(recipe, source), recipe.data.together
    if together > 1:
        return Order(rows, recipe.batch, recipe.seed, full=0, block=together, group=1)
    far = getattr(source, "remote", False)
    block, group = (8 * BLOCK, GROUP // 8) if far else (BLOCK, GROUP)  # fewer shards at a time: they come whole
    of = len(source) if rows < len(source) else 0
    return Order(rows, recipe.batch, recipe.seed, of=of, block=block, group=group)
