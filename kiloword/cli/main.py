"""The verbs, each a thin call. No torch at import: help is instant."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, Literal

import tyro
from tyro.conf import Positional, arg

from kiloword.__version__ import __version__
from kiloword.addresses import scrubbed
from kiloword.checkpoint.trust import NONE, Trust
from kiloword.cli.score import score
from kiloword.cli.watch import watch
from kiloword.cli.words import interruption, settled
from kiloword.distributed import launch
from kiloword.errors import sentence_of
from kiloword.generation.options import GenerationOptions
from kiloword.mining.options import MineOptions
from kiloword.terminal import guarded, say, show_traceback, warn

app = tyro.extras.SubcommandApp()
GENERATE = GenerationOptions()
MINE = MineOptions()


@app.command(name="train")  # for the list of verbs: main reads its words, as those of eval and plan
def _train_stub() -> None:
    """Train a model, or resume it: kiloword train METHOD --data SRC --out DIR."""


@app.command
def quickstart(out: Path = Path("quickstart"), steps: int | None = None, seed: int = 0) -> None:
    """Train on scenes, evaluate, write DIR/report.html; about 3 minutes on 2 CPU cores.

    Args:
        out: folder of the run and its report; the same command again resumes.
        steps: another length than the recipe's.
        seed: another seed gives another run.
    """
    from kiloword.quickstart.run import run

    run(out, steps=steps, seed=seed)


@app.command(name="eval")
def _eval_stub() -> None:
    """Evaluate models by a task: kiloword eval TASK MODEL --data SRC (`kiloword eval --help` lists the tasks)."""


app.command(score)


@app.command
def embed(
    model: Positional[str],
    data: tuple[str, ...],
    out: Path,
    name: str = "teacher",
    extra_captions: tuple[str, ...] = (),
    batch: int = 64,
    workers: int | Literal["auto"] = "auto",
    device: str = "auto",
    precision: Literal["fp32", "bf16"] = "fp32",
    dtype: Literal["fp16", "fp32"] = "fp16",
    trust: Annotated[Trust, arg(name="")] = NONE,
) -> None:
    """Features of a data set, once: kiloword embed runs/first/model --data photos/train --out features

    By another's model: kiloword embed open_clip:ViT-B-32:weights.safetensors --data photos/train --out features

    Args:
        model: model folder, open_clip:NAME:WEIGHTS or hf:FOLDER (a CLIP as transformers saves it).
        data: what `train --data` takes.
        out: feature store to write, for `train --features`; the same command again goes on after an interruption.
        name: of the features, where one run takes several feature stores.
        extra_captions: parquet tables (key, captions) whose captions are embedded too.
        batch: images at a time.
        workers: loader processes; auto: none on a CPU, on CUDA the cores but two.
        device: auto, cpu, cuda, cuda:N.
        precision: of the computation, and part of the feature store: fp32 unless given, on every device.
        dtype: of the features in the table.
        trust: whose code a model folder may run.
    """
    from kiloword.features.extract import main as run

    run(model, data, out, name, extra_captions, batch, workers, device, precision, dtype, trust)


@app.command
def caption(
    model: Positional[str],
    data: tuple[str, ...],
    out: Path,
    options: Annotated[GenerationOptions, arg(name="")] = GENERATE,
    batch: int = 16,
    workers: int | Literal["auto"] = "auto",
    device: str = "auto",
    precision: Literal["auto", "fp32", "bf16"] = "auto",
    model_method: str | None = None,
    trust_code: bool = False,
) -> None:
    """Describe images: kiloword caption runs/coca/model --data photos/train --out captions.parquet --num 5

    By another's model: kiloword caption hf:blip --data photos/train --out captions.parquet --num 5

    Args:
        model: model folder (coca, sycoca or any with +caption), or hf:FOLDER (BLIP, GIT, ... as transformers saves it).
        data: what `train --data` takes; images need no captions.
        out: parquet table (key, captions, scores) to write, for `train --extra-captions`; the same command again goes
            on after an interruption.
        options: how captions are found.
        batch: images at a time.
        workers: loader processes; auto: none on a CPU, on CUDA the cores but two.
        device: auto, cpu, cuda, cuda:N.
        precision: auto: that of the table that resumes, else bf16 on CUDA for model folders larger than size tiny.
        model_method: of the model, in place of what its config.json names; may be your own module:preset.
        trust_code: import the module that config.json names; for models of people you trust.
    """
    from kiloword.generation.command import main as run

    trust = Trust(method=model_method, trust_code=trust_code)
    run(model, data, out, options, batch, workers, device, precision, trust)


@app.command
def mine(
    data: Positional[tuple[str, ...]],
    features: Path,
    out: Path,
    options: Annotated[MineOptions, arg(name="")] = MINE,
) -> None:
    """Captions that fit other images: kiloword mine photos/train --features features --out mined --calibrate

    Writes OUT/report.html, pairs.parquet, mine.json and thresholds.json.

    Args:
        data: what `train --data` takes.
        features: feature store of a teacher's features of it (`kiloword embed`).
        out: folder for report, pairs and numbers.
        options: thresholds, and what is shown.
    """
    from kiloword.mining import main as run

    run(data, features, out, options)


@app.command
def data(
    what: Positional[Literal["index", "check", "stats"]],
    source: Positional[str],
    png: Path | None = None,
    digest: bool = False,
    as_: Annotated[str | None, arg(name="as")] = None,
    size: str = "tiny",
) -> None:
    """Look at a data set before training on it: kiloword data stats photos/train --png samples.png

    Args:
        what: index (make the byte-offset indexes), check (decode every sample, name the bad), stats.
        source: what `train --data` takes.
        png: with stats, write an image of samples here.
        as_: with stats and png, draw the examples that training this method would see, augmented and composed.
        size: with as, the size whose defaults hold, as of train.
        digest: with index, digest all images and texts of tars (reads them once); resumed runs compare it.
    """
    from kiloword.data import inspect

    if as_ is not None and (what != "stats" or png is None):
        raise ValueError("--as draws what training would see: expected data stats SRC --as METHOD --png FILE.")
    if inspect.main(what, source, png if as_ is None else None, digest):
        raise SystemExit(1)
    if as_ is not None and png is not None:
        from kiloword.training.dry_run import draw_examples

        say(draw_examples(source, as_, size, png))


@app.command
def verify(method: Positional[str], ranks: tuple[int, ...] = (1, 2, 4)) -> None:
    """Prove that a method keeps its mathematics: over ranks, micro-batches, blocks, order; about a minute.

    Args:
        method: preset, or your own module:preset.
        ranks: numbers of processes to compare.
    """
    from kiloword.verify.suite import main as run

    run(method, ranks)


@app.command(name="import")
def import_(
    format: Positional[Literal["open_clip", "prolip"]], weights: Positional[tuple[str, ...]], out: Path
) -> None:
    """Weights in: kiloword import open_clip ViT-B-32 weights.safetensors --out models/b32

    The authors' ProLIP: kiloword import prolip model.safetensors --out models/prolip

    Args:
        format: where the weights come from.
        weights: of open_clip the model's name there and its file, .safetensors or .pt (read with weights_only); of
            prolip the file, with config.json and tokenizer.json beside it.
        out: model folder to write.
    """
    if len(weights) != (2 if format == "open_clip" else 1):
        expected = "NAME PATH" if format == "open_clip" else "PATH"
        raise ValueError(f"import {format} got {' '.join(weights) or 'nothing'}: expected import {format} {expected}.")
    if format == "open_clip":
        from kiloword.interop.open_clip import main as run_open_clip

        run_open_clip(weights[0], Path(weights[1]), out)
        return
    from kiloword.interop.prolip import main as run_prolip

    run_prolip(Path(weights[0]), out)


app.command(watch)


@app.command(name="plan")
def _plan_stub() -> None:
    """Memory, time and traffic before renting: kiloword plan METHOD --size L --gpus N --batch B --samples S."""


@app.command
def methods() -> None:
    """The presets and what fills their slots."""
    from kiloword.cli.describe import methods_table

    methods_table()


@app.command
def sizes() -> None:
    """The named sizes of towers."""
    from kiloword.cli.describe import sizes_table

    sizes_table()


@app.command
def doctor() -> None:
    """What this machine has: versions, devices, extras, threads."""
    from kiloword.cli.describe import doctor_table

    doctor_table()


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point. Errors a user can mend are one sentence on stderr and exit code 2."""
    if argv is None:
        sys.excepthook = show_traceback
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv == ["--version"]:
        say(__version__)
        return
    try:
        with guarded(), _met():
            _run(settled(argv, app._subcommands))
    except BrokenPipeError:  # `kiloword ... | head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except KeyboardInterrupt as e:
        warn(f"kiloword: {interruption(argv, e)}")
        raise SystemExit(130) from None
    except Exception as e:
        said = sentence_of(e)
        if said is None:
            raise
        if not getattr(e, "quiet", False):  # rank 0 speaks for all
            warn(f"kiloword: {scrubbed(said)}")
        launch.explain(scrubbed(said))
        raise SystemExit(getattr(e, "code", 2)) from None


def _met() -> AbstractContextManager[object]:
    """With several ranks: an error of one ends all."""
    if launch.adopt() == 1:
        return nullcontext()
    from kiloword.distributed.heartbeat import met

    return met()


def _run(argv: Sequence[str]) -> None:
    if argv[:1] == ["train"]:
        from kiloword.cli.train import main as run_train

        run_train(argv[1:])
    elif argv[:1] == ["eval"]:
        from kiloword.cli.evaluate import main as run_eval

        run_eval(argv[1:])
    elif argv[:1] == ["plan"]:
        from kiloword.cli.plan import main as run_plan

        run_plan(argv[1:])
    else:
        app.cli(args=argv or ["--help"], prog="kiloword", description="Image-text models, many to many.")
