"""`kiloword quickstart photos`: extract frozen tokens once, train five methods on them, evaluate, write a report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kiloword.api import Matcher, load
from kiloword.config.recipes import DataConfig, Recipe
from kiloword.data.edits import PARTS, Selection
from kiloword.data.open import open_data
from kiloword.evaluation.features import captioned, tile
from kiloword.evaluation.retrieval import retrieval
from kiloword.evaluation.task import Inputs
from kiloword.files import write_json
from kiloword.methods.defaults import default_recipe
from kiloword.models.card import record_retrieval
from kiloword.report import Block, Gallery, Page, Table, Text, Tile, made_by, say_blocks, write_page
from kiloword.stores import embed
from kiloword.stores.command import Embed
from kiloword.stores.runs import on_stores, reading_tokens
from kiloword.stores.teachers import open_tower
from kiloword.stores.tokens import FoundImages, ImageTokens, TokenKind
from kiloword.terminal import say, warn
from kiloword.training import start
from kiloword.training.loop import RunOptions, train
from kiloword.types import Source

if TYPE_CHECKING:
    from kiloword.apps.quickstart.command import Quickstart

METHODS = {  # and when to choose one
    "clip": "the usual start: one vector a photo, the fastest search",
    "siglip": "scores are probabilities of a match, one by one: for thresholds, and for small batches",
    "llip": "captions name different things in one photo: the photo's vector depends on the text",
    "prolip": "you want to know how sure the model is: each vector has an uncertainty",
    "fff": "several captions of a photo are true: all of them count as right",
}
DEEP = ("llip", "prolip", "sycoca")  # their learned tokens need blocks; other tops only project the trunks' tokens
# With the tops below all five methods took 222 s on a CPU with bf16; `train` takes 360 to 685 cpu-s a method.
STEPS, BATCH = 100, 256
FAST = 6e-2  # rate of Muon for linear tops (research/log.md)
CAPTIONS, BEST = 3, 3  # of validation photos, as queries; best photos of each method
FREE = ("a dog that runs through water", "snow and mountains", "two people who talk to each other")  # nobody's captions
ABOUT = "Recall at k of a caption's photo (image), a photo's captions (text): a right answer is among the first k."
LEARNED = {
    "efficientnet-lite0": " EfficientNet-Lite learned the classes of ImageNet-1k.",
    "minilm": " MiniLM has seen captions of COCO and Flickr30k, though no photo, which favours figures on these.",
}


def photos(options: Quickstart, out: Path) -> dict[str, dict[str, float]]:
    """Extract, train, evaluate and report; the same call again goes on where it stopped.

    Writes `tokens/`, a run for each method, `results.json` and `report.html`. Without `val` a tenth of the data is held
    out by key. Returns: metrics by method.
    Raises: ValueError when a tower's package is not installed, data or settings cannot be used, or `out` holds others.
    """
    say(f"The models, and exports to onnx, torch and immich, hold {options.image_tower} and {options.text_tower}.")
    data, val = options.data, options.val
    if not val:
        data, val = (tuple(f"{part}:{src}" for src in data) for part in PARTS)
    training, held_out = open_data(DataConfig(sources=data, keep=options.keep)), open_data(DataConfig(sources=val))
    stores = extract(options, (data, val), out / "tokens")
    training, held_out = map(usable, (training, held_out), stores)
    metrics, tiles = dict[str, dict[str, float]](), dict[str, list[Tile]]()
    for name in METHODS:
        warn(f"method {name}")
        chosen = on_stores(recipe(options, name, data, len(training)), (), stores[:1], stores[:1])
        folder = train(chosen, out / name, training, RunOptions(workers=1, keep_states=1, extend=True))
        metrics[name] = judged(load(folder), held_out, stores[1], name, tiles)
        record_retrieval(folder, " ".join(val), len(held_out), chosen.steps, metrics[name])
    facts = {"data": data, "val": val, "photos": len(training), "val_photos": len(held_out)}
    methods = [{"name": name, "retrieval": values} for name, values in metrics.items()]
    write_json(out / "results.json", {"facts": facts, "figures": {"methods": methods}})
    columns = {f"{side} @{k}": f"{side}_retrieval_recall@{k}" for side in ("image", "text") for k in (1, 5, 10)}
    rows = [[name, *map(values.get, columns.values())] for name, values in metrics.items()]
    table = Table(rows, ("recall", *columns), best=range(1, len(columns) + 1))
    about = (
        f"{ABOUT}{LEARNED.get(options.image_tower, '')}{LEARNED.get(options.text_tower, '')} Of {len(held_out)} "
        f"photos, differences below {len(held_out) ** -0.5:.2f} may be chance."
    )
    sections: dict[str, Sequence[Block]] = {
        "Methods side by side": [table, Text(about), Table([*METHODS.items()], ("method", "choose it when"))],
        "Texts and their best photos": [
            Gallery(some, f"“{text}”{' (no known answer)' * (text in FREE)}", BEST) for text, some in tiles.items()
        ],
    }
    intro = (
        f"Methods of kiloword learned from {len(training):,} photos, each with its own top on the same frozen towers: "
        f"{options.image_tower} and {options.text_tower}. The page compares them on {len(held_out):,} other photos."
    )
    write_page(out / "report.html", Page("Kiloword on your photos", intro, sections, made_by(data=" ".join(data))))
    say_blocks([table])
    say(f"models   {out}/METHOD/model", f"figures  {out / 'results.json'}", f"report   {out / 'report.html'}")
    return metrics


def extract(options: Quickstart, sources: Sequence[tuple[str, ...]], folder: Path) -> list[str]:
    """Store the towers' tokens of training and validation photos, and of their captions: `kiloword embed --tokens`.

    Raises: ValueError that names what is wrong with each tower, before a photo is read.
    """
    towers: dict[TokenKind, str] = {"images": options.image_tower, "texts": options.text_tower}
    wrong, usual = list[str](), default_recipe("clip", "top", sources[0])
    for kind, tower in towers.items():
        try:
            open_tower(tower, [kind])
        except ValueError as error:
            wrong.append(str(error))
    if wrong:
        raise ValueError(" ".join(wrong))
    start.with_towers(usual, *towers.values())
    augment = replace(usual.data.augment, drop_words=0.0, drop_patches=0.0)  # without what changes captions
    stores = [folder / "train", folder / "val"]
    for names, store in zip(sources, stores, strict=True):
        for kind, tower in towers.items():
            several = options.views > 1 and (store.name, kind) == ("train", "images")
            drawn: dict[str, Any] = {"views": options.views, "augment": augment, "seed": options.seed}
            made = Embed(model=tower, data=names, out=store, dtype="int8", tokens=True, **(drawn if several else {}))
            embed.run(made, [kind])
    return list(map(str, stores))


def usable(source: Source, store: str) -> Source:
    """The photos with captions and stored tokens: `extract` has named the others."""
    found = FoundImages([ImageTokens(store)], source)
    rows = [row for batch in embed.captions(source, [range(len(source))]) for row in batch.rows if found(source, row)]
    return Selection(source, source.name, source.fingerprint, np.array(rows))


def recipe(options: Quickstart, method: str, data: tuple[str, ...], photos: int) -> Recipe:
    """The run of a method, without stored tokens; of few photos, an epoch has at least four batches."""
    base = start.with_towers(default_recipe(method, "top", data), options.image_tower, options.text_tower)
    batch = 1 << max(1, (photos // 4).bit_length() - 1) if photos < 4 * BATCH else BATCH
    chosen = small_top(replace(base, data=replace(base.data, keep=options.keep), batch=batch))
    settings = {"positives": "annotated"} if method == "fff" else {}  # mined ones need a teacher
    frozen = ("image:trunk", "text:trunk")
    return replace(chosen, freeze=frozen, settings=settings, seed=options.seed, steps=options.steps or STEPS)


def small_top(recipe: Recipe) -> Recipe:
    """A recipe above frozen trunks with a top that trains fast: a linear layer and pooling at a higher rate.

    For methods with learned tokens: a narrower top with a block, and one caption of a photo (mixes: all). Words that
    are learned from scratch keep their tower.
    """
    model, deep = recipe.model, not set(DEEP).isdisjoint(recipe.method.split("+"))
    depth, width = (1, 256) if deep else (0, 512)
    token = deep or model.head.image_pool == "cls"  # the trunk's own
    image = replace(model.image, width=width, mlp=4 * width, depth=depth, class_token=token)
    text, head = model.text, replace(model.head, dim=width)
    if text.trunk.name:
        text, head = replace(text, depth=depth, init_std=0.02), replace(head, text_pool="mean")
    if recipe.method in DEEP:
        recipe = replace(recipe, data=replace(recipe.data, captions="one"))
    if not deep:
        recipe = replace(recipe, optim=replace(recipe.optim, muon_lr=FAST))
    return replace(recipe, model=replace(model, image=image, text=text, head=head))


def judged(matcher: Matcher, source: Source, store: str, name: str, tiles: dict[str, list[Tile]]) -> dict[str, float]:
    """Metrics of retrieval, by stored tokens. Args: tiles: receives the best photos of some captions of the photos,
    outlined where the caption is theirs, and of free texts."""
    source, tokenizer = reading_tokens(matcher.model, matcher.tokenizer, source, [store], [store])
    found = captioned(Inputs(matcher, source))
    captions, owners = found.texts, found.image_of_text
    texts = Matcher(matcher.model, tokenizer).encode_text(captions)
    asked = {captions[n]: owners[n] for n in range(0, len(captions), -(-len(captions) // CAPTIONS))} | dict.fromkeys(
        FREE, -1
    )
    scores = matcher.score(found.images, matcher.encode_text(list(asked))).T  # [texts, I]
    for (text, image), best in zip(asked.items(), scores.argsort(descending=True, stable=True), strict=True):
        photos = [(i, tile(source, found.rows[i], name)) for i in best[:BEST].tolist()]
        tiles.setdefault(text, []).extend(replace(photo, right=i == image or None) for i, photo in photos)
    return dict(retrieval(matcher.score, found.images, texts, torch.tensor(owners)))
