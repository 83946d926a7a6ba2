"""The verb score. No torch at import, so that help is instant."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, arg

from kiloword.errors import naming_truncated
from kiloword.models.trust import NONE, Trust
from kiloword.terminal import say, shown, warn

if TYPE_CHECKING:
    from rich.text import Text

    from kiloword.api import Matcher

Drawing = Literal["maps", "words", "gradcam", "masks", "reconstruction"]
DRAWINGS = (
    "with explain, what to draw instead of everything: maps (attention of each text), and for decoders words "
    "(attention of the text decoder for each word), gradcam (of its first layer), masks (patches that each text masks) "
    "and reconstruction (masked patches as the image decoder reconstructs them)."
)


def score(
    model: Positional[str],
    images: tuple[Path, ...],
    texts: tuple[str, ...],
    explain: Path | None = None,
    explain_what: Annotated[tuple[Drawing, ...], arg(help=DRAWINGS)] = (),
    maps: Literal["last", "rollout"] | None = None,
    plane: Path | None = None,
    beside: tuple[str, ...] = (),
    nearest: Literal["cosine", "csd"] | None = None,
    device: str = "auto",
    precision: Literal["auto", "fp32", "bf16"] = "auto",
    trust: Annotated[Trust, arg(name="")] = NONE,
) -> None:
    """Score images against texts: kiloword score MODEL --images a.jpg b.jpg --texts "a dog" "a cat"

    Attention maps of texts: kiloword score MODEL --images a.jpg --texts "a dog" --explain inside

    Args:
        model: model folder.
        images: image files, or folders with subfolders.
        texts: texts to score.
        explain: folder for IMAGE.html, IMAGE.png (attention maps), weights.json; with decoders also inside.json.
        maps: with explain, attention of the image tower's last block (default: last), or rollout over all blocks.
        plane: write a page with the images and texts in a plane, Gaussians as ellipses, to this file.
        beside: with plane, further model folders, such as one without Gaussians.
        nearest: in place of the model's score: cosine of the features, or csd (1 - CSD / 2 of Gaussians).
        device: auto, cpu, mps, cuda, cuda:N.
        precision: precision of the encoders; auto: bf16 on CUDA for models larger than size tiny. Scores are fp32.
        trust: code that the model folder may run.
    """
    _check_flags(explain, explain_what, maps, plane, bool(beside), nearest)
    from kiloword.api import load
    from kiloword.distributed.by_device import announce, reason_of
    from kiloword.evaluation.command import labels

    images, names = image_files(images), labels([model, *beside])
    if empty := next((n for n, text in enumerate(texts, 1) if not text.strip()), None):
        raise ValueError(f"text {empty} of --texts is empty: expected words.")
    matcher = load(model, device=device, method=trust.method, trust_code=trust.trust_code, precision=precision)
    others = [load(name, device=device, trust_code=trust.trust_code, precision=precision) for name in beside]
    network = matcher.model
    announce(str(network.mean.device), network.precision, reason_of(precision, network.config))
    if explain is not None:
        from kiloword.explain.sheets import planned, write

        planned(matcher, explain_what)
    with naming_truncated():
        _print(images, texts, matcher.score(list(images), list(texts), nearest).tolist())
        if plane is not None:
            _draw_plane(plane, dict(zip(names, [matcher, *others], strict=True)), images, texts)
        if explain is not None:
            say(*write(explain, matcher, images, texts, maps or "last", explain_what))


def _check_flags(
    explain: Path | None, what: Sequence[str], maps: str | None, plane: Path | None, beside: bool, nearest: str | None
) -> None:
    """Refuse flags that would change nothing. Raises: ValueError."""
    if beside and plane is None:
        raise ValueError("--beside names models to draw by --plane FILE, which is missing.")
    if what and explain is None:
        raise ValueError("--explain-what selects what --explain DIR draws: name a folder by --explain.")
    if maps and explain is None:
        raise ValueError("--maps selects the attention that --explain DIR draws: name a folder by --explain.")
    if maps and what and "maps" not in what:
        raise ValueError(f"--maps selects the attention of maps, but --explain-what is {' '.join(what)}: add maps.")
    if nearest and explain is not None:
        raise ValueError("--explain draws what the model's own score is made of: omit --nearest, or --explain.")


def _draw_plane(file: Path, matchers: Mapping[str, Matcher], images: Sequence[Path], texts: Sequence[str]) -> None:
    """Write the page of --plane, with a plane for each model, by name."""
    from kiloword.explain.plane import write_plane

    write_plane(file, matchers, images, texts)
    say(f"plane: {file}")


def image_files(images: Sequence[Path]) -> tuple[Path, ...]:
    """Replace folders by the images in them and their subfolders, sorted. Prints what else they hold.

    Raises: ValueError for a folder without images.
    """
    from kiloword.data.folders import image_folders, no_images
    from kiloword.errors import LeftOut

    files, left = list[Path](), LeftOut("path")
    for path in images:
        inside = [path]
        if path.is_dir():
            inside = sorted(path / below / name for below, names, _ in image_folders(path, left) for name in names)
        if not inside:
            raise ValueError(no_images(path, left))
        files += inside
    warn(*left.lines())
    return tuple(files)


def shown_names(images: Sequence[Path]) -> list[str]:
    """The names of files; where two have one name, their paths below the folder that holds all."""
    names = [path.name for path in images]
    if len(set(names)) == len(names):
        return names
    paths = [path.absolute() for path in images]
    above = os.path.commonpath([path.parent for path in paths])
    return [os.path.relpath(path, above) for path in paths]


def _print(images: Sequence[Path], texts: Sequence[str], scores: Sequence[Sequence[float]]) -> None:
    """Print scores [images, texts] as a table, or a line for each pair where its columns would split words.

    The best score of each image is bold.
    """
    from rich.table import Column, Table
    from rich.text import Text

    from kiloword.terminal.screen import Screen

    names = [shown(name) for name in shown_names(images)]
    digits = max(len(f"{s:.3f}") for row in scores for s in row)
    rows = [[Text(f"{s:{digits}.3f}", "bold" if s == max(row) else "") for s in row] for row in scores]
    table = Table(Column("image", no_wrap=True), *texts)
    for name, row in zip(names, rows, strict=True):
        table.add_row(name, *row)
    entries = [(n, name, t) for name, row in zip(names, rows, strict=True) for n, t in zip(row, texts, strict=True)]
    Screen(120).print_table(table, entry_lines(entries))


def entry_lines(entries: Sequence[tuple[Text, str, str]]) -> Iterator[Text]:
    """A line for each number, name and text: what a table says that is too wide. The names are padded."""
    from rich.cells import cell_len
    from rich.text import Text

    named = [(number, shown(name), shown(text)) for number, name, text in entries]
    widest = max((cell_len(name) for _, name, _ in named), default=0)
    for number, name, text in named:
        yield Text.assemble(number, f"  {name}{' ' * (widest - cell_len(name))}  {text}")
