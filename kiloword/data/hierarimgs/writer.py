"""Building of HierarImgs: selection of images and segments, drawing, writing."""

from __future__ import annotations

import io
import json
import math
import shutil
import tarfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

from kiloword.checkpoint.lock import NAME, Lock
from kiloword.config.settings import BaseSettings
from kiloword.data.hierarimgs.masks import RegionMask, decode_mask
from kiloword.data.images.decode import Pixels, decode
from kiloword.data.sources.sample import IMAGE_SUFFIXES, MAX_IMAGE, check_regular, read_whole
from kiloword.types import BadSample

CANVAS = {"white": 255, "grey": 128, "black": 0}
SHARD = 1000  # samples of a tar
Member = tuple[str, bytes]


@dataclass(frozen=True, kw_only=True)
class BuildOptions(BaseSettings):
    """Selection of images, and drawing of their segments."""

    segments: int = 3  # number of segments to paste, largest first; an image with fewer is skipped
    least: float = 5000.0  # pixels: an image is skipped if its smallest segment considered has no more
    considered: Literal["all", "pasted"] = "all"  # segments to which least applies: all of an image, or those pasted
    crowd: bool = False  # regions marked iscrowd are segments too
    canvas: Literal["white", "grey", "black"] = "white"  # what segments are pasted on


@dataclass
class BuildReport:
    """Numbers of images of an annotation file by outcome."""

    images: int = 0  # in the file
    few: int = 0  # with fewer segments than are pasted
    small: int = 0  # whose smallest segment considered is too small
    written: int = 0
    bad: Counter[str] = field(default_factory=Counter)  # reasons -> images

    def lines(self) -> Iterator[str]:
        """Lines for a terminal."""
        yield f"{self.written} of {self.images} images written"
        yield f"{self.few} have too few segments, {self.small} a segment that is too small"
        yield from (f"{n} skipped: {reason}" for reason, n in self.bad.most_common())


@dataclass(frozen=True)
class Segment:
    """One instance of an image."""

    id: Any
    area: float  # pixels, as annotated
    name: str  # of its category
    segmentation: Any


def build(annotations: Path, photos: Path, out: Path, options: BuildOptions | None = None) -> BuildReport:
    """Write a folder of webdataset tars with the levels of every image that qualifies.

    With n segments pasted there are levels 0 to n (the paper counts from 1): level k below n shows the k + 1 largest
    segments at their places on a blank canvas, level n is the photo. Each sample's json has `level`, `levels`, `group`
    (the image's id), `parent` (the key of the next more general level), `segments`, and `captions` made of the names of
    their categories. The folder appears when it is complete.

    Raises: ValueError when it exists, when the annotations are not COCO's json of instances, or no image qualifies.
    """
    options = options or BuildOptions()
    if options.segments < 1:
        raise ValueError(f"{options.segments} segments; expected at least 1")
    if not 0 <= options.least < math.inf:
        raise ValueError(f"least is {options.least}: expected a number of pixels, 0 or more.")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists: choose another OUT, or remove it.")
    images, segments = read_annotations(annotations, options.crowd)
    report = BuildReport(images=len(images))

    def samples() -> Iterator[list[list[Member]]]:
        """The levels of each image that qualifies, each as the members of a tar."""
        for image in images:
            if selected := select(segments[image["id"]], options, report):
                try:
                    levels = _levels(image, selected, photos, options)
                except BadSample as error:
                    report.bad[str(error)] += 1
                    continue
                report.written += 1
                yield levels

    new = out.with_name(f".{out.name}.tmp")
    lock = Lock(out, "writing", new)
    try:
        for path in new.iterdir():  # of a process that was killed
            if path.name != NAME:
                path.unlink()
        _write(new, samples())
        if not report.written:
            raise ValueError(f"{annotations}: no image qualifies: {'; '.join(report.lines())}.")
        if out.is_dir():
            out.rmdir()
        lock.release()
        new.replace(out)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return report


