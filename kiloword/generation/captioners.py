"""Captioners for `kiloword caption`: a model of kiloword, or an image-to-text model of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from PIL import Image
from torch import Tensor

from kiloword.data.images.augmentation import EvalTransform
from kiloword.data.images.decode import Pixels, decode
from kiloword.data.reading import ImageTransform
from kiloword.distributed.device import choose
from kiloword.errors import needs
from kiloword.generation.captioner import Caption, Captioner, unique
from kiloword.generation.decoding import writer
from kiloword.generation.options import GenerationOptions
from kiloword.interop.hf_clip import KINDS
from kiloword.interop.hf_folder import check_strangers, json_object, weight_files
from kiloword.interop.names import local_folder
from kiloword.interop.open_clip_config import torchvision_ready
from kiloword.model.trunks.libraries import check_like
from kiloword.models.model_folder import check_finite, model_files, open_model
from kiloword.models.trust import NONE, Trust
from kiloword.stores.teachers import DTYPES, digest

WRITERS = (
    "expected a model folder with a text decoder (coca, sycoca or any with +caption), open_clip:coca_NAME:FILE, or a "
    "captioner of transformers (BLIP, GIT) as hf:FOLDER."
)


class Describer(Protocol):
    """Writes captions for images."""

    fingerprint: str  # changes when the weights change
    precision: str  # "fp32" or "bf16"

    @property
    def transform(self) -> ImageTransform:
        """Preprocessing of an image, in the loader's workers."""

    def check(self, options: GenerationOptions) -> None:
        """Errors: ValueError for unsupported options."""

    def describe(self, images: Tensor, options: GenerationOptions, keys: Sequence[str]) -> list[list[Caption]]:
        """At most `num` different captions of n preprocessed images [n, 3, size, size], best first.

        Args: keys: names of the images, which determine random draws.
        """


def open_captioner(name: str, device: str = "auto", precision: str = "fp32", trust: Trust = NONE) -> Describer:
    """Open the captioner `name`; nothing is downloaded.

    Args: name: a model folder of kiloword, a CoCa as open_clip:NAME:FILE or hf-hub:ORG/NAME (see `interop.names`), or
    `hf:FOLDER` with an image-to-text model saved by transformers; precision:
    "fp32", "bf16" (model folders by autocast, logits in fp32) or "auto" (bf16 on CUDA for model folders larger than
    size tiny); trust: code that a model folder may run.
    Errors: ValueError when something is missing, damaged or unknown, or the model cannot write.
    """
    if precision not in ("auto", *DTYPES):
        raise ValueError(f"precision is {precision!r}: expected auto, {' or '.join(DTYPES)}.")
    device = choose(device)
    kind, _, rest = name.partition(":")
    if kind == "open_clip" and not rest.startswith("coca"):
        raise ValueError(f"{name} writes no captions: {WRITERS}")
    if kind == "hf":
        return TransformersCaptioner(Path(rest).expanduser(), device, "fp32" if precision == "auto" else precision)
    folder = Path(local_folder(name)).expanduser()
    model, tokenizer, _ = open_model(folder, device, trust=trust, precision=precision)
    return KilowordCaptioner(Captioner(model, tokenizer), digest(model_files(folder)))


class KilowordCaptioner:
    """A captioning model of kiloword."""

    def __init__(self, captioner: Captioner, fingerprint: str) -> None:
        self.captioner, self.fingerprint = captioner, fingerprint
        self.precision: str = captioner.model.precision

    @property
    def transform(self) -> ImageTransform:
        config = self.captioner.model.config
        return EvalTransform(config.image.size, config.preprocess.resize)

    def check(self, options: GenerationOptions) -> None:
        options.check()
        writer(self.captioner.model)
        self.captioner.rules(options)

    def describe(self, images: Tensor, options: GenerationOptions, keys: Sequence[str]) -> list[list[Caption]]:
        return self.captioner.caption(images, options, keys)


