"""The verbs index, search and serve: photos found by words. No torch at import, so that help is instant."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from kiloword.models.trust import NONE, Trust

Precision = Literal["auto", "fp32", "bf16"]


def index(
    photos: Positional[Path],
    out: Path,
    model: str | None = None,
    batch: int = 64,
    workers: int | Literal["auto"] = "auto",
    device: str = "auto",
    precision: Precision = "auto",
    trust: Annotated[Trust, arg(name="")] = NONE,
    dim: int | None = None,
    codes: Literal["float", "int8", "binary"] | None = None,
    vectors: Literal["fp16", "int8", "none"] | None = None,
    forget: bool = False,
) -> None:
    """Make or update a library of photos to search in: kiloword index photos --model runs/first/model --out library

    The same command again encodes photos that are new or changed, forgets those that were deleted, and resumes.

    Args:
        photos: folder of photos, with its subfolders; captions are not needed.
        out: folder of the library.
        model: model folder; default: that of the library.
        batch: images in a batch.
        workers: loader processes; auto: none on a CPU, on CUDA the number of cores minus two.
        device: auto, cpu, cuda, cuda:N.
        precision: precision of the encoders; auto: bf16 on CUDA for models larger than size tiny.
        trust: code that the model folder may run.
        dim: keep the first N numbers of the vectors, normalised again; default: all, or as many as the library has.
        codes: compare photos by float vectors, by a byte or by a bit for each number; default: float.
        vectors: with codes, what is stored on disk to score the best photos again, and none: nothing; default: fp16.
        forget: remove all photos that are not in the folder now, also where most are, or a subfolder is empty or gone.
    """
    from kiloword.apps.search.index import main

    main(photos, model, out, batch, workers, device, precision, trust, dim, codes, vectors, forget)


def search(
    library: Positional[Path],
    query: Positional[str | None] = None,
    like: Path | None = None,
    top: int = 10,
    within: str = "",
    json: Path | None = None,
    page: Path | None = None,
    open: bool = False,
    model: str | None = None,
    device: str = "auto",
    precision: Precision = "auto",
    trust: Annotated[Trust, arg(name="")] = NONE,
    dim: int | None = None,
    rescore: int | None = None,
) -> None:
    """Search photos by words: kiloword search library "a dog on the beach"

    By a photo: kiloword search library --like dog.jpg --open

    Args:
        library: folder that `kiloword index` wrote.
        query: what the photos should show.
        like: photo, in place of the query.
        top: number of photos.
        within: part of the path that the photos must have, such as a folder.
        json: write the results to this file.
        page: write a page with the photos to this file.
        open: open the page in a browser; without --page it is search.html in the library.
        model: model folder, where it is no longer where the library was made.
        device: auto, cpu, cuda, cuda:N.
        precision: precision of the encoders; auto: bf16 on CUDA for models larger than size tiny.
        trust: code that the model folder may run.
        dim: compare the first N numbers of the vectors of a library without codes, normalised again.
        rescore: in a library of codes, score N times as many photos as are shown by their vectors; 0: none; default:
            4, of binary codes 16.
    """
    from kiloword.apps.search.command import main

    main(library, query, like, top, within, json, page, open, model, device, precision, trust, dim, rescore)


def serve(
    library: Positional[Path],
    host: str = "127.0.0.1",
    port: int = 8321,
    open: bool = False,
    model: str | None = None,
    device: str = "auto",
    precision: Precision = "auto",
    trust: Annotated[Trust, arg(name="")] = NONE,
) -> None:
    """Search photos in a browser: kiloword serve library --open

    Args:
        library: folder that `kiloword index` wrote.
        host: address to listen on; the default is reached from this machine alone.
        port: its port; 0: any free one.
        open: open the page in a browser.
        model: model folder, where it is no longer where the library was made.
        device: auto, cpu, cuda, cuda:N.
        precision: precision of the encoders; auto: bf16 on CUDA for models larger than size tiny.
        trust: code that the model folder may run.
    """
    from kiloword.apps.search.serve import main

    main(library, host, port, open, model, device, precision, trust)
