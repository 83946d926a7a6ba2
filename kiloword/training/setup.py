"""Set up a run: from a recipe and its sources to everything that the loop uses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from kiloword.checkpoint.files import write_json
from kiloword.checkpoint.lock import Lock
from kiloword.checkpoint.model_folder import check_fit, not_finite, spec_of
from kiloword.checkpoint.states import drop_old, newest, steps_done
from kiloword.config.by_device import products, settle, summary, workers_of
from kiloword.config.options import RunOptions
from kiloword.config.recipes import Recipe
from kiloword.config.settings import check
from kiloword.data.feature_store import FeatureStore
from kiloword.data.images.time_limit import REASON
from kiloword.data.loader import Loader
from kiloword.data.reading import BadRows, captions_of
from kiloword.data.sampler import Order, steps_per_epoch
from kiloword.data.sources.open import open_data, open_source
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.distributed import collectives
from kiloword.methods.method import Method
from kiloword.methods.registry import preset
from kiloword.model.model import build, initialise
from kiloword.training import compilation, effects, engine, start
from kiloword.training.engine import Reducer
from kiloword.training.learner import Learner
from kiloword.training.log import Log, SinceRow, open_log
from kiloword.training.optimizer import Average, Optimizer
from kiloword.training.run_folder import (
    RunFile,
    check_same_run,
    earlier,
    error_kept,
    forget_error,
    holds_run,
    make_folder,
    run_file,
)
from kiloword.types import Source
from kiloword.watch import mirror


@dataclass
class Run:
    """A prepared run, fresh or resumed."""

    recipe: Recipe
    out: Path
    learner: Learner
    reducer: Reducer
    optimizer: Optimizer
    average: Average
    tokenizer: Tokenizer
    loader: Loader
    order: Order
    bad: BadRows
    log: Log
    device: torch.device
    step: int = 0  # number of steps done
    truncated: int = 0  # number of captions truncated so far
    skipped_steps: int = 0  # steps without an update, see `bad_steps.Guard`
    skipped_in_a_row: int = 0
    since_row: SinceRow = field(default_factory=SinceRow)
    lock: Lock | None = None  # on rank 0
    val: Source | None = None  # the validation data, once it is open


def open_sources(recipe: Recipe) -> Source:
    """The training data of a recipe."""
    return open_data(recipe.data, recipe.model.image.size)


def open_val(recipe: Recipe) -> Source | None:
    """The validation data of a recipe, if it has any."""
    return None if recipe.data.val is None else open_source(recipe.data.val, size=recipe.model.image.size)


def with_length(
    recipe: Recipe, rows: int, steps: int | None = None, epochs: float | None = None, samples: int | None = None
) -> Recipe:
    """The recipe with its number of steps. Raises: ValueError for more than one length, or a length below one step."""
    check(recipe)
    lengths = {k: v for k, v in (("--steps", steps), ("--epochs", epochs), ("--samples", samples)) if v is not None}
    if len(lengths) > 1:
        raise ValueError(f"{' and '.join(lengths)} both say how long to train: give one of them.")
    if epochs is not None and not math.isfinite(epochs):
        raise ValueError(f"--epochs is {epochs}: expected a number.")
    if epochs is not None:
        steps = round(epochs * steps_per_epoch(rows, recipe.batch))
    elif samples is not None:
        steps = samples // recipe.batch
    steps = recipe.steps if steps is None else steps
    if steps < 1:
        length = " ".join(f"{k} {v:g}" for k, v in lengths.items())
        raise ValueError(f"{length} is {steps} steps of batch {recipe.batch} on {rows} images: expected at least 1.")
    return replace(recipe, steps=steps)


def resolve(recipe: Recipe, source: Source, folder: Path, trust_code: bool = False) -> tuple[Recipe, Tokenizer]:
    """Settle what depends on the data: the tokenizer and its vocabulary; with `init`, the shape of the model.

    Args: trust_code: as in `RunOptions`.
    """
    if recipe.init is not None:
        tokenizer = Tokenizer.load(recipe.init)
        return start.settle(recipe, tokenizer, trust_code), tokenizer
    if holds_run(folder.parent):
        tokenizer = Tokenizer.load(folder)
    else:
        tokenizer = Tokenizer.train(captions_of(source), recipe.data.tokenizer_vocab)
    text = replace(recipe.model.text, vocab=tokenizer.vocab, special=tokenizer.roles.ids())
    return replace(recipe, model=replace(recipe.model, text=text)), tokenizer


def prepare(recipe: Recipe, out: Path, source: Source, *, device: str, options: RunOptions) -> Run:
    """Everything the loop uses; when `out` holds a run of this recipe, from the step where it stopped.

    Raises: ValueError when `out` holds a run of another recipe (naming what differs) or cannot be written.
    """
    method = preset(recipe.method, recipe.settings)
    if options.log_to == "tensorboard":
        mirror.check_tensorboard()
    make_folder(out)
    requested, before = recipe, earlier(out)
    recipe = settle(recipe, device, before)
    recipe, tokenizer = resolve(recipe, source, out / "model", options.trust_code)
    file = run_file(recipe, source)
    check_same_run(out, file, options.extend)
    bare = options.parallel == "fsdp" and collectives.ranks() > 1
    learner, started = make_learner(recipe, method, options.trust_code, bare)
    learner._apply(lambda x: x if x.is_meta else x.to(device))  # type: ignore[no-untyped-call]
    spread(learner, recipe, options)
    loader = make_loader(recipe, source, method, tokenizer, options, device)
    main = collectives.rank() == 0
    lock = _claim(file, tokenizer, out) if main else None  # after everything that can refuse the recipe
    run = Run(
        recipe=recipe,
        out=out,
        learner=learner,
        reducer=Reducer(learner),
        optimizer=Optimizer(learner, recipe.optim, recipe.steps),
        average=Average(learner, recipe.optim.ema),
        tokenizer=tokenizer,
        loader=loader,
        order=loader.order,
        bad=BadRows(len(source), recipe.data.bad_share),
        log=Log(None, recipe.steps, quiet=options.quiet or not main),
        device=torch.device(device),
        lock=lock,
    )
    with error_kept(out):
        _fill(run, started, options)
    if run.device.type == "cuda":  # on a CPU no default depends on it
        run.log.say(f"device {summary(requested, recipe, device, loader.workers, before is not None)}")
    return run


def _fill(run: Run, started: str, options: RunOptions) -> None:
    """Load the newest state or begin the run, then open its log. Args: started: see `_begin`."""
    resume(run)
    if collectives.rank() == 0 and 0 < run.step == steps_done(run.out / "state"):
        drop_old(run.out / "state", options.keep_states)  # a run that was killed before this leaves one too many
    if run.step == 0:
        _begin(run, started, [*effects.notes(run.recipe, options), *run.loader.notes])
    engine.check_same(run.learner)
    run.log = open_log(run.out, run.recipe, run.step, options, run.learner.model.head.log_limit)


def _claim(file: RunFile, tokenizer: Tokenizer, out: Path) -> Lock:
    """Lock the folder and write the run's files. Raises: ValueError when another process trains in it."""
    lock = Lock(out)
    tokenizer.save(out / "model")
    write_json(out / "config.json", asdict(file))
    forget_error(out)
    return lock


