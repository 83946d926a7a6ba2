"""`kiloword quickstart photos`: extract frozen tokens once, train five methods on them, evaluate, write a report."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from kiloword.api import Matcher, load
from kiloword.apps.quickstart.scenes import seconds_in_loop
from kiloword.config.recipes import AugmentConfig, DataConfig, Recipe
from kiloword.data.edits import PARTS
from kiloword.data.images.augmentation import EvalTransform
from kiloword.data.images.views import PLAIN, Augmented
from kiloword.data.open import open_data
from kiloword.data.reading import read_image
from kiloword.data.stored import WithTokens
from kiloword.evaluation.features import CaptionedImages, captioned
from kiloword.evaluation.retrieval import retrieval
from kiloword.evaluation.task import Inputs
from kiloword.files import atomic, write_json
from kiloword.methods.defaults import default_recipe
from kiloword.models.card import record_evaluation
from kiloword.report import Block, Gallery, Page, Table, Text, Tile, made_by, say_blocks, write_page
from kiloword.report.blocks import Pixels
from kiloword.report.pictures import overlay
from kiloword.stores.embed import EmbedOptions
from kiloword.stores.embed import main as embed
from kiloword.stores.tokens import FoundImages, ImageTokens, TextTokens, TokenizerWithTokens
from kiloword.terminal import say
from kiloword.training import start
from kiloword.training.log import read_metrics
from kiloword.training.loop import RunOptions, train
from kiloword.types import Features, Source

if TYPE_CHECKING:
    from kiloword.apps.quickstart.command import Quickstart

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
THUMBNAIL = 160  # pixels a side
KS = (1, 5, 10)
SIDES = {"image_retrieval": "caption to photo", "text_retrieval": "photo to caption"}
CAPTIONS, BEST = 5, 3  # of validation photos, as queries; best photos of each method
FREE = (  # texts that nobody wrote about a photo
    "a dog that runs through water",
    "children who play",
    "somebody on a bicycle",
    "snow and mountains",
    "two people who talk to each other",
)
EXTREMES = 6  # captions of most and of least uncertainty
EXPLAINED = 2, 3  # photos, and captions of each
INTRO = (
    "Methods of kiloword learned from {train:,} photos, each with its own top on the same frozen towers: {towers}. "
    "The page compares them on {val:,} photos that none of them was trained on."
)
TOWERS = (
    "R@k: a right answer is among the first k. EfficientNet-Lite learned the classes of ImageNet-1k and has seen no "
    "caption. MiniLM has seen captions of COCO and Flickr30k, though no photo, which favours every figure with it."
)


@dataclass(frozen=True)
class Encoded:
    """Validation photos and their captions, by one model."""

    matcher: Matcher
    photos: CaptionedImages
    texts: Features  # [T, ...]


def photos(options: Quickstart, out: Path) -> dict[str, dict[str, float]]:
    """Extract, train, evaluate and report; the same call again goes on where it stopped.

    Writes `tokens/`, a run for each method, `results.json`, `report.html` and `example.png`. Without `val` a tenth of
    the data is held out by key. Returns: metrics by method.
    Raises: ValueError when a tower's package is not installed, data or settings cannot be used, or `out` holds others.
    """
    if options.views < 1 or (options.steps is not None and options.steps < 1):
        raise ValueError(f"--views is {options.views}, --steps {options.steps}: expected at least 1.")
    data, val = options.data, options.val
    if not val:
        data, val = (tuple(f"{part}:{src}" for src in data) for part in PARTS)
    training, held_out = open_data(DataConfig(sources=data, keep=options.keep)), open_data(DataConfig(sources=val))
    stores = extract(options, (data, val), out / "tokens")
    runs = {name: recipe(options, name, data, stores[0], len(training)) for name in METHODS}
    judged = dict[str, Encoded]()
    methods = list[dict[str, Any]]()
    for name, chosen in runs.items():
        folder = train(chosen, out / name, training, RunOptions(workers=1, keep_states=1))
        judged[name] = one = encode(load(folder), held_out, stores[1])
        of = torch.tensor(one.photos.image_of_text)
        metrics = dict(retrieval(one.matcher.score, one.photos.images, one.texts, of))
        record_evaluation(folder, "retrieval", " ".join(val), len(held_out), chosen.steps, metrics)
        seconds = seconds_in_loop(read_metrics(out / name / "metrics.jsonl"), chosen.batch)
        methods.append({"name": name, "steps": chosen.steps, "training_s": seconds, "retrieval": metrics})
    facts = {"data": data, "val": val, "photos": len(training), "val_photos": len(held_out)}
    write_json(out / "results.json", {"facts": facts, "figures": {"methods": methods}})
    with atomic(out / "example.png") as file:
        Image.fromarray(thumbnail(held_out, judged["clip"].photos.rows[0])).save(file, "PNG")
    tables = [
        Table(
            [
                [m["name"], *(m["retrieval"][f"{side}_recall@{k}"] for k in KS), f"{m['training_s']:.0f}"]
                for m in methods
            ],
            (title, *(f"R@{k}" for k in KS), "seconds"),
            best=range(1, len(KS) + 1),
        )
        for side, title in SIDES.items()
    ]
    sections: dict[str, Sequence[Block]] = {
        "Methods side by side": [*tables, Text(TOWERS)],
        "Captions and their best photos": queries(judged, held_out, described=True),
        "Free texts and their best photos": queries(judged, held_out, described=False),
        "Where llip looks": looks(judged["llip"], held_out) if "llip" in judged else [],
        "What prolip is certain of": certainty(judged["prolip"]) if "prolip" in judged else [],
        "How to go on": next_steps(out),
    }
    towers = f"{options.image_tower} and {options.text_tower}"
    intro = INTRO.format(train=len(training), towers=towers, val=len(held_out))
    write_page(out / "report.html", Page("Kiloword on your photos", intro, sections, made_by(data=" ".join(data))))
    say_blocks(tables)
    say(f"models   {out}/METHOD/model", f"figures  {out / 'results.json'}", f"report   {out / 'report.html'}")
    return {m["name"]: m["retrieval"] for m in methods}


def extract(options: Quickstart, sources: Sequence[tuple[str, ...]], folder: Path) -> list[Path]:
    """Store the towers' tokens of training and validation photos, and of their captions: `kiloword embed --tokens`."""
    usual = default_recipe("clip", "top", sources[0]).data.augment
    augment = replace(usual, drop_words=0.0, drop_patches=0.0)  # without what changes captions
    stores = [folder / "train", folder / "val"]
    for names, store, views in zip(sources, stores, (options.views, 1), strict=True):
        for tower, views_of in ((options.image_tower, views), (options.text_tower, 1)):
            augmented = Augmented(views_of, augment, options.seed) if views_of > 1 else PLAIN
            chosen = EmbedOptions(model=tower, dtype="int8", augmented=augmented)
            embed(DataConfig(sources=names), store, chosen, "auto", "auto", tokens=True)
    return stores


