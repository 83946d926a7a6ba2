"""Set up a run: from a recipe and its sources to everything that the loop uses."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import nn

from kiloword.config.options import RunOptions
from kiloword.config.recipes import Recipe
from kiloword.data.edits import parts_of
from kiloword.data.loader import Loader
from kiloword.data.reading import BadRows
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.distributed import collectives
from kiloword.distributed.by_device import products
from kiloword.files import Lock, write_json
from kiloword.interop.towers import check_declared
from kiloword.methods.method import Method
from kiloword.model.model import initialise
from kiloword.models.build import build
from kiloword.models.states import drop_old, steps_done
from kiloword.stores.runs import check_trunk
from kiloword.stores.tokens import ImageTokens, TextTokens, opened
from kiloword.training import compilation, effects, engine, start, tuning
from kiloword.training.learner import Learner
from kiloword.training.log import Log
from kiloword.training.optimizer import Average, Optimizer
from kiloword.training.resolve import Resolved, resolve
from kiloword.training.run_folder import error_kept, forget_error, holds_run
from kiloword.training.saving import resume
from kiloword.training.validation.best import Best
from kiloword.training.validation.sets import ValSet
from kiloword.types import Source
from kiloword.watch import mirror
from kiloword.watch.sinks import check_installed


@dataclass
class Run:
    """A prepared run, fresh or resumed."""

    recipe: Recipe
    out: Path
    learner: Learner
    reducer: nn.Module  # see `engine.replicated`
    optimizer: Optimizer
    average: Average
    tokenizer: Tokenizer
    loader: Loader
    bad: BadRows
    log: Log
    device: torch.device
    val: list[ValSet]
    best: Best
    unfreezing: tuning.Unfreezing
    lock: Lock | None  # on rank 0
    step: int = 0  # number of steps done
    truncated: int = 0  # number of captions truncated so far
    skipped_steps: int = 0  # steps without an update, see `meter.Meter`
    skipped_in_a_row: int = 0
    reports: list[dict[str, float]] = field(default_factory=list)  # of the steps since the last row
    captions: int = 0  # of this rank since the last row

    @property
    def finished(self) -> bool:
        """Whether no step is left."""
        return self.step >= self.recipe.steps or self.best.stalled


def prepare(recipe: Recipe, out: Path, source: Source, *, device: str, options: RunOptions) -> Run:
    """Everything the loop uses; when `out` holds a run of this recipe, from the step where it stopped.

    Raises: ValueError as `resolve`, and when another process trains in `out`.
    """
    if options.log_to == "tensorboard":
        mirror.check_tensorboard("--log-to tensorboard")
    elif options.log_to != "file":
        check_installed(options.log_to)
    resolved = resolve(recipe, source, out, options, device)
    recipe = resolved.recipe
    bare = options.parallel == "fsdp" and collectives.ranks() > 1
    learner, started = make_learner(recipe, resolved.method, options.trust_code, bare, steps_done(out / "state") > 0)
    for stores in (opened(recipe.data.image_features, ImageTokens), opened(recipe.data.text_features, TextTokens)):
        weights = not holds_run(out)  # a run that is resumed compares their origin
        check_trunk(learner.model, stores, weights, frozen=True)
    learner._apply(lambda x: x if x.is_meta else x.to(device))  # type: ignore[no-untyped-call]
    spread(learner, recipe, options)
    main = collectives.rank() == 0
    run = Run(
        recipe=recipe,
        out=out,
        learner=learner,
        reducer=engine.replicated(learner),
        optimizer=Optimizer(learner, recipe.optim, recipe.steps),
        average=Average(learner, recipe.optim.ema),
        tokenizer=resolved.tokenizer,
        loader=resolved.loader,
        bad=BadRows(sum(map(len, parts_of(source))), recipe.data.bad_share),
        log=Log(recipe, quiet=options.quiet or not main),
        device=torch.device(device),
        val=resolved.val,
        best=resolved.best,
        unfreezing=tuning.Unfreezing(learner, recipe),
        lock=_claim(resolved, out) if main else None,  # after everything that can refuse the recipe
    )
    with error_kept(out):
        resume(run)
        if run.step == 0:
            notes = [
                ". ".join(filter(None, (tuning.summary(learner, recipe), resolved.frozen))),
                *effects.notes(recipe, options),
                *run.loader.notes,
            ]
            _begin(run, started, list(filter(None, notes)))
        elif main and run.step == steps_done(out / "state"):
            # a run that was killed before this leaves one too many
            drop_old(out / "state", options.keep_states, run.step)
        if main:
            run.log.open(out, run.step, options.log_to, learner.model.head.log_limit)
    if run.device.type == "cuda" or (run.loader.workers and options.workers == "auto"):  # else no default depends on it
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
        with products(run.recipe.matmul):
            run.log.say(run.learner.method.prepare(run.learner, (b.to(run.device) for b in run.loader.batches())))
        run.average = Average(run.learner, run.recipe.optim.ema)  # of the prepared weights
    for change in run.learner.method.after_step:
        change(run.learner, 0)


def make_learner(
    recipe: Recipe, method: Method, trust_code: bool = False, bare: bool = False, resumed: bool = False
) -> tuple[Learner, str]:
    """The learner with its initial weights, and a message about those that were loaded ("" when all are new).

    Args: bare: allow towers without storage (see `model.build`). They get storage where a model folder or the file of a
    trunk fills them, and for user-defined methods, whose constructors may read values; resumed: a state has the weights
    of all trunks, so that their files are not read.
    """
    filled = recipe.init is not None or recipe.model.image.trunk.name or recipe.model.text.trunk.name
    if not resumed:
        check_declared(recipe.model, recipe.image_tower, recipe.text_tower)
    model = build(recipe.model, method, recipe.seed, bare and not filled and ":" not in recipe.method)
    started = "" if recipe.init is None else start.load(model, recipe, trust_code)
    if not resumed:
        started += start.load_towers(model, recipe)
    learner = Learner(model, method, recipe.chunk, recipe.data.augment.drop_patches)
    initialise(learner.terms, recipe.seed, "terms.")
    initialise(learner.contrasts, recipe.seed, "contrasts.")
    tuning.freeze(learner, recipe)
    if recipe.lora.rank:
        started = " ".join(filter(None, (started, tuning.adapt(model, recipe))))
    return learner.double() if recipe.precision == "fp64" else learner, started


def spread(learner: Learner, recipe: Recipe, options: RunOptions) -> None:
    """Apply checkpointing, compilation and sharding of the options; weights and results do not change."""
    if options.parallel == "fsdp" and options.compile == "towers":
        raise ValueError("--compile towers and --parallel fsdp exclude each other: with fsdp, compile blocks.")
    compilation.recompute(learner.model, options.checkpointing)
    compilation.compile_model(learner.model, options.compile)
    if options.parallel == "fsdp":
        engine.shard(learner, half=recipe.precision == "bf16")
        engine.materialise(learner, recipe.seed)
