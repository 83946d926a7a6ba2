"""`kiloword embed --tokens`: open a tower, and store its tokens of a data set."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from kiloword.config.recipes import AugmentConfig, DataConfig, ModelConfig, sizes
from kiloword.config.settings import check
from kiloword.data.images.views import in_words
from kiloword.data.sources.open import open_data
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.data.token_store import Dtype, ImageTokens, Kind, TextTokens
from kiloword.distributed.by_device import announce, workers_of
from kiloword.distributed.device import choose
from kiloword.distributed.sharing import together
from kiloword.errors import suggestion
from kiloword.features.tables import ProgressReport
from kiloword.features.token_runs import is_model_folder, trunk_of
from kiloword.features.tokens import TokenOptions, embed_tokens
from kiloword.interop import text_towers, towers
from kiloword.methods.registry import preset
from kiloword.model.model import Model
from kiloword.models.build import build
from kiloword.models.model_folder import load_model
from kiloword.models.trust import NONE, Trust
from kiloword.terminal import say


def main(
    model: str,
    data: Sequence[str],
    out: Path,
    extra_captions: Sequence[str] = (),
    batch: int = 64,
    workers: int | Literal["auto"] = "auto",
    device: str = "auto",
    precision: Literal["fp32", "bf16"] = "fp32",
    dtype: Dtype = "fp16",
    trust: Trust = NONE,
    views: int = 1,
    augment: AugmentConfig | None = None,
    seed: int = 0,
) -> None:
    """Run and print `kiloword embed --tokens`. Ranks of torchrun share the rows.

    Args: model: a tower, or a model folder that has one; see `kiloword.cli.embed`. Errors: see `embed_tokens`.
    """
    for name, value in (("--batch", batch), ("--views", views)):
        if value < 1:
            raise ValueError(f"{name} is {value}: expected at least 1.")
    device, augment = choose(device), augment or AugmentConfig()
    check(augment, prefix="--augment.")
    with together(device):
        opened, tokenizer, message = open_tower(model, trust)
        opened = opened.to(device)
        size = opened.config.image.size
        workers = workers_of(workers, device, batch * views, size)
        announce(device, precision, "on every device, unless given", workers)
        report = ProgressReport(sys.stderr)
        if message:
            report.say(message)
        source = open_data(DataConfig(sources=tuple(data), extra_captions=tuple(extra_captions)), size)
        options = TokenOptions(views, augment, seed, dtype, precision, batch, workers)
        kinds: list[Kind] = [kind for kind in ("images", "texts") if trunk_of(opened, kind) is not None]
        if kinds == ["texts"] and (views > 1 or augment != AugmentConfig()):
            raise ValueError(f"{model} reads texts, which --views and --augment do not change: omit them.")
        if kinds == ["images"] and extra_captions:
            raise ValueError(f"{model} reads images, which --extra-captions does not change: omit it.")
        for kind in kinds:
            store = embed_tokens(opened, tokenizer, kind, source, out, options, model, report)
            if store is not None:
                say(f"{out}: {in_numbers(store)}")


def in_numbers(store: ImageTokens | TextTokens) -> str:
    """The contents of a store on one line."""
    file, size = store.file, sum(path.stat().st_size for path in store.path.iterdir()) / 1e6
    if isinstance(store, ImageTokens):
        views = f"{file.views} views ({in_words(file.augment)}) of " if file.augment != AugmentConfig() else ""
        return f"{views}{len(store):,} images, {file.tokens} tokens x {file.width} as {file.dtype}, {size:,.1f} MB"
    return f"{len(store):,} captions, tokens x {file.width} as {file.dtype}, {size:,.1f} MB"


def open_tower(tower: str, trust: Trust = NONE) -> tuple[Model, Tokenizer | None, str]:
    """A model with the towers of other libraries that the user named, its tokenizer, and a message about the weights.

    Args: tower: as `--image-tower` or `--text-tower` of train take it, or a model folder.
    Raises: ValueError for a tower that does not exist or whose weights are not named, and for a model folder without
    such towers.
    """
    folder = Path(tower).expanduser()
    if is_model_folder(tower):
        loaded = load_model(folder, trust=trust)
        if trunk_of(loaded[0], "images") is None and trunk_of(loaded[0], "texts") is None:
            raise ValueError(f"{tower} has no tower of another library: omit --tokens for features of its own towers.")
        return *loaded, ""
    _check_known(tower)
    towers.check_weights_named(tower)
    config, errors = sizes()["top"], list[ValueError]()
    tokenizer: Tokenizer | None = None
    try:
        config = towers.with_image_tower(config, tower)
    except ValueError as error:
        errors.append(error)
    try:
        config, tokenizer = _with_text(config, tower)
    except ValueError as error:
        errors.append(error)
    if len(errors) == 2:
        raise _neither(tower, errors)
    of_image, of_text = (tower if x.trunk.name else "" for x in (config.image, config.text))
    towers.check_declared(config, of_image, of_text)
    model = build(config, preset("clip"))
    image, text = trunk_of(model, "images"), trunk_of(model, "texts")
    lines = [] if image is None else [towers.load(image, tower, "image tower")]
    lines += [] if text is None else [text_towers.load(text, tower)]
    return model, tokenizer, " ".join(lines)


def _check_known(tower: str) -> None:
    """Raises: ValueError for a tower of no kind."""
    kinds = (*towers.LITES, "minilm", "timm", "open_clip", "hf")
    kind = tower.partition(":")[0]
    if kind not in kinds:
        raise ValueError(
            f"unknown tower {tower[:200]!r}: expected a model folder, {', '.join(towers.LITES)}, minilm, "
            f"timm:NAME:FILE, open_clip:NAME:FILE or hf:FOLDER.{suggestion(kind, kinds)}"
        )


def _neither(tower: str, errors: Sequence[ValueError]) -> ValueError:
    """The error of a tower that is neither one of images nor one of texts, by the errors of both."""
    image, text = map(str, errors)
    kind = tower.partition(":")[0]
    if kind == "hf" and tower != "hf:" and image != text:
        return ValueError(f"{tower[:200]} is no tower. Of images: {image} Of texts: {text}")
    return errors[1 if kind == "minilm" else 0]


def _with_text(config: ModelConfig, tower: str) -> tuple[ModelConfig, Tokenizer]:
    config, tokenizer = text_towers.with_text_tower(config, tower), text_towers.tokenizer_of(tower)
    text = replace(config.text, vocab=tokenizer.vocab, special=tokenizer.roles.ids())
    return replace(config, text=text), tokenizer