def recipe(options: Quickstart, method: str, data: tuple[str, ...], store: Path, photos: int) -> Recipe:
    """The run of a method on stored tokens; of few photos, an epoch has at least four batches."""
    base = start.with_towers(default_recipe(method, "top", data), options.image_tower, options.text_tower)
    usual, stores = base.data.augment, (str(store),)
    augment = replace(AugmentConfig() if options.views < 2 else usual, drop_words=0.0, drop_patches=usual.drop_patches)
    own = replace(base.data, keep=options.keep, bad_share=options.bad_share, augment=augment)
    own = replace(own, image_features=stores, text_features=stores)
    batch = 1 << max(1, (photos // 4).bit_length() - 1) if photos < 4 * BATCH else BATCH
    chosen = small_top(replace(base, data=own, batch=batch))
    return replace(chosen, settings=METHODS[method], seed=options.seed, steps=options.steps or STEPS)


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


def encode(matcher: Matcher, source: Source, store: Path) -> Encoded:
    """Encode all captioned photos and their captions from their tokens. Raises: ValueError where none can be used."""
    found = captioned(Inputs(matcher, WithTokens(source, FoundImages([ImageTokens(store)], source))))
    texts = Matcher(matcher.model, TokenizerWithTokens(matcher.tokenizer, [TextTokens(store)]))
    return Encoded(matcher, found, texts.encode_text(found.captions))


def thumbnail(source: Source, row: int, size: int = THUMBNAIL) -> Pixels:
    """A photo cut to a square as in evaluation. Raises: BadSample."""
    pixels: Tensor = EvalTransform(size)(read_image(source, row).image)
    return pixels.permute(1, 2, 0).numpy()


def queries(judged: dict[str, Encoded], source: Source, described: bool) -> list[Block]:
    """The best photos of each text, a row a method. Args: described: captions of the photos, else free texts."""
    own = next(iter(judged.values())).photos
    places = [n * len(own.captions) // CAPTIONS for n in range(min(CAPTIONS, len(own.captions)))]
    texts = {own.captions[n]: own.image_of_text[n] for n in places} if described else dict.fromkeys(FREE, -1)
    blocks = list[Block]()
    best = {name: found(one, list(texts)) for name, one in judged.items()}
    for n, (text, image) in enumerate(texts.items()):
        tiles = [
            Tile(thumbnail(source, own.rows[i]), [name], i == image or None) for name in best for i in best[name][n]
        ]
        blocks.append(Gallery(tiles, f"“{text}”", min(BEST, len(own.rows))))
    return blocks


def found(one: Encoded, texts: list[str]) -> list[list[int]]:
    """The best photos of each text."""
    scores = one.matcher.score(one.photos.images, one.matcher.encode_text(texts)).T  # [texts, I]
    best: list[list[int]] = scores.argsort(dim=1, descending=True, stable=True)[:, :BEST].tolist()
    return best


def looks(one: Encoded, source: Source) -> list[Block]:
    """Where captions look on the first photos that have several."""
    shown, (most, several) = list[Block](), EXPLAINED
    for image, row in enumerate(one.photos.rows):
        texts = [c for c, of in zip(one.photos.captions, one.photos.image_of_text, strict=True) if of == image][
            :several
        ]
        if len(shown) < most and len(texts) == several:
            photo = thumbnail(source, row, one.matcher.model.config.image.size)
            seen = one.matcher.explain([photo], texts)
            maps = [overlay(photo, np.asarray(x).reshape(seen.grid), photo.shape[0]) for x in seen.maps[0]]
            tiles = [Tile(photo, ["the photo"]), *(Tile(x, [t]) for x, t in zip(maps, texts, strict=True))]
            shown.append(Gallery(tiles, columns=len(tiles)))
    return [Text("Each caption mixes the photo's tokens in its own way. Glowing: the tokens that it reads."), *shown]


def certainty(one: Encoded) -> list[Block]:
    """The captions of least and of most uncertainty; equal captions count once."""
    values = dict(zip(one.photos.captions, one.matcher.uncertainty(one.texts).tolist(), strict=True))
    ordered = sorted(values.items(), key=lambda pair: pair[1])
    kinds = {"most certain captions": ordered[:EXTREMES], "least certain captions": ordered[: -EXTREMES - 1 : -1]}
    return [
        Text("Prolip embeds a caption as a Gaussian: its variances sum to more where it could mean many photos."),
        *(Table([[text, f"{v:.4g}"] for text, v in rows], (name, "uncertainty")) for name, rows in kinds.items()),
    ]


def next_steps(out: Path) -> list[Block]:
    """Commands to go on with."""
    model, example = shlex.quote(str(out / "llip/model")), shlex.quote(str(out / "example.png"))
    commands = (
        f"kiloword score {model} --images {example} --texts {shlex.quote(FREE[0])} 'a city street'",
        f"kiloword eval retrieval {model} --data photos/test",
        f"kiloword index photos --model {model} --out library",
    )
    return [Text("\n".join(commands), "code")]
