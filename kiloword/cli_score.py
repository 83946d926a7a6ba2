"""The verb score. No torch at import: help is instant."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from kiloword.terminal import say
from kiloword.trust import NONE, Trust


def score(
    model: Positional[str],
    images: tuple[Path, ...],
    texts: tuple[str, ...],
    explain: Path | None = None,
    explain_what: tuple[Literal["maps", "words", "gradcam", "masks", "reconstruction"], ...] = (),
    maps: Literal["last", "rollout"] = "last",
    device: str = "auto",
    trust: Annotated[Trust, arg(name="")] = NONE,
) -> None:
    """Score pictures against texts: kiloword score MODEL --images a.jpg b.jpg --texts "a dog" "a cat"

    Where each text looks: kiloword score MODEL --images a.jpg --texts "a dog" --explain inside

    Args:
        model: model folder.
        images: picture files.
        texts: captions to compare with.
        explain: folder for a PNG a picture, which shows where each text looks, and weights.json; of a model with
            decoders also PICTURE-inside.png and inside.json.
        explain_what: with explain, what is drawn if not all: maps (where each text looks), and of decoders words (where
            the text decoder looks as it writes each word), gradcam (of the first layer), masks (which patches each
            text hides) and reconstruction (hidden patches as the image decoder paints them).
        maps: with explain, attention of the image tower's last block, or rolled out over all blocks.
        device: auto, cpu, cuda, cuda:N.
        trust: whose code the model folder may run.
    """
    from kiloword.api import load

    texts = tuple(text.encode("utf-8", "surrogateescape").decode("utf-8", "replace") for text in texts)  # of any locale
    matcher = load(model, device=device, method=trust.method, trust_code=trust.trust_code)
    _print(images, texts, matcher.score(list(images), list(texts)).tolist())
    if explain is not None:
        from kiloword.report.inside import write

        say(*write(explain, matcher, images, texts, maps, explain_what or None))
    elif explain_what:
        raise ValueError("--explain-what says what --explain DIR draws: give a folder by --explain.")


def _print(images: Sequence[Path], texts: Sequence[str], scores: Sequence[Sequence[float]]) -> None:
    """Scores [pictures, texts] as a table; each picture's best are bold."""
    from rich.table import Table
    from rich.text import Text

    from kiloword.screen import Screen

    table = Table("picture", *texts)
    for path, row in zip(images, scores, strict=True):
        best = max(row)
        table.add_row(path.name, *(Text(f"{s:.3f}", "bold" if s == best else "") for s in row))
    Screen(120).print(table)