class TransformersCaptioner:
    """A captioner (BLIP, GIT, ...) in a local folder saved by transformers, run by transformers (extra "hf").

    Its own processor preprocesses images, and its own `generate` writes captions.
    """

    def __init__(self, folder: Path, device: str, precision: str) -> None:
        files = _files(folder)
        torchvision_ready()
        self._model, processor = _opened(folder, device, precision)
        self.precision, self._kind, self._device = precision, DTYPES[precision], device
        self._tokenizer = getattr(processor, "tokenizer", processor)
        self.transform: ImageTransform = _prepare(folder, getattr(processor, "image_processor", processor))
        self.fingerprint = digest(files)

    def check(self, options: GenerationOptions) -> None:
        options.check()
        if options.method == "nucleus":
            raise ValueError(
                "nucleus is only for model folders: transformers draws from one generator for a whole batch, so that a "
                "resumed run would differ. Choose greedy or beam."
            )

    def describe(self, images: Tensor, options: GenerationOptions, keys: Sequence[str]) -> list[list[Caption]]:
        def attempt(lacking: list[int], round_: int) -> list[list[Caption]]:
            return self._search(images[lacking], replace(options, beams=options.beams << round_))

        return unique(attempt, len(images), options)

    def _search(self, images: Tensor, options: GenerationOptions) -> list[list[Caption]]:
        """All captions of one search, for every image."""
        with torch.inference_mode():
            pixels = images.to(device=self._device, dtype=self._kind)
            generated = self._model.generate(pixel_values=pixels, **arguments(options))
            scores = self._scores(generated, options)
        texts = [text.strip() for text in self._tokenizer.batch_decode(generated.sequences, skip_special_tokens=True)]
        several = len(texts) // len(images)
        captions = list(map(Caption, texts, scores))
        return [[one for one in captions[n : n + several] if one.text] for n in range(0, len(texts), several)]

    def _scores(self, generated: Any, options: GenerationOptions) -> list[float]:
        """Score of every sequence: from the beam search; with one beam the sum over tokens up to the end."""
        sequence_scores = getattr(generated, "sequences_scores", None)
        if sequence_scores is not None:
            return [float(x) for x in sequence_scores]
        logprob = self._model.compute_transition_scores(generated.sequences, generated.scores, normalize_logits=True)
        rest = generated.sequences[:, -logprob.shape[1] :] == self._tokenizer.pad_token_id  # padding after the end
        rest = rest.flip(1).cumprod(1).flip(1).bool()
        if self._tokenizer.pad_token_id == self._tokenizer.eos_token_id:  # the first such token is the end
            rest[:, 1:] &= rest[:, :-1].clone()
            rest[:, 0] = False
        total = logprob.float().masked_fill(rest, 0).sum(1)
        return [float(x) for x in total / (~rest).sum(1).clamp(min=1) ** options.length_penalty]


def _opened(folder: Path, device: str, precision: str) -> tuple[Any, Any]:
    """A captioner in eval mode, and its processor, that transformers opens (extra "hf"); runs no foreign code.

    Raises: ValueError without transformers, for a folder of something else, and for weights that are not finite.
    """
    torchvision_ready()
    try:
        import transformers  # type: ignore[import-not-found, unused-ignore]

        model_class, other_class = transformers.AutoModelForImageTextToText, transformers.AutoProcessor
    except (ImportError, AttributeError):  # classes are imported at first use; old versions lack some
        raise ValueError(needs(f"hf:{folder}", "transformers", "hf")) from None
    local_only: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        model, info = model_class.from_pretrained(
            str(folder), use_safetensors=True, output_loading_info=True, **local_only
        )
        other = other_class.from_pretrained(str(folder), **local_only)
    except Exception as error:  # a damaged file can raise almost anything
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{folder} holds no captioner that transformers can open: {reason}") from error
    versions_differ: dict[str, Any] = {"unexpected_keys": ()}
    check_like(folder, {**info, **versions_differ}, list(model.state_dict()), model.base_model_prefix)
    check_finite(model.state_dict(), str(folder))
    return model.to(device=device, dtype=DTYPES[precision]).eval(), other


def arguments(options: GenerationOptions) -> dict[str, Any]:
    """Options as arguments of transformers' `generate`; with longest 0 the model's own settings apply."""
    generate_arguments: dict[str, Any] = {
        "do_sample": False,
        "num_beams": 1,
        "min_new_tokens": options.shortest,
        "no_repeat_ngram_size": options.no_repeat,
        "return_dict_in_generate": True,
        "output_scores": True,
    }
    if options.longest:
        generate_arguments["max_new_tokens"] = options.longest - 1
    if options.method == "beam":
        generate_arguments |= {
            "num_beams": options.beams,
            "num_return_sequences": options.beams,
            "length_penalty": options.length_penalty,
            "early_stopping": "never" if options.exact else False,
        }
    return generate_arguments


@dataclass(frozen=True)
class Prepare:
    """Preprocessing of an image by a processor of transformers: [3, size, size]."""

    processor: Any
    size: int

    def __call__(self, image: bytes | Pixels) -> Tensor:
        """Raises BadSample for an image that cannot be decoded."""
        return pixels(self.processor, Image.fromarray(decode(image)))


def pixels(processor: Any, image: Image.Image) -> Tensor:
    """The preprocessed image [3, H, W]."""
    values: Tensor = processor(images=image, return_tensors="pt")["pixel_values"][0]
    return values


def _prepare(folder: Path, processor: Any) -> Prepare:
    """Raises: ValueError for a processor whose images are not squares of one size."""
    shapes = {tuple(pixels(processor, Image.new("RGB", size)).shape) for size in ((64, 48), (31, 97))}
    shape = shapes.pop()
    if shapes or len(shape) != 3 or shape[0] != 3 or shape[1] != shape[2]:
        raise ValueError(f"the processor in {folder} makes images of {shape}. Expected one square, [3, size, size].")
    return Prepare(processor, shape[1])


def _files(folder: Path) -> list[Path]:
    """The files that determine the captions. Raises: ValueError for a folder not written by transformers."""
    if not (folder / "config.json").is_file():
        raise ValueError(f"there is no {folder / 'config.json'}: expected a folder that save_pretrained wrote.")
    weights = weight_files(folder)
    check_strangers(folder)
    kind = json_object(folder / "config.json").get("model_type")
    if kind in KINDS:
        raise ValueError(f"{folder} holds a {kind}, which writes no captions: {WRITERS}")
    return sorted([*(p for p in folder.iterdir() if p.suffix in (".json", ".txt", ".model")), *weights])
