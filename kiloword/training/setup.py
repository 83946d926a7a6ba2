"""Set up a run: from a recipe and its sources to everything that the loop uses, and what of that a state holds."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from kiloword.config.options import RunOptions
from kiloword.config.recipes import ModelFile, Recipe, size_of
from kiloword.data.edits import parts_of
from kiloword.data.reading import BadRows
from kiloword.distributed import collectives
from kiloword.distributed.by_device import products
from kiloword.files import Lock, write_json
from kiloword.interop.towers import check_declared
from kiloword.methods.method import Method
from kiloword.model.model import initialise
from kiloword.models.build import build
from kiloword.models.model_folder import check_fit
from kiloword.models.saving import Snapshot
from kiloword.models.states import drop_old, newest, steps_done
from kiloword.models.tensors import spec_of
from kiloword.runs.run import ERROR
from kiloword.runs.trackers import check_installed
from kiloword.stores.runs import check_trunk
from kiloword.stores.tokens import token_stores
from kiloword.training import engine, start, tuning
from kiloword.training.log import Log
from kiloword.training.optimizer import Average, Optimizer
from kiloword.training.resolve import Run, resolve
from kiloword.training.run_folder import error_kept, holds_run
from kiloword.training.step import Learner
from kiloword.types import Source


def prepare(recipe: Recipe, out: Path, source: Source, *, device: str, options: RunOptions) -> Run:
    """Everything the loop uses; when `out` holds a run of this recipe, from the step where it stopped.

    Raises: ValueError as `resolve`, and when another process trains in `out` or nothing can be written there.
    """
    if options.log_to != "file":
        check_installed(options.log_to)
    plan = resolve(recipe, source, out, options, device)
    recipe, main = plan.recipe, collectives.rank() == 0
    bare = options.parallel == "fsdp" and collectives.ranks() > 1
    learner, started = make_learner(recipe, plan.method, options.trust_code, bare, steps_done(out / "state") > 0)
    for stores in token_stores(recipe.data):
        check_trunk(learner.model, stores, weights=not holds_run(out), frozen=True)  # else their origins are compared
    learner._apply(lambda x: x if x.is_meta else x.to(device))  # type: ignore[no-untyped-call]
    spread(learner, recipe, options)
    run = Run(
        **vars(plan),
        learner=learner,
        reducer=engine.replicated(learner),
        optimizer=Optimizer(learner, recipe.optim, recipe.steps),
        average=Average(learner, recipe.optim.ema),
        unfreezing=tuning.Unfreezing(learner, recipe),
        bad=BadRows(sum(map(len, parts_of(source))), recipe.data.bad_share),
        log=Log(recipe, quiet=options.quiet or not main),
        lock=Lock(out) if main else None,  # after everything that can refuse the recipe
    )
    if main:
        plan.tokenizer.save(out / "model")
        write_json(out / "config.json", asdict(plan.file))
        (out / ERROR).unlink(missing_ok=True)  # of an earlier process
    with error_kept(out):
        resume(run)
        if run.step == 0:
            _begin(run, started)
        elif main and run.step == steps_done(out / "state"):
            # a run that was killed before this leaves one too many
            drop_old(out / "state", options.keep_states, run.step)
        if main:
            run.log.open(out, run.step, options.log_to)
    if run.device.type == "cuda" or (run.loader.workers and options.workers == "auto"):  # else no default depends on it
        run.log.say(f"device {plan.chosen}")
    return run


def _begin(run: Run, started: str) -> None:
    """Before the first step: print notes and the model that the run starts from, and run the method's `prepare`."""
    say = run.log.say
    for note in filter(None, (tuning.summary(run.learner, run.recipe), *run.notes)):
        say(f"note: {note}")
    if holds_run(run.out):
        say(f"{run.out} holds a model but no state to go on from: the run starts again.")
    if started:
        say(started)
    if run.method.prepare is not None:
        with products(run.recipe.matmul):
            say(run.method.prepare(run.learner, (b.to(run.device) for b in run.loader.batches())))
        run.average = Average(run.learner, run.recipe.optim.ema)  # of the prepared weights
    run.learner.after_step(0)


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
    engine.recompute(learner.model, options.checkpointing)
    engine.compile_model(learner.model, options.compile)
    if options.parallel == "fsdp":
        engine.shard(learner, half=recipe.precision == "bf16")
        engine.materialise(learner, recipe.seed)


def snapshot(run: Run) -> Snapshot:
    """The tensors and numbers that `resume` reads. A collective."""
    tensors = {f"learner/{k}": v for k, v in run.learner.state_dict().items()}
    tensors |= {f"optimizer/{k}": v for k, v in run.optimizer.state_dict().items()}
    tensors |= {f"average/{k}": v for k, v in run.average.shadow.items()}
    numbers = {
        "truncated": run.truncated,
        "skipped_steps": [run.skipped_steps, run.skipped_in_a_row],
        "bad": run.bad.state_dict(),
        "reports": list(run.reports),
        "captions": collectives.add_up(run.captions),
        "best": run.best.state,
    }
    same = {name: getattr(run.recipe, name) for name in ("method", "settings", "model")}
    file = ModelFile(
        **same, size=size_of(run.recipe.model), steps=run.step, data=f"{run.loader.source.name}{run.began}"
    )
    return Snapshot(run.step, tensors, numbers, file)


def resume(run: Run) -> None:
    """Continue from the newest state of the run's folder, if there is one; tensors are filled in place."""
    stored = newest(run.out / "state", run.log.say)
    if stored is None:
        return
    tensors = snapshot(run).tensors
    what = f"tensors in {run.out / 'state'}"
    check_fit({k: spec_of(v) for k, v in tensors.items()}, stored.specs, what, "this run")
    stored.load(tensors)
    numbers = stored.numbers
    run.bad.load_state_dict(numbers["bad"])
    run.step, run.truncated, run.reports = numbers["step"], numbers["truncated"], numbers["reports"]
    run.skipped_steps, run.skipped_in_a_row = numbers["skipped_steps"]
    run.best.resume(numbers["best"], run.step)
    run.captions = 0 if collectives.rank() else numbers["captions"]
