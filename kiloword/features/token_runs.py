"""Runs and evaluations on stored tokens: whether the tokens are those of the model's trunks, and what a run takes from
them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kiloword.config.recipes import Recipe
from kiloword.data.images.views import LATER, in_words
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.data.token_join import TokenizerWithTokens, WithTokens, check_tokenizer
from kiloword.data.token_store import ImageTokens, Kind, TextTokens, as_evaluated, opened, served
from kiloword.interop import text_towers
from kiloword.interop.towers import LITES
from kiloword.model.model import Model
from kiloword.model.trunks.trunk import Trunk
from kiloword.types import Source


def is_model_folder(tower: str) -> bool:
    """Whether a tower as a user writes it is a model folder: a folder, unless it is called as a tower is."""
    names = (*LITES, *text_towers.KINDS, "timm", "open_clip")
    return tower.partition(":")[0] not in names and Path(tower).expanduser().is_dir()


def trunk_of(model: Model, kind: Kind) -> Trunk | None:
    """The trunk of the image tower or of the text tower."""
    trunk: Trunk | None = getattr(model.image_tower if kind == "images" else model.text_tower, "trunk", None)
    return trunk


def trunk_digest(model: Model, kind: Kind) -> str:
    """A digest of what a trunk's tokens depend on besides the input: its weights, and how images are normalised."""
    trunk = trunk_of(model, kind)
    assert trunk is not None
    digest = hashlib.blake2b(digest_size=16)
    values = {name: value for name, value in trunk.state_dict().items() if value.is_floating_point()}
    if kind == "images":
        values |= {"mean": model.mean, "std": model.std}
    for name, value in sorted(values.items()):
        digest.update(f"{name} {list(value.shape)}\n".encode())
        digest.update(value.detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def check_trunk(model: Model, stores: Sequence[ImageTokens] | Sequence[TextTokens], weights: bool = True) -> None:
    """Raises: ValueError when the stores have tokens of another trunk than the model's, or of images of another size.

    Args: weights: False: the model's trunk is not filled yet, so that only its shape is compared.
    """
    for store in stores:
        file, folder = store.file, store.path.parent
        trunk = trunk_of(model, file.kind)
        if trunk is None:
            add = f"--init {file.tower}" if is_model_folder(file.tower) else f"--{file.kind[:-1]}-tower {file.tower}"
            raise ValueError(
                f"{folder} has tokens of {file.tower}, but the model's own tower takes {file.kind}: train one by "
                f"{add}, or omit --{file.kind[:-1]}-features."
            )
        config = model.config.image if file.kind == "images" else model.config.text
        if config.trunk.width != file.width or (weights and trunk_digest(model, file.kind) != file.trunk):
            raise ValueError(
                f"{folder} has tokens of {file.tower} ({file.trunk[:16]}), but the trunk of this model has other "
                "weights, or other preprocessing: name the tower and file that they were made with, or make others by "
                "`kiloword embed --tokens`."
            )
        wanted = f"{model.config.image.size} pixels ({model.config.preprocess.resize})"
        made = f"{file.size} pixels ({file.resize})"
        if file.kind == "images" and made != wanted:
            raise ValueError(
                f"{folder} has tokens of images of {made}, but this model takes {wanted}: omit --model.image.size and "
                "--model.preprocess.resize, or make others by `kiloword embed MODEL --tokens`."
            )


def check_frozen(model: Model, stores: Sequence[ImageTokens] | Sequence[TextTokens]) -> None:
    """Raises: ValueError when a run trains the trunk of the stores."""
    for kind in dict.fromkeys(store.kind for store in stores):
        trunk = trunk_of(model, kind)
        if trunk is not None and any(p.requires_grad for p in trunk.parameters()):
            raise ValueError(
                f"--{kind[:-1]}-features has tokens of a frozen trunk, but the run trains weights of the {kind[:-1]} "
                f"trunk: freeze it (--freeze {kind[:-1]}:trunk, and no --lora.targets of it), or omit "
                f"--{kind[:-1]}-features."
            )


def towers_of(images: Sequence[str], texts: Sequence[str]) -> tuple[str, str]:
    """The towers that folders of features were made with, as `--image-tower` and `--text-tower` take them.

    "" without a folder, and for a tower of a model folder, from which a run starts by `--init`.
    """
    image = opened(images, ImageTokens)[0].file.tower if images else ""
    text = opened(texts, TextTokens)[0].file.tower if texts else ""
    return "" if is_model_folder(image) else image, "" if is_model_folder(text) else text


def on_tokens(recipe: Recipe, images: Sequence[str], texts: Sequence[str]) -> Recipe:
    """The recipe of a run on folders of features: its images are augmented as those are, its captions are whole."""
    augment = recipe.data.augment
    if images:
        stores = opened(images, ImageTokens)
        made = next((store for store in stores if store not in as_evaluated(stores)), stores[0]).file.augment
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
    check_tokenizer(tokenizer, of_text)
    plain_stores = as_evaluated(of_image) or (of_image if augmented else [])
    if of_image and not plain_stores:
        raise ValueError(
            f"{' '.join(images)} has augmented images alone ({in_words(of_image[0].file.augment)}): evaluate on "
            "images, or on features that are made without --augment."
        )
    chosen = served(of_text, source)
    plain = served(plain_stores, source)
    source = WithTokens(source, plain) if plain else source
    return source, TokenizerWithTokens(tokenizer, chosen) if chosen else tokenizer
