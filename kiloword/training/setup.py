"""Set up a run: from a recipe and its sources to everything that the loop uses."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from kiloword.checkpoint.files import write_json
from kiloword.checkpoint.lock import Lock
from kiloword.checkpoint.states import drop_old, steps_done
from kiloword.config.by_device import products
from kiloword.config.options import RunOptions
from kiloword.config.recipes import Recipe
from kiloword.data.loader import Loader
from kiloword.data.reading import BadRows
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.distributed import collectives
from kiloword.methods.method import Method
from kiloword.model.model import build, initialise
from kiloword.model.resnet import batch_statistics
from kiloword.training import compilation, effects, engine, start
from kiloword.training.engine import Reducer
from kiloword.training.learner import Learner
from kiloword.training.log import Log, SinceRow, open_log
from kiloword.training.optimizer import Average, Optimizer
from kiloword.training.resolve import Resolved, resolve
from kiloword.training.run_folder import error_kept, forget_error, holds_run
from kiloword.training.saving import resume
from kiloword.training.validation.best import Best
from kiloword.training.validation.sets import ValSet
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
    bad: BadRows
    log: Log
    device: torch.device
    val: list[ValSet]
    best: Best
    lock: Lock | None  # on rank 0
    step: int = 0  # number of steps done
    truncated: int = 0  # number of captions truncated so far
    skipped_steps: int = 0  # steps without an update, see `meter.Guard`
    skipped_in_a_row: int = 0
    since_row: SinceRow = field(default_factory=SinceRow)


def prepare(recipe: Recipe, out: Path, source: Source, *, device: str, options: RunOptions) -> Run:
    """Everything the loop uses; when `out` holds a run of this recipe, from the step where it stopped.

    Raises: ValueError as `resolve`, and when another process trains in `out`.
    """
    if options.log_to == "tensorboard":
        mirror.check_tensorboard()
    resolved = resolve(recipe, source, out, options, device)
    recipe = resolved.recipe
    bare = options.parallel == "fsdp" and collectives.ranks() > 1
    learner, started = make_learner(recipe, resolved.method, options.trust_code, bare)
    learner._apply(lambda x: x if x.is_meta else x.to(device))  # type: ignore[no-untyped-call]
    spread(learner, recipe, options)
    main = collectives.rank() == 0
    run = Run(
        recipe=recipe,
        out=out,
        learner=learner,
        reducer=Reducer(learner),
        optimizer=Optimizer(learner, recipe.optim, recipe.steps),
        average=Average(learner, recipe.optim.ema),
        tokenizer=resolved.tokenizer,
        loader=resolved.loader,
        bad=BadRows(len(source), recipe.data.bad_share),
        log=Log(None, recipe.steps, quiet=options.quiet or not main),
        device=torch.device(device),
        val=resolved.val,
        best=resolved.best,
        lock=_claim(resolved, out) if main else None,  # after everything that can refuse the recipe
    )
    with error_kept(out):
        resume(run)
        if run.step == 0:
            _begin(run, started, [*effects.notes(recipe, options), *run.loader.notes])
        elif main and run.step == steps_done(out / "state"):
            drop_old(out / "state", options.keep_states)  # a run that was killed before this leaves one too many
        engine.check_same(learner)
        run.log = open_log(out, recipe, run.step, options, learner.model.head.log_limit)
    if run.device.type == "cuda":  # on a CPU no default depends on it
        run.log.say(f"device {resolved.chosen}")
    return run


def _claim(resolved: Resolved, out: Path) -> Lock:
    """Lock the folder and write the run's files. Raises: ValueError when another process trains in it."""
    lock = Lock(out)
    resolved.tokenizer.save(out / "model")
    write_json(out / "config.json", asdict(resolved.file))
    forget_error(out)
    return lock


def _begin(run: Run, started: str, notes: list[str]) -> None:
    """Before the first step: log the notes and the model that the run starts from, and run the method's `prepare`."""
    for note in notes:
        run.log.say(f"note: {note}")
    if holds_run(run.out):
        run.log.say(f"{run.out} holds a model but no state to go on from: the run starts again.")
    if started:
        run.log.say(started)
    if run.learner.method.prepare is not None:
        with products(run.recipe.matmul), batch_statistics(run.learner):
            run.log.say(run.learner.method.prepare(run.learner, (b.to(run.device) for b in run.loader.batches())))
        run.average = Average(run.learner, run.recipe.optim.ema)  # of the prepared weights


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


def spread(learner: Learner, recipe: Recipe, options: RunOptions) -> None:
    """Apply checkpointing, compilation and sharding of the options; weights and results do not change."""
    if options.parallel == "fsdp" and options.compile == "towers":
        raise ValueError("--compile towers and --parallel fsdp exclude each other: with fsdp, compile blocks.")
    compilation.recompute(learner.model, options.checkpointing)
    if options.compile == "cudagraphs":
        compilation.compile_with_graph(learner, recipe.batch // collectives.ranks())
    else:
        compilation.compile_model(learner.model, options.compile)
    if options.parallel == "fsdp":
        engine.check_same(learner)  # while every rank holds whole matrices
        engine.shard(learner, half=recipe.precision == "bf16")
        engine.materialise(learner, recipe.seed)
