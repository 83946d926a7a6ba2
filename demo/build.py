"""Write what a web server and a release need of a model: `make demo` and `make models` call this.

    python demo/build.py page MODEL OUT [--photos SRC] [--count 200] [--packages demo/node_modules]
    python demo/build.py model MODEL OUT

page: a folder that any static file server shows: the page, the model as ONNX, onnxruntime-web, and held-out scenes, or
photos of SRC, with their features. model: a folder NAME with the model and its card, NAME.zip of it, and SHA256SUMS, to
attach to a release; NAME is METHOD-SIZE-STEPS.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import shutil
import sys
import zipfile
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import Tensor

from kiloword.api import Matcher, load
from kiloword.apps.quickstart.scenes import draw_all
from kiloword.config.recipes import ModelFile
from kiloword.data.images.decode import decode
from kiloword.data.open import open_source
from kiloword.data.reading import name_of
from kiloword.data.scenes import world
from kiloword.errors import sentence_of
from kiloword.files import write_atomic, write_json
from kiloword.interop.export.run import run as export
from kiloword.interop.push import MODEL
from kiloword.model.heads import Single
from kiloword.models.card import CARD, model_card
from kiloword.models.model_folder import model_files, read_model_file
from kiloword.report.figure import CSS
from kiloword.terminal import say, warn
from kiloword.types import BadSample, NoCaption

HERE = Path(__file__).resolve().parent
RUNTIME = {  # file of onnxruntime-web -> its name here; servers know .js, not all know .mjs
    "ort.wasm.bundle.min.mjs": "ort.js",
    "ort-wasm-simd-threaded.wasm": "ort-wasm-simd-threaded.wasm",
}
COLUMNS = 20  # of the sprite
TILE = 128  # pixels of a scene on the page
SCENE_EXAMPLES = (
    "a red circle",
    "something striped",
    "a large blue star",
    "a yellow shape to the left of a green shape",
    "three things on a black background",
)
PHOTO_EXAMPLES = (
    "a dog in the snow",
    "children play",
    "somebody on a bicycle",
    "people at the sea",
    "a close-up of a face",
)
DATE = (1980, 1, 1, 0, 0, 0)  # of files in an archive, so that the same model gives the same bytes


def write_page(
    model: Path, out: Path, photos: str = "", count: int = 200, packages: Path = HERE / "node_modules"
) -> None:
    """Write the page of a model into `out`, in place of an older one.

    Args: photos: source of photos in place of scenes; count: number of images; packages: where npm
    installed onnxruntime-web.
    Raises: ValueError for a model whose scores the page cannot compute, packages that are missing, a folder `out` that
    holds something else, and as `kiloword export` does.
    """
    if not COLUMNS <= count <= 2000:
        raise ValueError(f"--count {count}: expected {COLUMNS} to 2,000.")
    missing = [name for name in RUNTIME if not (packages / "onnxruntime-web" / "dist" / name).is_file()]
    if missing:
        raise ValueError(
            f"{packages} lacks onnxruntime-web ({missing[0]}): run make demo, which installs it by npm ci."
        )
    _check_old(out)
    matcher = load(model)
    _check_model(matcher, model)
    out.parent.mkdir(parents=True, exist_ok=True)
    work = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(work, ignore_errors=True)  # of a call that was killed
    try:
        with redirect_stdout(io.StringIO()):  # it names the folder that is renamed below
            export("onnx", str(model), work / "model")
        for path in sorted((HERE / "page").iterdir()):
            if path.name != "demo.css":
                shutil.copyfile(path, work / path.name)
        style = CSS + (HERE / "page" / "demo.css").read_text(encoding="utf-8")
        write_atomic(work / "style.css", style.encode())
        (work / "ort").mkdir()
        for name, ours in RUNTIME.items():
            shutil.copyfile(packages / "onnxruntime-web" / "dist" / name, work / "ort" / ours)
        _write_images(matcher, read_model_file(model_files(model)[0].parent), photos, count, work)
        if out.exists():
            shutil.rmtree(out)
        work.replace(out)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    say(f"{out}: {size / 1e6:.1f} MB. See it by python -m http.server --bind 127.0.0.1 --directory {out}")


def _check_old(out: Path) -> None:
    """Raises: ValueError for a path that holds anything but an older page."""
    if out.is_dir() and ((out / "demo.json").is_file() or not any(out.iterdir())):
        return
    if out.exists() or out.is_symlink():
        raise ValueError(f"{out} holds something other than a demo page: choose another folder, or remove it.")


def _check_model(matcher: Matcher, model: Path) -> None:
    """Raises: ValueError for scores or a tokenizer that the page's JavaScript does not compute."""
    head = matcher.model.head
    cosine = type(head.pooling) is Single and head.uncertainty is None
    reasons = {
        "its score is more than the cosine of one vector each": not cosine,
        "its vocabulary is neither kiloword's nor BERT's": matcher.tokenizer.clean not in ("plain", "encodable"),
        "its text tower sees pads": matcher.model.config.text.pad_to_context,
    }
    if differs := [reason for reason, holds in reasons.items() if holds]:
        raise ValueError(
            f"the demo page cannot rank as {model} does: {'; '.join(differs)}. Take a model that kiloword trained with "
            "a vocabulary of its own or with BERT's, such as clip or siglip of size tiny, or of `make photos`."
        )


