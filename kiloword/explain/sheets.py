"""What `kiloword score --explain DIR` writes: a page for each image, and all values as JSON."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from kiloword.data.images.augmentation import EvalTransform
from kiloword.data.sample import MAX_IMAGE, read_whole
from kiloword.errors import count
from kiloword.explain.inside import KINDS, SIDE, Seen, check, possible
from kiloword.explain.maps import Explanation, Maps
from kiloword.files import atomic, write_json
from kiloword.model.image import extra
from kiloword.report import Block, Gallery, Page, Plot, Text, Tile, made_by, write_page

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from kiloword.api import Matcher

TOP = 4  # tokens shown per text


def planned(matcher: Matcher, what: Sequence[str] = ()) -> list[str]:
    """What pages show, in order: "maps" and kinds of `inside`; without `what`, all that the model can show.

    Errors: ValueError for what the model cannot show.
    """
    kinds = [kind for kind in ("maps", *KINDS) if kind in (what or ("maps", *possible(matcher)))]
    for kind in kinds:
        check(matcher, kind)
    return kinds


def write(
    folder: Path,
    matcher: Matcher,
    images: Sequence[Path],
    texts: Sequence[str],
    maps: Maps = "last",
    what: Sequence[str] = (),
) -> list[str]:
    """Explain every pair: `folder`/IMAGE.html; weights.json with values of the maps, inside.json of the decoders.

    IMAGE.png is the image beside where each text looks.

    Args: what: as of `planned`. Returns: lines for the screen.
    Errors: ValueError when an image cannot be read, and as `planned`.
    """
    kinds = planned(matcher, what)
    names = file_names(images)
    if over := {(folder / f"{name}.png").resolve() for name in names} & {path.resolve() for path in images}:
        raise ValueError(f"--explain would write a figure over the image {over.pop()}: choose another folder.")
    transform = EvalTransform(SIDE, matcher.model.config.preprocess.resize)
    lines, weights, inside = list[str](), list[Any](), list[Any]()
    for i, (path, name) in enumerate(zip(images, names, strict=True)):
        large = transform(read_whole(path, "it", MAX_IMAGE)).permute(1, 2, 0).contiguous().numpy()
        seen = Seen(matcher, matcher.pixels([path]), large, texts, seed=i)
        scores = matcher.score(seen.pixels, texts)[0].tolist()
        heads = [{"text": text, "score": score} for text, score in zip(texts, scores, strict=True)]
        explained = matcher.explain(seen.pixels, texts, maps) if "maps" in kinds else None
        tokens = [] if explained is None else token_names(matcher, explained)
        pairs = heads if explained is None else [head | pair(explained, t, tokens) for t, head in enumerate(heads)]
        drawn = {kind: list(KINDS[kind][1](seen)) for kind in kinds if kind != "maps"}
        sections: dict[str, list[Block]] = {"The image": [Gallery([Tile(large, ["as the model sees it"])], columns=4)]}
        for t, (text, found) in enumerate(zip(texts, pairs, strict=True)):
            blocks = [] if explained is None else _maps(seen, explained, t, found)
            for kind, shown in drawn.items():
                heading, made, columns = KINDS[kind]
                blocks += [Text(heading, "heading"), Text(made.__doc__ or ""), Gallery(shown[t][0], columns=columns)]
            sections[f"{t + 1}. “{text}”"] = [Text(_note(found)), *blocks]
            lines.append(f"{path.name}  “{text}”  {_note(found)}")
        about = "" if explained is None else explained.about
        if explained is not None:
            strip = [large, *(seen.lit(looks).image for looks in explained.maps[0])]
            with atomic(folder / f"{name}.png") as png:
                Image.fromarray(np.hstack(strip)).save(png, "PNG")
        write_page(folder / f"{name}.html", Page(path.name, about, sections, made_by()))
        weights.append({"image": str(path), "figure": f"{name}.png", "texts": pairs})
        parts = [head | {kind: shown[t][1] for kind, shown in drawn.items()} for t, head in enumerate(heads)]
        inside.append({"image": str(path), "figure": f"{name}.html", "texts": parts})
    if explained is not None:
        write_json(folder / "weights.json", {"about": about, "maps": maps, "tokens": tokens, "images": weights})
        lines.insert(0, about)
    if kinds != ["maps"]:
        write_json(folder / "inside.json", {"images": inside})
    return [*lines, f"{count(len(names), 'page')} ({', '.join(kinds)}): {folder}"]


def pair(explained: Explanation, t: int, names: Sequence[str]) -> dict[str, Any]:
    """Mixing weights of the first image and a text for JSON; nothing where a model has none."""
    if explained.weights is None or explained.shares is None or explained.entropy is None:
        return {}
    shares = explained.shares[0, t]
    order = shares.argsort(descending=True, stable=True)[:TOP].tolist()
    return {
        "entropy": float(explained.entropy[0, t]),
        "top": [{"token": names[n], "place": n, "share": float(shares[n])} for n in order],
        "weights": explained.weights[0, t].tolist(),
    }


def _maps(seen: Seen, explained: Explanation, t: int, found: dict[str, Any]) -> list[Block]:
    """Where a text looks; its heaviest tokens, and where they look; all mixing weights."""
    tiles = [seen.lit(explained.maps[0, t], "where the text looks")]
    if explained.weights is None or explained.tokens is None:
        return [Gallery(tiles, columns=5)]
    for top in found["top"]:
        tiles.append(seen.lit(explained.tokens[0, top["place"]], top["token"], f"{top['share']:.0%} of the mix"))
    weights = explained.weights[0, t].cpu().numpy()  # [M, N]

    def draw(axes: Axes) -> None:
        axes.bar(range(weights.shape[1]), weights.mean(0), label="mean over heads")
        axes.plot(weights.T, ".", color="C1", markersize=3, label=["each head", *["_"] * (len(weights) - 1)])
        axes.set(xlabel="token", ylabel="mixing weight")

    about = "Mixing weights of all tokens. Entropy: 0 is one token a head, 1 is all tokens alike."
    return [Gallery(tiles, columns=5), Plot(draw, about, about, height=2)]


def _note(found: dict[str, Any]) -> str:
    tops = ", ".join(f"{top['token']} {top['share']:.0%}" for top in found.get("top", ()))
    return f"score {found['score']:.3f}" + (f"  entropy {found['entropy']:.2f}  {tops}" if tops else "")


def file_names(images: Sequence[Path]) -> list[str]:
    """A name per image, without suffix; images of one name from several folders are numbered."""
    names: list[str] = []
    for path in images:
        numbered = (path.stem if n == 1 else f"{path.stem}-{n}" for n in itertools.count(1))
        names.append(next(name for name in numbered if name not in names))
    return names


def token_names(matcher: Matcher, explained: Explanation) -> list[str]:
    """Names of the tokens that are mixed; numbers count from 0, as in the arrays."""
    if explained.weights is None:
        return []
    config, columns = matcher.model.config.image, explained.grid[1]
    first = extra(config) - int(config.uncertainty_token)
    names = ["class token" if config.class_token and n == 0 else f"token {n}" for n in range(first)]
    patches = [f"patch {n // columns}, {n % columns}" for n in range(explained.grid[0] * columns)]
    return [*names, *patches][: explained.weights.shape[-1]]
