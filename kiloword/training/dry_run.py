"""What a run would do, before it is made: its plan or the message with which it is refused; its first examples."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from textwrap import wrap
from typing import Any

import pyarrow.parquet
from PIL import Image

from kiloword.config import papers
from kiloword.config.options import RunOptions
from kiloword.config.recipes import HeadConfig, ImageConfig, LoraConfig, OptimConfig, Recipe, TextConfig, TrunkConfig
from kiloword.data.edits import parts_of
from kiloword.data.images.contact import TILES, draw_tiles
from kiloword.data.loader import Loader
from kiloword.data.reading import BadRows
from kiloword.data.sampler import Order, steps_per_epoch
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.data.transforms.mix import WithPartner, pairs_table
from kiloword.distributed import collectives
from kiloword.distributed.device import choose
from kiloword.files import replacing
from kiloword.methods.defaults import default_recipe
from kiloword.methods.registry import preset
from kiloword.models.build import shapes
from kiloword.stores.features import FeatureStore
from kiloword.terminal import say
from kiloword.training import effects, tuning
from kiloword.training.learner import learner_of
from kiloword.training.resolve import bound, micro_batches, open_sources, resolve, visited
from kiloword.training.run_folder import RunFile
from kiloword.training.setup import make_learner
from kiloword.training.validation.sets import open_val
from kiloword.types import Batch, Example, Source

MOST = 256  # largest number of images decoded of a rank's first batch
WIDE = 110  # columns
ALWAYS = {  # settings that are shown even where they have the default of their class
    ImageConfig: "size patch width depth heads mlp class_token extra_tokens uncertainty_token",
    TextConfig: "context vocab width depth heads mlp causal extra_tokens",
    HeadConfig: "dim image_pool text_pool",
    OptimConfig: "name lr weight_decay beta1 beta2 warmup final_lr clip ema",
    LoraConfig: "rank alpha targets",
}
HIDDEN = ("special",)  # token ids, never shown


def rehearse(recipe: Recipe, source: Source, out: Path, options: RunOptions) -> None:
    """Do everything before the first step except writing files and building large towers, and print what would run.

    The first batch is read and decoded, at most MOST images on each rank; two rows of the validation data are evaluated
    by a small stand-in model. Raises: ValueError for anything that training would refuse: settings, data, feature
    stores, a model to start from, validation data, `out`.
    """
    device = choose(options.device)
    with collectives.process_group(timeout_s=options.timeout):
        run = resolve(recipe, source, out, options, device, dry_run=True)
        if recipe.init is not None:
            make_learner(run.recipe, run.method, options.trust_code)
        batch, bad = _first_batch(run.loader, sum(map(len, parts_of(source))))
        messages = [run.frozen, *run.loader.notes] if run.frozen else run.loader.notes
        notes = [*_wrapped("device", run.chosen), *(f"note       {note}" for note in messages)]
        if collectives.rank() == 0:
            cut = f", {batch.texts.truncated} cut" if batch.texts.truncated else ""
            kind = f", {bad} bad samples" if bad else ""
            read = f"read       {len(batch)} images of the first batch, {len(batch.texts)} captions{cut}{kind}"
            say(*describe(run.file, source, out, options), *notes, read)


def _first_batch(loader: Loader, rows: int) -> tuple[Batch, int]:
    """This rank's part of the first batch, at most MOST images, and its number of bad samples on all ranks."""
    share = loader.order.batch // loader.ranks
    parts = next(n for n in range(1, share + 1) if share % n == 0 and share // n <= MOST)
    batch = next(replace(loader, workers=0, rank=loader.rank * parts, ranks=loader.ranks * parts).batches(0, 1))
    bad = BadRows(rows, loader.data.bad_share)
    bad.count(collectives.all_lists(batch.skipped))
    return batch, len(bad)


def describe(file: RunFile, source: Source, out: Path, options: RunOptions) -> list[str]:
    """A summary of the run, as lines of text."""
    recipe, model = file.recipe, file.model
    assert model is not None
    rows = visited(recipe, source)
    part = "" if rows == len(source) else f", {rows} visited"
    epochs = recipe.steps / steps_per_epoch(rows, recipe.batch)
    ranks, parts = collectives.ranks(), micro_batches(recipe)
    share = f"{parts} x {recipe.batch // ranks // parts} images each"
    init = "" if recipe.init is None else f" from {recipe.init}"
    how = f"checkpointing {options.checkpointing}, compile {options.compile}, {recipe.precision}"
    return [
        *_wrapped("method", f"{recipe.method} {_listed(_flat(recipe.settings))}"),
        f"data       {' '.join(recipe.data.sources)}: {len(source)} images{part}",
        *(f"val        {one.task} on {one.source.name}: {len(one.source)} images" for one in open_val(recipe)),
        f"length     {recipe.steps} steps of {recipe.batch} images, {epochs:.1f} epochs",
        f"ranks      {ranks}, {share}{f', {options.parallel}' if ranks > 1 else ''}, {how}",
        *_wrapped("model", f"{recipe.size}{init}, {_parameters(recipe)}"),
        *_wrapped("tuning", _tuning(recipe)),
        *(_wrapped("lora", settings_of(recipe.lora)) if recipe.lora.rank else ()),
        *_wrapped("  image", settings_of(model.image)),
        *_wrapped("  text", settings_of(model.text)),
        *_wrapped("  head", settings_of(model.head)),
        *_wrapped("optimizer", settings_of(recipe.optim)),
        *_wrapped("augment", settings_of(recipe.data.augment) or "none"),
        f"out        {out}{' (resumes)' if (out / 'state').is_dir() else ''}",
        *(f"note       {note}" for note in effects.notes(recipe, options)),
    ]


def _tuning(recipe: Recipe) -> str:
    """What is frozen. Raises: ValueError for blocks that do not exist, and when nothing is left to train."""
    if tuning.frozen(recipe) == ("none",):
        return ""
    learner = learner_of(recipe.model, preset(recipe.method, recipe.settings))
    tuning.freeze(learner, recipe)
    return tuning.summary(learner, recipe)


def settings_of(config: Any) -> str:
    """A dataclass of settings as `name=value`, spelled as its flags: those in ALWAYS, and others that differ from
    their defaults."""
    always, usual = ALWAYS.get(type(config), "").split(), type(config)()
    names = [f.name for f in fields(config) if f.name not in HIDDEN]
    if isinstance(config, OptimConfig) and config.name == "muon":
        always = [*always, "muon_lr"]
    return _listed({n: v for n in names if (v := getattr(config, n)) != getattr(usual, n) or n in always})


def _listed(values: Mapping[str, Any]) -> str:
    return " ".join(f"{name.replace('_', '-')}={_value(value)}" for name, value in values.items())


def _value(value: Any) -> str:
    if isinstance(value, TrunkConfig):
        return value.name
    if isinstance(value, tuple | list):
        return ",".join(map(_value, value)) or "none"
    if value is None or value == "":
        return "none"
    if isinstance(value, str) and value != value.strip():
        return repr(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _flat(settings: Mapping[str, Any], at: str = "") -> dict[str, Any]:
    """Nested settings, of components, under dotted names."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= _flat(value, f"{at}{name}.") if isinstance(value, dict) and value else {at + name: value}
    return flat


def _parameters(recipe: Recipe) -> str:
    """Number of parameters, in total and by part: "73,025 parameters: image tower 40,000, ..."."""
    counts: dict[str, int] = {}
    for name, shape in shapes(recipe.model, preset(recipe.method, recipe.settings)).items():
        part = name.removeprefix("more.").split(".")[0].replace("_", " ")
        counts[part] = counts.get(part, 0) + math.prod(shape)
    parts = ", ".join(f"{part} {count:,}" for part, count in counts.items())
    return f"{sum(counts.values()):,} parameters: {parts}"


def _wrapped(name: str, text: str) -> Iterator[str]:
    """Lines of at most WIDE columns; the first starts with the name."""
    for n, line in enumerate(wrap(text, WIDE - 11, break_long_words=False, break_on_hyphens=False)):
        yield f"{'' if n else name:10} {line}"


def draw_examples(src: str, like: str, size: str, png: Path) -> str:
    """Draw the first examples of a run: augmented, transforms applied, with all captions.

    `kiloword data stats SRC --as METHOD --png FILE`. Args: like: a method, whose defaults apply; a paper's recipe; or
    the folder or config.json of a run, or a recipe in a file; size: of a method.

    Returns: a line about them. Errors: ValueError for an unknown method or size, and data that cannot be read.
    """
    recipe = _recipe_like(src, like, size)
    chosen, source = preset(recipe.method, recipe.settings), open_sources(recipe)
    loader = Loader(
        source,
        Order(len(source), min(TILES, len(source)), recipe.seed),
        recipe.data,
        chosen.shape(recipe.model).text,
        recipe.model.image.size,
        Tokenizer.train([], 262),  # nothing is packed
        transforms=bound(chosen.transforms, source),
        questions="questions" in chosen.needs,
        seed=recipe.seed,
        resize=recipe.model.preprocess.resize,
    )
    examples = loader.examples(0)[0]
    draw_tiles([(Image.fromarray(e.image.permute(1, 2, 0).numpy()), _caption(e), 1) for e in examples], png)
    composed = sum(e.composed for e in examples)
    return f"{len(examples)} examples as {like} at size {recipe.size} sees them, {composed} composed: {png}"


def write_pairs(src: str, like: str, size: str, out: Path) -> str:
    """Write a parquet (key, partner, caption) of all pairs that a run composes, their captions joined.

    With the captions rewritten, by a language model for example, the table is `--settings.rewrites` of the run. Args:
    as of `draw_examples`. Returns: a line about them. Errors: ValueError for a method that composes no pairs, partners
    that change in each epoch, and a file that cannot be written.
    """
    recipe = _recipe_like(src, like, size)
    source = open_sources(recipe)
    mixing = [t for t in preset(recipe.method, recipe.settings).transforms if isinstance(t, WithPartner)]
    if not mixing or mixing[0].settings.partner == "random":
        why = "draws another partner in each epoch" if mixing else "composes no pairs"
        raise ValueError(
            f"{like} {why}: expected a recipe with settings.partner fixed, nearest, farthest or file, such as a TOML "
            'file with method = "clip-c" and settings.partner = "fixed".'
        )
    table = pairs_table(source, mixing[0].bind(source, FeatureStore), recipe.seed)
    with replacing(out) as file:
        pyarrow.parquet.write_table(table, file)
    return f"{len(table):,} captions of {len(source):,} rows with their partners: {out}"


def _recipe_like(src: str, like: str, size: str) -> Recipe:
    """The recipe of `draw_examples`, with `src` as its only data."""
    path = Path(like)
    if path.exists():
        named = papers.read(path / "config.json" if path.is_dir() else path)
    elif like in papers.names():
        named = papers.load(like)
    else:
        return default_recipe(like, size, (src,))
    plain = default_recipe(named.method, named.value("size", size), (src,))
    recipe = papers.fill(plain, named, towers=True)
    return replace(recipe, data=replace(recipe.data, sources=(src,), weights=()))


def _caption(example: Example) -> str:
    """The captions, or the question with its answers; composed examples are named so."""
    question = f"{example.question} " if example.question else ""
    return f"{'composed: ' if example.composed else ''}{question}{' | '.join(example.captions)}"