def _write_images(matcher: Matcher, file: ModelFile, photos: str, count: int, folder: Path) -> None:
    """demo.json, features.bin (float32 [count, D], little-endian) and images.webp, row by row."""
    side = file.model.image.size
    if photos:
        examples, facts = PHOTO_EXAMPLES, {"what": "photos", "about": ""}
        images, captions = _photos(photos, count)
        features = matcher.encode_image(images)["vec"]
        fitted = [ImageOps.fit(Image.fromarray(image), (TILE, TILE), Image.Resampling.BICUBIC) for image in images]
        tiles = torch.from_numpy(np.stack([np.asarray(image) for image in fitted])).permute(0, 3, 1, 2)
    else:
        examples, source = SCENE_EXAMPLES, f"scenes:test?n={count}"
        words = {"shapes": world.SHAPES, "colours": world.COLOURS, "sizes": world.SIZES, "fills": world.FILLS}
        words |= {"rows": world.ROWS, "columns": world.COLUMNS, "backgrounds": world.BACKGROUNDS}
        about = "The scenes are of the split for tests, which training on scenes leaves aside."
        facts = {"what": "scenes", "about": about, "words": words}
        scenes, tiles = draw_all(source, side), draw_all(source, TILE).pixels
        captions, features = scenes.captions, matcher.encode_image(scenes.pixels)["vec"]
    vectors = features.float().cpu().numpy()
    write_atomic(folder / "features.bin", vectors.astype("<f4").tobytes())
    _sprite(tiles).save(folder / "images.webp", lossless=not photos, quality=85, method=6)
    about_model = {
        "method": file.method,
        "size": file.size,
        "steps": file.steps,
        "data": file.data,
        "parameters": sum(p.numel() for p in matcher.model.parameters()),
    }
    shown = {"captions": captions, "columns": COLUMNS, "dim": vectors.shape[1], "image_size": side}
    write_json(folder / "demo.json", {**facts, **shown, "examples": examples, "model": about_model})


def _photos(src: str, count: int) -> tuple[list[NDArray[np.uint8]], list[str]]:
    """The first photos of a source that can be read, uint8 [H, W, 3], each with its first caption, if any.

    Raises: ValueError where none can be read.
    """
    source, images, captions = open_source(src), list[NDArray[np.uint8]](), list[str]()
    for row in range(len(source)):
        try:
            try:
                record = source.record(row)
            except NoCaption as error:  # photos need none
                record = error.record
            images.append(decode(record.image) if isinstance(record.image, bytes) else record.image)
            captions.append(next(iter(record.captions), ""))
        except BadSample as bad:
            warn(f"skipped {name_of(source, row)}: {bad}")
        if len(images) == count:
            break
    if not images:
        raise ValueError(f"no photo of {src} can be read: kiloword data check {src} says why.")
    return images, captions


def _sprite(pixels: Tensor) -> Image.Image:
    """Images uint8 [N, 3, H, W] in rows of COLUMNS; the last row is filled with black."""
    count, _, side, _ = pixels.shape
    rows = -(-count // COLUMNS)
    filled = torch.zeros(rows * COLUMNS, 3, side, side, dtype=torch.uint8)
    filled[:count] = pixels
    grid = filled.view(rows, COLUMNS, 3, side, side).permute(0, 3, 1, 4, 2)
    return Image.fromarray(np.ascontiguousarray(grid.reshape(rows * side, COLUMNS * side, 3).numpy()))


def write_model(model: Path, out: Path) -> None:
    """Write OUT/NAME with a model and its card, OUT/NAME.zip and OUT/SHA256SUMS of the archives in OUT.

    Raises: ValueError for what is no model folder.
    """
    folder = model_files(model)[0].parent
    file = read_model_file(folder)
    name = f"{file.method}-{file.size}-{file.steps}".replace(":", "-").replace("/", "-")
    target = out / name
    target.mkdir(parents=True, exist_ok=True)
    card = folder / CARD
    write_atomic(target / CARD, card.read_bytes() if card.is_file() else model_card(folder).encode())
    for part in MODEL:
        write_atomic(target / part, (folder / part).read_bytes())
    archive = out / f"{name}.zip"
    work = out / f".{name}.zip.tmp"
    with zipfile.ZipFile(work, "w", zipfile.ZIP_DEFLATED) as packed:
        for part in sorted((CARD, *MODEL)):
            packed.writestr(zipfile.ZipInfo(f"{name}/{part}", DATE), (target / part).read_bytes(), zipfile.ZIP_DEFLATED)
    work.replace(archive)
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(out.glob("*.zip"))]
    write_atomic(out / "SHA256SUMS", "".join(sums).encode())
    say(f"{archive}: {archive.stat().st_size / 1e6:.1f} MB, with the card {target / CARD}")


def main(words: list[str] | None = None) -> int:
    """The command line. Returns: an exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    kinds = parser.add_subparsers(dest="kind", required=True)
    for kind in ("page", "model"):
        one = kinds.add_parser(kind)
        one.add_argument("model", type=Path)
        one.add_argument("out", type=Path)
        if kind == "page":
            one.add_argument("--photos", default="")
            one.add_argument("--count", type=int, default=200)
            one.add_argument("--packages", type=Path, default=HERE / "node_modules")
    chosen = parser.parse_args(words)
    try:
        if chosen.kind == "model":
            write_model(chosen.model, chosen.out)
        else:
            write_page(chosen.model, chosen.out, chosen.photos, chosen.count, chosen.packages)
    except (ValueError, OSError) as error:
        say(f"error: {sentence_of(error)}", to=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
