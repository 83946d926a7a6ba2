"""Teachers: frozen models for precomputed features, of kiloword, open_clip or transformers."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kiloword.config.recipes import Resize, sizes
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.distributed.device import choose, precision_of
from kiloword.interop import text_towers, towers
from kiloword.interop.hf_folder import is_sentence_encoder, read_sentence_folder
from kiloword.interop.names import local_folder
from kiloword.interop.open_clip_config import Unlike, preprocess_of, raw_config
from kiloword.methods.registry import preset
from kiloword.model.encoding import TEXTS, encode_texts, inference
from kiloword.model.model import Model
from kiloword.models.build import build
from kiloword.models.model_folder import DTYPES, check_finite, load_model, model_files
from kiloword.models.trust import NONE, Trust
from kiloword.stores.runs import is_model_folder, trunk_of
from kiloword.types import Texts


class Teacher(Protocol):
    """Computes features. Images are results of `EvalTransform(size, resize)`."""

    size: int
    resize: Resize
    fingerprint: str  # changes when the weights change

    def encode_images(self, images: Tensor) -> Tensor:
        """uint8 [n, 3, size, size] -> float32 [n, D] on the CPU, unit norm."""

    def encode_texts(self, texts: Sequence[str]) -> Tensor:
        """t texts -> float32 [t, D] on the CPU, unit norm; t may be 0."""


def open_teacher(name: str, device: str = "auto", precision: str = "fp32", trust: Trust = NONE) -> Teacher:
    """Open the teacher `name`; nothing is downloaded.

    Args: name: a model folder of kiloword; `open_clip:NAME:WEIGHTS` with a file of weights; `hf:FOLDER` with a CLIP or
    an encoder of texts alone, as transformers or sentence-transformers saves it; precision: "fp32" or "bf16"; trust:
    code that a model folder may run.
    Errors: ValueError when something is missing, damaged or unknown.
    """
    device = choose(device)
    kind, _, rest = name.partition(":")
    if kind == "hf" and is_sentence_encoder(place := Path(rest).expanduser()):
        return SentenceTeacher(place, device, precision)
    try:
        folder = Path(local_folder(name)).expanduser()
    except Unlike:
        model_name, _, file = rest.partition(":")
        return OpenClip(model_name, Path(file).expanduser(), device, precision)
    model, tokenizer = load_model(folder, device, precision, trust)
    return KilowordTeacher(model, tokenizer, digest(model_files(folder)))


class KilowordTeacher:
    """A model of kiloword; its features are "vec", which with contextual pooling (llip) is not what `score` compares.

    A text-conditioned score has no single vector per image, so the shortlist vectors are used instead.
    """

    def __init__(self, model: Model, tokenizer: Tokenizer, fingerprint: str) -> None:
        self.model, self.tokenizer, self.fingerprint = model, tokenizer, fingerprint
        self.size, self.resize = model.config.image.size, model.config.preprocess.resize

    def encode_images(self, images: Tensor) -> Tensor:
        with inference(self.model):
            return _unit(self.model.encode_image(images.to(self.model.device))[1]["vec"])

    def encode_texts(self, texts: Sequence[str]) -> Tensor:
        features = encode_texts(self.model, self.tokenizer, list(texts) or [""], TEXTS)["vec"]
        return _unit(features[: len(texts)])


class OpenClip:
    """An open_clip model whose towers kiloword lacks (ConvNeXt, ...), run by open_clip."""

    def __init__(self, name: str, weights: Path, device: str, precision: str) -> None:
        import open_clip

        from kiloword.interop.checkpoint import read

        state, raw = read(weights), raw_config(name)
        self.fingerprint = digest([weights], name)
        name, quick = name.partition("@")[0], bool(raw.get("quick_gelu"))
        with _of_open_clip(name):
            model = open_clip.create_model(
                name, load_weights=False, pretrained_image=False, pretrained_text=False, force_quick_gelu=quick
            )
            self._tokenizer = open_clip.get_tokenizer(name)
        try:
            model.load_state_dict(state)
        except RuntimeError as error:
            raise ValueError(f"{weights} does not hold the weights of open_clip's {name}: {error}"[:400]) from None
        check_finite(state, str(weights))
        published = {**open_clip.get_model_preprocess_cfg(model), **raw.get("preprocess_cfg", {})}
        shown, size = preprocess_of(name, published), published["size"]
        self.size, self.resize = size if isinstance(size, int) else max(size), shown.resize
        self._device, self._dtype = device, DTYPES[precision]
        self._mean, self._std = (torch.tensor(x, device=device).view(3, 1, 1) for x in (shown.mean, shown.std))
        self._model = model.to(device=device, dtype=self._dtype).eval()

    def encode_images(self, images: Tensor) -> Tensor:
        with torch.inference_mode():
            pixels = (images.to(self._device) / 255 - self._mean) / self._std
            return _unit(self._model.encode_image(pixels.to(self._dtype)))

    def encode_texts(self, texts: Sequence[str]) -> Tensor:
        with torch.inference_mode():
            return _in_parts(lambda part: self._model.encode_text(self._tokenizer(part).to(self._device)), texts)


class SentenceTeacher:
    """An encoder of texts alone; features of images are zeros, which match nothing.

    Tokens are pooled as the folder says (CLIP-C's neighbours, arXiv:2407.01408: MiniLM, by their mean).
    """

    size: int = 8  # images are read for their keys alone
    resize: Resize = "shortest"

    def __init__(self, folder: Path, device: str, precision: str) -> None:
        self._pooling, files = read_sentence_folder(folder)
        self.fingerprint = digest(files)
        model, tokenizer, _ = open_tower(f"hf:{folder}")
        assert tokenizer is not None
        self._tokenizer = tokenizer
        self._model, self._precision = model.to(device), precision_of(precision, device)

    def encode_images(self, images: Tensor) -> Tensor:
        return torch.zeros(len(images), self._model.config.text.trunk.width)

    def encode_texts(self, texts: Sequence[str]) -> Tensor:
        return _in_parts(self._pooled, texts)

    def _pooled(self, texts: list[str]) -> Tensor:
        with inference(self._model), self._precision():
            packed, tokens = trunk_tokens(self._model, self._tokenizer, texts)
        starts = packed.starts
        if self._pooling == "cls":
            return tokens[starts[:-1]]
        return torch.segment_reduce(tokens.float(), self._pooling, lengths=starts.diff())


def open_tower(tower: str, trust: Trust = NONE) -> tuple[Model, Tokenizer | None, str]:
    """A model with the towers of other libraries that the user named, its tokenizer, and a message about the weights.

    Args: tower: as `--image-tower` or `--text-tower` of train take it, or a model folder.
    Raises: ValueError for a tower that does not exist or whose weights are not named, and for a model folder without
    such towers.
    """
    if is_model_folder(tower):
        loaded = load_model(Path(tower).expanduser(), trust=trust)
        if trunk_of(loaded[0], "images") is None and trunk_of(loaded[0], "texts") is None:
            raise ValueError(f"{tower} has no tower of another library: omit --tokens for features of its own towers.")
        return *loaded, ""
    towers.check_weights_named(tower)
    config, tokenizer, errors = sizes()["top"], None, list[str]()
    try:
        config = towers.with_image_tower(config, tower)
    except ValueError as error:
        errors.append(str(error))
    try:
        config, tokenizer = text_towers.with_text_tower(config, tower), text_towers.tokenizer_of(tower)
        text_config = replace(config.text, vocab=tokenizer.vocab, special=tokenizer.roles.ids())
        config = replace(config, text=text_config)
    except ValueError as error:
        errors.append(str(error))
    if len(errors) == 2:
        raise ValueError(f"{tower[:200]} is no tower. Of images: {errors[0]} Of texts: {errors[1]}")
    of_image, of_text = (tower if x.trunk.name else "" for x in (config.image, config.text))
    towers.check_declared(config, of_image, of_text)
    model = build(config, preset("clip"))
    image, text = trunk_of(model, "images"), trunk_of(model, "texts")
    lines = [] if image is None else [towers.load(image, tower, "image tower")]
    lines += [] if text is None else [text_towers.load(text, tower)]
    return model, tokenizer, " ".join(lines)


def trunk_tokens(model: Model, tokenizer: Tokenizer, texts: Sequence[str]) -> tuple[Texts, Tensor]:
    """Texts, and their S tokens of the text tower's trunk [S, W], without the model's own extra tokens."""
    packed = tokenizer.encode(texts, replace(model.config.text, extra_tokens=())).to(model.device)
    trunk = trunk_of(model, "texts")
    assert trunk is not None
    tokens: Tensor = trunk(packed, model.text_tower.packing(packed))
    return packed, tokens[: len(packed.ids)]


def prefix_fingerprint(fingerprint: str, dim: int) -> str:
    """The fingerprint of a teacher of the first `dim` numbers of features."""
    return f"{fingerprint} dim {dim}"


@contextmanager
def _of_open_clip(name: str) -> Iterator[None]:
    """While open_clip makes a part of a model: no network, and no warning of random weights, which are replaced next.

    Raises: ValueError when it fails.
    """
    import huggingface_hub.constants as hub

    disabled, offline = logging.root.manager.disable, hub.HF_HUB_OFFLINE
    logging.disable(logging.WARNING)
    hub.HF_HUB_OFFLINE = True  # for some models it looks for a tokenizer, or for a text tower's settings
    try:
        yield
    except Exception as error:
        raise ValueError(f"open_clip's {name} needs a file that is not on this machine: {error}"[:300]) from None
    finally:
        logging.disable(disabled)
        hub.HF_HUB_OFFLINE = offline


def _in_parts(encode: Callable[[list[str]], Tensor], texts: Sequence[str]) -> Tensor:
    """Unit vectors of texts, TEXTS at a time; of none, too."""
    wanted = list(texts) or [""]
    parts = [encode(wanted[n : n + TEXTS]) for n in range(0, len(wanted), TEXTS)]
    return _unit(torch.cat(parts)[: len(texts)])


def _unit(features: Tensor) -> Tensor:
    return F.normalize(features.float(), dim=-1).cpu()


def digest(files: Sequence[Path], prefix: str = "") -> str:
    """A digest of the contents of files, in order."""
    combined = hashlib.blake2b(prefix.encode(), digest_size=16)
    for path in files:
        with path.open("rb") as file:
            combined.update(hashlib.file_digest(file, "blake2b").digest())
    return combined.hexdigest()
