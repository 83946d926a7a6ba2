"""Images a second on one core: our reading path against what open_clip's users run, on the same JPEGs.

Ours: table of rows, pread, decode, random crop, resize to 224, uint8. Theirs: the same bytes from the same tar,
Pillow open, convert, the same crop, bicubic resize, uint8. First checks that the images agree, then interleaves.

    python bench/data.py [--width 500 --height 375 --rounds 12 --json FILE]
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from PIL import Image, __version__ as pillow_version
from torch import Tensor

from kiloword.config.recipes import AugmentConfig
from kiloword.data.images.augmentation import TrainTransform, random_box
from kiloword.data.images.decode import check_decoder
from kiloword.data.rows import Rows
from kiloword.data.tar import open_tars
from kiloword.randomness import Draw

SIZE = 224
AUGMENT = AugmentConfig(crop=0.4)
Read = Callable[[int], np.ndarray | Tensor]  # row -> uint8 image of SIZE x SIZE


def photo(rng: np.random.Generator, width: int, height: int) -> bytes:
    """A JPEG with the spectrum of a photo: noise whose amplitude falls with the frequency, some grain; quality 90."""
    total = np.zeros((height, width, 3), np.float32)
    for octave in range(1, 8):
        small = rng.normal(size=(2 + (height >> 8 - octave), 2 + (width >> 8 - octave), 3)).astype(np.float32)
        for channel in range(3):
            layer = Image.fromarray(small[..., channel]).resize((width, height), Image.Resampling.BICUBIC)
            total[..., channel] += np.asarray(layer) * 60 / 1.7**octave
    total += rng.normal(size=total.shape) * 3 + 128
    out = io.BytesIO()
    Image.fromarray(total.clip(0, 255).astype(np.uint8)).save(out, "JPEG", quality=90)
    return out.getvalue()


def write_shard(path: Path, count: int, width: int, height: int) -> float:
    """A tar of `count` photos with captions; returns their mean size in kB."""
    rng, total = np.random.default_rng(0), 0
    with tarfile.open(path, "w") as tar:
        for row in range(count):
            image = photo(rng, width, height)
            total += len(image)
            for suffix, content in (("jpg", image), ("txt", b"a photo that nobody took")):
                info = tarfile.TarInfo(f"{row:06d}.{suffix}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return total / count / 1000


def pillow_path(source: Rows) -> Read:
    """Decode whole, crop, resize by bicubic: torchvision's RandomResizedCrop on a Pillow image, in Pillow's calls."""

    def read(row: int) -> np.ndarray:
        image = Image.open(io.BytesIO(source.record(row).image)).convert("RGB")  # type: ignore[arg-type]
        left, top, wide, high = random_box(*image.size, AUGMENT, Draw(0, 0, row))
        width, height = image.size
        left, top = round(left * width), round(top * height)
        image = image.crop((left, top, left + round(wide * width), top + round(high * height)))
        return np.array(image.resize((SIZE, SIZE), Image.Resampling.BICUBIC))

    return read


def our_path(source: Rows, decoder: str) -> Read:
    transform = TrainTransform(SIZE, AUGMENT, decoder=decoder)  # type: ignore[arg-type]
    return lambda row: transform(source.record(row).image, Draw(0, 0, row))


def decoders() -> list[str]:
    """Those whose packages are installed."""
    found = []
    for decoder in ("pillow", "simplejpeg"):
        try:
            check_decoder(decoder)
            found.append(decoder)
        except ValueError as error:
            print(f"left out: {error}", file=sys.stderr)
    return found


def disagreement(reference: Read, other: Read, rows: int) -> float:
    """Mean absolute difference in levels of 255."""
    differences = [
        np.abs(reference(r).astype(int) - np.asarray(other(r)).transpose(1, 2, 0)).mean()  # type: ignore[union-attr]
        for r in range(rows)
    ]
    return float(np.mean(differences))


def measure(paths: dict[str, Read], rows: int, rounds: int) -> dict[str, list[float]]:
    """Images a second of processor time of every path in every round; their order turns, so that drift hits all."""
    rates: dict[str, list[float]] = {name: [] for name in paths}
    names = list(paths)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            start = time.process_time()
            for row in range(rows):
                paths[name](row)
            rates[name].append(rows / (time.process_time() - start))
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("width", 500), ("height", 375), ("images", 64), ("rounds", 12)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        kilobytes = write_shard(Path(folder) / "0.tar", args.images, args.width, args.height)
        source = open_tars("bench", [Path(folder) / "0.tar"])
        paths = {"pillow crop + bicubic": pillow_path(source)}
        paths |= {f"kiloword, {d}": our_path(source, d) for d in decoders()}
        reference, *ours = paths
        off = {name: disagreement(paths[reference], paths[name], 16) for name in ours}
        assert max(off.values()) < 2.5, f"the images differ: {off}"
        rates = measure(paths, args.images, args.rounds)
    base = np.array(rates[reference])
    result = {
        name: {
            "images_per_second": round(float(np.median(r)), 1),
            "ratio": round(float(np.median(np.array(r) / base)), 3),
            "mean_difference_in_levels": round(off.get(name, 0.0), 3),
        }
        for name, r in rates.items()
    }
    print(f"{args.images} JPEGs {args.width} x {args.height}, {kilobytes:.0f} kB, to {SIZE}; {args.rounds} rounds")
    print(f"{'':24}{'images/s':>12}{'ratio':>8}{'off by':>8}")
    for name, row in result.items():
        print(f"{name:24}{row['images_per_second']:12.0f}{row['ratio']:8.2f}{row['mean_difference_in_levels']:8.2f}")
    setting = {"width": args.width, "height": args.height, "kilobytes": round(kilobytes, 1), "rounds": args.rounds}
    versions = {"python": platform.python_version(), "torch": torch.__version__, "pillow": pillow_version}
    report = json.dumps({"setting": setting, "versions": versions, "paths": result}, indent=1)
    print(report)
    if args.json:
        args.json.write_text(report + "\n")


if __name__ == "__main__":
    main()