def _begin(run: Run, started: str, notes: list[str]) -> None:
    """Before the first step: log the notes and the model that the run starts from, and run the method's `prepare`.

    Args: started: message of `make_learner`; notes: of `effects` and of the transforms.
    """
    for note in notes:
        run.log.say(f"note: {note}")
    if holds_run(run.out):
        run.log.say(f"{run.out} holds a model but no state to go on from: the run starts again.")
    if started:
        run.log.say(started)
    prepare = run.learner.method.prepare
    if prepare is not None:
        with products(run.recipe.matmul):
            run.log.say(prepare(run.learner, (b.to(run.device) for b in run.loader.batches())))
        run.average = Average(run.learner, run.recipe.optim.ema)  # of the prepared weights


def spread(learner: Learner, recipe: Recipe, options: RunOptions) -> None:
    """Apply checkpointing, compilation and sharding of the options; weights and results do not change."""
    if options.parallel == "fsdp" and options.compile == "towers":
        raise ValueError("--compile towers and --parallel fsdp exclude each other: with fsdp, compile blocks.")
    compilation.recompute(learner.model, options.checkpointing)
    if options.compile == "cudagraphs":
        compilation.compile_with_graph(learner, recipe.batch // collectives.ranks())
    else:
        compilation.compile(learner.model, options.compile)
    if options.parallel == "fsdp":
        engine.check_same(learner)  # while every rank holds whole matrices
        engine.shard(learner, half=recipe.precision == "bf16")
        engine.materialise(learner, recipe.seed)


def make_loader(
    recipe: Recipe, source: Source, method: Method, tokenizer: Tokenizer, options: RunOptions, device: str = "cpu"
) -> Loader:
    """The loader of this rank's batches. Args: device: the device that trains on them."""
    share = recipe.batch // collectives.ranks() * 3 * recipe.model.image.size**2
    return Loader(
        source,
        _order(recipe, source),
        recipe.data,
        method.shape(recipe.model).text,
        recipe.model.image.size,
        tokenizer,
        transforms=method.transforms,
        stores=_stores(recipe, method),
        truth="truth" in method.needs,
        questions="questions" in method.needs,
        seed=recipe.seed,
        rank=collectives.rank(),
        ranks=collectives.ranks(),
        workers=workers_of(options.workers, device, share),
        timeout=options.timeout,
        resize=recipe.model.preprocess.resize,
    )


def _stores(recipe: Recipe, method: Method) -> list[FeatureStore]:
    """The recipe's feature stores. Raises: ValueError when the method needs one that is missing."""
    stores = [FeatureStore(path) for path in recipe.data.features]
    names = [store.name for store in stores]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ValueError(f"two feature stores are named {twice[0]!r}: name them apart (`embed --name`).")
    missing = [name for name in method.needs if name not in (*names, "truth", "questions")]
    if missing:
        raise ValueError(
            f"{recipe.method} needs precomputed features named {missing[0]!r}: make them once by `kiloword embed "
            f"MODEL --data SRC --out DIR`, then train with --features DIR."
        )
    return stores


def _order(recipe: Recipe, source: Source) -> Order:
    together = recipe.data.together
    if together == 1:
        return Order(len(source), recipe.batch, recipe.seed)
    if recipe.batch % together:
        raise ValueError(
            f"groups of {together} rows do not fill a batch of {recipe.batch}: choose a multiple of {together}."
        )
    if len(source) % together:  # a shorter group would shift all later groups across the borders of batches
        raise ValueError(f"{source.name}: {len(source)} rows are not a multiple of the group size {together}.")
    return Order(len(source), recipe.batch, recipe.seed, full=0, block=together, group=1)


def make_learner(recipe: Recipe, method: Method, trust_code: bool = False, bare: bool = False) -> tuple[Learner, str]:
    """The learner with its initial weights, and a message about those that were loaded ("" when all are new).

    Args: bare: allow towers without storage (see `model.build`). They get storage where a model folder fills them, and
    for user-defined methods, whose constructors may read values.
    """
    model = build(recipe.model, method, recipe.seed, bare and recipe.init is None and ":" not in recipe.method)
    started = "" if recipe.init is None else start.load(model, recipe, trust_code)
    learner = Learner(model, method, recipe.chunk)
    initialise(learner.terms, recipe.seed, "terms.")
    frozen = {"none": (), "image": ("image_tower",), "text": ("text_tower",)}[recipe.freeze]
    for tower in frozen:
        getattr(model, tower).requires_grad_(False)
    return learner.double() if recipe.precision == "fp64" else learner, started


def resume(run: Run) -> None:
    """Continue from the newest state of the run's folder, if there is one; tensors are filled in place."""
    stored = newest(run.out / "state", run.log.say)
    if stored is None:
        return
    tensors = {k: v for k, v in state_of(run)[0].items() if not k.startswith("optimizer/")}
    # the optimizer creates its own tensors only at its first step
    names = [k.removeprefix("optimizer/") for k in stored.specs if k.startswith("optimizer/")]
    moments = run.optimizer.empty_state(names)
    whole = tensors | {f"optimizer/{k}": v for k, v in moments.items()}
    what = f"tensors in {run.out / 'state'}"
    check_fit({k: spec_of(v) for k, v in whole.items()}, stored.specs, what, "this run")
    stored.load(whole)
    _check_finite(run.out / "state", stored.numbers["step"], whole)
    run.optimizer.load_state_dict(moments)
    run.bad.load_state_dict(stored.numbers["bad"])
    run.loader.given_up |= {(0, row) for row in run.bad.rows_of(REASON)}  # another machine might decode them in time
    run.step, run.truncated = stored.numbers["step"], stored.numbers["truncated"]
    run.skipped_steps, run.skipped_in_a_row = stored.numbers["skipped_steps"]
    run.since_row.load_state_dict(stored.numbers["since_row"], run.device)


def _check_finite(folder: Path, step: int, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises: ValueError on all ranks when the state has NaN or infinite values on any rank."""
    if bad := collectives.all_lists(not_finite({name: collectives.local(x) for name, x in tensors.items()})):
        raise ValueError(
            f"the state of step {step} in {folder} cannot be used: {bad[0]} is NaN or infinite. Start again in another "
            f"--out with a smaller --optim.lr, or remove {folder / f'step-{step:09d}.json'} to go on from the state "
            "before, if there is one."
        )


def state_of(run: Run) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors and numbers that `resume` reads."""
    tensors = {f"learner/{k}": v for k, v in run.learner.state_dict().items()}
    tensors |= {f"optimizer/{k}": v for k, v in run.optimizer.state_dict().items()}
    tensors |= {f"average/{k}": v for k, v in run.average.shadow.items()}
    skipped = run.skipped_steps, run.skipped_in_a_row
    numbers = {"truncated": run.truncated, "skipped_steps": list(skipped), "bad": run.bad.state_dict()}
    return tensors, {**numbers, "since_row": run.since_row.state_dict()}


def micro_batches(recipe: Recipe) -> int:
    """Micro-batches of one rank's share. Raises: ValueError when they would not be equal."""
    share = recipe.batch // collectives.ranks()
    if recipe.batch % collectives.ranks():
        raise ValueError(
            f"batch {recipe.batch} does not divide over {collectives.ranks()} ranks: choose a multiple of "
            f"{collectives.ranks()}."
        )
    micro = recipe.micro or share
    if share % micro:
        raise ValueError(
            f"micro {micro} does not divide a rank's share of {share} images: choose a divisor of {share}."
        )
    return share // micro
