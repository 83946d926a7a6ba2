"""Captioners for `kiloword caption`: a model of kiloword, or an image-to-text model of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from kiloword.data.images.decode import Pixels, decode
from kiloword.data.reading import ImageTransform
from kiloword.distributed.device import choose
from kiloword.generation.captioner import Caption, Captioner
from kiloword.generation.options import GenerationOptions
from kiloword.interop.hf_folder import opened, weight_files
from kiloword.interop.names import local_folder
from kiloword.model.trunks.libraries import check_like, transformers
from kiloword.models.model_folder import DTYPES, check_finite, model_files, open_model
from kiloword.models.trust import NONE, Trust
from kiloword.stores.teachers import digest


def open_captioner(
    name: str, device: str = "auto", precision: str = "fp32", trust: Trust = NONE
) -> Captioner | TransformersCaptioner:
    """Open the captioner `name`; nothing is downloaded.

    Args: name: a model folder of kiloword, a CoCa as open_clip:NAME:FILE or hf-hub:ORG/NAME (see `interop.names`), or
    `hf:FOLDER` with an image-to-text model saved by transformers; precision:
    "fp32", "bf16" (model folders by autocast, logits in fp32) or "auto" (bf16 on CUDA for model folders larger than
    size tiny); trust: code that a model folder may run.
    Errors: ValueError when something is missing, damaged or unknown, or the model cannot write.
    """
    device = choose(device)
    if name.startswith("hf:"):
        return TransformersCaptioner(Path(name[3:]).expanduser(), device, precision)
    folder = Path(local_folder(name)).expanduser()
    model, tokenizer, _ = open_model(folder, device, trust=trust, precision=precision)
    return Captioner(model, tokenizer, digest(model_files(folder)))


class TransformersCaptioner:
    """A captioner (BLIP, GIT, ...) in a local folder saved by transformers, run by transformers (extra "hf").

    Its own processor preprocesses images, to squares, and its own `generate` searches by beams.
    """

    def __init__(self, folder: Path, device: str, precision: str) -> None:
        files = [*weight_files(folder), *(p for p in folder.iterdir() if p.suffix in (".json", ".txt", ".model"))]
        library = transformers()
        model, info = opened(
            library.AutoModelForImageTextToText, folder, use_safetensors=True, output_loading_info=True
        )
        processor = opened(library.AutoProcessor, folder)
        check_like(folder, {**info, "unexpected_keys": ()}, list(model.state_dict()), model.base_model_prefix)
        check_finite(model.state_dict(), str(folder))
        self.precision, self._device = "fp32" if precision == "auto" else precision, device
        self._model = model.to(device=device, dtype=DTYPES[self.precision]).eval()
        self._tokenizer = getattr(processor, "tokenizer", processor)
        self.transform: ImageTransform = Prepare(getattr(processor, "image_processor", processor))
        self.fingerprint = digest(sorted(files))

    def check(self, options: GenerationOptions) -> None:
        """Raises: ValueError for other options than those of a search by several beams."""
        options.check()
        if options.method != "beam" or options.beams < 2:
            raise ValueError("a captioner of transformers searches by two beams or more: --method beam, --beams 5.")

    def caption(self, images: Tensor, options: GenerationOptions, keys: Sequence[str]) -> list[list[Caption]]:
        """Of n preprocessed images, as of `Captioner.caption`; with longest 0 the model's own limit applies."""
        limits = {"max_new_tokens": options.longest - 1} if options.longest else {}
        with torch.inference_mode():
            generated = self._model.generate(
                pixel_values=images.to(device=self._device, dtype=DTYPES[self.precision]),
                do_sample=False,
                num_beams=options.beams,
                num_return_sequences=options.beams,
                length_penalty=options.length_penalty,
                early_stopping="never" if options.exact else False,
                min_new_tokens=options.shortest,
                no_repeat_ngram_size=options.no_repeat,
                return_dict_in_generate=True,
                output_scores=True,
                **limits,
            )
        texts = self._tokenizer.batch_decode(generated.sequences, skip_special_tokens=True)
        found: list[dict[str, Caption]] = [{} for _ in images]
        for n, (text, score) in enumerate(zip(map(str.strip, texts), generated.sequences_scores.tolist(), strict=True)):
            if text:
                found[n // options.beams].setdefault(text, Caption(text, score))
        return [list(several.values())[: options.num] for several in found]


@dataclass(frozen=True)
class Prepare:
    """Preprocessing of an image by a processor of transformers: [3, size, size]."""

    processor: Any

    @property
    def size(self) -> int:
        """Pixels a side."""
        return self(Image.new("RGB", (64, 64))).shape[-1]

    def __call__(self, image: bytes | Pixels | Image.Image) -> Tensor:
        """Raises BadSample for an image that cannot be decoded."""
        opened = image if isinstance(image, Image.Image) else Image.fromarray(decode(image))
        values: Tensor = self.processor(images=opened, return_tensors="pt")["pixel_values"][0]
        return values
