"""The verbs of the command line, each a thin call. No torch at import, so that help is instant."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from kiloword.apps.mine.options import MineOptions
from kiloword.config.execution import REQUIRED
from kiloword.generation.options import GenerationOptions
from kiloword.models.trust import Trust
from kiloword.terminal import say

GENERATE = GenerationOptions()
MINE = MineOptions()
Action = Literal["index", "check", "stats", "names", "pairs"]
Kind = Literal["scenes", "photos"]


def quickstart(
    on: Positional[Kind] = "scenes",
    data: tuple[str, ...] = (),
    val: tuple[str, ...] = (),
    out: Path | None = None,
    steps: int | None = None,
    seed: int = 0,
    image_tower: str | None = None,
    text_tower: str | None = None,
    views: int | None = None,
    keep: tuple[str, ...] = (),
    bad_share: float | None = None,
) -> None:
    """Train on scenes, evaluate, write DIR/report.html. Takes 4 minutes on 2 CPU cores, 30 without bf16.

    Five methods on your captioned photos, on frozen pretrained towers: kiloword quickstart photos --data photos/train

    Args:
        on: scenes, or photos: your own, with captions.
        data: photos: tars, a table or a folder of images with captions, as for `kiloword train`.
        val: photos to test on; default: a tenth of --data, held out by key.
        out: folder of the run and its report, by default quickstart or photos; the same command again resumes.
        steps: number of steps (photos: of each method) in place of the recipe's.
        seed: seed of the run.
        image_tower: photos: frozen image tower, as for `kiloword train`; default: efficientnet-lite0.
        text_tower: photos: frozen text tower, as for `kiloword train`; default: minilm.
        views: photos: augmented views of each photo whose tokens are stored; 1: not augmented; default: 2.
        keep: photos: keep-lists of `kiloword audit`: train on the pairs that they keep.
        bad_share: photos: stop when a larger share of the rows is bad, beside those that could not be embedded.
    """
    chosen: dict[str, Any] = {"image_tower": image_tower, "text_tower": text_tower, "views": views}
    chosen |= {"keep": keep or None, "bad_share": bad_share}
    if on == "scenes":
        from kiloword.apps.quickstart.run import run

        of_photos = {"data": data or None, "val": val or None, **chosen}
        if flag := next((name for name, value in of_photos.items() if value is not None), None):
            flag = flag.replace("_", "-")
            raise ValueError(f"--{flag} is of kiloword quickstart photos; the quickstart itself draws scenes.")
        run(out or Path("quickstart"), steps=steps, seed=seed)
        return
    if not data:
        raise ValueError("quickstart photos needs photos with captions: kiloword quickstart photos --data FOLDER.")
    from kiloword.apps.quickstart.photos.run import PhotoPlan
    from kiloword.apps.quickstart.photos.run import run as run_photos

    chosen = {name: value for name, value in chosen.items() if value is not None}
    run_photos(out or Path("photos"), PhotoPlan(data, val, steps=steps, seed=seed, **chosen))


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
    """Write captions for images: kiloword caption runs/coca/model --data photos/train --out captions.parquet --num 5

    With a model of another library: kiloword caption hf:blip --data photos/train --out captions.parquet --num 5

    Args:
        model: folder of coca, sycoca or any with +caption; open_clip:coca_NAME:FILE; or hf:FOLDER (BLIP, GIT, others).
        data: tars, a table, a folder of images or scenes, as for `kiloword train`; images need no captions.
        out: parquet table (key, captions, scores), for `train --extra-captions`; the same command again resumes.
        options: how captions are generated.
        batch: images in a batch.
        workers: loader processes; auto: none on a CPU, on CUDA the number of cores minus two.
        device: auto, cpu, cuda, cuda:N.
        precision: auto: that of a table that is resumed, else bf16 on CUDA for models larger than size tiny.
        model_method: method of the model, instead of that in its config.json: a preset, or your own module:preset.
        trust_code: import the module named in config.json; only for models that you trust.
    """
    from kiloword.generation.command import main as run

    trust = Trust(method=model_method, trust_code=trust_code)
    run(model, data, out, options, batch, workers, device, precision, trust)


def mine(
    data: Annotated[Positional[tuple[str, ...]], REQUIRED],
    features: Path,
    out: Path,
    options: Annotated[MineOptions, arg(name="")] = MINE,
) -> None:
    """Mine captions that match other images: kiloword mine photos/train --features features --out mined --calibrate

    Writes OUT/report.html, pairs.parquet, mine.json and thresholds.json.

    Args:
        data: tars, a table, a folder of images or scenes, as for `kiloword train`.
        features: feature store of a teacher for the data (`kiloword embed`).
        out: folder for report, pairs and thresholds.
        options: thresholds, and contents of the report.
    """
    from kiloword.apps.mine import main as run

    run(data, features, out, options)


def data(
    what: Positional[Action],
    source: Positional[str | None] = None,
    png: Path | None = None,
    as_: Annotated[str | None, arg(name="as")] = None,
    size: str | None = None,
    out: Path | None = None,
) -> None:
    """Inspect a data set before training: kiloword data stats photos/train --png samples.png

    Args:
        what: index (read tars once and put their rows beside them), check (decode every sample, list bad ones), stats,
            names (list the data sets whose class names and templates are known), or pairs (write the captions of
            composed pairs, to rewrite them).
        source: tars, a table, a folder of images or scenes, as for `kiloword train`; with names, a set of that list.
        png: with stats, write an image of samples to this file.
        as_: with stats and png, draw examples as training sees them, by METHOD, a recipe, or the folder of a run.
        out: with pairs and as, table (key, partner, caption) to write, which --settings.rewrites takes.
        size: with as, size whose defaults apply, as in train; default: tiny.
    """
    from kiloword.data import inspect

    if (what == "pairs" or out is not None) and (what != "pairs" or None in (source, as_, out)):
        raise ValueError("expected kiloword data pairs SRC --as RUN --out pairs.parquet.")
    if as_ is not None and what != "pairs" and (what != "stats" or png is None):
        raise ValueError("--as draws training examples: expected data stats SRC --as METHOD --png FILE.")
    for flag, is_idle, use in (
        ("png", png is not None and what != "stats", "data stats SRC --png FILE"),
        ("size", size is not None and as_ is None, "data stats SRC --as METHOD --size SIZE --png FILE"),
    ):
        if is_idle:
            raise ValueError(f"--{flag} changes nothing in data {what}: expected kiloword {use}.")
    if what == "pairs":
        from kiloword.cli.examples import write_pairs

        say(write_pairs(str(source), str(as_), size or "tiny", Path(str(out))))
        return
    if what == "names":
        from kiloword.data.classes.names import listing

        say(*listing(source))
        return
    if source is None:
        raise ValueError(f"data {what} needs a data set: kiloword data {what} SRC.")
    drawn = []
    if as_ is not None and png is not None:  # first, as a name that is misspelled ends the command
        from kiloword.cli.examples import draw_examples

        drawn.append(draw_examples(source, as_, size or "tiny", png))
    if inspect.main(what, source, None if drawn else png):
        raise SystemExit(1)
    say(*drawn)


def methods() -> None:
    """List the methods, their components, and components to mix in."""
    from kiloword.cli.describe import methods_table

    methods_table()


def sizes() -> None:
    """List the named sizes of towers."""
    from kiloword.cli.describe import sizes_table

    sizes_table()


def bench(
    method: Positional[str] = "siglip",
    size: str = "tiny",
    batch: int = 32,
    data: tuple[str, ...] = (),
    precision: Literal["auto", "fp32", "bf16"] = "auto",
    device: str = "auto",
    json: Path | None = None,
) -> None:
    """Measure this machine: matrix products, a training step, encoding, reading: kiloword bench siglip --size b32

    With the speed of reading: kiloword bench siglip --size tiny --data photos/train

    Args:
        method: the method whose step is measured, with fresh weights, on noise.
        size: size of the towers.
        batch: number of images in a step.
        data: data whose reading is measured, as for `kiloword train`.
        precision: precision of the computation; auto: that of `kiloword train`.
        device: auto, cpu, cuda, cuda:N.
        json: write the figures to this file.
    """
    from kiloword.apps.plan.measured import measure, room
    from kiloword.cli.describe import bench_table
    from kiloword.terminal import say

    bench_table(measure(method, size, batch, precision, device, data), json)
    say(f"memory: {room(method, size, precision, device)}")


def doctor() -> None:
    """Show versions, devices, extras and threads of this machine."""
    from kiloword.cli.describe import doctor_table

    doctor_table()
