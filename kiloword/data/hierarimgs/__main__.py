"""`python -m kiloword.data.hierarimgs ANNOTATIONS.json IMAGES OUT`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional, arg

from kiloword.data.hierarimgs.writer import BuildOptions, build
from kiloword.terminal import say, warn

DEFAULTS = BuildOptions()


def run(
    annotations: Annotated[Positional[Path], arg(metavar="ANNOTATIONS.json")],
    images: Annotated[Positional[Path], arg(metavar="IMAGES")],
    out: Annotated[Positional[Path], arg(metavar="OUT")],
    options: Annotated[BuildOptions, arg(name="")] = DEFAULTS,
) -> None:
    """HierarImgs: photos by levels, from their largest segment alone to the whole, for `kiloword eval hierarchy MODEL`.

    python -m kiloword.data.hierarimgs instances_val2014.json val2014 hierarimgs

    Args:
        annotations: instances in COCO's json layout (images, annotations with segmentation and area, categories).
        images: folder of the photos that the json names.
        out: new folder of webdataset tars.
        options: which images are taken, and how their parts are drawn.
    """
    say(*build(annotations, images, out, options).lines())


def main(argv: list[str] | None = None) -> None:
    """Entry point. Errors of the user are one message on stderr and exit code 2."""
    try:
        tyro.cli(run, prog="python -m kiloword.data.hierarimgs", args=argv)
    except (ValueError, OSError) as error:
        message = f"{error.strerror or error}: {error.filename}." if isinstance(error, OSError) else error
        warn(f"hierarimgs: {message}")
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
