"""The verbs, each a thin call. No torch at import: help is instant."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, make_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import Positional, arg

from kiloword import __version__, recipes
from kiloword.recipes import AugmentConfig, ModelConfig, OptimConfig, Recipe

app = tyro.extras.SubcommandApp()


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train a model; the same command again resumes.

    Examples:
      kiloword train siglip --data scenes --out runs/first
      kiloword train clip --data photos/train --val photos/dev --out runs/photos --epochs 30
      kiloword train siglip --data table.csv --out runs/table --size s16 --optim.lr 1e-3 --workers 8
    """

    out: Path = tyro.MISSING  # folder of the run
    data: tuple[str, ...] = ("scenes",)  # folder of tars, brace pattern, csv/tsv/parquet, picture folder, scenes
    val: str | None = None  # evaluate retrieval on this
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
    workers: int = 0  # loader processes
    device: str = "auto"  # auto, cpu, cuda, cuda:N
    log_every: int = 10  # steps
    save_every: int = 0  # steps; 0: every two minutes
    eval_every: int = 0  # steps; 0: at the end
    extend: bool = False  # let the run in --out go on to another length
    dry_run: bool = False  # say what would run, and stop
    optim: OptimConfig = field(default_factory=OptimConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    model: ModelConfig = field(default_factory=ModelConfig)


def recipe_of(method: str, args: Train, settings: Any) -> Recipe:
    """The recipe that the flags of `train` describe, but for its length; settings: the method's own, or None."""
    base = recipes.default(method, args.size, args.data)
    data = replace(
        base.data,
        val=args.val,
        captions=args.captions,
        decoder=args.decoder,
        weights=args.weights,
        together=args.together,
        tokenizer_vocab=args.vocab,
        bad_share=args.bad_share,
        augment=args.augment,
    )
    own = {} if settings is None else {f.name: getattr(settings, f.name) for f in fields(settings)}
    same = ("batch", "micro", "chunk", "precision", "freeze", "init", "seed", "optim", "model")
    return replace(base, data=data, settings=own, **{name: getattr(args, name) for name in same})


def _train(argv: Sequence[str]) -> None:
    method = argv[0] if argv and not argv[0].startswith("-") else ""
    if not method and not {"-h", "--help"} & set(argv):
        raise ValueError(
            "train needs a method first, e.g. kiloword train siglip --out runs/first (`kiloword methods`)."
        )
    rest = argv[1:] if method else argv
    both = tyro.cli(_train_type(method, rest), args=rest, prog="kiloword train METHOD", description=Train.__doc__)
    args: Train = both.run
    from kiloword import start
    from kiloword.prepare import describe, open_sources, with_length
    from kiloword.train import Options, train

    recipe = recipe_of(method, args, both.settings)
    start.check(recipe)
    source = open_sources(recipe)
    recipe = with_length(recipe, len(source), args.steps, args.epochs, args.samples)
    if args.dry_run:
        print(describe(recipe, source, args.out))
        return
    names = ("workers", "device", "log_every", "save_every", "eval_every", "extend")
    folder = train(recipe, args.out, source, Options(**{name: getattr(args, name) for name in names}))
    if os.environ.get("RANK", "0") == "0":  # of torchrun
        print(f"model: {folder}")


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


def _values_of(argv: Sequence[str], flag: str) -> tuple[str, ...]:
    """The values that follow a flag, or come with it behind "="."""
    for n, word in enumerate(argv):
        if word.startswith(flag + "="):
            return (word.partition("=")[2],)
        if word == flag:
            rest = list(argv[n + 1 :])
            end = next((i for i, w in enumerate(rest) if w.startswith("--")), len(rest))
            return tuple(rest[:end])
    return ()


@app.command(name="train")
def _train_stub() -> None:
    """Train a model, or resume it: kiloword train METHOD --data SRC --out DIR."""
    raise AssertionError("handled by main")


@app.command
def quickstart(out: Path = Path("quickstart"), steps: int | None = None, seed: int = 0) -> None:
    """Train on scenes, evaluate, write DIR/report.html; about 3 minutes on 2 CPU cores.

    Args:
        out: folder of the run and its report; the same command again resumes.
        steps: another length than the recipe's.
        seed: another seed gives another run.
    """
    from kiloword.experiments.quickstart import run

    run(out, steps=steps, seed=seed)


@app.command(name="eval")
def evaluate(
    model: Positional[str],
    task: Positional[str],
    data: str,
    json: Path | None = None,
    batch: int = 256,
    workers: int = 0,
    device: str = "cpu",
) -> None:
    """Evaluate a model: kiloword eval runs/first/model retrieval --data scenes:test

    Args:
        model: model folder (OUT/model of a run).
        task: retrieval or zeroshot.
        data: test data; for zeroshot with .cls labels and classnames.txt, or scenes:test?task=colour.
        json: also write the numbers to this file.
        batch: pictures at a time.
        workers: loader processes.
        device: cpu or cuda.
    """
    from kiloword import evaluation
    from kiloword.api import load
    from kiloword.checkpoint import write_json
    from kiloword.data.sources import open_source
    from kiloword.types import Skipped

    matcher = load(model, device=device)
    source = open_source(data, size=matcher.model.config.image.size)
    skipped: list[Skipped] = []
    found = evaluation.evaluate(matcher, task, source, skipped=skipped, batch=batch, workers=workers)
    for one in skipped:
        print(f"skipped {one.key}: {one.reason}", file=sys.stderr)
    for name, value in found.items():
        print(f"{name:36s} {value:.4f}" if isinstance(value, float) else f"{name:36s} {value}")
    if json is not None:
        write_json(json, found)


@app.command
def score(model: Positional[str], images: tuple[Path, ...], texts: tuple[str, ...], device: str = "cpu") -> None:
    """Score pictures against texts: kiloword score MODEL --images a.jpg b.jpg --texts "a dog" "a cat"

    Args:
        model: model folder.
        images: picture files.
        texts: captions to compare with.
        device: cpu or cuda.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from kiloword.api import load

    scores = load(model, device=device).score(list(images), list(texts))
    table = Table("picture", *map(escape, texts))
    for path, row in zip(images, scores.tolist(), strict=True):
        best = max(row)
        table.add_row(escape(path.name), *(f"[bold]{s:.3f}[/bold]" if s == best else f"{s:.3f}" for s in row))
    Console(width=None if sys.stdout.isatty() else 120).print(table)


@app.command
def data(
    what: Positional[Literal["index", "check", "stats"]], source: Positional[str], png: Path | None = None
) -> None:
    """Look at a data set before training on it: kiloword data stats photos/train --png samples.png

    Args:
        what: index (make the byte-offset indexes), check (decode every sample, name the bad), stats.
        source: what `train --data` takes.
        png: with stats, write a picture of samples here.
    """
    from kiloword.data import inspect

    if inspect.main(what, source, png):
        raise SystemExit(1)


@app.command
def verify(method: Positional[str], ranks: tuple[int, ...] = (1, 2, 4)) -> None:
    """Prove that a method keeps its mathematics: over ranks, micro-batches, blocks, order; about a minute.

    Args:
        method: preset, or your own module:preset.
        ranks: numbers of processes to compare.
    """
    from kiloword.verify import main as run

    run(method, ranks)


@app.command(name="import")
def import_(format: Positional[Literal["open_clip"]], name: Positional[str], path: Positional[Path], out: Path) -> None:
    """Weights in: kiloword import open_clip ViT-B-32 weights.safetensors --out models/b32

    Args:
        format: where the weights come from.
        name: the model's name there, e.g. ViT-B-32-quickgelu or ViT-B-16-SigLIP.
        path: .safetensors, or .pt (read with weights_only).
        out: model folder to write.
    """
    from kiloword.interop.open_clip import main as run

    run(name, path, out)


@app.command
def methods() -> None:
    """The presets and what fills their slots."""
    from kiloword.describe import methods_table

    methods_table()


@app.command
def sizes() -> None:
    """The named sizes of towers."""
    from kiloword.describe import sizes_table

    sizes_table()


@app.command
def doctor() -> None:
    """What this machine has: versions, devices, extras, threads."""
    from kiloword.describe import doctor_table

    doctor_table()


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point. Errors a user can mend are one sentence on stderr and exit code 2."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv == ["--version"]:
        print(__version__)
        return
    try:
        if argv[:1] == ["train"]:
            _train(argv[1:])
        else:
            app.cli(args=argv or ["--help"], prog="kiloword", description="Image-text models, many to many.")
    except ValueError as e:
        print(f"kiloword: {e}", file=sys.stderr)
        raise SystemExit(2) from None
    except BrokenPipeError:  # `kiloword ... | head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except OSError as e:
        print(f"kiloword: {e.strerror or e}{f': {e.filename}' if e.filename else ''}.", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("kiloword: interrupted.", file=sys.stderr)
        raise SystemExit(2) from None
