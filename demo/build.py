"""Write what a web server and a release need of a model: `make demo` and `make models` call this.

    python demo/build.py page MODEL OUT [--scenes 200] [--packages demo/node_modules]
    python demo/build.py model MODEL OUT

page: a folder that any static file server shows: the page, the model as ONNX, onnxruntime-web, and held-out scenes
with their features. model: a folder NAME with the model and its card, NAME.zip of it, and SHA256SUMS, to attach to a
release; NAME is METHOD-SIZE-STEPS.
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
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from kiloword.api import Matcher, load
from kiloword.apps.quickstart.scenes import draw_all
from kiloword.config.recipes import ModelFile
from kiloword.data.scenes import world
from kiloword.errors import sentence_of
from kiloword.files import write_atomic, write_json
from kiloword.interop.export.run import run as export
from kiloword.interop.push import MODEL
from kiloword.model.prefix import cosine_alone
from kiloword.models.card import CARD, model_card
from kiloword.models.model_folder import model_files, read_model_file
from kiloword.report.figure import CSS
from kiloword.terminal import say

HERE = Path(__file__).resolve().parent
RUNTIME = {  # file of onnxruntime-web -> its name here; servers know .js, not all know .mjs
    "ort.wasm.bundle.min.mjs": "ort.js",
    "ort-wasm-simd-threaded.wasm": "ort-wasm-simd-threaded.wasm",
}
COLUMNS = 20  # of the sprite
TILE = 128  # pixels of a scene on the page
DATE = (1980, 1, 1, 0, 0, 0)  # of files in an archive, so that the same model gives the same bytes


def write_page(model: Path, out: Path, count: int = 200, packages: Path = HERE / "node_modules") -> None:
    """Write the page of a model into `out`, in place of an older one.

    Args: count: number of scenes; packages: where npm installed onnxruntime-web.
    Raises: ValueError for a model whose scores the page cannot compute, packages that are missing, a folder `out` that
    holds something else, and as `kiloword export` does.
    """
    if not COLUMNS <= count <= 2000:
        raise ValueError(f"--scenes {count}: expected {COLUMNS} to 2,000.")
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
        _write_scenes(matcher, read_model_file(model_files(model)[0].parent), count, work)
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
    reasons = {
        "its score is more than the cosine of one vector each": not cosine_alone(matcher.model.head),
        "its vocabulary is another library's": matcher.tokenizer.clean != "plain",
        "its text tower sees pads": matcher.model.config.text.pad_to_context,
    }
    if differs := [reason for reason, holds in reasons.items() if holds]:
        raise ValueError(
            f"the demo page cannot rank as {model} does: {'; '.join(differs)}. Take a model that kiloword trained with "
            "a vocabulary of its own, such as clip or siglip of size tiny."
        )


def _write_scenes(matcher: Matcher, file: ModelFile, count: int, folder: Path) -> None:
    """demo.json, features.bin (float32 [count, D], little-endian) and scenes.webp, row by row."""
    source = f"scenes:test?n={count}"
    side = file.model.image.size
    scenes = draw_all(source, side)
    features = matcher.encode_image(scenes.pixels)["vec"].float().cpu().numpy()
    write_atomic(folder / "features.bin", features.astype("<f4").tobytes())
    _sprite(draw_all(source, TILE).pixels).save(folder / "scenes.webp", lossless=True, method=6)
    facts: dict[str, Any] = {
        "captions": scenes.captions,
        "columns": COLUMNS,
        "dim": features.shape[1],
        "image_size": side,
        "model": {
            "method": file.method,
            "size": file.size,
            "steps": file.steps,
            "data": file.data,
            "parameters": sum(p.numel() for p in matcher.model.parameters()),
        },
        "words": {
            "shapes": world.SHAPES,
            "colours": world.COLOURS,
            "sizes": world.SIZES,
            "fills": world.FILLS,
            "rows": world.ROWS,
            "columns": world.COLUMNS,
            "backgrounds": world.BACKGROUNDS,
        },
    }
    write_json(folder / "demo.json", facts)


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
            one.add_argument("--scenes", type=int, default=200)
            one.add_argument("--packages", type=Path, default=HERE / "node_modules")
    chosen = parser.parse_args(words)
    try:
        if chosen.kind == "model":
            write_model(chosen.model, chosen.out)
        else:
            write_page(chosen.model, chosen.out, chosen.scenes, chosen.packages)
    except (ValueError, OSError) as error:
        say(f"error: {sentence_of(error)}", to=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
