"""What `kiloword score --explain DIR` writes: figures of every image, and all values as JSON."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from kiloword.data.images.augmentation import EvalTransform
from kiloword.data.sample import MAX_IMAGE, read_whole
from kiloword.errors import count
from kiloword.explain.maps import Explanation, Maps
from kiloword.explain.reconstruct import mim_settings
from kiloword.explain.strips import Draw, SheetInput, What, possible, strips
from kiloword.files import write_atomic, write_json
from kiloword.generation.decoding import writer
from kiloword.methods.coca import masking
from kiloword.model.image import extra
from kiloword.report.images import Pixels
from kiloword.report.overlay import SIDE, Row, TokenMap, figure
from kiloword.report.sheet import CaptionStrips, sheet

if TYPE_CHECKING:
    from PIL import Image

    from kiloword.api import Matcher

SHEET = "The part of the image that the model sees, and what its decoders do with each caption."
DOCUMENTS = ("weights.json", "inside.json")
TOP = 4  # tokens shown per text
ENTROPY = "Entropy of the weights: 0 is one token a head, 1 is all tokens alike."


def write(
    folder: Path,
    matcher: Matcher,
    images: Sequence[Path],
    texts: Sequence[str],
    maps: Maps = "last",
    what: Sequence[str] | None = None,
) -> list[str]:
    """Explain every pair: `folder`/IMAGE.png and weights.json; for decoders, IMAGE-inside.png and inside.json.

    Args: what: "maps", "words", "gradcam", "masks", "reconstruction"; None: all that the model can show.
    Returns: lines for the screen.
    Raises: ValueError when an image cannot be read or the folder cannot be written, and as `planned`.
    """
    inside, figures, sheets = planned(folder, matcher, images, what)
    large = [_large(matcher, path) for path in images]
    inputs = SheetInput(matcher, images, matcher.pixels(list(images)), large, texts)
    draws = strips(inputs, inside)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{folder} cannot be made: {error.strerror}; choose another folder for --explain.") from error
    lines = _write_maps(folder, inputs, maps, figures) if figures else []
    return [*lines, *(_write_sheets(folder, inputs, draws, sheets) if sheets else [])]


def planned(
    folder: Path, matcher: Matcher, images: Sequence[Path], what: Sequence[str] | None = None
) -> tuple[list[What], list[str], list[str]]:
    """What sheets show, and the names of the figures of maps and of the sheets, of none or of all images.

    Raises: ValueError for a file that would be replaced, unless an earlier call wrote it, and for what the model cannot
    show.
    """
    kinds: Sequence[str] = ("maps", *possible(matcher)) if what is None else what
    inside = [kind for kind in get_args(What) if kind in kinds]
    _check_possible(matcher, inside)
    names = file_names([*images, *(path.with_name(f"{path.stem}-inside.png") for path in images)])
    figures, sheets = names[: len(images)] if "maps" in kinds else [], names[len(images) :] if inside else []
    documents = [name for name, files in zip(DOCUMENTS, (figures, sheets), strict=True) if files]
    _check_apart(folder, images, [*figures, *sheets, *documents])
    return inside, figures, sheets


def _check_possible(matcher: Matcher, kinds: Sequence[What]) -> None:
    """Raises: ValueError for what the model cannot show."""
    if "words" in kinds:
        writer(matcher.model)
    if "masks" in kinds:
        masking.check(matcher.model.config)
    if "reconstruction" in kinds:
        mim_settings(matcher)


def _write_sheets(folder: Path, inputs: SheetInput, draws: Mapping[What, Draw], files: Sequence[str]) -> list[str]:
    """Sheets of what decoders do, one per image, and their values."""
    scores = inputs.matcher.score(inputs.pixels, inputs.texts).tolist()
    written, entries = _claim(folder, "inside.json", files), []
    for i, (path, file) in enumerate(zip(inputs.paths, files, strict=True)):
        blocks, values = [], []
        for t, text in enumerate(inputs.texts):
            drawn = {kind: draw(i, t) for kind, draw in draws.items()}
            shown = [strip if t == 0 else replace(strip, about="") for strip, _ in drawn.values()]  # explain once
            note = f"score {scores[i][t]:.3f}{_cut(inputs.matcher, text)}"
            blocks.append(CaptionStrips(f"“{text}”" if text else "the empty caption", note, shown))
            parts: dict[str, Any] = {kind: part for kind, (_, part) in drawn.items()}
            values.append({"text": text, "score": scores[i][t]} | parts)
        _save(sheet(inputs.large[i], path.name, SHEET, blocks), folder / file)
        entries.append({"image": str(path), "figure": file, "texts": values})
    write_json(folder / "inside.json", {"images": entries, "figures": written})
    return [f"{count(len(files), 'sheet')} ({', '.join(draws)}) and inside.json: {folder}"]


def _cut(matcher: Matcher, text: str) -> str:
    """A note where the model sees only the beginning of a text."""
    cut = matcher.tokenizer.cut([text], matcher.model.config.text)
    return "; too long: the model reads {1} of its {0} tokens".format(*cut[0]) if cut else ""


def _write_maps(folder: Path, inputs: SheetInput, maps: Maps, files: Sequence[str]) -> list[str]:
    """Figures of where each text looks; returns a line per pair: its score, entropy and largest weights."""
    explanation = inputs.matcher.explain(inputs.pixels, inputs.texts, maps)
    names = token_names(inputs.matcher, explanation)
    about = explanation.about if explanation.weights is None else f"{explanation.about} {ENTROPY}"
    lines, entries = [about], []
    written = _claim(folder, "weights.json", files)
    for i, (path, file) in enumerate(zip(inputs.paths, files, strict=True)):
        pairs = [_pair(explanation, i, t, text, names) for t, text in enumerate(inputs.texts)]
        rows = [_row(explanation, i, t, pair) for t, pair in enumerate(pairs)]
        _save(figure(inputs.large[i], path.name, about, rows), folder / file)
        entries.append({"image": str(path), "figure": file, "texts": pairs})
        lines += [f"{path.name}  {_line(pair)}" for pair in pairs]
    document = {"about": explanation.about, "maps": maps, "tokens": names, "images": entries, "figures": written}
    write_json(folder / "weights.json", document)
    return [*lines, f"{count(len(files), 'figure')} and weights.json: {folder}"]


def file_names(images: Sequence[Path]) -> list[str]:
    """A name per image; images of one name from several folders are numbered."""
    names: list[str] = []
    for path in images:
        name, n = f"{path.stem}.png", 2
        while name in names:
            name, n = f"{path.stem}-{n}.png", n + 1
        names.append(name)
    return names


def _check_apart(folder: Path, images: Sequence[Path], files: Sequence[str]) -> None:
    """Raises: ValueError when a figure would be written over one of the images, or over a file of others."""
    resolved, known = {path.resolve() for path in images}, _written(folder)
    for path in (folder / file for file in files):
        if path.resolve() in resolved:
            raise ValueError(f"--explain would write a figure over the image {path}: choose another folder.")
        if path.exists() and path.name not in known:
            raise ValueError(f"--explain would replace {path}, which it did not write: choose another folder.")


def _written(folder: Path) -> set[str]:
    """The files in a folder that an earlier call wrote: documents, and the figures that they name."""
    read = {name: _read(folder / name) for name in DOCUMENTS}
    return {name for document, (content, figures) in read.items() if content for name in (document, *figures)}


def _read(document: Path) -> tuple[dict[str, Any], set[str]]:
    """A document, and the figures of the calls that wrote it; empty where there is none, or it is of others."""
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        content = json.loads(document.read_text(encoding="utf-8"))
        figures = {str(entry["figure"]) for entry in content["images"]}
        return content, figures | {str(name) for name in content.get("figures", [])}
    return {}, set()


def _claim(folder: Path, document: str, files: Sequence[str]) -> list[str]:
    """Note figures before they are written, so that a call after an interruption may replace them.

    Returns: their names and those of earlier calls.
    """
    content, figures = _read(folder / document)
    written = sorted({*figures, *files})
    write_json(folder / document, {"images": [], **content, "figures": written})
    return written


def token_names(matcher: Matcher, explanation: Explanation) -> list[str]:
    """Names of the tokens that are mixed; numbers count from 0, as in the arrays."""
    if explanation.weights is None:
        return []
    config, columns = matcher.model.config.image, explanation.grid[1]
    first = extra(config) - int(config.uncertainty_token)
    names = ["class token" if config.class_token and n == 0 else f"token {n}" for n in range(first)]
    patches = [f"patch {n // columns}, {n % columns}" for n in range(explanation.grid[0] * columns)]
    return [*names, *patches][: explanation.weights.shape[-1]]


def _pair(explanation: Explanation, i: int, t: int, text: str, names: Sequence[str]) -> dict[str, Any]:
    """The values of one image and one text for JSON."""
    pair: dict[str, Any] = {"text": text, "score": float(explanation.scores[i, t])}
    if explanation.weights is not None and explanation.shares is not None and explanation.entropy is not None:
        shares = explanation.shares[i, t]
        order = shares.argsort(descending=True, stable=True)[:TOP].tolist()
        pair["entropy"] = float(explanation.entropy[i, t])
        pair["top"] = [{"token": names[n], "place": n, "share": float(shares[n])} for n in order]
        pair["weights"] = explanation.weights[i, t].tolist()
    return pair


def _row(explanation: Explanation, i: int, t: int, pair: dict[str, Any]) -> Row:
    looks = explanation.maps[i, t].view(explanation.grid).cpu().numpy()
    if explanation.weights is None or explanation.tokens is None:
        return Row(pair["text"], f"score {pair['score']:.3f}", looks)
    maps = explanation.tokens[i].view(-1, *explanation.grid).cpu().numpy()
    tokens = [TokenMap(top["token"], top["share"], maps[top["place"]]) for top in pair["top"]]
    note = f"score {pair['score']:.3f}, entropy {pair['entropy']:.2f}"
    return Row(pair["text"], note, looks, tokens, explanation.weights[i, t].cpu().numpy())


def _line(pair: dict[str, Any]) -> str:
    line = f"“{pair['text']}”  score {pair['score']:.3f}"
    if "top" not in pair:
        return line
    tops = ", ".join(f"{top['token']} {top['share']:.0%}" for top in pair["top"])
    return f"{line}  entropy {pair['entropy']:.2f}  {tops}"


def _large(matcher: Matcher, path: Path) -> Pixels:
    """The part of the image that the model sees, at a higher resolution: uint8 [H, W, 3]."""
    transform = EvalTransform(2 * SIDE, matcher.model.config.preprocess.resize)
    pixels: Pixels = transform(read_whole(path, "it", MAX_IMAGE)).permute(1, 2, 0).numpy()
    return pixels


def _save(image: Image.Image, path: Path) -> None:
    file = io.BytesIO()
    image.save(file, "PNG")
    write_atomic(path, file.getvalue())
