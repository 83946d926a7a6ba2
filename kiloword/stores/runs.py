"""What runs and evaluations take from stores: whether they fit the model and the data, and how the run then reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kiloword.config.recipes import AugmentConfig, DataConfig, Recipe
from kiloword.data.images.views import LATER, in_words, of_images
from kiloword.data.stored import Kind, StoreFile, WithTokens
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.interop import text_towers
from kiloword.interop.towers import LITES
from kiloword.model.model import Model
from kiloword.model.trunks.trunk import Trunk
from kiloword.models.tensors import weights_digest
from kiloword.stores.features import Features, FeatureStore
from kiloword.stores.store import Store, check_alike
from kiloword.stores.tokens import (
    REMAKE,
    FoundImages,
    ImageTokens,
    TextTokens,
    TokenizerWithTokens,
    check_texts,
    opened,
)
from kiloword.types import Input, Source, Transform


def is_model_folder(tower: str) -> bool:
    """Whether a tower as a user writes it is a model folder: a folder, unless it is called as a tower is."""
    names = (*LITES, *text_towers.KINDS, "timm", "open_clip")
    return tower.partition(":")[0] not in names and Path(tower).expanduser().is_dir()


def trunk_of(model: Model, kind: Kind) -> Trunk | None:
    """The trunk of the image tower or of the text tower."""
    return getattr(model.image_tower if kind == "images" else model.text_tower, "trunk", None)


def trunk_digest(model: Model, kind: Kind) -> str:
    """A digest of what a trunk's tokens depend on besides the input: its weights, and how images are normalised."""
    trunk = trunk_of(model, kind)
    assert trunk is not None
    values = {name: value for name, value in trunk.state_dict().items() if value.is_floating_point()}
    if kind == "images":
        values |= {"mean": model.mean, "std": model.std}
    return weights_digest(values)


def check_trunk(
    model: Model, stores: Sequence[ImageTokens] | Sequence[TextTokens], weights: bool = True, frozen: bool = False
) -> None:
    """Raises: ValueError when the stores have tokens of another trunk than the model's, or of images of another size.

    Args: weights: False: the model's trunk is not filled yet, so that only its shape is compared; frozen: a run reads
    the tokens, so that it may not train the trunk.
    """
    for store in stores:
        name, kind, config, trunk = store.file.model, store.kind, model.config, trunk_of(model, store.kind)
        if trunk is None:
            add = f"--init {name}" if is_model_folder(name) else f"--{kind[:-1]}-tower {name}"
            raise ValueError(f"{store.path} has tokens of {name}, which the model has not: train one by {add}.")
        if frozen and any(p.requires_grad for p in trunk.parameters()):  # adapters change the weights
            raise ValueError(
                f"{store.path} has tokens of a frozen trunk, but the run trains weights of the {kind[:-1]} trunk: "
                f"freeze it (--freeze {kind[:-1]}:trunk, and no --lora.targets of it), or omit --{kind[:-1]}-features."
            )
        wanted: dict[str, Any] = {"weights": trunk_digest(model, kind)} if weights else {}
        if kind == "images":
            wanted |= {"size": config.image.size, "resize": config.preprocess.resize}
        width = (config.image if kind == "images" else config.text).trunk.width
        check_alike(store, "this model", REMAKE, width=width, **wanted)


def towers_of(images: Sequence[str], texts: Sequence[str]) -> tuple[str, str]:
    """The towers that folders of features were made with, as `--image-tower` and `--text-tower` take them.

    "" without a folder, and for a tower of a model folder, from which a run starts by `--init`.
    """
    image = opened(images, ImageTokens)[0].file.model if images else ""
    text = opened(texts, TextTokens)[0].file.model if texts else ""
    return "" if is_model_folder(image) else image, "" if is_model_folder(text) else text


def on_stores(recipe: Recipe, features: Sequence[str], images: Sequence[str], texts: Sequence[str]) -> Recipe:
    """The recipe of a run on stores: its images are augmented as those are, its captions are whole."""
    stores = [*map(FeatureStore, features), *opened(images, ImageTokens)]
    augment, plain = recipe.data.augment, AugmentConfig() if images else None
    made = next((store.file.augment for store in stores if store.file.augmented), plain)
    if made is not None:
        augment = replace(made, **{name: getattr(augment, name) for name in LATER})
    if texts:
        augment = replace(augment, drop_words=0.0)
    data = replace(recipe.data, augment=augment, image_features=tuple(images), text_features=tuple(texts))
    return replace(recipe, data=data)


