"""Teachers: frozen models for precomputed features, of kiloword, open_clip or transformers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from kiloword.config.recipes import Resize, sizes
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.distributed.device import choose, precision_of
from kiloword.interop import text_towers, towers
from kiloword.interop.hf_folder import json_object, read_sentence_folder
from kiloword.interop.names import local_folder
from kiloword.methods.registry import preset
from kiloword.model.encoding import TEXTS, encode_texts, inference
from kiloword.model.model import Model
from kiloword.model.trunks.library import OPEN_CLIP, TIMM
from kiloword.model.trunks.padded import ALONE
from kiloword.models.build import build
from kiloword.models.model_folder import load_model, model_files
from kiloword.models.trust import NONE, Trust
from kiloword.stores.runs import is_model_folder, trunk_of
from kiloword.stores.tokens import TokenKind
from kiloword.types import Texts


class KilowordTeacher:
    """A model of kiloword; its features are "vec", which with contextual pooling (llip) is not what `score` compares.

    A text-conditioned score has no single vector per image, so the shortlist vectors are used instead.

    Attributes: fingerprint: changes when the weights change.
    """

    def __init__(self, model: Model, tokenizer: Tokenizer, fingerprint: str) -> None:
        self.model, self.tokenizer, self.fingerprint = model, tokenizer, fingerprint
        self.size, self.resize = model.config.image.size, model.config.preprocess.resize

    def encode_images(self, images: Tensor) -> Tensor:
        """uint8 [n, 3, size, size], of `EvalTransform(size, resize)` -> float32 [n, D] on the CPU, unit norm."""
        with inference(self.model):
            return _unit(self.model.image_features(images.to(self.model.device))["vec"])

    def encode_texts(self, texts: Sequence[str]) -> Tensor:
        """t texts -> float32 [t, D] on the CPU, unit norm; t may be 0."""
        features = encode_texts(self.model, self.tokenizer, list(texts) or [""], TEXTS)["vec"]
        return _unit(features[: len(texts)])


class SentenceTeacher:
    """An encoder of texts alone; features of images are zeros, which match nothing.

    Tokens are pooled as the folder says (CLIP-C's neighbours, arXiv:2407.01408: MiniLM, by their mean).
    """

    size: int = 8  # images are read for their keys alone
    resize: Resize = "shortest"

    def __init__(self, folder: Path, device: str, precision: str) -> None:
        self._pooling, files = read_sentence_folder(folder)
        self.fingerprint = digest(files)
        model, tokenizer, _ = open_tower(f"hf:{folder}", ["texts"])
        assert tokenizer is not None
        self._tokenizer = tokenizer
        self._model, self._precision = model.to(device), precision_of(precision, device)

    def encode_images(self, images: Tensor) -> Tensor:
        return torch.zeros(len(images), self._model.config.text.trunk.width)

    def encode_texts(self, texts: Sequence[str]) -> Tensor:
        wanted = list(texts) or [""]
        parts = [self._pooled(wanted[n : n + TEXTS]) for n in range(0, len(wanted), TEXTS)]
        return _unit(torch.cat(parts)[: len(texts)])

    def _pooled(self, texts: list[str]) -> Tensor:
        with inference(self._model), self._precision():
            packed, tokens = trunk_tokens(self._model, self._tokenizer, texts)
        starts = packed.starts
        if self._pooling == "cls":
            return tokens[starts[:-1]]
        return torch.segment_reduce(tokens.float(), self._pooling, lengths=starts.diff())


Teacher = KilowordTeacher | SentenceTeacher


def open_teacher(name: str, device: str = "auto", precision: str = "fp32", trust: Trust = NONE) -> Teacher:
    """Open the teacher `name`; nothing is downloaded.

    Args: name: a model folder of kiloword; `open_clip:NAME:WEIGHTS` with a file of weights; `hf:FOLDER` with a CLIP or
    an encoder of texts alone, as transformers or sentence-transformers saves it; precision: "fp32" or "bf16"; trust:
    code that a model folder may run.
    Errors: ValueError when something is missing, damaged or unknown.
    """
    device = choose(device)
    kind, _, rest = name.partition(":")
    place = Path(rest).expanduser()
    if kind == "hf" and json_object(place / "config.json").get("model_type") in ALONE:
        return SentenceTeacher(place, device, precision)
    folder = Path(local_folder(name)).expanduser()
    model, tokenizer = load_model(folder, device, precision, trust)
    return KilowordTeacher(model, tokenizer, digest(model_files(folder)))


def open_tower(tower: str, kinds: Sequence[TokenKind], trust: Trust = NONE) -> tuple[Model, Tokenizer | None, str]:
    """A model with the towers of other libraries that the user named, its tokenizer, and a message about the weights.

    Args: tower: as `--image-tower` or `--text-tower` of train take it, or a model folder; kinds: that are wanted.
    Raises: ValueError for a tower that is not there or whose weights are not named, and a model folder without such.
    """
    if is_model_folder(tower):
        loaded = load_model(Path(tower).expanduser(), trust=trust)
        if not any(trunk_of(loaded[0], kind) for kind in kinds):
            raise ValueError(f"{tower} has no tower of another library: omit --tokens for features of its own towers.")
        return *loaded, ""
    if tower.startswith((TIMM, OPEN_CLIP)) and towers.parse(tower).file is None:
        raise ValueError(f"{tower} names no file of weights, and random tokens are worth nothing: give {tower}:FILE.")
    config, tokenizer, errors = sizes()["top"], None, list[str]()
    for kind in kinds:
        try:
            if kind == "images":
                config = towers.with_image_tower(config, tower)
            else:
                config, tokenizer = text_towers.with_text_tower(config, tower), text_towers.tokenizer_of(tower)
                text = replace(config.text, vocab=tokenizer.vocab, special=tokenizer.roles.ids())
                config = replace(config, text=text)
        except ValueError as error:
            errors.append(f"Of {kind}: {error}")
    if len(errors) == len(kinds):
        raise ValueError(" ".join(errors))
    towers.check_declared(config, tower, tower)
    model = build(config, preset("clip"))
    image, words = trunk_of(model, "images"), trunk_of(model, "texts")
    lines = [] if image is None else [towers.load(image, tower, "image tower")]
    lines += [] if words is None else [text_towers.load(words, tower)]
    return model, tokenizer, " ".join(lines)


def trunk_tokens(model: Model, tokenizer: Tokenizer, texts: Sequence[str]) -> tuple[Texts, Tensor]:
    """Texts, and their S tokens of the text tower's trunk [S, W], without the model's own extra tokens."""
    packed = tokenizer.encode(texts, replace(model.config.text, extra_tokens=())).to(model.device)
    trunk = trunk_of(model, "texts")
    assert trunk is not None
    tokens: Tensor = trunk(packed, model.text_tower.packing(packed))
    return packed, tokens[: len(packed.ids)]


def _unit(features: Tensor) -> Tensor:
    return F.normalize(features.float()).cpu()


def digest(files: Sequence[Path], prefix: str = "") -> str:
    """A digest of the contents of files, in order."""
    combined = hashlib.blake2b(prefix.encode(), digest_size=16)
    for path in files:
        with path.open("rb") as file:
            combined.update(hashlib.file_digest(file, "blake2b").digest())
    return combined.hexdigest()
