"""HierarImgs: from an image set with instance masks to images of several levels (arXiv:2410.18857, appendix B.3).

`kiloword data hierarimgs ANNOTATIONS.json IMAGES OUT`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional, arg

from kiloword.data.hierarimgs.masks import decode_mask
from kiloword.data.hierarimgs.writer import BuildOptions, BuildReport, build
from kiloword.terminal import say

__all__ = ["BuildOptions", "BuildReport", "build", "decode_mask"]

DEFAULTS = BuildOptions()


def run(
    annotations: Annotated[Positional[Path], arg(metavar="ANNOTATIONS.json")],
    images: Annotated[Positional[Path], arg(metavar="IMAGES")],
    out: Annotated[Positional[Path], arg(metavar="OUT")],
    options: Annotated[BuildOptions, arg(name="")] = DEFAULTS,
) -> None:
    """HierarImgs: photos by levels, from their largest segment alone to the whole, for `kiloword eval hierarchy MODEL`.

    kiloword data hierarimgs instances_val2014.json val2014 hierarimgs

    Args:
        annotations: instances in COCO's json layout (images, annotations with segmentation and area, categories).
        images: folder of the photos that the json names.
        out: new folder of webdataset tars.
        options: which images are taken, and how their parts are drawn.
    """
    say(*build(annotations, images, out, options).lines())


def main(argv: Sequence[str]) -> None:
    """Parse the words behind `kiloword data hierarimgs`, and build. Errors: see `build`."""
    tyro.cli(run, prog="kiloword data hierarimgs", args=argv)