def read_annotations(path: Path, crowd: bool) -> tuple[list[dict[str, Any]], dict[Any, list[Segment]]]:
    """The images of a COCO json in order of id, and the segments of each, by id."""
    check_regular(path)
    try:
        with path.open("rb") as file:
            content = json.load(file)
        names = {one["id"]: one["name"] for one in content.get("categories", ())}
        images = sorted(content["images"], key=lambda image: image["id"])
        segments: dict[Any, list[Segment]] = {image["id"]: [] for image in images}
        for one in content["annotations"]:
            if one["image_id"] in segments and (crowd or not one.get("iscrowd", 0)):
                name = names.get(one.get("category_id"), "object")
                segments[one["image_id"]].append(Segment(one["id"], float(one["area"]), name, one["segmentation"]))
        assert len(segments) == len(images), "two images have one id"
        assert all(isinstance(name, str) for name in names.values()), "a category's name is no string"
        assert all(isinstance(image["file_name"], str) for image in images)
        assert all(isinstance(image[side], int) for image in images for side in ("height", "width"))
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError, RecursionError) as error:
        raise ValueError(
            f"{path} is not COCO's json of instances ({type(error).__name__}: {error}): expected `images` with id, "
            "file_name, height, width and `annotations` with id, image_id, area, segmentation."
        ) from None
    return images, segments


def select(segments: Sequence[Segment], options: BuildOptions, report: BuildReport) -> list[Segment]:
    """The segments to paste, the largest first; none if the image is skipped, which is counted."""
    ordered = sorted(segments, key=lambda segment: -segment.area)
    pasted = ordered[: options.segments]
    if len(pasted) < options.segments:
        report.few += 1
        return []
    if (ordered if options.considered == "all" else pasted)[-1].area <= options.least:
        report.small += 1
        return []
    return pasted


def _levels(
    image: dict[str, Any], selected: Sequence[Segment], folder: Path, options: BuildOptions
) -> list[list[Member]]:
    """Members of the samples of one image, general to specific."""
    path = folder / image["file_name"]
    try:
        photo = read_whole(path, "the image", MAX_IMAGE)
    except OSError as error:
        raise BadSample(f"cannot read the image: {error.strerror}") from None
    pixels = decode(photo)
    height, width = image["height"], image["width"]
    if pixels.shape[:2] != (height, width):
        raise BadSample("the image is not of the size that was annotated")
    masks = [decode_mask(segment.segmentation, height, width) for segment in selected]
    group = f"{image['id']:012d}" if isinstance(image["id"], int) else str(image["id"]).replace(".", "-")
    suffix = path.suffix.lower().lstrip(".")
    whole = (suffix, photo) if suffix in IMAGE_SUFFIXES else ("png", _png(pixels))
    parts = (paste(pixels, masks[: k + 1], CANVAS[options.canvas]) for k in range(len(selected)))
    drawn = [*(("png", _png(part)) for part in parts), whole]
    return [_members(group, k, selected[: k + 1], len(selected), *encoded) for k, encoded in enumerate(drawn)]


def paste(pixels: Pixels, masks: Sequence[RegionMask], canvas: int) -> Pixels:
    """The parts of a photo [H, W, 3] inside any of the masks [H, W], on a canvas of one grey."""
    shown = np.any(masks, axis=0)
    return np.where(shown[..., None], pixels, np.uint8(canvas))


def _members(group: str, level: int, shown: Sequence[Segment], last: int, suffix: str, image: bytes) -> list[Member]:
    key = f"{group}-{level}"
    info = {
        "captions": [" and ".join(segment.name for segment in shown)],
        "level": level,
        "levels": last + 1,
        "group": group,
        "parent": f"{group}-{level - 1}" if level else None,
        "segments": [{"id": s.id, "category": s.name, "area": s.area} for s in shown],
    }
    return [
        (f"{key}.{suffix}", image),
        (f"{key}.json", json.dumps(info, ensure_ascii=False).encode(errors="backslashreplace")),
    ]


def _png(pixels: Pixels) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def _write(folder: Path, samples: Iterator[list[list[Member]]]) -> None:
    """Tars of about SHARD samples; the levels of one image stay together, and the same input gives the same bytes."""
    shards, levels = 0, next(samples, None)
    while levels is not None:
        with tarfile.open(folder / f"{shards}.tar", "w") as tar:
            written = 0
            while levels is not None and written < SHARD:
                for name, data in (member for sample in levels for member in sample):
                    info = tarfile.TarInfo(name)
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
                written += len(levels)
                levels = next(samples, None)
        shards += 1
    (folder / "nshards.txt").write_text(f"{shards}\n", encoding="utf-8")
