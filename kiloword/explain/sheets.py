"""What `kiloword score --explain DIR` writes: a page for each image."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kiloword.data.images.augmentation import EvalTransform
from kiloword.data.sample import MAX_IMAGE, read_whole
from kiloword.explain.reconstruct import fill, masked_patches, mim_settings, reconstruct
from kiloword.explain.words import explain_words, gradcam
from kiloword.generation.decoding import writer
from kiloword.methods.coca import sycoca
from kiloword.model.encoding import inference
from kiloword.report import Block, Gallery, Page, Text, Tile, made_by, write_page
from kiloword.report.pictures import overlay

if TYPE_CHECKING:
    from kiloword.api import Matcher

SIDE = 256  # pixels of an image with heat
TOP = 4  # tokens shown per text
Shown = list[tuple[str, Tensor]]
"""Maps over the image [P], or images uint8 [3, H, W], with what they are: of one text."""


def attention(matcher: Matcher, image: Tensor, texts: Sequence[str]) -> Iterator[Shown]:
    """Where the text looks, and any tokens that it mixes, largest share first (entropy 0: one token, 1: all alike)."""
    found = matcher.explain(image, texts)
    for t in range(len(texts)):
        shown = [(found.about, found.maps[0, t])]
        if found.tokens is not None and found.shares is not None and found.entropy is not None:
            shown[0] = f"{found.about} Entropy {float(found.entropy[0, t]):.2f}.", found.maps[0, t]
            shares, order = found.shares[0, t].sort(descending=True, stable=True)
            top = zip(shares.tolist()[:TOP], order.tolist(), strict=False)
            shown += [(f"token {n}, {share:.0%} of the mix", found.tokens[0, n]) for share, n in top]
        yield shown


def words(matcher: Matcher, image: Tensor, texts: Sequence[str]) -> Iterator[Shown]:
    """Attention of the text decoder when it predicts each word, and the probability of that word."""
    for found in explain_words(matcher, image, texts):
        rows = zip(found.words, found.probabilities.tolist(), found.maps, strict=True)
        yield [(f"{word} {p:.1%}", looks) for word, p, looks in rows]


def cams(matcher: Matcher, image: Tensor, texts: Sequence[str]) -> Iterator[Shown]:
    """Patches of the first layer that raise the score, and the probability of the caption."""
    maps = {"for the score": gradcam(matcher, image, texts)}
    with suppress(ValueError):  # it writes no captions
        writer(matcher.model)
        maps["for writing the caption"] = gradcam(matcher, image, texts, "caption")
    for t in range(len(texts)):
        yield [(name, looks[t]) for name, looks in maps.items()]


def paintings(matcher: Matcher, image: Tensor, texts: Sequence[str]) -> Iterator[Shown]:
    """Patches that the image decoder does not see, and as it reconstructs them; L1 is its error, lower is better."""
    model, settings = matcher.model, mim_settings(matcher)
    seeds = torch.zeros(1, dtype=torch.int64, device=image.device)
    for t, text in enumerate(texts):
        guides = {"from this caption": text, "from no caption": ""}
        if len(texts) > 1:
            guides["from another caption"] = texts[t - 1]
        guides = guides if settings.guide == "text" else {"without text": ""}
        with inference(model):
            encoded = [matcher.tokenizer.encode([one], model.config.text).to(image.device) for one in guides.values()]
            hidden = masked_patches(model, image, encoded[0], seeds, settings.mim_mask == "attentive", settings)
            true = sycoca.pixels(model, image, hidden, norm_pix=False)
            painted = reconstruct(model, image, hidden, encoded, settings)
            shown = [("what it sees", fill(model, image, hidden, true * 0)[0])]
            for guide, patches in zip(guides, painted, strict=True):
                l1 = float(sycoca.distance(patches, true).mean())
                shown.append((f"{guide}: L1 {l1:.3f}", fill(model, image, hidden, patches)[0]))
        yield shown


KINDS: dict[str, tuple[str, Callable[[Matcher, Tensor, Sequence[str]], Iterator[Shown]]]] = {  # heading, maker
    "maps": ("Attention", attention),
    "words": ("Word by word", words),
    "gradcam": ("Grad-CAM", cams),
    "reconstruction": ("Reconstruction", paintings),
}


def possible(matcher: Matcher, what: Sequence[str] = ()) -> list[str]:
    """What is shown of a model: `what`, or all that it can show. Errors: ValueError for what it cannot."""
    kinds = []
    decoders = {"text_decoder", "image_decoder"} & set(matcher.model.more)
    for kind in what or (KINDS if decoders else ["maps"]):
        with nullcontext() if what else suppress(ValueError):
            if kind == "words":
                writer(matcher.model)
            if kind == "reconstruction":
                mim_settings(matcher)
            kinds.append(kind)
    return kinds


def write(
    folder: Path, matcher: Matcher, images: Sequence[Path], texts: Sequence[str], what: Sequence[str] = ()
) -> None:
    """Explain every pair: `folder`/IMAGE.html for each image.

    Args: what: as of `possible`. Errors: ValueError when an image cannot be read, and as of `possible`.
    """
    kinds, stems = possible(matcher, what), [path.stem for path in images]
    transform = EvalTransform(SIDE, matcher.model.config.preprocess.resize)
    for i, (path, stem) in enumerate(zip(images, stems, strict=True), 1):
        large = transform(read_whole(path, "it", MAX_IMAGE)).permute(1, 2, 0).contiguous().numpy()
        sections: dict[str, list[Block]] = {f"{t}. “{text}”": [] for t, text in enumerate(texts, 1)}
        for heading, make in (KINDS[kind] for kind in kinds):
            for blocks, shown in zip(sections.values(), make(matcher, matcher.pixels([path]), texts), strict=True):
                tiles = [Tile(large, ["as the model sees it"])]
                for name, x in shown:
                    rows = x.view(int(len(x) ** 0.5), -1) if x.ndim == 1 else x.permute(1, 2, 0)
                    pixels = rows.contiguous().cpu().numpy()
                    tiles.append(Tile(overlay(large, pixels, SIDE) if x.ndim == 1 else pixels, [name]))
                blocks += [Text(heading, "heading"), Text(make.__doc__ or ""), Gallery(tiles)]
        name = stem if stems.count(stem) == 1 else f"{stem}-{i}"
        write_page(folder / f"{name}.html", Page(path.name, "", sections, made_by()))