def reading_tokens(
    model: Model,
    tokenizer: Tokenizer,
    source: Source,
    images: Sequence[str],
    texts: Sequence[str],
    augmented: bool = False,
) -> tuple[Source, Tokenizer]:
    """A source and a tokenizer for evaluation that read tokens from folders of features.

    Args: augmented: read the first view of augmented images where no others are there, as of training data.
    Raises: ValueError when a folder has tokens of another tower or other data, or augmented images alone.
    """
    of_image, of_text = opened(images, ImageTokens), opened(texts, TextTokens)
    check_trunk(model, of_image)
    check_trunk(model, of_text)
    check_texts(of_text, source, tokenizer)
    plain = [store for store in of_image if not store.file.augmented] or (of_image if augmented else [])
    if of_image and not plain:
        raise ValueError(
            f"{' '.join(images)} has augmented images alone ({of_image[0].file.shown}): evaluate on images, or on "
            "features that are made without --augment."
        )
    source = WithTokens(source, FoundImages(plain, source)) if plain else source
    return source, TokenizerWithTokens(tokenizer, of_text) if of_text else tokenizer


@dataclass(frozen=True)
class Stored:
    """What the loader of a run reads from stores (arguments of `kiloword.data.loader.Loader`)."""

    stores: list[Features]
    shown: StoreFile | None
    image_tokens: FoundImages | None
    tokenizer: Tokenizer


def stored(
    stores: Sequence[FeatureStore],
    data: DataConfig,
    source: Source,
    tokenizer: Tokenizer,
    transforms: Sequence[Transform] = (),
    inputs: Mapping[str, Input] | None = None,
) -> Stored:
    """What a run reads from feature stores, and from the token stores that `data` names.

    Raises: ValueError for stores of other data or another augmentation, and where captions or views change.
    """
    features = [Features(store, source) for store in stores]
    augmented, found = any(store.file.augmented for store in stores), None
    if augmented:
        _check_shown(stores, data)
    if data.image_features:
        if augmented:
            raise ValueError(
                f"--features has {stores[0].file.shown}, but with --image-features the student sees no images: omit "
                "one of them, or make features without --augment."
            )
        makers = (*transforms, *(inputs or {}).values())
        if unfit := [reason for maker in makers if (reason := getattr(maker, "pixels", None))]:
            raise ValueError(unfit[0])
        tokens, wanted = opened(data.image_features, ImageTokens), of_images(data.augment)
        found = FoundImages(sorted(tokens, key=lambda store: of_images(store.file.augment) != wanted), source)
        _check_shown(found.stores, data)
    if data.text_features:
        texts = opened(data.text_features, TextTokens)
        check_texts(texts, source, tokenizer)
        mixing = [t for t in transforms if getattr(getattr(t, "settings", None), "parts", "") != "images"]
        if data.augment.drop_words > 0 or mixing:
            what = f"the transform {type(mixing[0]).__name__.lower()}" if mixing else "--augment.drop-words"
            raise ValueError(
                f"{what} changes captions, but --text-features has tokens of whole captions alone: omit one of them."
            )
        tokenizer = TokenizerWithTokens(tokenizer, texts)
    return Stored(features, stores[0].file if augmented else None, found, tokenizer)


def _check_shown(stores: Sequence[Store], data: DataConfig) -> None:
    """Raises: ValueError where stores hold other images than each other, or than the run's augmentation makes."""
    for store in stores:
        names = ("views", "dtype") if store.kind == "images" else ("shown",)
        first = {name: getattr(stores[0].file, name) for name in names}
        check_alike(store, str(stores[0].path), "expected the same in all stores of a run.", **first)
        if of_images(data.augment) != of_images(store.file.augment):
            raise ValueError(
                f"{store.path} has {store.file.shown}, but the run asks for {in_words(data.augment)}: omit --augment, "
                "or make another store by `kiloword embed --views K` with that augmentation."
            )
